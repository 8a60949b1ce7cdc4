"""Stock torch saves into a run of ours: no job goes back to the commit before it without a word."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptfs
from ckptfs.commit.catalog import unlogged
from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.catalog.unlogged import _look, data_paths, newer_unlogged
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.operations import AtOnce, Program, drive
from ckptfs.errors import NotFoundError
from ckptfs.integrations._support.step_driver import StepDriver
from ckptfs.replication.copier import copy_to
from ckptfs.storage.base import Shape
from ckptfs.tools.findings import Damage
from ckptfs.tools.lines import Run, State
from ckptfs.tools.listing import look_at, newest
from ckptfs.tools.verifying import verify

T = TypeVar("T")


def stock(path: Path, value: float, later_s: float = 60.0) -> None:
    """What stock torch saves there, so long after now by the storage's clock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces what is there
        writer = dcp.FileSystemWriter(path, overwrite=True)
        dcp.save({"w": torch.full((4,), value)}, storage_writer=writer, no_dist=True)
    now = path.stat().st_mtime + later_s
    os.utime(path / ".metadata", (now, now))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one commit of ours, step_2."""
    run = tmp_path / "run"
    ckptfs.save({"w": torch.full((4,), 2.0)}, run / "step_2")
    return run


def restored(run: Path, **more: object) -> float:
    """What a manager restores."""
    state = {"w": torch.zeros(4)}
    with ckptfs.CheckpointManager(run) as manager:
        assert manager.restore(state, **more) is not None  # type: ignore[arg-type]
    return float(state["w"][0])


READERS: dict[str, Callable[[Path], object]] = {
    "latest": ckptfs.latest,
    "restore": restored,
    "wait_for_new": lambda run: ckptfs.wait_for_new(run, timeout_s=0),
    "ckptfs latest": lambda run: newest(run, Kind.CHECKPOINT),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_stock_saved_later_is_named(run: Path, reader: str) -> None:
    """Every reader of the newest raises, names all of them and what to do; and writes nothing."""
    stock(run / "step_3", 3.0)
    stock(run / "step_4", 4.0)
    before = sorted(str(path) for path in run.rglob("*"))
    with pytest.raises(
        ckptfs.AmbiguousCheckpointError, match="step_3 and step_4 were saved after step_2"
    ) as caught:
        READERS[reader](run)
    assert 'unlogged="ignore"' in str(caught.value)
    assert caught.value.names == ("step_3", "step_4")
    assert sorted(str(path) for path in run.rglob("*")) == before


def test_a_save_that_is_sealed_while_a_reader_looks_is_known_before_it_speaks(run: Path) -> None:
    """What stock saved is older than that one: the log is folded once more before it is called newer."""
    stock(run / "step_3", 3.0, later_s=0.0)
    with looking_at(run, None) as look:
        shape = look.storage.capabilities.shape
        assert drive(newer_unlogged(look.views, shape), look.storage) == ("step_3",)
        ckptfs.save({"w": torch.full((4,), 4.0)}, run / "step_4")
        assert drive(newer_unlogged(look.views, shape), look.storage) == ()


def test_there_are_ways_out(run: Path) -> None:
    """By its name it is loaded; "ignore" takes our newest; moved away, it disturbs no one."""
    stock(run / "step_3", 3.0)
    state = {"w": torch.zeros(4)}
    ckptfs.load(state, run / "step_3")
    assert float(state["w"][0]) == 3.0
    ckptfs.load(state, run / "step_2")
    assert float(state["w"][0]) == 2.0
    assert restored(run, unlogged="ignore") == 2.0
    assert restored(run, step=2) == 2.0
    found = ckptfs.latest(run, unlogged="ignore")
    assert found is not None
    assert found.uri.name == "step_2"
    assert ckptfs.wait_for_new(run, timeout_s=0, unlogged="ignore").step == 2
    assert ckptfs.latest(run, "weights") is None
    shutil.move(run / "step_3", run.parent / "elsewhere")
    assert restored(run) == 2.0


def test_a_manager_may_be_made_to_ignore_it(run: Path, tmp_path: Path) -> None:
    """For what calls restore or reading in the name of a framework: the option of the manager reaches it."""
    stock(run / "step_3", 3.0)
    state = {"w": torch.zeros(4)}
    with ckptfs.CheckpointManager(run, unlogged="ignore") as manager:
        with pytest.raises(ckptfs.AmbiguousCheckpointError):
            manager.restore(state, unlogged="error")
        assert manager.restore(state) is not None
    assert float(state["w"][0]) == 2.0
    files = tmp_path / "files"
    with ckptfs.DirectoryManager(files) as directories, directories.writing(2) as path:
        Path(path, "weights").write_bytes(b"2")
    stock(files / "step_3", 3.0)
    with (
        ckptfs.DirectoryManager(files) as directories,
        pytest.raises(ckptfs.AmbiguousCheckpointError),
        directories.reading(),
    ):
        pass
    with (
        ckptfs.DirectoryManager(files, unlogged="ignore") as directories,
        directories.reading() as opened,
    ):
        assert opened is not None
        assert opened.step == 2
    folder = tmp_path / "fetched"
    driver = StepDriver(files, unlogged="ignore")
    assert driver.fetch(lambda step: str(folder / str(step))) == 2
    driver.close()
    with pytest.raises(ckptfs.StateError, match="unlogged='never' is not one of the choices"):
        ckptfs.CheckpointManager(run, unlogged="never")  # type: ignore[arg-type]


def test_what_is_older_does_not_disturb(run: Path) -> None:
    """A run that stock began and ckptfs continued is restored from our newest."""
    stock(run / "step_1", 1.0, later_s=-60.0)
    assert restored(run) == 2.0


@pytest.mark.parametrize("half", ["no .metadata", "no data", "garbage", "half a .metadata"])
def test_what_is_not_whole_does_not_count(run: Path, half: str) -> None:
    """A stock save that is under way, or died, or lost its files, is no checkpoint."""
    stock(run / "step_3", 3.0)
    metadata = run / "step_3" / ".metadata"
    if half in ("garbage", "half a .metadata"):
        raw, times = metadata.read_bytes(), metadata.stat()
        metadata.write_bytes(b"garbage" if half == "garbage" else raw[:-9])
        os.utime(metadata, (times.st_mtime, times.st_mtime))
    else:
        for path in (run / "step_3").glob(".metadata" if half == "no .metadata" else "*.distcp"):
            path.unlink()
    assert restored(run) == 2.0
    found = look_at(run)
    assert isinstance(found, Run)
    states = {line.name: line.state for line in found.checkpoints}
    assert states.get("step_3", State.DAMAGED) is State.DAMAGED


def test_copies_with_a_manifest_never_count(run: Path) -> None:
    """A copy of ours next to the log says what it is."""
    shutil.copytree(run / "step_2", run / "best")
    now = (run / "best").stat().st_mtime + 60
    os.utime(run / "best/.metadata", (now, now))
    assert restored(run) == 2.0


def test_what_is_written_into_the_shown_files_reaches_no_save(run: Path) -> None:
    """A program that writes them in place, as cp and some editors do, changes those two and no others: moved away,
    they leave the save as it was.
    """
    for name in (".metadata", "ckptfs.json"):
        (run / "step_2" / name).write_bytes(b"written in place")
    (run / "step_2/.metadata").rename(run / "moved-away")
    state = {"w": torch.zeros(4)}
    ckptfs.load(state, run / "step_2")
    assert torch.equal(state["w"], torch.full((4,), 2.0))


def test_stock_over_our_newest_is_named(run: Path) -> None:
    """A job that takes the newest learns that another .metadata is in its place."""
    stock(run / "step_2", 3.0)
    with pytest.raises(ckptfs.StateError, match="step_2 was overwritten by another program"):
        restored(run)
    with pytest.raises(ckptfs.StateError, match="step_2 was overwritten by another program"):
        ckptfs.load({"w": torch.zeros(4)}, run / "step_2")


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_a_metadata_of_the_size_of_ours_is_not_taken_for_it(
    run: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is too large to be read each time: it was written later than our manifest."""
    if is_large:
        monkeypatch.setattr(unlogged, "_READ_BYTES", 16)
    size = (run / "step_2/.metadata").stat().st_size
    assert ckptfs.latest(run) is not None
    stock(run / "step_2", 3.0)
    shown = run / "step_2/.metadata"
    data = shown.read_bytes()
    assert len(data) < size
    shown.write_bytes(data + bytes(size - len(data)))  # a pickle ends where it says
    with pytest.raises(ckptfs.AmbiguousCheckpointError, match="step_2 was overwritten") as caught:
        ckptfs.latest(run)
    assert caught.value.names == ("step_2",)
    with pytest.raises(ckptfs.AmbiguousCheckpointError, match="step_2 was overwritten"):
        ckptfs.load({"w": torch.zeros(4)}, run / "step_2")


