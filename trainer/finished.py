"""What is said of a run that is over: by `trainer serve` and `trainer learn`, when somebody starts them once more.

Not covered: what a finished run looks like (`trainer.screen`), what it showed (`trainer.summary`).
"""

from __future__ import annotations

import json
from pathlib import Path

from trainer.ending import display_path


def said(run_dir: Path, steps: int, verb: str) -> list[str]:
    """That the run is finished and there is nothing left to `verb`, where its weights lie, and how to check it."""
    weights, place = newest_weights(run_dir), display_path(run_dir)
    told = [f"the run is finished: step {steps} of {steps} is done, and there is nothing left to {verb}"]
    if weights is not None:
        told.append(f"its weights: {display_path(weights)}")
    return [*told, f"check it: verifier audit {place}", f"look at it: trainer status {place}"]


def newest_weights(run_dir: Path) -> Path | None:
    """The weights of the newest whole checkpoint that still lies in the run directory."""
    for record in sorted((run_dir / "checkpoints").glob("step-*/checkpoint.json"), reverse=True):
        weights = record.with_name("model.safetensors")
        if weights.is_file():
            return weights
    return None


def is_known(run_dir: Path) -> bool:
    """Whether status.json says that the run is finished: for words only, the ledger is what counts."""
    try:
        status = json.loads((run_dir / "status.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and status.get("phase") == "finished"
