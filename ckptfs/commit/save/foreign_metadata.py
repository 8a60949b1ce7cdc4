"""Which save a ``.metadata`` belongs to: one that this log knows, or a foreign one, such as stock torch writes.

    is_known(name, data, state)   whether this log's saves wrote it
    saves_named(data, state)      the saves that it names by their ids
    names_save(data)              the save that a ``ckptfs.json`` names

    metadata_at(name)             the one under a name; reads
    foreign_at(name, data, state) whether that one is foreign; reads
    was_to_replace(...)           whether the caller of a save wanted the existing one replaced; reads

A foreign ``.metadata`` is another program's checkpoint: ckptfs never removes it, and replaces it only if
the caller of a save wanted that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import digest_of
from ckptfs.commit.operations import Program, Read, StatOf
from ckptfs.commit.ownership.recovery_plan import decode_record
from ckptfs.commit.paths import MANIFEST, METADATA, AttemptKeys
from ckptfs.errors import NotFoundError
from ckptfs.schema import Schema, SchemaError
from ckptfs.storage.base import Shape

__all__ = [
    "ForeignMetadata",
    "foreign_at",
    "is_known",
    "metadata_at",
    "names_save",
    "saves_named",
    "was_to_replace",
]

_WORD = re.compile(rb"[\w~.-]+", re.ASCII)


def is_known(name: str, metadata: bytes, state: LogState) -> bool:
    """Whether a save that this log knows wrote the ``.metadata`` under that name."""
    if saves_named(metadata, state):
        return True
    # Every file of a directory checkpoint belongs to it, also a `.metadata` that a framework wrote there.
    return any(
        save.seal is not None
        and save.seal.artifact is Kind.DIRECTORY
        and not save.gone
        and name.partition("/")[0] == save.seal.name
        for save in state.saves.living.values()
    )


@dataclass(frozen=True, slots=True)
class ForeignMetadata:
    """A ``.metadata`` that no save of this log wrote. is_copy: a manifest of ckptfs is next to it."""

    digest: str
    is_copy: bool


def metadata_at(name: str) -> Program[bytes | None]:
    """Return the ``.metadata`` under a name, by any writer, or None."""
    try:
        data: bytes = yield Read(f"{name}/{METADATA}")
    except NotFoundError:
        return None
    return data


def foreign_at(name: str, data: bytes | None, state: LogState) -> Program[ForeignMetadata | None]:
    """Return what ``metadata_at`` found under that name if it is foreign, else None."""
    if data is None:
        return None
    # A save may have been sealed since the log was folded.
    if is_known(name, data, state) or is_known(name, data, (yield from catch_up(state))):
        return None
    try:
        is_copy = names_save((yield Read(f"{name}/{MANIFEST}"))) is not None
    except NotFoundError:
        is_copy = False
    return ForeignMetadata(digest_of(data), is_copy)


def was_to_replace(name: str, save_id: str, metadata: bytes) -> Program[bool]:
    """Whether a save that waits for its projection has to replace this foreign ``.metadata``.

    Its record says so. The writer made the record before any data, because it may die after its
    commit.
    """
    keys = AttemptKeys(Shape.FILESYSTEM, name, save_id)
    moved = f"{keys.projected_data}/{keys.record.rpartition('/')[2]}"
    for record in (keys.record, moved, AttemptKeys(Shape.OBJECT, name, save_id).record):
        try:
            if record == moved:
                # The save was projected already, so the existing one came later.
                yield StatOf(f"{keys.attempt}/{METADATA}")
            return decode_record((yield Read(record))).replaces == digest_of(metadata)
        except NotFoundError:
            continue
        except ValueError:
            return False
    return False


def saves_named(metadata: bytes, state: LogState) -> frozenset[str]:
    """Return the saves of a log that a ``.metadata`` names by their ids in its data paths.

    Nothing is unpickled.
    """
    words = set(_WORD.findall(metadata))
    # A pickle writes the length of a short text as one byte before it, which may look like a letter.
    words |= {word[1:] for word in words}
    ids = (word.decode("ascii") for word in words)
    return frozenset(save_id for save_id in ids if save_id in state.saves)


@dataclass(frozen=True, slots=True)
class _Named:
    """The one field of a manifest that names its save, whatever else is in it."""

    save_id: str


_NAMED = Schema(_Named)


def names_save(manifest: bytes) -> str | None:
    """Return the save_id that a projected ``ckptfs.json`` names, or None if it is not ours."""
    try:
        return _NAMED.decode(manifest).save_id
    except SchemaError:
        return None
