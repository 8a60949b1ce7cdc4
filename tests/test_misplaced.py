"""A URI that names another thing than was meant: a checkpoint, a file, a bucket that is not there."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptfs
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.operations import drive
from ckptfs.storage.registry import open_storage
from tests.cli.conftest import Cli, cli
from tests.servers.conftest import azurite, gcs, moto, no_accounts, radosgw

__all__ = ["azurite", "cli", "gcs", "moto", "no_accounts", "radosgw"]


def state() -> dict[str, Any]:
    """A small state."""
    return {"w": torch.ones(4)}


def restored(uri: Any, options: dict[str, Any]) -> Any:
    """What a manager restores there."""
    with ckptfs.CheckpointManager(uri, storage_options=options) as manager:
        return manager.restore(state())


def read(uri: Any, options: dict[str, Any]) -> Any:
    """What a manager of directories reads there."""
    manager = ckptfs.DirectoryManager(uri, storage_options=options)
    with manager, manager.reading() as opened:
        return opened


READERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "latest": lambda uri, options: ckptfs.latest(uri, storage_options=options),
    "list_checkpoints": lambda uri, options: (
        ckptfs.list_checkpoints(uri, storage_options=options) or None
    ),
    "restore": restored,
    "reading": read,
}


@dataclass(frozen=True)
class Place:
    """A fresh run, and a run in a bucket that was not made."""

    kind: str
    run: str
    nowhere: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


FALLBACKS = {"moto": "s3fs", "gcs": "gcsfs", "azurite": "adlfs"}


@pytest.fixture(
    params=[
        "file",
        "memory",
        pytest.param("radosgw", marks=pytest.mark.campaign),  # S3, as moto is
        *FALLBACKS,
        "moto s3fs",
        *(
            pytest.param(f"{k} {FALLBACKS[k]}", marks=pytest.mark.campaign)
            for k in ("gcs", "azurite")
        ),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Every kind of storage, and object stores through their fsspec libraries."""
    kind, _, library = request.param.partition(" ")
    if kind == "file":
        return Place(kind, str(tmp_path / "run"))
    if kind == "memory":
        return Place(kind, f"memory://{uuid.uuid4().hex}/run")
    server = request.getfixturevalue(kind)
    fresh = server.fresh()
    head, _, rest = str(fresh).partition("://")
    options = dict(server.storage_options())
    if library == "s3fs":
        head = "fsspec+s3"
    elif library:
        options["client"] = library
    nowhere = f"{head}://no-such-bucket/{rest.partition('/')[2]}"
    return Place(kind, f"{head}://{rest}", nowhere, options)


@pytest.mark.parametrize("reader", READERS)
def test_an_empty_or_new_place_is_nothing(place: Place, reader: str) -> None:
    """Where nothing was written yet there is nothing, and that is no error."""
    assert READERS[reader](place.run, place.options) is None
    if place.kind == "file":
        Path(place.run).mkdir()
        assert READERS[reader](place.run, place.options) is None


@pytest.mark.parametrize("reader", READERS)
def test_a_bucket_that_is_not_there_is_an_error(place: Place, reader: str) -> None:
    """It never looks like an empty run: the error names it."""
    if not place.nowhere:
        pytest.skip("has no buckets")
    with pytest.raises(ckptfs.NotFoundError, match="no-such-bucket") as caught:
        READERS[reader](place.nowhere, place.options)
    assert caught.value.of_bucket


def test_a_program_of_the_log_takes_no_missing_bucket_for_an_empty_run(place: Place) -> None:
    """Readers look at the domain first; what folds the log without that look hears of the bucket too."""
    if not place.nowhere:
        pytest.skip("has no buckets")
    with (
        closing(open_storage(place.nowhere, place.options)) as storage,
        pytest.raises(ckptfs.NotFoundError, match="no-such-bucket") as caught,
    ):
        drive(catch_up(), storage)
    assert caught.value.of_bucket


def test_ls_says_that_there_is_no_such_bucket(place: Place, cli: Cli) -> None:
    """So do the commands, with the exit code of what is not there."""
    if not place.nowhere:
        pytest.skip("has no buckets")
    import json

    flags = [part for k, v in place.options.items() for part in ("-o", f"{k}={json.dumps(v)}")]
    for command in ("ls", "latest", "verify"):
        ran = cli(command, place.nowhere, *flags)
        assert ran.exit == 3, ran.err
        assert "no-such-bucket" in ran.err
        assert "there is no" in ran.err


@pytest.mark.parametrize("reader", READERS)
def test_a_file_is_no_empty_run(place: Place, reader: str) -> None:
    """A path, or a key, of a file is an error that says so."""
    above, _, name = place.run.rpartition("/")
    storage = open_storage(above, place.options)
    storage.replace(name, b"a single file")
    storage.close()
    with pytest.raises(ckptfs.StateError, match="a file, not a run"):
        READERS[reader](place.run, place.options)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("made", ["ours", "stock", "files"])
