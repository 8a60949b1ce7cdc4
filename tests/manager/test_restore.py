"""Restore: which checkpoint is taken, decided once for all ranks; and what is an error instead."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfs.commit.catalog.catalog import list_live, read_view
from ckptfs.commit.decisions import may_delete
from ckptfs.commit.log.append import append
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.operations import drive
from ckptfs.errors import (
    AccessError,
    CkptfsError,
    CollectiveError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StateError,
    StorageError,
)
from ckptfs.manager.restore_candidates import Fallback
from ckptfs.replication.backlog import fresh_id
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.uri import Uri
from tests.manager.runs import Site


def state(value: float) -> Any:
    """One tensor, one number, one value per rank."""
    return lambda rank: {"w": torch.full((1000,), float(value)), "n": value}


def blank(_: int) -> dict[str, Any]:
    """The same with nothing in it."""
    return {"w": torch.zeros(1000), "n": None}


def value_of(site: Site) -> float:
    """The one value that every rank has now."""
    found = {float(v) for s in site.states.values() for v in (*s["w"].tolist(), s["n"])}
    assert len(found) == 1, found
    return found.pop()


def shards(site: Site, node: str, name: str) -> list[Path]:
    """The data files of a step on one node's disk."""
    return sorted((site.disk(node) / name).rglob("*.distcp"))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- which ---------------------------------------------------------------------------------------


def test_the_newest_commit_is_taken_not_the_largest_step(tmp_path: Path) -> None:
    """A run that went back to 50 and on to 70 wakes up at 70, though a rejected 100 is there."""
    site = Site(tmp_path, "ab")
    for step in (50, 100, 70):
        site.save(step, state(step))
    outcome = site.restore(blank)
    assert outcome is not None
    assert (outcome.restored.step, value_of(site)) == (70, 70.0)
    assert outcome.restored.uri.endswith("/run/step_70")
    assert outcome.restored.skipped == ()


def test_a_step_is_restored_by_its_number(tmp_path: Path) -> None:
    """step= takes exactly that one; a step that is not there is an error that lists those that are."""
    site = Site(tmp_path)
    for step in (1, 2, 3):
        site.save(step, state(step))
    outcome = site.restore(blank, step=2)
    assert outcome is not None
    assert outcome.restored.step == 2
    assert value_of(site) == 2.0
    error = site.refused(blank, step=7)
    assert isinstance(error, NotFoundError)
    assert "1, 2, 3" in str(error)


def test_what_a_failing_run_saved_is_taken_only_when_named(tmp_path: Path) -> None:
    """A save on failure is neither the newest nor, when it is all there is, nothing."""
    site = Site(tmp_path)
    site.save(9, state(9), failure=True)
    error = site.refused(blank)
    assert isinstance(error, StateError)
    assert "step_9" in str(error)
    site.save(5, state(5))
    site.save(10, state(10), failure=True)
    outcome = site.restore(blank)
    assert outcome is not None
    assert outcome.restored.step == 5
    named, allowed = site.restore(blank, step=10), site.restore(blank, include_failures=True)
    assert named is not None
    assert allowed is not None
    assert named.save_id == allowed.save_id


def test_weights_are_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    """Each kind has a newest of its own."""
    site = Site(tmp_path)
    site.save(1, state(1))
    site.save(2, state(2), artifact=Kind.WEIGHTS)
    full, weights = site.restore(blank), site.restore(blank, kind=Kind.WEIGHTS)
    assert full is not None
    assert weights is not None
    assert (full.restored.step, weights.restored.step) == (1, 2)


# -- nothing, and what is not nothing --------------------------------------------------------------


def test_an_empty_run_gives_none(tmp_path: Path) -> None:
    """None for a place that is not there, for an empty directory, and for a run without a commit."""
    site = Site(tmp_path, "aab")
    assert site.restore(blank) is None
    site.disk().mkdir(parents=True)
    assert site.restore(blank) is None
    site.save(1, state(1))
    shutil.rmtree(site.disk())
    assert site.restore(blank) is None


def lose_first_entry(run: Path) -> None:
    """The log has a gap at its beginning."""
    min((run / ".ckptfs/log").iterdir()).unlink()


def lose_log(run: Path) -> None:
    """The checkpoints are there and the log is not."""
    shutil.rmtree(run / ".ckptfs")


