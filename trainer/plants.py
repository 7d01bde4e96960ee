"""Which members are phantoms, which of their leases are plants, and what a plant's answer is (`protocol.phantoms`).

    a phantom's work           is judged, decided, rejected, leased again and trained like anybody's
    its plants                 enter no batch, whoever accepts them (`window.Window.is_plant`)
    every verdict on its work  is compared with the coordinator's own check, all of it (`spot_checks`)
    its key                    gets no lease once its period's secret is about to be shown

All follows from the ledger and the coordinator's secret: nothing is kept, a restart changes nothing.

Not covered: working as a phantom (`node.plant`), what follows from a contradicted verdict (`protocol.distrust`).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from protocol import codec, draws, phantoms
from protocol.engine import GenerateOutput
from protocol.errors import ProtocolError, UsageError
from protocol.evidence import VerdictEvidence
from protocol.manifest import RunManifest
from protocol.phantoms import Phantom
from protocol.records import Lease, LedgerEntry, Rollout
from protocol.state import LeaseState, RunState, SubmissionState
from trainer.trainable import LOGPROB_MIN

A = TypeVar("A", GenerateOutput, Rollout)


@dataclass
class Plants:
    """The phantoms of one run. `observe` must be called once for each entry, after `RunState.apply`."""

    state: RunState
    secret: bytes = field(repr=False)
    """The coordinator's own."""
    submissions: list[SubmissionState] = field(default_factory=list)
    """Of phantoms, oldest first."""
    altered: int = 0
    """Of those, answers to plants."""
    contradicted: int = 0
    """Validators whose trust ended with a verdict on one of them."""
    _keys: dict[bytes, Phantom] = field(default_factory=dict, repr=False)
    _periods: int = 0
    """Periods whose keys are in `_keys`."""

    def phantom(self, key: bytes) -> Phantom | None:
        """Which phantom an identity key is; None for everybody else."""
        while self._periods < len(self.state.periods) + phantoms.AHEAD:
            secret, period = self._secret(self._periods), self._periods
            self._keys.update({found: Phantom(period, number) for found, number in phantoms.keys(secret).items()})
            self._periods += 1
        return self._keys.get(key)

    def is_plant(self, held: LeaseState) -> bool:
        """Whether a lease went to a phantom that alters its answer."""
        found = self.phantom(held.owner)
        return found is not None and phantoms.is_plant(self._secret(found.period), found.number, held.lease_id)

    def is_over(self, key: bytes) -> bool:
        """Whether this is a phantom whose secret is shown, or soon will be."""
        found, periods = self.phantom(key), self.state.periods
        if found is None or not periods:
            return False
        return phantoms.over(found.period, len(periods) - 1, periods[-1].submissions)

    def _secret(self, period: int) -> bytes:
        return draws.period_secret(self.secret, period)

    def observe(self, index: int, entry: LedgerEntry) -> None:
        """Follow one entry that the state has already applied."""
        if entry.event == "submission":
            submission = self.state.submissions.get(index)
            if submission is not None and self.phantom(submission.owner) is not None:
                self.submissions.append(submission)
                self.altered += self.is_plant(self.state.leases[submission.lease_id])
        elif entry.event == "evidence.verdict":
            try:
                verdict = codec.decode(VerdictEvidence, entry.body).verdict
            except ProtocolError:
                return  # the state refused it
            self.contradicted += any(
                held.index == verdict for one in self.submissions for held in one.verdicts.values()
            )

    def counts(self) -> dict[str, int]:
        """For status.json: the newest draw period, submissions in it, those of phantoms, those of them that are plants,
        verdicts on all of them, and validators whose trust ended with one of those."""
        periods = self.state.periods
        return {
            "period": len(periods) - 1,
            "entered": periods[-1].submissions if periods else 0,
            "sent": len(self.submissions),
            "altered": self.altered,
            "judged": sum(len(one.verdicts) for one in self.submissions),
            "contradicted": self.contradicted,
        }


# --- who joins next ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """What status.json says of a run, as far as it matters to whoever runs the phantoms."""

    finished: bool
    period: int
    """The newest draw period; -1 before the first."""
    entered: int
    """Submissions in it."""
    nodes: Mapping[bytes, str]
    """Key -> state."""

    @staticmethod
    def read(raw: bytes) -> Picture | None:
        """None for what holds no such thing."""
        try:
            found = json.loads(raw)
            nodes = {bytes.fromhex(node["key"]): str(node["state"]) for node in found["nodes"]}
            plants = found["plants"]
            return Picture(found["phase"] == "finished", int(plants["period"]), int(plants["entered"]), nodes)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return None


def next_phantom(own: bytes, picture: Picture) -> Phantom | None:
    """Which phantom works now: one that is a member and may go on, else one of those that may join, drawn. None while
    there is none.

    Args:
        own: the coordinator's secret.
    """
    if picture.period < 0 or picture.finished:
        return None
    fresh = []
    for period in range(picture.period, picture.period + phantoms.AHEAD + 1):
        if phantoms.over(period, picture.period, picture.entered):
            continue
        for key, number in phantoms.keys(draws.period_secret(own, period)).items():
            state = picture.nodes.get(key)
            if state is None:
                fresh.append(Phantom(period, number))
            elif state != "suspended":
                return Phantom(period, number)
    if not fresh:
        return None
    drawn = draws.keyed(own, "next phantom", picture.period, len(picture.nodes))
    return fresh[int.from_bytes(drawn[:8], "big") % len(fresh)]


