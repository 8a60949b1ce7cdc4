"""Bytes and nothing else: what the limits are made of.

size_of, bytes_of      of a state, of a tensor
write_all, fill        a system call until it has done everything
noise                  page-aligned memory that no storage can compress
takes_direct           whether a directory's files can be written past the page cache
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckptfs.bench.states import State, local_of

__all__ = [
    "bytes_of",
    "fill",
    "noise",
    "parts_of",
    "rounded",
    "size_of",
    "takes_direct",
    "write_all",
]

_BLOCK_BYTES = 4096  # O_DIRECT: offset, length and memory are multiples of it


def size_of(state: State) -> int:
    """Return the bytes of all tensors of ``state`` on this rank."""
    return sum(local_of(tensor).nbytes for tensor in state.values())


def parts_of(part: memoryview, size: int) -> Iterator[memoryview]:
    """Yield ``part`` again and again, until there are ``size`` bytes."""
    for start in range(0, size, len(part)):
        yield part[: min(len(part), size - start)]


def rounded(size: int) -> int:
    """The next multiple of a block, at or above ``size``."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def write_all(
    write: Callable[[int, memoryview, int], int], fd: int, data: memoryview, at: int
) -> None:
    """Write until nothing is left.

    Args:
        write: As ``os.pwrite``; may be short.
        fd: The file.
        data: The bytes.
        at: Where in the file to begin.
    """
    while data:
        done = write(fd, data, at)
        data, at = data[done:], at + done


def fill(fd: int, buffer: memoryview, at: int, wanted: int) -> None:
    """Read into a buffer.

    Args:
        fd: The file.
        buffer: What is filled.
        at: Where in the file to begin.
        wanted: How many bytes at least.

    Raises:
        EOFError: There are fewer.
    """
    filled = 0
    while filled < wanted:
        done = os.preadv(fd, [buffer[filled:]], at + filled)
        if not done:
            raise EOFError(f"{wanted - filled} bytes are missing")
        filled += done


def noise(size: int) -> memoryview:
    """Return ``size`` bytes of page-aligned memory full of noise: zeros are cheap for some storages."""
    memory = memoryview(mmap.mmap(-1, size))
    random = torch.Generator().manual_seed(size)
    noise = torch.empty(size // 8, dtype=torch.int64).random_(generator=random)
    memory[:] = bytes_of(noise)
    return memory


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which is contiguous and on the CPU."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def takes_direct(directory: str) -> bool:
    """Whether files below ``directory``, which exists, can be opened past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return False
    path = os.path.join(directory, f"direct-{os.getpid()}")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError:
        return False
    else:
        os.close(fd)
        return True
    finally:
        if os.path.exists(path):
            os.unlink(path)
