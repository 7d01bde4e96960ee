"""Is this rollout honest? The same answer for validators and for anybody offline.

    judge        one submission, one outcome per rollout          checks/      the checks, a file each
    toploc       proofs of which weights computed the states      sampling     tokens forced by a lease's seed
    philox       the generator behind the noise                   logprobs     the one log-probability
    model        policies: loading and prefill                    thresholds   where honest noise ends
    profiles     what nodes compute in, and how it is checked     errors       the error tree
    calibrate    measuring honest noise through engines           evidence     what only many rollouts of a node show
    blocks       reading long rollouts no further than needed     drops        does a key keep back what did badly
    routes       which experts tokens went through                replay       the prefill through those
    routing      how many experts, from a configuration           route_noise  measuring honest routers
    audit, archive, draws, batches, report, explain, cli   a run's archive, checked from its files alone
    promises     what members kept of a ledger, held against an archive

Importing this package imports none of them.
"""