def lose_domain(run: Path) -> None:
    """The log is there and nothing names its owner."""
    (run / ".ckptfs/domain").unlink()


def foreign(run: Path) -> None:
    """Another tool's checkpoints."""
    shutil.rmtree(run)
    (run / "step_8000").mkdir(parents=True)
    (run / "step_8000/model.safetensors").write_bytes(b"x")


def rename_steps(run: Path) -> None:
    """A log that knows nothing of what is there."""
    shutil.copytree(run / "step_1", run / "saved")
    shutil.rmtree(run / ".ckptfs")
    shutil.rmtree(run / "step_1")


def damaged_entry(run: Path) -> None:
    """The first entry of the log is not one."""
    min((run / ".ckptfs/log").iterdir()).write_bytes(b"\0" * 100)


@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (lose_first_entry, IncompleteCheckpointError, "log cannot be read to its end"),
        (lose_log, StateError, "this run has checkpoints that no log lists: step_1"),
        (lose_domain, IncompleteCheckpointError, "domain is missing"),
        (foreign, StateError, "step_8000"),
        (rename_steps, StateError, "saved"),
        (damaged_entry, CollectiveError, "not a run log entry"),
    ],
)
def test_row_19_nothing_valid_is_never_step_0(
    tmp_path: Path, spoil: Any, error: type[CkptfsError], told: str
) -> None:
    """marin #8760: what cannot be understood is an error that says what it is, never a fresh start."""
    site = Site(tmp_path, "aa")
    site.save(1, state(1))
    spoil(site.disk())
    found = site.refused(blank)
    assert isinstance(found, error)
    assert told in str(found)


def test_row_19_another_template_is_not_an_empty_run(tmp_path: Path) -> None:
    """A run saved as step_{N} and restored as checkpoint-{N} does not begin at 0."""
    site = Site(tmp_path)
    site.save(8000, state(1))
    error = site.refused(blank, step_of=lambda _: None)
    assert isinstance(error, StateError)
    assert "step_8000" in str(error)


def test_an_entry_missing_in_the_middle_is_not_an_older_run(tmp_path: Path) -> None:
    """A log that breaks off before its end would hide the newest checkpoints."""
    site = Site(tmp_path)
    for step in (1, 2, 3):
        site.save(step, state(step))
    log = sorted((site.disk() / ".ckptfs/log").iterdir())
    log[len(log) // 2].unlink()
    assert "log cannot be read to its end" in str(site.refused(blank))


# -- damage ----------------------------------------------------------------------------------------


def unlink_data(step: Path) -> None:
    """A data file is gone."""
    next(step.rglob("*.distcp")).unlink()


def cut_data(step: Path) -> None:
    """A data file is shorter than it was."""
    path = next(step.rglob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


def unlink_digests(step: Path) -> None:
    """The digests of a data file are gone."""
    next(step.rglob("*.xxh3")).unlink()


def flip_data(step: Path) -> None:
    """One bit of a tensor differs: seen only while it is read."""
    flip(next(step.rglob("*.distcp")))


def flip_metadata(step: Path) -> None:
    """One bit of the immutable .metadata differs."""
    flip(next(p for p in step.rglob(".metadata") if p.parent != step))


def flip_manifest(step: Path) -> None:
    """One bit of the immutable manifest differs."""
    flip(next(p for p in step.rglob("ckptfs.json") if p.parent != step))


def unlink_step(step: Path) -> None:
    """The whole step is gone."""
    shutil.rmtree(step)


@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (unlink_data, IncompleteCheckpointError, "distcp is missing"),
        (cut_data, IncompleteCheckpointError, "bytes, "),
        (unlink_digests, IncompleteCheckpointError, "xxh3 is missing"),
        (flip_data, IntegrityError, "differ from what was written"),
        (flip_metadata, IntegrityError, "metadata differs from what was saved"),
        (flip_manifest, IntegrityError, "differs from the one that was sealed"),
        (unlink_step, IncompleteCheckpointError, "neither in progress nor projected"),
    ],
)
def test_a_damaged_newest_is_an_error_or_by_choice_an_older_one(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Any,
    error: type[CkptfsError],
    told: str,
) -> None:
    """It says what is wrong; fallback="older" takes the one before, and says what that costs."""
    site = Site(tmp_path, "ab")
    site.save(10, state(10))
    site.save(25, state(25))
    spoil(site.disk() / "step_25")
    found = site.refused(blank)
    assert isinstance(found, error)
    assert told in str(found)
    assert "step_25" in str(found)
    with caplog.at_level(logging.WARNING):
        outcome = site.restore(blank, fallback=Fallback.OLDER)
    assert outcome is not None
    assert (outcome.restored.step, value_of(site)) == (10, 10.0)
    (skipped,) = outcome.restored.skipped
    assert skipped.startswith("step_25, 15 steps later: ")
    assert told in skipped
    assert "15 steps are lost" in caplog.text


