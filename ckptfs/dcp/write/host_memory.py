"""The data of an item as the layout needs it: bytes, or a tensor with its payload as its memory.

    planner.resolve_data(item)  ->  bytes of an object
                                ->  a tensor on any device, a view, not contiguous, a subclass
    host_tensor(tensor)         ->  plain, on the host, contiguous, its storage exactly its bytes

torch.save writes a tensor's whole storage: of a view of ten floats into fifty million it would write all
fifty million. If the memory is right and only the storage is too large, ``host_tensor`` copies nothing.
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

__all__ = ["Loan", "Resolve", "check_memory", "host_tensor", "memory_of", "tensor_view"]


# One type for memory of any size: ctypes takes long to make a type, and caches one for each size.
_ANY = ctypes.c_char * (sys.maxsize >> 1)


def _nobody() -> None:
    """Do nothing: no caller waits for this item."""


@dataclass(frozen=True, slots=True)
class Loan:
    """The data of an item, how long its memory stays unchanged, and callbacks for its end.

    Attributes:
        data: A tensor, or the bytes of an object.
        stays: True if the memory stays unchanged until the file is closed, so that it may be lent to the
            writer. False if it stays unchanged only until ``done()`` or ``back()`` is called.
        done: To be called once the writer has taken or copied every byte.
        back: To be called if the data was only looked at; it is resolved again when it is written.
    """

    data: torch.Tensor | io.BytesIO
    stays: bool = True
    done: Callable[[], None] = _nobody
    back: Callable[[], None] = _nobody


# Data that is not wrapped in a Loan stays unchanged until the file is closed.
Resolve = Callable[[WriteItem], "torch.Tensor | io.BytesIO | Loan"]


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as a plain contiguous host tensor with a storage of exactly its bytes.

    Shape and dtype stay. Nothing is copied if the tensor is contiguous host memory already.
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
    """Return the bytes of a contiguous host tensor as a writable view, without a copy.

    This works for every dtype. The view keeps the tensor alive.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(bytearray())
    address, begin = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    if not address or begin + size_bytes > tensor.untyped_storage().nbytes():
        raise _no_memory(tensor)
    memory: Any = _ANY.from_address(address)
    # ctypes does not know who owns this memory: a view of a temporary would read freed memory.
    memory.owner = tensor
    return memoryview(memory).cast("B")[:size_bytes]


def check_memory(tensor: torch.Tensor) -> None:
    """Raise StateError if a host tensor does not own all of the memory that its shape needs.

    Either the memory was freed, as sharded training does with parameters between two uses, or it never
    existed. What is at these addresses belongs to something else.
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


def tensor_view(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of these bytes; a copy if they are not aligned to the dtype's item size.

    Without a copy the tensor is valid only as long as ``data`` is.
    """
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)
