"""Disks that are really full, really out of inodes, really read-only; and mkdir as BeeGFS answers it.

The mounts are the kernel's own, in a mount namespace of the rank's process: as root only.
"""

from __future__ import annotations

import errno
import os
import pathlib
import pickle
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.testing.world import simulate
from ckptfs.topology.ensure_dir import ensure_dir
from ckptfs.uri import Uri
from tests.multiprocess.harness import Rank, launch, mount_privately

MIB = 1 << 20


def _may_mount() -> bool:
    return (
        os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], check=False).returncode
    )


needs_root = pytest.mark.skipif(not _may_mount(), reason="mounts need root and mount namespaces")


def told(call: Callable[[], object]) -> dict[str, Any]:
    """How a call failed, all failures of its ranks included."""
    try:
        call()
    except ckptfs.CkptfsError as error:
        failures = getattr(error, "failures", {})
        kinds = [f.type.rsplit(".", 1)[-1] for f in failures.values()] or [type(error).__name__]
        return {"kinds": kinds, "text": str(error), "outcome": error.outcome}
    return {}


def left_behind(run: str) -> list[str]:
    """Whatever of a failed save is still there."""
    found = os.listdir(f"{run}/.ckptfs/attempts")
    partial = [n for _, _, names in os.walk(run) for n in names if n.startswith(".partial")]
    return [*found, *partial]


def loaded(run: str, name: str, numbers: int) -> float:
    """The sum of what a checkpoint holds: a number that a mix would not have."""
    import torch

    state = {"w": torch.zeros(numbers)}
    ckptfs.load(state, f"{run}/{name}")
    return float(state["w"].sum())


def on_a_small_disk(rank: Rank) -> dict[str, Any]:
    """A tmpfs of 4 MiB: too small for the second state, then for a single log entry."""
    import torch

    mount_privately()
    place = str(rank.args["place"])
    _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
    run = f"{place}/run"
    small = {"w": torch.ones(1000)}
    ckptfs.save(small, f"{run}/step_1")
    seen: dict[str, Any] = {}
    seen["data"] = told(lambda: ckptfs.save({"w": torch.ones(2 * MIB)}, f"{run}/step_2"))
    seen["left"] = left_behind(run)
    big = {"w": torch.ones(2 * MIB)}
    seen["asked"] = told(lambda: ckptfs.save(big, f"{run}/step_2", require_space=True))
    _fill(f"{place}/filler")
    seen["log"] = told(lambda: ckptfs.save(small, f"{run}/step_2"))
    seen["claim"] = told(lambda: ckptfs.prepare_run(run))
    seen["object"] = told(lambda: ckptfs.save_object({"a": 1}, f"{run}/step_1/data.pt"))
    seen["read while full"] = loaded(run, "step_1", 1000)
    os.unlink(f"{place}/filler")
    ckptfs.save(small, f"{run}/step_2")
    with ckptfs.prepare_run(run) as held:
        ckptfs.save(small, f"{run}/step_3", run=held)
    seen["names"] = sorted(str(c.uri).rsplit("/", 1)[1] for c in ckptfs.list_checkpoints(run))
    seen["left at last"] = left_behind(run)
    return seen


def small_disks_of_some(rank: Rank) -> list[Any]:
    """A disk for each rank, a node each; those of ranks 1 and 3 are too small for the second state."""
    import torch

    mount_privately()
    os.environ["CKPTFS_NODE"] = f"n{rank.number}"
    place = str(rank.args["place"])
    size = "4m" if rank.number in {1, 3} else "64m"
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
    rank.init_group()
    run = f"{place}/run"
    ckptfs.save({"own": torch.ones(1000)}, f"{run}/step_1", per_rank=["own"])
    try:
        ckptfs.save({"own": torch.ones(2 * MIB)}, f"{run}/step_2", per_rank=["own"])
    except ckptfs.NoSpaceError as error:
        met = pickle.loads(pickle.dumps(error))
    told = [str(met), met.outcome, met.errno, isinstance(met, ckptfs.CollectiveError)]
    told.append(sorted(met.failures))
    ckptfs.save({"own": torch.ones(1000)}, f"{run}/step_2", per_rank=["own"])
    return told


