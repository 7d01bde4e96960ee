"""Policy-gradient losses: pure functions of (log-probs, behaviour log-probs, advantages, mask), one file each."""

from trainer.losses.two_sided import LossStats, two_sided

__all__ = ["LossStats", "two_sided"]
