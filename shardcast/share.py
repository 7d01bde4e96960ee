"""A share: checkpoints that somebody passes on by themselves, without a run, a coordinator or a trainer.

    share id = BLAKE3(payload of the ShareManifest)         the manifest is signed by the key that publishes
    code     = "hws1" + base32(ShareCode + 4 bytes of its BLAKE3)

Whoever has the code knows the share's id, so nobody can put another manifest in its place, and the manifest names the
key whose signatures count. From there on a share is a run to everything else here: `as_run` fills in the parts of a
run's manifest that publications, relays and pullers never read.

Not covered: finding and reading checkpoints (`checkpoints`), publishing (`folder`), and rotation of a share's key: a
share with another key is another share.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
from blake3 import blake3

from protocol import codec
from protocol.codec import Blob, Seq, Sub, record
from protocol.envelope import Envelope, open_envelope, parse, seal
from protocol.errors import DecodeError, ManifestError, ProtocolError, ReasonCode
from protocol.identity import Identity, check_public_key
from protocol.limits import KIB, MAX_ADDRESSES, MAX_ENVELOPE_BYTES, MAX_MODEL_FILES
from protocol.manifest import (
    LeasePolicy,
    ModelFile,
    ModelSpec,
    Run,
    RunManifest,
    SamplingSpec,
    Thresholds,
    check_files,
)
from protocol.records import U64, Bool, Hash, Key, Line, Word
from shardcast.addresses import resolve
from shardcast.errors import SourceError
from shardcast.limits import ANSWER_DEADLINE_S, CONNECT_DEADLINE_S
from shardcast.passes import PASS_HEADER, Parent, Presenter
from shardcast.tls import for_aiohttp, words_of

SHARE_KIND = "share"
SHARE_LIFETIME_MS = 10 * 365 * 86_400_000
"""A share's manifest is as good as its code; only heads grow stale."""

WEIGHTS_NAMES = ("model.safetensors", "adapter_model.safetensors")
"""Under which names a share's weights may be asked for by what loads them."""

_CODE_PREFIX = "hws1"
_CHECK_BYTES = 4
MAX_CODE_CHARS = 32 * KIB

Key32 = Annotated[bytes, Blob(32, 32)]
"""32 bytes, or none."""


@record(64 * KIB)
@dataclass(frozen=True)
class ShareManifest:
    name: Line
    created: U64
    """Milliseconds since the epoch."""
    origin: Key
    """Signs this manifest and everything that is published."""
    layout: Hash
    """Of all its checkpoints."""
    weights: Word
    """The weights file's name for what loads it: one of `WEIGHTS_NAMES`."""
    files: Annotated[tuple[ModelFile, ...], Seq(Sub(ModelFile), MAX_MODEL_FILES)]
    """Configuration and tokenizer, equal in all its checkpoints."""


@record(2 * KIB)
@dataclass(frozen=True)
class ShareSource:
    url: Line
    key: Key32
    """Who must answer there: the origin, or the relay whose stamps count. None for a cache."""
    pin: Key32
    """SHA-256 of the certificate shown there; none for plain HTTP and for certificates of an authority."""
    cached: Bool
    """A public HTTP cache in front of the origin."""


@record(16 * KIB)
@dataclass(frozen=True)
class ShareCode:
    share: Hash
    sources: Annotated[tuple[ShareSource, ...], Seq(Sub(ShareSource), MAX_ADDRESSES)]


@dataclass(frozen=True)
class Share:
    """A manifest with its id and the envelope that proves it."""

    id: bytes
    manifest: ShareManifest
    envelope: Envelope

    def as_run(self, *, allow_private: bool = True) -> Run:
        """The share as everything in the weights plane wants it.

        Args:
            allow_private: loopback and private addresses may be connected to because a code names them.
        """
        given = self.manifest
        model = ModelSpec("", "", given.layout, 0, given.files)
        none = bytes(32)
        manifest = RunManifest(
            name=given.name,
            created=given.created,
            root=given.origin,
            coordinator=none,
            origin=given.origin,
            coordinator_transport=none,
            control=(),
            ingress=(),
            profile="fp32",
            model=model,
            environments=(),
            sampling=SamplingSpec(1.0, 0, ()),
            thresholds=Thresholds(0.0, 0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0.0, 0.0, ""),
            leases=LeasePolicy(0, 0, 0, 0, 0, 0, 0, 0, 0.0),
            steps=0,
            versions=(),
            allow_private=allow_private,
            contact="",
            privacy="",
        )
        return Run(self.id, manifest, self.envelope)


def make_share(identity: Identity, manifest: ShareManifest, sequence: int) -> Share:
    """Sign a share's manifest with the key that will publish."""
    share = blake3(codec.encode(manifest)).digest()
    envelope = seal(
        identity,
        SHARE_KIND,
        manifest,
        run=share,
        sequence=sequence,
        issued_at=manifest.created,
        lifetime_ms=SHARE_LIFETIME_MS,
    )
    return open_share(envelope.raw)


