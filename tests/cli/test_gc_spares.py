"""``ckptfs gc``: copies, saves that live, other runs, and what is in doubt, are left alone."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.delete.delete_checkpoint import delete_checkpoint
from ckptfs.commit.paths import PARTIAL_PREFIX, SHARED
from ckptfs.errors import ManifestError, RunBusyError
from ckptfs.tools.collecting import collect, look_for_debris
from ckptfs.tools.debris import Debris, Fate
from ckptfs.uri import Uri
from tests.cli.conftest import Cli, Place, a_run
from tests.cli.damage import ABANDONED, DAMAGES, keys_of, state_now
from tests.cli.sitting import begun, sitting
from tests.crash.rig import save


@pytest.fixture
def bucket(radosgw: Any) -> Place:
    """A fresh run on S3."""
    return Place("s3", str(radosgw.fresh()), dict(radosgw.storage_options()))


def test_copies_of_a_deleted_checkpoint_are_somebodys(place: Place) -> None:
    """``cp -r step_10 best``, and then step_10 is deleted: the copy has the same id and keeps every byte,
    also behind a link. Data that came late to step_10 itself goes.
    """
    a_run(place)
    with place.storage() as storage:
        files = {key.partition("/")[2]: storage.read(key) for key in keys_of(storage, "step_10")}
        save_id = json.loads(files["ckptfs.json"])["save_id"]
        delete_checkpoint(storage, "step_10")
        for top in ("best", "elsewhere/kept"):
            for path, data in files.items():
                storage.make_dir(f"{top}/{path}".rpartition("/")[0])
                storage.replace(f"{top}/{path}", data)
        if place.kind == "file":
            Path(place.uri, "linked").symlink_to(Path(place.uri, "elsewhere/kept"))
            Path(place.uri, "step_10").symlink_to(Path(place.uri, "elsewhere/kept"))
            assert not look_for_debris(place.uri, 0.0).found
            Path(place.uri, "step_10").unlink()
        storage.make_dir(f"step_10/{save_id}")
        storage.replace(f"step_10/{save_id}/__9_0.distcp", b"late")
        removed = collect(place.uri, 0.0, place.options).removed
        assert [str(one.uri) for one in removed] == [
            str(Uri.parse(place.uri) / f"step_10/{save_id}")
        ]
        for top in ("best", "elsewhere/kept"):
            copy = {k.removeprefix(f"{top}/"): storage.read(k) for k in keys_of(storage, top)}
            assert copy == files


def test_a_checkpoint_that_was_put_back_stays(local: Place) -> None:
    """It was deleted, and somebody copied it from a backup to where it was."""
    a_run(local)
    step, backup = Path(local.uri, "step_10"), Path(local.uri + "-backup")
    shutil.copytree(step, backup)
    with local.storage() as storage:
        delete_checkpoint(storage, "step_10")
    shutil.copytree(backup, step)
    (found,) = look_for_debris(local.uri, 0.0).found
    assert (found.fate, "the checkpoint was put back" in found.why) == (Fate.STAYS, True)
    collect(local.uri, 0.0)
    assert sorted(p.name for p in step.rglob("*")) == sorted(p.name for p in backup.rglob("*"))


def test_shared_data_that_a_copy_lists_stays(tmp_path: Path) -> None:
    """Object stores: also of a copy of a deleted save with an id that the log knows."""
    uri, options = f"memory://gc-copied-{tmp_path.name}/run", {"shape": "object"}
    with sitting(uri, options) as session:
        dead = save(session, "step_1", "one")
        save(session, "step_2", "two")
        storage = session.storage
        manifest = json.loads(storage.read("step_1/ckptfs.json"))
        delete_checkpoint(storage, "step_1")
        listed = {"path": f"{dead}/a.distcp", "size": 5, "origin": dead}
        copied = {**manifest, "min_reader_version": 2, "files": [listed]}
        storage.replace("kept/ckptfs.json", json.dumps(copied).encode())
        storage.replace(f"{SHARED}/{dead}/a.distcp", b"bytes")
        assert not look_for_debris(uri, 0.0, options).found


def test_a_file_that_is_being_sent_keeps_its_attempt(bucket: Place) -> None:
    """The parts of an upload have no age: as long as it is there, all finished files may be old, and the
    save lives. The user has to say that no job saves.
    """
    hurt = DAMAGES["abandoned attempt"].made(bucket)
    DAMAGES["orphaned upload"].plant(hurt)
    DAMAGES["deleted save"].plant(hurt)
    older_than_s = 1e-9
    fates = {f.debris: f.fate for f in look_for_debris(hurt.uri, older_than_s, hurt.options).found}
    assert fates[Debris.ATTEMPT] is fates[Debris.UPLOAD] is Fate.YOUNG
    before = state_now(hurt)
    with pytest.raises(RunBusyError, match="a save may be in progress: step_30"):
        collect(hurt.uri, older_than_s, hurt.options)
    assert state_now(hurt) == before
    assert {f.fate for f in look_for_debris(hurt.uri, 0.0, hurt.options).found} == {Fate.GOES}


def test_an_attempt_whose_record_is_being_written_is_young(local: Place) -> None:
    """Between the directory and attempt.json a save lives as well: nothing is fenced."""
    hurt = DAMAGES["deleted save"].made(local)
    data = Path(hurt.uri, ".ckptfs/attempts", ABANDONED, ABANDONED)
    data.mkdir(parents=True)
    (data / f"{PARTIAL_PREFIX}0123456789abcdef").write_bytes(b'{"save_id"')
    before = state_now(hurt)
    with pytest.raises(RunBusyError, match=f"a save may be in progress: {ABANDONED}"):
        collect(hurt.uri)
    assert state_now(hurt) == before


def test_a_clock_that_runs_ahead_ends_no_save(
    local: Place, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine two days ahead every attempt looks old: it is measured before anything is fenced."""
    hurt = DAMAGES["deleted save"].made(local)
    right = time.time
    with begun(hurt.uri, "step_50", hurt.options) as attempt:
        files = set(Path(hurt.uri).rglob("*"))
        with monkeypatch.context() as ahead:
            ahead.setattr("time.time", lambda: right() + 2 * 24 * 3600)
            ran = cli("gc", hurt.uri, "--delete", "--yes")
        assert (ran.exit, "differ by 172800 s" in ran.err) == (2, True)
        assert set(Path(hurt.uri).rglob("*")) == files
        attempt.abandon()


