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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Loan", "Resolve", "host_tensor", "memory_of", "tensor_over"]


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
    memory: Any = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    # ctypes does not know whose memory this is: a view of a temporary would read freed memory.
    memory.owner = tensor
    return memoryview(memory).cast("B")


def tensor_over(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of these bytes; a copy where they do not begin at a multiple of its size.

    Without a copy it is good for as long as ``data`` is.
    """
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)