def test_a_checkpoint_is_no_run(tmp_path: Path, made: str, reader: str) -> None:
    """Who is given a checkpoint for a run says so and names the run; nothing is made in it."""
    step = tmp_path / "run" / "step_1"
    if made == "ours":
        ckptfs.save(state(), step)
    elif made == "stock":
        dcp.save(state(), checkpoint_id=step, no_dist=True)
    else:
        with ckptfs.checkpoint_dir(step) as path:
            Path(path, "a.txt").write_text("a")
    before = sorted(path.name for path in step.iterdir())
    with pytest.raises(ckptfs.StateError, match="a checkpoint, not a run") as caught:
        READERS[reader](step, {})
    assert str(step.parent) in str(caught.value)
    assert sorted(path.name for path in step.iterdir()) == before


def test_no_run_is_made_in_a_checkpoint(place: Place) -> None:
    """A manager that saves there, and prepare_run, are refused before anything is written."""
    ckptfs.save(state(), f"{place.run}/step_1", storage_options=place.options)
    step = f"{place.run}/step_1"
    storage = open_storage(step, place.options)
    before = storage.list("")
    with pytest.raises(ckptfs.StateError, match="a checkpoint, not a run"):
        ckptfs.CheckpointManager(step, storage_options=place.options).save(2, state())
    with pytest.raises(ckptfs.StateError, match="a checkpoint, not a run"):
        ckptfs.prepare_run(step, storage_options=place.options)
    assert storage.list("") == before
    storage.close()
    with ckptfs.CheckpointManager(place.run, storage_options=place.options) as manager:
        manager.save(2, state())  # a run that has checkpoints is one


def test_a_run_is_no_checkpoint(place: Place) -> None:
    """load of a run says so, and names the calls that were meant."""
    with ckptfs.prepare_run(place.run, storage_options=place.options):
        pass  # an empty one is a run too
    for _ in range(2):
        with pytest.raises(ckptfs.StateError, match="a run, not a checkpoint") as caught:
            ckptfs.load(state(), place.run, storage_options=place.options)
        assert "restore" in str(caught.value)
        assert "latest" in str(caught.value)
        ckptfs.save(state(), f"{place.run}/step_1", storage_options=place.options)
        break
    with pytest.raises(ckptfs.StateError, match="a run, not a checkpoint"):
        ckptfs.load(state(), place.run, storage_options=place.options)
    with pytest.raises(ckptfs.NotFoundError):
        ckptfs.load(state(), f"{place.run}/step_2", storage_options=place.options)


def test_commands_name_the_command_that_was_meant(tmp_path: Path, cli: Cli) -> None:
    """inspect, rm, pin and unpin of a run; gc of a checkpoint; nothing is called yours to remove by hand."""
    run = tmp_path / "run"
    for step in (1, 2):
        ckptfs.save(state(), run / f"step_{step}")
    ran = cli("inspect", run)
    assert (ran.exit, f"ckptfs ls {run}" in ran.err) == (2, True)
    ran = cli("rm", run, "--yes")
    assert ran.exit == 2
    assert "a run with 2 checkpoints" in ran.err
    assert f"ckptfs rm {run}/step_1 removes the oldest" in ran.err
    assert f"ckptfs rm --all {run}" in ran.err
    assert "by hand" not in ran.err
    for command in ("pin", "unpin"):
        ran = cli(command, run)
        assert (ran.exit, f"ckptfs {command} {run}/step_2" in ran.err) == (2, True)
    assert cli("gc", run / "step_1").exit == 2
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2]


def test_rm_all_removes_every_checkpoint_of_a_run(tmp_path: Path, cli: Cli) -> None:
    """--all takes a run; one that is pinned stops all of it, and what is no run is exit 3."""
    run = tmp_path / "run"
    for step in (1, 2):
        ckptfs.save(state(), run / f"step_{step}")
    (run / "notes.txt").write_text("mine")
    cli("pin", run / "step_1")
    assert cli("rm", "--all", run, "--yes").exit == 2
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2]
    cli("unpin", run / "step_1")
    assert cli("rm", "--all", run, "--yes").exit == 0
    assert ckptfs.list_checkpoints(run) == []
    assert sorted(p.name for p in run.iterdir() if p.name != ".ckptfs") == ["notes.txt"]
    assert cli("rm", "--all", run, "--yes").exit == 3
    assert cli("rm", "--all", tmp_path, "--yes").exit == 3


def test_results_are_one_line(tmp_path: Path) -> None:
    """str of a SaveResult and of a LoadResult: what, how much, how long."""
    saved = ckptfs.save(state(), tmp_path / "step_7")
    loaded = ckptfs.load(state(), tmp_path / "step_7")
    for result, word in ((saved, "saved "), (loaded, "loaded ")):
        line = str(result)
        assert line.startswith(f"{word}{result.uri} (step 7): ")
        assert "\n" not in line
        assert len(line) < len(result.uri) + 60
        assert line.endswith(" s")
        assert "per_rank" in repr(result)
