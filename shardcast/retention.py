"""What a store with a limit of bytes removes: the oldest publications first, never the newest, never a pinned one, and
none that is being downloaded.

Not covered: how a publication is removed (`store`, `states`), and policies of a puller, which are kept by number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from shardcast.publication import Key

_USED_MOST = 2
"""Times the limit, at most, are kept because somebody downloads them: a stranger who asks for a byte of each now and
then must not fill the disk."""


def to_remove(
    sizes: Mapping[Key, int],
    limit: int,
    pins: Collection[int],
    in_use: Callable[[Key], bool] = lambda key: False,
    bases: Mapping[Key, Key | None] | None = None,
) -> list[Key]:
    """Which publications to remove so that the rest has at most `limit` bytes, oldest first.

    Args:
        sizes: bytes of each publication.
        pins: steps that are kept whatever they take.
        in_use: whether somebody is downloading one; it is looked at again later.
        bases: what each publication applies to, where a server cannot make states of older ones by itself: what a
            pinned one needs is kept with it.

    What is kept may be over the limit: the newest and pinned ones stay, and used ones up to twice the limit.
    """
    total = sum(sizes.values())
    kept: set[Key] = set()
    for key in sizes:
        at: Key | None = key if key[1] in pins else None
        while at is not None and at not in kept:
            kept.add(at)
            at = bases.get(at) if bases is not None else None
    removed = []
    for key in sorted(sizes)[:-1]:
        if total <= limit:
            break
        if key in kept or (total <= _USED_MOST * limit and in_use(key)):
            continue
        removed.append(key)
        total -= sizes[key]
    return removed


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, not of folders inside it; 0 for one that is not there."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return total
    return total
