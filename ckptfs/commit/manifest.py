"""The manifest, ``ckptfs.json``: what a checkpoint consists of. Pure.

One immutable copy is in ``<save_id>/``; the seal holds the digest of this copy. A second copy, next to
``.metadata``, belongs to the projection. Paths are relative to the step directory. Unknown fields are
ignored. A manifest with a ``min_reader_version`` newer than this reader is refused, and the message
names both versions. A manifest that lists shared files (see ``FileRecord``) needs reader version 2.
A checkpoint that was copied elsewhere without its log is valid by its manifest alone.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ckptfs.commit.log.entries import (
    GENESIS,
    Generation,
    Kind,
    PartRef,
    Step,
    encode_parts,
)
from ckptfs.errors import ManifestError
from ckptfs.schema import Component, Count, Number, Schema, SchemaError, parse

__all__ = [
    "FORMAT_VERSION",
    "DomainRecord",
    "FileRecord",
    "Manifest",
    "decode_manifest",
    "digest_of",
    "encode_manifest",
    "needed_reader",
]

FORMAT_VERSION = 1
READER_VERSION = 2  # what this version understands
_PLAIN_READER = 1
_SHARED_READER = 2  # an older one would look for shared files in the step directory


_OPTIONAL = ("domain", "digests", "digest", "origin")  # of a file; left out when there is none


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        path: Relative to the step directory.
        size_bytes: Its size in bytes.
        domain: The id of the domain that holds it; None for all of them.
        digests: Path of its sidecar of block digests; None where it has none.
        digest: xxh3_128 of a small file's bytes; None for data files with a sidecar.
        origin: The save that wrote the bytes, for a hard link to a file of an older save and for every
            shared file; None for all other files.
    """

    path: str
    size_bytes: int
    domain: str | None = None
    digests: str | None = None
    digest: str | None = None
    origin: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the file is outside the step directories, so that several saves can use it.

        Its ``path`` then is below ``_data/`` of the run, and begins with the save_id of its writer.
        """
        return self.origin is not None and self.path.startswith(f"{self.origin}/")


@dataclass(frozen=True, slots=True)
class DomainRecord:
    """A domain that holds part of the checkpoint.

    Attributes:
        id: Its id.
        ranks: The ranks that saw it.
        hosts: The hosts, for people.
    """

    id: str
    ranks: tuple[Count, ...]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to know before it opens a data file.

    Attributes:
        save_id: The id of the save.
        name: The checkpoint's name in the run.
        step: Completed optimizer steps; None where there is no number.
        files: Its files.
        domains: The domains that hold it.
        base: The generation that the save began under.
        artifact: A checkpoint, weights or a directory.
        world_size: How many ranks saved it.
        created_at: When, for people; the commit order is that of the log.
        writer: The program and its version, for people.
        references: save_ids with files that this one uses.
        per_rank: Keys that every rank keeps for itself.
        format_version: The version of this format.
        min_reader_version: The oldest reader that understands it.
        parts: The parts that other groups of processes wrote; each has a manifest of its own.
        extra: Fields that this version does not know, kept as they are.
    """

    save_id: str
    name: str
    step: int | None
    files: tuple[FileRecord, ...]
    domains: tuple[DomainRecord, ...]
    base: Generation = GENESIS
    artifact: Kind = Kind.CHECKPOINT
    world_size: int = 1
    created_at: str = ""
    writer: str = ""
    references: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION
    min_reader_version: int = _PLAIN_READER
    parts: tuple[PartRef, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(f.size_bytes for f in self.files)


def needed_reader(files: Iterable[FileRecord]) -> int:
    """The ``min_reader_version`` of a manifest that lists these files."""
    return _SHARED_READER if any(file.is_shared for file in files) else _PLAIN_READER


def digest_of(data: bytes) -> str:
    """The digest by which seals name a manifest: xxh3_128 of ``data``, hexadecimal."""
    return xxhash.xxh3_128(data).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest``: JSON that a person can read."""
    record: dict[str, Any] = {
        "format_version": manifest.format_version,
        "min_reader_version": manifest.min_reader_version,
        "save_id": manifest.save_id,
        "name": manifest.name,
        "step": manifest.step,
        "artifact": manifest.artifact,
        "base": list(manifest.base),
        "world_size": manifest.world_size,
        "created_at": manifest.created_at,
        "writer": manifest.writer,
        "references": list(manifest.references),
        "per_rank": list(manifest.per_rank),
        "domains": [
            {"id": d.id, "ranks": list(d.ranks), "hosts": list(d.hosts)} for d in manifest.domains
        ],
        "files": [
            {"path": f.path, "size": f.size_bytes}
            | {k: v for k in _OPTIONAL if (v := getattr(f, k)) is not None}
            for f in manifest.files
        ],
    }
    if manifest.parts:
        record["parts"] = encode_parts(manifest.parts)
    record |= {k: v for k, v in manifest.extra.items() if k not in record}
    return json.dumps(record, indent=1).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class _Reader:
    """The field of a manifest that every version can read."""

    min_reader_version: Number


@dataclass(frozen=True, slots=True)
class _File:
    """``FileRecord`` as it is written. Each path is checked separately."""

    path: str
    size: Count
    domain: str | None = None
    digests: str | None = None
    digest: str | None = None
    origin: Component | None = None


@dataclass(frozen=True, slots=True)
class _Record:
    """A manifest as it is written."""

    format_version: Number
    min_reader_version: Number
    save_id: Component
    name: Component
    files: tuple[_File, ...]
    domains: tuple[DomainRecord, ...]
    step: Step = None
    artifact: Kind = Kind.CHECKPOINT
    base: Generation = GENESIS
    world_size: Count = 1
    created_at: str = ""
    writer: str = ""
    references: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    parts: tuple[PartRef, ...] = ()


_READER, _RECORD = Schema(_Reader), Schema(_Record)


def decode_manifest(data: bytes, where: object) -> Manifest:
    """Return the manifest in ``data``.

    Args:
        data: All bytes of the file.
        where: The name of the file, for the message.

    Raises:
        ManifestError: The manifest is foreign or damaged, has a path outside its directory, or
            needs a newer reader.
    """
    try:
        record = parse(data)
        needs = _READER.convert(record).min_reader_version
    except SchemaError as error:
        raise ManifestError(
            f"not a ckptfs manifest: {error}",
            uri=where,
            hint="it was damaged or written by another tool; plain DCP checkpoints load without it",
        ) from error
    if needs > READER_VERSION:
        raise ManifestError(
            f"the manifest needs a reader of format {needs}, but this version reads format "
            f"{READER_VERSION}",
            uri=where,
            hint="upgrade ckptfs, or load the step directory with torch.distributed.checkpoint",
        )
    try:
        return _from_record(_RECORD.convert(record))
    except ValueError as error:
        raise ManifestError(f"damaged manifest: {error}", uri=where) from error


def _from_record(record: _Record) -> Manifest:
    return Manifest(
        save_id=_name(record.save_id),
        name=_name(record.name),
        step=record.step,
        files=tuple(
            FileRecord(
                _path(f.path),
                f.size,
                f.domain,
                None if f.digests is None else _path(f.digests),
                f.digest,
                None if f.origin is None else _name(f.origin),
            )
            for f in record.files
        ),
        domains=record.domains,
        base=record.base,
        artifact=record.artifact,
        world_size=record.world_size,
        created_at=record.created_at,
        writer=record.writer,
        references=record.references,
        per_rank=record.per_rank,
        format_version=record.format_version,
        min_reader_version=record.min_reader_version,
        parts=record.parts,
    )


def _path(path: str) -> str:
    """Return the path if it is below the step directory. A manifest from a bucket is not trusted.

    Raises:
        ValueError: The path is not a relative path below the step directory.
    """
    clean = posixpath.normpath(path)
    if clean != path or path.split("/", maxsplit=1)[0] in ("", ".", ".."):
        raise ValueError(f"path {path!r} leaves the checkpoint")
    if "\\" in path or "\0" in path or "://" in path:
        raise ValueError(f"path {path!r} is not a relative path")
    return path


def _name(name: str) -> str:
    if "/" in name:
        raise ValueError(f"{name!r} is not one path component")
    return _path(name)
