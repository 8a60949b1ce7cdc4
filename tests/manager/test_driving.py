"""Directories as parts of one checkpoint: a driver that decides, groups that write files."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import ckptfs
from ckptfs.commit.ownership.lease import who_am_i
from ckptfs.commit.parts.directory_parts import sealed_parts
from ckptfs.commit.parts.tickets import SealedPart, Ticket
from ckptfs.commit.session import Place
from ckptfs.control.world import World
from ckptfs.errors import CollectiveError, Failure, NotFoundError
from ckptfs.integrations._support import step_driver
from ckptfs.integrations._support.step_driver import PartSaver, StepDriver, reading_part


@pytest.fixture(params=["file", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run on a filesystem, and one where files are under their final names before the commit."""
    return str(tmp_path / "run") if request.param == "file" else f"memory://{uuid.uuid4().hex}/run"


def _write(text: str, *, fails: bool = False) -> Callable[[str], None]:
    def write(path: str) -> None:
        os.makedirs(f"{path}/hf")
        Path(path, "weights.pt").write_text(text)
        Path(path, "hf/config.json").write_text("{}")
        if fails:
            raise OSError(28, "no space left")

    return write


def _read(uri: str, part: str, name: str = "weights.pt") -> str:
    with reading_part(f"{uri}/{part}", Place()) as (path, _):
        assert path is not None
        return Path(path, name).read_text()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_of_two_groups_and_a_driver(uri: str, is_async: bool) -> None:
    """Parts and the driver's files are visible together or not at all; old steps go whole."""
    mode: Literal["sync", "async"] = "async" if is_async else "sync"
    actor, critic = PartSaver(is_async=is_async), PartSaver(is_async=is_async)
    with StepDriver(uri, name="step_{N}", keep_latest=1, mode=mode) as driver:
        for step in (1, 2):
            with driver.saving(step, ["actor", "critic"]) as saving:
                actor.save(saving.part("actor"), _write(f"a{step}"))
                assert driver.steps == ([step - 1] if step > 1 else [])
                critic.save(saving.part("critic"), _write(f"c{step}"))
                Path(saving.path, "data.pt").write_text(f"d{step}")
            actor.wait()
            critic.wait()
            driver.wait()
        assert driver.steps == [2]
        assert (_read(uri, "step_2/actor"), _read(uri, "step_2/critic")) == ("a2", "c2")
        with pytest.raises(ckptfs.NotFoundError):
            _read(uri, "step_1/actor")
    if "://" not in uri:
        assert [p.name for p in Path(uri).glob("step_*")] == ["step_2"]


def test_a_driver_fetches_its_own_files(uri: str, tmp_path: Path) -> None:
    """What the driver put with the parts comes back to it alone, on another machine too."""
    saver = PartSaver(is_async=False)
    with StepDriver(uri, name="step_{N}") as driver:
        assert driver.fetch(lambda step: str(tmp_path / f"got{step}")) is None
        with driver.saving(3, ["actor"]) as saving:
            saver.save(saving.part("actor"), _write("a3"))
            os.mkdir(f"{saving.path}/queue")
            Path(saving.path, "queue/state").write_text("q3")
    with StepDriver(uri, name="step_{N}") as driver:
        assert driver.fetch(lambda step: str(tmp_path / f"got{step}")) == 3
    found = sorted(str(p.relative_to(tmp_path / "got3")) for p in (tmp_path / "got3").rglob("*"))
    assert found == ["queue", "queue/state"]


def test_a_part_that_fails_or_is_missing_leaves_the_step_before(uri: str) -> None:
    """Nothing of such a step is ever visible, and it can be saved again."""
    saver = PartSaver(is_async=False)
    with StepDriver(uri, name="step_{N}", seen_s=0.1) as driver:
        for step, fails in ((1, False), (2, True), (2, False)):
            try:
                with driver.saving(step, ["actor"]) as saving:
                    saver.save(saving.part("actor"), _write(f"a{step}", fails=fails))
            except OSError:
                assert fails
                assert driver.steps == [1]
                with pytest.raises(ckptfs.NotFoundError):
                    _read(uri, "step_2/actor")
        with pytest.raises(ckptfs.IncompleteCheckpointError, match="part critic"):
            _without_critic(driver, saver)
        assert driver.steps == [1, 2]
        assert _read(uri, "step_2/actor") == "a2"
        if "://" not in uri:
            assert os.listdir(f"{uri}/.ckptfs/attempts") == []  # all that was given up is gone
        with pytest.raises(ckptfs.CommitConflictError), driver.saving(2, ["actor"]):
            pass


def test_a_driver_without_room_abandons_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no place for the driver's own files, nothing of the begun step stays."""
    run = tmp_path / "run"
    with StepDriver(str(run), name="step_{N}") as driver:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
        with pytest.raises(FileNotFoundError), driver.saving(1, ["actor"]):
            pass
        assert os.listdir(run / ".ckptfs/attempts") == []


def test_a_part_that_is_seen_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronous step looks again for an entry that another client wrote a moment ago."""
    looks: list[int] = []

    def late(ticket: Ticket) -> list[SealedPart]:
        looks.append(1)
        return sealed_parts(ticket) if len(looks) > 1 else []

    monkeypatch.setattr("ckptfs.commit.parts.directory_parts.sealed_parts", late)
    with StepDriver(str(tmp_path / "run"), name="step_{N}") as driver:
        with driver.saving(1, ["actor"]) as saving:
            PartSaver(is_async=False).save(saving.part("actor"), _write("a1"))
        assert driver.steps == [1]
    assert len(looks) == 2


def test_scratch_of_a_killed_rank_is_swept(tmp_path: Path) -> None:
    """What a SIGKILL left of an asynchronous save, the next one removes, and its own too."""
    dead, scratch = tmp_path / "scratch/ckptfs-part-dead", tmp_path / "scratch"
    (dead / "files").mkdir(parents=True)
    (dead / "users").mkdir()
    (dead / "users/0.999999999.1").touch()
    (dead / "place").write_text(who_am_i(World.solo()).node)
    saver = PartSaver(is_async=True, scratch=str(scratch))
    with StepDriver(str(tmp_path / "run"), name="step_{N}") as driver:
        with driver.saving(1, ["actor"]) as saving:
            saver.save(saving.part("actor"), _write("a1"))
            assert not dead.exists()
            saver.close()
        assert driver.steps == [1]
    assert os.listdir(scratch) == []


def _without_critic(driver: StepDriver, saver: PartSaver) -> None:
    with driver.saving(3, ["actor", "critic"]) as saving:
        saver.save(saving.part("actor"), _write("a3"))
        assert [part.part for part in sealed_parts(saving.ticket)] == ["actor"]


def test_a_failure_of_one_rank_is_not_taken_for_a_missing_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``otherwise`` is for what is nowhere: a NotFoundError that single ranks met is raised."""
    with ckptfs.checkpoint_dir(tmp_path / "run/step_1") as path:
        (Path(path) / "file").write_text("x")
    missing = Failure(1, "n", "ckptfs.errors.NotFoundError", "gone")

    def met(*_: object) -> None:
        raise CollectiveError("find failed", failures={1: missing})

    monkeypatch.setattr(step_driver, "locate_directory", met)
    with (
        pytest.raises(CollectiveError, match="find failed") as caught,
        reading_part(tmp_path / "run/step_1", Place(), otherwise=lambda: True),
    ):
        raise AssertionError("taken for missing")
    assert isinstance(caught.value, NotFoundError)
    monkeypatch.undo()
    with reading_part(f"{tmp_path}/run/step_2", Place(), otherwise=lambda: True) as (there, _):
        assert there is None
