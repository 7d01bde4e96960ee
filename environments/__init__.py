"""Tasks and their rewards.

base        what an environment is, its hash, its draws
word        reverse, sort or rotate a word          addition    few-shot sums
registry    from a name or a manifest to an environment
errors      EnvironmentSpecError
"""
