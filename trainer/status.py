"""status.json: where a run stands, about once a second, for people and views. No decision reads it.

    run, time, began, pid     which run, when written, since when and by which process (Unix seconds)
    step, steps               newest published step, and the run's last
    phase                     `starting`, `waiting for weights`, `running`, `draining`, `finished` or `stopped`
    waits_for                 what the run as a whole waits for, in words
    heartbeat_s               how often members report; three missing ones make a member quiet
    nodes[]                   key, peer_id, name, role, state, reason, step, accepted, rejected, inconclusive,
                              last_seen_s (null: not heard since `began`), activity, done, waits_for, parent (hex key
                              of the relay it is told to pull from, or `origin`), bytes_up (of its submissions);
                              relays: bytes_sent (of weights, as they say); validators: open_jobs, verdict_s (mean
                              seconds from a job's delivery to its verdict), outvoted (rollouts of which two others
                              found the opposite)
    keys_end[]                keys in use whose delegation ends within a month, a sentence each
    rollouts, batches, leases_open, ledger_entries, ledger_problems, http_fallbacks, host_restarts, staleness_mean
    validators_checked        of the rollouts drawn for a check of their validator by the coordinator: checked, left_out
                              (not made), waiting, unconfirmed (contradicted once, and not yet or never again);
                              contradicted: validators suspended for what they said
    plants                    submissions of phantoms: sent, altered (of them), judged (verdicts on them), contradicted
                              (validators whose trust one of those verdicts ended); period: the newest draw period (-1:
                              none), entered: submissions in it
    recent_events[]           time and text

Not covered: the learner and the origin, which are processes of their own (`trainer.picture` looks at their files).
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from protocol.commands import os_error_in_words
from protocol.identity import peer_id_text
from protocol.state import NodeState
from shardcast.heads import replace_file
from trainer import keys, waiting
from trainer.book import Book
from trainer.members import Members, Session
from trainer.news import News


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
    checks: Callable[[], dict[str, int]]
    """What came of the coordinator's own checks of validators."""
    staleness: Staleness = field(default_factory=Staleness)
    began: float = field(default_factory=time.time)
    _unwritable: bool = False
    _counted: int = 0
    """Submissions whose bytes are in `_bytes_up`."""
    _bytes_up: Counter[bytes] = field(default_factory=Counter)

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
        validators = len(self.members.validators())
        for submission in islice(state.submissions.values(), self._counted, None):
            self._counted += 1
            self._bytes_up[submission.owner] += submission.intent.length
        return {
            "run": self.book.run.id.hex(),
            "time": time.time(),
            "began": self.began,
            "pid": os.getpid(),
            "step": 0 if state.newest_policy is None else state.newest_policy.step,
            "steps": self.book.run.manifest.steps,
            "phase": phase,
            "waits_for": waiting.next_batch(state, window),
            "heartbeat_s": self.book.run.manifest.leases.heartbeat_ms / 1000,
            "nodes": [self._node(node, validators) for node in state.nodes.values()],
            "rollouts": {
                "accepted": counts.get("accepted", 0),
                "rejected": counts.get("rejected", 0),
                "inconclusive": counts.get("inconclusive", 0),
                "pending": pending,
                "discarded": counts.get("discarded", 0),
            },
            "keys_end": keys.ending(state.chain, self.book.now_ms(), str(self.path.parent)),
            "batches": window.batches,
            "leases_open": len(window.open),
            "ledger_entries": self.book.ledger.size,
            "ledger_problems": len(state.problems),
            "http_fallbacks": fallbacks,
            "host_restarts": restarts,
            "staleness_mean": round(self.staleness.mean, 4),
            "validators_checked": self.checks(),
            "plants": self.book.plants.counts(),
            "recent_events": list(self.news.events),
        }

    def _node(self, node: NodeState, validators: int) -> dict[str, Any]:
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
            "activity": "" if session is None else session.activity,
            "done": 0 if session is None else session.done,
            "waits_for": waiting.member(self.book.state, self.book.window, node, validators),
            "parent": self._parent(node),
            "bytes_up": self._bytes_up[node.key],
            **self._of_role(node, session),
        }

    def _of_role(self, node: NodeState, session: Session | None) -> dict[str, Any]:
        if node.role == "relay":
            return {"bytes_sent": 0 if session is None else session.sent}
        if node.role != "validator":
            return {}
        open_jobs = sum(job.validator == node.key for _, job in waiting.open_jobs(self.book.state, self.book.window))
        took = None if session is None or session.verdict_s is None else round(session.verdict_s, 3)
        return {"open_jobs": open_jobs, "verdict_s": took, "outvoted": node.outvoted}

    def _parent(self, node: NodeState) -> str:
        """Whom it is told to pull from first: a relay's key in hex, `origin`, or nobody yet."""
        places = self.members.parents.places(node)
        if not places:
            return ""
        return "origin" if places[0].key == self.book.run.manifest.origin else places[0].key.hex()
