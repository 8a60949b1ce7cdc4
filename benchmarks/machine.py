"""What a number was measured on: machine, filesystem, versions. No names of hosts or people."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import statistics
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "xxhash", "fsspec")


def describe(directory: Path) -> dict[str, Any]:
    """The machine and the place where the benchmark writes."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "filesystem": _filesystem(directory),
        "fsync_ms": round(_fsync_ms(directory), 3),
        "reverse_lookup_s": round(_reverse_lookup_s(), 3),
        "python": platform.python_version(),
        "versions": {"ckptfs": _ckptfs_version(), **versions(*PACKAGES)},
    }


def versions(*names: str) -> dict[str, str]:
    """The versions of installed packages, "none" for those that are not."""
    return {name: _version(name) for name in names}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _filesystem(directory: Path) -> str:
    """The type of the mount that holds ``directory``."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    holding = [m for m in mounts if directory.resolve().is_relative_to(m[1])]
    return max(holding, key=lambda m: len(m[1]))[2] if holding else "unknown"


def _fsync_ms(directory: Path, tries: int = 15) -> float:
    """The median of writing 4 KiB into a new file and fsyncing it: the unit that commits cost."""
    spent = []
    for _ in range(tries):
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            started = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            spent.append(time.perf_counter() - started)
    return statistics.median(spent) * 1e3


def _reverse_lookup_s(tries: int = 30) -> float:
    """The longest of some reverse look-ups of ::1, which c10d makes for every connection.

    Where ::1 is missing from /etc/hosts a lost DNS packet costs seconds: no checkpoint's fault.
    """
    longest = 0.0
    for _ in range(tries):
        started = time.perf_counter()
        with contextlib.suppress(OSError):
            socket.getnameinfo(("::1", 80), socket.NI_NUMERICSERV)
        longest = max(longest, time.perf_counter() - started)
        if longest > 0.5:
            break
    return longest


def _ckptfs_version() -> str:
    from ckptfs import __version__

    return __version__


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