def pause_s(own: bytes, phantom: Phantom, longest_s: float) -> float:
    """Seconds until a phantom joins: strangers don't come the moment another one was suspended."""
    drawn = draws.keyed(own, "pause", phantom.period, phantom.number)
    return longest_s * int.from_bytes(drawn[:8], "big") / 2**64


def name_of(own: bytes, phantom: Phantom) -> str:
    """What others see: like the host name that a container gets, which strangers' nodes often have."""
    return draws.keyed(own, "name", phantom.period, phantom.number)[:6].hex()


def read_secret(state_dir: Path) -> bytes:
    """The coordinator's secret. Raises UsageError: it is not there, others may read it, or it is damaged."""
    path = state_dir / "draws.secret"
    try:
        mode, secret = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as exc:
        raise UsageError(
            f"{path} can't be read ({exc.strerror}); phantoms run beside the coordinator, as its user, once it was "
            "started: trainer serve"
        ) from exc
    if mode & 0o077:
        raise UsageError(f"{path} can be read by others (mode {mode:o}); its owner must run: chmod 600 {path}")
    if len(secret) != 32:
        raise UsageError(f"{path} is damaged; the operator must restore the state folder from a backup")
    return secret


# --- what a plant's answer is -----------------------------------------------------------------------------------------

SHIFT_LEAST, SHIFT_MOST = 4.0, 16.0
"""Times the bound by which an altered log-probability is off. Less than twice could be honest noise of two machines,
and nobody would be accused of it; more is found by who looks for gross lies only."""


_FEWEST_TOKENS = 3
"""Of rollouts whose chunks are exchanged. Of fewer, the first state is half of it or more, and the same for a task."""


@dataclass(frozen=True)
class _Draw:
    """What the secret says of one plant."""

    secret: bytes
    lease_id: bytes

    def below(self, what: str, bound: int) -> int:
        """0 to `bound` - 1."""
        return int.from_bytes(draws.keyed(self.secret, "alter", self.lease_id, what.encode())[:16], "big") % bound


def spoil(secret: bytes, lease: Lease, answers: Sequence[A], manifest: RunManifest) -> list[A]:
    """The answers to a lease with one thing altered: a token, a log-probability, or a chunk of a proof.

    Args:
        secret: of the phantom's period.
        answers: honest, one per rollout, task-major.
        manifest: the one that the lease names.
    """
    draw = _Draw(secret, lease.lease_id)
    at, first = draw.below("rollout", len(answers)), draw.below("kind", 3)
    bound = manifest.thresholds.logprob if manifest.bf16 is None else manifest.bf16.logprob
    tried: list[Callable[[], A | None]] = [
        lambda: _other_token(answers, at, draw, manifest.sampling.stop_tokens),
        lambda: _other_logprob(answers[at], draw, bound),
        lambda: _other_proof(answers, at, draw, lease.samples),
    ]
    found = (tried[(first + i) % 3]() for i in range(3))
    altered = next((one for one in found if one is not None), answers[at])  # of an empty answer nothing can be
    return [altered if i == at else answer for i, answer in enumerate(answers)]


def _other_token(answers: Sequence[A], at: int, draw: _Draw, stop: Collection[int]) -> A | None:
    """One token but the last is another that these answers hold; None when there is none. A model must run to tell."""
    tokens = np.frombuffer(answers[at].tokens, "<u4").copy()
    if len(tokens) < 2:
        return None
    place = draw.below("place", len(tokens) - 1)
    used = np.unique(np.frombuffer(b"".join(answer.tokens for answer in answers), "<u4"))
    others = [int(token) for token in used if token != tokens[place] and token not in stop]
    if not others:
        return None
    tokens[place] = others[draw.below("token", len(others))]
    return replace(answers[at], tokens=tokens.tobytes())


def _other_logprob(answer: A, draw: _Draw, bound: float) -> A | None:
    """One log-probability is off by some times what honest machines may be; None when there is none."""
    logprobs = np.frombuffer(answer.logprobs, "<f4").copy()
    if not len(logprobs):
        return None
    place = draw.below("place", len(logprobs))
    share = draw.below("shift", 1 << 16) / (1 << 16)
    shift = np.float32(bound * (SHIFT_LEAST + share * (SHIFT_MOST - SHIFT_LEAST)))
    lower = logprobs[place] - shift
    logprobs[place] = lower if lower >= LOGPROB_MIN else logprobs[place] + shift
    return replace(answer, logprobs=logprobs.tobytes())


def _other_proof(answers: Sequence[A], at: int, draw: _Draw, samples: int) -> A | None:
    """One chunk is that of another rollout, of another task if there is one; None when there is none to take it from.

    It begins with another token, so that every state but its first is another: chunks of rollouts that are alike differ
    by rounding only, and would pass.
    """
    own = answers[at]
    if len(own.tokens) < 4 * _FEWEST_TOKENS or not own.proofs:
        return None
    chunk = draw.below("chunk", len(own.proofs))
    donors = [
        i
        for i, other in enumerate(answers)
        if len(other.proofs) > chunk
        and len(other.tokens) >= 4 * _FEWEST_TOKENS
        and other.tokens[:4] != own.tokens[:4]
        and other.proofs[chunk] != own.proofs[chunk]
    ]
    far = [i for i in donors if i // samples != at // samples] or donors
    if not far:
        return None
    proofs = list(own.proofs)
    proofs[chunk] = answers[far[draw.below("donor", len(far))]].proofs[chunk]
    return replace(own, proofs=tuple(proofs))
