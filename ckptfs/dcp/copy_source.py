"""The checkpoint that is to be copied: what it consists of, and which ranks see which of it.

    Original   as its catalog tells: sealed in a log, or lying there without one
    find_held  collective: every rank finds the save's files on its own disk; each listed domain is
               found by some rank                                          -> Held

What no log vouches for is believed as ``ckptfs.load`` believes it: by its manifest, or, where stock
torch wrote it, by its ``.metadata``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ckptfs.commit.catalog import Found, find
from ckptfs.commit.entries import Seal
from ckptfs.commit.locate import locate
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.commit.opening import step_of
from ckptfs.commit.ops import drive, read_limited
from ckptfs.commit.seat import Seat
from ckptfs.dcp.metadata import decode_metadata
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StaleError, StateError
from ckptfs.storage.base import Storage

__all__ = ["Held", "Original", "find_held", "stock_manifest"]


@dataclass(frozen=True, slots=True)
class Original:
    """What is copied. name: in its run; of a part ``step_100/actor``. seal: None where no log knows it."""

    name: str
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What is copied, the same on all ranks but for ``found``: None on ranks that see none of it.

    readers: the ranks that see the files of a listed domain; None: files that each of them has.
    """

    manifest: Manifest
    found: Found | None
    readers: Mapping[str | None, Sequence[int]]

    @property
    def everybody(self) -> Sequence[int]:
        """The ranks that see any of it."""
        return self.readers[None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank tells: owners send the manifest, for ranks that find none."""

    found: bool
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class _Shown:
    """The manifest, where some rank has found none by itself."""

    manifest: Manifest | None


def find_held(source: Seat, original: Original) -> Held:
    """Collective. Where all of it lies.

    IncompleteCheckpointError: files of it, or a domain, are missing, and which nodes hold them.
    """
    if original.seal is None:
        return _find_unlogged(source, original.name)
    return _find_sealed(source, original.seal)


# -- sealed in a log ------------------------------------------------------------------------------


def _find_sealed(source: Seat, seal: Seal) -> Held:
    kept: list[Found] = []

    def look() -> _Seen:
        if source.placement.mine.id not in seal.domains:
            return _Seen(found=False, manifest=None)  # a node that came later
        kept.append(_found_here(source, seal))
        return _Seen(found=True, manifest=kept[0].manifest if source.placement.is_owner else None)

    def decide(answers: Sequence[_Seen]) -> _Shown:
        here = {d.id for d in source.placement.domains}
        manifest = next((a.manifest for a in answers if a.manifest is not None), None)
        lost = [d for d in seal.domains if d not in here]
        if lost or manifest is None:
            raise _lost(lost, manifest, source, seal)
        # They are equal by the sealed digest; thousands of ranks need not be sent one.
        return _Shown(None if all(a.found for a in answers) else manifest)

    shown = source.control.step("find the source", look, decide)
    found = kept[0] if kept else None
    manifest = shown.manifest if found is None else found.manifest
    if manifest is None:
        raise AssertionError("a sealed save has a manifest")
    listed = [d for d in source.placement.domains if d.id in seal.domains]
    readers: dict[str | None, Sequence[int]] = {d.id: d.ranks for d in listed}
    readers[None] = tuple(sorted(rank for d in listed for rank in d.ranks))
    return Held(manifest, found, readers)


def _found_here(source: Seat, seal: Seal) -> Found:
    try:
        return drive(find(seal, source.caps.shape, source.storage.root), source.storage)
    except (NotFoundError, StaleError) as error:
        raise IncompleteCheckpointError(
            f"{seal.name} cannot be copied: {error.message}",
            uri=source.storage.uri(seal.name),
            rank=source.control.rank,
            hint="it was removed by hand, or this node does not see the disk that holds it",
        ) from error


def _lost(
    lost: Sequence[str], manifest: Manifest | None, source: Seat, seal: Seal
) -> IncompleteCheckpointError:
    hosts = {d.id: ", ".join(d.hosts) for d in (() if manifest is None else manifest.domains)}
    places = ", ".join(f"{d} ({hosts[d]})" if hosts.get(d) else d for d in lost)
    return IncompleteCheckpointError(
        f"{seal.name} cannot be copied: no rank sees its domains {places}",
        uri=source.storage.uri(seal.name),
        hint="start on the nodes that hold them",
    )


# -- without a log --------------------------------------------------------------------------------


def _find_unlogged(source: Seat, name: str) -> Held:
    if len(source.placement.domains) > 1:
        raise StateError(
            "no log tells what of it lies on which node",
            uri=source.storage.uri(name),
            hint="copy it from one node, where all of its files are",
        )
    found = locate(source, name)
    manifest = found.manifest
    if manifest is None:
        told = source.control.step(
            "what stock torch wrote",
            lambda: None,
            lambda _: _Shown(stock_manifest(source.storage, name)),
        )
        manifest = told.manifest
    if manifest is None:
        raise AssertionError("the coordinator described it")
    ranks = tuple(range(source.control.size))
    readers: dict[str | None, Sequence[int]] = dict.fromkeys(
        (f.domain for f in manifest.files), ranks
    )
    readers[None] = ranks
    return Held(manifest, found, readers)


def stock_manifest(storage: Storage, name: str) -> Manifest:
    """Local. A plain DCP checkpoint as a manifest would describe it. Its id is made of what it
    consists of, so that the same one gets the same.

    IncompleteCheckpointError: a file of it is missing, or too short.
    """
    raw = read_limited(storage, f"{name}/.metadata")
    metadata = decode_metadata(raw, storage.uri(name))
    needs: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needs[info.relative_path] = max(end, needs.get(info.relative_path, 0))
    files, seen = [], xxhash.xxh3_128(raw)
    for path, least in sorted(needs.items()):
        size, version = _look(storage, f"{name}/{path}")
        if size < least:
            raise IncompleteCheckpointError(
                f"{path} has {size} bytes, and its items need {least}", uri=storage.uri(name)
            )
        files.append(FileRecord(path, size))
        seen.update(f"{path} {size} {version}".encode())
    save_id = f"dcp-{seen.hexdigest()[:16]}"
    return Manifest(save_id, name, step_of(name, None), tuple(files), (), world_size=len(files))


def _look(storage: Storage, key: str) -> tuple[int, str]:
    """A file's size, and what changes when it is written again: retraining uses the same names."""
    try:
        found = storage.stat(key)
    except NotFoundError as error:
        raise IncompleteCheckpointError(
            f"{key} cannot be copied: it is not there", uri=storage.uri(key)
        ) from error
    path = storage.local_path(key)
    return found.size_bytes, found.etag or ("" if path is None else str(os.stat(path).st_mtime_ns))
