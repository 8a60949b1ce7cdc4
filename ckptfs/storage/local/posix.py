"""Every system call of the local backend, one thin method each.

    LocalStorage --> Posix          --> the kernel
    LocalStorage --> SimulatedDisk  --> a disk that forgets what was not synced (ckptfs.testing.disk)

A method here decides nothing: it does not retry, has no defaults, and passes an OSError on unchanged. It
does what the manual page says. A replacement of this class sees the exact sequence of calls on which
durability depends. Each call is registered while it runs (``in_flight``): over a dead hard mount it never
returns, and another thread has to report that.

    /data/run/step_1             links anywhere in the path are followed, as open(2) does
    /data/run/./step_1/x         after the mark "/./" (``beneath``) a link is ELOOP, with the link's path

The kernel looks up a path in one call and follows every link in it. A path with the mark is opened by
openat2(2) with RESOLVE_NO_SYMLINKS, which refuses links in one call as well. Where the root is reached
through a link, that is done below the open root. Where the kernel has no openat2 (before Linux 5.6) or a
container forbids it, and where there is a link to name in the error, the path is looked up one directory
after the other, each opened with O_NOFOLLOW. Every other call is made in the open parent directory of its
name, so no process can put a link in between. The caller decides where in the path the mark is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from ckptfs.storage.inflight import in_flight, path_of

__all__ = [
    "DirectAlignment",
    "Identity",
    "Posix",
    "beneath",
    "core_count",
    "held_fd",
    "hold_directory",
    "parent_of",
    "takes_direct",
    "without_mark",
]

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

_NO_LINKS_MARK = "/./"
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC
_EXT4, _XFS = 0xEF53, 0x58465342
_UNREPORTED_DIRECT = frozenset(
    {_EXT4, _XFS}
)  # support direct writes; before Linux 6.1 no kernel reports it
# O_PATH needs no permission to list the directory, just as the lookup of a whole path does not.
_OPEN_STEP = getattr(os, "O_PATH", os.O_RDONLY) | _DIRECTORY
_OPEN_NAME = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC  # whatever it is, a link too


def core_count() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def beneath(root: str, below: str) -> str:
    """Return the path of ``below`` in the directory ``root``, marked: links in ``below`` are not followed."""
    return f"{root.rstrip('/')}{_NO_LINKS_MARK}{below}"


def without_mark(path: str) -> str:
    """Return the same path without the mark, for messages and for calls outside this module."""
    return path.replace(_NO_LINKS_MARK, "/")


def parent_of(path: str) -> str:
    """Return the parent directory of ``path``. The mark stays as long as a name follows it."""
    holder = os.path.dirname(path)
    return (holder.removesuffix("/.") or "/") if holder.endswith("/.") else holder


class _Held(threading.local):
    """The directories that this thread holds open: by path, the descriptor and whether it can be synced."""

    def __init__(self) -> None:
        self.by_path: dict[str, tuple[int, bool]] = {}


_HELD = _Held()


@contextmanager
def hold_directory(path: str, fd: int | None = None) -> Iterator[None]:
    """Look a directory up once for all calls of this block that name something directly in it.

    For one step of the caller only: a directory that another process removes and makes again is still open
    here, and a name that is made in it then is refused by the kernel (ENOENT). Where an NFS server calls it
    stale, the later calls look it up by its path again. Holds for this thread.

    Args:
        path: The directory, as the paths of its names begin.
        fd: The directory, opened for reading by the caller, who closes it; ``held_fd`` returns it. None: it
            is opened here for lookups, and if that fails each call fails or succeeds by itself.
    """
    if path in _HELD.by_path:
        yield
        return
    with contextlib.ExitStack() as opened:
        held = fd
        if held is None:
            with contextlib.suppress(OSError):
                parent = _open_parent(f"{path}/name", revalidate=False)
                held = opened.enter_context(parent)[1]
        if held is not None:
            _HELD.by_path[path] = held, fd is not None
        try:
            yield
        finally:
            _HELD.by_path.pop(path, None)


def held_fd(path: str) -> int | None:
    """Return the descriptor of a directory that this thread holds open for reading; None if it holds none."""
    fd, is_readable = _HELD.by_path.get(path, (None, False))
    return fd if is_readable else None


@contextmanager
def _open_parent(path: str, *, revalidate: bool) -> Iterator[tuple[str, int | None]]:
    """Open the parent directory of a marked path. An unmarked path is returned as it is.

    Args:
        path: A path, with or without the mark.
        revalidate: Open each directory for reading, which makes an NFS client ask the server for it.

    Yields:
        The last name of the path and the descriptor of its parent, or the path and None.
    """
    if _NO_LINKS_MARK not in path:
        yield path, None
        return
    parent = parent_of(path)
    if revalidate:
        _HELD.by_path.pop(parent, None)  # stale: the rest of the block looks it up again
    elif parent in _HELD.by_path:
        yield os.path.basename(path), _HELD.by_path[parent][0]
        return
    fd = None if revalidate else _open_at_once(parent, _OPEN_STEP)
    if fd is None:
        fd = _walk_to_parent(path, os.O_RDONLY | _DIRECTORY if revalidate else _OPEN_STEP)
    try:
        yield os.path.basename(path), fd
    finally:
        os.close(fd)


def _open_at_once(path: str, flags: int, mode: int = 0) -> int | None:
    """Open a marked path with one lookup by the kernel, which follows no link below the mark.

    Returns:
        A descriptor; None where there is a link below the mark or the kernel does not offer openat2.
    """
    root, mark, below = path.rpartition(_NO_LINKS_MARK)
    if not mark or not _HAS_OPENAT2:
        return None
    if (parent := parent_of(path)) in _HELD.by_path:
        try:
            return _openat2(_HELD.by_path[parent][0], os.path.basename(path), flags, mode)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            _HELD.by_path.pop(parent, None)  # the kernel retries a whole path by itself
    fd = _openat2(_AT_FDCWD, without_mark(path), flags, mode)
    if fd is not None:
        return fd
    top = os.open(root or "/", _OPEN_STEP)
    try:
        return _openat2(top, below, flags, mode)
    finally:
        os.close(top)


def _openat2(dir_fd: int, path: str, flags: int, mode: int) -> int | None:
    """openat2(2) with RESOLVE_NO_SYMLINKS. None if ``path`` has a link in it, or the call is not permitted.

    Raises:
        OSError: As the kernel reports it.
    """
    if _syscall is None:
        return None
    name = os.fsencode(path)
    # As os.open does: no name is cut at a null byte, audit hooks are called, and a child process does not
    # inherit the descriptor.
    if b"\0" in name:
        raise ValueError("embedded null byte")
    sys.audit("open", path, None, flags)
    create_mode = mode if flags & os.O_CREAT else 0
    how = _OPEN_HOW.pack(flags | os.O_CLOEXEC, create_mode, _RESOLVE_NO_SYMLINKS)
    while True:
        fd = _syscall(_OPENAT2, dir_fd, name, how, len(how))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code in (errno.ELOOP, errno.ENOSYS, errno.EPERM):
            return None
        if code != errno.EINTR:  # a signal during the open; its handler has run here
            raise OSError(code, os.strerror(code), path)


def _walk_to_parent(path: str, step: int) -> int:
    """Open the parent directory of a marked path, one directory after the other. ``step``: how each is opened.

    Raises:
        OSError: As the kernel reports it; ELOOP with its path if one of them is a link.
    """
    root, _, below = path.rpartition(_NO_LINKS_MARK)
    at, fd = root or "/", os.open(root or "/", step)
    try:
        for folder in below.split("/")[:-1]:
            at = f"{at.rstrip('/')}/{folder}"
            try:
                deeper = os.open(folder, step | os.O_NOFOLLOW, dir_fd=fd)
            except OSError as error:
                _raise_if_link(error, at, folder, fd)
                raise
            os.close(fd)
            fd = deeper
    except BaseException:
        os.close(fd)
        raise
    return fd


def _raise_if_link(error: OSError, path: str, name: str, dir_fd: int) -> None:
    """Raise ELOOP if ``name`` could not be opened as a directory because it is a link (ENOTDIR on Linux)."""
    if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
        return
    try:
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return  # it was removed in between: the first error counts
    if is_link:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path)) from error


def _with_parent(path: str, call: Callable[[str, int | None], T]) -> T:
    """Call ``call`` with the last name of ``path`` and the descriptor of its parent directory.

    After ESTALE the path is looked up once more with revalidation, as the kernel does with a whole path.
    """
    try:
        with _open_parent(path, revalidate=False) as (name, fd):
            return call(name, fd)
    except OSError as error:
        if error.errno != errno.ESTALE or _NO_LINKS_MARK not in path:
            raise
    with _open_parent(path, revalidate=True) as (name, fd):
        return call(name, fd)


_SYNC_FILE_RANGE_WRITE = 2
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_DIO = struct.Struct(
    "=I148xII"
)  # struct statx: its mask first, and the two words at byte 152
_STATX_CTIME, _STATX_INO, _STATX_BTIME = 0x80, 0x100, 0x800
# Its mask, and further on: the inode number, the times of birth and of the last change, the device.
_STATX_ID = struct.Struct("=I28xQ40xqI4xqI28xII")
_FS_TYPE = struct.Struct("=L")  # struct statfs begins with it; ramfs' number has the highest bit


def _find(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a function of the C library that Python's os module lacks, or None if there is none."""
    if sys.platform != "linux":
        return None
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return cast("Callable[..., int] | None", function)


