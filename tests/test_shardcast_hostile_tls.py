"""TLS and strangers: who hangs up, talks plainly, or shows another certificate, as both sides see it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest

from protocol.errors import ReasonCode
from shardcast.errors import SourceError
from shardcast.passes import Parent
from shardcast.share import fetch_share
from shardcast.source import new_session
from shardcast.terms import Terms
from shardcast.tls import Certificate, own_certificate
from tests.shardcast_run import (
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    holds,
    make_run,
    publishing,
    pulling,
    until,
    write_checkpoint,
)


@pytest.fixture
def wide(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", WIDE_SHAPES)
    write_checkpoint(made.directory, 0, 0, WIDE_SHAPES, seed=0)
    return made


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return own_certificate(tmp_path / "tls")


async def test_who_hangs_up_in_the_middle_of_a_shard_writes_nothing_into_the_servers_log(
    wide: MadeRun, certificate: Certificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with publishing(wide, terms=Terms(certificate=certificate)) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        host, port = origin.server.url.removeprefix("https://").split(":")
        path = f"/v1/{wide.run.id.hex()}/p/0-0/shard/0"
        with caplog.at_level(logging.WARNING):
            for _ in range(8):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
                writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                async with asyncio.timeout(WAIT_S):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                writer.transport.abort()
            parent = Parent(origin.server.url, wide.origin.public, pin=certificate.pin)
            async with pulling(wide, [parent], tmp_path / "a") as puller:
                assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0), "over TLS, in pieces"
        assert [record.getMessage() for record in caplog.records] == []


async def test_what_is_wrong_with_tls_is_said_in_words(wide: MadeRun, certificate: Certificate) -> None:
    async with publishing(wide, terms=Terms(certificate=certificate)) as tls, new_session() as session:
        greeter = await asyncio.start_server(lambda _, writer: writer.write(b"220 hello\r\n"), "127.0.0.1", 0)
        plain = f"https://127.0.0.1:{greeter.sockets[0].getsockname()[1]}"
        async with greeter:
            for parent, words, code in (
                (Parent(tls.server.url), "signed by no authority", ReasonCode.UNREACHABLE),
                (Parent(tls.server.url, pin=bytes(32)), "another certificate", ReasonCode.BAD_SIGNATURE),
                (Parent(tls.server.url.replace("https", "http")), "closed before an answer", ReasonCode.UNREACHABLE),
                (Parent(plain, pin=certificate.pin), "no TLS is spoken", ReasonCode.UNREACHABLE),
            ):
                with pytest.raises(SourceError, match=words) as caught:
                    await fetch_share(session, parent, allow_private=True)
                assert caught.value.code == code
                assert "object at 0x" not in str(caught.value)
