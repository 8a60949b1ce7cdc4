"""A disk that loses, at a power cut, everything that was not synced.

    disk = SimulatedDisk(directory, crash_at=17)
    storage = LocalStorage(Uri.parse(f"{directory}/run"), posix=disk)
    ... PowerCut ...
    disk.materialise(elsewhere)            what a machine finds when it is switched on again

System calls go to a real directory, the *volatile* image. Processes see this image, also after a SIGKILL.
In addition a model keeps the *durable* image, which loses as much as POSIX permits:

    bytes of a file      as they were at its last fsync; empty if there was none
    names in a directory as they were at its last fsync: a new file, a link, a new directory, a rename
                         or an unlink that was not synced did not happen

A rename between two directories is two changes. If only the target is synced, both names exist after the
power cut; if only the source is synced, neither does. So sync the target first.

``deaf_to`` makes the disk ignore chosen fsyncs, as if the code did not call them. A test that still
passes then proves nothing about those fsyncs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptfs.storage.local.posix import Buffer, Posix, without_mark

__all__ = ["Fsync", "PowerCut", "SimulatedDisk"]


class PowerCut(BaseException):
    """The machine lost power. It is no Exception, so that no handler of ckptfs catches it."""


@dataclass(frozen=True, slots=True)
class Fsync:
    """One fsync call.

    Attributes:
        number: The number of the call, from 1.
        path: The path that was synced.
        is_dir: Whether the path is a directory.
        site: The names of the functions of ckptfs.storage on the stack, outermost first, joined by ">",
            such as "create>write_file" or "make_dir>make_dirs>sync_dir".
    """

    number: int
    path: str
    is_dir: bool
    site: str


@dataclass(eq=False, slots=True)
class _DiskFile:
    durable: bytes | None = None


@dataclass(eq=False, slots=True)
class _Dir:
    volatile: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node = _DiskFile | _Dir


class SimulatedDisk(Posix):
    """The system calls of a storage, with a model of what is durable.

    Thread-safe. It works in one process and cannot be pickled.

    Args:
        directory: An existing directory. What it contains now counts as durable.
        crash_at: The number (from 1) of the system call that raises PowerCut instead of doing its work;
            all later calls raise it too. None: no such call.
        deaf_to: Returns True for fsyncs that the disk ignores.

    Attributes:
        calls: The number of system calls so far.
        fsyncs: The fsync calls so far.
    """

    def __init__(
        self,
        directory: str,
        *,
        crash_at: int | None = None,
        deaf_to: Callable[[Fsync], bool] = lambda _: False,
    ) -> None:
        self.directory = directory.rstrip("/")
        self.crash_at = crash_at
        self.calls = 0
        self.fsyncs: list[Fsync] = []
        self._deaf_to = deaf_to
        self._lock = threading.RLock()
        self._top = _Dir()
        self._open: dict[int, tuple[str, _Node | None]] = {}
        self._adopt(self._top, self.directory)

    @property
    def is_off(self) -> bool:
        """Whether the power was cut."""
        return self.crash_at is not None and self.calls >= self.crash_at

    def cut(self) -> None:
        """Cut the power now: all later calls raise PowerCut."""
        with self._lock:
            self.crash_at = self.calls + 1
            self.calls += 1

    def materialise(self, path: str, *, lucky: Callable[[str], bool] = lambda _: False) -> None:
        """Write the durable image to a directory.

        Args:
            path: The directory, which must not exist.
            lucky: Called with the path of each name, and of each file's bytes, that were not synced.
                Returns True if they reached the disk all the same, as any of them may. Must return the
                same value for the same path.
        """
        with self._lock:
            places = dict(_places(self._top, self.directory))
            _write_out(self._top, self.directory, path, places, lucky)

    # -- the seam ----------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        with self._call():
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            full = self._full(path, dir_fd)
            node = self._find(full)
            if node is None and self._inside(full):
                node = _DiskFile()
                self._hold(full)[0][os.path.basename(full)] = node
            self._open[fd] = (full, node)
            return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)  # also after the cut, so that the test's process leaks no descriptors
        with self._call():
            return

    def write(self, fd: int, data: Buffer) -> int:
        with self._call():
            return super().write(fd, data)

    def read(self, fd: int, size_bytes: int) -> bytes:
        with self._call():
            return super().read(fd, size_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._call():
            return super().preadv(fd, buffers, offset)

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._call():
            return super().preadv_cached(fd, buffers, offset)

    def advise_random(self, fd: int) -> None:
        with self._call():
            super().advise_random(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._call():
            return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, size_bytes: int) -> None:
        with self._call():
            super().allocate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        with self._call():
            path, node = self._open[fd]
            call = Fsync(len(self.fsyncs) + 1, path, isinstance(node, _Dir), _site())
            self.fsyncs.append(call)
            if self._deaf_to(call):
                return
            if isinstance(node, _Dir):
                node.durable = dict(node.volatile)
            elif node is not None:
                with open(f"/proc/self/fd/{fd}", "rb") as file:
                    node.durable = file.read()

    def link(self, source: str, target: str) -> None:
        with self._call():
            super().link(source, target)
            self._put(without_mark(target), self._find(without_mark(source)))

    def rename(self, source: str, target: str) -> None:
        with self._call():
            node = self._find(without_mark(source))
            super().rename(source, target)
            self._take(without_mark(source))
            self._put(without_mark(target), node)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        with self._call():
            super().mkdir(path, mode)
            self._put(without_mark(path), _Dir())

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._call():
            super().unlink(path, dir_fd=dir_fd)
            self._take(self._full(path, dir_fd))

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._call():
            super().rmdir(path, dir_fd=dir_fd)
            self._take(self._full(path, dir_fd))

    def scandir(self, where: str | int) -> list[tuple[str, bool, bool]]:
        with self._call():
            return super().scandir(where)

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        with self._call():
            return super().stat(path, dir_fd=dir_fd, follow=follow)

    def fstat(self, fd: int) -> os.stat_result:
        with self._call():
            return super().fstat(fd)

    def utime(self, path: str) -> None:
        with self._call():
            super().utime(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        with self._call():
            return super().statvfs(path)

    # -- the model ---------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self.calls += 1
            if self.is_off:
                raise PowerCut(f"at system call {self.calls}")
            yield

    def _full(self, path: str, dir_fd: int | None) -> str:
        return without_mark(path) if dir_fd is None else f"{self._open[dir_fd][0]}/{path}"

    def _inside(self, path: str) -> bool:
        return path.startswith(f"{self.directory}/")

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._top
        if path == self.directory:
            return node
        if not self._inside(path):
            return None
        for name in path.removeprefix(f"{self.directory}/").split("/"):
            node = node.volatile.get(name) if isinstance(node, _Dir) else None
        return node

    def _hold(self, path: str) -> tuple[dict[str, _Node], str]:
        """Return the names in the directory of ``path``, and its own name there."""
        holder = self._find(os.path.dirname(path))
        return (holder.volatile if isinstance(holder, _Dir) else {}), os.path.basename(path)

    def _put(self, path: str, node: _Node | None) -> None:
        names, name = self._hold(path)
        if node is not None:
            names[name] = node

    def _take(self, path: str) -> None:
        names, name = self._hold(path)
        names.pop(name, None)

    def _adopt(self, node: _Dir, path: str) -> None:
        """Add the existing content of a directory to the model, as durable."""
        for entry in os.scandir(path):
            child: _Node
            if entry.is_dir(follow_symlinks=False):
                child = _Dir()
                self._adopt(child, entry.path)
            else:
                with open(entry.path, "rb") as file:
                    child = _DiskFile(file.read())
            node.volatile[entry.name] = node.durable[entry.name] = child


def _places(node: _Dir, path: str) -> Iterator[tuple[_Node, str]]:
    """Yield each node with its path in the volatile image."""
    for name, child in node.volatile.items():
        yield child, f"{path}/{name}"
        if isinstance(child, _Dir):
            yield from _places(child, f"{path}/{name}")


def _write_out(
    node: _Dir, origin: str, path: str, places: dict[_Node, str], lucky: Callable[[str], bool]
) -> None:
    os.mkdir(path)
    names = dict(node.durable)
    for name in {*node.durable, *node.volatile}:
        before, now = node.durable.get(name), node.volatile.get(name)
        # A rename is one step of the journal: ``lucky`` gets the newer name for both of its names.
        moved = places.get(before) if before is not None and now is None else None
        if before is not now and lucky(moved or f"{origin}/{name}"):
            names.pop(name, None)
            if name in node.volatile:
                names[name] = node.volatile[name]
    for name, child in names.items():
        if isinstance(child, _Dir):
            _write_out(child, f"{origin}/{name}", f"{path}/{name}", places, lucky)
            continue
        data = child.durable or b""
        if child in places and lucky(f"{origin}/{name}"):
            with open(places[child], "rb") as file:
                data = file.read()
        with open(f"{path}/{name}", "wb") as file:
            file.write(data)


# These modules run the work of others on threads: ``Fsync.site`` names the work, not them.
_CARRIERS = ("ckptfs.storage.threads", "ckptfs.storage.inflight")


def _site() -> str:
    names: list[str] = []
    frame = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller's frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("ckptfs.storage.") and module not in _CARRIERS:
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return ">".join(name for name in reversed(names) if not name.startswith("<"))
