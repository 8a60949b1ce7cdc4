"""``ckptfs rm``, ``ckptfs pin`` and ``ckptfs unpin``: what they change, and what they leave alone."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.commit.log.append import append
from ckptfs.commit.log.entries import Decided, Outcome
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import TMP, log_key
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import DAMAGES, state_now


def names(place: Place) -> list[str]:
    """The checkpoints that the library lists."""
    found = ckptfs.list_checkpoints(place.uri, storage_options=place.options)
    return [checkpoint.uri.name for checkpoint in found]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``a_run``, to copy and change."""
    path = tmp_path_factory.mktemp("healthy") / "run"
    a_run(Place("file", str(path)))
    return path


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Place:
    """A copy of it."""
    shutil.copytree(healthy, tmp_path / "run")
    return Place("file", str(tmp_path / "run"))


def test_a_pinned_checkpoint_is_unpinned_and_deleted(
    cli: Cli, golden: Golden, place: Place
) -> None:
    """The way of a checkpoint out of a run, in the words of each command, on every storage."""
    a_run(place)
    step = f"{place.uri}/step_20"
    told = []
    for command in (
        ("rm", step, "--yes"),
        ("unpin", step),
        ("unpin", step),
        ("pin", f"{place.uri}/step_10", "--json"),
        ("rm", step, "--yes", "--json"),
        ("rm", step, "--yes"),
    ):
        ran = cli(*command, *place.flags)
        shown = " ".join(word for word in command if word != step)
        told.append(f"$ {shown}\n{ran.out}{ran.err}exit {ran.exit}\n")
    golden("change", "".join(told), place)
    assert names(place) == ["step_10", "weights_20", "export_1"]
    with place.storage() as storage:
        assert "step_20" not in {entry.name for entry in storage.list("")}


def test_files_of_others_stay(cli: Cli, run: Place) -> None:
    """What somebody put into the step directory is there when the checkpoint is gone."""
    notes = Path(run.uri, "step_10", "notes.txt")
    notes.write_text("mine")
    assert cli("rm", f"{run.uri}/step_10", "--yes").exit == 0
    assert sorted(path.name for path in notes.parent.iterdir()) == ["notes.txt"]


def test_what_no_log_knows_is_left_alone(cli: Cli, run: Place) -> None:
    """A copied or a stock checkpoint is not deleted, nothing is written next to it: exit 3 and why."""
    DAMAGES["copied without its log"].plant(run)
    before = state_now(run)
    for command in ("rm", "pin", "unpin"):
        ran = cli(command, f"{run.uri}/step_10", *(("--yes",) if command == "rm" else ()))
        assert ran.exit == 3
        assert "by hand" in ran.err
    assert state_now(run) == before


def test_one_wrong_name_stops_all_of_it(cli: Cli, run: Place) -> None:
    """Of several URIs none is deleted when one of them is no checkpoint."""
    assert cli("rm", f"{run.uri}/step_10", f"{run.uri}/step_11", "--yes").exit == 3
    assert "step_10" in names(run)


def test_several_are_deleted(cli: Cli, run: Place) -> None:
    """Each URI of a call is deleted."""
    assert cli("rm", f"{run.uri}/step_10", f"{run.uri}/export_1", "--yes").exit == 0
    assert names(run) == ["step_20", "weights_20"]


def test_what_a_dead_deleter_left_goes(cli: Cli, run: Place) -> None:
    """Deleted in the log and still there: rm removes the bytes that somebody else left."""
    DAMAGES["deleted save"].plant(run)
    assert cli("rm", f"{run.uri}/step_10", "--yes").exit == 0
    assert not Path(run.uri, "step_10").exists()


