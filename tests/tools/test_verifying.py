"""``verify`` as a function: what the storage cannot read, what is deleted during the call, what is shared."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.commit.log.append import SNAPSHOT_EVERY, catch_up, write_snapshot
from ckptfs.commit.operations import drive
from ckptfs.errors import AccessError, IntegrityError, StateError, TransientError
from ckptfs.progress import Meter
from ckptfs.replication.copier import copy_to
from ckptfs.tools.digesting import Resumed
from ckptfs.tools.findings import Damage, Verdict, Verified
from ckptfs.tools.verifying import verify
from tests.cli.conftest import Place, a_run


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A small run on a disk that can fail."""
    a_run(Place("file", str(tmp_path / "run")))
    return f"faults+file://{tmp_path}/run"


def test_what_the_disk_cannot_read_is_a_finding(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO in the middle: these bytes are reported, and the rest is compared all the same."""
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=EIO:read_into:*step_10*:1")
    found = verify([run], deep=True, jobs=1)
    (finding,) = found.all_findings
    assert finding.damage is Damage.UNREADABLE
    assert "model.embed.weight" in finding.tensors
    clean = [one.name for one in found.checkpoints if one.verdict is Verdict.CLEAN]
    assert clean == ["step_20", "weights_20", "export_1"]


@pytest.mark.parametrize(
    ("name", "kind"), [("EACCES", AccessError), ("TransientError", TransientError)]
)
def test_what_says_nothing_of_the_checkpoint_is_raised(
    run: str, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]
) -> None:
    """No permission and no connection are no damage."""
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"fail={name}:read_into:*:1")
    with pytest.raises(kind):
        verify([run], deep=True)


def test_what_is_deleted_meanwhile_is_not_damaged(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention takes step_10 while it is looked at: left out, and said."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"hold={gate}:stat:step_10/*:1")
    found = []
    thread = threading.Thread(target=lambda: found.append(verify([run], jobs=1)))
    thread.start()
    waiting = threading.Event()
    while not Path(f"{gate}.reached").exists():
        assert thread.is_alive()
        waiting.wait(0.01)
    monkeypatch.delenv("CKPTFS_TEST_FAULT")
    plain = run.removeprefix("faults+file://")
    with ckptfs.CheckpointManager(plain, keep_latest=1) as manager:
        manager.save(30, {"w": torch.ones(1)})
    gate.touch()
    thread.join(60)
    (told,) = found
    assert told.verdict is Verdict.CLEAN
    assert "step_10" not in [one.name for one in told.checkpoints]
    assert told.notes == ("step_10 was deleted while it was being verified",)


def test_a_file_that_saves_share_is_read_once_and_told_for_each(tmp_path: Path) -> None:
    """unchanged="reference": of one damaged file both saves are damaged; its bytes are counted in both
    and the meter sees them once.
    """
    kept = {"base": torch.randn(1000), "lora": torch.zeros(10)}
    with ckptfs.CheckpointManager(tmp_path / "run", keep_latest=None) as manager:
        manager.save(1, kept)
        manager.save(2, kept)
    seen: list[int] = []

    class Counting(Meter):
        def advance(self, size_bytes: int) -> None:
            seen.append(size_bytes)

    found = verify([tmp_path / "run"], deep=True, meter=Counting())
    assert found.verdict is Verdict.CLEAN
    assert sum(seen) <= sum(one.compared_bytes for one in found.checkpoints)


@pytest.mark.parametrize("piece", [".metadata", "ckptfs.json"])
def test_a_replacement_that_stopped_half_way_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    """Committed, its data in place, what stock readers see still the old one, as a power cut leaves
    it: whole with a note until the next owner completes it; damage where no owner is at it.
    """
    run = f"faults+file://{tmp_path}/run"
    ckptfs.save({"w": torch.zeros(9)}, f"{run}/step_1")
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"fail=EIO:rename:*attempts*/{piece}:1")
    ckptfs.save({"w": torch.ones(9)}, f"{run}/step_1", if_exists="replace")
    monkeypatch.delenv("CKPTFS_TEST_FAULT")
    stopped = verify([run], deep=True)
    assert stopped.verdict is Verdict.CLEAN
    assert "projection is incomplete" in " ".join(stopped.checkpoints[0].notes)
    (attempt,) = (tmp_path / "run" / ".ckptfs" / "attempts").iterdir()
    aside = attempt.rename(tmp_path / "aside")
    abandoned = verify([run], deep=True)
    assert {one.damage for one in abandoned.all_findings} == {Damage.PROJECTION}
    aside.rename(attempt)
    ckptfs.prepare_run(run).release()
    done = verify([run], deep=True)
    assert done.verdict is Verdict.CLEAN
    assert not done.checkpoints[0].notes


def test_an_attempt_that_stayed_behind_hides_no_damage(tmp_path: Path) -> None:
    """Its directory is there, what stock readers see is rotten, and nothing waits to replace it."""
    run = tmp_path / "run"
    saved = ckptfs.save({"w": torch.zeros(9)}, run / "step_1")
    (run / "step_1" / ".metadata").write_bytes(b"rotten")
    (run / ".ckptfs" / "attempts" / saved.save_id).mkdir()
    found = verify([str(run)], deep=True)
    assert {one.damage for one in found.all_findings} == {Damage.PROJECTION}


def test_nothing_looked_at_is_never_clean() -> None:
    """Also where a program asks for it in a way that the command does not."""
    assert Verified(deep=True, checkpoints=()).verdict is Verdict.UNKNOWN


def test_jobs_below_one_are_refused(run: str) -> None:
    """A wrong call, not a verification of nothing."""
    with pytest.raises(StateError):
        verify([run], jobs=0)


def test_a_state_is_of_one_proof_and_one_way_of_cutting(tmp_path: Path) -> None:
    """Other digests, or other segments, are not what was verified."""
    state = Resumed(tmp_path / "state.json", every_s=3600)
    state.add("save:path", "proof", 3, 100)  # the first is written down at once
    first = (tmp_path / "state.json").read_bytes()
    state.add("save:path", "proof", 4, 100)  # the next within a second is not
    assert (tmp_path / "state.json").read_bytes() == first
    state.write()
    assert (tmp_path / "state.json").read_bytes() != first
    again = Resumed(tmp_path / "state.json")
    assert again.has("save:path", "proof", 3, 100)
    assert not again.has("save:path", "proof", 2, 100)
    assert not again.has("save:path", "other", 3, 100)
    assert not again.has("save:path", "proof", 3, 50)
    assert not again.has("save:other", "proof", 3, 100)


def test_a_state_that_cannot_be_written_is_told_before_anything_is_read(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such directory, a file instead of one, a directory of that name: nothing is asked of the
    storage, which would answer that it is not permitted.
    """
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=EACCES:read:*:1")
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    for state in ("nowhere/state.json", "file/state.json", "there"):
        with pytest.raises(StateError) as told:
            verify([run], deep=True, resume=tmp_path / state)
        assert told.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "there"]


