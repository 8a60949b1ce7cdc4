"""ckptfs.save of real tensors dies at storage operations of any kind; what is there is whole.

    test --launch--> warmed process --fork--> victim   two simulated ranks save, SIGKILL at operation k
                                    --fork--> judge    looks, recovers, looks again

``test_commit_crash.py`` does the same for the commit layer alone, at all k. Here the data are
DCP's: after each death the state is exactly the old or exactly the new one, bit for bit, for
``ckptfs.load`` and for stock ``dcp.load``, and the same before and after the recovery.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, launch

RANKS = 2
SAMPLE = 8
CASE_TIMEOUT_S = 300

# The name that the victim saves, over a run that holds step_1 already.
SCENARIOS = {"replace": "step_1", "fresh": "step_2"}


# -- in the warmed process -----------------------------------------------------------------------


def mine(rank: int, value: int) -> dict[str, Any]:
    """What one rank saves: tensors of its own, replicated ones, plain leaves."""
    import torch

    return {
        f"stage{rank}": {"w": torch.arange(4000.0).reshape(40, 100) * value, "b": torch.ones(3)},
        "common": torch.full((5, 7), value, dtype=torch.int32),
        "step": value,
    }


def whole(value: int) -> dict[str, Any]:
    """What all ranks saved, for one process that loads it."""
    state: dict[str, Any] = {}
    for rank in range(RANKS):
        state |= mine(rank, value)
    return state


def value_of(state: dict[str, Any]) -> int:
    """The value that the whole state has, every bit of it."""
    import torch

    value = int(state["step"])
    expected = whole(value)
    assert torch.equal(state["common"], expected["common"]), "a mix"
    for stage in (f"stage{rank}" for rank in range(RANKS)):
        for key in ("w", "b"):
            assert torch.equal(state[stage][key], expected[stage][key]), f"a mix: {stage}.{key}"
    return value


def ours(uri: str) -> int:
    """Through ckptfs.load, verified."""
    import ckptfs

    state = whole(0)
    assert ckptfs.load(state, uri).verified
    return value_of(state)


def stock(directory: str) -> int:
    """Through torch's own reader."""
    import torch.distributed.checkpoint as dcp

    state = whole(0)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return value_of(state)


def save(run: str, name: str, value: int, plan: Any) -> None:
    """ckptfs.save(if_exists="replace") by two simulated ranks; one plan counts their operations."""
    import torch

    from ckptfs.commit.ownership.claim import Takeover, claim
    from ckptfs.commit.save.spec import IfExists, SaveSpec
    from ckptfs.commit.session import Place, start_session
    from ckptfs.control.control import Control
    from ckptfs.dcp.saving import save_at
    from ckptfs.storage.registry import open_storage
    from ckptfs.testing.faults import FaultyStorage
    from ckptfs.testing.world import simulate

    def body(control: Control) -> None:
        storage = FaultyStorage(open_storage(run), plan)
        session = start_session(control, storage, Place(), write=True)
        with claim(session, takeover=Takeover.FORCE) as held:
            spec = SaveSpec(name, value, IfExists.REPLACE, run=held.generation)
            target = storage.root / name
            state = mine(control.rank, value)
            save_at(state, session, target, spec)

    torch.set_num_threads(1)  # after a fork the first use makes a pool, and two threads would race
    for end in simulate(RANKS, body):
        end.get()


