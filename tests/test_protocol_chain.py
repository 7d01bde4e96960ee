"""The manifest chain: what a link may change, whom it takes away, and bytes of people who wish it changed more."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.chain import (
    MAX_CHAIN_BYTES,
    UPDATE_KIND,
    Chain,
    Revocation,
    RunUpdate,
    delegate,
    pack_updates,
    seal_update,
    split_updates,
)
from protocol.envelope import seal
from protocol.errors import ManifestError, ReasonCode
from protocol.manifest import MANIFEST_KIND, Bf16Thresholds, RouteThresholds, Routing, open_manifest, run_id_of
from tests.ledger_builder import START_MS, identity, make_manifest

MANIFEST = make_manifest()
GENESIS = seal(
    identity("root"), MANIFEST_KIND, MANIFEST, run=run_id_of(MANIFEST), sequence=1, issued_at=START_MS
).raw  # fmt: skip
START = Chain(open_manifest(GENESIS))


def key(name):
    return identity(name).public


def grown(chain=START, *, delegates=(), sequence=None, **changes):
    """One more link; `delegates` are (name, role)."""
    papers = tuple(
        delegate(identity("root"), chain.genesis.id, key(name), (role,), not_before=1, expires=START_MS * 2, sequence=i)
        for i, (name, role) in enumerate(delegates, start=1)
    )
    number = sequence or len(chain.links) + 1
    raw = seal_update(
        identity("root"), chain, RunUpdate(delegations=papers, **changes), sequence=number, issued_at=START_MS
    )
    return chain.extend(raw)


def test_a_chain_of_no_updates_is_the_genesis_manifest():
    chain = Chain.walk(GENESIS, expect=run_id_of(MANIFEST))
    assert chain.hash == chain.genesis.id == run_id_of(MANIFEST)
    assert chain.current == chain.genesis == chain.at(chain.hash) and chain.updates == []
    assert not chain.revoked(key("origin"), 10**9)


def test_updates_change_what_they_name_and_nothing_else():
    eased = replace(MANIFEST.thresholds, logprob=5e-4)
    one = grown(thresholds=eased, note="calibrated again")
    two = grown(one, ingress=("http://127.0.0.1:9",), leases=replace(MANIFEST.leases, max_staleness=4))
    assert two.current.manifest == replace(
        MANIFEST,
        thresholds=eased,
        ingress=("http://127.0.0.1:9",),
        leases=replace(MANIFEST.leases, max_staleness=4),
    )
    assert two.at(one.hash).manifest.thresholds == eased and two.at(one.hash).manifest.ingress == MANIFEST.ingress
    assert two.at(START.hash).manifest == MANIFEST and len({START.hash, one.hash, two.hash}) == 3
    assert {run.id for run in (two.current, two.at(one.hash))} == {START.genesis.id}, "the run stays the same run"
    again = Chain.walk(GENESIS, split_updates(pack_updates(two.updates)))
    assert again == two
    with pytest.raises(ManifestError) as caught:
        one.at(two.hash)
    assert caught.value.code == ReasonCode.WRONG_RUN


def opened(manifest):
    raw = seal(identity("root"), MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=START_MS).raw
    return Chain(open_manifest(raw))


def test_a_route_margin_belongs_to_a_model_with_experts():
    margin, wider = (RouteThresholds(value, 1, 1, 0.0, 0.0, "test") for value in (2e-5, 4e-5))
    sparse = replace(MANIFEST.model, routing=Routing(2, 16, 4))
    chain = opened(replace(MANIFEST, model=sparse, routes=margin))
    assert grown(chain, routes=wider).current.manifest == replace(chain.current.manifest, routes=wider)
    for model, routes in (
        (sparse, None),
        (MANIFEST.model, margin),
        (sparse, replace(margin, margin=-1e-9)),
        (replace(sparse, routing=Routing(0, 16, 4)), margin),
        (replace(sparse, routing=Routing(2, 3, 4)), margin),
        (replace(sparse, routing=Routing(2, 1 << 17, 4)), margin),
    ):
        with pytest.raises(ManifestError):
            opened(replace(MANIFEST, model=model, routes=routes))
    for chain_, routes in ((START, margin), (chain, replace(margin, margin=-1.0))):
        with pytest.raises(ManifestError):
            grown(chain_, routes=routes)


def test_a_rotated_key_comes_with_the_roots_delegation():
    chain = grown(coordinator=key("coordinator-2"), delegates=[("coordinator-2", "coordinator")])
    assert chain.current.manifest.coordinator == key("coordinator-2")
    assert chain.keys("coordinator") == (key("coordinator-2"), key("coordinator"))
    assert chain.delegation(key("coordinator-2")).roles == ("coordinator",) and chain.delegation(key("origin")) is None
    assert chain.lapsed(key("coordinator-2"), 0) and not chain.lapsed(key("coordinator-2"), START_MS)
    for delegates in ([], [("coordinator-2", "origin")], [("other", "coordinator")]):
        with pytest.raises(ManifestError, match="without the root's delegation"):
            grown(coordinator=key("coordinator-2"), delegates=delegates)
    forged = delegate(identity("ann"), START.genesis.id, key("ann"), ("origin",), not_before=1, expires=2, sequence=1)
    with pytest.raises(ManifestError):
        grown_raw = RunUpdate(origin=key("ann"), delegations=(forged,))
        seal_update(identity("root"), START, grown_raw, sequence=1, issued_at=START_MS)


def test_a_revoked_key_counts_until_its_entry_and_never_comes_back():
    with pytest.raises(ManifestError, match="leaves the run with a revoked origin key"):
        grown(revocations=(Revocation(key("origin"), 9, "stolen"),))
    chain = grown(
        origin=key("origin-2"),
        delegates=[("origin-2", "origin")],
        revocations=(Revocation(key("origin"), 9, "stolen"), Revocation(key("val"), 4, "withdrawn")),
    )
    assert [chain.revoked(key("origin"), index) for index in (8, 9, 10)] == [False, True, True]
    assert chain.revoked(key("val"), 4) and not chain.revoked(key("vic"), 4)
    with pytest.raises(ManifestError, match="revoked origin key"):
        grown(chain, origin=key("origin"), delegates=[("origin", "origin")])
    with pytest.raises(ManifestError, match="root key can't be revoked"):
        grown(revocations=(Revocation(key("root"), 0, "lost"),))


def test_links_hold_only_in_their_place():
    one = grown(note="one")
    two = grown(one, note="two")
    other = grown(note="another first")
    for wrong in ([two.updates[1]], [one.updates[0], one.updates[0]], [other.updates[0], two.updates[1]]):
        with pytest.raises(ManifestError):
            Chain.walk(GENESIS, wrong)
    with pytest.raises(ManifestError):
        grown(one, sequence=1, note="an old number of the root's")
    stranger = seal(
        identity("ann"), UPDATE_KIND, RunUpdate(START.hash, 1), run=START.genesis.id, sequence=1, issued_at=1
    )
    with pytest.raises(ManifestError):
        START.extend(stranger.raw)
    with pytest.raises(ManifestError, match="another run"):
        Chain.walk(GENESIS, expect=bytes(32))


def test_rules_that_would_end_a_run_are_refused():
    with pytest.raises(ManifestError, match="leases nothing"):
        grown(leases=replace(MANIFEST.leases, tasks_per_step=0))
    with pytest.raises(ManifestError, match="protocol version"):
        grown(lowest_version=0x0200)


def test_bf16_thresholds_are_changed_where_they_decide():
    limits = Bf16Thresholds(
        16, 4.0, 2.5, 4, 1.5, 0.02, 0.75, 0.02, 300, 9000, 7, 1.7, 1.6, 0.4, 0.004, 0.2, 0.005, 0.01, "machine"
    )
    with pytest.raises(ManifestError, match="another profile"):
        grown(bf16=limits)
    manifest = replace(MANIFEST, profile="bf16", bf16=limits)
    genesis = seal(identity("root"), MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=START_MS)
    start = Chain(open_manifest(genesis.raw))
    tighter = replace(limits, chunk_mantissa=3.0)
    assert grown(start, bf16=tighter).current.manifest.bf16 == tighter
    assert grown(start, note="nothing").current.manifest.bf16 == limits


def test_too_many_links_and_bytes_are_refused(monkeypatch):
    monkeypatch.setattr("protocol.chain.MAX_LINKS", 3)
    chain = START
    for _ in range(3):
        chain = grown(chain)
    with pytest.raises(ManifestError, match="more than 3"):
        grown(chain)
    with pytest.raises(ManifestError, match="more than a chain"):
        split_updates(pack_updates([b"x"] * 4))
    with pytest.raises(ManifestError, match="over the bound"):
        split_updates(bytes(MAX_CHAIN_BYTES + 1))


HONEST = grown(grown(coordinator=key("c2"), delegates=[("c2", "coordinator")]), note="n").updates


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from(HONEST),
            st.tuples(st.sampled_from(HONEST), st.integers(0, 2000), st.integers(1, 255)).map(
                lambda a: (
                    a[0][: a[1] % len(a[0])] + bytes([a[0][a[1] % len(a[0])] ^ a[2]]) + a[0][a[1] % len(a[0]) + 1 :]
                )
            ),
        ),
        max_size=4,
    )
)
def test_property_hostile_links_raise_one_kind_of_error(raws):
    try:
        chain = Chain.walk(GENESIS, raws)
    except ManifestError:
        return
    assert chain.updates == HONEST[: len(raws)], "only what the root signed, in its order, is ever taken"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_property_hostile_answers_are_split_or_refused(data):
    try:
        raws = split_updates(data)
    except ManifestError:
        return
    assert pack_updates(raws) == data
