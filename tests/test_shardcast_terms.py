"""On which terms a server serves: upload and download limits, quotas, lists, TLS; and what a store removes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import EnvelopeError, ReasonCode, UsageError
from protocol.identity import Identity
from protocol.sequences import Sequences
from shardcast import share_commands
from shardcast.allow import KeyCheck, KeyPresenter, read_allow
from shardcast.amounts import parse_bytes, parse_quota, parse_rate
from shardcast.gate import CappedServer
from shardcast.origin import Origin
from shardcast.passes import PASS_HEADER, Parent
from shardcast.quotas import DAY_S, Quota, prefix_of
from shardcast.rates import BURST_S, Bucket
from shardcast.retention import to_remove
from shardcast.server import wall_clock_ms
from shardcast.terms import Terms
from shardcast.tls import check_pin, load_certificate, own_certificate
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    holds,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)


@asynccontextmanager
async def serving(made: MadeRun, terms: Terms) -> AsyncIterator[Origin]:
    """An origin on terms, with one checkpoint published."""
    origin = Origin(made.directory, identity=made.origin, terms=terms)
    await origin.start()
    try:
        await origin.publish_ready()
        yield origin
    finally:
        await origin.close()


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    return made


# --- limits of bytes per second ------------------------------------------------------------------------------------


@given(st.floats(1e3, 1e9), st.lists(st.tuples(st.floats(0, 2), st.integers(1, 1 << 20)), max_size=50))
def test_a_bucket_never_lets_more_through_than_its_rate(rate: float, moves: list[tuple[float, int]]) -> None:
    clock = [1000.0]
    bucket = Bucket(rate, lambda: clock[0])
    moved, last = 0, 0
    for pause, count in moves:
        clock[0] += pause
        clock[0] += bucket.take(count)
        moved, last = moved + count, count
        assert moved - last <= rate * (clock[0] - 1000.0 + BURST_S) * (1 + 1e-9)


class Counting(Bucket):
    """A bucket that lets all through after `wait_s`, and remembers what was asked of it."""

    def __init__(self, wait_s: float = 0.0) -> None:
        super().__init__(1e6)
        self.asked: list[int] = []
        self.wait_s = wait_s

    def take(self, count: int) -> float:
        self.asked.append(count)
        return self.wait_s


async def test_everything_sent_and_received_goes_through_the_limits_in_small_pieces(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", WIDE_SHAPES)
    write_checkpoint(made.directory, 0, 0, WIDE_SHAPES, seed=0)
    up, down = Counting(), Counting()
    async with (
        serving(made, Terms(up=up)) as origin,
        pulling(made, [origin.server.url], tmp_path / "a", down=down) as puller,
    ):
        policy = await puller.wait_newer(None, WAIT_S)
        assert holds(policy, WIDE_SHAPES, seed=0)
        shards = origin.server.counters.bytes_sent
        assert shards <= sum(up.asked)
        assert max(up.asked) <= up.piece_bytes
        assert 0.9 * shards < sum(down.asked) <= shards  # not what came together with an answer's header
        assert max(down.asked) <= down.piece_bytes


async def test_waiting_for_our_own_limit_is_not_held_against_the_receiver(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.sending.HEADER_DEADLINE_S", 0.5)
    monkeypatch.setattr("shardcast.sending.MINIMUM_RATE_BYTES_S", 1 << 30)
    async with (
        serving(small, Terms(up=Counting(wait_s=0.8))) as origin,
        pulling(small, [origin.server.url], tmp_path / "a") as puller,
    ):
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("20G", 20 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1500), ("7", 7), ("1 TB", 10**12), ("10B", 10)],
)
def test_amounts_are_read_as_people_write_them(text: str, value: int) -> None:
    assert parse_bytes(text) == value
    assert parse_rate(f"{text}/s") == value
    assert parse_quota(f"{text}/day") == value
    for wrong in ("", "G", "1X", "-1", "1e9", "0", "1iB", "1G/h"):
        with pytest.raises(UsageError):
            parse_bytes(wrong)
        with pytest.raises(UsageError):
            parse_rate(wrong)


# --- quotas --------------------------------------------------------------------------------------------------------


def test_a_quota_is_a_networks_and_a_days(tmp_path: Path) -> None:
    clock = [DAY_S * 100.0 + DAY_S - 90]
    path = tmp_path / "quotas.json"
    quota = Quota(1000, path, lambda: clock[0])
    quota.count("203.0.113.7", 999)
    assert quota.wait_s("203.0.113.250") == 0
    quota.count("203.0.113.250", 1)
    assert quota.wait_s("203.0.113.1") == 90
    assert quota.wait_s("::ffff:203.0.113.9") == 90  # the same network, written as IPv6
    assert quota.wait_s("203.0.114.7") == 0
    quota.count("2001:db8:1::1", 1000)
    assert quota.wait_s("2001:db8:1:ffff::2") == 90
    assert quota.wait_s("2001:db8:2::1") == 0
    quota.save()
    assert Quota(1000, path, lambda: clock[0]).wait_s("203.0.113.1") == 90, "a restart forgives nothing"
    path.write_text("{")
    assert Quota(1000, path, lambda: clock[0]).wait_s("203.0.113.1") == 0
    clock[0] += 91
    assert quota.wait_s("203.0.113.1") == 0


def test_strangers_cannot_fill_the_memory_with_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.quotas.MAX_PREFIXES", 50)
    quota = Quota(10, None, lambda: 0.0)
    for number in range(200):
        quota.count(f"0.{number}.0.1", 1)
    assert len(quota._used) <= 51
    assert quota.wait_s("0.199.0.1") == DAY_S, "those that came later share one count"
    assert quota.wait_s("0.0.0.1") == 0
    assert prefix_of("no address") == "no address"


async def test_who_had_its_quota_is_told_when_to_come_back(small: MadeRun, tmp_path: Path) -> None:
    quota = Quota(1, tmp_path / "quotas.json")
    async with serving(small, Terms(quota=quota)) as origin, aiohttp.ClientSession() as session:
        base = f"{origin.server.url}/v1/{small.run.id.hex()}"
        assert (await session.get(f"{base}/p/0-0/shard/0")).status == 200
        answer = await session.get(f"{base}/p/0-0/shard/0")
        assert (answer.status, (await answer.json())["code"]) == (429, "quota")
        assert 0 < int(answer.headers["Retry-After"]) <= DAY_S
        assert (await session.get(f"{base}/head")).status == 200  # what is newest may always be asked
        async with pulling(small, [origin.server.url], tmp_path / "a") as puller:
            await until(lambda: bool(puller.problems), "the refusal")
            assert puller.problems[origin.server.url].code == ReasonCode.QUOTA
    assert (tmp_path / "quotas.json").exists()


# --- lists ---------------------------------------------------------------------------------------------------------


def test_a_list_is_read_from_words_and_files(tmp_path: Path) -> None:
    friend = Identity.generate()
    (tmp_path / "friends.txt").write_text(f"# ours\n203.0.113.0/24\n\n{friend.peer_id}  # a friend\n")
    allow = read_allow([str(tmp_path / "friends.txt"), "2001:db8::1"])
    assert allow is not None
    assert allow.keys == {friend.public}
    for address, covered in (
        ("203.0.113.9", True),
        ("::ffff:203.0.113.9", True),
        ("2001:db8::1", True),
        ("2001:db8::2", False),
        ("203.0.114.1", False),
        ("", False),
    ):
        assert allow.covers(address) == covered, address
    assert read_allow([]) is None
    for wrong in ("nobody", "203.0.113.0/99", str(tmp_path)):
        with pytest.raises(UsageError):
            read_allow([wrong])


async def test_who_is_not_on_the_list_gets_nothing_but_a_reason(small: MadeRun, tmp_path: Path) -> None:
    async with (
        serving(small, Terms(allow=read_allow(["203.0.113.0/24"]))) as origin,
        aiohttp.ClientSession() as session,
    ):
        for path in ("head", "stats", "news", "p/0-0/shard/0", "share", f"challenge?nonce={'0' * 32}"):
            answer = await session.get(f"{origin.server.url}/v1/{small.run.id.hex()}/{path}")
            assert (answer.status, (await answer.json())["code"]) == (403, "not-granted"), path
        assert origin.server.counters.refused >= 6


async def test_a_key_on_the_list_pulls_and_another_does_not(small: MadeRun, tmp_path: Path) -> None:
    friend, stranger = Identity.generate(), Identity.generate()
    async with serving(small, Terms(allow=read_allow([friend.peer_id]))) as origin:
        parent = Parent(origin.server.url, small.origin.public)
        for who, name in ((friend, "friend"), (stranger, "stranger")):
            shows = KeyPresenter(small.run.id, who, Sequences(tmp_path / f"{name}.json"), wall_clock_ms)
            async with pulling(small, [parent], tmp_path / name, presenter=shows) as puller:
                if who is friend:
                    assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
                else:
                    await until(lambda: bool(puller.problems), "the refusal")
                    assert puller.problems[origin.server.url].code == ReasonCode.NOT_GRANTED
                    assert puller.current is None


def test_a_shown_key_is_of_use_for_one_server_one_address_and_a_while(tmp_path: Path) -> None:
    friend, server, other = Identity.generate(), Identity.generate(), Identity.generate()
    run, clock = bytes(32), [1_000_000_000]
    allow = read_allow([friend.peer_id])
    assert allow is not None
    shows = KeyPresenter(run, friend, Sequences(tmp_path / "s.json"), lambda: clock[0])
    check = KeyCheck(allow, run, server.public, lambda: clock[0])
    header = shows.header(Parent("http://a", server.public))
    assert shows.header(Parent("http://a", b"")) == ""
    assert check.child(header, "203.0.113.1") == friend.public
    assert check.child(header, "203.0.113.1") == friend.public
    for wrong, address, where in (
        (header, "203.0.113.2", check),
        (header, "203.0.113.1", KeyCheck(allow, run, other.public, lambda: clock[0])),
        (header, "203.0.113.1", KeyCheck(allow, b"\1" * 32, server.public, lambda: clock[0])),
        (header[:-8], "203.0.113.1", check),
        ("key.!", "203.0.113.1", check),
        ("key." + "A" * 5000, "203.0.113.1", check),
        ("", "203.0.113.1", check),
    ):
        with pytest.raises(EnvelopeError) as caught:
            where.child(wrong, address)
        assert caught.value.code == ReasonCode.NOT_GRANTED
    clock[0] += 400_000
    with pytest.raises(EnvelopeError):
        check.child(header, "203.0.113.1")


# --- TLS -----------------------------------------------------------------------------------------------------------


async def test_weights_flow_over_tls_to_who_knows_the_certificate_and_nobody_else(
    small: MadeRun, tmp_path: Path
) -> None:
    certificate = own_certificate(tmp_path / "tls")
    assert own_certificate(tmp_path / "tls").pin == certificate.pin  # kept over restarts: codes stay good
    assert (tmp_path / "tls" / "tls-key.pem").stat().st_mode & 0o077 == 0
    other = own_certificate(tmp_path / "other")
    async with (
        serving(small, Terms(certificate=certificate)) as origin,
        relaying(
            small,
            [Parent(origin.server.url, small.origin.public, pin=certificate.pin)],
            tmp_path / "relay",
            terms=Terms(certificate=other),
        ) as relay,
    ):
        assert origin.server.url.startswith("https://")
        parent = Parent(relay.url, relay.server._identity.public, pin=other.pin)
        async with pulling(small, [parent], tmp_path / "a") as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
        served = origin.server.counters.table()
        for pin, code in ((other.pin, ReasonCode.BAD_SIGNATURE), (b"", ReasonCode.UNREACHABLE)):
            wrong = replace(parent, url=origin.server.url, key=small.origin.public, pin=pin)
            async with pulling(small, [wrong], tmp_path / code) as puller:
                await until(lambda p=puller: bool(p.problems), "the refusal")  # type: ignore[misc]
                assert puller.problems[wrong.url].code == code
                assert puller.current is None
        assert origin.server.counters.table()["shards_sent"] == served["shards_sent"]


def test_a_certificate_is_pinned_by_its_hash_or_refused(tmp_path: Path) -> None:
    made = own_certificate(tmp_path)
    der = ssl.PEM_cert_to_DER_cert((tmp_path / "tls-certificate.pem").read_text())
    assert made.pin == hashlib.sha256(der).digest()
    check_pin(der, made.pin, "x")
    for shown in (None, der[:-1]):
        with pytest.raises(Exception, match="another certificate") as caught:
            check_pin(shown, made.pin, "x")
        assert caught.value.code == ReasonCode.BAD_SIGNATURE  # type: ignore[attr-defined]
    assert load_certificate(tmp_path / "tls-certificate.pem", tmp_path / "tls-key.pem").pin == made.pin
    with pytest.raises(UsageError):
        load_certificate(tmp_path / "tls-key.pem", tmp_path / "tls-certificate.pem")
    with pytest.raises(UsageError):
        load_certificate(tmp_path / "none.pem", tmp_path / "tls-key.pem")


async def test_half_a_handshake_holds_a_place_no_longer_than_half_a_header(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.gate.HEADER_DEADLINE_S", 0.5)
    monkeypatch.setattr("shardcast.gate.MAX_CONNECTIONS_PER_ADDRESS", 3)
    entered: list[CappedServer] = []
    real = CappedServer.enter
    monkeypatch.setattr(
        CappedServer, "enter", lambda self, who, transport: entered.append(self) or real(self, who, transport)
    )
    certificate = own_certificate(tmp_path / "tls")
    async with serving(small, Terms(certificate=certificate)) as origin:
        host, port = origin.server.url.removeprefix("https://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        await until(lambda: len(entered) >= 5, "the connections")
        assert entered[0].turned_away == 2, "a handshake that was not even begun counts"
        for number, words in enumerate((b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"", b"")):
            with contextlib.suppress(ConnectionError):
                held[number][1].write(words)
        for reader, writer in held:
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(100):
                        pass
            writer.close()
        pin = aiohttp.Fingerprint(certificate.pin)
        async with aiohttp.ClientSession() as session:  # their places are free again
            answer = await session.get(f"{origin.server.url}/v1/{small.run.id.hex()}/head", ssl=pin)
            assert answer.status == 200


# --- what is removed -----------------------------------------------------------------------------------------------


def test_the_oldest_are_removed_but_never_the_newest_a_pinned_or_a_used_one() -> None:
    sizes = {(0, step): 10 for step in range(6)}
    assert to_remove(sizes, 60, ()) == []
    assert to_remove(sizes, 35, ()) == [(0, 0), (0, 1), (0, 2)]
    assert to_remove(sizes, 1, ()) == [(0, step) for step in range(5)]
    assert to_remove(sizes, 35, (1,)) == [(0, 0), (0, 2), (0, 3)]
    assert to_remove(sizes, 35, (), lambda key: key == (0, 0)) == [(0, 1), (0, 2), (0, 3)]
    bases = {(0, step): (0, step - 1) if step % 3 else None for step in range(6)}
    assert to_remove(sizes, 1, (2,), bases=bases) == [(0, 3), (0, 4)]  # what a pinned one applies to is kept with it
    assert to_remove({}, 1, ()) == []


async def test_a_relay_with_a_limit_of_bytes_still_serves_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    args = argparse.Namespace(keep_bytes="1", pin=[1], json=True)
    async with (
        publishing(made) as origin,
        relaying(made, [origin.server.url], tmp_path / "relay", keep=100, terms=Terms(in_use_s=0.0)) as relay,
    ):
        for step in range(4):
            write_checkpoint(made.directory, 0, step, SMALL_SHAPES, seed=step)
            await until(lambda step=step: (0, step) in relay.store.keys, "the step")  # type: ignore[misc]
        await share_commands.retain(args, relay)
        assert relay.store.keys == [(0, 1), (0, 3)]
        assert [json.loads(line)["removed"] for line in capsys.readouterr().out.splitlines()] == [0, 2]
        async with pulling(made, [relay.url], tmp_path / "a") as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=3)
            assert holds(await puller.fetch(0, 1, None, WAIT_S), SMALL_SHAPES, seed=1)


async def test_what_somebody_downloads_counts_as_used(small: MadeRun) -> None:
    async with serving(small, Terms(in_use_s=1e6)) as origin, aiohttp.ClientSession() as session:
        assert not origin.server.in_use((0, 0))
        await session.get(f"{origin.server.url}/v1/{small.run.id.hex()}/p/0-0/shard/0", headers={PASS_HEADER: "x"})
        assert origin.server.in_use((0, 0))
        assert not origin.server.in_use((0, 1))
