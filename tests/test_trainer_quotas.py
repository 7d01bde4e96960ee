"""Quotas: what one key, one address and all together may hold, and that honest crowds still get through."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from protocol.errors import ProtocolError, ReasonCode
from tests.archive_builder import identity, make_manifest
from tests.test_trainer_leases import Bench, replace
from trainer import leases
from trainer.errors import UploadError
from trainer.quotas import ADDRESS_JOINS_PER_S, MAX_ADDRESSES, MAX_NEW_JOINS, JoinBudget, Spool, SpoolLimits

ONE, TWO = b"\1" * 32, b"\2" * 32
NEAR, FAR = "192.0.2.1", "198.51.100.7"


def test_one_address_cannot_bring_six_hundred_members_but_a_demo_of_forty_can() -> None:
    now = [0.0]
    budget = JoinBudget(64, lambda: now[0])
    for _ in range(40):
        budget.spend("127.0.0.1")
    joined = 0
    for _ in range(600):
        try:
            budget.spend(NEAR)
            joined += 1
        except ProtocolError as exc:
            assert exc.code is ReasonCode.QUOTA and "may join in 5 s" in str(exc)
    assert joined == 64
    budget.spend(FAR)
    now[0] += 1 / ADDRESS_JOINS_PER_S
    budget.spend(NEAR)
    with pytest.raises(ProtocolError):
        budget.spend(NEAR)


def test_all_addresses_together_have_a_budget_and_no_memory_without_end() -> None:
    budget = JoinBudget(64, lambda: 0.0)
    for number in range(MAX_NEW_JOINS):
        budget.spend(f"10.{number >> 8}.{number & 255}.1")
    with pytest.raises(ProtocolError) as refused:
        budget.spend(FAR)
    assert refused.value.code is ReasonCode.BUSY
    patient = JoinBudget(64, iter(range(10**9)).__next__)
    for number in range(MAX_ADDRESSES + 500):
        patient.spend(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(patient._addresses) == MAX_ADDRESSES


def held(spool: Spool, key: bytes, where: str, length: int, waiting: Iterable[tuple[bytes, str, int]] = ()) -> str:
    """How one upload would be answered: empty when it is taken."""
    try:
        with spool.hold(bytes(16), key, where, length, waiting):
            return ""
    except UploadError as exc:
        assert exc.retry_after_s is not None
        return f"{exc.status} {exc.code}"


def test_the_spool_has_shares_per_key_per_address_and_in_all() -> None:
    spool = Spool(SpoolLimits(total=1000, per_key=100, per_address=300, uploads_per_address=2))
    assert held(spool, ONE, NEAR, 100) == ""
    assert held(spool, ONE, NEAR, 101) == "429 quota"
    assert held(spool, ONE, NEAR, 60, [(ONE, NEAR, 50)]) == "429 quota", "what waits for a verdict counts"
    assert held(spool, ONE, NEAR, 60, [(TWO, FAR, 50)]) == ""
    assert held(spool, ONE, NEAR, 60, [(TWO, NEAR, 250)]) == "429 quota", "and what this address' other keys hold"
    assert held(spool, ONE, NEAR, 60, [(TWO, FAR, 950)]) == "507 quota"
    with spool.hold(b"a" * 16, ONE, NEAR, 50, ()):
        assert held(spool, ONE, NEAR, 60) == "429 quota", "what is arriving counts"
        assert held(spool, TWO, FAR, 60) == ""
        with spool.hold(b"b" * 16, TWO, NEAR, 1, ()):
            assert held(spool, b"\3" * 32, NEAR, 1) == "429 quota", "two uploads from one address at once"
        with pytest.raises(UploadError) as again, spool.hold(b"a" * 16, ONE, NEAR, 1, ()):
            pass
        assert again.value.code is ReasonCode.BUSY
    assert held(spool, ONE, NEAR, 100) == "" and not spool.uploading, "everything is given back"
    assert not (spool._by_key or spool._by_address or spool._uploads)


def test_the_newcomers_of_one_address_hold_an_eighth_of_what_may_be_under_way() -> None:
    rules = replace(make_manifest().leases, tasks_per_step=16, probation_accepted=4)
    bench = Bench(nodes=40, leases=rules)  # 64 rollouts a batch, 192 under way: 24 for one address, 48 for all
    bench.chain.policy(0)
    strangers = tuple(bench.nodes[:30])
    issued = sum(_take(bench, who, strangers) for who in strangers)
    assert issued == 24 // 4
    assert "of this address" in bench.ask(strangers[-1], near=strangers).reason
    others = sum(_take(bench, who, (who,)) for who in bench.nodes[30:])
    assert others == 24 // 4, "strangers from elsewhere still have their places"
    held_now = leases.unverified(bench.state, bench.window, {identity(who).public for who in bench.nodes})
    assert held_now == 48
    lease = next(iter(bench.state.leases.values()))
    index = bench.submit(lease.lease)
    assert bench.ask(bench.nodes[-1]).kind == "wait", "uploaded is not verified: the validators still have to do it"
    bench.judge(index)
    assert bench.ask(bench.nodes[-1]).kind == "issue"


def _take(bench: Bench, who: str, near: tuple[str, ...]) -> int:
    decision = bench.ask(who, near=near)
    if decision.lease is None:
        return 0
    bench.write(who, decision.lease)
    return 1
