"""The local backend under the answers that real filesystems, servers and people give."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ckptfs import errors
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.base import Capabilities, Shape
from ckptfs.storage.local import ASSUMED, LocalStorage
from ckptfs.storage.local.directories import DurableDirs
from ckptfs.storage.local.files import unlink_quietly
from ckptfs.storage.local.posix import Buffer, Identity, Posix, without_mark
from ckptfs.uri import Uri
from tests.measures import warned
from tests.ticks import until_the_clock_ticks


class Scripted(Posix):
    """The real kernel, but for what ``script`` raises: script(name of the call, its number)."""

    def __init__(self, script: Callable[[str, int], None]) -> None:
        self.script = script
        self.count = 0
        self.names: list[str] = []

    def _told(self, name: str) -> None:
        self.count += 1
        self.names.append(name)
        self.script(name, self.count)

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        self._told("create" if flags & os.O_CREAT else "open")
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def write(self, fd: int, data: Buffer) -> int:
        self._told("write")
        return super().write(fd, data)

    def read(self, fd: int, size_bytes: int) -> bytes:
        self._told("read")
        return super().read(fd, size_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._told("preadv")
        return super().preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self._told("fsync")
        super().fsync(fd)

    def link(self, source: str, target: str) -> None:
        self._told("link")
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._told("rename")
        super().rename(source, target)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._told("mkdir")
        super().mkdir(path, mode)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._told("unlink")
        super().unlink(path, dir_fd=dir_fd)


def failing(name: str, number: int, *, nth: int = 1) -> Scripted:
    """A kernel: its ``nth`` call of that name answers with an errno, or for EEXIST each from there on.

    A create that finds a file of its own in the way removes it and tries once more.
    """
    seen = [0]

    def script(called: str, _: int) -> None:
        if called == name:
            seen[0] += 1
            if seen[0] == nth or (seen[0] > nth and number == errno.EEXIST):
                raise OSError(number, os.strerror(number))

    return Scripted(script)


def ready(place: Path, posix: Posix | None = None) -> LocalStorage:
    """A storage with directories, probed already, so that scripts count only what is under test."""
    storage = LocalStorage(Uri.parse(str(place / "run")))
    storage.make_dir("log")
    storage.make_dir("tmp")
    if posix is not None:
        storage._posix = posix
    return storage


def files(place: Path) -> list[str]:
    """Every file below, temporary ones too."""
    return sorted(
        str(Path(folder, name).relative_to(place))
        for folder, _, names in os.walk(place)
        for name in names
    )


TYPES = {
    errno.ENOSPC: errors.NoSpaceError,
    errno.EDQUOT: errors.NoSpaceError,
    errno.EROFS: errors.AccessError,
    errno.EACCES: errors.AccessError,
    errno.EPERM: errors.AccessError,
    errno.ESTALE: errors.StaleError,
    errno.ENOENT: errors.NotFoundError,
    errno.ENOTDIR: errors.NotFoundError,
    errno.EEXIST: errors.AlreadyExistsError,
    errno.ENOTEMPTY: errors.AlreadyExistsError,
    errno.EINTR: errors.TransientError,
    errno.EAGAIN: errors.TransientError,
    errno.ETIMEDOUT: errors.TransientError,
    errno.EIO: errors.StorageError,
}


@pytest.mark.parametrize("number", TYPES)
def test_errors_are_typed_and_leave_nothing(tmp_path: Path, number: int) -> None:
    """Whatever errno a write meets, the error has its type, its errno and the URI; nothing is left."""
    for call in ("create", "write", "fsync"):
        storage = ready(tmp_path, failing(call, number))
        for act in (
            lambda s: s.create("log/0", b"x", staging="tmp/w"),
            lambda s: s.replace("log/0", b"x"),
            lambda s: _write(s, "log/0", 2 << 20),
        ):
            storage._posix = failing(call, number)
            with pytest.raises(TYPES[number]) as caught:
                act(storage)
            assert type(caught.value) is TYPES[number]
            assert caught.value.errno == number
            assert str(tmp_path) in str(caught.value.uri)
            assert files(tmp_path) == []


def _write(storage: LocalStorage, key: str, size_bytes: int) -> None:
    with storage.open_write(key) as writer:
        writer.write(bytes(10))
        writer.write(bytes(size_bytes))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_ctrl_c_at_every_system_call_leaves_nothing(
    tmp_path: Path, raised: type[BaseException]
) -> None:
    """An interrupt before any system call leaves the whole result or no file at all."""
    acts: list[Callable[[LocalStorage], object]] = [
        lambda s: s.create("log/0", b"x" * 10, staging="tmp/w"),
        lambda s: s.replace("log/0", b"x" * 10),
        lambda s: _write(s, "log/0", 3 << 20),
    ]
    for act in acts:
        for number in range(1, 40):

            def script(name: str, count: int, number: int = number) -> None:
                # Cleaning up is what is under test: the interrupt does not repeat itself.
                if count == number and name != "unlink":
                    raise raised

            kernel = Scripted(script)
            storage = ready(tmp_path, kernel)
            try:
                act(storage)
            except raised:
                assert files(tmp_path) in ([], ["run/log/0"])
                if files(tmp_path):
                    assert (tmp_path / "run/log/0").stat().st_size >= 10
            storage._posix = Posix()
            storage.remove("log/0")
            if kernel.count < number:
                break
        else:
            raise AssertionError("more system calls than this test interrupts")


def test_short_writes_and_reads(tmp_path: Path) -> None:
    """A kernel that writes and reads 1000 bytes at a time loses and doubles nothing."""

    class Short(Posix):
        def write(self, fd: int, data: Buffer) -> int:
            return super().write(fd, memoryview(data)[:1000])

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().preadv(fd, [buffers[0][:1000]], offset)

    data = os.urandom((1 << 20) + 12345)
    storage = ready(tmp_path, Short())
    with storage.open_write("log/f") as writer:
        writer.write(data)
    storage.replace("log/g", data)
    for key in ("log/f", "log/g"):
        assert (tmp_path / "run" / key).read_bytes() == data
    buffer = bytearray(len(data))
    with storage.open_read("log/f") as reader:
        reader.read_into(0, memoryview(buffer))
    assert buffer == data


def test_large_buffers_are_not_copied(tmp_path: Path) -> None:
    """The kernel is given the caller's own memory, for writes of a mebibyte and for reads."""
    seen: list[object] = []

    class Watching(Posix):
        def write(self, fd: int, data: Buffer) -> int:
            if isinstance(data, memoryview):
                seen.append(data.obj)
            return super().write(fd, data)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            seen.append(buffers[0].obj)
            return super().preadv(fd, buffers, offset)

        def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if len(buffers[0]) > 1:  # not the question whether it is there
                seen.append(buffers[0].obj)
            return super().preadv_cached(fd, buffers, offset)

    storage = ready(tmp_path, Watching())
    data = bytearray(2 << 20)
    with storage.open_write("log/f") as writer:
        writer.write(data)
    with storage.open_read("log/f") as reader:
        reader.read_into(0, memoryview(data))
    assert [held is data for held in seen] == [True, True]