def test_the_data_files_of_a_metadata_are_found_without_unpickling_it(tmp_path: Path) -> None:
    """Of stock's and of ours; and none of what is no pickle."""
    stock(tmp_path / "stock", 1.0)
    assert set(data_paths((tmp_path / "stock/.metadata").read_bytes())) == {"__0_0.distcp"}
    assert list(data_paths(b"no pickle at all")) == []


def test_a_step_that_stock_saved_over_is_not_restored_by_its_number(run: Path) -> None:
    """restore(step=) names the other program's; "ignore" takes ours; other steps do not mind."""
    ckptfs.save({"w": torch.full((4,), 1.0)}, run / "step_4")
    stock(run / "step_2", 3.0)
    with pytest.raises(ckptfs.AmbiguousCheckpointError, match="step_2 was overwritten") as caught:
        restored(run, step=2)
    assert caught.value.names == ("step_2",)
    assert restored(run, step=2, unlogged="ignore") == 2.0
    assert restored(run, step=4) == 1.0
    assert restored(run) == 1.0


def test_a_step_that_only_stock_saved_is_named(run: Path) -> None:
    """It is there and not in the log: not "no such step"; half of one is none. Older ones count too."""
    stock(run / "step_3", 3.0, later_s=-60.0)
    with pytest.raises(ckptfs.AmbiguousCheckpointError, match="another program wrote step_3"):
        restored(run, step=3)
    for path in (run / "step_3").glob("*.distcp"):
        path.unlink()
    with pytest.raises(
        ckptfs.StateError, match="this run has checkpoints that no log lists: step_3"
    ):
        restored(run, step=3)