@pytest.mark.parametrize("name", ["step_10", "step_20"])
def test_a_log_with_a_gap_is_not_appended_to(cli: Cli, run: Place, name: str) -> None:
    """An append would take the number of the missing entry for good, and what is behind it (a pin, a
    checkpoint) is not known: exit 1, nothing is written, and nothing is called yours to remove.
    """
    with run.storage() as storage:
        pin = next(n for n in range(99) if b'"kind":"pin"' in storage.read(log_key(n)))
        lost = storage.read(log_key(pin - 1))
        storage.remove(log_key(pin - 1))
    before = state_now(run)
    for command in ("rm", "pin", "unpin"):
        ran = cli(command, f"{run.uri}/{name}", *(("--yes",) if command == "rm" else ()))
        assert ran.exit == 1
        assert "gap" in ran.err
        assert "by hand" not in ran.err
    assert state_now(run) == before
    with run.storage() as storage:
        storage.create(log_key(pin - 1), lost, staging=f"{TMP}/restored")
    assert cli("rm", f"{run.uri}/step_20", "--yes").exit == 2


def test_a_log_of_a_newer_version_is_not_deleted_by(cli: Cli, run: Place) -> None:
    """What that meant may have been a hold: exit 1, as gc."""
    DAMAGES["future entry"].plant(run)
    before = state_now(run)
    ran = cli("rm", f"{run.uri}/step_10", "--yes")
    assert ran.exit == 1
    assert "newer version" in ran.err
    assert state_now(run) == before


def test_a_log_without_its_domain_is_not_called_absent(cli: Cli, run: Place) -> None:
    """No reader takes such a log, and what it knows is not for people to remove."""
    DAMAGES["missing domain"].plant(run)
    before = state_now(run)
    for command in ("rm", "pin"):
        ran = cli(command, f"{run.uri}/step_10", *(("--yes",) if command == "rm" else ()))
        assert ran.exit == 1
        assert "by hand" not in ran.err
    assert state_now(run) == before


def test_a_part_goes_with_its_whole(cli: Cli, local: Place) -> None:
    """Neither a part nor the data of a checkpoint is anybody's to remove by hand: exit 2 and the whole."""
    with ckptfs.CheckpointManager(local.uri) as manager:
        ticket = manager.begin(1, parts=["actor", "critic"])
        ticket.commit([ckptfs.save(state_of(), ticket.part(name)) for name in ("actor", "critic")])
    before = state_now(local)
    (data,) = [path.name for path in Path(local.uri, "step_1", "actor").iterdir() if path.is_dir()]
    for name in ("step_1/actor", f"step_1/actor/{data}"):
        for command in ("rm", "pin"):
            ran = cli(command, f"{local.uri}/{name}", *(("--yes",) if command == "rm" else ()))
            assert ran.exit == 2
            assert "step_1" in ran.err
            assert "by hand" not in ran.err
    assert state_now(local) == before
    assert cli("rm", f"{local.uri}/step_1", "--yes").exit == 0


def test_what_dies_unsealed_is_gcs_to_remove(cli: Cli, run: Place) -> None:
    """An attempt under that name: 3, and who removes it."""
    DAMAGES["abandoned attempt"].plant(run)
    ran = cli("rm", f"{run.uri}/step_30", "--yes")
    assert ran.exit == 3
    assert "by hand" not in ran.err
    assert "ckptfs gc" in ran.err


def on_two_nodes(run: Place) -> None:
    """As if step_10 had a second half, on a disk that is not reached from here."""
    with run.storage() as storage:
        seal = json.loads(storage.read(log_key(1)))
        assert (seal["kind"], seal["name"]) == ("seal", "step_10")
        seal["domains"].append("over-there")
        storage.replace(log_key(1), json.dumps(seal).encode() + b"\n")
        decided = Decided(seal["save_id"], Outcome.COMMITTED)
        drive(append(lambda _: decided, write_id="decided"), storage)


def test_a_checkpoint_of_other_disks_too_is_deleted_when_told(cli: Cli, run: Place) -> None:
    """A pin in a log that is not reached is not known here, and half of it would stay: exit 2. With
    --partial what is here goes, and what does not is named.
    """
    on_two_nodes(run)
    before = state_now(run)
    ran = cli("rm", f"{run.uri}/step_10", "--yes")
    assert ran.exit == 2
    assert "over-there" in ran.err
    assert state_now(run) == before
    assert cli("pin", f"{run.uri}/step_10", "--json").json["checkpoints"][0]["elsewhere"] == [
        "over-there"
    ]
    assert cli("rm", f"{run.uri}/step_10", "--yes", "--partial").exit == 2  # pinned here
    assert "over-there" in cli("unpin", f"{run.uri}/step_10").out
    ran = cli("rm", f"{run.uri}/step_10", "--yes", "--partial", "--json")
    assert ran.exit == 0
    assert ran.json["checkpoints"][0]["elsewhere"] == ["over-there"]
    assert not Path(run.uri, "step_10").exists()


