"""`reward-mismatch`: the claimed reward is what the verifier's own environment gives for the tokens' own text.

The text is rebuilt from the token ids; whatever text a node scored is never seen. Where scoring is `pure` the same text
has the same reward everywhere, so another claim is hard evidence. Elsewhere two honest scorings may differ (RULES 10):
nothing is held against one rollout, the verifier's reward is the one that counts, and the claim goes into the details
(`reward_claimed`), where claims that lean one way add up over a node's rollouts.

A text is scored once a submission. Not covered: that sum (`evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ReasonCode
from protocol.records import FINISH_EOS
from verifier.checks.claim import Claim, Setting, standing
from verifier.model import completion_text


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """Score the completion again; where scoring is `pure` the claim must be equal."""
    pure = setting.environment.spec().scoring == "pure"
    stop = tuple(setting.stop_tokens)
    known: dict[tuple[int, bytes, int], float] = {}
    for claim in standing(claims):
        key = claim.task.index, claim.rollout.tokens, claim.rollout.finish
        if key not in known:
            text = completion_text(setting.policy.tokenizer, claim.tokens_N.tolist(), stop)
            known[key] = setting.environment.score(claim.task, text, claim.rollout.finish == FINISH_EOS)
        claim.reward = known[key]
        if not pure:
            claim.numbers["reward_claimed"] = claim.rollout.reward
        elif claim.rollout.reward != claim.reward:
            claim.fail(ReasonCode.REWARD_MISMATCH, claimed=claim.rollout.reward, reward=claim.reward)