def test_a_directory_manager_does_not_pass_over_what_stock_saved(tmp_path: Path) -> None:
    """reading() and latest(kind="directory") as for checkpoints of tensors."""
    run = tmp_path / "run"
    with ckptfs.DirectoryManager(run) as manager:
        with manager.writing(2) as path:
            (Path(path or "") / "file").write_text("ours")
        stock(run / "step_3", 3.0)
        with (
            pytest.raises(ckptfs.AmbiguousCheckpointError, match="step_3 was saved after step_2"),
            manager.reading(),
        ):
            raise AssertionError("an older one was read")
        with manager.reading(unlogged="ignore") as opened:
            assert opened is not None
            assert (Path(opened.path) / "file").read_text() == "ours"
        with manager.reading(2) as opened:
            assert opened is not None
    with pytest.raises(ckptfs.AmbiguousCheckpointError):
        ckptfs.latest(run, "directory")


def test_a_part_that_stock_saved_over_is_named(tmp_path: Path) -> None:
    """A job that loads the part, or takes the newest; the other part loads."""
    run = tmp_path / "run"
    with ckptfs.CheckpointManager(run) as manager:
        ticket = manager.begin(2, parts=["actor", "critic"])
        sealed = [
            ckptfs.save({"w": torch.full((4,), 2.0)}, ticket.part(part))
            for part in ("actor", "critic")
        ]
        ticket.commit(sealed)
    assert ckptfs.latest(run) is not None
    stock(run / "step_2/actor", 3.0)
    state = {"w": torch.zeros(4)}
    ckptfs.load(state, run / "step_2/critic")
    for refused in (
        lambda: ckptfs.load(state, run / "step_2/actor"),
        lambda: ckptfs.latest(run),
        lambda: restored(run, part="actor"),
    ):
        with pytest.raises(ckptfs.AmbiguousCheckpointError, match="was overwritten"):
            refused()


