"""`trainer key rotate|revoke|withdraw`: how the holder of a run's root key changes its online keys, and takes keys back
or rows of evidence.

    keys/ROLE-<n>.pem  ->  updates/00000<n>.hw (signed by the root)  ->  the coordinator enters it  ->  members follow

The root key is needed for this and nothing else; it may lie on another disk (`--root`). The new key is on the disk
before the update that names it, so a crash between them leaves a key nobody names, which the same command then uses.

Not covered: what an update may say (`protocol.chain`), following it (`trainer.coordinator`, `node`).
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.chain import ONLINE_ROLES, Chain, Revocation, RunUpdate, delegate, seal_update
from protocol.envelope import parse
from protocol.errors import LedgerError, ManifestError, ProtocolError, UsageError
from protocol.files import fsync_dir, write_atomic
from protocol.identity import Identity, load_identity, load_or_create_identity, parse_peer_id, peer_id_text
from protocol.ledger import is_served
from protocol.manifest import ShareCode, format_share_code
from protocol.run_files import KEY_FILES, load_chain, update_file
from trainer.config import RunConfig

DAY_MS = 86_400_000
EARLY_MS = DAY_MS
"""A delegation holds from a day before it was made: the machine with the root key may have another idea of the time."""

LIFETIME_MS = 366 * DAY_MS
"""How long a rotated key is good for; rotating again prolongs the run. A longer one helps whoever stole the key."""

RENEW_MS = LIFETIME_MS // 2
"""Every rotation prolongs the other keys in use that end within this time. Otherwise two that were rotated in the same
week end in the same week too, and each update would wait for the other."""

WARN_MS = 30 * DAY_MS
"""The operator is told this long before a key in use ends. Later leaves no time to fetch the root key from its safe."""

FOLLOW_S = 30.0
"""How long `revoke` waits until a running coordinator signs with the key that replaced the one to revoke."""

ROLES = {"coordinator": "coordinator", "origin": "origin", "transport": "coordinator_transport"}
"""Words of the command line -> fields of the manifest."""

_NEXT = {
    "coordinator": "a running `trainer serve` begins again with the new key within seconds, any other when it starts",
    "origin": "restart `shardcast publish {run}`: it reads its key when it starts",
    "transport": "a running `trainer serve` begins again with the new key within seconds; {run}/join.hw is a new share "
    "code, give it to nodes that join from now on",
}


def rotate(config: RunConfig, role: str, root: Path | None) -> dict[str, Any]:
    """Make a new key for an online role and let the root name it.

    Args:
        role: `coordinator`, `origin` or `transport`.
        root: the root key's file; RUN/keys/root.pem by default.

    Returns:
        What was done: run, update, role, peer_id, file, next.

    Raises:
        UsageError: no root key, or it is not this run's.
    """
    run_dir, field = config.run_dir, ROLES[role]
    chain = load_chain(run_dir)
    signer = root_key(run_dir, chain, root)
    number = len(chain.links) + 1
    file = run_dir / "keys" / f"{KEY_FILES[field]}-{number}.pem"
    public = load_or_create_identity(file).public
    now = int(time.time() * 1000)
    sequence = 1 + max((one.sequence for one in chain.delegations), default=0)
    ending = {
        one: getattr(chain.current.manifest, one)
        for one in ONLINE_ROLES
        if one != field and chain.lapsed(getattr(chain.current.manifest, one), now + RENEW_MS)
    }
    delegations = tuple(
        delegate(
            signer,
            chain.genesis.id,
            key,
            (one,),
            not_before=now - EARLY_MS,
            expires=now + LIFETIME_MS,
            sequence=sequence + place,
        )
        for place, (one, key) in enumerate([(field, public), *ending.items()])
    )
    update = RunUpdate(delegations=delegations, note=f"a new {role} key")
    named: dict[str, Any] = {field: public}
    update = replace(update, **named)
    if role == "transport":
        old = peer_id_text(chain.current.manifest.coordinator_transport)
        addresses = chain.current.manifest.control
        update = replace(update, control=tuple(text.replace(old, peer_id_text(public)) for text in addresses))
    chain = write_update(run_dir, chain, signer, update, now)
    if role == "transport":
        code = ShareCode(chain.genesis.id, public, chain.current.manifest.control)
        write_atomic(run_dir / "join.hw", (format_share_code(code) + "\n").encode())
    return {
        "run": chain.genesis.id.hex(),
        "update": number,
        "role": role,
        "peer_id": peer_id_text(public),
        "file": str(file),
        "next": _NEXT[role].format(run=run_dir),
    }


def revoke(config: RunConfig, peer: str, reason: str, root: Path | None, index: int | None = None) -> dict[str, Any]:
    """Take a key back: what it signs from a ledger entry on counts for nothing.

    Args:
        peer: the key as a peer id.
        index: ledger entry from which it counts; the next one by default.

    Raises:
        UsageError: no peer id, an online key in use, already revoked, no root key, or a running coordinator still signs
            with it: an index before its last entry would make the ledger fail every audit.
    """
    run_dir = config.run_dir
    try:
        key = parse_peer_id(peer)
    except ProtocolError as exc:
        raise UsageError(f"{peer!r} is no peer id; `trainer status --json` and `node id` show them") from exc
    chain = load_chain(run_dir)
    signer = root_key(run_dir, chain, root)
    for word, field in ROLES.items():
        if getattr(chain.current.manifest, field) == key:
            raise UsageError(
                f"{peer} is the run's {word} key in use; give the run another one first: trainer key rotate {word} "
                f"{run_dir}, then revoke this one"
            )
    if index is None and key in chain.keys("coordinator"):
        _await_successor(config, key)
    size = ledger_size(config)
    at = size if index is None else index
    if any(item.key == key and item.index <= at for item in chain.revocations):
        raise UsageError(f"{peer} is already revoked")
    if at > size:
        raise UsageError(f"--from {at} is beyond the ledger's {size} entries; a key is revoked from what is there on")
    update = RunUpdate(revocations=(Revocation(key, at, reason[:200]),), note=f"revoked: {reason}"[:200])
    chain = write_update(run_dir, chain, signer, update, int(time.time() * 1000))
    return {
        "run": chain.genesis.id.hex(),
        "update": len(chain.links),
        "peer_id": peer,
        "from": at,
        "next": "a running `trainer serve` follows within seconds, members with their next heartbeat",
    }


def withdraw(config: RunConfig, statistic: str, reason: str, root: Path | None) -> dict[str, Any]:
    """Take back a row of evidence: from here on nobody is suspended by it, and who was is heard again.

    Args:
        statistic: the row's; `all` for every row there is.

    Raises:
        UsageError: the run has no such row, no root key, or it is not this run's.
    """
    run_dir = config.run_dir
    chain = load_chain(run_dir)
    signer = root_key(run_dir, chain, root)
    rows = chain.current.manifest.evidence
    left = tuple(row for row in rows if statistic not in (row.statistic, "all"))
    if left == rows:
        there = ", ".join(row.statistic for row in rows) or "nothing"
        raise UsageError(f"the run sums up no {statistic}; it sums up {there}")
    update = RunUpdate(evidence=left, no_evidence=not left, note=f"{statistic} is withdrawn: {reason}"[:200])
    chain = write_update(run_dir, chain, signer, update, int(time.time() * 1000))
    return {
        "run": chain.genesis.id.hex(),
        "update": len(chain.links),
        "withdrawn": [row.statistic for row in rows if row not in left],
        "left": [row.statistic for row in left],
        "next": "a running `trainer serve` follows within seconds; nodes that the row suspended may join again then",
    }


def ending(chain: Chain | None, now: int, run_dir: str) -> list[str]:
    """One sentence for each key in use that the root lets act for less than `WARN_MS` more."""
    out = []
    for word, field in ROLES.items():
        found = None if chain is None else chain.delegation(getattr(chain.current.manifest, field))
        if found is not None and found.expires - now < WARN_MS:
            until = time.strftime("%Y-%m-%d", time.gmtime(found.expires / 1000))
            out.append(
                f"the run's {word} key may act until {until} only; nothing it signs later counts. The holder of the "
                f"root key must prolong it before: trainer key rotate {word} {run_dir}"
            )
    return out


def in_words(update: RunUpdate) -> str:
    """What an update changes, for people."""
    said = [f"a new {word} key ({peer_id_text(getattr(update, field))})" for word, field in ROLES.items()
            if getattr(update, field) is not None]  # fmt: skip
    said += [f"{peer_id_text(gone.key)} is revoked ({gone.reason})" for gone in update.revocations]
    said += [
        words
        for words, there in (
            ("new thresholds", update.thresholds or update.bf16),
            ("other rows of evidence", update.evidence),
            ("no rows of evidence any more", update.no_evidence),
            ("another lease policy", update.leases),
            ("new addresses", update.control or update.ingress),
            (f"protocol versions from {update.lowest_version:#06x} on", update.lowest_version),
        )
        if there
    ]
    return "; ".join(said) or update.note or "nothing"


def ledger_size(config: RunConfig) -> int:
    """Entries in the run's ledger, whether a coordinator is writing it or not."""
    path = config.state_dir / "ledger.db"
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as db:
            (last,) = db.execute("SELECT COALESCE(MAX(idx) + 1, 0) FROM leaves").fetchone()
    except sqlite3.Error as exc:
        raise LedgerError(f"{path} can't be read ({exc}); the operator must restore it from a backup") from exc
    return int(last)


