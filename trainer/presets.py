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
    environments: tuple[str, ...]
    """What a person can type for it: those whose answers this model's tokens and `max_new_tokens` have room for."""
    steps: int
    storage_dtype: str
    max_new_tokens: int
    leases: LeasePolicy
    learner: LearnerSection
    sft: SftSection


TINY = Preset(
    name="tiny",
    environment="word/reverse",
    environments=("reverse", "sort", "rotate"),
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
    environments=("addition",),
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

_FULL = {name: f"word/{name}" for name in ("reverse", "sort", "rotate")} | {"word": "word/reverse"}
"""Names people type for the word environment's options."""


def preset(name: str) -> Preset:
    """The preset called `name`. Raises UsageError when there is none."""
    if name not in PRESETS:
        raise UsageError(f"no preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def environment_names(text: str | None, base: Preset) -> list[str]:
    """`A,B` as full environment names; None gives the preset's own.

    Raises:
        UsageError: an empty name, or one that the preset does not have.
    """
    if text is None:
        return [base.environment]
    known = {_FULL.get(name, name) for name in base.environments}
    names = []
    for typed in (part.strip() for part in text.split(",")):
        full = _FULL.get(typed, typed)
        name, _, option = full.partition("/")
        sums = name == "addition" and option.isascii() and option.isdigit() and 1 <= int(option[:9]) <= 1_000_000
        if full not in known and not (name in known and sums):  # addition/20: summands up to 20
            what = (
                f"there is no environment {typed!r} for {base.name}" if typed else f"environments {text!r}: empty name"
            )
            raise UsageError(f"{what}; choose from {', '.join(base.environments)}")
        names.append(full)
    return list(dict.fromkeys(names))
