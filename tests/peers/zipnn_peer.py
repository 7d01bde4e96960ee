"""The `zipnn` package behind a pipe: runs in its own environment (`make bench-peers`) and imports nothing of ours.

python zipnn_peer.py FILE      FILE holds bfloat16 values; each line on stdin is answered by one on stdout

{"size": bytes compressed, "compress_s": CPU seconds, "decompress_s": CPU seconds, "same": it came back}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    import zipnn

    data = Path(sys.argv[1]).read_bytes()
    for _ in sys.stdin:
        handed = bytearray(data)  # it writes into what it is given
        start = time.process_time()
        packed = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1).compress(handed)
        middle = time.process_time()
        back = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1).decompress(packed)
        end = time.process_time()
        row = {"size": len(packed), "compress_s": middle - start, "decompress_s": end - middle, "same": back == data}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
