"""status.json: where a run stands, about once a second, for people and views. No decision reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.commands import os_error_in_words, printable
from protocol.errors import UsageError
from protocol.identity import peer_id_text
from protocol.state import NodeState
from shardcast.heads import replace_file
from trainer.book import Book
from trainer.members import Members
from trainer.news import News, in_words


@dataclass
class Staleness:
    """Mean of (batch step - policy step) over all rollouts in batches; one number, queue time included."""

    total: int = 0
    count: int = 0

    def add(self, staleness: int, rollouts: int) -> None:
        self.total += staleness * rollouts
        self.count += rollouts

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class StatusWriter:
    """Writes RUN/status.json."""

    path: Path
    book: Book
    members: Members
    news: News
    counters: Callable[[], tuple[int, int]]
    """(HTTP fallbacks, host restarts) so far."""
    staleness: Staleness = field(default_factory=Staleness)
    _unwritable: bool = False

    def write(self, phase: str) -> None:
        """Replace status.json with the present. A disk that refuses is said once; it never ends the coordinator."""
        try:
            replace_file(self.path, json.dumps(self.picture(phase)).encode())
            self._unwritable = False
        except OSError as exc:
            if not self._unwritable:
                self._unwritable = True
                self.news.say(f"{self.path} is not up to date: {os_error_in_words(exc)}")

    def picture(self, phase: str) -> dict[str, Any]:
        state, window = self.book.state, self.book.window
        counts = dict(window.settled)
        pending = sum(
            1
            for index in window.undecided
            for outcome in state.submissions[index].outcomes
            if outcome.status == "pending"
        )
        fallbacks, restarts = self.counters()
        return {
            "run": self.book.run.id.hex(),
            "time": time.time(),
            "step": 0 if state.newest_policy is None else state.newest_policy.step,
            "steps": self.book.run.manifest.steps,
            "phase": phase,
            "nodes": [self._node(node) for node in state.nodes.values()],
            "rollouts": {
                "accepted": counts.get("accepted", 0),
                "rejected": counts.get("rejected", 0),
                "inconclusive": counts.get("inconclusive", 0),
                "pending": pending,
                "discarded": counts.get("discarded", 0),
            },
            "batches": window.batches,
            "leases_open": len(window.open),
            "ledger_entries": self.book.ledger.size,
            "ledger_problems": len(state.problems),
            "http_fallbacks": fallbacks,
            "host_restarts": restarts,
            "staleness_mean": round(self.staleness.mean, 4),
            "recent_events": list(self.news.events),
        }

    def _node(self, node: NodeState) -> dict[str, Any]:
        session = self.members.sessions.get(node.key)
        heard = None if session is None else round(self.members.monotonic() - session.heard, 1)
        return {
            "key": node.key.hex(),
            "peer_id": peer_id_text(node.key),
            "name": node.name,
            "role": node.role,
            "state": node.state,
            "accepted": node.accepted,
            "rejected": node.rejected,
            "inconclusive": node.inconclusive,
            "reason": node.reason,
            "last_seen_s": heard,
            "step": 0 if session is None else session.step,
        }


def read_status(run_dir: Path) -> dict[str, Any]:
    """The last status a coordinator wrote.

    Raises:
        UsageError: none was written yet.
    """
    path = run_dir / "status.json"
    try:
        picture: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise UsageError(f"{path} does not exist; start the coordinator: trainer serve {run_dir}/run.toml") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read ({exc}); the coordinator writes a new one within a second") from exc
    return picture


def as_text(picture: dict[str, Any]) -> str:
    """The status for a person."""
    rollouts = picture["rollouts"]
    lines = [
        f"run {picture['run'][:16]}  step {picture['step']}/{picture['steps']}  {picture['phase']}"
        f"  (written {max(0.0, time.time() - picture['time']):.0f} s ago)",
        "rollouts: " + ", ".join(f"{count} {name}" for name, count in rollouts.items()),
        f"{'node':<20} {'role':<10} {'state':<10} {'accepted':>8} {'rejected':>8} {'heard':>8}  why",
    ]
    for node in sorted(picture["nodes"], key=by_role):
        heard = "-" if node["last_seen_s"] is None else f"{node['last_seen_s']:.0f} s"
        samples = node["role"] == "inference"  # who samples nothing has no standing to lose
        state, accepted, rejected = (node["state"], node["accepted"], node["rejected"]) if samples else ("", "", "")
        line = (
            f"{printable(node['name'])[:20]:<20} {node['role']:<10} {state:<10} {accepted:>8} "
            f"{rejected:>8} {heard:>8}  {printable(why(node['reason']))}"
        )
        lines.append(line.rstrip())
    if picture["recent_events"]:
        lines.append("lately:")
    lines += [f"  {printable(event['text'])}" for event in picture["recent_events"][-5:]]
    return "\n".join(lines) + "\n"


_ORDER = {"inference": 0, "validator": 1, "relay": 2}


def by_role(node: Mapping[str, Any]) -> tuple[int, str]:
    """Sort key of a node in status.json: those that sample first, then those that check, then those that carry."""
    return _ORDER.get(node["role"], 9), node["name"]


def why(reason: str) -> str:
    """A node's reason as code and plain words; empty for none."""
    words = in_words(reason)
    return reason if words == reason else f"{reason}: {words}"
