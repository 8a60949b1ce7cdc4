"""``ckptfs gc``: what it finds, what it removes, and all that it leaves alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.delete.delete_checkpoint import delete_checkpoint
from ckptfs.commit.log.append import append, catch_up
from ckptfs.commit.log.entries import Delete
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Mode, claim
from ckptfs.commit.paths import CONTROL, SHARED, TRASH
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import RunSession
from ckptfs.commit.state import committed
from ckptfs.errors import CommitConflictError, RunBusyError
from ckptfs.storage.base import Storage
from ckptfs.storage.memory import STORES
from ckptfs.storage.registry import open_storage
from ckptfs.tools.collecting import collect, look_for_debris
from ckptfs.tools.debris import Fate
from ckptfs.uri import Uri
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import (
    ABANDONED,
    DAMAGES,
    DEBRIS,
    FOREIGN,
    applies,
    client_of,
    keys_of,
    state_now,
)
from tests.cli.gc_deaths import foreign_bytes, live_bytes
from tests.cli.sitting import begun, sitting
from tests.cli.sizes import sizeless
from tests.crash.rig import save
from tests.manager.test_object_files import killed_before_its_file_has_a_name

ROOT = Path(__file__).resolve().parents[2]
ALL = ("--older-than", "0s", "--yes")
NOW = ("--older-than", "0s")


def test_what_dead_jobs_left_is_shown_and_then_removed(
    place: Place, cli: Cli, golden: Golden
) -> None:
    """The dry run changes nothing and reports bytes and why; --delete leaves nothing of it. What is
    committed loads as before; files and uploads of others, in every place of the run, stay.
    """
    hurt = a_run(place)
    told = [DAMAGES[name] for name in (*DEBRIS, "foreign files") if name != "nothing committed"]
    for damage in told:
        if applies(damage, place):
            damage.plant(hurt)
    with looking_at(hurt.uri, hurt.options) as look, theirs_under_way(hurt) as uploads:
        theirs = foreign_bytes(look, FOREIGN)
        before, under_way = state_now(hurt), uploads()
        shown = cli("gc", hurt.uri, *hurt.flags, *NOW)
        assert (shown.exit, state_now(hurt)) == (0, before)
        golden(f"gc-{place.kind}", sizeless(shown.out), hurt)
        done = cli("gc", hurt.uri, *hurt.flags, *ALL, "--delete", "--json")
        assert (done.exit, done.json["removed"]) == (0, 3 if place.kind == "s3" else 4)
        (run,) = done.json["runs"]
        assert not run["left"]
        assert {f["kind"] for f in run["found"]}.isdisjoint({"late data", "trash"})
        assert [f["fate"] for f in run["found"]].count("stays") == len(under_way)
        assert uploads() == under_way
        assert foreign_bytes(look, FOREIGN) == theirs
    assert cli("gc", hurt.uri, *hurt.flags, *NOW).out == "nothing to remove\n"
    loaded = state_of(0)
    ckptfs.load(loaded, f"{hurt.uri}/step_20", storage_options=hurt.options)
    assert str(loaded) == str(state_of(20))


def test_a_run_in_which_nothing_was_committed(local: Place, cli: Cli) -> None:
    """Its only attempt goes; the run is as a new job would find it."""
    hurt = DAMAGES["nothing committed"].made(local)
    assert cli("gc", hurt.uri, *ALL, "--delete").exit == 0
    assert cli("gc", hurt.uri, *NOW).out == "nothing to remove\n"
    assert not list(Path(hurt.uri, ".ckptfs/attempts").iterdir())


def test_the_document(local: Place, cli: Cli, golden: Golden) -> None:
    """--json reports each thing with its bytes, age, fate and why, and the sums."""
    hurt = DAMAGES["deleted save"].made(local)
    DAMAGES["abandoned attempt"].plant(hurt)
    ran = cli("gc", hurt.uri, "--json")
    golden("gc-json", sizeless(ran.out), hurt)
    (run,) = ran.json["runs"]
    assert [(f["kind"], f["fate"]) for f in run["found"]] == [
        ("abandoned attempt", "young"),
        ("deleted save", "goes"),
    ]
    with hurt.storage() as storage:
        size_bytes = sum(storage.stat(key).size_bytes for key in keys_of(storage, "step_10"))
        projected = storage.stat("step_10/.metadata").size_bytes
        projected += storage.stat("step_10/ckptfs.json").size_bytes
    # Of the projection, two small files, nothing is reported.
    assert run["found"][1]["size_bytes"] == size_bytes - projected


def test_a_save_that_may_be_under_way_keeps_the_run_from_being_fenced(
    place: Place, cli: Cli
) -> None:
    """A plain save of another process, begun a moment ago: exit 6, nothing is changed, and it commits
    after that.
    """
    hurt = DAMAGES["deleted save"].made(place)
    with begun(hurt.uri, "step_50", hurt.options) as attempt:
        before = state_now(hurt)
        ran = cli("gc", hurt.uri, *hurt.flags, "--delete", "--yes")
        assert (ran.exit, state_now(hurt)) == (6, before)
        assert "a save may be in progress: step_50" in ran.err
        assert "--older-than 0s" in ran.err
        attempt.abandon()


def test_a_file_that_was_written_a_moment_ago_keeps_an_old_attempt(local: Place) -> None:
    """A copy of many hours is young as long as it writes: the last file counts, not the first."""
    hurt = DAMAGES["abandoned attempt"].made(local)
    attempt = Path(hurt.uri, ".ckptfs/attempts", ABANDONED)
    make_old(attempt)
    (found,) = look_for_debris(hurt.uri).going
    assert found.age_s is not None
    assert 2.9 < found.age_s / (24 * 3600) < 3.1
    (attempt / ABANDONED / "__1_0.distcp").write_bytes(b"just now")
    assert not look_for_debris(hurt.uri).going


def test_an_attempt_of_an_older_owner_is_dead_at_any_age(local: Place) -> None:
    """It can not commit any more: it goes although it was written a moment ago."""
    hurt = DAMAGES["abandoned attempt"].made(local)
    Path(hurt.uri, "step_30").mkdir()  # foreign, and empty
    ahead = Path(hurt.uri, ".ckptfs/attempts", ABANDONED, ABANDONED, "attempt.json")
    record = json.loads(ahead.read_text())
    ahead.write_text(json.dumps({**record, "base": [0, ""]}))
    (found,) = look_for_debris(hurt.uri).going
    assert "a newer owner" in found.why
    assert [one.uri for one in collect(hurt.uri).removed] == [found.uri]
    assert Path(hurt.uri, "step_30").is_dir()


def test_an_attempt_that_lost_its_data_directory_goes(local: Place, cli: Cli) -> None:
    """A power cut took it, and attempt.json with it. Once it is old, gc and ls say that it goes, as it does under
    the next owner. While it is young, nothing is fenced: the seal may be newer than the log that was read.
    """
    hurt = DAMAGES["deleted save"].made(local)
    attempt = without_its_data(hurt, ABANDONED)
    before = state_now(hurt)
    with pytest.raises(RunBusyError, match=f"a save may be in progress: {ABANDONED}"):
        collect(hurt.uri)
    assert state_now(hurt) == before
    make_old(attempt)
    found, _ = look_for_debris(hurt.uri).going
    assert (found.fate, found.may_live) == (Fate.GOES, False)
    assert "a power cut took its data directory" in found.why
    listed = cli("ls", "-a", hurt.uri, "--json").json["places"][0]["checkpoints"]
    (line,) = [one for one in listed if one["save_id"] == ABANDONED]
    assert (line["state"], line["note"]) == ("abandoned", found.why)
    assert found.uri in [one.uri for one in collect(hurt.uri).removed]
    assert not attempt.exists()


def test_a_sealed_save_without_its_data_directory_stays(local: Place) -> None:
    """Its projection has moved the directory under the name, and stopped before the other files."""
    hurt = a_run(local)
    with looking_at(hurt.uri, None) as look:
        save_id = committed(look.views)[-1].seal.save_id
    make_old(without_its_data(hurt, save_id))
    (found,) = look_for_debris(hurt.uri).found
    assert found.fate is Fate.STAYS


def without_its_data(place: Place, save_id: str) -> Path:
    """The directory of an attempt, with files for readers and without the data that they describe."""
    attempt = Path(place.uri, ".ckptfs/attempts", save_id)
    attempt.mkdir(parents=True)
    (attempt / ".metadata").write_bytes(b"metadata")
    return attempt


def make_old(attempt: Path) -> None:
    """Let everything in an attempt look as if it was written three days ago."""
    old_s = time.time() - 3 * 24 * 3600
    for path in (*attempt.rglob("*"), attempt):
        os.utime(path, (old_s, old_s))


def test_a_living_owner_is_left_in_peace(
    local: Place, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 6 while the owner lives, also from a shell in the same job, with the same variables;
    nothing but the refused look is written.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    hurt = a_run(local)
    with ckptfs.CheckpointManager(hurt.uri, keep_latest=None) as manager:
        manager.save(60, state_of(60))
        with hurt.storage() as storage:
            save_id = ckptfs.latest(hurt.uri).save_id  # type: ignore[union-attr]
            assert save_id is not None
            drive(append(lambda seen: Delete(save_id, seen.generation, "x"), write_id="w"), storage)
        before = state_now(hurt)
        ran = cli("gc", hurt.uri, "--delete", *ALL)
        after = state_now(hurt)
        # Its lease is rewritten during the call, and what the place can do was tried.
        assert {k for k in before if before[k] != after.get(k)} <= {
            ".ckptfs/lease",
            f"{hurt.uri}/.ckptfs",
            f"{hurt.uri}/.ckptfs/tmp",
        }
        assert ran.exit == 6
        assert "the run is held by" in ran.err
        assert "held by" in cli("gc", hurt.uri).out


def test_what_it_could_not_remove_is_told_and_an_exit_code(
    local: Place, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cron job learns that space was not freed: exit 1, what is left by its name, and why."""
    hurt = DAMAGES["leftovers"].made(local)
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=AccessError:remove_many:*:*")
    done = cli("gc", f"faults+file://{hurt.uri}", *ALL, "--delete", "--json")
    (run,) = done.json["runs"]
    assert (done.exit, done.json["removed"], len(run["left"])) == (1, 0, 2)
    assert [note for note in run["notes"] if " stays: " in note]


