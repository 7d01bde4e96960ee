"""Coverage-guided fuzzing of what strangers' bytes meet first: a decoder answers or raises its own error, nothing else.

    python tests/fuzz_decoders.py DECODER CORPUS [libFuzzer's options, such as -runs=1000000]

    proof        a TOPLOC chunk of either profile; both ways to check its form agree
    submission   a `Submission` record; what was accepted encodes and decodes to the same
    zstd         an upload and the length that its intent names
    envelope     an envelope; what was accepted is its own bytes, and nobody signed it

CORPUS is a directory that is filled: honest examples first, then what reached new code. libFuzzer ends the process with
a code other than 0, and leaves the input in the working directory, when anything else is raised, when one input takes
longer than `-timeout` or the process more memory than `-rss_limit_mb`.

Needs the extra `fuzz` (atheris: CPython on Linux, x86-64). `make soak` runs `tests/test_fuzz_decoders.py`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["protocol", "verifier"], enable_loader_override=False):
    import numpy as np
    import zstandard

    from protocol import codec, envelope
    from protocol.errors import DecodeError, EnvelopeError
    from protocol.identity import Identity
    from protocol.records import FINISH_LENGTH, Rollout, Submission, UploadIntent
    from verifier import toploc
    from verifier.errors import ProofError
    from verifier.judge import decompress_submission

RUN = bytes(32)
SHAPES = [(1, 1), (1, 5), (3, 96), (32, 96), (32, 4096)]
"""Rows and hidden sizes of chunks: 1, 5 and 128 points, one modulus and many."""


def proof(data: bytes) -> None:
    if not data:
        return
    limbs = 1 + (data[0] & 1)
    rows, hidden = SHAPES[(data[0] >> 1) % len(SHAPES)]
    chunk = data[1:]
    formed = toploc.are_well_formed([[chunk]], [rows], hidden, limbs)
    try:
        modulus, coefficients = toploc.parse_proof(chunk, rows * hidden, limbs)
    except ProofError:
        assert not formed
        return
    assert formed and 32769 <= modulus <= 65497 and int(coefficients.max()) < 65497


def submission(data: bytes) -> None:
    try:
        record = codec.decode(Submission, data)
    except DecodeError:
        return
    assert codec.decode(Submission, codec.encode(record)) == record


def zstd(data: bytes) -> None:
    length = int.from_bytes(data[:3], "big")
    try:
        raw = decompress_submission(data[3:], length)
    except DecodeError:
        return
    assert len(raw) == length


def an_envelope(data: bytes) -> None:
    try:
        parsed = envelope.parse(data)
    except DecodeError:
        return
    assert parsed.raw == data
    try:
        envelope.open_envelope(data, run=RUN, now=1000)
    except (DecodeError, EnvelopeError):
        return
    assert data == _SEALED, "a signature nobody made"


_SEALED = envelope.seal(
    Identity.from_seed(bytes(32)),
    "upload.intent",
    UploadIntent(bytes(16), 5, 5, bytes(32)),
    run=RUN,
    sequence=1,
    issued_at=1000,
).raw


def _submission() -> bytes:
    states_NH = np.ones((40, 4), dtype=np.float32)
    proofs = tuple(toploc.build_proofs(states_NH))
    floats = np.zeros(40, dtype="<f4").tobytes()
    rollouts = tuple(Rollout(7, i, bytes(160), floats, FINISH_LENGTH, 0.5, proofs) for i in range(2))
    return codec.encode(Submission(bytes(16), "fuzz", rollouts))


def _proofs() -> list[bytes]:
    made = []
    for number, (rows, hidden) in enumerate(SHAPES):
        for limbs in (1, 2):
            states_NH = np.ones((rows, hidden), dtype=np.float32)
            made.append(bytes([number << 1 | limbs - 1]) + toploc.build_proofs(states_NH, limbs)[0])
    return made


def _uploads() -> list[bytes]:
    return [
        len(raw).to_bytes(3, "big") + zstandard.ZstdCompressor().compress(raw)
        for raw in (b"", b"headwater" * 100, _submission())
    ]


DECODERS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "proof": (proof, _proofs),
    "submission": (submission, lambda: [_submission()]),
    "zstd": (zstd, _uploads),
    "envelope": (an_envelope, lambda: [_SEALED]),
}


def main() -> None:
    name, corpus = sys.argv[1], Path(sys.argv[2])
    decoder, examples = DECODERS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for example in examples():
        decoder(example)
        (corpus / hashlib.sha256(example).hexdigest()).write_bytes(example)
    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], decoder)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