def open_share(raw: bytes, expect: bytes | None = None) -> Share:
    """Check a share's envelope.

    Args:
        expect: the id the caller came with; None trusts the first manifest seen.

    Raises:
        ManifestError: another share, not signed by its own key, or it names files that may not be written.
    """
    try:
        envelope = parse(raw)
        share = blake3(envelope.payload).digest()
        if expect is not None and share != expect:
            raise ManifestError("another share is served there than the code names", ReasonCode.WRONG_RUN)
        manifest = envelope.record(ShareManifest)
        open_envelope(raw, run=share, kind=SHARE_KIND, signer=check_public_key(manifest.origin))
        check_files(ModelSpec("", "", manifest.layout, 0, manifest.files))
        if manifest.weights not in WEIGHTS_NAMES:
            raise ManifestError("the share names its weights as nothing loads them", ReasonCode.MALFORMED)
    except ManifestError:
        raise
    except ProtocolError as exc:
        raise ManifestError(f"the share's manifest does not hold: {exc}", exc.code) from exc
    return Share(share, manifest, envelope)


def format_code(code: ShareCode) -> str:
    """The text that people pass on: lower-case base32 with a checksum."""
    raw = codec.encode(code)
    raw += blake3(raw).digest()[:_CHECK_BYTES]
    return _CODE_PREFIX + base64.b32encode(raw).decode("ascii").rstrip("=").lower()


def parse_code(text: str) -> ShareCode:
    """The inverse of `format_code`; white space between is ignored. Raises ManifestError with what is wrong."""
    if len(text) > MAX_CODE_CHARS:
        raise ManifestError("this is too long for the code of a share", ReasonCode.OVERSIZE)
    word = "".join(text.split()).lower()
    if word.startswith("hw1"):
        raise ManifestError("this is the code of a run, not of a share; take part with: node join --run CODE")
    if not word.startswith(_CODE_PREFIX):
        raise ManifestError(f"the code of a share starts with {_CODE_PREFIX}")
    body = word[len(_CODE_PREFIX) :].upper()
    try:
        raw = base64.b32decode(body + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError) as exc:
        raise ManifestError("the code has a character that does not belong; copy it again") from exc
    data, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if blake3(data).digest()[:_CHECK_BYTES] != check:
        raise ManifestError("the code's checksum does not match; it was cut or mistyped")
    try:
        return codec.decode(ShareCode, data)
    except DecodeError as exc:
        raise ManifestError(f"the code does not hold: {exc}") from exc


def parents_in(code: ShareCode) -> list[Parent]:
    """The places that a code names, best first."""
    return [Parent(one.url, b"" if one.cached else one.key, b"", one.pin, one.cached) for one in code.sources]


async def fetch_share(
    session: aiohttp.ClientSession,
    parent: Parent,
    share: bytes = b"",
    *,
    allow_private: bool,
    presenter: Presenter | None = None,
) -> Share:
    """The share that is served at a place.

    Args:
        share: its id, when a code named one; nothing else is taken.
        allow_private: private addresses may be connected to.
        presenter: shows our key.

    Raises:
        SourceError: the address may not be connected to, is unreachable or too slow, or what it sends does not hold.
    """
    base = parent.url
    path = f"v1/{share.hex()}/share" if share else "v1/share"
    shown = presenter.header(parent) if presenter is not None else ""
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S + ANSWER_DEADLINE_S):
            place = await asyncio.to_thread(resolve, base, allow_private=allow_private)
            async with session.get(
                f"{place.url}/{path}",
                allow_redirects=False,
                proxy=None,
                ssl=for_aiohttp(parent.pin),
                server_hostname=place.host if place.tls else None,
                headers={"Host": place.authority, **({PASS_HEADER: shown} if shown else {})},
            ) as response:
                return open_share(await _body(base, response), expect=share or None)
    except ManifestError as exc:
        raise SourceError(base, str(exc), exc.code) from exc
    except TimeoutError as exc:
        raise SourceError(base, "no answer in time", ReasonCode.TOO_SLOW) from exc
    except aiohttp.ServerFingerprintMismatch as exc:
        raise SourceError(
            base, "another certificate is shown there than the code names", ReasonCode.BAD_SIGNATURE
        ) from exc
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        raise SourceError(base, words_of(exc), ReasonCode.UNREACHABLE) from exc


async def _body(base: str, response: aiohttp.ClientResponse) -> bytes:
    """A bounded answer; the caller holds the deadline. Raises SourceError for a refusal, with its words."""
    limit = MAX_ENVELOPE_BYTES if response.status == 200 else 4 * KIB
    body = b""
    async for piece in response.content.iter_chunked(64 * KIB):
        body += piece
        if len(body) > limit:
            raise SourceError(base, "sent too long a manifest", ReasonCode.OVERSIZE)
    if response.status != 200:
        try:
            words = ascii(str(json.loads(body)["message"])[:500])
        except (ValueError, KeyError, TypeError, RecursionError):
            words = "no share is served there"
        raise SourceError(base, f"answered {response.status} {words}", _code(response.status))
    return body


def _code(status: int) -> ReasonCode:
    return {403: ReasonCode.NOT_GRANTED, 404: ReasonCode.RECORD_MISSING, 429: ReasonCode.QUOTA}.get(
        status, ReasonCode.UNREACHABLE
    )


def best_error(errors: Sequence[SourceError]) -> SourceError:
    """Of what several places said, the one that tells most: a refusal rather than silence."""
    silent = (ReasonCode.UNREACHABLE, ReasonCode.TOO_SLOW)
    told = [error for error in errors if error.code not in silent]
    return (told or list(errors))[0]
