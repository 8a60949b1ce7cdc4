"""What a power cut leaves: nothing acknowledged is lost, and every fsync of ours is needed for that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.errors import StorageError
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.testing.disk import Fsync, PowerCut, SimulatedDisk
from ckptfs.uri import Uri
from tests.ticks import until_the_clock_ticks

Act = Callable[[LocalStorage], None]


def make(storage: LocalStorage) -> None:
    """Directories two deep."""
    storage.make_dir("a/log")


def create(storage: LocalStorage) -> None:
    """A log entry."""
    storage.create("log/0", b"entry", staging="tmp/w")


def replace(storage: LocalStorage) -> None:
    """A small file over an older one."""
    storage.replace("hint", b"newer")


def data(storage: LocalStorage) -> None:
    """A data file, then the one sync of its directory."""
    with storage.open_write("data/f") as writer:
        writer.write(b"x" * (2 << 20))
        writer.write(b"y")
    storage.sync("data")


def move(storage: LocalStorage) -> None:
    """A directory moved, target synced before source."""
    storage.rename("attempts/a", "step_1")
    storage.sync("")
    storage.sync("attempts")


EXPECTED: dict[Act, Callable[[Path], bool]] = {
    make: lambda run: (run / "a/log").is_dir(),
    create: lambda run: _bytes(run / "log/0") == b"entry",
    replace: lambda run: _bytes(run / "hint") == b"newer",
    data: lambda run: _bytes(run / "data/f") == b"x" * (2 << 20) + b"y",
    move: lambda run: _bytes(run / "step_1/f") == b"moved" and not (run / "attempts/a").exists(),
}


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def prepared(place: Path) -> Path:
    """A disk with a run on it that was made long ago."""
    disk = place / "disk"
    storage = LocalStorage(Uri.parse(str(disk / "run")))
    for key in ("log", "tmp", "data", "attempts/a"):
        storage.make_dir(key)
    storage.replace("hint", b"older")
    storage.replace("attempts/a/f", b"moved")
    return disk


def switched_on(
    disk: Path,
    *,
    crash_at: int | None = None,
    deaf_to: Callable[[Fsync], bool] = lambda _: False,
) -> tuple[SimulatedDisk, LocalStorage]:
    """The disk, and a storage on it that has probed it already."""
    posix = SimulatedDisk(str(disk), crash_at=crash_at, deaf_to=deaf_to)
    storage = LocalStorage(Uri.parse(str(disk / "run")), posix=posix)
    storage._capabilities = storage.capabilities
    return posix, storage


@pytest.mark.parametrize("act", EXPECTED)
def test_what_returned_survives(tmp_path: Path, act: Act) -> None:
    """After the operation returned, a power cut at once loses none of it."""
    posix, storage = switched_on(prepared(tmp_path))
    act(storage)
    posix.cut()
    posix.materialise(str(tmp_path / "after"))
    assert EXPECTED[act](tmp_path / "after/run")


@pytest.mark.parametrize("act", EXPECTED)
def test_every_fsync_is_needed(tmp_path: Path, act: Act) -> None:
    """With any one fsync ignored, something that was acknowledged is lost."""
    posix, storage = switched_on(prepared(tmp_path / "whole"))
    act(storage)
    needed = [call for call in posix.fsyncs if not _is_for_ancestors(call, act, posix)]
    assert needed
    for call in needed:
        place = tmp_path / f"without{call.number}"
        posix, storage = switched_on(
            prepared(place),
            deaf_to=lambda seen, number=call.number: seen.number == number,  # type: ignore[misc]
        )
        act(storage)
        posix.materialise(str(place / "after"))
        assert not EXPECTED[act](place / "after/run"), call


def _deaf(name: str | None) -> Callable[[Fsync], bool]:
    return lambda call: os.path.basename(call.path) == name


def _is_for_ancestors(call: Fsync, act: Act, posix: SimulatedDisk) -> bool:
    """make_dir syncs above what it made too: needed when another made it, see the next test."""
    return act is make and call.path == posix.directory


def test_directories_that_another_made_are_made_durable(tmp_path: Path) -> None:
    """Another process's mkdir without its fsync yet: our make_dir makes all of the path durable."""
    for deaf_to in (None, "disk", "run", "a"):
        disk = tmp_path / str(deaf_to) / "disk"
        disk.mkdir(parents=True)
        posix, storage = switched_on(disk, deaf_to=_deaf(deaf_to))
        for path in ("run", "run/a", "run/a/log"):
            posix.mkdir(str(disk / path))
        storage.make_dir("a/log")
        posix.materialise(str(disk / "after"))
        assert (disk / "after/run/a/log").is_dir() == (deaf_to is None)