def in_a_fork(work: Callable[[], object]) -> tuple[int, str]:
    """Run ``work`` in a fork of the warmed process: how it ended, and what it returned or raised."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        signal.alarm(CASE_TIMEOUT_S)  # a hang is an end too
        code, told = 1, ""
        try:
            told, code = json.dumps(work()), 0
        except BaseException:  # noqa: BLE001 - passed to the test
            told = traceback.format_exc()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(told)
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return os.waitpid(pid, 0)[1], text


def judge(run: str, scenario: str) -> str:
    """Everything that must hold after the death: "old" or "new"."""
    import ckptfs

    def look() -> tuple[list[str], str, int]:
        names = [c.uri.name for c in ckptfs.list_checkpoints(run)]
        last = ckptfs.latest(run)
        assert last is not None
        values = {name: ours(f"{run}/{name}") for name in names}
        if scenario == "fresh":
            assert values["step_1"] == 1, "what was there before is untouched"
        return names, last.uri.name, values[last.uri.name]

    before = look()
    for path in Path(run).glob("*/.metadata"):
        assert stock(str(path.parent)) in (1, 2), "visible to stock torch, hence whole"
    # By force: the simulated node's owner cannot be asked whether it lives.
    ckptfs.prepare_run(run, takeover="force").release()
    assert look() == before, "recovery changes nothing that a reader was told"
    names, last, value = before
    assert stock(f"{run}/{last}") == value
    assert {p.parent.name for p in Path(run).glob("*/.metadata")} == set(names)
    assert os.listdir(f"{run}/.ckptfs/attempts") == [], "the dead one's attempt is gone"
    # Half of a hint or lease next to the log is a name of no meaning to anybody; it may stay.
    halves = [p for p in Path(run).rglob("*") if ".partial" in p.name]
    assert [p for p in halves if p.parent.name != ".ckptfs"] == [], "half of a file is left"
    # And the run continues.
    from ckptfs.testing.faults import Plan

    save(run, SCENARIOS[scenario], 3, Plan([]))
    assert ours(f"{run}/{SCENARIOS[scenario]}") == stock(f"{run}/{SCENARIOS[scenario]}") == 3
    return "old" if value == 1 else "new"


def all_deaths(rank: Rank) -> list[Any]:
    """[k, when, end, trouble] of every death that was asked for."""
    from ckptfs.testing.faults import Fault, Kill, Plan, When

    scenario, sample = rank.args["scenario"], rank.args["sample"]
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="crash-dcp-", dir=place) as base:
        status, text = in_a_fork(lambda: save(f"{base}/before", "step_1", 1, Plan([])))
        assert status == 0, text

        def count() -> int:
            plan = Plan([])
            shutil.copytree(f"{base}/before", f"{base}/trial")
            save(f"{base}/trial", SCENARIOS[scenario], 2, plan)
            return len(plan.trace)

        status, text = in_a_fork(count)
        assert status == 0, text
        last = json.loads(text)
        points = [(k, when) for k in range(1, last + 1) for when in (When.BEFORE, When.HALF)]
        if sample is not None:
            points = [points[i * (len(points) - 1) // (sample - 1)] for i in range(sample)]
        told, run, name = [], f"{base}/case", SCENARIOS[scenario]
        for k, when in points:
            shutil.copytree(f"{base}/before", run)
            plan = Plan([Fault("*", "*", k, Kill(when))])
            status, text = in_a_fork(functools.partial(save, run, name, 2, plan))
            # Two ranks interleave: one run of the victim may have an operation more or less.
            died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            trouble = "" if died or (status == 0 and k > last - 8) else f"not killed: {text}"
            end = ""
            if not trouble:
                status, text = in_a_fork(functools.partial(judge, run, scenario))
                end, trouble = (json.loads(text), "") if status == 0 else ("", text or str(status))
            told.append([k, when.value, end, trouble])
            shutil.rmtree(run)
        return told


# -- the tests -----------------------------------------------------------------------------------


def deaths(scenario: str, sample: int | None) -> None:
    """Let them die; every death was judged well, and the commit is among them."""
    args = {"scenario": scenario, "sample": sample}
    with launch(all_deaths, 1, args=args) as ranks:
        [told] = ranks.values(timeout_s=280 if sample else 3000)
    bad = [f"{when} operation {k}:\n{trouble}" for k, when, _, trouble in told if trouble]
    assert not bad, f"{len(bad)} of {len(told)} deaths:\n" + "\n".join(bad[:3])
    ends = collections.Counter(end for _, _, end, _ in told)
    assert set(ends) == {"old", "new"}, f"the commit was not among the deaths: {ends}"


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_a_save_of_tensors_that_is_killed_leaves_the_old_or_the_new_state(scenario: str) -> None:
    """SIGKILL at eight moments of a save by two ranks, the first and the last ones among them."""
    deaths(scenario, SAMPLE)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_campaign_a_save_of_tensors_killed_at_every_operation(scenario: str) -> None:
    """The same before and half-way through each operation, for all k."""
    deaths(scenario, None)
