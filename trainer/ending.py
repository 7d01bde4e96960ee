"""The last words of a demo: what happened, what became of each dishonest node, what to type next.

Not covered: the numbers themselves (`trainer.summary`), the live screen (`trainer.view`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from protocol.commands import several
from trainer.spans import Line, length, size
from trainer.terminal import dressed, is_terminal, speaks_unicode, wants_colour

_LABEL_CELLS = 13


def print_summary(summary: Mapping[str, Any], run_dir: Path, out: TextIO | None = None) -> None:
    """Say in ten seconds' reading what the run showed, and name three commands to go on with."""
    _print(summary_lines(summary, display_path(run_dir)), out)


def print_interrupted(run_dir: Path, step: int, steps: int, out: TextIO | None = None) -> None:
    """Say what an interrupted demo leaves and how it goes on."""
    _print(interrupted_lines(display_path(run_dir), step, steps), out)


def summary_lines(summary: Mapping[str, Any], run: str) -> list[Line]:
    """The summary of a demo that ran to its end; `run` as a person types it."""
    fates = summary["cheats"]
    caught = [kind for kind, fate in fates.items() if fate["node_state"] == "suspended"]
    rejected = int(summary["honest_rejected"])
    lines: list[Line] = [[]]
    first, last = float(summary["reward_first"]), float(summary["reward_last"])
    took = f"{several(int(summary['steps']), 'step')}, {length(float(summary['seconds']))}"
    lines.append(_fact("reward", [(f"{first:.2f} -> ", ""), (f"{last:.2f}", "good"), (f" in {took}", "")]))
    judged = f"{int(summary['honest_verified']):,} rollouts checked, "
    none = "none rejected" if not rejected else f"{rejected} REJECTED: that is a bug, please report it"
    lines.append(_fact("honest nodes", [(judged, ""), (none, "good" if not rejected else "bad")]))
    if fates:
        words = f"{len(caught)} of {len(fates)} caught and suspended"
        lines.append(_fact("dishonest", [(words, "good" if len(caught) == len(fates) else "bad")]))
    false = sum(int(fate.get("identical_rejected", 0)) for fate in fates.values())
    if false:
        words = f"{false} rejected that equal what the lease forces: a bug, please report it"
        lines.append(_fact("", [(words, "bad")]))
    width = max((len(kind) for kind in fates), default=0)
    for kind, fate in fates.items():
        out = fate["node_state"] == "suspended"
        lines.append([("  ✗ " if out else "  ● ", "bad"), (f"{kind:<{width}}  ", "bad"), (_fate(fate), "")])
    sent, peak = size(int(summary["bytes_sent"])), float(summary["peak_pss_mib"]) / 1024
    full = int(summary["bytes_full"])
    share = f" ({int(summary['bytes_sent']) / full:.2f} of full)" if full else ""
    lines.append(_fact("cost", [(f"{sent} of weights sent{share}, {peak:.1f} GiB of memory at peak", "")]))
    left = {"open": summary["rollouts_pending"], "undecided": summary["rollouts_inconclusive"]}
    if any(left.values()):
        lines.append(
            _fact("left", [(", ".join(f"{several(n, 'rollout')} {word}" for word, n in left.items() if n), "")])
        )
    lines += [[], [("Try next:", "bold")]]
    return lines + _commands(
        [
            (f"verifier audit {run}", "check every claim of this run again, from its files alone"),
            ("verifier explain token-not-forced", "what a rejection means, and what an honest operator should do"),
            (f"trainer status {run}", "every process and node, and what became of it"),
        ]
    )


def interrupted_lines(run: str, step: int, steps: int) -> list[Line]:
    """What an interrupted demo leaves; `run` as a person types it."""
    return [
        [],
        [("Interrupted", "bold"), (f" at step {step} of {steps}. Every process has ended; what was done is kept.", "")],
        [],
        [("Go on, or look at it:", "bold")],
        *_commands(
            [
                (f"trainer demo --resume {run}", "the same processes again, from where they were"),
                (f"verifier audit {run}", "check it from its files alone: the archive so far is whole"),
                (f"trainer status {run}", "where it stands, and who had become what"),
            ]
        ),
    ]


def _fact(label: str, spans: Sequence[tuple[str, str]]) -> Line:
    return [(f"{label:<{_LABEL_CELLS}}", "bold"), *spans]


def _commands(commands: Sequence[tuple[str, str]]) -> list[Line]:
    lines: list[Line] = []
    for command, about in commands:
        lines += [[(f"  {command}", "accent")], [(f"      {about}", "dim")]]
    return lines


def _fate(fate: Mapping[str, Any]) -> str:
    """What became of one dishonest node, in one line of at most 60 characters."""
    state = fate["node_state"]
    end = "" if state == "suspended" else f"; the node is {state}"
    if not fate["submitted"] and not fate["dishonest"]:
        return f"sent nothing{end}"
    words = f"{fate['caught']} of {fate['dishonest']} dishonest rollouts caught"
    after = fate["first_caught_after_tokens"]
    if after is not None:
        words += f", {'at once' if not after else f'after {after} tokens'}"
    return words + end


def _print(lines: Sequence[Line], out: TextIO | None) -> None:
    """Print whole lines: a command that is broken in two can't be copied."""
    out = out if out is not None else sys.stdout
    colour = is_terminal(out)
    for line in lines:
        if colour:
            text = dressed(line, colour=wants_colour(), unicode=speaks_unicode(out))
        else:
            text = dressed([(words, "") for words, _ in line], colour=False, unicode=speaks_unicode(out))
        out.write(text.rstrip() + "\n")
    out.flush()


def display_path(path: Path) -> str:
    """A path as a person would type it from here: relative if it lies below, quoted if it needs to be."""
    try:
        path = path.relative_to(Path.cwd())
    except ValueError:
        pass
    return shlex.quote(str(path))
