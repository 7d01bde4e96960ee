"""`reward-mismatch`: the claimed reward is what the verifier's own environment gives for the tokens' own text.

The text is rebuilt from the token ids; whatever text a node scored is never seen. Hard evidence because the
environments here are pure: the same text has the same reward everywhere, and is scored once a submission.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ReasonCode
from protocol.records import FINISH_EOS
from verifier.checks.claim import Claim, Setting, standing
from verifier.model import completion_text


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """Score the completion again; the claim must be equal."""
    stop = tuple(setting.stop_tokens)
    known: dict[tuple[int, bytes, int], float] = {}
    for claim in standing(claims):
        key = claim.task.index, claim.rollout.tokens, claim.rollout.finish
        if key not in known:
            text = completion_text(setting.policy.tokenizer, claim.tokens_N.tolist(), stop)
            known[key] = setting.environment.score(claim.task, text, claim.rollout.finish == FINISH_EOS)
        claim.reward = known[key]
        if claim.rollout.reward != claim.reward:
            claim.fail(ReasonCode.REWARD_MISMATCH, claimed=claim.rollout.reward, reward=claim.reward)
