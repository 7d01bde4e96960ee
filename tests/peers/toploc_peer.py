"""The `toploc` package behind a pipe: runs in its own environment (`make bench-peers`) and imports nothing of ours.

Frames both ways: u32 length of a JSON header, the header, then the bytes it announces under "sizes".

    {"op": "build", "rows": R, "hidden": H, "sizes": [2RH]}              bfloat16 bits, little-endian
        -> {"cpu_s": CPU seconds, "sizes": [...]}                        one proof per 32 rows
    {"op": "verify", "path": "list" | "tensor", "rows", "hidden", "sizes": [2RH, ...]}     bits, then the proofs
        -> {"cpu_s": CPU seconds, "stats": [[exponents, mean, median], ...]}
    {"op": "about"} -> {"toploc": version, "torch": version}

A partial last chunk of fewer than 128 values is asked for with topk = its values: the package has no rule for it.

    python toploc_peer.py [CPU]        on that CPU only, if one is named
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from importlib import metadata
from typing import Any

CHUNK = 32
TOPK = 128


def main() -> None:
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})  # before the package counts the processors it may use
    import toploc
    import torch

    torch.set_num_threads(1)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer

    def reply(header: dict[str, Any], parts: list[bytes]) -> None:
        text = json.dumps({**header, "sizes": [len(part) for part in parts]}).encode()
        stdout.write(struct.pack(">I", len(text)) + text + b"".join(parts))
        stdout.flush()

    while size := stdin.read(4):
        request = json.loads(stdin.read(struct.unpack(">I", size)[0]))
        parts = [stdin.read(length) for length in request.get("sizes", [])]
        if request["op"] == "about":
            reply({"toploc": metadata.version("toploc"), "torch": torch.__version__}, [])
            continue
        rows, hidden = request["rows"], request["hidden"]
        states_NH = torch.frombuffer(bytearray(parts[0]), dtype=torch.bfloat16).reshape(rows, hidden)
        topk = min(TOPK, rows * hidden)
        if request["op"] == "build":
            # as an engine hands states over: one vector a token
            per_token = list(states_NH)
            start = time.process_time()
            proofs = toploc.build_proofs_bytes(per_token, CHUNK, topk, skip_prefill=True)
            reply({"cpu_s": time.process_time() - start}, proofs)
        else:
            activations = states_NH if request["path"] == "tensor" else list(states_NH)
            start = time.process_time()
            results = toploc.verify_proofs_bytes(activations, parts[1:], CHUNK, topk, skip_prefill=True)
            cpu_s = time.process_time() - start
            stats = [[r.exp_mismatches, r.mant_err_mean, r.mant_err_median] for r in results]
            reply({"cpu_s": cpu_s, "stats": stats}, [])


if __name__ == "__main__":
    main()
