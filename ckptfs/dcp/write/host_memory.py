"""What an item's data looks like to the layout: bytes, or a tensor whose memory is its payload.

    planner.resolve_data(item)  ->  bytes of an object
                                ->  a tensor on any device, a view, not contiguous, a subclass
    host_tensor(tensor)         ->  plain, on the host, contiguous, its storage exactly its bytes

torch.save writes a tensor's whole storage; a view of ten floats into fifty million would write all
of them. Where the memory is right and only the storage is too wide, nothing is copied.
"""

from __future__ import annotations

import ctypes
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckptfs.errors import StateError

__all__ = ["Loan", "Resolve", "check_memory", "host_tensor", "memory_of", "tensor_over"]


# One type for memory of any size: ctypes takes long to make one, and would keep it for each size.
_ANY = ctypes.c_char * (sys.maxsize >> 1)


def _nobody() -> None:
    """Nobody waits for this item."""


@dataclass(frozen=True, slots=True)
class Loan:
    """An item's data, how long its memory stays as it is, and whom to tell when it was written.

    stays: until the file is closed, so that it may be lent to the writer; else only until
    ``done()``, which is called once the writer has taken or copied every byte of it, or ``back()``:
    it was looked at, and is resolved again when it is written.
    """

    data: torch.Tensor | io.BytesIO
    stays: bool = True
    done: Callable[[], None] = _nobody
    back: Callable[[], None] = _nobody


# What is no Loan stays as it is until the file is closed.
Resolve = Callable[[WriteItem], "torch.Tensor | io.BytesIO | Loan"]


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a plain contiguous tensor on the host that owns exactly its bytes.

    Shape and dtype stay. No copy when it is already contiguous host memory.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    size_bytes = plain.numel() * plain.element_size()
    storage = plain.untyped_storage()
    if storage.nbytes() == size_bytes:
        return plain
    if size_bytes == 0:
        return torch.empty(plain.shape, dtype=plain.dtype)
    begin = plain.storage_offset() * plain.element_size()
    # A slice of a storage shares its memory and keeps it alive.
    narrow = storage[begin : begin + size_bytes]
    return torch.empty(0, dtype=plain.dtype).set_(narrow, 0, plain.shape, plain.stride())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable, without a copy.

    Works for every dtype. The view keeps the tensor alive.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(bytearray())
    address, begin = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    if not address or begin + size_bytes > tensor.untyped_storage().nbytes():
        raise _no_memory(tensor)
    memory: Any = _ANY.from_address(address)
    # ctypes does not know whose memory this is: a view of a temporary would read freed memory.
    memory.owner = tensor
    return memoryview(memory).cast("B")[:size_bytes]


def check_memory(tensor: torch.Tensor) -> None:
    """StateError where a host tensor's memory is not all its own: it was given back, as sharded training
    does with parameters between two uses, or it never was. What lies there is somebody else's.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    if tensor.data_ptr() == 0 or end > tensor.untyped_storage().nbytes():
        raise _no_memory(tensor)


def _no_memory(tensor: torch.Tensor) -> StateError:
    return StateError(
        f"a tensor of shape {tuple(tensor.shape)} has no memory of its size",
        hint="its storage was freed or made smaller; gather it before you save it or load into it",
    )


def tensor_over(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of these bytes; a copy where they do not begin at a multiple of its size.

    Without a copy it is good for as long as ``data`` is.
    """
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)