def test_after_an_overwrite_nothing_comes_back(local: Place, cli: Cli) -> None:
    """A fence would bring the older checkpoints back: exit 6 until something is committed."""
    a_run(local)
    with ckptfs.prepare_run(local.uri, mode="overwrite"):
        pass
    DAMAGES["leftovers"].plant(local)
    before = state_now(local)
    ran = cli("gc", local.uri, "--delete", *ALL)
    assert (ran.exit, state_now(local)) == (6, before)
    assert ckptfs.latest(local.uri) is None
    assert "overwrite" in ran.err


def test_replaced_saves_are_told_before_they_go(local: Place, cli: Cli) -> None:
    """The next owner deletes a save one commit after its successor: so does gc, and says so first."""
    a_run(local)
    with ckptfs.prepare_run(local.uri) as held:
        where = f"{local.uri}/step_10"
        ckptfs.save(state_of(11), where, step=10, if_exists="replace", run=held)
    ckptfs.save(state_of(70), f"{local.uri}/step_70")
    shown = cli("gc", local.uri, "--json").json["runs"][0]["found"]
    assert [(f["kind"], f["name"]) for f in shown] == [("replaced save", "step_10")]
    assert cli("gc", local.uri, "--delete", "--yes").exit == 0
    loaded = state_of(0)
    ckptfs.load(loaded, f"{local.uri}/step_10")
    assert str(loaded) == str(state_of(11))
    assert len([p for p in Path(local.uri, "step_10").iterdir() if p.is_dir()]) == 1