def test_a_step_that_was_named_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    """step= and fallback="older": the named one or an error."""
    site = Site(tmp_path)
    site.save(1, state(1))
    site.save(2, state(2))
    unlink_data(site.disk() / "step_2")
    error = site.refused(blank, step=2, fallback=Fallback.OLDER)
    assert isinstance(error, IncompleteCheckpointError)
    assert str(error).startswith("step_2 is damaged")


def test_all_damaged_is_an_error_even_with_a_fallback(tmp_path: Path) -> None:
    """No whole checkpoint is not an empty run."""
    site = Site(tmp_path)
    for step in (1, 2):
        site.save(step, state(step))
        flip_data(site.disk() / f"step_{step}")
    error = site.refused(blank, fallback=Fallback.OLDER)
    assert isinstance(error, IncompleteCheckpointError)
    assert "none of 2" in str(error)
    assert "step_1" in str(error)
    assert "step_2" in str(error)


# -- node-local disks ----------------------------------------------------------------------------


def test_a_wiped_disk_is_told_by_node_and_shards(tmp_path: Path) -> None:
    """Two nodes with a disk each, one wiped between runs: the error names the domain, node, ranks and
    shards; nothing starts at 0, and an older step of both is no way out either.
    """
    site = Site(tmp_path, "aabb", shared=False)
    site.save(1, state(1))
    site.save(2, state(2))
    lost = [path.name for path in shards(site, "b", "step_2")]
    assert lost
    shutil.rmtree(site.disk("b"))
    error = site.refused(blank)
    assert isinstance(error, IncompleteCheckpointError)
    for name in ("step_2", "host-b", "ranks 2, 3", *lost):
        assert name in str(error)
    assert "none of 2" in str(site.refused(blank, fallback=Fallback.OLDER))


def test_a_node_that_does_not_take_part_is_missed(tmp_path: Path) -> None:
    """Fewer nodes than saved: those that are left see their own disk whole, and the others' shards are
    named all the same.
    """
    site = Site(tmp_path, "aab", shared=False)
    site.save(1, lambda rank: {"all": 1, f"own{rank}": torch.ones(3)})
    site.nodes = "aa"
    error = site.refused(lambda rank: {"all": 0, f"own{rank}": torch.ones(3)}, strict=False)
    assert isinstance(error, IncompleteCheckpointError)
    for text in ("host-b (ranks 2)", *[path.name for path in shards(site, "b", "step_1")]):
        assert text in str(error)


def test_one_lost_shard_on_one_node_is_found_before_a_byte_is_read(tmp_path: Path) -> None:
    """Each node looks at its own disk; what one of them misses all ranks learn."""
    site = Site(tmp_path, "abb", shared=False)
    site.save(1, state(1))
    path = shards(site, "b", "step_1")[0]
    path.unlink()
    error = site.refused(blank)
    assert isinstance(error, IncompleteCheckpointError)
    assert f"{path.name} is missing" in str(error)
    assert "host-b" in str(error)
    assert all(not s["w"].any() for s in site.states.values())


# -- copies ----------------------------------------------------------------------------------------


def copy_of(site: Site, step: int, save_id: str, *, again: bool = False) -> None:
    """The same save in the copy's own run, as a copier commits it. again: at its second try."""
    tried = [save_id] if again else []
    site.save(step, state(step), run="copy", save_id=fresh_id(save_id, {}, tried))