_int, _int64, _uint, _text = ctypes.c_int, ctypes.c_int64, ctypes.c_uint, ctypes.c_char_p
_sync_file_range = _find("sync_file_range", _int, _int64, _int64, _uint)
_fallocate = _find("fallocate64", _int, _int, _int64, _int64)
_statx = _find("statx", _int, _text, _int, _uint, _text)
_fstatfs = _find("fstatfs", _int, _text)
_syscall = _find("syscall", ctypes.c_long, _int, _text, _text, ctypes.c_size_t)
_OPENAT2 = 437
_OPEN_HOW = struct.Struct("=QQQ")  # struct open_how: flags, mode, resolve
_RESOLVE_NO_SYMLINKS = 0x04
_AT_FDCWD = -100


def _has_openat2() -> bool:
    if _syscall is None:
        return False
    how = _OPEN_HOW.pack(_OPEN_STEP, 0, _RESOLVE_NO_SYMLINKS)
    fd = _syscall(_OPENAT2, _AT_FDCWD, b"/", how, len(how))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


_HAS_OPENAT2 = _has_openat2()


class Identity(NamedTuple):
    """Which file or directory something is, whatever its path. Numbers of inodes are used again, so the time at which
    it was made belongs to it; 0 where the filesystem does not keep that, and as long as it is also the time of the
    last change. The clock of a filesystem moves in ticks of some milliseconds: within the first one, what is removed
    and made again has the same number and the same time.
    """

    device: int
    inode: int
    born_ns: int


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """The alignment that the kernel requires of direct I/O, in bytes; 0 where there is no direct I/O."""

    memory_bytes: int
    offset_bytes: int


