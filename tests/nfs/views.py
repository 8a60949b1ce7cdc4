"""What one client sees of a run, asked as programs usually ask and as ckptfs asks.

    naive_...   plain calls on paths: answered from the client's cache, where it has one
    ours        one call of the library's own storage; ours_fresh: the holder of the name is opened first

Functions that run on the clients of the lab, imported there by name; so nothing heavy is imported.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ckptfs.storage.base import DataReader
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri

__all__ = [
    "close_all",
    "goes_stale",
    "hold",
    "hold_mapped",
    "hold_reader",
    "is_absent",
    "maps",
    "naive_absences",
    "naive_absences_after_useless_looks",
    "naive_read",
    "naive_reads",
    "naive_rmtree",
    "our_reads",
    "ours",
    "ours_fresh",
    "read_held",
    "read_held_naively",
    "replace_for",
    "rewrite",
    "storage",
    "touch_mapped",
    "write",
]

_open: dict[str, int | mmap.mmap | DataReader] = {}  # what a test holds open between two calls


def storage(run: str) -> LocalStorage:
    """The library's own storage, new: it remembers nothing."""
    return LocalStorage(Uri.parse(run))


def ours(run: str, method: str, *args: Any) -> Any:
    """One call of the library's storage."""
    return getattr(storage(run), method)(*args)


def ours_fresh(run: str, method: str, key: str) -> Any:
    """As ``ours``, after the directory of the key was refreshed."""
    store = storage(run)
    store.refresh(os.path.dirname(key))
    return getattr(store, method)(key)


# -- absences ---------------------------------------------------------------------------------


def naive_absences(directory: str) -> dict[str, bool]:
    """Whether each usual way to look at or into a directory takes it for absent."""
    return {
        "exists": not os.path.exists(directory),
        "stat": _fails(os.stat, directory),
        "listdir": _fails(os.listdir, directory),
        "create": _fails(_touch, f"{directory}/f"),
    }


def naive_absences_after_useless_looks(directory: str) -> dict[str, bool]:
    """The same after each call on the parent that does not ask the server again."""
    parent, absent = os.path.dirname(directory), {}
    os.stat(parent)
    absent["stat of the parent"] = not os.path.exists(directory)
    os.statvfs(parent)
    absent["statvfs of the parent"] = not os.path.exists(directory)
    fd = os.open(parent, os.O_PATH)
    os.fstat(fd)
    os.close(fd)
    absent["O_PATH of the parent"] = not os.path.exists(directory)
    return absent


def is_absent(path: str) -> bool:
    """Whether a plain open says so."""
    return _fails(naive_read, path)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


def _fails(function: Callable[..., object], *args: object) -> bool:
    try:
        function(*args)
    except FileNotFoundError:
        return True
    return False


# -- files that are replaced ------------------------------------------------------------------


def write(path: str, data: bytes) -> None:
    """A new file, plainly."""
    with open(path, "xb") as file:
        file.write(data)


def rewrite(path: str, data: bytes) -> None:
    """In place, as no program should: same inode, same size."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, data)
    os.close(fd)


def naive_read(path: str) -> bytes:
    """A plain open, and the errno's name where it fails."""
    with open(path, "rb") as file:
        return file.read()


def replace_for(run: str, key: str, seconds: float) -> int:
    """Replace a file by rename, one digit repeated, as often as it goes; how often."""
    store, until, count = storage(run), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        count += 1
        store.replace(key, str(count % 10).encode() * 4000)
    return count


def naive_reads(run: str, key: str, seconds: float) -> Counter[str]:
    """What plain opens in a loop come to."""
    return _reads(lambda: naive_read(f"{run}/{key}"), seconds)


def our_reads(run: str, key: str, seconds: float) -> Counter[str]:
    """What reads by the library come to: "whole", "torn" or the error."""
    store = storage(run)

    def read() -> bytes:
        store.refresh(os.path.dirname(key))
        return store.read(key)

    return _reads(read, seconds)


def _reads(read: Callable[[], bytes], seconds: float) -> Counter[str]:
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            data = read()
            found["whole" if len(data) == 4000 and len(set(data)) == 1 else "torn"] += 1
        except OSError as error:
            found[os.strerror(error.errno or 0)] += 1
    return found


# -- files that are held ----------------------------------------------------------------------


def hold(name: str, path: str) -> None:
    """Open a file and keep it."""
    _open[name] = os.open(path, os.O_RDONLY)


def hold_reader(name: str, run: str, key: str) -> None:
    """Open a file by the library and keep it."""
    _open[name] = storage(run).open_read(key)


def hold_mapped(name: str, path: str) -> bytes:
    """Map a file and keep it; its first bytes."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    _open[name] = mapped
    return bytes(mapped[:4])


def read_held_naively(name: str, size_bytes: int) -> bytes:
    """The held file's bytes by its descriptor."""
    fd = _open[name]
    assert isinstance(fd, int)
    return os.pread(fd, size_bytes, 0)


def goes_stale(name: str, timeout_s: float) -> bool:
    """Whether the server says by then that it does not know the held file any more."""
    fd, until = _open[name], time.monotonic() + timeout_s
    assert isinstance(fd, int)
    while time.monotonic() < until:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # not from the cache
        try:
            os.pread(fd, 1, 0)
        except OSError as error:
            return error.errno == errno.ESTALE
        time.sleep(0.1)
    return False


def read_held(name: str, size_bytes: int) -> bytes:
    """The held file's bytes by the library's reader."""
    reader = _open[name]
    assert isinstance(reader, DataReader)
    data = bytearray(size_bytes)
    reader.read_into(0, memoryview(data))
    return bytes(data)


def touch_mapped(name: str, offset: int) -> tuple[int, bytes]:
    """Look at a mapped byte in a process of its own: (the signal that ended it or 0, the byte)."""
    mapped = _open[name]
    assert isinstance(mapped, mmap.mmap)
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(send, mapped[offset : offset + 1])
        os._exit(0)
    os.close(send)
    byte = os.read(receive, 1)
    os.close(receive)
    status = os.waitpid(pid, 0)[1]
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), byte


def maps(below: str) -> list[str]:
    """Files below a path that this process maps."""
    with open("/proc/self/maps") as lines:
        return [line.split(maxsplit=5)[-1].strip() for line in lines if below in line]


def close_all() -> None:
    """Release what is held."""
    while _open:
        _, held = _open.popitem()
        if isinstance(held, int):
            os.close(held)
        else:
            held.close()


# -- trees ------------------------------------------------------------------------------------


def naive_rmtree(path: str) -> str:
    """What shutil says, "" where it is content."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""
