"""Runs on a real HDFS: save, load, replace, claim, fence; races; what stock torch reads; what it costs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptfs
from ckptfs.commit.log.append import Appended, RefusedAppend, append, make_log
from ckptfs.commit.log.entries import Pin, decode_entry
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import LOG
from ckptfs.errors import CkptfsError, CommitConflictError, FencedError
from ckptfs.storage.registry import open_storage
from ckptfs.storage.webhdfs import WebHdfsStorage
from ckptfs.uri import Uri
from tests.faults.proxy import At, FaultProxy, Gate, Hold, HttpFault, Nth
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, describe, launch
from tests.servers.hdfs_raw import RawHdfs
from tests.servers.racers import Job, race
from tests.servers.test_commit_fence import delete

pytestmark = pytest.mark.hdfs

WAIT_S = 120.0
APPENDERS, APPENDS = 8, 4


def state(value: float, rows: int = 1000) -> dict[str, Any]:
    """Every element says which save wrote it."""
    return {"w": torch.full((rows,), float(value)), "n": float(value)}


class Run:
    """A fresh run of the server: its URI, how it loads, and the same seen from behind."""

    def __init__(self, server: Server) -> None:
        self.uri = server.fresh("run")
        self.options = server.storage_options()
        place = Uri.parse(self.uri)
        self.path = place.path
        self.raw = RawHdfs(place.authority, server.options["user"])

    def save(self, value: float, name: str, rows: int = 1000, **more: Any) -> Any:
        """One save of ``state(value)``."""
        more = {"storage_options": self.options, **more}
        return ckptfs.save(state(value, rows), f"{self.uri}/{name}", **more)

    def values(self) -> dict[str, float]:
        """Every checkpoint and what it holds, loaded by us."""
        found = {}
        for checkpoint in ckptfs.list_checkpoints(self.uri, storage_options=self.options):
            loaded = state(-1)
            ckptfs.load(loaded, checkpoint.uri, storage_options=self.options)
            assert set(loaded["w"].tolist()) == {loaded["n"]}
            found[str(checkpoint.uri).rpartition("/")[2]] = float(loaded["n"])
        return found

    def stock(self, name: str) -> float:
        """What stock torch loads from the projection."""
        loaded = state(-1)
        reader = FsspecReader(f"{self.uri}/{name}", user=self.raw.user)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert set(loaded["w"].tolist()) == {loaded["n"]}
        return float(loaded["n"])

    def files(self) -> list[str]:
        """Every file of the run."""
        return self.raw.files(self.path)


@pytest.fixture
def run(hdfs: Server) -> Iterator[Run]:
    """A fresh run, removed afterwards."""
    fresh = Run(hdfs)
    yield fresh
    fresh.raw.ask("DELETE", "DELETE", fresh.path, recursive="true")


# -- one job -------------------------------------------------------------------------------------


def test_a_run_from_claim_to_delete(run: Run) -> None:
    """Claim, save, replace, a second save of a name, delete: each does what it does on a disk, our
    reader and stock torch see the same, and nothing is left of what is gone.
    """
    assert isinstance(open_storage(run.uri, run.options), WebHdfsStorage)
    with ckptfs.prepare_run(run.uri, storage_options=run.options) as held:
        run.save(1, "step_1", run=held)
        run.save(2, "step_2", run=held)
        with pytest.raises(CommitConflictError):
            run.save(9, "step_2", run=held)
        run.save(3, "step_2", if_exists="replace", run=held)
        assert run.values() == {"step_1": 1.0, "step_2": 3.0}
        assert (run.stock("step_1"), run.stock("step_2")) == (1.0, 3.0)
        assert delete(held, "step_1") == "deleted"
    assert run.values() == {"step_2": 3.0}
    assert not run.raw.exists(f"{run.path}/step_1")
    files = run.files()
    assert not [f for f in files if ".partial-" in f or f.startswith((".ckptfs/tmp/", "step_1"))]
    with ckptfs.prepare_run(run.uri, storage_options=run.options) as again:
        run.save(4, "step_4", run=again)
    latest = ckptfs.latest(run.uri, storage_options=run.options)
    assert latest is not None
    assert str(latest.uri).endswith("/step_4")


def test_a_save_of_several_mebibytes_per_file(run: Run) -> None:
    """A tensor that is streamed in pieces and read in parallel ranges is bit-exact."""
    rows = 9 << 20
    values = torch.arange(rows, dtype=torch.float32)
    ckptfs.save({"w": values}, f"{run.uri}/step_1", storage_options=run.options)
    loaded = {"w": torch.zeros(rows)}
    ckptfs.load(loaded, f"{run.uri}/step_1", storage_options=run.options)
    assert torch.equal(loaded["w"], values)


def test_objects_and_directories(run: Run) -> None:
    """save_object, load_object and checkpoint_dir work, with plain file names on HDFS."""
    ckptfs.save_object({"a": 1}, f"{run.uri}/data.pt", storage_options=run.options)
    assert ckptfs.load_object(f"{run.uri}/data.pt", storage_options=run.options) == {"a": 1}
    with ckptfs.checkpoint_dir(f"{run.uri}/export", storage_options=run.options) as path:
        Path(path, "model.safetensors").write_bytes(b"weights")
    assert run.raw.read(f"{run.path}/export/model.safetensors") == b"weights"


# -- races ---------------------------------------------------------------------------------------


def _append(uri: str, options: dict[str, Any], who: int, together: Barrier) -> None:
    storage = open_storage(uri, options)
    together.wait(WAIT_S)
    log = None
    for turn in range(APPENDS):
        name = f"{who}-{turn}"
        done: Appended | RefusedAppend[str] = drive(
            append(lambda _, w=name: Pin(w), write_id=name, state=log),  # type: ignore[misc]
            storage,
        )
        assert isinstance(done, Appended)
        log = done.state


def test_racing_appends(run: Run) -> None:
    """Eight processes append to one log at once: every entry is there once, without gaps, whole."""
    storage = open_storage(run.uri, run.options)
    drive(make_log(), storage)
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(APPENDERS)
    writers = [
        fork.Process(target=_append, args=(run.uri, run.options, who, together))
        for who in range(APPENDERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(WAIT_S)
        assert writer.exitcode == 0
    names = [entry.name for entry in storage.list(LOG)]
    assert names == [f"{n:08d}" for n in range(APPENDERS * APPENDS)]
    found = [decode_entry(run.raw.read(f"{run.path}/{LOG}/{n}"), n).write_id for n in names]
    assert sorted(found) == sorted(f"{w}-{t}" for w in range(APPENDERS) for t in range(APPENDS))
    assert run.raw.files(f"{run.path}/.ckptfs/tmp") == []


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(200, marks=pytest.mark.campaign)], ids=["once", "campaign"]
)
def test_16_writers_race(run: Run, rounds: int) -> None:
    """16 processes seal one name at once: one commits, 15 get CommitConflictError and leave nothing."""
    done = race(Job(run.uri, run.options, 16, rounds=rounds))
    files = run.files()
    for number, outcomes in enumerate(done):
        winners = [o.save_id for o in outcomes if not o.error]
        assert len(winners) == 1, outcomes
        assert {o.error for o in outcomes if o.error} == {"CommitConflictError"}, outcomes
        here = {f.split("/")[1] for f in files if f.startswith(f"step_{number}/")}
        assert here == {winners[0], ".metadata", "ckptfs.json"}, here
    left = [f for f in files if f.startswith((".ckptfs/attempts/", ".ckptfs/tmp/"))]
    assert not left


# -- two jobs ------------------------------------------------------------------------------------


def _older(rank: Rank) -> Any:
    """Own the run and save; once the newer job has come, try to save, to replace and to delete."""
    uri, options = rank.args["uri"], rank.args["options"]
    held = ckptfs.prepare_run(uri, storage_options=options)
    ckptfs.save(state(1), f"{uri}/step_1", run=held, storage_options=options)
    rank.tell("saved")
    rank.hold("go on")
    raised = []
    tries: list[tuple[str, Literal["error", "replace"]]] = [
        ("step_3", "error"),
        ("step_1", "replace"),
    ]
    for name, if_exists in tries:
        try:
            ckptfs.save(
                state(3), f"{uri}/{name}", if_exists=if_exists, run=held, storage_options=options
            )
        except CkptfsError as error:
            raised.append(describe(error)["type"])
    raised.append(delete(held, "step_1"))
    return raised


def test_the_older_job_is_fenced(run: Run) -> None:
    """After a takeover the older job's commit, replacement and delete are FencedError, and both
    jobs' earlier saves stay.
    """
    with launch(_older, 1, args={"uri": run.uri, "options": run.options}) as ranks:
        ranks.wait("saved", timeout_s=WAIT_S)
        with ckptfs.prepare_run(run.uri, takeover="force", storage_options=run.options) as held:
            run.save(2, "step_2", run=held)
            ranks.release("go on")
            [raised] = ranks.values()
    assert [kind.rpartition(".")[2] for kind in raised[:2]] == [FencedError.__name__] * 2, raised
    assert "FENCED" in raised[2].upper(), raised
    assert run.values() == {"step_1": 1.0, "step_2": 2.0}


def _sleeper(rank: Rank) -> Any:
    uri, options = rank.args["uri"], rank.args["options"]
    held = ckptfs.prepare_run(uri, storage_options=options)
    ckptfs.save(state(1), f"{uri}/step_1", run=held, storage_options=options)
    rank.tell("saved")
    rank.hold("replace")
    try:
        ckptfs.save(
            state(2), f"{uri}/step_1", if_exists="replace", run=held, storage_options=options
        )
    except CkptfsError as error:
        return describe(error)
    return None


def test_the_window_of_an_unconditional_projection(run: Run, hdfs: Server) -> None:
    """HDFS has no conditional replace. A writer that sleeps between its look at the log and the rename
    of its projection shows stock readers the older save until the next owner comes; ckptfs's own
    readers see the newer one all the time.
    """
    gate = Gate()
    with FaultProxy(hdfs.endpoint) as proxy:
        through = run.uri.replace(Uri.parse(run.uri).authority, f"127.0.0.1:{proxy.port}")
        with launch(_sleeper, 1, args={"uri": through, "options": run.options}) as ranks:
            ranks.wait("saved", timeout_s=WAIT_S)
            rename = "*/step_1/.partial-*[?]destination=*step_1%2F.metadata*op=RENAME"
            proxy.plan.add(HttpFault("PUT", rename, Nth(1), Hold(gate, At.BEFORE)))
            ranks.release("replace")
            assert gate.reached.wait(WAIT_S), ranks.logs()
            ranks.freeze(0)
            with ckptfs.prepare_run(run.uri, takeover="force", storage_options=run.options) as held:
                run.save(3, "step_1", if_exists="replace", run=held)
                assert (run.values(), run.stock("step_1")) == ({"step_1": 3.0}, 3.0)
                gate.release.set()
                assert proxy.settle(WAIT_S)
                assert run.values() == {"step_1": 3.0}
                assert run.stock("step_1") == 2.0, "the window that is documented is gone"
            with ckptfs.prepare_run(run.uri, storage_options=run.options):
                assert run.stock("step_1") == 3.0
            ranks.kill(0)


# -- what it costs -------------------------------------------------------------------------------


def test_the_operations_of_a_save_are_those_of_the_formula(run: Run, hdfs: Server) -> None:
    """One more data file costs the NameNode what docs/stores/hdfs.md says, to the operation."""
    with FaultProxy(hdfs.endpoint) as proxy:
        through = run.uri.replace(Uri.parse(run.uri).authority, f"127.0.0.1:{proxy.port}")
        store = open_storage(f"{through}/costs", run.options)

        def cost(*ops: str) -> None:
            asked = [e.target.partition("op=")[2].partition("&")[0] for e in proxy.log]
            assert sorted(asked) == sorted(ops), asked
            proxy.forget()

        with store.open_write("d/f") as writer:
            writer.write(b"x" * (5 << 20))
        cost("CREATE", "GETFILESTATUS", "RENAME")
        store.replace("d/g", b"x")
        cost("CREATE", "GETFILESTATUS", "RENAME")
        store.create("d/h", b"x", staging="tmp/w")
        cost("CREATE", "GETFILESTATUS", "RENAME")
        store.read("d/g")
        cost("OPEN")
        with store.open_read("d/f") as reader:
            reader.read_into(0, memoryview(bytearray(1 << 20)))
            reader.read_into(1 << 20, memoryview(bytearray(1 << 20)))
        cost("GETFILESTATUS", "OPEN", "OPEN")
        store.remove("d/g")
        cost("DELETE", "DELETE")
        store.remove_many(["d/f", "d/h"])
        cost("DELETE", "DELETE", "DELETE")


def save_operations(data_files: int) -> int:
    """NameNode operations of one fresh save in a held run, besides the lease and a cold log."""
    written = 2 * data_files + 6  # with digests; record, .metadata and manifest twice, the seal
    looked = 3 + 3  # at the log and the name, before the attempt and after the seal
    return 3 * written + looked + 4  # the record is removed, and its directories, but for the last


def test_a_save_costs_what_the_formula_says(run: Run, hdfs: Server) -> None:
    """The second and third save of a run ask the NameNode as often as the documentation says."""
    with FaultProxy(hdfs.endpoint) as proxy:
        through = run.uri.replace(Uri.parse(run.uri).authority, f"127.0.0.1:{proxy.port}")
        with ckptfs.prepare_run(through, storage_options=run.options) as held:
            background = held.session.background
            assert background is not None
            for number in (1, 2, 3):
                assert background.drain(60)
                proxy.forget()
                ckptfs.save(
                    state(1), f"{through}/step_{number}", run=held, storage_options=run.options
                )
            assert background.drain(60)  # it removes the record
            asked = [e for e in proxy.log if "/.ckptfs/.partial-" not in e.path]  # the lease's
    assert len(asked) == save_operations(1) == 34, [e.target for e in asked]
