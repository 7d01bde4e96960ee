"""One machine of a run: the `node` command, the three roles, and the built-in engine.

cli         what is typed               handover    what is Node.js's
join        from a share code to work, and out again
member      joins, heartbeats, calls that outlast an absent coordinator
inference   leases to submissions       upload, receipts    submissions to receipts
validator   jobs to verdicts            relay       weights onwards
engine      the engine process          decode      tokens, log-probabilities, states
engine_link the node's end of an engine
home, log, status, doctor, errors, backoff

Only `engine`, `decode` and `validator` import torch.
"""
