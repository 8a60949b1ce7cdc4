"""Stock DCP files that arrived one by one, committed: what moving ``.metadata`` into place means.

    .metadata.tmp   as torch's writer wrote it: items are in __0_0.distcp, __1_0.distcp ...
    check           each of these files arrived, and is at least as long as its items need
    .metadata       the same with <save_id>/__0_0.distcp, sealed by the ordinary commit

If something is missing, that is an IncompleteCheckpointError, and nothing becomes visible. The
pickle is read by the allow-list of ``metadata.py``; extensions' descriptors and the planner's data
are not changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import read_limited
from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.shared_attempt import Joined, open_attempt
from ckptfs.commit.save.spec import Committed, IfExists, SaveSpec, WrittenPart
from ckptfs.commit.session import step_of
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import encode_metadata
from ckptfs.errors import IncompleteCheckpointError, ManifestError, NotFoundError
from ckptfs.events import Counters
from ckptfs.storage.threads import Threads

__all__ = ["ARRIVED", "ARRIVES", "commit_arrived", "missing", "needed"]

# The name under which metadata waits that was written in place, and all names that wait for the commit.
ARRIVED = ".metadata.arrived"
ARRIVES = re.compile(r"[^/]+\.distcp|\.metadata\.(tmp|arrived)|__\d+\.metadata(\.tmp)?")

_STATS_AT_ONCE = 16  # a thousand ranks' files are a thousand requests on an object store


def commit_arrived(joined: Joined, metadata_file: str, *, replace: bool) -> Committed:
    """Commit what arrived, as the staged ``metadata_file`` describes it. Local.

    With ``replace``, the commit replaces an older checkpoint of the name, which stays until then.
    When this returns, the checkpoint is committed, durable and projected. After
    IncompleteCheckpointError, ManifestError, CommitConflictError, FencedError or RunBusyError
    nothing of it is visible, and it is given up.
    """
    name, storage = joined.keys.name, joined.session.storage
    where = storage.uri(name)
    if_exists = IfExists.REPLACE if replace else IfExists.ERROR
    with open_attempt(joined, SaveSpec(name, step_of(name, None), if_exists)) as attempt:
        metadata = decode_metadata(read_limited(storage, joined.key(metadata_file)), where)
        _refuse_unwritten(metadata, where)
        sizes = _sizes(joined, _needs(metadata))
        _refuse_missing(joined, _needs(metadata), sizes)
        # Left by an earlier try with fewer files, or without some of the ranks: not part of this save.
        spare = [f for f in joined.files() if f not in sizes and ARRIVES.fullmatch(f)]
        storage.remove_many([joined.key(file) for file in spare])
        records = tuple(
            FileRecord(f"{attempt.save_id}/{file}", size, joined.session.placement.mine.id)
            for file, size in sizes.items()
            if size is not None
        )
        total = sum(record.size_bytes for record in records)
        items = len(metadata.storage_data)
        part = WrittenPart(
            records,
            Counters(size_bytes=total, payload_bytes=total, files=len(records), items=items),
        )
        described = encode_metadata(_moved(metadata, str(where), attempt.save_id))
        return attempt.commit(lambda: part, lambda _: {METADATA: described})


def missing(joined: Joined, metadata_file: str) -> list[str]:
    """Return the files that ``metadata_file`` refers to and that have not arrived whole. Local."""
    raw = read_limited(joined.session.storage, joined.key(metadata_file))
    needs = _needs(decode_metadata(raw, joined.session.storage.uri(joined.keys.name)))
    return _short(needs, _sizes(joined, needs))


def needed(data: bytes, where: object) -> Mapping[str, int] | None:
    """Return the files that a stock ``.metadata`` refers to, and the bytes that each has to have.

    None if it is not DCP's, or names classes that are not read.
    """
    try:
        return _needs(decode_metadata(data, where))
    except ManifestError:
        return None


def _needs(metadata: Metadata) -> dict[str, int]:
    """Return the files that have items, and the bytes that each has to have at least."""
    needs: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needs[info.relative_path] = max(needs.get(info.relative_path, 0), end)
    return needs


def _sizes(joined: Joined, needs: Mapping[str, int]) -> dict[str, int | None]:
    storage = joined.session.storage
    storage.refresh(joined.keys.data)

    def size(file: str) -> int | None:
        if "/" in file:
            return None  # files arrive under plain names
        try:
            return storage.stat(joined.key(file)).size_bytes
        except NotFoundError:
            return None

    with Threads(min(_STATS_AT_ONCE, max(1, len(needs))), "ckptfs-stat") as threads:
        return dict(zip(needs, threads.map(size, needs), strict=True))


def _short(needs: Mapping[str, int], sizes: Mapping[str, int | None]) -> list[str]:
    def short(size: int | None, least: int) -> bool:
        return size is None or size < least

    return [file for file, least in needs.items() if short(sizes[file], least)]


def _refuse_missing(
    joined: Joined, needs: Mapping[str, int], sizes: Mapping[str, int | None]
) -> None:
    short = _short(needs, sizes)
    if not short:
        return
    file, size = short[0], sizes[short[0]]
    why = "never arrived" if size is None else f"has {size} bytes and needs {needs[file]}"
    raise IncompleteCheckpointError(
        f"{len(short)} of {len(needs)} files are missing, the first: {file} {why}",
        uri=joined.session.storage.uri(joined.keys.name),
        hint="nothing was committed; the ranks of one save share a process group, and a filesystem "
        "or bucket that all of them see (node-local disks need ckptfs.save or StorageWriter)",
    )


def _refuse_unwritten(metadata: Metadata, where: object) -> None:
    """Refuse a save without all its items: torch's writer ignores items of a thread that failed."""
    lost: list[str] = []
    for key, value in metadata.state_dict_metadata.items():
        items = (
            [MetadataIndex(key)]
            if isinstance(value, BytesStorageMetadata)
            else [MetadataIndex(key, chunk.offsets) for chunk in value.chunks]
        )
        lost += [key for item in items if item not in metadata.storage_data]
    if lost:
        raise IncompleteCheckpointError(
            f"{len(lost)} planned items were not written, the first: {lost[0]}",
            uri=where,
            hint="nothing was committed; a thread of the writer failed (thread_count): see its log",
        )


def _moved(metadata: Metadata, checkpoint_id: str, save_id: str) -> Metadata:
    for index, info in metadata.storage_data.items():
        path = f"{save_id}/{info.relative_path}"
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    return metadata