def far_away(tmp_path: Path) -> Iterator[Path]:
    """Directories to move a step to: on the same disk, and on another where there is one."""
    (tmp_path / "archive").mkdir()
    yield tmp_path / "archive"
    if os.access("/dev/shm", os.W_OK) and os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            yield Path(memory)


def test_a_step_that_was_moved_away_and_linked_back_stays(
    cli: Cli, healthy: Path, tmp_path: Path
) -> None:
    """Nothing behind a link is deleted: rm ends with 5 and says so, the run continues, and once the link
    is taken away the delete ends.
    """
    for number, away in enumerate(far_away(tmp_path)):
        run = Place("file", str(shutil.copytree(healthy, tmp_path / f"run_{number}")))
        step, moved = Path(run.uri, "step_10"), away / "step_10"
        shutil.move(step, moved)
        os.symlink(moved, step)
        whole = sorted(moved.rglob("*"))
        for _ in range(2):
            ran = cli("rm", f"{run.uri}/step_10", "--yes")
            assert ran.exit == 5
            assert "by hand" in ran.err
        with ckptfs.prepare_run(run.uri):
            assert "step_10" not in names(run)
        ckptfs.save(state_of(30), f"{run.uri}/step_30")
        assert sorted(moved.rglob("*")) == whole
        step.unlink()
        assert cli("rm", f"{run.uri}/step_10", "--yes").exit == 0
        assert sorted(moved.rglob("*")) == whole
        assert cli("rm", f"{run.uri}/step_10", "--yes").exit == 3


def test_a_run_that_a_job_holds_is_not_deleted_from(
    cli: Cli, run: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an owner lives rm ends with 6 and names it, and nothing is deleted; in a shell of the same
    job too, which a restart of that job would take the run from.
    """
    monkeypatch.setenv("CKPTFS_JOB_ID", "71")
    with ckptfs.prepare_run(run.uri):
        ran = cli("rm", f"{run.uri}/step_10", "--yes")
    assert ran.exit == 6
    assert f"pid {os.getpid()}" in ran.err
    assert "step_10" in names(run)


def test_a_pin_counts_while_a_job_trains(cli: Cli, place: Place) -> None:
    """An owner's retention leaves alone what another process has pinned, and takes it when it
    is unpinned.
    """
    step = f"{place.uri}/step_1"
    with ckptfs.CheckpointManager(
        place.uri, storage_options=place.options, keep_latest=1
    ) as manager:
        manager.save(1, state_of(1))
        assert cli("pin", step, *place.flags).exit == 0
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
        assert names(place) == ["step_1", "step_3"]
        assert cli("unpin", step, *place.flags).exit == 0
        manager.save(4, state_of(4))
    assert names(place) == ["step_4"]


def test_nobody_to_ask_is_no_yes(cli: Cli, run: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal and without --yes nothing is deleted: exit 2."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        ran = cli("rm", f"{run.uri}/step_10")
    assert ran.exit == 2
    assert "--yes" in ran.err
    assert "step_10" in names(run)


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_on_a_terminal_it_asks(run: Place, answer: bytes, code: int) -> None:
    """A person is asked, with the size of what would go, and only a yes deletes."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ckptfs", "rm", f"{run.uri}/step_10"],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(slave)
        os.write(master, answer)
        _, err = process.communicate(timeout=400)
    os.close(master)
    assert process.returncode == code, err
    assert "delete" in err
    assert "kB" in err
    assert ("step_10" in names(run)) == (code == 1)


def test_a_deletion_that_cannot_be_done_is_told_beside_the_others(cli: Cli, run: Place) -> None:
    """Of several pins one that fails does not keep the others; its code is the exit."""
    document: Any = cli("pin", f"{run.uri}/nothing", f"{run.uri}/step_10", "--json")
    assert document.exit == 3
    first, second = document.json["checkpoints"]
    assert first["error"]["type"] == "NotFoundError"
    assert second["changed"] is True
