"""Only regular files are read, and only so many bytes of a small one."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.commit.paths import (
    ENTRY_BYTES,
    HINT,
    MANIFEST_BYTES,
    METADATA_BYTES,
    RECORD_BYTES,
    SIDECAR_BYTES,
    limit_of,
    log_key,
)
from ckptfs.errors import StorageError, SymlinkError
from ckptfs.storage.base import SMALL_BYTES, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

Ways = Callable[[Storage, str], object]
WAYS: dict[str, Ways] = {
    "read": lambda storage, key: storage.read(key),
    "read_small": lambda storage, key: storage.read_small(key, 100),
    "read_ahead": lambda storage, key: storage.read_ahead([key]),
    "open_read": lambda storage, key: storage.open_read(key),
}


def _stat(storage: Storage, key: str) -> object:
    return storage.stat(key)


class Reads(Posix):
    """Counts the bytes that were asked for, and keeps how each file was opened."""

    def __init__(self) -> None:
        self.asked_bytes = 0
        self.opened: list[tuple[str, int]] = []

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        self.opened.append((os.path.basename(path), flags))
        return fd

    def read(self, fd: int, size_bytes: int) -> bytes:
        self.asked_bytes += size_bytes
        return super().read(fd, size_bytes)


def _within(seconds: float, call: Callable[[], object]) -> object:
    """What it returns or raises; AssertionError where it waits for somebody."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits"
    return outcome[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("linked", [False, True])
def test_a_fifo_is_an_error_at_once(tmp_path: Path, way: str, linked: bool) -> None:
    """No reader waits for a writer that never comes, also not behind a link."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    storage = open_storage(tmp_path)
    error = _within(30, lambda: WAYS[way](storage, "link" if linked else "fifo"))
    assert isinstance(error, StorageError)
    assert "FIFO" in error.message


@pytest.mark.parametrize("way", WAYS)
def test_a_device_and_a_socket_are_errors(tmp_path: Path, way: str) -> None:
    """Of a device that never ends nothing is read."""
    (tmp_path / "zeros").symlink_to("/dev/zero")
    posix = Reads()
    storage = LocalStorage(Uri.parse(str(tmp_path)), posix=posix)
    with pytest.raises(StorageError, match="it is a device, not"):
        WAYS[way](storage, "zeros")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(StorageError):
            WAYS[way](storage, "socket")
    assert posix.asked_bytes == 0
    assert not [name for name, _ in posix.opened if name == "zeros"], "opening it may be an action"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", ["/dev", "there"])
def test_nothing_is_opened_behind_a_linked_directory_before_a_look(
    tmp_path: Path, way: str, target: str
) -> None:
    """The link is not the last component, so that open(2) without links would follow it."""
    (tmp_path / "there").mkdir()
    os.mkfifo(tmp_path / "there" / "zero")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step").symlink_to(target if target == "/dev" else tmp_path / target)
    posix = Reads()
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=posix)
    with pytest.raises(StorageError, match="not a regular file"):
        WAYS[way](storage, "step/zero")
    assert not [name for name, _ in posix.opened if name == "zero"], "opening it may be an action"


def test_a_regular_file_is_read_blocking_and_is_no_terminal(tmp_path: Path) -> None:
    """Also behind a link; O_NONBLOCK is for the open alone: a FUSE server may answer EAGAIN to it."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    posix = Reads()
    storage = LocalStorage(Uri.parse(str(tmp_path)), posix=posix)
    for name in ("file", "link"):
        with storage.open_read(name) as reader:
            assert os.get_blocking(reader._fds[-1])
    for _, flags in posix.opened:
        assert flags & os.O_NOCTTY
        assert flags & os.O_NONBLOCK


def test_a_file_that_is_too_large_is_an_error_before_it_is_read(tmp_path: Path) -> None:
    """20 GB of holes take no memory; a file of just the limit is read."""
    (tmp_path / "right").write_bytes(b"x" * 100)
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(20 << 30)
    posix = Reads()
    storage = LocalStorage(Uri.parse(str(tmp_path)), posix=posix)
    with pytest.raises(StorageError, match="a file of this kind has at most 100") as caught:
        storage.read_small("giant", 100)
    assert caught.value.errno == errno.EFBIG
    assert posix.asked_bytes == 0
    assert storage.read_small("right", 100) == b"x" * 100
    with pytest.raises(StorageError, match="it has 100 bytes"):
        storage.read_small("right", 99)


def test_a_file_that_tells_no_size_is_read_to_the_limit() -> None:
    """What /proc makes up has 0 bytes by its own word."""
    storage = open_storage("/proc/self")
    assert b"Name:" in storage.read_small("status", 1 << 20)
    with pytest.raises(StorageError, match="a file of this kind has at most 10"):
        storage.read_small("status", 10)


@pytest.mark.parametrize(
    "uri",
    [
        "memory://small",
        "fsspec+memory:///small",
        "fsspec+file://{tmp}",
        "objects+memory://small-files/run",
    ],
)
def test_other_stores_have_limits_too(tmp_path: Path, uri: str) -> None:
    """The same answers from memory and through fsspec."""
    storage = open_storage(uri.format(tmp=tmp_path))
    storage.make_dir("")
    with storage.open_write("f") as writer:
        writer.write(b"x" * 100)
    assert storage.read_small("f", 100) == b"x" * 100
    with pytest.raises(StorageError, match="a file of this kind has at most 99"):
        storage.read_small("f", 99)
    with pytest.raises(StorageError, match="a file of this kind has at most 99"):
        storage.read_ahead(["f"], limit_bytes=99)


def test_a_fifo_through_fsspec_is_an_error_at_once(tmp_path: Path) -> None:
    """What fsspec calls neither file nor directory is not opened."""
    os.mkfifo(tmp_path / "fifo")
    storage = open_storage(f"fsspec+file://{tmp_path}")
    assert isinstance(_within(30, lambda: storage.read_small("fifo", 100)), StorageError)


def test_the_run_s_own_files_are_no_links(tmp_path: Path) -> None:
    """A link in .ckptfs would have a run decide by, and show, what is elsewhere."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / ".ckptfs").mkdir()
    (tmp_path / ".ckptfs" / "domain").symlink_to("../secret")
    (tmp_path / "step_1").symlink_to("secret")
    storage = open_storage(tmp_path)
    with pytest.raises(SymlinkError):
        storage.read_small(".ckptfs/domain", 100)
    assert storage.read_small("step_1", 100) == b"secret"


def test_every_kind_of_small_file_has_its_limit() -> None:
    """What the name says, in whatever directory; what no name says has the common one."""
    limits = {
        log_key(7): ENTRY_BYTES,
        HINT: RECORD_BYTES,
        ".ckptfs/domain": RECORD_BYTES,
        ".ckptfs/attempts/x/x/attempt.json": RECORD_BYTES,
        "step_1/ckptfs.json": MANIFEST_BYTES,
        "step_1/x/ckptfs.json": MANIFEST_BYTES,
        "step_1/.metadata": METADATA_BYTES,
        "step_1/x/__0_0.xxh3": SIDECAR_BYTES,
        "step_1/model.safetensors.index.json": SMALL_BYTES,
    }
    assert {key: limit_of(key) for key in limits} == limits


@pytest.mark.parametrize("uri", ["{tmp}", "fsspec+file://{tmp}"])
def test_a_strange_name_is_passed_by(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A listing has what is next to it, and one warning says where it is, not one for each listing."""
    (tmp_path / "step_1").mkdir()
    for name in (b"step_\xff", b"\x1b[2J", b"a\nb"):
        os.mkdir(os.path.join(os.fsencode(tmp_path), name))
    storage = open_storage(uri.format(tmp=tmp_path))
    for _ in range(2):
        assert [entry.name for entry in storage.list("")] == ["step_1"]
    assert len(caplog.records) == 3
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("linked", ["file", "folder", "folder/deep"])
def test_what_a_link_leads_to_is_read_only_where_links_are_followed(
    tmp_path: Path, linked: str
) -> None:
    """Who copies refuses links below the checkpoint, in any component; the checkpoint itself may be one."""
    away = tmp_path / "away"
    (away / "folder" / "deep").mkdir(parents=True)
    for name in ("file", "folder/file", "folder/deep/file"):
        (away / name).write_bytes(b"secret")
    step = tmp_path / "moved"
    (step / linked).parent.mkdir(parents=True)
    (step / linked).symlink_to(away / linked)
    (step / "plain").write_bytes(b"plain")
    (tmp_path / "step_1").symlink_to("moved")
    storage = open_storage(tmp_path)
    strict = storage.refusing_links("step_1")
    key = f"step_1/{linked}" if linked == "file" else f"step_1/{linked}/file"
    assert storage.read_small(key, 10) == b"secret"
    for way in (*WAYS.values(), _stat):
        with pytest.raises(SymlinkError) as caught:
            way(strict, key)
        assert caught.value.hint is not None
        assert "--follow-links" in caught.value.hint
    if linked != "file":
        with pytest.raises(SymlinkError):
            strict.list(f"step_1/{linked}")
    assert strict.read_small("step_1/plain", 10) == b"plain"
    assert strict.list("step_1") == storage.list("step_1")


@pytest.mark.parametrize(
    ("link", "target", "key"),
    [
        ("newest", "folder/file", "newest"),
        ("linked", "folder", "linked/file"),
        ("linked", "folder", "linked/up/file"),
        ("here", ".", "here/folder/file"),
        ("whole", "{step}/folder/file", "whole"),
        ("folder/again", "../folder/./again2", "folder/again"),
    ],
)
def test_a_link_that_stays_in_the_checkpoint_is_read(
    tmp_path: Path, link: str, target: str, key: str
) -> None:
    """Nothing from elsewhere comes out through it: a copy reads it as any reader does."""
    step = tmp_path / "step_1"
    (step / "folder").mkdir(parents=True)
    (step / "folder" / "file").write_bytes(b"inside")
    (step / "folder" / "up").symlink_to("../folder")
    (step / "folder" / "again2").symlink_to("up/file")
    (step / link).symlink_to(target.format(step=step))
    strict = open_storage(tmp_path).refusing_links("step_1")
    assert strict.read_small(f"step_1/{key}", 10) == b"inside"
    assert strict.stat(f"step_1/{key}").size_bytes == len(b"inside")
    with strict.open_read(f"step_1/{key}") as reader:
        data = bytearray(reader.size_bytes)
        reader.read_into(0, memoryview(data))
    assert data == b"inside"


@pytest.mark.parametrize(
    "target",
    [
        "..",
        "../secret",
        "../step_1/file",
        "folder/../../secret",
        "{root}/secret",
        "{step}/../secret",
        "me",
    ],
)
def test_a_link_that_leaves_the_checkpoint_on_its_way_is_refused(
    tmp_path: Path, target: str
) -> None:
    """In words or by a link on its way; also where it comes back in, and where it leads to itself."""
    step = tmp_path / "step_1"
    (step / "folder").mkdir(parents=True)
    (step / "file").write_bytes(b"inside")
    (step / "out").symlink_to("..")
    (tmp_path / "secret").write_bytes(b"secret")
    (step / "me").symlink_to(target.format(step=step, root=tmp_path))
    (step / "through").symlink_to("out/secret")
    strict = open_storage(tmp_path).refusing_links("step_1")
    for key in ("step_1/me", "step_1/through", "step_1/out/secret", "step_1/me/secret"):
        for way in (*WAYS.values(), _stat):
            with pytest.raises(SymlinkError):
                way(strict, key)