@pytest.mark.parametrize("again", [False, True])
def test_a_copy_serves_the_save_that_the_run_lost(tmp_path: Path, again: bool) -> None:
    """Damaged here, whole in a copy: the same step, and no step is lost; also where the copy was made
    at a second try, under an id of its own.
    """
    site = Site(tmp_path, "ab", shared=False)
    for step in (1, 2):
        copy_of(site, step, site.save(step, state(step)).save_id, again=again)
    unlink_data(site.disk("b") / "step_2")
    outcome = site.restore(blank, runs=("run", "copy"))
    assert outcome is not None
    assert (outcome.restored.step, outcome.source, value_of(site)) == (2, 1, 2.0)
    assert outcome.restored.skipped == ()
    assert "/copy/step_2" in outcome.restored.uri
    assert outcome.restored.copy_of == outcome.restored.uri.replace("/copy/step_2", "/run")


def test_a_copy_that_is_behind_does_not_make_the_run_older(tmp_path: Path) -> None:
    """The newest is damaged and no copy has it: an error, unless older ones are allowed."""
    site = Site(tmp_path)
    copy_of(site, 1, site.save(1, state(1)).save_id)
    site.save(2, state(2))
    unlink_data(site.disk() / "step_2")
    unlink_data(site.disk() / "step_1")
    runs = ("run", "copy")
    assert isinstance(site.refused(blank, runs=runs), IncompleteCheckpointError)
    outcome = site.restore(blank, runs=runs, fallback=Fallback.OLDER)
    assert outcome is not None
    assert (outcome.restored.step, outcome.source) == (1, 1)


def test_copies_serve_a_run_whose_disks_are_new(tmp_path: Path) -> None:
    """The primary is truly empty: the newest of the copies is taken, the furthest of several."""
    site = Site(tmp_path, "ab", shared=False)
    first = site.save(1, state(1)).save_id
    second = site.save(2, state(2)).save_id
    site.save(1, state(1), run="slow", save_id=first)
    copy_of(site, 1, first)
    copy_of(site, 2, second)
    for node in "ab":
        shutil.rmtree(site.disk(node))
    outcome = site.restore(blank, runs=("run", "slow", "copy"))
    assert outcome is not None
    assert (outcome.restored.step, outcome.source) == (2, 2)


def test_disks_that_the_run_left_before_it_went_on_elsewhere(tmp_path: Path) -> None:
    """The copy has what is here and a later save that these disks do not have: it is the run."""
    site = Site(tmp_path)
    copy_of(site, 5, site.save(5, state(5)).save_id)
    copy_of(site, 4, "elsewhere")
    outcome = site.restore(blank, runs=("run", "copy"))
    assert outcome is not None
    assert (outcome.restored.step, outcome.source) == (4, 1)


def test_disks_that_went_on_apart_from_their_copy_are_not_taken_for_the_run(tmp_path: Path) -> None:
    """The newest here was never copied, and the run went further from the copy elsewhere: an error,
    not three steps back; either is there by its step, and a copy that is only behind is no reason.
    """
    site = Site(tmp_path)
    copy_of(site, 4, site.save(4, state(4)).save_id)
    site.save(5, state(5))
    copy_of(site, 5, "elsewhere")
    assert site.restore(blank, runs=("run", "copy")) is not None
    copy_of(site, 8, "further")
    error = site.refused(blank, runs=("run", "copy"), fallback=Fallback.OLDER)
    assert isinstance(error, StateError)
    assert "step_5 is not in the copy, and step_8 is not in the run" in str(error)
    for step, source in ((5, 0), (8, 1)):
        outcome = site.restore(blank, runs=("run", "copy"), step=step)
        assert outcome is not None
        assert (outcome.source, value_of(site)) == (source, float(step))


# -- doubt, and places that cannot be read -----------------------------------------------------


def leave_in_doubt(site: Site, node: str) -> None:
    """As if every rank had died right after the last seal: no log says what the save came to."""
    for disk in {site.disk(n) for n in site.nodes}:
        log = sorted((disk / ".ckptfs/log").iterdir())
        for entry in reversed(log):
            if b'"kind":"seal"' in entry.read_bytes():
                break
            entry.unlink()
    shutil.rmtree(site.disk(node))


def test_a_save_in_doubt_is_not_passed_by(tmp_path: Path) -> None:
    """Sealed by all, recorded by none, one disk lost: whether it was committed is not known, and the
    error says so, with node and shards; a copy that has it settles it.
    """
    site = Site(tmp_path, "ab", shared=False)
    copy_of(site, 1, site.save(1, state(1)).save_id)
    lost = [path.name for path in shards(site, "b", "step_1")]
    leave_in_doubt(site, "b")
    error = site.refused(blank)
    assert isinstance(error, IncompleteCheckpointError)
    for text in ("in doubt", "host-b", *lost):
        assert text in str(error)
    outcome = site.restore(blank, runs=("run", "copy"))
    assert outcome is not None
    assert (outcome.restored.step, outcome.source) == (1, 1)


