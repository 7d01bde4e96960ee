"""Weights down the tree: publications, the origin that makes them, relays and pullers.

A checkpoint becomes a signed publication of hashed shards. Relays serve each shard as soon as they verified it;
a puller turns a publication into a model directory that appears only when it is whole and verified.

Read in this order: `records`, `layout`, `publication`, `store`, `server`, `origin`, `follower`, `puller`, `relay`,
`passes` and `stamps` (who may pull, who lied), `archive`. Nothing here imports torch: shards are bytes.

Not covered yet: deltas (the records carry them, no codec encodes them). The relay tree is planned by `trainer.tree`.
"""
