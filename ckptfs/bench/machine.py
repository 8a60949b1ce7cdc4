"""Describe what a number was measured on: machine, filesystem, versions. No host or user names."""

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

from ckptfs._version import __version__

__all__ = ["available_memory_bytes", "describe", "filesystem", "versions"]

_SLOW_LOOKUP_S = 0.5


def describe(directory: Path) -> dict[str, Any]:
    """Describe this machine and the disk of ``directory``.

    Args:
        directory: A directory that exists and is writable.

    Returns:
        The properties of the machine, as JSON values.

    Raises:
        OSError: ``directory`` does not exist or is not writable.
    """
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "filesystem": filesystem(directory),
        "fsync_ms": round(_fsync_ms(directory), 3),
        "reverse_lookup_s": round(_reverse_lookup_s(), 3),
        "python": platform.python_version(),
    }


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the installed packages ``names``, "none" for those that are not."""
    return {name: __version__ if name == "ckptfs" else _version(name) for name in names}


def filesystem(directory: Path) -> str:
    """The type of the mount that holds ``directory``; "unknown" if the system does not say."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    holding = [m for m in mounts if directory.resolve().is_relative_to(_unescaped(m[1]))]
    # If several mounts have the same path, the last one is visible.
    return (
        max(enumerate(holding), key=lambda m: (len(m[1][1]), m[0]))[1][2] if holding else "unknown"
    )


def available_memory_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _unescaped(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _fsync_ms(directory: Path, tries: int = 15) -> float:
    """Return the median time to write a file of 4 KiB and fsync it: the unit cost of commits."""
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
    """Return the longest of some reverse look-ups of ::1, which c10d makes for every connection.

    If ::1 is missing from /etc/hosts, a lost DNS packet costs seconds, which no engine is to blame for.
    """
    longest = 0.0
    for _ in range(tries):
        started = time.perf_counter()
        with contextlib.suppress(OSError):
            socket.getnameinfo(("::1", 80), socket.NI_NUMERICSERV)
        longest = max(longest, time.perf_counter() - started)
        if longest > _SLOW_LOOKUP_S:
            break
    return longest


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