class Down(FaultyStorage):
    """A place with a log that cannot be read for now: no network, or no permission."""

    def __init__(self, inner: Storage, error: Exception) -> None:
        plan = [Fault(op, ".ckptfs/log*", None, Fail(error)) for op in ("read", "list")]
        super().__init__(inner, Plan(plan))


@pytest.mark.parametrize("error", [AccessError("no"), StorageError("EIO")])
def test_a_run_that_cannot_be_read_is_not_empty(tmp_path: Path, error: Exception) -> None:
    """Alone it is that error; with a copy, which may be behind, one that fallback="older" allows."""
    site = Site(tmp_path)
    site.save(2, state(2))
    copy_of(site, 1, "older")

    def down(storage: Storage, _: int) -> Storage:
        return Down(storage, error) if storage.root.name == "run" else storage

    site.wrap = down
    alone = site.refused(blank)
    assert isinstance(alone, CollectiveError)
    assert {f.type for f in alone.failures.values()} == {f"ckptfs.errors.{type(error).__name__}"}
    runs = ("run", "copy")
    assert "cannot be read" in str(site.refused(blank, runs=runs))
    outcome = site.restore(blank, runs=runs, fallback=Fallback.OLDER)
    assert outcome is not None
    assert outcome.restored.step == 1


def test_a_copy_that_cannot_be_read_is_not_empty(tmp_path: Path) -> None:
    """A run on new disks and a copy that is out of reach: an error, never a fresh start."""
    site = Site(tmp_path, "ab")
    copy_of(site, 1, "only")
    site.wrap = lambda storage, _: (
        storage if storage.root.name == "run" else Down(storage, AccessError("no"))
    )
    error = site.refused(blank, runs=("run", "copy"))
    assert isinstance(error, IncompleteCheckpointError)
    assert "a place that may have checkpoints cannot be read" in str(error)


@pytest.mark.parametrize(
    ("error", "falls_back"), [(StorageError("EIO"), True), (AccessError("no"), False)]
)
def test_only_damage_leads_to_an_older_step(
    tmp_path: Path, error: Exception, falls_back: bool
) -> None:
    """A disk that cannot read its bytes is damage; a permission that is missing is an error on all
    ranks, whatever the fallback: an older step would fare no better, or worse.
    """
    site = Site(tmp_path, "ab")
    for step in (1, 2):
        site.save(step, state(step))
    fault = Fault("read_into", "step_2/*.distcp", 1, Fail(error))
    site.wrap = lambda storage, rank: storage if rank else FaultyStorage(storage, Plan([fault]))
    if falls_back:
        outcome = site.restore(blank, fallback=Fallback.OLDER)
        assert outcome is not None
        assert (outcome.restored.step, value_of(site)) == (1, 1.0)
    else:
        refused = site.refused(blank, fallback=Fallback.OLDER)
        assert isinstance(refused, CollectiveError)
        assert refused.all_are(AccessError)


@pytest.mark.parametrize("other", [AccessError("no"), MemoryError("no memory")])
def test_damage_on_one_rank_excuses_no_other_error(tmp_path: Path, other: Exception) -> None:
    """One rank meets damage and another something that is none: all get the error, with both ranks in
    it, and no older step, which would meet the same.
    """
    site = Site(tmp_path, "ab")
    for step in (1, 2):
        site.save(step, state(step))
    met = [StorageError("EIO"), other]

    def wrap(storage: Storage, rank: int) -> Storage:
        fault = Fault("read_into", "step_2/*.distcp", 1, Fail(met[rank]))
        return FaultyStorage(storage, Plan([fault]))

    site.wrap = wrap
    refused = site.refused(blank, fallback=Fallback.OLDER)
    assert isinstance(refused, CollectiveError)
    assert sorted(refused.failures) == [0, 1]
    assert [type(other).__name__ in f.type for f in refused.failures.values()] == [False, True]
    met[1] = StorageError("EIO")
    outcome = site.restore(blank, fallback=Fallback.OLDER)
    assert outcome is not None
    assert (outcome.restored.step, value_of(site)) == (1, 1.0)


