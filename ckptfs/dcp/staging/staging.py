"""Staging: take from the caller's state what a save needs, so that training may continue.

    caller    stage(state)   plan, serialise leaves, copy tensors into a lease          -> Staged
    thread    save_at(Staged, ...)   the ranks agree, write from the copy, commit

    larger than the bound ("waves"): nothing is copied at first
    thread    plans with the other ranks, writes items from the caller's own tensors ...
    caller    ... blocked, until what is left to write fits the bound; copies that, and returns

    into memory that has no pages yet ("late"): that takes ten times as long as the copy
    thread    plans with the other ranks, writes items from the caller's own tensors, from the first on ...
    caller    ... copies, from the last on, what is neither written nor read, and returns when nothing is left

Staging does not talk to other ranks, so ranks may be in different modes. An error here is kept in the StagedState
and raised by ``plan``, inside the ranks' common step: then it fails on all of them.
"""

from __future__ import annotations

import io
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptfs import _torch
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.planning.save_planner import SavePlanner, fingerprints
from ckptfs.dcp.planning.state_dicts import LocalFacts, rename_plan, unwrap_stateful
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.staging.buffers import HostBuffers, Lease
from ckptfs.dcp.write.host_memory import Loan
from ckptfs.errors import StateError

__all__ = [
    "ALIGN_BYTES",
    "CopySize",
    "Packing",
    "StagedState",
    "copy_into",
    "failed",
    "pack",
    "packed_bytes",
    "size_of_copy",
    "size_of_tensors",
    "stage",
]

_PIECE_BYTES = 4 << 20
# For memory that was not touched yet: from which size "late" copies pay, and how long the writer waits for a copy
# before it reads the caller's own tensors.
_FRESH_BYTES = 64 << 20
_PATIENCE_S = 0.25
ALIGN_BYTES = 64  # a cache line, and a multiple of every dtype's size


