"""A process from which Linux was taken away, as far as Python can: what macOS lacks is gone from the modules.

Started by tests/test_portability.py. It imports every module of ckptfs that needs no extra, saves, loads and keeps
a run. It is not macOS: it shows that nothing at import, and no step of a local save or load, insists on a
name or a file that only Linux has.
"""

from __future__ import annotations

import builtins
import fcntl
import importlib
import mmap
import os
import pkgutil
import resource
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint

# Names that CPython has on Linux and not on macOS.
LINUX_ONLY: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME", "O_RSYNC", "O_LARGEFILE"),
        *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "setns", "unshare"),
        *("posix_fadvise", "posix_fallocate", "fdatasync", "copy_file_range", "splice"),
        *("memfd_create", "pidfd_open", "eventfd", "getrandom"),
        *(
            "getxattr",
            "listxattr",
            "setxattr",
            "removexattr",
            "RWF_NOWAIT",
            "RWF_DSYNC",
            "RWF_HIPRI",
        ),
    ),
    fcntl: (
        "F_OFD_SETLK",
        "F_OFD_SETLKW",
        "F_OFD_GETLK",
        "F_SETPIPE_SZ",
        "F_ADD_SEALS",
        "F_SETLEASE",
    ),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MADV_REMOVE", "MAP_POPULATE"),
    select: ("epoll",),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT", "TCP_QUICKACK"),
    resource: ("prlimit",),
}
EXTRAS = ("ckptfs.integrations", "ckptfs.testing", "ckptfs.__main__")


def _without_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(path, str) and path.startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *rest, **named)

    return opened


def _take_linux_away() -> None:
    for module, names in LINUX_ONLY.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("open", "readlink", "listdir", "stat"):
        setattr(os, name, _without_proc(getattr(os, name)))
    builtins.open = _without_proc(builtins.open)
    sys.platform = "darwin"


def _import_all() -> None:
    import ckptfs

    for module in pkgutil.walk_packages(ckptfs.__path__, "ckptfs."):
        if not module.name.startswith(EXTRAS):
            importlib.import_module(module.name)


def _use(directory: str) -> None:
    import ckptfs

    saved: dict[str, Any] = {"w": torch.arange(1_000_000.0).reshape(1000, 1000), "step": 3}
    loaded: dict[str, Any] = {"w": torch.zeros(1000, 1000), "step": 0}
    with ckptfs.prepare_run(f"{directory}/run") as run:
        ckptfs.save(saved, f"{directory}/run/step_1", run=run)
    ckptfs.load(loaded, f"{directory}/run/step_1")
    assert torch.equal(loaded["w"], saved["w"])
    with ckptfs.CheckpointManager(f"{directory}/kept", mode="async", keep_latest=2) as manager:
        for step in range(1, 5):
            manager.save(step, saved)
    assert [c.step for c in ckptfs.list_checkpoints(f"{directory}/kept")] == [3, 4]


if __name__ == "__main__":
    _take_linux_away()
    _import_all()
    with tempfile.TemporaryDirectory() as scratch:
        _use(scratch)
    print("used without Linux")