def _await_successor(config: RunConfig, key: bytes) -> None:
    """Return once nobody signs ledger entries with this earlier coordinator key any more."""
    path = config.state_dir / "ledger.db"
    end = time.monotonic() + FOLLOW_S
    while is_served(path) and last_signer(path) == key:
        if time.monotonic() > end:
            raise UsageError(
                f"a running `trainer serve` still signs with this key {FOLLOW_S:.0f} s after another one was named; "
                "stop it, then run the command again"
            )
        time.sleep(0.1)


def last_signer(path: Path) -> bytes:
    """Who signed the newest entry of a ledger; empty when it holds none."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as db:
            row = db.execute("SELECT envelope FROM leaves ORDER BY idx DESC LIMIT 1").fetchone()
    except sqlite3.Error as exc:
        raise LedgerError(f"{path} can't be read ({exc}); the operator must restore it from a backup") from exc
    return parse(row[0]).signer if row else b""


def root_key(run_dir: Path, chain: Chain, path: Path | None) -> Identity:
    """The root's private key, from `path` or its place in the run directory. Raises UsageError."""
    file = path or run_dir / "keys" / "root.pem"
    if not file.exists():
        raise UsageError(f"the root key {file} is not there; whoever keeps it offline must give its place: --root PATH")
    identity = load_identity(file)
    if identity.public != chain.genesis.manifest.root:
        raise UsageError(f"{file} is not the root key of this run; its holder must give the right one: --root PATH")
    return identity


def write_update(run_dir: Path, chain: Chain, root: Identity, update: RunUpdate, now: int) -> Chain:
    """Sign the next link and put it where the coordinator looks."""
    number = len(chain.links) + 1
    sequence = 1 + max((parse(link.raw).sequence for link in chain.links), default=0)
    try:
        raw = seal_update(root, chain, update, sequence=sequence, issued_at=now)
    except ManifestError as exc:
        raise UsageError(f"this change would not hold ({exc})") from exc
    path = update_file(run_dir, number)
    path.parent.mkdir(exist_ok=True)
    fsync_dir(run_dir)
    if path.exists():
        raise UsageError(f"{path} was written a moment ago by somebody else; run the command again")
    write_atomic(path, raw)
    return chain.extend(raw)