def test_a_gap_where_nobody_can_win(local: Place) -> None:
    """Without exclusive creates two entries of one number are no gap, and a number that is missing is."""
    log = Path(a_run(local).uri, ".ckptfs/log")
    for entry in list(log.iterdir()):
        entry.rename(f"{entry}.{'w' * 8}")
    first, second, third = sorted(log.iterdir())[:3]
    second.rename(log / "00000000.x")
    assert not look_for_debris(local.uri).found
    (log / "00000000.x").unlink()
    with pytest.raises(ManifestError, match="entry 1 is missing, but entry 2 exists"):
        look_for_debris(local.uri)
    assert (first.exists(), third.exists()) == (True, True)


def test_what_a_copy_left_half_way_goes_when_it_is_old(local: Place) -> None:
    """``.partial-kept-<name>`` next to a file of ours is no different from other files on their way."""
    a_run(local)
    with local.storage() as storage:
        save_id = json.loads(storage.read("step_10/ckptfs.json"))["save_id"]
    kept = Path(local.uri, "step_10", save_id, f"{PARTIAL_PREFIX}kept-__0_0.distcp")
    theirs = Path(local.uri, "eval", f"{PARTIAL_PREFIX}kept-model.bin")
    theirs.parent.mkdir()
    for path in (kept, theirs):
        path.write_bytes(b"half")
    assert [one.fate for one in look_for_debris(local.uri).found] == [Fate.YOUNG]
    collect(local.uri, 0.0)
    assert (kept.exists(), theirs.exists()) == (False, True)