def test_a_copy_of_the_latest_does_not_pass_over_what_stock_saved(
    run: Path, tmp_path: Path
) -> None:
    """cp --latest says so; by its name either is copied."""
    stock(run / "step_3", 3.0)
    with pytest.raises(ckptfs.AmbiguousCheckpointError, match="step_3 was saved after") as e:
        copy_to(run, tmp_path / "there", latest=True)
    assert "by its name" in str(e.value)
    assert not (tmp_path / "there").exists()
    copy_to(run / "step_3", tmp_path / "there/step_3")
    copy_to(run, tmp_path / "all")
    assert len(ckptfs.list_checkpoints(tmp_path / "all")) == 2


def test_ls_knows_what_stock_saved_for_what_it_is(run: Path) -> None:
    """Foreign, and whole apart from not whole; and that the newest commit was saved over."""
    stock(run / "step_3", 3.0)
    stock(run / "step_4", 4.0)
    for path in (run / "step_4").glob("*.distcp"):
        path.unlink()
    stock(run / "step_2", 5.0)
    listed = look_at(run)
    assert isinstance(listed, Run)
    lines = {line.name: line for line in listed.checkpoints}
    assert lines["step_3"].state is State.FOREIGN
    assert lines["step_4"].state is State.DAMAGED
    assert "it is incomplete" in lines["step_4"].note
    assert "__0_0.distcp is missing" in lines["step_4"].note
    assert lines["step_2"].state is State.COMMITTED
    assert "another program overwrote its .metadata" in lines["step_2"].note


def test_verify_knows_what_stock_saved_for_what_it_is(run: Path) -> None:
    """What is whole is kept apart from what is not; what it saved over is never to be written over."""
    stock(run / "step_3", 3.0)
    stock(run / "step_4", 4.0)
    for path in (run / "step_4").glob("*.distcp"):
        path.unlink()
    stock(run / "step_2", 5.0)
    found = {one.name: one for one in verify([run]).checkpoints}
    assert found["step_3"].findings == ()
    assert any("another program" in note for note in found["step_3"].notes)
    assert {f.damage for f in found["step_4"].findings} == {Damage.MISSING}
    (over,) = found["step_2"].findings
    assert over.damage is Damage.PROJECTION
    assert "another program overwrote it" in over.what
    assert "copy" not in over.todo


def counting(program: Program[T], seen: Counter[str]) -> Program[T]:
    """The same program; ``seen`` counts its operations, those that are done at once as many as they are."""
    try:
        op = program.send(None)
        while True:
            seen.update(type(one).__name__ for one in (op.ops if isinstance(op, AtOnce) else [op]))
            try:
                got = yield op
            except NotFoundError as error:
                op = program.throw(error)
            else:
                op = program.send(got)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [1, 5])
def test_the_look_costs_what_the_page_on_scale_says(tmp_path: Path, steps: int) -> None:
    """On a filesystem three stats, a listing and a read, however many checkpoints the log knows; a later
    one of stock torch a stat, two reads and a listing more.
    """
    run = tmp_path / "run"
    for step in range(steps):
        ckptfs.save({"w": torch.ones(4)}, run / f"step_{step}")
    with looking_at(run, {}) as look:
        seen: Counter[str] = Counter()
        assert (
            drive(counting(newer_unlogged(look.views, Shape.FILESYSTEM), seen), look.storage) == ()
        )
        assert seen == {"StatOf": 3, "List": 1, "Refresh": 1, "Read": 1}
        stock(run / "step_9", 9.0)
        more: Counter[str] = Counter()
        keys = counting(_look(look.views, Shape.FILESYSTEM), more)
        assert drive(keys, look.storage) == ("step_9",)
        assert more - seen == {"StatOf": 1, "List": 1, "Refresh": 1, "Read": 2}