def test_small_writes_are_gathered(tmp_path: Path) -> None:
    """Ten thousand writes of 100 bytes are one system call."""
    kernel = Scripted(lambda _name, _count: None)
    storage = ready(tmp_path, kernel)
    with storage.open_write("log/f") as writer:
        for _ in range(10_000):
            writer.write(b"x" * 100)
    assert kernel.names.count("write") == 1
    assert storage.stat("log/f").size_bytes == 1_000_000


def test_a_failed_write_is_never_published(tmp_path: Path) -> None:
    """After an error in write, a close that somebody calls anyway refuses: no hole is published."""
    storage = ready(tmp_path, failing("write", errno.ENOSPC))
    writer = storage.open_write("log/f")
    with pytest.raises(NoSpaceError):
        writer.write(bytes(2 << 20))
    with pytest.raises(StorageError):
        writer.close()
    writer.abort()
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EIO])
def test_a_lost_answer_of_link_keeps_the_staging_file(tmp_path: Path, number: int) -> None:
    """link() that may yet happen: AnswerLostError, and what it needs stays."""
    storage = ready(tmp_path, failing("link", number))
    with pytest.raises(AnswerLostError) as caught:
        storage.create("log/0", b"x", staging="tmp/w")
    assert caught.value.outcome == "unknown"
    assert files(tmp_path) == ["run/tmp/w"]
    storage.create("log/0", b"x", staging="tmp/w")
    assert files(tmp_path) == ["run/log/0"]


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EIO])
@pytest.mark.parametrize("name", ["rename", "link"])
def test_a_lost_answer_of_a_name_is_no_plain_failure(
    tmp_path: Path, name: str, number: int
) -> None:
    """The server may have given the name, or will yet: AnswerLostError with an open outcome, so that
    the caller looks, and does not undo what may have been done.
    """
    storage = ready(tmp_path)
    storage.replace("tmp/w", b"x")
    storage._posix = failing(name, number)
    with pytest.raises(AnswerLostError) as caught:
        getattr(storage, name)("tmp/w", "log/f")
    assert caught.value.outcome == "unknown"
    assert str(caught.value.uri).endswith("log/f")


