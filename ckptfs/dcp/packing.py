"""Where tensors go when they are copied into one piece of host memory. Pure, but for ``copy_into``.

    three views of one storage            one run of bytes, copied once
      [0 .. 100)  [40 .. 60)  [100 .. 120)   ->   [0 .. 120)
    a tensor that is not contiguous       its values, contiguous, once for equal views

Only bytes that a tensor refers to are copied: a view of ten floats into fifty million costs forty
bytes. Tensors that are the same memory (tied weights) stay the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptfs import _torch

__all__ = ["ALIGN_BYTES", "Packing", "copy_into", "pack", "packed_bytes"]

ALIGN_BYTES = 64  # a cache line, and a multiple of every dtype's size


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy to make. whole: it is all of that tensor; None: flat bytes that several are views of."""

    source: torch.Tensor
    offset: int
    size_bytes: int
    whole: Hashable = None


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a tensor begins in the memory, in bytes."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class Packing:
    """Copies to make, and where each tensor is afterwards. size_bytes: memory that it takes."""

    copies: tuple[_Copy, ...]
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
    """Give every tensor a place. They may lie anywhere, overlap, be views or be empty."""
    spans: dict[tuple[torch.device, int], list[_Span]] = defaultdict(list)
    odd: dict[Hashable, list[tuple[Hashable, torch.Tensor]]] = defaultdict(list)
    for key, given in tensors.items():
        tensor = given.detach()
        size = tensor.numel() * tensor.element_size()
        if size and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            begin = int(tensor.storage_offset()) * tensor.element_size()
            storage = (tensor.device, tensor.untyped_storage().data_ptr())
            spans[storage].append(_Span(key, tensor, begin, begin + size))
        else:
            odd[_identity(tensor)].append((key, tensor))
    copies: list[_Copy] = []
    spots: dict[Hashable, _Spot] = {}
    at = 0
    for group in spans.values():
        for run in _runs(group):
            at = _place_run(run, at, copies, spots)
    for twins in odd.values():
        at = _place_odd(twins, at, copies, spots)
    return Packing(tuple(copies), spots, at)


def packed_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """No less than the size of any packing of these; counts shared memory as often as it occurs."""
    return sum(t.numel() * t.element_size() + 2 * ALIGN_BYTES for t in tensors)


def _identity(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same view of the same memory."""
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
    """Spans of one storage, those that touch or overlap together."""
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


def _place_run(run: list[_Span], at: int, copies: list[_Copy], spots: dict[Hashable, _Spot]) -> int:
    begin, end = run[0].begin, max(span.end for span in run)
    # As far from a cache line as in the storage: every dtype in the run keeps its alignment.
    at += (begin - at) % ALIGN_BYTES
    first = run[0].tensor
    if len(run) == 1:
        copies.append(_Copy(first, at, end - begin, run[0].key))
        spots[run[0].key] = _Spot(at, first.dtype, first.shape)
        return at + end - begin
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    flat.set_(first.untyped_storage(), begin, (end - begin,), (1,))
    copies.append(_Copy(flat, at, end - begin))
    for span in run:
        spots[span.key] = _Spot(at + span.begin - begin, span.tensor.dtype, span.tensor.shape)
    return at + end - begin


def _place_odd(
    twins: list[tuple[Hashable, torch.Tensor]],
    at: int,
    copies: list[_Copy],
    spots: dict[Hashable, _Spot],
) -> int:
    first, tensor = twins[0]
    size = tensor.numel() * tensor.element_size()
    at += -at % ALIGN_BYTES
    if size:
        copies.append(_Copy(tensor, at, size, first))
    for key, twin in twins:
        spots[key] = _Spot(at, twin.dtype, twin.shape)
    return at + size


def copy_into(
    memory: torch.Tensor, packing: Packing, *, is_pinned: bool
) -> dict[Hashable, torch.Tensor]:
    """Make the copies; the tensors in ``memory``, contiguous, good for as long as it is."""
    devices = set()
    with torch.no_grad():
        tensors = {key: _tensor_at(memory, spot) for key, spot in packing.spots.items()}
        for copy in packing.copies:
            if copy.whole is not None:
                target = tensors[copy.whole]
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
    """The strides of a contiguous tensor; asking torch for them costs as much as a small copy."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return strides[::-1]
