"""Free space and inodes, the mount below a path, and names."""

from __future__ import annotations

import os
import unicodedata

from ckptfs.errors import CkptfsError, NotFoundError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.tools.doctor.seen import Mounted, Names, Refusal, Room

__all__ = ["look_at_mount", "look_at_names", "look_at_room", "mounts_of"]


def look_at_room(storage: Storage) -> Room:
    """What the place tells."""
    try:
        found = storage.space()
    except StorageError as error:
        return Room(None, None, Refusal.of(error))
    return Room(None, None) if found is None else Room(found.free_bytes, found.free_inodes)


def look_at_mount(storage: Storage) -> Mounted | None:
    """The mount below the place, as this process sees it; None: no mounted place, or no /proc."""
    path = storage.local_path("")
    if path is None:
        return None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            table = file.read()
    except OSError:
        return None
    return mounts_of(table, os.path.realpath(path))


def mounts_of(table: str, path: str) -> Mounted | None:
    """The mount that holds ``path``, from the text of mountinfo. Pure."""
    found: Mounted | None = None
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if len(words) < 6 or len(kinds) < 3:  # noqa: PLR2004 - fields of proc(5)
            continue
        at = _plain(words[4])
        inside = path == at or path.startswith(f"{at.rstrip('/')}/")
        # Of two mounts at one point the later one is seen.
        if inside and (found is None or len(at) >= len(found.at)):
            options = tuple(dict.fromkeys([*words[5].split(","), *kinds[2].split(",")]))
            found = Mounted(kinds[0], _plain(kinds[1]), options, at)
    return found


def _plain(word: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, character)
    return word


def look_at_names(storage: Storage, rank: int) -> Names:
    """Names that differ in case, that are long, and that are no ASCII."""
    base = f"names/{rank}"
    accented = "étape-größe"
    try:
        storage.make_dir(base)
        storage.replace(f"{base}/Case", b"x")
    except StorageError:
        return Names(None)
    try:
        storage.stat(f"{base}/case")
        case_kept = False
    except NotFoundError:
        case_kept = True
    tried = {
        "100 characters": "n" * 100,
        "composed accents": unicodedata.normalize("NFC", accented),
        "decomposed accents": unicodedata.normalize("NFD", accented),
        "spaces and signs": "a b+c%d=e",
    }
    return Names(case_kept, {told: _named(storage, base, name) for told, name in tried.items()})


def _named(storage: Storage, base: str, name: str) -> Refusal | None:
    try:
        storage.replace(f"{base}/{name}", name.encode())
        if storage.read(f"{base}/{name}") != name.encode():
            raise StorageError("another name answers to it", uri=storage.uri(base))
        if name not in [entry.name for entry in storage.list(base)]:
            raise StorageError("it is listed as another name", uri=storage.uri(base))
        storage.remove(f"{base}/{name}")
    except CkptfsError as error:
        return Refusal.of(error)
    return None