@dataclass(frozen=True, slots=True)
class _StagingCopy:
    """One copy to make.

    Attributes:
        source: What is copied.
        offset: Where it goes in the memory, in bytes.
        size_bytes: Its size.
        keys: The keys of the tensors in it.
        sole_key: The key of the tensor that it is a copy of. None: flat bytes that several tensors are views of.
    """

    source: torch.Tensor
    offset: int
    size_bytes: int
    keys: tuple[Hashable, ...]
    sole_key: Hashable = None

    def pieces(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield sources and targets in ``memory``, of a few MiB each; one piece if not contiguous."""
        source, size = self.source, self.size_bytes
        if not (_is_plain(source) and source.is_contiguous()):
            spot = _Spot(self.offset, source.dtype, source.shape)
            yield source, _tensor_at(memory, spot)
            return
        flat = torch.empty(0, dtype=torch.uint8, device=source.device)
        begin = int(source.storage_offset()) * source.element_size()
        flat.set_(source.untyped_storage(), begin, (size,), (1,))
        for at in range(0, size, _PIECE_BYTES):
            end = min(size, at + _PIECE_BYTES)
            yield flat[at:end], memory[self.offset + at : self.offset + end]


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a tensor begins in the memory, in bytes."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class Packing:
    """Copies to make, and the place of each tensor afterwards; ``size_bytes`` is the memory needed."""

    copies: tuple[_StagingCopy, ...]
    spots: Mapping[Hashable, _Spot]
    size_bytes: int

    @property
    def on_device(self) -> bool:
        """Whether anything comes from an accelerator."""
        return any(copy.source.device.type != "cpu" for copy in self.copies)


@dataclass(frozen=True, slots=True)
class _Span:
    """A contiguous tensor: bytes ``begin`` to ``end`` of its storage."""

    key: Hashable
    tensor: torch.Tensor
    begin: int
    end: int


def pack(tensors: Mapping[Any, torch.Tensor]) -> Packing:
    """Give every tensor a place. They may be anywhere, overlap, be views or be empty."""
    spans: dict[tuple[torch.device, int], list[_Span]] = defaultdict(list)
    odd: dict[Hashable, list[tuple[Hashable, torch.Tensor]]] = defaultdict(list)
    for key, given in tensors.items():
        tensor = given.detach()
        size = tensor.numel() * tensor.element_size()
        if size and tensor.is_contiguous() and _is_plain(tensor):
            begin = int(tensor.storage_offset()) * tensor.element_size()
            storage = (tensor.device, tensor.untyped_storage().data_ptr())
            spans[storage].append(_Span(key, tensor, begin, begin + size))
        else:
            odd[_identity(tensor)].append((key, tensor))
    copies: list[_StagingCopy] = []
    spots: dict[Hashable, _Spot] = {}
    at = 0
    for group in spans.values():
        for run in _runs(group):
            at = _place_run(run, at, copies, spots)
    for twins in odd.values():
        at = _place_odd(twins, at, copies, spots)
    return Packing(tuple(copies), spots, at)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory contains its values unchanged."""
    return not (tensor.is_conj() or tensor.is_neg())


def packed_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return a bound on the size of any packing of these; shared memory counts each time."""
    return sum(t.numel() * t.element_size() + 2 * ALIGN_BYTES for t in tensors)


def _identity(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _runs(spans: list[_Span]) -> list[list[_Span]]:
    """Group the spans of one storage: those that touch or overlap are in one group."""
    if len(spans) == 1:
        return [spans]
    runs: list[list[_Span]] = []
    end = -1
    for span in sorted(spans, key=lambda s: (s.begin, s.end)):
        if span.begin > end:
            runs.append([])
            end = span.end
        runs[-1].append(span)
        end = max(end, span.end)
    return runs


def _place_run(
    run: list[_Span], at: int, copies: list[_StagingCopy], spots: dict[Hashable, _Spot]
) -> int:
    begin, end = run[0].begin, max(span.end for span in run)
    # The same distance from a cache line as in the storage: every dtype in the run keeps its alignment.
    at += (begin - at) % ALIGN_BYTES
    first = run[0].tensor
    if len(run) == 1:
        copies.append(_StagingCopy(first, at, end - begin, (run[0].key,), run[0].key))
        spots[run[0].key] = _Spot(at, first.dtype, first.shape)
        return at + end - begin
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    flat.set_(first.untyped_storage(), begin, (end - begin,), (1,))
    copies.append(_StagingCopy(flat, at, end - begin, tuple(span.key for span in run)))
    for span in run:
        spots[span.key] = _Spot(at + span.begin - begin, span.tensor.dtype, span.tensor.shape)
    return at + end - begin


def _place_odd(
    twins: list[tuple[Hashable, torch.Tensor]],
    at: int,
    copies: list[_StagingCopy],
    spots: dict[Hashable, _Spot],
) -> int:
    first, tensor = twins[0]
    size = tensor.numel() * tensor.element_size()
    at += -at % ALIGN_BYTES
    if size:
        copies.append(_StagingCopy(tensor, at, size, tuple(key for key, _ in twins), first))
    for key, twin in twins:
        spots[key] = _Spot(at, twin.dtype, twin.shape)
    return at + size


def copy_into(
    memory: torch.Tensor, packing: Packing, *, is_pinned: bool
) -> dict[Hashable, torch.Tensor]:
    """Make the copies; return the tensors in ``memory``, contiguous, valid as long as it is."""
    devices = set()
    with torch.no_grad():
        tensors = {key: _tensor_at(memory, spot) for key, spot in packing.spots.items()}
        for copy in packing.copies:
            if copy.sole_key is not None:
                target = tensors[copy.sole_key]
            else:
                target = memory[copy.offset : copy.offset + copy.size_bytes]
            wait = is_pinned and copy.source.device.type != "cpu"
            target.copy_(copy.source, non_blocking=wait)
            if wait:
                devices.add(copy.source.device)
        for device in devices:
            _torch.wait_for_device(device)
    return tensors


def _tensor_at(memory: torch.Tensor, spot: _Spot) -> torch.Tensor:
    tensor = torch.empty(0, dtype=spot.dtype, device="cpu")
    if not spot.shape.numel():
        return tensor.reshape(spot.shape)
    begin = (memory.storage_offset() + spot.offset) // spot.dtype.itemsize
    return tensor.set_(memory.untyped_storage(), begin, spot.shape, _contiguous(spot.shape))


def _contiguous(shape: torch.Size) -> list[int]:
    """Return the strides of a contiguous tensor; torch takes as long for them as for a small copy."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return strides[::-1]


_Leaves = dict[MetadataIndex, io.BytesIO]
_Tensors = dict[MetadataIndex, torch.Tensor]

_WAKE_S = 1.0  # the longest that a Ctrl-C goes unnoticed while the caller is blocked


@dataclass(slots=True)
class _FlatState:
    """One rank's state, flattened: its plan, and the value of each item."""

    plan: SavePlan
    leaves: _Leaves = field(default_factory=dict)
    tensors: _Tensors = field(default_factory=dict)
    prints: dict[str, int] = field(default_factory=dict)


def stage(
    state_dict: Mapping[str, Any],
    buffers: HostBuffers,
    pending: PendingSave,
    *,
    compare_ranks: bool,
) -> StagedState:
    """Copy as much of the state as fits the bound. Local; the caller's thread.

    Blocks while earlier saves hold the buffers. After this, submit the save, and call ``StagedState.wait``. Raises
    nothing but Ctrl-C and the like: other errors are in the result.

    Args:
        state_dict: The state.
        buffers: The memory to copy into.
        pending: The save.
        compare_ranks: Whether other ranks take part, so that values have to be compared with theirs.

    Returns:
        What was staged.
    """
    try:
        with torch.no_grad():
            state = _take(state_dict, compare_ranks=compare_ranks)
            return _copied(state, buffers, pending, compare_ranks=compare_ranks)
    except Exception as error:  # noqa: BLE001 - raised on every rank, in the step "plan the save"
        return failed(error, pending)


@dataclass(frozen=True, slots=True)
class CopySize:
    """How much memory the copy of a state takes, and whether some of it is on an accelerator."""

    size_bytes: int
    on_device: bool


def size_of_copy(state_dict: Mapping[str, Any]) -> CopySize:
    """Return what ``stage`` would borrow for this state if all of it fits. Local.

    Raises what a plan raises.
    """
    with torch.no_grad(), gc_paused():
        packing = pack(_take(state_dict, compare_ranks=False).tensors)
    return CopySize(packing.size_bytes, packing.on_device)


def size_of_tensors(value: Any) -> CopySize:
    """Return a bound on the copy of these dicts and lists. Local; calls no ``state_dict()``."""
    with torch.no_grad():
        tensors = [*_tensors_in(value)]
    return CopySize(packed_bytes(tensors), any(t.device.type != "cpu" for t in tensors))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's part of every tensor in dicts and lists."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)
    elif hasattr(value, "local_shards"):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, torch.Tensor) and not value.is_meta:
        yield value.to_local() if hasattr(value, "to_local") else value


