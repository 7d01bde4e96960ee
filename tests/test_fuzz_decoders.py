"""A million inputs for each decoder that strangers' bytes meet first, led by coverage (`tests/fuzz_decoders.py`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parent / "fuzz_decoders.py"
INPUTS = 1_000_000
MEMORY_MIB = 1536
"""Of the process with torch loaded: about 400 before the first input."""
LONGEST = {"proof": 700, "submission": 4096, "zstd": 4096, "envelope": 700}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("decoder", list(LONGEST))
def test_a_million_inputs_raise_nothing_but_the_decoder_s_own_error(decoder: str, tmp_path: Path) -> None:
    options = [f"-runs={INPUTS}", f"-max_len={LONGEST[decoder]}", "-timeout=5", f"-rss_limit_mb={MEMORY_MIB}"]
    options += ["-seed=1", "-keep_seed=1"]
    command = [sys.executable, str(FUZZER), decoder, str(tmp_path / "corpus"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = re.search(r"Done (\d+) runs", done.stderr)
    assert ended and int(ended[1]) >= INPUTS, done.stderr[-4000:]
    print(decoder, *[line for line in done.stderr.splitlines() if line.startswith(("#", "Done"))][-2:], sep="\n")