def test_repeating_a_create_never_empties_the_entry(tmp_path: Path) -> None:
    """Linked, answer lost: entry and staging are one inode, and the repetition keeps its bytes."""

    class LostAfter(Posix):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise OSError(errno.ETIMEDOUT, "lost")

    storage = ready(tmp_path, LostAfter())
    with pytest.raises(AnswerLostError):
        storage.create("log/0", b"entry", staging="tmp/w")

    def watch(name: str, _: int) -> None:
        if name in ("create", "write", "link"):
            assert (tmp_path / "run/log/0").read_bytes() == b"entry"

    storage._posix = Scripted(watch)
    with pytest.raises(AlreadyExistsError):
        storage.create("log/0", b"entry", staging="tmp/w")
    assert files(tmp_path) == ["run/log/0"]


def test_a_failed_directory_fsync_is_a_lost_answer(tmp_path: Path) -> None:
    """The name is there but perhaps not durable: AnswerLostError, never a plain failure."""
    acts: list[Callable[[LocalStorage], None]] = [
        lambda s: s.create("log/0", b"x", staging="tmp/w"),
        lambda s: s.replace("log/0", b"x"),
    ]
    for act in acts:
        storage = ready(tmp_path, failing("fsync", errno.EIO, nth=2))
        with pytest.raises(AnswerLostError):
            act(storage)
        assert files(tmp_path) == ["run/log/0"]
        (tmp_path / "run/log/0").unlink()


def test_an_existing_entry_is_synced_before_it_is_told(tmp_path: Path) -> None:
    """EEXIST is answered only after the directory was fsynced: who builds on it may."""
    kernel = Scripted(lambda _name, _count: None)
    storage = ready(tmp_path, kernel)
    storage.create("log/0", b"x", staging="tmp/w")
    kernel.names.clear()
    with pytest.raises(AlreadyExistsError):
        storage.create("log/0", b"y", staging="tmp/w")
    assert "fsync" in kernel.names[kernel.names.index("link") :]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_a_place_without_links_says_so(tmp_path: Path, number: int) -> None:
    """link() refused for good: UnsupportedError, and the capability is gone from then on."""
    storage = ready(tmp_path, failing("link", number))
    assert storage.capabilities.exclusive_create
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            storage.create("log/0", b"x", staging="tmp/w")
        assert not storage.capabilities.exclusive_create
    assert files(tmp_path) == []


def test_stale_handles_are_looked_up_again(tmp_path: Path) -> None:
    """ESTALE from read, stat or preadv is cured by a look at the name, a few times."""
    ready(tmp_path).replace("log/f", b"12345")
    for call in ("open", "read", "preadv"):
        storage = ready(tmp_path, failing(call, errno.ESTALE))
        assert storage.read("log/f") == b"12345"
        storage._posix = failing(call, errno.ESTALE)
        buffer = bytearray(5)
        with storage.open_read("log/f") as reader:
            reader.read_into(0, memoryview(buffer))
        assert buffer == b"12345"


def test_a_name_that_stays_stale_is_an_error(tmp_path: Path) -> None:
    """After a few looks StaleError; and a name that another file took is not read on."""
    ready(tmp_path).replace("log/f", b"12345")

    def always(name: str, _: int) -> None:
        if name in ("read", "preadv"):
            raise OSError(errno.ESTALE, "stale")

    storage = ready(tmp_path, Scripted(always))
    with pytest.raises(StaleError):
        storage.read("log/f")
    with storage.open_read("log/f") as reader, pytest.raises(StaleError):
        reader.read_into(0, memoryview(bytearray(5)))
    storage._posix = failing("preadv", errno.ESTALE)
    with storage.open_read("log/f") as reader:
        (tmp_path / "run/log/f").write_bytes(b"another file")
        with pytest.raises(StaleError):
            reader.read_into(0, memoryview(bytearray(5)))