def test_shared_data_that_nobody_lists(tmp_path: Path) -> None:
    """Object stores: of a deleted writer's data goes what no live save lists; what a copied manifest
    lists stays, and so does what the log has never had.
    """
    uri, options = f"memory://gc-shared-{tmp_path.name}/run", {"shape": "object"}
    with sitting(uri, options) as session:
        dead = save(session, "step_1", "one")
        save(session, "step_2", "two")
        delete_checkpoint(session.storage, "step_1")
        storage = session.storage
        foreign_id = "dcp-00000000000000aa~0000bbbb"  # as copies of plain checkpoints have
        for key in (f"{dead}/a.distcp", f"{dead}/b.distcp", f"{foreign_id}/c.distcp"):
            storage.replace(f"{SHARED}/{key}", b"bytes")
        listed = {"path": f"{dead}/b.distcp", "size": 5, "origin": dead}
        manifest = json.loads(storage.read("step_2/ckptfs.json"))
        copied = {**manifest, "save_id": "copied", "name": "step_9", "min_reader_version": 2}
        storage.replace("step_9/ckptfs.json", json.dumps({**copied, "files": [listed]}).encode())
        found = {f.keys: f.fate for f in look_for_debris(uri, 0.0, options).found}
        assert found == {
            (f"{SHARED}/{dead}/a.distcp",): Fate.GOES,
            (f"{SHARED}/{foreign_id}/c.distcp",): Fate.STAYS,
        }
        collect(uri, 0.0, options)
        assert set(keys_of(storage, SHARED)) == {
            f"{SHARED}/{foreign_id}/c.distcp",
            f"{SHARED}/{dead}/b.distcp",
        }


