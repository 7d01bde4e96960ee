"""A child that ends with its parent: see `protocol.lifeline`."""

from protocol.lifeline import die_with_parent

__all__ = ["die_with_parent"]
