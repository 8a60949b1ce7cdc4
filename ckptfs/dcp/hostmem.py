"""Host memory for staging: how much there is to take, and how it is taken.

    available_bytes()    what the host and this process's cgroup still give, None where unknown
    host_memory(n)       n bytes, aligned to huge pages, not inherited by forked children

Neither knows who takes it, nor how often.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

__all__ = ["available_bytes", "host_memory"]

_HUGE_BYTES = 2 << 20
_CGROUP = "/sys/fs/cgroup"


def available_bytes() -> int | None:
    """Bytes that can be had without pushing anybody out: the host's and the container's, the less."""
    found = [n for n in (_host_bytes(), _cgroup_bytes()) if n is not None]
    return min(found, default=None)


def _host_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass  # not Linux: what sysconf knows has to do
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_bytes() -> int | None:
    """What the container's limit leaves; None without one. File cache that it could drop counts."""
    try:
        limit = _number(f"{_CGROUP}/memory.max")
        used = _number(f"{_CGROUP}/memory.current")
    except (OSError, ValueError):
        return None  # no cgroup v2, or "max": the host's own number decides
    cached = 0
    with contextlib.suppress(OSError, ValueError), open(f"{_CGROUP}/memory.stat") as lines:
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, limit - used + cached)


def _number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())


def host_memory(size_bytes: int) -> torch.Tensor:
    """A flat uint8 tensor over fresh memory. OSError (ENOMEM) where the system refuses.

    Pages come when they are touched first, 2 MiB at a time where the kernel gives huge ones.
    """
    memory = mmap.mmap(-1, max(1, size_bytes) + _HUGE_BYTES)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Without DONTFORK a data loader forked during a save would make us copy every page that
        # the next save stages.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -flat.data_ptr() % _HUGE_BYTES
    return flat[skip : skip + size_bytes]