def takes_direct(
    alignment: DirectAlignment | None, fs_type: int | None, *, try_unreported: bool
) -> bool:
    """Whether to open a file for direct I/O in windows that begin at whole pages. Pure.

    Args:
        alignment: What the kernel requires; None if it does not say.
        fs_type: The magic number of the filesystem; None if unknown.
        try_unreported: Whether to try where neither kernel nor filesystem says that it works, because the
            caller asked for direct I/O.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    if alignment is None:
        return try_unreported or fs_type in _UNREPORTED_DIRECT
    return (
        0 < alignment.offset_bytes <= mmap.PAGESIZE and 0 < alignment.memory_bytes <= mmap.PAGESIZE
    )


# The path under which each descriptor was opened. A close that hangs is reported with it, and by then the kernel does
# not know it any more: to ask before each close would be a system call for a message that is hardly ever needed.
_OPENED: dict[int, str] = {}


def _opened_as(fd: int) -> str:
    return _OPENED.get(fd) or path_of(fd)


class Posix:
    """The real kernel. Stateless: one instance may serve all threads and be pickled."""

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        """open(2) or openat(2); the mode is narrowed by the umask and default ACLs as usual.

        With O_DIRECTORY the last name of a marked path is not opened through a link either.
        """

        def open_name(name: str, fd: int | None) -> int:
            if fd is None:
                return os.open(name, flags, mode, dir_fd=dir_fd)
            # Reached where openat2 opened nothing: there is a link to name, or it does not exist here.
            own = os.O_NOFOLLOW if flags & os.O_DIRECTORY else 0
            try:
                return os.open(name, flags | own, mode, dir_fd=fd)
            except OSError as error:
                if (flags | own) & os.O_NOFOLLOW:
                    _raise_if_link(error, path, name, fd)
                raise

        with in_flight("open", without_mark(path)):
            opened = _open_at_once(path, flags, mode)
            fd = _with_parent(path, open_name) if opened is None else opened
        _OPENED[fd] = without_mark(path) if dir_fd is None else f"{_opened_as(dir_fd)}/{path}"
        return fd

    def set_blocking(self, fd: int) -> None:
        """fcntl(2): remove O_NONBLOCK."""
        os.set_blocking(fd, True)

    def close(self, fd: int) -> None:
        """close(2); a network filesystem may report a failed write here."""
        where = _opened_as(fd)
        # Before the call: from then on another thread may be given the same number.
        _OPENED.pop(fd, None)
        with in_flight("close", where):
            os.close(fd)

    def write(self, fd: int, data: Buffer) -> int:
        """write(2); may be short."""
        with in_flight("write", fd):
            return os.write(fd, data)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """pwritev(2) of at most IOV_MAX buffers; may be short."""
        with in_flight("write", fd):
            return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """fallocate(2): give the file this size and its blocks.

        Never by writing zeros, as posix_fallocate of the C library does where the filesystem cannot.

        Raises:
            OSError: EOPNOTSUPP where there is no such call; else as the kernel says.
        """
        if _fallocate is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        with in_flight("allocate", fd):
            if _fallocate(fd, 0, 0, size_bytes):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        """statx(2) with STATX_DIOALIGN; None where the kernel or the filesystem does not report it."""
        if _statx is None:
            return None
        raw = ctypes.create_string_buffer(256)
        with in_flight("stat", fd):
            if _statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, raw):
                return None
        mask, memory_bytes, offset_bytes = _STATX_DIO.unpack_from(raw.raw)
        return DirectAlignment(memory_bytes, offset_bytes) if mask & _STATX_DIOALIGN else None

    def fs_type(self, fd: int) -> int | None:
        """Return the f_type of fstatfs(2) of ``fd``, a magic number; None where it is unknown."""
        if _fstatfs is None:
            return None
        raw = ctypes.create_string_buffer(256)
        with in_flight("statfs", fd):
            if _fstatfs(fd, raw):
                return None
        found: int = _FS_TYPE.unpack_from(raw.raw)[0]
        return found

    def seek(self, fd: int, offset: int) -> None:
        """lseek(2) from the start."""
        os.lseek(fd, offset, os.SEEK_SET)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """ftruncate(2)."""
        with in_flight("truncate", fd):
            os.ftruncate(fd, size_bytes)

    def lock(self, fd: int) -> None:
        """flock(2), exclusive, without waiting. The lock ends with its last descriptor, or its process."""
        with in_flight("lock", fd):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read(self, fd: int, size_bytes: int) -> bytes:
        """read(2); may be short, b"" at the end."""
        with in_flight("read", fd):
            return os.read(fd, size_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv(2) into the given buffers; may be short, 0 at the end."""
        with in_flight("read", fd):
            return os.preadv(fd, buffers, offset)

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv2(2) with RWF_NOWAIT: read what the page cache has, without waiting for a disk.

        Raises:
            OSError: EAGAIN if it has nothing, EOPNOTSUPP if the filesystem does not support the flag.
        """
        flags = getattr(os, "RWF_NOWAIT", None)
        if flags is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        with in_flight("read", fd):
            return os.preadv(fd, buffers, offset, flags)

    def advise_random(self, fd: int) -> None:
        """posix_fadvise(2), RANDOM: no readahead through this descriptor. A hint."""
        if hasattr(os, "posix_fadvise"):
            with in_flight("read", fd):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def fsync(self, fd: int) -> None:
        """fsync(2) of a file (its bytes) or of a directory (its names)."""
        with in_flight("fsync", fd):
            os.fsync(fd)

    def write_behind(self, fd: int, offset: int, size_bytes: int) -> None:
        """sync_file_range(2), WRITE only: start writing these bytes to the disk, without waiting.

        A hint: it makes nothing durable, and does nothing where the call does not exist.
        """
        if _sync_file_range is not None:
            with in_flight("write", fd):
                _sync_file_range(fd, offset, size_bytes, _SYNC_FILE_RANGE_WRITE)

    def link(self, source: str, target: str) -> None:
        """link(2): one of several callers gets the target. A link is copied as a link."""
        with in_flight("link", without_mark(target)):
            _with_both_parents(source, target, _link)

    def rename(self, source: str, target: str) -> None:
        """rename(2)."""
        with in_flight("rename", without_mark(target)):
            _with_both_parents(source, target, _rename)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        """mkdir(2).

        ELOOP rather than EEXIST where a link is at a marked path: callers take EEXIST for success and
        would then use the link's target.
        """

        def make(name: str, fd: int | None) -> None:
            try:
                os.mkdir(name, mode, dir_fd=fd)
            except FileExistsError as error:
                if fd is not None:
                    _raise_if_link(error, path, name, fd)
                raise

        with in_flight("mkdir", without_mark(path)):
            _with_parent(path, make)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """unlink(2)."""
        with in_flight("unlink", without_mark(path)):
            _with_parent(
                path, lambda name, fd: os.unlink(name, dir_fd=dir_fd if fd is None else fd)
            )

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        """rmdir(2)."""
        with in_flight("rmdir", without_mark(path)):
            _with_parent(path, lambda name, fd: os.rmdir(name, dir_fd=dir_fd if fd is None else fd))

    def scandir(self, where: str | int) -> list[tuple[str, bool, bool]]:
        """Return the entries of the directory ``where``, unsorted: name, whether it is or leads to a directory,
        whether it is a link.
        """
        if isinstance(where, str) and _NO_LINKS_MARK in where:
            fd = Posix.open(
                self, where, os.O_RDONLY | _DIRECTORY
            )  # a subclass that counts calls sees one
            try:
                return _entries(fd)
            finally:
                Posix.close(self, fd)
        return _entries(where)

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        """stat(2), or lstat(2) with follow=False."""

        def look_up(name: str, fd: int | None) -> os.stat_result:
            return os.stat(name, dir_fd=dir_fd if fd is None else fd, follow_symlinks=follow)

        with in_flight("stat", without_mark(path)):
            # One lookup of the complete path, and not one of its parent and one of its name.
            fd = None if follow else _open_at_once(path, _OPEN_NAME)
            if fd is None:
                return _with_parent(path, look_up)
            try:
                return os.fstat(fd)
            finally:
                os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """fstat(2)."""
        with in_flight("stat", fd):
            return os.fstat(fd)

    def identity(self, fd: int) -> Identity:
        """Return which file or directory ``fd`` is: statx(2), or fstat(2) where there is no statx."""
        times = _STATX_BTIME | _STATX_CTIME
        if _statx is not None:
            raw = ctypes.create_string_buffer(256)
            with in_flight("stat", fd):
                failed = _statx(fd, b"", _AT_EMPTY_PATH, _STATX_INO | times, raw)
            if not failed:
                mask, inode, *born, change_s, change_ns, major, minor = _STATX_ID.unpack_from(
                    raw.raw
                )
                has_birth_time = mask & times == times and born < [change_s, change_ns]
                born_ns = born[0] * 1_000_000_000 + born[1] if has_birth_time else 0
                return Identity(os.makedev(major, minor), inode, born_ns)
        with in_flight("stat", fd):
            found = os.fstat(fd)
        return Identity(found.st_dev, found.st_ino, 0)

    def fchmod(self, fd: int, mode: int) -> None:
        """fchmod(2)."""
        with in_flight("chmod", fd):
            os.fchmod(fd, mode)

    def fchown(self, fd: int, owner: int, group: int) -> None:
        """fchown(2); -1 leaves one as it is."""
        with in_flight("chown", fd):
            os.fchown(fd, owner, group)

    def resolve(self, path: str) -> str:
        """realpath(3): the path without links; the last name need not exist."""
        with in_flight("readlink", path):
            return os.path.realpath(path)

    def readlink(self, path: str) -> str | None:
        """readlink(2): the target of a link; None if ``path`` is no link."""

        def read_name(name: str, fd: int | None) -> str | None:
            try:
                return os.readlink(name, dir_fd=fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return None

        with in_flight("readlink", without_mark(path)):
            return _with_parent(path, read_name)

    def utime(self, path: str) -> None:
        """utime(2) with the server's clock. The target of a link at a marked path is not touched."""

        def touch(name: str, fd: int | None) -> None:
            os.utime(name, dir_fd=fd, follow_symlinks=fd is None)

        with in_flight("touch", without_mark(path)):
            _with_parent(path, touch)

    def statvfs(self, path: str) -> os.statvfs_result:
        """statvfs(2)."""
        with in_flight("statvfs", path):
            return os.statvfs(path)


def _entries(where: str | int) -> list[tuple[str, bool, bool]]:
    with in_flight("listing", where), os.scandir(where) as entries:
        return [(entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries]


def _with_both_parents(
    source: str, target: str, call: Callable[[str, int | None, str, int | None], None]
) -> None:
    """Call ``call`` with both last names, each with the descriptor of its parent directory."""

    def from_here(name: str, fd: int | None) -> None:
        if fd is not None and parent_of(source) == parent_of(target):
            call(name, fd, os.path.basename(target), fd)
            return
        _with_parent(target, lambda end, end_fd: call(name, fd, end, end_fd))

    _with_parent(source, from_here)


def _rename(start: str, start_fd: int | None, end: str, end_fd: int | None) -> None:
    os.rename(start, end, src_dir_fd=start_fd, dst_dir_fd=end_fd)


def _link(start: str, start_fd: int | None, end: str, end_fd: int | None) -> None:
    # By default Python follows a link at the source, but only where a directory descriptor is given.
    os.link(start, end, src_dir_fd=start_fd, dst_dir_fd=end_fd, follow_symlinks=False)
