"""What happened lately, in plain words, for people: shown in status.json and printed to the coordinator's log.

Not evidence and not input of any decision; the ledger is.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from protocol.commands import printable
from protocol.errors import ReasonCode
from protocol.logs import EventFile

KEPT = 64

_WORDS = {
    ReasonCode.FORMAT: "they have the wrong form",
    ReasonCode.WRONG_TASK: "they answer another task than the lease names",
    ReasonCode.TOKEN_RANGE: "they contain tokens the model does not have",
    ReasonCode.TERMINATION: "they stop too early or too late",
    ReasonCode.PROOF_MALFORMED: "their proof is no proof",
    ReasonCode.PROOF_MISMATCH: "the run's model did not compute them",
    ReasonCode.TOKEN_NOT_FORCED: "the lease's seed forces other tokens",
    ReasonCode.LOGPROB_MISMATCH: "their log-probabilities are not the model's",
    ReasonCode.REWARD_MISMATCH: "the claimed reward is not the task's",
    ReasonCode.POOLED_EVIDENCE: "what validators measured on its rollouts adds up to more than an honest node's, far "
    "beyond chance",
    ReasonCode.DROPPED_RESULTS: "the leases it gave up held worse results than those it returned, far beyond chance",
    ReasonCode.VALIDATOR_WRONG: "it accepted what the run's model did not make, or changed its numbers",
    ReasonCode.RELAY_LIED: "it signed other bytes than the origin did",
    ReasonCode.KEY_REVOKED: "the run's root revoked the key",
}


def in_words(reason: str) -> str:
    """A reason code as the end of a sentence."""
    known = reason in ReasonCode._value2member_map_
    return _WORDS.get(ReasonCode(reason), reason) if known else reason


class News:
    """The last events, oldest first."""

    def __init__(
        self, out: TextIO = sys.stderr, clock: Callable[[], float] = time.time, log: EventFile | None = None
    ) -> None:
        self.events: deque[dict[str, object]] = deque(maxlen=KEPT)
        self.log = log or EventFile(None)
        """Where the same sentences go for programs, as `news` events."""
        self._said: deque[str] = deque(maxlen=KEPT)
        self._out = out
        self._clock = clock

    def say(self, text: str) -> None:
        """Remember and print one sentence; strangers' words in it can't move the operator's cursor."""
        text = printable(text)
        now = self._clock()
        self.events.append({"time": round(now, 3), "text": text})
        stamp = time.strftime("%H:%M:%S", time.localtime(now))
        self._out.write(f"{stamp} {text}\n")
        self._out.flush()
        self.log.event("news", text=text)

    def say_once(self, text: str) -> None:
        """The same, unless it was said lately: for what is found wrong again and again."""
        if text not in self._said:
            self._said.append(text)
            self.say(text)