def test_a_state_that_cannot_be_written_any_more_stops_the_verification(
    run: str, tmp_path: Path
) -> None:
    """The directory goes while bytes are read: a verification that cannot remember stops."""
    (tmp_path / "states").mkdir()
    state = Resumed(tmp_path / "states" / "state.json")
    shutil.rmtree(tmp_path / "states")
    with pytest.raises(StateError):
        state.add(run, "proof", 0, 1)


# -- what is bound to what ---------------------------------------------------------------


def _the(run: Path, pattern: str) -> Path:
    (found,) = run.glob(pattern)
    return found


def _edited(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}) + "\n")


def _saved(run: Path, step: int) -> None:
    ckptfs.save({"w": torch.full((4096,), float(step))}, run / f"step_{step}")


@pytest.mark.parametrize("linked", [False, True], ids=["written", "shared with an older save"])
def test_a_file_swapped_with_its_sidecar_is_damage(tmp_path: Path, linked: bool) -> None:
    """Data and digests of another save, of the same size, agree with each other: the manifest does not
    agree with them.
    """
    run = tmp_path / "run"
    kept = {"w": torch.zeros(4096)}
    with ckptfs.CheckpointManager(run, keep_latest=None) as manager:
        manager.save(1, kept)
        manager.save(2, kept if linked else {"w": torch.ones(4096)})
    _saved(tmp_path / "other", 3)
    assert verify([run], deep=True).verdict is Verdict.CLEAN
    for suffix in ("distcp", "xxh3"):
        mine = _the(run, f"step_2/*/*.{suffix}")
        theirs = _the(tmp_path / "other", f"step_3/*/*.{suffix}").read_bytes()
        assert mine.stat().st_size == len(theirs)
        mine.unlink()
        mine.write_bytes(theirs)
    found = verify([run], deep=True)
    assert [f.damage for f in found.all_findings] == [Damage.SIDECAR]
    with pytest.raises(IntegrityError):
        copy_to(run / "step_2", tmp_path / "copy" / "step_2")


