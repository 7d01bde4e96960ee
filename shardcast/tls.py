"""TLS for servers of weights without a certificate authority: the certificate's SHA-256 is in the share code.

A server makes a certificate of its own beside its store, or is given one. Whoever has the code (or a plan) compares the
hash of what is shown there, and nothing else: neither names nor dates nor who signed it. A place without a hash is
checked the usual way, against the system's authorities. TLS 1.3 only.

Weights are signed above the transport, so TLS adds no trust in them; it keeps strangers on the way from reading them.

Not covered: deadlines of handshakes (`gate`), and client certificates (`allow` knows clients by their keys).
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protocol.errors import ReasonCode, UsageError
from protocol.files import write_atomic
from shardcast.errors import SourceError

PIN_BYTES = 32
_YEARS = 20
_CERTIFICATE_NAME, _KEY_NAME = "tls-certificate.pem", "tls-key.pem"


@dataclass(frozen=True)
class Certificate:
    """What a server shows."""

    context: ssl.SSLContext
    pin: bytes
    """SHA-256 of the certificate's DER bytes, 32 bytes."""


def load_certificate(certificate: Path, key: Path) -> Certificate:
    """A certificate (PEM, chain allowed) and its key. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        # An empty password: a key that needs one would wait for somebody at a terminal.
        context.load_cert_chain(certificate, key, password="")
        shown = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ssl.SSLError, ValueError) as exc:
        raise UsageError(
            f"{certificate} and {key} are no certificate with its key ({exc}); give a PEM certificate and its "
            "unencrypted PEM key, or neither, and one is made"
        ) from exc
    return Certificate(context, hashlib.sha256(shown.public_bytes(serialization.Encoding.DER)).digest())


def own_certificate(folder: Path) -> Certificate:
    """The certificate that was made in a folder, or a new one there. Raises UsageError."""
    certificate, key = folder / _CERTIFICATE_NAME, folder / _KEY_NAME
    if not (certificate.exists() and key.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        _make(certificate, key)
    return load_certificate(certificate, key)


def _make(certificate: Path, key: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headwater")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .sign(private, hashes.SHA256())
    )
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomic(key, pem, mode=0o600)
    write_atomic(certificate, made.public_bytes(serialization.Encoding.PEM))


def client_context(pin: bytes) -> ssl.SSLContext:
    """For a connection to a place: with a pin nothing is checked here (`check_pin` follows), without one everything."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if pin:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(shown: bytes | None, pin: bytes, address: str) -> None:
    """Compare the certificate that a server showed, DER, with the one that it must be.

    Raises:
        SourceError(`bad-signature`): another one; whoever answers there is not whom the code names.
    """
    if pin and (shown is None or hashlib.sha256(shown).digest() != pin):
        raise SourceError(
            address,
            "another certificate is shown there than the code or plan names: somebody else answers, or the server made "
            "a new one; ask whoever gave you the code for a new one",
            ReasonCode.BAD_SIGNATURE,
        )


def words_of(error: Exception) -> str:
    """What a failed request says to people; for TLS, what to do, rather than a library's own words."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            "its certificate is signed by no authority known here, and the code names no certificate; ask whoever gave "
            "you the code for a newer one"
        )
    if isinstance(error, aiohttp.ClientSSLError):
        return "no TLS is spoken there; the address leads to another program, or the server was started without --tls"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before an answer (a server that wants https:// does that)"
    return f"{type(error).__name__}: {error}"


def for_aiohttp(pin: bytes) -> aiohttp.Fingerprint | bool:
    """What aiohttp's `ssl=` takes: the pin to compare before anything is sent, or True for the system's authorities."""
    return aiohttp.Fingerprint(pin) if pin else True
