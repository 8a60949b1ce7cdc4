"""What writes, moves or deletes goes through no link below the root, also where it is put there late."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptfs.errors import StorageError, SymlinkError
from ckptfs.storage.local import LocalStorage, posix
from ckptfs.storage.local.directories import held_open
from ckptfs.storage.local.posix import beneath, held_fd, parent_of, without_mark
from ckptfs.storage.local.writers import resumable_name
from ckptfs.uri import Uri

Change = Callable[[LocalStorage], object]


def _written(storage: LocalStorage) -> None:
    with storage.open_write("a/b/f") as writer:
        writer.write(b"new")


def _windows(storage: LocalStorage) -> None:
    with storage.open_parallel("a/b/f", size_bytes=3) as writer:  # type: ignore[union-attr]
        writer.write_at(0, [memoryview(b"new")])


def _kept(storage: LocalStorage) -> None:
    with storage.open_kept("a/b/f", size_bytes=3) as writer:
        writer.write(b"new")


CHANGES: dict[str, Change] = {
    "create": lambda s: s.create("a/b/new", b"new", staging="staging"),
    "create through staging": lambda s: s.create("new", b"new", staging="a/b/staging"),
    "replace": lambda s: s.replace("a/b/f", b"new"),
    "write_files": lambda s: s.write_files("a/b", {"f": b"new", "g": b"new"}),
    "open_write": _written,
    "open_parallel": _windows,
    "open_kept": _kept,
    "make_dir": lambda s: s.make_dir("a/b/c/d"),
    "make_dir of it": lambda s: s.make_dir("a/b"),
    "rename from": lambda s: s.rename("a/b/f", "here"),
    "rename to": lambda s: s.rename("x", "a/b/f"),
    "link from": lambda s: s.link("a/b/f", "here"),
    "link to": lambda s: s.link("x", "a/b/g"),
    "remove": lambda s: s.remove("a/b/f"),
    "remove_many": lambda s: s.remove_many(["a/b/f", "a/b/sub/f"]),
    "remove_dir": lambda s: s.remove_dir("a/b/empty"),
    "remove_tree": lambda s: s.remove_tree("a/b/sub"),
    "sync": lambda s: s.sync("a/b/sub"),
    "sync of it": lambda s: s.sync("a/b"),
    "touch": lambda s: s.touch("a/b/f"),
}


def _place(top: Path) -> None:
    (top / "sub").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "f").write_text("old")
    (top / "sub/f").write_text("old")


def _picture(top: Path) -> list[tuple[str, bytes | None, int]]:
    return [
        (str(p.relative_to(top)), p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns)
        for p in sorted(top.rglob("*"))
    ]


@pytest.fixture(params=["openat2", "walk"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With openat2 and as on a kernel without it."""
    if request.param == "openat2" and not posix._HAS_OPENAT2:
        pytest.skip("this kernel has no openat2")
    if request.param == "walk":
        monkeypatch.setattr(posix, "_HAS_OPENAT2", False)
    return str(request.param)


@pytest.fixture
def storage(tmp_path: Path, way: str) -> LocalStorage:
    """A root that is reached through a link, with a file, and a directory ``a/b``."""
    _place(tmp_path / "root/a/b")
    (tmp_path / "root/x").write_text("x")
    _place(tmp_path / "victim")
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    storage = LocalStorage(Uri.parse(tmp_path / "alias"))
    storage.probe("")
    storage.replace("probed", b"")
    return storage


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("at", ["a", "a/b"])
def test_nothing_is_changed_behind_a_link(
    storage: LocalStorage, tmp_path: Path, change: Change, at: str
) -> None:
    """Each operation that changes something is SymlinkError with the link's path, wherever on the way it
    is, and works where none does.
    """
    shutil.copytree(tmp_path / "root", tmp_path / "saved")
    change(storage)
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "saved").rename(tmp_path / "root")
    target = tmp_path / "victim" if at == "a/b" else tmp_path / "holds"
    if at == "a":
        (tmp_path / "holds").mkdir()
        (tmp_path / "victim").rename(tmp_path / "holds/b")
    shutil.rmtree(tmp_path / "root" / at)
    (tmp_path / "root" / at).symlink_to(target)
    before = _picture(target)
    with pytest.raises(SymlinkError, match=f"{at} is a symbolic link"):
        change(storage)
    assert _picture(target) == before
    assert sorted(os.listdir(tmp_path / "root")) == ["a", "probed", "x"]