def failed(error: BaseException, pending: PendingSave) -> StagedState:
    """Return a StagedState for a state that could not be staged: its plan raises the error."""
    return StagedState(_FlatState(SavePlan([])), pending, error=error)


def _take(state_dict: Mapping[str, Any], *, compare_ranks: bool) -> _FlatState:
    planner = SavePlanner(compare_ranks=False)
    planner.set_up_planner(unwrap_stateful(state_dict))
    with gc_paused():
        state = _FlatState(planner.create_local_plan())
        values = planner.state_dict
        for item in state.plan.items:
            if item.type is WriteItemType.BYTE_IO:
                data = planner.resolve_data(item)
                assert isinstance(data, io.BytesIO)  # noqa: S101 - the type of the item says so
                state.leaves[item.index] = data
            else:
                state.tensors[item.index] = planner.lookup_object(item.index)
        if compare_ranks:
            # Objects are fingerprinted now, because the caller may change them; tensors later, from the copy.
            early = [item for item in state.plan.items if item.type is not WriteItemType.TENSOR]
            state.prints = fingerprints(early, lambda item: values[item.index.fqn])
    return state


def _copied(
    state: _FlatState, buffers: HostBuffers, pending: PendingSave, *, compare_ranks: bool
) -> StagedState:
    """Copy everything if it fits the bound; else leave the tensors to ``StagedState.wait``."""
    with gc_paused():
        packing = pack(state.tensors)
    leaves_bytes = sum(leaf.getbuffer().nbytes for leaf in state.leaves.values())
    available_bytes = max(0, buffers.bound_bytes - leaves_bytes)
    fits = packing.size_bytes <= available_bytes
    # In both cases the memory is borrowed before the save is queued: a save that waited for buffers
    # after its turn had come could wait for one that is queued behind it.
    lease = buffers.lease(packing.size_bytes if fits else available_bytes, pinned=packing.on_device)
    staged = StagedState(state, pending, lease, available_bytes, compare_ranks=compare_ranks)
    try:
        is_fresh = not lease.is_touched and packing.size_bytes >= _FRESH_BYTES
        if fits and is_fresh and not packing.on_device:  # page-locked memory is touched already
            staged.copy_late(packing)
        elif fits:
            staged.copy_all(packing)
    except BaseException:
        lease.release()
        raise
    staged.size_bytes += leaves_bytes
    return staged


