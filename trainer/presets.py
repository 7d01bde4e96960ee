"""The two runs this project is measured on, as plain values: `tiny` and `smollm2`.

A preset fills the signed manifest (leases, sampling) and the learner's part of run.toml. The numbers of the learner
come from measurements: learning rate times staleness governs stability, the seed of the base matters more than either.

Not covered: writing a run directory (`trainer.init`), thresholds (`verifier/data/noise-<preset>.json`, measured).
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import UsageError
from protocol.manifest import LeasePolicy
from trainer.config import LearnerSection, SftSection


@dataclass(frozen=True)
class Preset:
    """Defaults of one kind of run."""

    name: str
    environment: str
    """Default environment, `name` or `name/option`."""
    steps: int
    storage_dtype: str
    max_new_tokens: int
    leases: LeasePolicy
    learner: LearnerSection
    sft: SftSection


TINY = Preset(
    name="tiny",
    environment="word/reverse",
    steps=150,
    storage_dtype="float32",
    max_new_tokens=9,
    leases=LeasePolicy(
        samples_per_task=8,
        tasks_per_step=16,
        # A whole batch: each lease has its own way through upload, job, verdict and ledger, and decoding 32 rows costs
        # nearly what decoding 128 does. Four leases a batch cost 165 ms of CPU a step more. A run that expects
        # droppers needs smaller ones: their evidence is counted in leases (docs/decisions/013-speed.md).
        tasks_per_lease=16,
        max_staleness=2,
        probation_first_rollouts=4,
        probation_accepted=32,
        lease_ms=60_000,
        heartbeat_ms=2_000,
        second_draw=0.02,
    ),
    learner=LearnerSection(learning_rate=3e-4),
    sft=SftSection(),
)

SMOLLM2 = Preset(
    name="smollm2",
    environment="addition",
    steps=30,
    storage_dtype="bfloat16",
    max_new_tokens=4,
    leases=LeasePolicy(
        samples_per_task=8,
        tasks_per_step=6,
        tasks_per_lease=2,
        max_staleness=2,
        probation_first_rollouts=4,
        probation_accepted=32,
        lease_ms=600_000,
        heartbeat_ms=5_000,
        second_draw=0.02,
    ),
    learner=LearnerSection(learning_rate=3e-5, checkpoint_every=10),
    sft=SftSection(steps=0),
)

PRESETS = {preset.name: preset for preset in (TINY, SMOLLM2)}

_SHORT = {"reverse": "word/reverse", "sort": "word/sort", "rotate": "word/rotate"}
"""Names people type for the word environment's options."""


def preset(name: str) -> Preset:
    """The preset called `name`. Raises UsageError when there is none."""
    if name not in PRESETS:
        raise UsageError(f"no preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def environment_names(text: str | None, default: str) -> list[str]:
    """`A,B` as full environment names; None gives the default.

    Raises:
        UsageError: an empty name.
    """
    names = [_SHORT.get(part.strip(), part.strip()) for part in (default if text is None else text).split(",")]
    if not all(names):
        raise UsageError(f"environments {text!r} has an empty name; give for example: word/reverse,word/sort")
    return list(dict.fromkeys(names))
