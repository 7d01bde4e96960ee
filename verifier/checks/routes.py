"""`routes-malformed` before the prefill, `routes-forged` after it: tokens went through the experts the model chooses.

Only a mixture-of-experts model has routes. Where experts are level within rounding, the node's choice is followed in
the prefill; what goes beyond the calibrated margin is a choice nobody's rounding makes, whatever states were proved
under it. Nor does rounding make many: choices within the margin are counted, and a rollout has a bound for them. What
lies below is written down (`routes_not_first`), and added up per node.

Not covered: that sum (`evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, standing
from verifier.errors import RouteError
from verifier.replay import Routed


def check_shape(claims: Sequence[Claim], setting: Setting) -> None:
    """The experts of the whole prompt and of each sampled token but the last; nothing for a dense model."""
    experts = setting.policy.experts
    for claim in standing(claims):
        raw = claim.rollout.routes
        if experts is None:
            if raw:
                claim.fail(ReasonCode.ROUTES_MALFORMED, routes=float(len(raw)))
            continue
        try:
            routes_PYK = experts.decode(raw, len(claim.prompt) + len(claim.tokens_N) - 1)
        except RouteError:
            claim.fail(ReasonCode.ROUTES_MALFORMED, routes=float(len(raw)))
        else:
            claim.routed = Routed(claim.prompt, claim.tokens_N, routes_PYK)


def check_margin(claims: Sequence[Claim], setting: Setting) -> None:
    """No expert left out that beats one that was taken by more than the calibrated margin, and few that do at all."""
    if setting.routes is None:
        return
    limits = setting.routes
    for claim in standing(claims):
        routed = claim.routed
        assert routed is not None
        claim.note("route_shortfall", min(routed.shortfall, 1e300))
        claim.numbers["routes_not_first"] = float(routed.not_first)
        claim.numbers["route_choices"] = float(routed.choices)
        if not routed.shortfall <= limits.margin:
            claim.fail(ReasonCode.ROUTES_FORGED, route_at=float(routed.position), route_layer=float(routed.layer))
        elif routed.not_first > limits.not_first + limits.not_first_rate * routed.choices:
            claim.fail(ReasonCode.ROUTES_FORGED)