def test_make_dir_asks_nothing_and_syncs_all(tmp_path: Path) -> None:
    """Mkdir comes first, EEXIST is success, and every name from the root down is fsynced: by each process that did
    not do so before.
    """
    kernel = Scripted(lambda _name, _count: None)
    storage = ready(tmp_path, kernel)
    for mkdirs in (3, 1):
        storage._durable = DurableDirs()  # as another process has it
        kernel.names.clear()
        storage.make_dir("a/b")
        assert kernel.names[0] == "mkdir"
        assert kernel.names.count("mkdir") == mkdirs
        assert kernel.names.count("fsync") == 3  # names in a, in the root, and of the root
    until_the_clock_ticks(tmp_path)
    storage.make_dir("a/c")
    kernel.names.clear()
    storage.make_dir("a/b")
    assert kernel.names[:2] == ["open", "mkdir"]  # of a, which is synced after it
    assert kernel.names.count("mkdir") == kernel.names.count("open") == 1
    assert kernel.names.count("fsync") == 1  # another may have made b and not synced it


def test_a_parent_that_is_removed_and_made_again_is_the_one_that_is_synced(tmp_path: Path) -> None:
    """After make_dir opened it: the name is made in the new one, and nothing that is dead is taken for durable."""
    parent = tmp_path / "run/a"

    class Replaced(Scripted):
        replaces: bool
        synced: list[int]  # the inodes of directories

        def mkdir(self, path: str, mode: int = 0o777) -> None:
            if path.endswith("/b") and self.replaces:
                self.replaces = False
                parent.rmdir()
                (tmp_path / "run/other").mkdir()  # takes the inode number
                parent.mkdir()
            super().mkdir(path, mode)

        def fsync(self, fd: int) -> None:
            self.synced.append(os.fstat(fd).st_ino)
            super().fsync(fd)

    kernel = Replaced(lambda _name, _count: None)
    kernel.replaces, kernel.synced = False, []
    storage = ready(tmp_path, kernel)
    storage.make_dir("a")
    until_the_clock_ticks(tmp_path)
    storage.make_dir("a/x")
    storage.remove_dir("a/x")
    kernel.replaces = True
    kernel.synced.clear()
    storage.make_dir("a/b/c")
    assert (parent / "b/c").is_dir()
    assert not kernel.replaces
    assert kernel.synced[:3] == [os.stat(p).st_ino for p in (parent / "b", parent, parent.parent)]


def test_a_directory_without_a_time_of_birth_is_synced_each_time(tmp_path: Path) -> None:
    """Numbers of inodes are used again: one that another process made again would look like the one that was synced."""

    class Timeless(Scripted):
        def identity(self, fd: int) -> Identity:
            return super().identity(fd)._replace(born_ns=0)

    kernel = Timeless(lambda _name, _count: None)
    storage = ready(tmp_path, kernel)
    storage.make_dir("a")
    until_the_clock_ticks(tmp_path)
    storage.make_dir("a/b")
    kernel.names.clear()
    storage.make_dir("a/b")
    assert kernel.names.count("fsync") == 3


