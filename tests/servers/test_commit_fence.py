"""Who lost the run can change nothing any more: neither after a long sleep, nor next to the new owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.decisions import Refusal
from ckptfs.commit.delete.deletion_steps import delete_save
from ckptfs.commit.log.append import RefusedAppend
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.run import Run
from ckptfs.errors import CkptfsError
from tests.faults.proxy import At, FaultProxy, Gate, Hold, HttpFault, Nth
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, describe, launch
from tests.servers.aftermath import through
from tests.servers.looking import keys_below

WAIT_S = 120.0


def state(value: float) -> dict[str, Any]:
    """Small: this is about the log."""
    return {"w": torch.full((1000,), float(value)), "n": value}


def values(uri: str, options: dict[str, Any]) -> dict[str, float]:
    """Every checkpoint of a run and what it holds."""
    found = {}
    for checkpoint in ckptfs.list_checkpoints(uri, storage_options=options):
        loaded = state(-1)
        ckptfs.load(loaded, checkpoint.uri, storage_options=options)
        assert set(loaded["w"].tolist()) == {loaded["n"]}
        found[str(checkpoint.uri).rpartition("/")[2]] = float(loaded["n"])
    return found


# -- a writer that sleeps through a takeover -----------------------------------------------------

# Where it is stopped: the n-th request that matches, before it is forwarded or when it is answered.
MOMENTS = {
    "before its data": ("PUT", "*/__0_0.distcp*", At.BEFORE),
    "before its seal": ("PUT", "*/ckptfs.json", At.ACTED),
    "its seal under way": ("PUT", "*/.ckptfs/log/00000001", At.BEFORE),
}


def sleeper(rank: Rank) -> Any:
    """Claim, save; the test stops this process in between."""
    uri, options = rank.args["uri"], rank.args["options"]
    run = ckptfs.prepare_run(uri, storage_options=options)
    assert run.generation.number == 1
    rank.tell("claimed")
    rank.hold("save")
    try:
        ckptfs.save(state(1.0), f"{uri}/step_1", run=run, storage_options=options)
    except CkptfsError as error:
        return describe(error)
    finally:
        run.release()
    return None


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_that_slept_through_a_takeover(radosgw: Server, moment: str) -> None:
    """SIGSTOP before its commit, the next generation takes over and commits, SIGCONT: FencedError,
    and none of its bytes is left.
    """
    method, path, at = MOMENTS[moment]
    uri, options, gate = radosgw.fresh("sleep"), radosgw.storage_options(), Gate()
    with FaultProxy(radosgw.endpoint) as proxy:
        args = {"uri": uri, "options": through(radosgw, proxy.url)}
        with launch(sleeper, 1, args=args) as ranks:
            ranks.wait("claimed")
            proxy.plan.add(HttpFault(method, path, Nth(1), Hold(gate, at)))
            ranks.release("save")
            assert gate.reached.wait(WAIT_S), ranks.logs()
            ranks.freeze(0)
            if at is At.ACTED:
                gate.release.set()
            with ckptfs.prepare_run(uri, takeover="force", storage_options=options) as run:
                ckptfs.save(state(2.0), f"{uri}/step_2", run=run, storage_options=options)
            gate.release.set()
            ranks.thaw(0)
            [raised] = ranks.values()
    assert raised["type"].endswith(".FencedError"), raised
    assert values(uri, options) == {"step_2": 2.0}
    keys = keys_below(radosgw, uri)
    assert not [key for key in keys if key.startswith(("step_1/", ".ckptfs/attempts/"))], keys


# -- two jobs in one run directory ---------------------------------------------------------------


def older_job(rank: Rank) -> Any:
    """Own the run, save; once the newer job has come, try to save, to replace and to delete."""
    uri, options = rank.args["uri"], rank.args["options"]
    run = ckptfs.prepare_run(uri, storage_options=options)
    ckptfs.save(state(1.0), f"{uri}/step_1", run=run, storage_options=options)
    rank.tell("saved")
    rank.hold("go on")
    raised = []
    more: dict[str, Any] = {"run": run, "storage_options": options}
    for name, more["if_exists"] in (("step_3", "error"), ("step_1", "replace")):
        try:
            ckptfs.save(state(3.0), f"{uri}/{name}", **more)
        except CkptfsError as error:
            raised.append(describe(error)["type"])
    raised.append(delete(run, "step_1"))
    run.release()
    return raised


def delete(run: Run, name: str) -> str:
    """What a delete of a committed save by this run comes to."""
    view = drive(read_view(), run.session.storage)
    assert view is not None
    views = dict([view])
    [seal] = [s.seal for s in views[view[0]].saves.values() if s.seal and s.seal.name == name]
    program = delete_save(seal, views, run.session.means().held_by(run.generation), reason="test")
    done = drive(program, run.session.storage)
    return str(done.reason) if isinstance(done, RefusedAppend) else "deleted"


@pytest.fixture(params=["radosgw", "posix"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A fresh run, and the options to reach it."""
    if request.param == "posix":
        return str(tmp_path / "run"), {}
    server: Server = request.getfixturevalue("radosgw")
    return server.fresh("two"), server.storage_options()


def test_two_jobs_in_one_run(place: tuple[str, dict[str, Any]]) -> None:
    """The older generation's commit, replacement and delete are refused as fenced; the newer job's
    saves and the older one's earlier save stay as they are.
    """
    uri, options = place
    with launch(older_job, 1, args={"uri": uri, "options": options}) as ranks:
        ranks.wait("saved", timeout_s=WAIT_S)
        with ckptfs.prepare_run(uri, takeover="force", storage_options=options) as run:
            ckptfs.save(state(2.0), f"{uri}/step_2", run=run, storage_options=options)
            ranks.release("go on")
            [raised] = ranks.values()
            for kind in raised[:2]:
                assert kind.endswith(".FencedError"), raised
            assert raised[2] == str(Refusal.FENCED), raised
            assert values(uri, options) == {"step_1": 1.0, "step_2": 2.0}
            ckptfs.save(state(4.0), f"{uri}/step_3", run=run, storage_options=options)
    assert values(uri, options) == {"step_1": 1.0, "step_2": 2.0, "step_3": 4.0}