_CALLS = frozenset(
    {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.utime"}
)


class Racer:
    """A process that races: swaps the directory for a link just before the ``nth`` system call on a name.

    Python reports each call to an audit hook, which stays for as long as its process lives.
    """

    def __init__(self) -> None:
        self.left = 0
        self.swap: Callable[[], None] = lambda: None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        if self.left > 0 and event in _CALLS:
            self.left -= 1
            if self.left == 0:
                self.swap()


def race(top: Path, way: str) -> int:
    """Every change, raced at each of its system calls; how many races that were. In a process of its own."""
    posix._HAS_OPENAT2 = way == "openat2"
    racer, races = Racer(), 0
    for change in CHANGES.values():
        for nth in range(1, 100):
            here = top / f"race-{races}"
            _place(here / "root/a/b")
            (here / "root/x").write_text("x")
            _place(here / "victim")
            storage = LocalStorage(Uri.parse(here / "root"))
            storage.replace("probed", b"")
            place, victim = here / "root/a/b", here / "victim"
            before = _picture(victim)

            def swap(here: Path = here, place: Path = place, victim: Path = victim) -> None:
                place.rename(here / "aside")
                place.symlink_to(victim)

            racer.swap, racer.left = swap, nth
            with contextlib.suppress(StorageError):
                change(storage)
            over, racer.left = racer.left > 0, 0
            assert _picture(victim) == before, f"before system call {nth}"
            races += 1
            if over:
                break
        else:
            raise AssertionError("it never ran to its end")
    return races


def test_a_link_that_is_put_there_between_two_calls_is_not_followed_either(
    tmp_path: Path, way: str
) -> None:
    """Whatever was looked at before: just before each system call in turn the directory is exchanged for
    a link, and what that leads to stays as it is.
    """
    code = (
        f"from tests.storage.test_beneath import *; print(race(Path({str(tmp_path)!r}), {way!r}))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > (80 if way == "openat2" else 150)


def test_what_only_reads_goes_through_a_link_but_not_in_the_control_directory(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """A step that was moved and linked back is read; a log that is a link is another run's."""
    for key in ("step", ".ckptfs"):
        (tmp_path / "root" / key).symlink_to(tmp_path / "victim")
    assert storage.read("step/f") == b"old"
    assert {e.name for e in storage.list("step")} == {"empty", "f", "sub"}
    storage.refresh("step")
    with storage.open_read("step/sub/f") as reader:
        assert reader.size_bytes == 3
    looks: list[Change] = [
        lambda s: s.read(".ckptfs/f"),
        lambda s: s.list(".ckptfs"),
        lambda s: s.list(".ckptfs/sub"),
        lambda s: s.stat(".ckptfs/f"),
        lambda s: s.open_read(".ckptfs/f"),
        lambda s: s.refresh(".ckptfs/sub"),
    ]
    for look in looks:
        with pytest.raises(SymlinkError, match=r"\.ckptfs is a symbolic link"):
            look(storage)


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """A new file under the name of a link takes its place, one that others may continue is refused."""
    target = tmp_path / "victim/f"
    for name in ("f", os.path.basename(resumable_name("/g"))):
        path = tmp_path / "root/a/b" / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    storage.replace("a/b/f", b"new")
    assert not (tmp_path / "root/a/b/f").is_symlink()
    with pytest.raises(SymlinkError):
        storage.open_kept("a/b/g", size_bytes=3)
    assert target.read_text() == "old"


def test_a_look_at_one_name_refuses_a_link(storage: LocalStorage, tmp_path: Path) -> None:
    """Also one that leads nowhere; a directory, a file and nothing are fine."""
    (tmp_path / "root/dead").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root/step").symlink_to(tmp_path / "victim")
    for key in ("a", "x", "nothing", "nothing/below", "x/below"):
        storage.refuse_link(key)
    for key in ("dead", "step", "step/f"):
        with pytest.raises(SymlinkError, match="is a symbolic link"):
            storage.refuse_link(key)


def test_a_stale_directory_is_looked_up_again(tmp_path: Path) -> None:
    """ESTALE from an NFS server: the whole way is opened once more, as the kernel does for a path; a
    second one is the answer.
    """
    path = beneath(str(tmp_path), "a/b/f")
    os.makedirs(tmp_path / "a/b")
    seen: list[int | None] = []

    def stale_until(tries: int) -> Callable[[str, int | None], str]:
        def call(name: str, fd: int | None) -> str:
            seen.append(fd)
            if len(seen) < tries:
                raise OSError(errno.ESTALE, "stale")
            return name

        return call

    assert posix._with_parent(path, stale_until(2)) == "f"
    seen.clear()
    with pytest.raises(OSError, match="stale"):
        posix._with_parent(path, stale_until(3))
    assert len(seen) == 2


def test_a_directory_that_is_held_and_stale_is_looked_up_again(tmp_path: Path) -> None:
    """By its path, by this call and by all later ones of the block; what was held is not synced any more."""
    kernel, path = posix.Posix(), beneath(str(tmp_path), "a/f")
    (tmp_path / "a").mkdir()
    seen: list[int | None] = []

    def stale_once(name: str, fd: int | None) -> str:
        seen.append(fd)
        if len(seen) == 1:
            raise OSError(errno.ESTALE, "stale")
        return name

    with held_open(kernel, parent_of(path)):
        held = held_fd(parent_of(path))
        assert held is not None
        assert posix._with_parent(path, stale_once) == "f"
        assert held_fd(parent_of(path)) is None
        posix._with_parent(path, stale_once)
    assert seen[0] == held
    assert held not in seen[1:]


def test_no_name_is_made_in_a_directory_that_was_removed_and_made_again(tmp_path: Path) -> None:
    """The held one is dead: the kernel refuses the name, so no fsync there reports a success. After the block the
    path leads to the new one.
    """
    kernel, path = posix.Posix(), beneath(str(tmp_path), "a/f")
    (tmp_path / "a").mkdir()
    for hold in (held_open(kernel, parent_of(path)), posix.hold_directory(parent_of(path))):
        with hold:
            (tmp_path / "a").rmdir()
            (tmp_path / "a").mkdir()
            with pytest.raises(FileNotFoundError):
                kernel.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with pytest.raises(FileNotFoundError):
                kernel.mkdir(path)
        kernel.mkdir(path)
        (tmp_path / "a/f").rmdir()


def test_only_the_thread_that_opened_a_directory_holds_it(tmp_path: Path) -> None:
    """Another thread may be in a later step, where the path may lead to another directory."""
    (tmp_path / "a").mkdir()
    path = beneath(str(tmp_path), "a")
    with held_open(posix.Posix(), path), ThreadPoolExecutor(1) as pool:
        assert held_fd(path) is not None
        assert pool.submit(held_fd, path).result() is None
    assert held_fd(path) is None


def test_no_child_process_inherits_a_descriptor(tmp_path: Path) -> None:
    """Whatever flags the caller gives, as with os.open: or a child would keep files of the run open."""
    (tmp_path / "run").mkdir()
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDONLY):
        fd = posix.Posix().open(posix.beneath(str(tmp_path / "run"), "f"), flags)
        try:
            assert not os.get_inheritable(fd)
        finally:
            os.close(fd)


def test_a_marked_path_is_the_path_of_the_same_file(tmp_path: Path) -> None:
    """For the kernel the mark is nothing, for people it is left out, and upwards it ends at the root."""
    path = beneath(str(tmp_path), "a/b")
    os.makedirs(path)
    assert without_mark(path) == str(tmp_path / "a/b")
    assert parent_of(path) == beneath(str(tmp_path), "a")
    assert parent_of(parent_of(path)) == str(tmp_path)
    assert parent_of(beneath("/", "a")) == "/"
    assert os.path.samefile(path, tmp_path / "a/b")