def without_inodes(rank: Rank) -> dict[str, Any]:
    """A tmpfs with room for bytes and none for names."""
    import torch

    mount_privately()
    place = str(rank.args["place"])
    _mount("-t", "tmpfs", "-o", "size=8m,nr_inodes=64", "tmpfs", place)
    run = f"{place}/run"
    state = {"w": torch.ones(1000)}
    ckptfs.save(state, f"{run}/step_1")
    fillers: list[str] = []
    try:
        while True:
            fillers.append(f"{place}/filler-{len(fillers)}")
            Path(fillers[-1]).touch()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        fillers.pop()
    seen: dict[str, Any] = {"save": told(lambda: ckptfs.save(state, f"{run}/step_2"))}
    seen["read"] = loaded(run, "step_1", 1000)
    for name in fillers:
        os.unlink(name)
    ckptfs.save(state, f"{run}/step_2")
    seen["left"] = left_behind(run)
    return seen


def on_a_read_only_mount(rank: Rank) -> dict[str, Any]:
    """The same run twice: as it is, and bound read-only to another place."""
    import torch

    mount_privately()
    run, place = f"{rank.args['base']}/run", str(rank.args["place"])
    state = {"w": torch.ones(1000)}
    with ckptfs.prepare_run(run) as held:
        ckptfs.save(state, f"{run}/step_1", run=held)
    ckptfs.save_object({"a": 1}, f"{run}/data.pt")
    _mount("--bind", run, place)
    _mount("-o", "remount,bind,ro", place)
    latest = ckptfs.latest(place)
    return {
        "latest": latest and latest.step,
        "loaded": loaded(place, "step_1", 1000),
        "object": ckptfs.load_object(f"{place}/data.pt"),
        "save": told(lambda: ckptfs.save(state, f"{place}/step_2")),
        "replace": told(lambda: ckptfs.save(state, f"{place}/step_1", if_exists="replace")),
        "claim": told(lambda: ckptfs.prepare_run(place)),
        "ensure": told(lambda: ckptfs.ensure_dir(f"{place}/new")),
        "write": told(lambda: ckptfs.save_object({}, f"{place}/other.pt")),
        "after": loaded(run, "step_1", 1000),
    }


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _fill(path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _alone(body: Callable[[Rank], object], tmp_path: Path) -> dict[str, Any]:
    place = tmp_path / "place"
    place.mkdir()
    args = {"place": str(place), "base": str(tmp_path)}
    with launch(body, 1, args=args, store="none") as ranks:
        (value,) = ranks.values()
    seen: dict[str, Any] = value
    return seen


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a path that leaves room in a text of 400 characters; pytest's do not in a deep TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="ckptfs-") as path:
        yield Path(path)


@needs_root
def test_a_full_disk_is_named_and_loses_nothing(short_path: Path) -> None:
    """NoSpaceError from data, from the log's own entry, from a claim and from an object; what was
    committed loads all the while, and once there is room everything continues.
    """
    seen = _alone(on_a_small_disk, short_path)
    for what in ("data", "log", "claim", "object", "asked"):
        assert seen[what]["kinds"] == ["NoSpaceError"], (what, seen[what])
        assert seen[what]["outcome"] == "failed"
        assert "place/run" in seen[what]["text"], (what, seen[what])
    assert seen["left"] == []
    assert seen["read while full"] == 1000.0
    assert seen["names"] == ["step_1", "step_2", "step_3"]
    assert seen["left at last"] == []


@needs_root
def test_disks_that_are_full_on_some_ranks_are_one_error_that_is_both(short_path: Path) -> None:
    """``except NoSpaceError`` catches it on every rank, those with room too. Its text is short: the
    checkpoint, the ranks, the hosts by their names, the file once, how much is missing.
    """
    place = short_path / "place"
    place.mkdir()
    with launch(small_disks_of_some, 4, args={"place": str(place)}) as ranks:
        seen = ranks.values()
    assert all(one == seen[0] for one in seen)
    text, *told = seen[0]
    assert told == ["failed", errno.ENOSPC, True, [1, 3]]
    assert len(text) <= 400
    host = socket.gethostname()
    assert f"ranks 1, 3 on n1/{host}, n3/{host}: NoSpaceError: " in text
    assert re.search(r": 4\.\d\d MB missing \(8\.39 MB to write, 4\.\d\d MB were free\)", text)
    assert text.count(".distcp") == text.count("__1_0.distcp") == 1
    assert f"[uri file://{place}/run/step_2]" in text
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert "mnt:[" not in text
    assert boot not in text


@needs_root
def test_no_inodes_left_is_no_space_left(tmp_path: Path) -> None:
    """Bytes are free, names are not: the same typed error, and nothing stays behind."""
    seen = _alone(without_inodes, tmp_path)
    assert seen["save"]["kinds"] == ["NoSpaceError"]
    assert seen["read"] == 1000.0
    assert seen["left"] == []


@needs_root
def test_a_read_only_mount_can_be_read_and_says_that_it_cannot_be_written(tmp_path: Path) -> None:
    """list, latest, load and load_object work there; everything else is AccessError with the URI."""
    seen = _alone(on_a_read_only_mount, tmp_path)
    assert seen["latest"] == 1
    assert seen["loaded"] == seen["after"] == 1000.0
    assert seen["object"] == {"a": 1}
    for what in ("save", "replace", "claim", "ensure", "write"):
        assert seen[what]["kinds"] == ["AccessError"], (what, seen[what])
        assert "place" in seen[what]["text"], (what, seen[what])
        assert "read-only" in seen[what]["text"], (what, seen[what])


# -- row 8: mkdir of an existing directory, and a stale look at it ---------------------------------


class Beegfs(Posix):
    """mkdir of what is there raises, and a look says for a while that it is not there."""

    def __init__(self) -> None:
        self.refused = 0
        self._lock = threading.Lock()

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        try:
            super().mkdir(path, mode)
        except FileExistsError:
            with self._lock:
                self.refused += 1
            raise

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        if not path.endswith("step_1") or threading.current_thread().name == "rank-0":
            return super().stat(path, dir_fd=dir_fd, follow=follow)
        # The first look after somebody's mkdir is answered from a cache.
        if not getattr(self, f"_looked_{threading.get_ident()}", False):
            setattr(self, f"_looked_{threading.get_ident()}", True)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return super().stat(path, dir_fd=dir_fd, follow=follow)


def test_row8_stock_mkdir_fails_where_a_look_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: mkdir(exist_ok=True), as every rank of stock DCP calls it, asks is_dir() when the
    name is there, believes the answer, and raises FileExistsError.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem

    step = tmp_path / "step_1"
    step.mkdir()
    FileSystem().mkdir(step)
    monkeypatch.setattr(pathlib.Path, "is_dir", lambda *_, **__: False)
    with pytest.raises(FileExistsError):
        FileSystem().mkdir(step)


def test_row8_eexist_is_success_and_nobody_is_asked_again(tmp_path: Path) -> None:
    """Eight ranks on four nodes make one directory; each node's mkdir but one finds it there."""
    posix = Beegfs()

    def make(control: Control) -> None:
        storage = LocalStorage(Uri.parse(tmp_path / "run"), posix=posix)
        session = start_session(control, storage, Place(), write=True)
        ensure_dir(control, session.storage, session.placement, "step_1")
        with storage.open_write(f"step_1/{control.rank}") as writer:
            writer.write(b"x")

    ends = simulate(8, make, nodes=["a", "a", "b", "b", "c", "c", "d", "d"])
    assert [end.error for end in ends] == [None] * 8
    assert posix.refused
    assert len(os.listdir(tmp_path / "run/step_1")) == 8