def test_runs_below_a_directory(local: Place, cli: Cli, golden: Golden) -> None:
    """--recursive goes over every run below; one that is damaged keeps no user from the next."""
    above = Place("file", local.uri)
    for name, damage in (("a", "deleted save"), ("b", "garbage entry"), ("deep/c", "nothing")):
        DAMAGES[damage].made(Place("file", f"{local.uri}/{name}"))
    assert cli("gc", above.uri).out.endswith("nothing to remove\n")
    shown = cli("gc", above.uri, "--recursive")
    golden("gc-recursive", sizeless(shown.out), above)
    assert shown.exit == 1
    done = cli("gc", above.uri, "-r", "--delete", *ALL, "--json")
    assert done.exit == 1
    assert [bool(run.get("error")) for run in done.json["runs"]] == [False, True, False]
    assert done.json["removed"] == 1


def test_it_asks_on_a_terminal(local: Place, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes is listed and asked for; "n" changes nothing and is exit 1."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    hurt = DAMAGES["deleted save"].made(local)
    before = state_now(hurt)
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    ran = cli("gc", hurt.uri, "--delete")
    assert (ran.exit, state_now(hurt)) == (1, before)
    assert "deleted save" in ran.err
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert cli("gc", hurt.uri, "--delete").exit == 0
    assert state_now(hurt) != before


def test_it_does_not_delete_unasked(
    local: Place, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal --delete is a wrong call, as it is for rm, whether something would go or not;
    nothing changes. With --yes it deletes.
    """
    hurt = DAMAGES["deleted save"].made(local)
    before = state_now(hurt)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    for flags in ((), ("--recursive",), ("--older-than", "900d")):
        ran = cli("gc", hurt.uri, "--delete", *flags)
        assert (ran.exit, "--yes" in ran.err, state_now(hurt)) == (2, True, before)
    assert cli("gc", hurt.uri, "--delete", "--yes").exit == 0
    assert state_now(hurt) != before
    assert cli("gc", hurt.uri, "--delete").exit == 2


def test_what_killed_writers_of_single_files_left(cli: Cli, tmp_path: Path) -> None:
    """It is named and removed, also where no run is: at once where its process is known to be dead, else by
    its age. Nothing is made there, and a living writer's file stays.
    """
    left = killed_before_its_file_has_a_name(tmp_path / "last.ckpt")
    living = open_storage(Uri.parse(tmp_path)).open_write("next.ckpt")
    young, old = tmp_path / f".partial-{'1' * 16}", tmp_path / f".partial-{'2' * 16}"
    for file in (young, old, tmp_path / "epoch=1.ckpt"):
        file.write_bytes(b"bytes")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    ran = cli("gc", tmp_path)
    assert ran.exit == 0
    assert left.name in ran.out
    assert "its writer died" in ran.out
    assert "2 can be removed" in ran.out
    assert ".partial" in cli("ls", tmp_path).out
    assert cli("gc", tmp_path, "--delete", "--yes").exit == 0
    there = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in there if ".partial-" not in name] == ["epoch=1.ckpt"]
    assert len([name for name in there if ".partial-" in name]) == 2
    assert young.exists()
    living.close()
    # Next to the steps of a run, too.
    ckptfs.save(state_of(1), tmp_path / "run" / "step_1")
    left = killed_before_its_file_has_a_name(tmp_path / "run" / "last.ckpt")
    assert cli("gc", tmp_path / "run", "--delete", "--yes").exit == 0
    assert not left.exists()
    assert ckptfs.latest(tmp_path / "run") is not None


def test_what_is_no_run(local: Place, cli: Cli) -> None:
    """A checkpoint is a wrong call that names its run; an age that is none is one too."""
    a_run(local)
    ran = cli("gc", f"{local.uri}/step_10")
    assert (ran.exit, "the run is" in ran.err) == (2, True)
    assert cli("gc", local.uri, "--older-than", "long").exit == 2
    assert cli("gc", f"{local.uri}/step_10", "--recursive").exit == 2


def test_it_needs_no_torch(local: Place) -> None:
    """The command runs to its end in a process that can not import torch."""
    hurt = DAMAGES["deleted save"].made(local)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from ckptfs.cli.main import main\n"
        f"main(['gc', {hurt.uri!r}, '--delete', '--yes'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "removed 1 of 1" in ran.stdout


# -- deaths -----------------------------------------------------------------------------


def wreck(place: Place) -> Place:
    """A run with one of everything that recovery and gc remove, and files of others."""
    a_run(place)
    options: dict[str, Any] = {"storage_options": place.options}
    ckptfs.save(state_of(21), f"{place.uri}/step_20", step=20, if_exists="replace", **options)
    ckptfs.save(state_of(31), f"{place.uri}/step_31", **options)
    for name in ("abandoned attempt", "deleted save", "foreign files"):
        DAMAGES[name].plant(place)
    if place.kind == "file":
        DAMAGES["leftovers"].plant(place)
        with place.storage() as storage:
            storage.make_dir(f"{TRASH}/1-1234abcd/x.data")
            storage.replace(f"{TRASH}/1-1234abcd/x.data/__0_0.distcp", b"half removed")
    return place


def killed(place: Place, copies: str, stride: int) -> list[dict[str, str]]:
    """Every ``stride``-th death of a collector on copies of a wreck, judged."""
    job = {
        "uri": place.uri,
        "options": place.options,
        "copies": copies,
        "stride": stride,
        "foreign": FOREIGN,
    }
    told = subprocess.run(
        [sys.executable, "-m", "tests.cli.gc_deaths"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def test_killed_at_every_sixth_operation_it_loses_nothing(local: Place, tmp_path: Path) -> None:
    """SIGKILL before, and half-way through, what it changes: committed checkpoints have all their bytes,
    foreign files stay, and a second gc leaves nothing over.
    """
    verdicts = killed(wreck(local), str(tmp_path / "copies"), 6)
    bad = [v for v in verdicts if v["trouble"]]
    assert not bad, bad[0]["fault"] + "\n" + bad[0]["trouble"]
    assert len(verdicts) >= 10
    assert {v["fault"].split(":")[1] for v in verdicts} >= {"create", "rename", "remove_tree"}


@pytest.mark.campaign
def test_killed_at_every_operation_it_loses_nothing(place: Place, tmp_path: Path) -> None:
    """The same at each single operation, also on S3."""
    copies = str(tmp_path / "copies") if place.kind == "file" else f"{place.uri}-copies"
    verdicts = killed(wreck(place), copies, 1)
    bad = [v for v in verdicts if v["trouble"]]
    assert not bad, f"{len(bad)} of {len(verdicts)}: {bad[0]['fault']}\n{bad[0]['trouble']}"
    assert len(verdicts) >= 10


# -- any run ----------------------------------------------------------------------------


@contextlib.contextmanager
def theirs_under_way(place: Place) -> Iterator[Callable[[], list[str]]]:
    """Uploads of somebody, and of another run, below this run, where there are uploads; yields a look
    at them.
    """
    if place.kind != "s3":
        yield list
        return
    bucket, _, root = place.uri.removeprefix("s3://").partition("/")
    keys = [
        f"{root}/eval/model.bin",
        f"{root}/sub/step_20/20200102T030405-00000000cafe/__0_0.distcp",
    ]
    with contextlib.closing(client_of(place)) as client:
        for key in keys:
            client.create_multipart_upload(Bucket=bucket, Key=key)

        def under_way() -> list[str]:
            told = client.list_multipart_uploads(Bucket=bucket, Prefix=root)
            return [up["UploadId"] for up in told.get("Uploads", ()) if up["Key"] in keys]

        yield under_way
        for key, upload in zip(sorted(keys), under_way(), strict=True):
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)


@dataclass(frozen=True)
class Step:
    """One thing that happens to a run: what, to which of a few names."""

    what: str
    name: str


def enter(storage: Storage, entry: Delete, number: int) -> None:
    """Append a delete, and die."""
    drive(append(lambda _: entry, write_id=f"w{number}"), storage)


STEPS = st.builds(
    Step,
    st.sampled_from(
        ("save", "replace", "delete", "half delete", "die", "foreign", "own", "late", "overwrite")
    ),
    st.sampled_from(("step_1", "step_2", "step_3")),
)
THEIRS = ("{}/notes.txt", "eval/{}.json", CONTROL + "/{}.txt", "_data/{}", ".partial-{}", "{}.txt")


def play(session: RunSession, step: Step, number: int, theirs: set[str]) -> None:
    """Do it; what the run does not permit is nothing."""
    storage, name = session.storage, step.name
    state = drive(catch_up(), storage)
    of_name = [s for s in state.saves.values() if s.seal is not None and s.seal.name == name]
    match step.what:
        case "save":
            with contextlib.suppress(CommitConflictError):
                save(session, name, f"{number}")
        case "replace":
            with claim(session) as run:
                save(session, name, f"{number}", run, replace=True)
        case "delete":
            delete_checkpoint(storage, name)
        case "half delete":
            for one in of_name[-1:]:
                if not one.deleted:
                    enter(storage, Delete(one.save_id, state.generation, "asked"), number)
        case "die":
            with contextlib.suppress(CommitConflictError):
                attempt = SaveAttempt(session, SaveSpec(name, None))
                attempt.begin()
                storage.replace(f"{attempt.prefix}__0_0.distcp", b"half")
        case "foreign":
            key = THEIRS[number % len(THEIRS)].format(name)
            if "/" in key:
                storage.make_dir(key.rpartition("/")[0])
            storage.replace(key, b"theirs")
            theirs.add(key)
        case "own":
            claim(session).release()
        case "late":
            for one in of_name:
                if one.gone:
                    storage.make_dir(f"{name}/{one.save_id}")
                    storage.replace(f"{name}/{one.save_id}/late.distcp", b"late")
        case "overwrite":
            claim(session, Mode.OVERWRITE).release()


LATE = [Step("save", "step_1"), Step("delete", "step_1"), Step("late", "step_1")]


@settings(max_examples=30, deadline=None)
@example(steps=LATE, shape="filesystem")
@example(steps=LATE, shape="object")
@given(steps=st.lists(STEPS, max_size=12), shape=st.sampled_from(("filesystem", "object")))
def test_of_any_run_it_removes_what_is_dead_and_nothing_else(steps: list[Step], shape: str) -> None:
    """Commits, deletes, deaths, new owners and files of others in any order: what is live and what is
    foreign keeps every byte, and a second dry run finds nothing that is to go.
    """
    uri, options = "memory://gc-any/run", {"shape": shape}
    theirs: set[str] = set()
    try:
        with sitting(uri, options) as session:
            for number, step in enumerate(steps):
                play(session, step, number, theirs)
        names = tuple(sorted(theirs))
        with looking_at(uri, options) as look:
            live, foreign = live_bytes(look), foreign_bytes(look, names)
        refused = False
        try:
            collect(uri, 0.0, options)
        except RunBusyError as error:
            assert "overwrite" in error.message  # noqa: PT017
            refused = True
        with looking_at(uri, options) as look:
            assert live_bytes(look) == live
            assert foreign_bytes(look, names) == foreign
            if not refused:
                assert not look_for_debris(uri, 0.0, options).found
                data = {k for k in keys_of(look.storage) if not k.startswith(f"{CONTROL}/")}
                # Replaced ones stay for one commit more, hidden ones until there is one.
                kept = committed(look.views)
                ids = {one.seal.save_id for one in kept}
                ours = {key for key in data - theirs if not ids & set(key.split("/"))}
                assert {key.rpartition("/")[0] for key in ours} <= {o.seal.name for o in kept}
    finally:
        STORES.drop("gc-any")