# -- a reader that disturbs no one -----------------------------------------------------------------


def test_restoring_needs_read_permission_only(tmp_path: Path) -> None:
    """Nothing is written, repaired or even tried, not where there is nothing and not on damage."""
    site = Site(tmp_path, "ab")
    readers: list[ReadOnlyStorage] = []

    def read_only(storage: Storage, _: int) -> Storage:
        readers.append(ReadOnlyStorage(storage))
        return readers[-1]

    site.save(1, state(1))
    site.save(2, state(2))
    unlink_data(site.disk() / "step_2")
    site.wrap = read_only
    assert site.restore(blank, fallback=Fallback.OLDER) is not None
    assert site.restore(blank, runs=("nowhere",)) is None
    assert sum(reader.refused for reader in readers) == 0


def test_a_step_that_is_deleted_meanwhile_is_no_lost_step(tmp_path: Path) -> None:
    """The owner deletes the newest between two looks: all ranks look again, and take what is newest
    then, without a fallback.
    """
    site = Site(tmp_path, "a")
    for step in (1, 2):
        site.save(step, state(step))
    owner = LocalStorage(Uri.parse("file:///site/run"), directory=str(site.disk()))

    class Deleting(FaultyStorage):
        def list(self, key: str) -> list[Entry]:
            found = super().list(key)
            if key == ".ckptfs/log" and (site.disk() / "step_2").exists():
                view = drive(read_view(), owner)
                assert view is not None
                seal = list_live(dict([view]))[-1].save_id
                by = view[1].generation
                drive(append(lambda s: may_delete(s, seal, by, "old"), write_id="w"), owner)
                shutil.rmtree(site.disk() / "step_2")
            return found

    site.wrap = lambda storage, _: Deleting(storage, Plan([]))
    outcome = site.restore(blank)
    assert outcome is not None
    assert (outcome.restored.step, outcome.restored.skipped, value_of(site)) == (1, (), 1.0)


def test_on_an_object_store_requests_do_not_grow_with_the_files(tmp_path: Path) -> None:
    """One process of all folds the log and lists the data: four ranks' files cost no request each, and
    a missing object is found all the same.
    """
    stores = MemoryStoreRegistry()
    counted: Counter[str] = Counter()

    def bucket(uri: Uri, _: Path) -> Storage:
        return MemoryStorage(uri, shape=Shape.OBJECT, stores=stores)

    class Counting(FaultyStorage):
        def _do(self, op: str, key: str, *rest: Any) -> Any:
            counted[f"{op} {key.split('/', maxsplit=1)[0]}"] += 1
            return super()._do(op, key, *rest)

    site = Site(tmp_path, "abcd", open_disk=bucket)
    site.save(1, lambda rank: {"w": torch.ones(9), f"own{rank}": torch.ones(4)})
    site.wrap = lambda storage, _: Counting(storage, Plan([]))
    site.nodes = "ab"
    assert site.restore(lambda _: {"w": torch.zeros(9)}, strict=False) is not None
    assert counted["list .ckptfs"] == counted["list step_1"] == 1
    # When the newest commit was projected, under either name, both at once; not one for each file.
    assert counted["stat step_1"] <= 2
    assert counted["read step_1"] <= 2 * 3  # the manifest, .metadata, digests of what is read
    store = bucket(Uri.parse("file:///site/run"), tmp_path)
    (save_id,) = (entry.name for entry in store.list("step_1") if entry.is_dir)
    store.remove(f"step_1/{save_id}/__3_0.distcp")
    error = site.refused(lambda _: {"w": torch.zeros(9)}, strict=False)
    assert "__3_0.distcp is missing" in str(error)


def test_a_manifest_that_is_no_manifest_is_told(tmp_path: Path) -> None:
    """The error type separates a description that cannot be read from bytes that differ."""
    site = Site(tmp_path)
    site.save(1, state(1))
    inner = next(p for p in (site.disk() / "step_1").rglob("*.xxh3"))
    data = bytearray(inner.read_bytes())
    data[:8] = b"\0" * 8
    inner.write_bytes(data)
    assert isinstance(site.refused(blank), (ManifestError, IntegrityError))
