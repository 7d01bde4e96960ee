"""The process that checks validators for the coordinator: judges drawn rollouts, one request after another.

    stdin    a JSON object a line (`Request`)        stdout   one a line: `{"ready": true}`, then an `Answer` each

It reads the run directory and nothing else: manifest chain, uploads and details against the hashes it is told, the
published weights, verified while they are copied into `scratch`, one policy at a time. What uploads hold is hostile, so
it runs in a process of its own, with the lowest priority, one thread and a bound on its memory; it ends with its
parent.

Not covered: what is checked when (`spot_checks`), keeping it alive (`spot_process`), what a check is (`verifier.spot`).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from blake3 import blake3

from environments.base import Environment
from environments.registry import load
from protocol import codec
from protocol.chain import Chain
from protocol.errors import HeadwaterError, LedgerError, ReasonCode
from protocol.files import read_at_most
from protocol.lifeline import die_with_parent
from protocol.limits import MAX_ATTACHMENT_BYTES, MAX_SUBMISSION_BYTES, MIB
from protocol.manifest import Run
from protocol.records import INCONCLUSIVE, Lease, Outcome, VerdictDetails
from protocol.run_files import load_chain
from shardcast.archive import open_published
from trainer.spot_request import Answer, Request, Said
from verifier import compiled, spot
from verifier.allocator import keep_freed_memory
from verifier.errors import VerifierError
from verifier.model import PolicyModel
from verifier.profiles import load_to_verify

_WORKING_MIB = 2048 + compiled.MEMORY_MIB
"""Beside four times the weights (a policy, the next one, both as files that are mapped): one prefill's states and
logits, the upload, compiled loops, what the libraries reserve. Less makes checks of long rollouts fail, which counts as
left out."""


class Checker:
    """Answers requests about one run directory."""

    def __init__(self, run_dir: Path, scratch: Path) -> None:
        self._run_dir = run_dir
        self._scratch = scratch
        self._chain: Chain | None = None
        self._policy: PolicyModel | None = None
        self._environments: dict[bytes, Environment] = {}

    def answer(self, request: Request) -> Answer:
        """Judge what is asked about. Whatever can't be read or had here is `failed`, with the reason."""
        try:
            return self._answer(request)
        except (HeadwaterError, OSError, RuntimeError, MemoryError, ValueError, ArithmeticError) as exc:
            return Answer(failed=f"{type(exc).__name__}: {exc}"[:400])

    def _answer(self, request: Request) -> Answer:
        lease = codec.decode(Lease, request.lease)
        run = self._rules(lease.manifest)
        blob = self._read(f"{lease.lease_id.hex()}.hws", MAX_SUBMISSION_BYTES, request.digest)
        policy = self._load(run, lease)
        environment = self._environment(run, lease.environment)
        upload = spot.Upload(run, lease, blob, request.raw_length, policy, environment)
        words = [self._word(lease, said) for said in request.said]
        confirmed = request.confirm
        found = spot.confirm(upload, request.positions, words) if confirmed else spot.look(upload, request.positions)
        against = [one for word in words for one in spot.contradictions(word, found, upload)]
        if against and not confirmed:
            return Answer(suspicious=True)
        undecided = sum(found[position].outcome.outcome == INCONCLUSIVE for position in request.positions)
        return Answer(decided=len(request.positions) - undecided, evidence=tuple(against))

    def _rules(self, digest: bytes) -> Run:
        """The run under the manifest that a lease names, which may be newer than what was read last."""
        if self._chain is None or not self._chain.holds(digest):
            self._chain = load_chain(self._run_dir)
        return self._chain.at(digest)

    def _load(self, run: Run, lease: Lease) -> PolicyModel:
        if self._policy is not None and self._policy.root == lease.root:
            return self._policy
        key = lease.epoch, lease.step
        with tempfile.TemporaryDirectory(dir=self._scratch) as into:
            archive = open_published(self._run_dir, run, {key: lease.root}, only={key})
            published = archive.materialise(*key, Path(into))
            if published.root != lease.root:
                raise VerifierError("the published policy is not the one that the lease names")
            if self._policy is None:
                profile = run.manifest.profile
                self._policy = load_to_verify(published.directory, profile, root=published.root)
            else:
                self._policy.load_weights(published.directory, root=published.root)
        return self._policy

    def _environment(self, run: Run, digest: bytes) -> Environment:
        if digest not in self._environments:
            spec = next((one for one in run.manifest.environments if one.digest == digest), None)
            if spec is None:
                raise VerifierError("the lease names an environment that the manifest does not have")
            self._environments[digest] = load(spec)
        return self._environments[digest]

    def _word(self, lease: Lease, said: Said) -> spot.Word:
        outcomes = [Outcome(outcome, reason) for outcome, reason in zip(said.outcomes, said.reasons, strict=True)]
        return spot.Word(said.verdict, outcomes, self._details(lease, said).rollouts)

    def _details(self, lease: Lease, said: Said) -> VerdictDetails:
        name = f"{lease.lease_id.hex()}.{said.round}.hwv"
        return codec.decode(VerdictDetails, self._read(name, MAX_ATTACHMENT_BYTES, said.details))

    def _read(self, name: str, limit: int, digest: bytes) -> bytes:
        data = read_at_most(self._run_dir / "submissions" / name, limit + 1)
        if len(data) > limit or blake3(data).digest() != digest:
            raise LedgerError(f"{name} is not the file that the ledger names", ReasonCode.HASH_MISMATCH)
        return data


def limit_memory(weights: Path) -> None:
    """Bound what this process may allocate from here on."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + _WORKING_MIB * MIB + 4 * (weights.stat().st_size if weights.exists() else 0)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(argv: list[str]) -> int:
    """`python -m trainer.spot_worker RUN SCRATCH`. Ends with exit code 0 when its stdin does."""
    die_with_parent()
    os.nice(19)
    run_dir, scratch = Path(argv[0]), Path(argv[1])
    shutil.rmtree(scratch, ignore_errors=True)  # a killed one left its weights there
    scratch.mkdir(parents=True)
    torch.set_num_threads(1)
    keep_freed_memory()
    limit_memory(run_dir / "model" / "model.safetensors")
    checker = Checker(run_dir, scratch)
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(checker.answer(Request.from_json(line)).to_json() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
