"""Addresses that members announce: none of them is the coordinator's end, whenever it came into the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.addresses import HttpAddress, parse_http
from protocol.control import Member
from protocol.envelope import seal
from protocol.errors import DecodeError, ProtocolError, ReasonCode
from protocol.records import Heartbeat, JoinRequest
from tests.scripted_swarm import NOISE, SMALL, Swarm, actor_identity
from trainer import config
from trainer.coordinator import Coordinator
from trainer.init import make_run

HOSTILE = ("http://127.0.0.1:99999", "http://[::1", "http://" + "a" * 70 + ".example:1")
NO_ADDRESS = (
    *HOSTILE, "", "http://", "https://127.0.0.1:1", "http://127.0.0.1:0", "http://a..b:1", "http://me@127.0.0.1:1",
    "http://127.0.0.1:1/elsewhere", "http://127.0.0.1:1?q", "http://127.0.0.1:1#f", "http://127.0.0.1:one",
    "http://127.0.0.1: 1", "http://127.0.0.1:1\n", "http://" + "a." * 300 + "b", "http://[1.2.3.4]:1", "127.0.0.1:1",
)  # fmt: skip


@pytest.mark.parametrize("text", NO_ADDRESS)
def test_what_is_no_plain_http_address_is_refused_as_one_kind_of_error(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_http(text)


def test_an_address_is_read_as_it_was_written() -> None:
    assert parse_http("http://127.0.0.1:4801") == HttpAddress("127.0.0.1", 4801, "127.0.0.1:4801")
    assert parse_http("http://[2001:db8::1]:80/") == HttpAddress("2001:db8::1", 80, "[2001:db8::1]:80")
    assert parse_http("http://relay.example") == HttpAddress("relay.example", 80, "relay.example")


@given(
    st.text()
    | st.text().map("http://".__add__)
    | st.text(alphabet="[]:@/.%#?0123456789aé\u2100").map("http://".__add__)
)
def test_the_parser_is_total(text: str) -> None:
    with contextlib.suppress(DecodeError):
        place = parse_http(text)
        assert 0 < place.port < 65536
        assert ":" in place.host or place.host.encode("idna"), "the resolver takes it"


async def test_a_relay_with_hostile_addresses_is_refused_and_the_coordinator_lives(tmp_path: Path) -> None:
    async with Swarm.make(tmp_path / "run", relays=1) as swarm:
        for url in HOSTILE:
            with pytest.raises(ProtocolError) as caught:
                await swarm.join("relay-0", "relay", (url,))
            assert caught.value.code == ReasonCode.MALFORMED
        relay = await swarm.join("relay-0", "relay", ("http://127.0.0.1:1",))
        await asyncio.sleep(1.5)  # longer than the prober sleeps
        assert (await relay.heartbeat()).state == "probation"
        assert swarm.process is not None and swarm.process.poll() is None


async def test_a_ledger_that_holds_such_a_join_already_does_not_end_the_coordinator(tmp_path: Path) -> None:
    relay = actor_identity("relay-0")
    make_run(tmp_path / "run", steps=3, thresholds=NOISE, validators=[], relays=[relay.public], overrides=SMALL)
    coordinator = Coordinator(config.load(tmp_path / "run"))
    book, members = coordinator.book, coordinator.members
    try:
        book.grant("relay", [relay.public])
        addresses = (*HOSTILE, "http://127.0.0.1:1")
        join = JoinRequest("relay", "relay", relay.public, os.urandom(16), "", (0x0100,), addresses, "")
        sealed = lambda kind, record, number: seal(  # noqa: E731
            relay, kind, record, run=book.run.id, sequence=number, issued_at=book.now_ms()
        )
        book.append("node.joined", subject=sealed("join", join, 1).raw)
        beat = Heartbeat(0, 0, "", 0)
        await members.heartbeat(Member(sealed("heartbeat", beat, 2), b""), beat, b"")
        assert [url for _, url in members.proofs] == ["http://127.0.0.1:1"]
        members.proofs.update({(relay.public, url): next(iter(members.proofs.values())) for url in HOSTILE})
        with pytest.raises(TimeoutError):  # it goes on whatever it is given to ask
            await asyncio.wait_for(members.prove_forever(), 1.5)
    finally:
        book.close()