def test_new_ancestors_of_the_root_are_made_durable(tmp_path: Path) -> None:
    """A run in a place that did not exist: without the fsync of any holder on the way it is gone."""
    for deaf_to in (None, "disk", "x", "y", "run"):
        disk = tmp_path / str(deaf_to) / "disk"
        disk.mkdir(parents=True)
        posix = SimulatedDisk(str(disk), deaf_to=_deaf(deaf_to))
        storage = LocalStorage(Uri.parse(f"{disk}/x/y/run"), posix=posix)
        storage.make_dir("log")
        posix.materialise(str(disk / "after"))
        assert (disk / "after/x/y/run/log").is_dir() == (deaf_to is None), deaf_to


def test_what_is_durable_already_is_not_synced_again(tmp_path: Path) -> None:
    """Only the directory that got a new name is; a storage that is new knows nothing."""
    posix, storage = switched_on(prepared(tmp_path))
    until_the_clock_ticks(tmp_path)
    storage.make_dir("attempts/b")
    before = len(posix.fsyncs)
    storage.make_dir("attempts/c")
    run = str(tmp_path / "disk/run")
    assert [call.path for call in posix.fsyncs[before:]] == [f"{run}/attempts"]
    before = len(posix.fsyncs)
    newcomer = LocalStorage(storage.root, posix=posix)
    newcomer._capabilities = storage.capabilities
    newcomer.make_dir("attempts/d")
    above = [f"{run}/attempts", run, str(tmp_path / "disk")]
    assert [call.path for call in posix.fsyncs[before:]] == above


def test_a_directory_that_another_made_again_is_not_taken_for_durable(tmp_path: Path) -> None:
    """It was removed, and who made it again did not come to the fsync yet: the path says nothing, and the number of
    the inode and the time of birth may be the old ones.
    """
    posix, storage = switched_on(prepared(tmp_path))
    until_the_clock_ticks(tmp_path)
    storage.make_dir("attempts/b/inner")
    run = str(tmp_path / "disk/run")
    for name in ("attempts/b/inner", "attempts/b"):
        posix.rmdir(f"{run}/{name}")
    posix.mkdir(f"{run}/attempts/b")
    storage.make_dir("attempts/b/other")
    posix.cut()
    posix.materialise(str(tmp_path / "after"))
    assert (tmp_path / "after/run/attempts/b/other").is_dir()


def test_a_directory_that_was_moved_is_not_taken_for_durable(tmp_path: Path) -> None:
    """Away, which was synced, and back, which was not: its name is durable after the next sync alone."""
    posix, storage = switched_on(prepared(tmp_path))
    until_the_clock_ticks(tmp_path)
    storage.make_dir("attempts/b/inner")
    until_the_clock_ticks(tmp_path)
    storage.make_dir("attempts/b/second")
    storage.rename("attempts", "aside")
    storage.sync("")
    storage.rename("aside", "attempts")
    storage.make_dir("attempts/b/other")
    posix.cut()
    posix.materialise(str(tmp_path / "after"))
    assert (tmp_path / "after/run/attempts/b/other").is_dir()