def test_an_identity_of_this_very_tick_has_no_time_of_birth(tmp_path: Path) -> None:
    """Until the clock has moved on, one that is removed and made again may have the same number and the same time."""
    kernel = Posix()

    def born_ns(path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            return kernel.identity(fd).born_ns
        finally:
            os.close(fd)

    young = tmp_path / "young"
    young.mkdir()
    assert not born_ns(young)
    until_the_clock_ticks(tmp_path)
    assert not born_ns(young), (
        "nothing has changed in it: that the clock has moved is not seen there"
    )
    (young / "name").touch()
    if not born_ns(young):
        pytest.skip("this filesystem does not tell when a directory was made")
    made = young.stat().st_ctime_ns
    until_the_clock_ticks(tmp_path)
    (young / "another").touch()
    assert born_ns(young) < made < young.stat().st_ctime_ns


def test_make_dir_over_a_file(tmp_path: Path) -> None:
    """EEXIST is success whatever is there; below a file nothing can be made."""
    storage = ready(tmp_path)
    storage.replace("log/f", b"x")
    storage.make_dir("log/f")
    with pytest.raises(NotFoundError):
        storage.make_dir("log/f/g")


def test_refresh_opens_what_exists(tmp_path: Path) -> None:
    """Refresh of an absent directory opens its nearest ancestor and asks for the name again."""
    opened: list[str] = []

    class Watching(Posix):
        def open(
            self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None
        ) -> int:
            opened.append(path.removeprefix(str(tmp_path)))
            return super().open(path, flags, mode, dir_fd=dir_fd)

    storage = ready(tmp_path, Watching())
    storage.refresh("log/a/b")
    assert opened == ["/run/log/a/b", "/run/log/a", "/run/log", "/run/log/a", "/run/log/a/b"]


class Cached(Posix):
    """A network client as some are (NFS with ``nocto``, for one): it opens a directory that it knows
    without asking the server, and believes the absences that it remembers; fstat asks.
    """

    def __init__(self) -> None:
        self._absent: dict[str, set[str]] = {}
        self._opened: dict[int, str] = {}
        self.replaced: str | None = None  # a directory with an inode that the server knows no more

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        plain = without_mark(path)
        folder, name = os.path.split(plain)
        if name in self._absent.get(folder, ()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
        except FileNotFoundError:
            self._absent.setdefault(folder, set()).add(name)
            raise
        self._opened[fd] = plain
        return fd

    def fstat(self, fd: int) -> os.stat_result:
        path = self._opened.get(fd, "")
        if path == self.replaced:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._absent.pop(path, None)
        if self.replaced is not None and path == os.path.dirname(self.replaced):
            self.replaced = None  # its holder was asked: the name is looked up again
        return super().fstat(fd)


def test_refresh_asks_the_server_where_opening_asks_nobody(tmp_path: Path) -> None:
    """What another node wrote after it was seen to be absent is read after a refresh, also where
    this node opens a directory from its cache.
    """
    storage = ready(tmp_path, Cached())
    with pytest.raises(NotFoundError):
        storage.read("log/0")
    (tmp_path / "run/log/0").write_bytes(b"entry")
    with pytest.raises(NotFoundError):
        storage.read("log/0")  # as such a client is
    storage.refresh("log")
    assert storage.read("log/0") == b"entry"


def test_refresh_of_a_directory_that_was_replaced_looks_at_its_holder(tmp_path: Path) -> None:
    """The server knows the directory no more that this node has open (ESTALE): one above is asked,
    which drops the old name, and then the new directory is.
    """
    kernel = Cached()
    storage = ready(tmp_path, kernel)
    with pytest.raises(NotFoundError):
        storage.read("log/0")
    (tmp_path / "run/log/0").write_bytes(b"entry")
    kernel.replaced = str(tmp_path / "run/log")
    storage.refresh("log")
    assert kernel.replaced is None
    assert storage.read("log/0") == b"entry"


def test_remove_dir_leaves_what_is_no_directory(tmp_path: Path) -> None:
    """A link to a directory, a dead link and a file are somebody's; below a file there is nothing."""
    (tmp_path / "far").mkdir()
    os.symlink(tmp_path / "far", tmp_path / "linked")
    os.symlink(tmp_path / "nowhere", tmp_path / "dead")
    (tmp_path / "file").write_text("x")
    storage = LocalStorage(Uri.parse(tmp_path))
    for name in ("linked", "dead", "file"):
        with pytest.raises(AlreadyExistsError) as raised:
            storage.remove_dir(name)
        assert raised.value.errno == errno.ENOTDIR
        assert os.path.lexists(tmp_path / name)
    storage.remove_dir("file/below")
    storage.remove_dir("absent")
    assert (tmp_path / "far").is_dir()


def test_touch_moves_the_directory(tmp_path: Path) -> None:
    """Touch changes the directory's times, which is what an NFSv3 reader compares."""
    storage = ready(tmp_path)
    os.utime(tmp_path / "run/log", (1, 1))
    storage.touch("log")
    assert (tmp_path / "run/log").stat().st_mtime > 1


# -- remove_tree -----------------------------------------------------------------------


def test_remove_tree_never_follows_links(tmp_path: Path) -> None:
    """Links to files and directories, and a key that is a link, are unlinked; their targets stay."""
    storage = ready(tmp_path)
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub/f").write_bytes(b"x")
    tree = tmp_path / "run/t"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep/dir").symlink_to(outside)
    (tree / "file").symlink_to(outside / "sub/f")
    (tree / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run/link").symlink_to(outside)
    storage.remove_tree("t")
    storage.remove_tree("link")
    assert files(tmp_path) == ["outside/sub/f"]
    assert not tree.exists()
    assert not (tmp_path / "run/link").is_symlink()


def test_remove_tree_leaves_what_nfs_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file open on this node becomes .nfsXXXX and cannot go: a log line, not a dead trainer."""
    (tmp_path / "run/t/sub").mkdir(parents=True)
    (tmp_path / "run/t/sub/open").write_bytes(b"x")
    (tmp_path / "run/t/other").write_bytes(b"x")

    class Nfs(Posix):
        def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
            if path == "open":
                os.rename(path, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            elif path.startswith(".nfs"):
                raise OSError(errno.EBUSY, "busy")
            else:
                super().unlink(path, dir_fd=dir_fd)

    with caplog.at_level(logging.WARNING):
        ready(tmp_path, Nfs()).remove_tree("t")
    assert files(tmp_path) == ["run/t/sub/.nfs0001"]
    assert "sub/.nfs0001" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="what root is told")
def test_root_that_is_refused_is_told_of_root_squash(tmp_path: Path) -> None:
    """On a disk of its own it may do anything."""
    storage = ready(tmp_path, failing("mkdir", errno.EACCES))
    with pytest.raises(errors.AccessError, match="root_squash"):
        storage.make_dir("d")


def test_remove_tree_tells_other_failures(tmp_path: Path) -> None:
    """A file that cannot be unlinked is an error with the URI, not a log line."""
    storage = ready(tmp_path, failing("unlink", errno.EACCES))
    (tmp_path / "run/log/f").write_bytes(b"x")
    with pytest.raises(AccessError) as caught:
        storage.remove_tree("log")
    assert "run/log" in str(caught.value.uri)


class TakenForAnother(Posix):
    """An NFS client that takes a name for a file that is gone, until it opens the directory again."""

    def __init__(self) -> None:
        self.is_stale = True
        self.looks = 0

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECTORY:
            self.is_stale = False
        elif self.is_stale and not flags & os.O_CREAT:
            self.looks += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        if self.is_stale:
            self.looks += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().stat(path, dir_fd=dir_fd, follow=follow)


@pytest.mark.parametrize("key", ["log/f", ".ckptfs/f", "f"])
def test_a_name_that_is_stale_is_looked_up_anew(tmp_path: Path, key: str) -> None:
    """The same open again would meet the same answer: the directory is opened first, once."""
    plain = ready(tmp_path)
    for folder in ("log", ".ckptfs"):
        plain.make_dir(folder)
    plain.replace(key, b"new")
    ways: list[Callable[[LocalStorage], object]] = [
        lambda storage: storage.read(key),
        lambda storage: storage.stat(key).size_bytes,
        lambda storage: storage.open_read(key).close(),
    ]
    for way in ways:
        kernel = TakenForAnother()
        storage = LocalStorage(plain.root, posix=kernel)
        assert way(storage) in (b"new", 3, None)
        assert kernel.looks == 1


# -- the probe -------------------------------------------------------------------------


def test_the_probe_waits_for_the_first_write(tmp_path: Path) -> None:
    """Reading probes nothing; the first make_dir does, and leaves nothing behind."""
    kernel = Scripted(lambda _name, _count: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/f").write_bytes(b"x")
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=kernel)
    assert storage.capabilities == ASSUMED
    storage.read("f")
    storage.list("")
    storage.stat("f")
    storage.refresh("")
    storage.space()
    assert not {"create", "write", "mkdir", "rename", "link", "unlink"} & set(kernel.names)
    storage.make_dir("log")
    assert "link" in kernel.names
    assert files(tmp_path) == ["run/f"]
    assert sorted(os.listdir(tmp_path / "run")) == ["f", "log"]
    kernel.names.clear()
    storage.make_dir("tmp")
    assert "link" not in kernel.names


@pytest.mark.parametrize("call", ["create", "write", "link", "rename", "mkdir"])
def test_the_probe_leaves_nothing_after_an_error(tmp_path: Path, call: str) -> None:
    """A probe that meets a full disk half-way removes what it made, and the error is raised."""
    (tmp_path / "run").mkdir()
    for nth in range(1, 4):
        kernel = failing(call, errno.ENOSPC, nth=nth)
        storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=kernel)
        try:
            storage.replace("f", b"x")
        except NoSpaceError:
            assert os.listdir(tmp_path / "run") == []
        else:
            assert os.listdir(tmp_path / "run") == ["f"]
            os.unlink(tmp_path / "run/f")


class OldRename(Posix):
    """A mount that copies a directory to rename it."""

    def rename(self, source: str, target: str) -> None:
        if not os.path.isdir(source):
            super().rename(source, target)
            return
        os.mkdir(target)
        for name in os.listdir(source):
            Path(target, name).write_bytes(Path(source, name).read_bytes())
            os.unlink(f"{source}/{name}")
        os.rmdir(source)


class NoDirectorySync(Posix):
    """A mount that does not know fsync of a directory."""

    def fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "invalid")
        super().fsync(fd)


class LinkOverwrites(Posix):
    """A mount with a link call that takes a taken name."""

    def link(self, source: str, target: str) -> None:
        if os.path.exists(target):
            os.unlink(target)
        super().link(source, target)


class NoRenameOver(Posix):
    """A mount that does not rename over a file."""

    def rename(self, source: str, target: str) -> None:
        if os.path.exists(target):
            raise OSError(errno.EEXIST, "exists")
        super().rename(source, target)


def _capabilities(
    *,
    shape: Shape = Shape.FILESYSTEM,
    exclusive_create: bool = True,
    atomic_replace: bool = True,
    durable: bool = True,
) -> Capabilities:
    return Capabilities(shape, exclusive_create, atomic_replace, False, durable)  # noqa: FBT003


@pytest.mark.parametrize(
    ("posix", "expected"),
    [
        (Posix(), _capabilities()),
        (OldRename(), _capabilities(shape=Shape.OBJECT)),
        (NoDirectorySync(), _capabilities(durable=False)),
        (LinkOverwrites(), _capabilities(exclusive_create=False)),
        (NoRenameOver(), _capabilities(atomic_replace=False)),
    ],
)
def test_the_probe_sees_what_a_mount_does(
    tmp_path: Path, posix: Posix, expected: Capabilities
) -> None:
    """Each capability is what the place did, whatever it is called."""
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=posix)
    storage.make_dir("")
    assert storage.capabilities == expected
    assert os.listdir(tmp_path / "run") == []


class OneLookFails(Posix):
    """The ``nth`` look at a name itself, not through links, is answered with ESTALE."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        self.left -= not follow
        if not self.left:
            self.left = -1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().stat(path, dir_fd=dir_fd, follow=follow)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_look_that_fails_is_no_answer_to_the_probe(tmp_path: Path, nth: int) -> None:
    """It is raised, and the next write probes again: the mount is not taken for an object store for good."""
    (tmp_path / "run").mkdir()
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=OneLookFails(nth))
    with pytest.raises(StaleError):
        storage.replace("f", b"x")
    assert storage.capabilities == ASSUMED
    assert os.listdir(tmp_path / "run") == []
    storage.replace("f", b"x")
    assert storage.capabilities == _capabilities()


# -- modes, groups, other people -------------------------------------------------------


@pytest.fixture
def shared_group() -> Iterator[Path]:
    """A setgid directory of group 4242, reachable by others (pytest's own are not)."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)  # noqa: S103 - the case
        place = Path(made, "shared")
        place.mkdir()
        os.chown(place, 0, 4242)
        os.chmod(place, 0o2775)  # noqa: S103 - the case
        yield place


def as_user(uid: int, act: Callable[[], None]) -> None:
    """Run ``act`` in a fork as ``uid`` of group 4242 with umask 0002; raise what it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(4242)
            os.setuid(uid)
            os.umask(0o002)
            act()
        except BaseException as error:  # noqa: BLE001 - passed to the parent below
            os.write(writing, repr(error).encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        said = told.read().decode()
    os.waitpid(child, 0)
    assert said == "", said


def test_a_second_user_resumes_and_reclaims(shared_group: Path) -> None:
    """Umask 0002 and setgid: a colleague creates next to it, replaces, renames and removes what one made."""
    storage = LocalStorage(Uri.parse(str(shared_group / "run")))

    def first() -> None:
        storage.make_dir("log")
        storage.make_dir("tmp")
        storage.make_dir("attempts/a")
        storage.create("log/0", b"first", staging="tmp/w")
        storage.replace("hint", b"first")
        with storage.open_write("attempts/a/data") as writer:
            writer.write(b"x" * 100)

    def second() -> None:
        assert storage.read("log/0") == b"first"
        storage.make_dir("log")
        storage.create("log/1", b"second", staging="tmp/w")
        storage.replace("hint", b"second")
        with storage.open_write("attempts/a/data") as writer:
            writer.write(b"y")
        storage.touch("log")
        storage.rename("attempts/a", "step_1")
        storage.remove_tree("step_1")
        storage.remove("log/0")

    as_user(5001, first)
    as_user(5002, second)
    assert files(shared_group) == ["run/hint", "run/log/1"]
    for path in [shared_group / "run", *(shared_group / "run").rglob("*")]:
        found = path.stat()
        assert found.st_gid == 4242
        expected = 0o2775 if path.is_dir() else 0o664
        assert stat.S_IMODE(found.st_mode) == expected, path
    assert (shared_group / "run/hint").stat().st_uid == 5002


def test_a_stranger_is_told_so(shared_group: Path) -> None:
    """Without write permission: AccessError that names the URI, from every kind of write."""
    storage = LocalStorage(Uri.parse(str(shared_group / "run")))
    storage.make_dir("log")
    os.chmod(shared_group / "run", 0o755)  # noqa: S103 - the case
    os.chmod(shared_group / "run/log", 0o755)  # noqa: S103 - the case

    def stranger() -> None:
        again = LocalStorage(storage.root)
        told: list[str] = []
        for act in (
            lambda: again.replace("log/0", b"x"),
            lambda: again.make_dir("log/a"),
            lambda: again.open_write("log/0"),
            lambda: again.create("log/0", b"x", staging="log/w"),
            lambda: again.rename("log", "log2"),
        ):
            try:
                act()
            except AccessError as error:
                told.append(str(error.uri))
            else:
                raise AssertionError("a stranger wrote")
        assert all("/run" in uri for uri in told)
        assert again.list("") != []

    as_user(5003, stranger)


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """0o666 and 0o777 & ~umask, and nothing changes them afterwards."""
    before = os.umask(0o027)
    try:
        storage = ready(tmp_path)
        storage.create("log/0", b"x", staging="tmp/w")
        storage.replace("hint", b"x")
        _write(storage, "data", 2 << 20)
    finally:
        os.umask(before)
    for name in ("log/0", "hint", "data"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "run/log").stat().st_mode) == 0o750


def test_an_unreadable_parent_is_passed(shared_group: Path) -> None:
    """The root may be in a directory that we may pass but not list: /home is one."""
    os.chmod(shared_group, 0o2711)  # noqa: S103 - the case
    run = shared_group / "run"
    run.mkdir()
    os.chmod(run, 0o2777)  # noqa: S103 - the case
    storage = LocalStorage(Uri.parse(str(run)))
    as_user(5004, lambda: storage.make_dir("log"))
    assert (run / "log").is_dir()


def test_a_directory_that_may_only_be_passed_through_is_no_error_to_refresh(tmp_path: Path) -> None:
    """Mode 0711: what is below may be read; a refresh is a hint, and the read says who is refused."""

    class Unlistable(Posix):
        def open(
            self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None
        ) -> int:
            if flags & os.O_DIRECTORY:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return super().open(path, flags, mode, dir_fd=dir_fd)

    ready(tmp_path).replace("log/f", b"x")
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=Unlistable())
    storage.refresh("log")
    assert storage.read("log/f") == b"x"


def test_what_was_never_written_is_not_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only mount refuses to remove a name that is not there: nothing stays, so there is no error;
    for a file that does stay there is.
    """

    class ReadOnly(Posix):
        def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
            raise OSError(errno.EROFS, "Read-only file system", path)

    with caplog.at_level(logging.WARNING):
        unlink_quietly(ReadOnly(), str(tmp_path / "absent"))
    assert not warned(caplog)
    (tmp_path / "there").touch()
    with caplog.at_level(logging.WARNING):
        unlink_quietly(ReadOnly(), str(tmp_path / "there"))
    (message,) = caplog.messages
    assert message.startswith("left behind: ")
