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

from ckptfs._version import __version__

__all__ = ["available_memory_bytes", "describe", "filesystem", "versions"]

_SLOW_LOOKUP_S = 0.5


def describe(directory: Path) -> dict[str, Any]:
    """The machine, and the disk below ``directory``, which exists and is writable. OSError: it is not."""
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
    """The type of the mount that holds ``directory``, "unknown" where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    holding = [m for m in mounts if directory.resolve().is_relative_to(_unescaped(m[1]))]
    # Of mounts on one path the last one is seen.
    return (
        max(enumerate(holding), key=lambda m: (len(m[1][1]), m[0]))[1][2] if holding else "unknown"
    )


def available_memory_bytes() -> int | None:
    """Return the bytes that processes may still take without swapping; None where the system does not say."""
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
        if longest > _SLOW_LOOKUP_S:
            break
    return longest


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