@pytest.mark.parametrize("act", [create, replace, data, move])
def test_a_power_cut_at_every_system_call(tmp_path: Path, act: Act) -> None:
    """At every system call: the old or the new, whole; never a torn or an empty file."""
    for number in itertools.count(1):
        place = tmp_path / str(number)
        posix, storage = switched_on(prepared(place), crash_at=number)
        try:
            act(storage)
        except PowerCut:
            done = False
        else:
            done = True
        posix.materialise(str(place / "after"))
        run = place / "after/run"
        assert _bytes(run / "log/0") in (None, b"entry")
        assert _bytes(run / "hint") in (b"older", b"newer")
        assert _bytes(run / "data/f") in (None, b"x" * (2 << 20) + b"y")
        assert b"moved" in (_bytes(run / "attempts/a/f"), _bytes(run / "step_1/f"))
        assert not done or EXPECTED[act](run)
        if done:
            assert number > 5
            return


def test_a_kill_is_not_a_power_cut(tmp_path: Path) -> None:
    """The volatile image is the real directory: what was not synced is still there after a kill."""
    disk = prepared(tmp_path)
    posix, storage = switched_on(disk, deaf_to=lambda _: True)
    create(storage)
    assert (disk / "run/log/0").read_bytes() == b"entry"
    posix.materialise(str(tmp_path / "after"))
    assert not (tmp_path / "after/run/log/0").exists()


def test_the_model_forgets_what_was_not_synced(tmp_path: Path) -> None:
    """Bytes without fsync are gone, names without fsync too; unlinks come back."""
    disk = prepared(tmp_path)
    posix, storage = switched_on(disk)
    directory = str(disk / "run/data")

    def put(name: str, *, sync_file: bool, sync_directory: bool) -> None:
        fd = posix.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT)
        posix.write(fd, b"bytes")
        if sync_file:
            posix.fsync(fd)
        posix.close(fd)
        if sync_directory:
            storage.sync("data")

    put("empty", sync_file=False, sync_directory=True)
    put("whole", sync_file=True, sync_directory=True)
    put("nameless", sync_file=True, sync_directory=False)
    storage.remove("hint")
    posix.materialise(str(tmp_path / "after"))
    run = tmp_path / "after/run"
    assert sorted(os.listdir(run / "data")) == ["empty", "whole"]
    assert (run / "data/empty").read_bytes() == b""
    assert (run / "data/whole").read_bytes() == b"bytes"
    assert (run / "hint").read_bytes() == b"older"


def test_after_the_cut_nothing_works(tmp_path: Path) -> None:
    """No clean-up of ours runs on a machine without power."""
    disk = prepared(tmp_path)
    posix, storage = switched_on(disk)

    def write_and_cut() -> None:
        with storage.open_write("data/f") as writer:
            writer.write(b"x" * (2 << 20))
            posix.cut()
            storage.read("hint")

    with pytest.raises(PowerCut):
        write_and_cut()
    assert posix.is_off
    assert any(name.startswith(".partial-") for name in os.listdir(disk / "run/data"))
    with pytest.raises(PowerCut):
        storage.list("")


def test_fsyncs_are_named_by_what_led_to_them(tmp_path: Path) -> None:
    """Each fsync carries the functions of the storage layer that asked for it."""
    posix, storage = switched_on(prepared(tmp_path))
    create(storage)
    assert [call.site for call in posix.fsyncs] == [
        "create>write_file",
        "create>_sync_directory>sync_dir",
    ]
    assert [call.is_dir for call in posix.fsyncs] == [False, True]


def test_failed_calls_change_nothing_in_the_model(tmp_path: Path) -> None:
    """An operation that the kernel refused leaves the model as it was."""
    posix, storage = switched_on(prepared(tmp_path))
    create(storage)
    with pytest.raises(StorageError):
        create(storage)
    with pytest.raises(StorageError):
        storage.rename("absent", "log/1")
    storage.sync("log")
    posix.materialise(str(tmp_path / "after"))
    assert os.listdir(tmp_path / "after/run/log") == ["0"]
    assert isinstance(posix, Posix)
