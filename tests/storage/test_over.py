"""``ckptfs+file://`` writes to what a plain ``open`` would write to, and replaces regular files alone."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import fsspec
import pytest

from ckptfs.errors import AlreadyExistsError, StorageError, UnsupportedError
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.local.writers import ReplacingWriter, WriteMethod, method_of
from ckptfs.uri import Uri


def write(path: Path, data: bytes = b"new", mode: str = "wb") -> None:
    """As any program that takes a URL."""
    with fsspec.open(f"ckptfs+file://{path}", mode) as file:
        file.write(data)


def fail_half_way(path: Path) -> None:
    """A program that dies while it writes."""
    with fsspec.open(f"ckptfs+file://{path}", "wb") as file:
        file.write(b"half")
        raise ZeroDivisionError


def mode_of(path: Path) -> int:
    """Its permissions."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and writes to foreign ones")
@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_device_is_written_and_stays_a_device(tmp_path: Path, mode: str) -> None:
    """A node like /dev/null swallows what root writes to it, directly and through a link, and is still one."""
    null = tmp_path / "null"
    try:
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        null.write_bytes(b"")
    except PermissionError:
        pytest.skip("no devices here")
    (tmp_path / "link").symlink_to(null)
    for name in ("null", "link"):
        write(tmp_path / name, b"x" * 3_000_000, mode)
        assert stat.S_ISCHR(null.stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "null"]


def test_a_fifo_carries_the_bytes(tmp_path: Path) -> None:
    """A reader gets what was written, and it is a FIFO afterwards; appending does not read it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for mode in ("wb", "ab"):
        got: list[bytes] = []
        reader = threading.Thread(target=lambda got=got: got.append(fifo.read_bytes()))
        reader.start()
        write(fifo, b"through the pipe", mode)
        reader.join(60)
        assert got == [b"through the pipe"]
        assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_directory_and_a_socket_are_refused(tmp_path: Path) -> None:
    """Before the first byte, with typed errors; they stay what they are."""
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(tmp_path, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{here}/socket")  # the path itself may be too long
        finally:
            os.close(here)
        storage = LocalStorage(Uri.parse(tmp_path))
        for name, kind in (("directory", AlreadyExistsError), ("socket", UnsupportedError)):
            with pytest.raises(kind):
                storage.open_over(name)
            with pytest.raises(OSError, match="has this name"):
                write(tmp_path / name)
        assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["directory", "socket"]


def test_a_link_stays_and_its_target_gets_the_bytes(tmp_path: Path) -> None:
    """Also over several links, relative ones, and one with a target that is not there yet."""
    (tmp_path / "far").mkdir()
    target = tmp_path / "far/target"
    target.write_bytes(b"old")
    (tmp_path / "far/link").symlink_to("target")
    (tmp_path / "link").symlink_to("far/link")
    (tmp_path / "fresh").symlink_to("far/made")
    write(tmp_path / "link")
    write(tmp_path / "fresh", b"made")
    assert (target.read_bytes(), (tmp_path / "far/made").read_bytes()) == (b"new", b"made")
    assert all((tmp_path / name).is_symlink() for name in ("link", "far/link", "fresh"))
    write(tmp_path / "link", b"+", "ab")
    assert target.read_bytes() == b"new+"
    with pytest.raises(ZeroDivisionError):
        fail_half_way(tmp_path / "link")
    assert target.read_bytes() == b"new+"
    assert sorted(os.listdir(tmp_path / "far")) == ["link", "made", "target"]


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    """With a typed error, and nothing is left."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StorageError):
        LocalStorage(Uri.parse(tmp_path)).open_over("a")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755, 0o444])
def test_the_mode_of_what_is_replaced_stays(tmp_path: Path, mode: int) -> None:
    """Whatever the umask is, and before the first byte: a secret is never readable for a moment. A new
    file has 0666 & ~umask.
    """
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(mode)
    before = os.umask(0o027)
    try:
        with fsspec.open(f"ckptfs+file://{path}", "wb") as file:
            (partial,) = (one for one in tmp_path.iterdir() if one != path)
            assert mode_of(partial) == mode
            file.write(b"new")
        write(tmp_path / "fresh")
    finally:
        os.umask(before)
    assert (path.read_bytes(), mode_of(path)) == (b"new", mode)
    assert mode_of(tmp_path / "fresh") == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_of_what_is_replaced_stays_where_permitted(tmp_path: Path) -> None:
    """Root keeps owner and group; who may not keeps the mode and owns the file."""

    class Unprivileged(Posix):
        def fchown(self, fd: int, owner: int, group: int) -> None:
            raise PermissionError(1, "not permitted")

    path = tmp_path / "theirs"
    for posix, owner in ((Posix(), (65534, 65533)), (Unprivileged(), (0, 0))):
        path.write_bytes(b"old")
        os.chown(path, 65534, 65533)
        path.chmod(0o640)
        with LocalStorage(Uri.parse(tmp_path), posix=posix).open_over("theirs") as writer:
            writer.write(b"new")
        assert (path.stat().st_uid, path.stat().st_gid) == owner
        assert (path.read_bytes(), mode_of(path)) == (b"new", 0o640)


def test_a_hard_link_keeps_the_old_bytes(tmp_path: Path) -> None:
    """An atomic replace splits it, as the page says."""
    (tmp_path / "one").write_bytes(b"old")
    os.link(tmp_path / "one", tmp_path / "two")
    write(tmp_path / "one")
    assert [(tmp_path / name).read_bytes() for name in ("one", "two")] == [b"new", b"old"]


def test_what_comes_to_stand_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """Between open and close somebody puts a FIFO at the path: the close fails, the FIFO stays."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    writer = LocalStorage(Uri.parse(tmp_path)).open_over("file")
    assert isinstance(writer, ReplacingWriter)
    writer.write(b"new")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(AlreadyExistsError):
        writer.close()
    writer.abort()
    assert os.listdir(tmp_path) == ["file"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_every_kind_of_file_has_its_way() -> None:
    """Regular files are replaced, what has a driver or a reader is written in place, the rest refused."""
    ways = {
        stat.S_IFREG: WriteMethod.REPLACE,
        stat.S_IFCHR: WriteMethod.IN_PLACE,
        stat.S_IFBLK: WriteMethod.IN_PLACE,
        stat.S_IFIFO: WriteMethod.IN_PLACE,
        stat.S_IFDIR: WriteMethod.REFUSED,
        stat.S_IFSOCK: WriteMethod.REFUSED,
    }
    assert {kind: method_of(kind | 0o644) for kind in ways} == ways