class _SaveEnded(Exception):  # noqa: N818 - not an error: everything that had to be read was read
    """The save is over on this rank."""


class StagedState:
    """What was taken of one rank's state; a ``Share``. Closed when the save is over on this rank.

    Attributes:
        error: What staging raised; None if it succeeded.
        planner: Makes the global plan, on the coordinator.
        size_bytes: The bytes of copies and leaves.
        complete: Whether everything was staged, after ``wait``.
    """

    def __init__(
        self,
        state: _FlatState,
        pending: PendingSave,
        lease: Lease | None = None,
        available_bytes: int = 0,
        *,
        compare_ranks: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.error = error
        self.planner = SavePlanner(compare_ranks=compare_ranks)
        self.size_bytes = 0
        self.complete = False
        self._state = state
        self._pending = pending
        self._lease = lease
        self._news = threading.Condition()
        self._ready: dict[Any, torch.Tensor] = {}
        self._live: _Tensors | None = dict(state.tensors)  # None: the caller's tensors are not read
        self._available_bytes = available_bytes
        self._used_bytes = 0
        self._is_assigned = False
        self._copying = False
        self._late: Packing | None = None
        self._late_until = 0.0  # by the monotonic clock: until then the writer waits for copies
        self._filling = False
        self._comparing = False
        self._reading: set[MetadataIndex] = set()
        self._end_reason: BaseException | None = None  # why nothing more may be read

    # -- the caller's thread -----------------------------------------------------------------

    def copy_all(self, packing: Packing) -> None:
        """Copy every tensor now."""
        self._copy(packing)
        assert self._lease is not None  # noqa: S101 - it was made with one
        # A few pages more or less do not matter.
        self._lease.is_touched |= self._lease.size_bytes <= packing.size_bytes + _PIECE_BYTES
        self._forget_live()

    def copy_late(self, packing: Packing) -> None:
        """Let ``wait`` copy every tensor that is not written before."""
        assert self._lease is not None  # noqa: S101 - it was made with one
        self._lease.touch_later = True
        self._late = packing
        self._late_until = time.monotonic() + _PATIENCE_S
        empty = packing.spots.keys() - {key for copy in packing.copies for key in copy.keys}
        spots = {key: packing.spots[key] for key in empty}
        self._ready = {key: _tensor_at(self._lease.memory, spot) for key, spot in spots.items()}
        self._live = {k: v for k, v in (self._live or {}).items() if k not in empty}

    def wait(self) -> None:
        """Return when the tensors may be changed: the rest was copied, or the save is over.

        Whatever is raised here, Ctrl-C included, fails the save on all ranks.
        """
        try:
            if self._late is not None:
                self._copy_remaining(self._late)
            while self._late is None and (window := self._next_window()) is not None:
                self._copy(pack(window))
                with self._news:
                    live = self._live or {}
                    self._live = {k: v for k, v in live.items() if k not in window}
                    self._copying = False
                    self._news.notify_all()
            with self._news:
                self.complete = not self._live or isinstance(self._end_reason, _SaveEnded)
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._forget_live()

    def _copy_remaining(self, packing: Packing) -> None:
        """Copy what is neither written nor being read; return once no caller's tensor is needed."""
        lease = self._lease
        if lease is None:
            return  # the save is over already
        memory, copied, remaining = lease.memory, 0, [*packing.copies]
        while remaining:
            read, todo = [], remaining
            while todo:  # from the last to the first, because the writer begins with the first
                copy = todo.pop()
                if self._is_read(copy):
                    read.append(copy)
                elif self._fill(copy, memory):
                    copied += copy.size_bytes
                    ready = {key: _tensor_at(memory, packing.spots[key]) for key in copy.keys}
                    self._put_ready(ready)
            remaining = read[::-1]
            self._wait_until(partial(self._may_go_on, remaining))
        self._wait_until(lambda: not (self._live or self._reading or self._comparing))
        self.size_bytes += copied
        if copied == sum(copy.size_bytes for copy in packing.copies):
            lease.is_touched = lease.size_bytes <= packing.size_bytes + _PIECE_BYTES

    def _may_go_on(self, read: Sequence[_StagingCopy]) -> bool:
        return not read or not all(self._is_read(copy) for copy in read)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._news:
            # With a timeout, as in ``_next_window``.
            while not self._news.wait_for(lambda: self._end_reason or is_so(), timeout=_WAKE_S):
                pass

    def _is_read(self, copy: _StagingCopy) -> bool:
        """Return whether all tensors of the copy that are still needed are being read."""
        with self._news:
            needed = [key for key in copy.keys if key in (self._live or {})]
            return self._end_reason is None and bool(needed) and self._reading.issuperset(needed)

    def _is_needed(self, copy: _StagingCopy) -> bool:
        return self._end_reason is None and any(key in (self._live or {}) for key in copy.keys)

    def _fill(self, copy: _StagingCopy, memory: torch.Tensor) -> bool:
        """Make the copy as long as it is needed; return whether it was made."""
        for source, target in copy.pieces(memory):
            with self._news:
                if not self._is_needed(copy):
                    return False
                self._filling = True
            try:
                target.copy_(source)
            finally:
                with self._news:
                    self._filling = False
                    self._news.notify_all()
        return True

    def _put_ready(self, ready: Mapping[Any, torch.Tensor]) -> None:
        with self._news:
            needed = {k: v for k, v in ready.items() if k in (self._live or {})}
            if self._end_reason is None:
                self._ready.update(needed)
            self._live = {k: v for k, v in (self._live or {}).items() if k not in needed}
            self._news.notify_all()

    def _next_window(self) -> _Tensors | None:
        """Wait until what is not being read fits, then hold off readers and return it.

        None if nothing is left. Called more than once if an item was looked at and put back after the others
        were copied.
        """
        with self._news:
            # With a timeout: if Ctrl-C came just before the thread went to sleep, Python handles it only
            # when the thread wakes, and the save that the caller waits for may hang.
            while not self._news.wait_for(self._goes_on, timeout=_WAKE_S):
                pass
            if self._end_reason is not None or not self._live:
                return None
            self._copying = True
            return self._unread()

    def give_up(self, why: BaseException) -> None:
        """Let nothing more be read: the save fails, and a caller in ``wait`` returns."""
        with self._news:
            self._end_reason = self._end_reason or why
            self._news.notify_all()

    @property
    def cut_short(self) -> BaseException | None:
        """Why not everything was staged, after ``wait``: staging failed, or the save did before."""
        if self.error is not None:
            return self.error
        return None if self.complete else self._end_reason

    def _goes_on(self) -> bool:
        """Return whether a caller in ``wait`` can copy the rest or has nothing more to do."""
        return self._end_reason is not None or not self._live or self._fits()

    def _fits(self) -> bool:
        """Return whether some tensors are not being read and they fit.

        Tensors that are being read are released by the writer.
        """
        unread = self._unread()
        free_bytes = self._available_bytes - self._used_bytes
        return self._is_assigned and bool(unread) and packed_bytes(unread.values()) <= free_bytes

    def _unread(self) -> _Tensors:
        return {k: v for k, v in (self._live or {}).items() if k not in self._reading}

    def _copy(self, packing: Packing) -> None:
        assert self._lease is not None  # noqa: S101 - it was made with one
        memory = self._lease.memory[self._used_bytes :]
        ready = copy_into(memory, packing, is_pinned=self._lease.is_pinned)
        with self._news:
            self._ready.update(ready)
            self._used_bytes += packing.size_bytes + -packing.size_bytes % ALIGN_BYTES
            self.size_bytes += packing.size_bytes

    def _forget_live(self) -> None:
        # Otherwise the caller's tensors, perhaps replaced by now, would live as long as the save.
        with self._news:
            self._live = None
            self._state.tensors = {}

    # -- the thread that saves ----------------------------------------------------------------

    def plan(self, rank: int, per_rank: Sequence[str]) -> SavePlan:
        """As ``Share.plan``. Raises what staging raised."""
        if self.error is not None:
            raise _common_error(self.error)
        plan = self._state.plan
        if self.planner.compare_ranks:
            late = [item for item in plan.items if item.type is WriteItemType.TENSOR]
            prints = self._state.prints | self._compared(late)
            facts = plan.planner_data
            mappings = facts.mappings if isinstance(facts, LocalFacts) else {}
            plan = replace(plan, planner_data=LocalFacts(mappings, prints))
        return rename_plan(plan, per_rank, rank)

    def _compared(self, items: Sequence[WriteItem]) -> dict[str, int]:
        """Return fingerprints of copies or of the caller's own tensors; the caller waits for that."""
        with self._news:
            self._comparing = True
        try:
            return fingerprints(items, lambda item: self._tensor(item.index))
        finally:
            with self._news:
                self._comparing = False
                self._news.notify_all()

    def take_on(self, items: Sequence[WriteItem]) -> None:
        """As ``Share.take_on``: tensors that this rank does not write are not needed any more."""
        with self._news:
            if self._live is not None:
                assigned = {item.index for item in items}
                self._live = {k: v for k, v in self._live.items() if k in assigned}
            self._is_assigned = True
            self._news.notify_all()

    def resolve(self, item: WriteItem) -> Loan:
        """As ``Share.resolve``: a copy that stays, or the caller's own tensor until it is written."""
        index = item.index
        size = 0 if item.tensor_data is None else item.tensor_storage_size() or 0
        if item.type is WriteItemType.BYTE_IO:
            return Loan(self._state.leaves[index], done=partial(self._wrote, index, size))
        with self._news:
            self._news.wait_for(lambda: self._end_reason or not self._copying)
            if self._late is not None:
                self._news.wait_for(
                    lambda: self._end_reason or index in self._ready, self._patience_s(index)
                )
            if self._end_reason is not None:
                raise StateError("the save was abandoned") from self._end_reason
            ready = self._ready.get(index)
            if ready is None:
                self._reading.add(index)
                self._news.notify_all()  # the rest may fit now
        # From here until ``done`` is called, ``wait`` does not return.
        done = partial(self._wrote, index, size)
        if ready is not None:
            return Loan(ready, done=done)
        back = partial(self._let_go, index, written=False)
        return Loan(self._tensor(index), stays=False, done=done, back=back)

    def _patience_s(self, index: MetadataIndex) -> float | None:
        """Return how long the writer waits for a copy; None: until it is there.

        A tensor that is not contiguous would be copied once more to be written, into memory outside of the
        bound.
        """
        tensor = (self._live or {}).get(index)
        if tensor is not None and not (_is_plain(tensor) and tensor.is_contiguous()):
            return None
        return max(0.0, self._late_until - time.monotonic())

    def _tensor(self, index: MetadataIndex) -> torch.Tensor:
        with self._news:
            ready = self._ready.get(index)
            if ready is None and self._live is not None:
                ready = self._live.get(index)
        if ready is None:
            raise StateError(f"{index.fqn!r} was not staged")
        return ready

    def _wrote(self, index: MetadataIndex, size_bytes: int) -> None:
        self._let_go(index, written=True)
        self._pending.wrote(size_bytes)

    def _let_go(self, index: MetadataIndex, *, written: bool) -> None:
        """Stop reading the caller's tensor; if it was not written, it will be resolved again."""
        with self._news:
            if index not in self._reading:
                return
            if self._end_reason is not None:
                # The caller may have changed it while it was read.
                raise StateError("the save was abandoned") from self._end_reason
            self._reading.discard(index)
            if written and self._live is not None:
                self._live.pop(index, None)
            self._news.notify_all()

    def close(self) -> None:
        """End the save on this rank; nothing is read any more. Calling this twice does no harm."""
        self.give_up(_SaveEnded())
        with self._news:
            self._news.wait_for(lambda: not self._filling)  # a piece at most
            self._ready = {}
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def _common_error(error: BaseException) -> Exception:
    """Return the error to raise in the other ranks' common step.

    Ctrl-C on one rank is a failure for the others; there it must not end a thread.
    """
    if isinstance(error, Exception):
        return error
    return StateError(f"staging was interrupted by {type(error).__name__}")
