"""Policy-gradient losses: pure functions of (log-probs, behaviour log-probs, advantages), one file each."""

from trainer.losses.two_sided import LOG_RATIO_LIMIT, two_sided, two_sided_masked

__all__ = ["LOG_RATIO_LIMIT", "two_sided", "two_sided_masked"]
