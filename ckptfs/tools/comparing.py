"""Compare two checkpoints leaf by leaf, in bounded memory whatever their size.

    keys, dtypes, shapes     from both descriptions
    values                   by block digests if both have them and are sharded alike: no data is
                             read; otherwise both are read, about 32 MiB at a time
    norms=True               reads everything: the L2 norms of both and of the difference, and the
                             largest difference

The two checkpoints may have different formats, shardings and storages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ckptfs.commit.digests import ItemDigests
from ckptfs.errors import CkptfsError
from ckptfs.progress import SILENT, Meter
from ckptfs.tools.contents import Contents, Leaf, ObjectLeaf, Shard, TensorLeaf, batches
from ckptfs.tools.inspecting import matching
from ckptfs.tools.opening import open_contents, options_for

if TYPE_CHECKING:
    import torch

__all__ = ["Basis", "Change", "Compared", "Difference", "Norms", "compare", "compare_contents"]


class Change(StrEnum):
    """What became of a leaf.

    Attributes:
        SAME: It is equal.
        ADDED: Only the second checkpoint has it.
        REMOVED: Only the first checkpoint has it.
        SHAPE: It has another shape or dtype, or one is an object and the other a tensor.
        BYTES: Its bytes differ.
        UNKNOWN: There are no digests to compare, and ``read`` is False.
    """

    SAME = "same"
    ADDED = "added"
    REMOVED = "removed"
    SHAPE = "shape"
    BYTES = "bytes"
    UNKNOWN = "unknown"


class Basis(StrEnum):
    """What a verdict is based on.

    Attributes:
        DESCRIPTION: Shape and dtype.
        DIGESTS: The digests of both.
        DATA: The bytes of both.
    """

    DESCRIPTION = "description"
    DIGESTS = "digests"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Norms:
    """L2 norms of one tensor in both checkpoints, in float64; nan if an element is nan.

    Attributes:
        before: Norm in the first checkpoint.
        after: Norm in the second checkpoint.
        difference: Norm of the difference.
        max_abs: The largest absolute difference of two elements.
    """

    before: float
    after: float
    difference: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of one leaf.

    Attributes:
        key: Its key.
        change: What became of it.
        before: The leaf in the first checkpoint; None if it is not there.
        after: The leaf in the second checkpoint; None if it is not there.
        basis: What the comparison is based on.
        changed_bytes: The most bytes that can differ; with digests, a block of 1 MiB counts whole.
        norms: Norms of both; None if they were not wanted.
    """

    key: str
    change: Change
    before: Leaf | None
    after: Leaf | None
    basis: Basis = Basis.DESCRIPTION
    changed_bytes: int = 0
    norms: Norms | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of all leaves of two checkpoints.

    Attributes:
        leaves: One comparison for each key.
    """

    leaves: tuple[Difference, ...]

    @property
    def changed(self) -> tuple[Difference, ...]:
        """The leaves that are known to differ."""
        not_changed = (Change.SAME, Change.UNKNOWN)
        return tuple(leaf for leaf in self.leaves if leaf.change not in not_changed)

    @property
    def unknown(self) -> tuple[Difference, ...]:
        """The leaves that could not be compared."""
        return tuple(leaf for leaf in self.leaves if leaf.change is Change.UNKNOWN)


def compare(
    before: Any,
    after: Any,
    storage_options: Mapping[str, Any] | None = None,
    after_options: Mapping[str, Any] | None = None,
    *,
    filters: Sequence[str] = (),
    norms: bool = False,
    read: bool = True,
    meter: Meter = SILENT,
) -> Compared:
    """Compare two checkpoints. Local, read-only; what is read is verified.

    Args:
        before: The first checkpoint.
        after: The second checkpoint.
        storage_options: Options for fsspec's filesystem of the first; None: only those that its URI
            carries.
        after_options: The same for the second; None: those of the first, if both have the same protocol.
        filters: fnmatch patterns of keys; empty: all keys.
        norms: Compute norms of differences too.
        read: Read the data if digests cannot decide; False leaves such leaves UNKNOWN.
        meter: Counts the bytes that are read.

    Returns:
        The comparison of every leaf of both.

    Raises:
        NotFoundError: One of them does not exist.
        IncompleteCheckpointError: One of them is incomplete.
        IntegrityError: What was read differs from what was written.
        ManifestError: The description of one of them is damaged or too new.
    """
    options = options_for(after, before, storage_options, after_options)
    with (
        open_contents(before, storage_options) as first,
        open_contents(after, options) as second,
    ):
        return compare_contents(
            first.contents, second.contents, filters=filters, norms=norms, read=read, meter=meter
        )


def compare_contents(
    before: Contents,
    after: Contents,
    *,
    filters: Sequence[str] = (),
    norms: bool = False,
    read: bool = True,
    meter: Meter = SILENT,
) -> Compared:
    """Compare two open checkpoints, as ``compare`` does.

    Args:
        before: The first checkpoint.
        after: The second checkpoint.
        filters: fnmatch patterns of keys; empty: all keys.
        norms: Compute norms of differences too.
        read: Read the data if digests cannot decide; False leaves such leaves UNKNOWN.
        meter: Counts the bytes that are read.

    Returns:
        The comparison of every leaf of both.
    """
    old = {leaf.key: leaf for leaf in matching(before.leaves.values(), filters)}
    new = {leaf.key: leaf for leaf in matching(after.leaves.values(), filters)}
    found: dict[str, Difference] = {}
    for key in dict.fromkeys([*old, *new]):
        found[key] = _described(key, old.get(key), new.get(key))
    undecided = [d for d in found.values() if d.change is Change.UNKNOWN]
    for one in undecided:
        found[one.key] = _by_digests(before, after, one)
    if norms or read:
        pairs = [d for d in found.values() if _is_read(d, norms=norms)]
        meter.expect(sum(2 * d.before.size_bytes for d in pairs if d.before is not None))
        for one in _by_data(before, after, pairs, norms=norms, meter=meter):
            found[one.key] = one
    return Compared(tuple(found.values()))


def _is_read(one: Difference, *, norms: bool) -> bool:
    alike = (
        isinstance(one.before, TensorLeaf)
        and isinstance(one.after, TensorLeaf)
        and one.before.shape == one.after.shape
    )
    return one.change is Change.UNKNOWN or (norms and alike)


def _described(key: str, old: Leaf | None, new: Leaf | None) -> Difference:
    """Compare the descriptions of a leaf; UNKNOWN if they are alike."""
    if old is None:
        return Difference(key, Change.ADDED, old, new)
    if new is None:
        return Difference(key, Change.REMOVED, old, new)
    change = Change.UNKNOWN if _kind(old) == _kind(new) else Change.SHAPE
    return Difference(key, change, old, new)


def _kind(leaf: Leaf) -> tuple[Any, ...]:
    return (leaf.dtype_name, leaf.shape) if isinstance(leaf, TensorLeaf) else ()


# -- by digests ----------------------------------------------------------------------


def _by_digests(before: Contents, after: Contents, one: Difference) -> Difference:
    if one.before is None or one.after is None:
        return one
    old, new = before.digests(one.before), after.digests(one.after)
    if old is None or new is None:
        return one
    old_blocks, new_blocks = _blocks(old), _blocks(new)
    if old_blocks.keys() != new_blocks.keys():
        # The shardings differ; or the pickles of an object differ, which may still have equal values.
        return one
    changed = sum(
        size for at, (size, digest) in old_blocks.items() if new_blocks[at] != (size, digest)
    )
    if changed and isinstance(one.before, ObjectLeaf):
        return one
    change = Change.BYTES if changed else Change.SAME
    return replace(one, change=change, basis=Basis.DIGESTS, changed_bytes=changed)


def _blocks(
    items: Sequence[tuple[ItemDigests, Shard | None]],
) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Return (size, digest) of every block of a leaf, by (shard, offset in it, size)."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for item, shard in items:
        begin, end = 0, item.length
        if shard is not None:
            begin, end = item.payload_offset, item.payload_offset + item.payload_length
        where = None if shard is None else (shard.offsets, shard.sizes)
        for block in item.blocks_of(begin, end):
            size = block.stop - block.start
            found[where, block.start - begin, size] = (size, block.digest)
    return found


# -- by data -------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    """Running sums over the pieces of one tensor."""

    before: float = 0.0
    after: float = 0.0
    difference: float = 0.0
    max_abs: float = 0.0
    changed_bytes: int = 0

    def add(self, old: torch.Tensor, new: torch.Tensor, *, norms: bool) -> None:
        if old.dtype == new.dtype:
            changed = _bytes_of(old) != _bytes_of(new)
            self.changed_bytes += int(changed.sum())
        if not norms or not old.numel():
            return
        import torch

        # Dot products, not elementwise squares: each temporary is as large as the piece, in float64.
        x, y = _wide(old), _wide(new)
        self.before += _square(x)
        self.after += _square(y)
        y = y - x
        del x
        self.difference += _square(y)
        most = float(torch.linalg.vector_norm(y, math.inf))
        # max() of floats would drop a nan that comes second.
        self.max_abs = most if math.isnan(most) else max(self.max_abs, most)

    def norms(self) -> Norms:
        apart = math.sqrt(self.difference)
        return Norms(math.sqrt(self.before), math.sqrt(self.after), apart, self.max_abs)


def _by_data(
    before: Contents,
    after: Contents,
    pairs: Sequence[Difference],
    *,
    norms: bool,
    meter: Meter,
) -> Iterator[Difference]:
    sums: dict[str, _Sums] = {}
    tensors = {d.key: d for d in pairs if isinstance(d.before, TensorLeaf)}
    others = {d.key: d.after for d in pairs if isinstance(d.after, TensorLeaf)}
    ordered = [leaf for leaf in before.tensors if leaf.key in tensors]
    for batch in batches(ordered):
        counterparts = [replace(box, leaf=others[box.leaf.key]) for box in batch]
        old, new = before.read(batch), after.read(counterparts)
        for box, ours, other in zip(batch, old, new, strict=True):
            sums.setdefault(box.leaf.key, _Sums()).add(ours, other, norms=norms)
            meter.advance(2 * box.size_bytes)
        del old, new, ours, other  # otherwise they would stay while the next batch is read
    for key, one in tensors.items():
        yield _decided(one, sums.get(key, _Sums()), norms=norms)
    for one in pairs:
        if isinstance(one.before, ObjectLeaf) and isinstance(one.after, ObjectLeaf):
            same = _same_object(before, one.before, after, one.after)
            change = Change.SAME if same else Change.BYTES
            size = 0 if same else max(one.before.size_bytes, one.after.size_bytes)
            yield replace(one, change=change, basis=Basis.DATA, changed_bytes=size)
            meter.advance(2 * one.before.size_bytes)


def _decided(one: Difference, sums: _Sums, *, norms: bool) -> Difference:
    tensor_norms = sums.norms() if norms else None
    if one.change is not Change.UNKNOWN:
        return replace(one, norms=tensor_norms)
    change = Change.BYTES if sums.changed_bytes else Change.SAME
    basis, changed = Basis.DATA, sums.changed_bytes
    return replace(one, change=change, basis=basis, changed_bytes=changed, norms=tensor_norms)


def _same_object(before: Contents, old: ObjectLeaf, after: Contents, new: ObjectLeaf) -> bool:
    """Whether two objects have equal bytes, or equal values that torch pickled differently."""
    if before.blob(old) == after.blob(new):
        return True
    from ckptfs.dcp.planning.leaves import fingerprint_of

    try:
        return fingerprint_of(before.value(old)) == fingerprint_of(after.value(new))
    except CkptfsError:
        raise
    except Exception:  # noqa: BLE001 - what weights_only does not load is compared by its bytes
        return False


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.reshape(-1).to(kind)


def _square(flat: torch.Tensor) -> float:
    import torch

    return float(torch.vdot(flat, flat).real)
