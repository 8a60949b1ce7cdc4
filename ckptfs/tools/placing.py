"""Which bytes hold which tensor, by ``.metadata`` or safetensors headers; checks of these places.

places_of(storage, found)          path -> (start, stop, key), for messages; {} if it is not known
look_into(storage, seen)           checks .metadata: it names this save, listed files and ranges inside
                                   them, and the chunks of each tensor fill it
look_at_stock(storage, seen)       the same for a plain DCP checkpoint, which has sizes but no digests
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptfs.commit.catalog.catalog import Found
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.manifest import digest_of
from ckptfs.commit.operations import read_limited
from ckptfs.commit.paths import METADATA
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.planning.global_plan import fills
from ckptfs.dcp.read.data_file import Verify
from ckptfs.dcp.read.read_plan import untiled
from ckptfs.dcp.safetensors.safetensors_reader import read_layout
from ckptfs.errors import CkptfsError, ManifestError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.tools.findings import Damage, Looked
from ckptfs.uri import Uri

__all__ = ["Places", "keys_in", "look_at_stock", "look_into", "places_of"]

Places = Mapping[str, Sequence[tuple[int, int, str]]]

_DO = "copy it back from another place, or restore another checkpoint"
_MOST = 5


def places_of(storage: Storage, found: Found) -> Places:
    """Return the byte ranges of the leaves of ``found`` in ``storage``; empty if unknown."""
    manifest = found.manifest
    try:
        if manifest is not None and manifest.artifact is Kind.DIRECTORY:
            return _by_path(read_layout(storage, found, Verify.OFF).metadata)
        return _by_path(_decoded(storage, found))
    except CkptfsError:
        return {}  # of damaged .metadata: a finding of its own


def keys_in(places: Places, path: str, start: int, stop: int) -> tuple[str, ...]:
    """Return the leaves that use any of these bytes of a file, in their order in the file. Pure.

    Args:
        places: The byte ranges of the leaves.
        path: The file.
        start: The first byte.
        stop: The byte after the last one.
    """
    return tuple(key for low, high, key in places.get(path, ()) if low < stop and start < high)


def look_into(storage: Storage, seen: Looked) -> None:
    """Check ``.metadata`` in ``storage`` and add findings to ``seen``.

    This finds a change that was made to ``.metadata`` and to the manifest alike.

    Args:
        storage: The run's.
        seen: The checkpoint.
    """
    found, manifest = seen.found, seen.manifest
    if found is None or manifest is None or manifest.artifact is Kind.DIRECTORY or manifest.parts:
        return
    path = f"{manifest.save_id}/{METADATA}"
    if path not in seen.sizes or any(finding.path == path for finding in seen.findings):
        return  # it belongs to another domain, or has a finding already
    uri = storage.uri(found.metadata)
    try:
        metadata = _decoded(storage, found)
    except ManifestError as error:
        seen.add(Damage.METADATA, uri, error.message, _DO, path=path)
        return
    named_save = None if metadata.storage_meta is None else metadata.storage_meta.save_id
    if named_save not in (None, manifest.save_id):
        what = f"it names save {named_save} instead of {manifest.save_id}"
        seen.add(Damage.METADATA, uri, what, _DO, path=path)
    sizes = {f.path: f.size_bytes for f in manifest.files}
    for what in _outside(_by_path(metadata), sizes):
        seen.add(Damage.METADATA, uri, what, _DO, path=path)
    _look_at_chunks(seen, metadata, uri, path, is_complete=len(manifest.domains) <= 1)


def look_at_stock(storage: Storage, seen: Looked) -> None:
    """Check a plain DCP checkpoint in ``storage`` by its sizes, and add findings to ``seen``."""
    found = seen.found
    if found is None:
        return
    seen.notes.append("no digests: sizes only")
    uri = storage.uri(found.metadata)
    try:
        metadata = _decoded(storage, found)
        places = _by_path(metadata)
    except ManifestError as error:
        seen.add(Damage.METADATA, uri, error.message, _DO, path=METADATA)
        return
    _look_at_chunks(seen, metadata, uri, METADATA, is_complete=True)
    seen.sizes[METADATA] = storage.stat(found.metadata).size_bytes
    for path, ranges in sorted(places.items()):
        needed, keys = max(stop for _, stop, _ in ranges), tuple(key for _, _, key in ranges)
        where = storage.uri(f"{found.home}/{path}")
        try:
            size = storage.stat(f"{found.home}/{path}").size_bytes
        except NotFoundError:
            seen.add(Damage.MISSING, where, "it is missing", _DO, path=path, tensors=keys)
            continue
        seen.sizes[path] = size
        if size < needed:
            lost = keys_in(places, path, size, needed)
            what = f"it has {size} bytes, .metadata needs {needed}"
            details = {"path": path, "start": size, "stop": needed, "tensors": lost}
            seen.add(Damage.SIZE, where, what, _DO, **details)


def _look_at_chunks(
    result: Looked, metadata: Metadata, uri: Uri, path: str, *, is_complete: bool
) -> None:
    """Add a finding for each tensor with chunks that overlap or leave a gap: a load refuses it.

    is_complete: whether all chunks are described here, and none in the ``.metadata`` of another domain.
    """
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        pieces = [(tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks]
        if fills(pieces, tuple(entry.size)):
            continue
        held = sum(math.prod(lengths) for _, lengths in pieces)
        if is_complete or held >= math.prod(entry.size):
            what = untiled(key, pieces, tuple(entry.size)).message
            result.add(Damage.METADATA, uri, what, _DO, path=path, tensors=(key,))


def _decoded(storage: Storage, found: Found) -> Metadata:
    raw, manifest = read_limited(storage, found.metadata), found.manifest
    if manifest is not None:
        path = f"{manifest.save_id}/{METADATA}"
        sealed = {f.digest for f in manifest.files if f.path == path}
        if sealed and digest_of(raw) not in sealed:
            raise ManifestError("it differs from what was committed")
    shared = frozenset() if manifest is None else {f.path for f in manifest.files if f.is_shared}
    return decode_metadata(raw, storage.uri(found.metadata), shared)


def _by_path(metadata: Metadata) -> dict[str, list[tuple[int, int, str]]]:
    found: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for index, place in metadata.storage_data.items():
        ends = (place.offset, place.offset + place.length)
        found[place.relative_path].append((*ends, index.fqn))
    for ranges in found.values():
        ranges.sort()
    return found


def _outside(places: Places, sizes: Mapping[str, int]) -> list[str]:
    wrong = [
        f"it places {key!r} in {path}, which the manifest does not list"
        if path not in sizes
        else f"it places {key!r} at {stop} of {path}, which has {sizes[path]} bytes"
        for path, ranges in places.items()
        for _, stop, key in ranges
        if stop > sizes.get(path, -1)
    ]
    more = [f"and {len(wrong) - _MOST} more places that cannot be"] if len(wrong) > _MOST else []
    return wrong[:_MOST] + more
