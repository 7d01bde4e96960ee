"""What every machine of a run must agree on.

Identity, signed envelopes, wire records and their bounds, the Merkle ledger and the pure fold over it, the
libp2p host process and the records an engine speaks. It imports no torch and nothing from the other packages.

Read in this order: `limits`, `codec`, `records`, `identity`, `envelope`, `manifest`, `chain`, `ledger`, `state` (with
`state_types`, `decision`, `draws`, `draw_rules`, `batch_rules`, `evidence`), `host`.
The written specification is `docs/protocol.md`.
"""