def test_a_copy_binds_its_sidecars_too(tmp_path: Path) -> None:
    """Every sidecar that a copy's manifest lists has a digest, also where its source had none."""
    _saved(tmp_path / "run", 1)
    copy_to(tmp_path / "run" / "step_1", tmp_path / "copy" / "step_1")
    files = json.loads(_the(tmp_path / "copy", "step_1/ckptfs.json").read_text())["files"]
    assert [f["path"] for f in files if not f.get("digest") and not f.get("digests")] == []


def test_a_checkpoint_of_an_older_version_is_clean_with_a_note(tmp_path: Path) -> None:
    """Its manifest has no digests of sidecars: the result says what therefore was not looked at."""
    _saved(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run" / "step_1", tmp_path / "copy" / "step_1")
    for path in (tmp_path / "copy").glob("**/ckptfs.json"):
        files = json.loads(path.read_text())["files"]
        for record in files:
            if record["path"].endswith(".xxh3"):
                del record["digest"]
        _edited(path, files=files)
    (one,) = verify([tmp_path / "copy"], deep=True).checkpoints
    assert one.verdict is Verdict.CLEAN
    (note,) = one.notes
    assert "without the digests of the sidecars" in note


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kept", [".metadata", ""])
def test_a_manifest_that_lists_too_little_is_damage(
    tmp_path: Path,
    deep: bool,
    kept: str,
) -> None:
    """A copy without its log, with a manifest that says that there is nothing, or no data: no reader would
    look at what is not listed. What .metadata needs is known with --deep.
    """
    _saved(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run" / "step_1", tmp_path / "copy" / "step_1")
    for path in (tmp_path / "copy").glob("**/ckptfs.json"):
        files = json.loads(path.read_text())["files"]
        _edited(path, files=[f for f in files if kept and f["path"].endswith(kept)])
    _the(tmp_path / "copy", "step_1/*/*.distcp").unlink()
    found = verify([tmp_path / "copy"], deep=deep)
    assert found.verdict is (Verdict.DAMAGED if deep or not kept else Verdict.CLEAN)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 70),
        ("artifact", "weights"),
        ("base", [4, "x"]),
        ("references", ["20260101T000000-000000000000"]),
        ("origins", ["20260101T000000-000000000000"]),
    ],
)
def test_an_entry_that_says_otherwise_than_the_manifest_is_damage(
    tmp_path: Path, field: str, value: object
) -> None:
    """The digest binds the manifest alone: what the entry says in addition is compared too."""
    _saved(tmp_path / "run", 1)
    _saved(tmp_path / "run", 2)
    assert verify([tmp_path / "run"]).verdict is Verdict.CLEAN
    entry = sorted((tmp_path / "run" / ".ckptfs" / "log").iterdir())[1]
    _edited(entry, **{field: value})
    for uri in (tmp_path / "run", tmp_path / "run" / "step_2"):
        (finding,) = verify([uri]).all_findings
        assert finding.damage is Damage.LOG
        assert "step_2" in finding.what


@pytest.mark.parametrize(
    "spoil", [lambda p: p.write_text("x"), Path.unlink], ids=["garbage", "gone"]
)
def test_damage_below_a_snapshot_is_seen(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    """Readers begin at the snapshot and do not meet it; one that has to fold from the start would."""
    run = tmp_path / "run"
    _saved(run, 1)
    _saved(run, 2)
    with Place("file", str(run)).storage() as storage:
        state = drive(catch_up(), storage)
        due = replace(state, snapshot_at=state.next - SNAPSHOT_EVERY)
        drive(write_snapshot(due, write_id="s"), storage)
    assert verify([run]).verdict is Verdict.CLEAN
    spoil(run / ".ckptfs" / "log" / "00000000")
    for uri in (run, run / "step_1"):
        (finding,) = verify([uri]).all_findings
        assert finding.damage is Damage.LOG
        assert "entry 0" in finding.what
