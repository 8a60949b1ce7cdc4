"""A rank hangs in the kernel, because its hard mount has lost the server: no other rank hangs with it.

The server is out of reach of client b alone: its line to a, where the store of the job is, works, and its
heart beats. What a rank on b waits for cannot be interrupted; that of a process's other threads can.
"""

from __future__ import annotations

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.leaving import Left, leaves
from tests.nfs.ranks import Claim, Load, Outcome, Save, does, is_there
from tests.nfs.team import END_S, Gate, all_say, start, until, wait_stuck

pytestmark = pytest.mark.timeout(900)  # kernels boot in here, and other tests may keep them from it

TIMEOUT_S = 6.0
LATE_S = 60.0  # what a machine that is busy with other things may take beyond it


@pytest.fixture(autouse=True)
def warm(lab42: NfsLab) -> None:
    """Both clients are ready to fork ranks."""
    lab42.warm()


def test_the_others_name_the_rank_the_host_and_the_path(lab42: NfsLab) -> None:
    """CollectiveError within timeout_s; the rank itself has the same once its call returns; then all continues."""
    run, gate = lab42.fresh(), Gate(lab42.b)
    uri = f"faults+file://{run}/step_2"
    ranks = start(
        lab42,
        does,
        Save(f"{run}/step_1", 1),
        Save(uri, 2),
        gate=gate.at("close", "*.distcp"),
        timeout_s=TIMEOUT_S,
    )
    gate.wait_reached(ranks)
    with lab42.without_server(lab42.b):
        gate.release()
        wait_stuck(ranks[1])
        first, told = ranks[0].result(TIMEOUT_S + LATE_S)
        assert lab42.b.call(is_there, f"/proc/{ranks[1].pid}")
    assert first == Outcome()
    assert (told.error, told.kinds) == ("CollectiveError", ((1, "AnswerLostError"),))
    assert "rank 1 on b (pid " in told.text
    assert f" of {run}/.ckptfs/attempts/" in told.text
    assert "has not returned for" in told.text
    # Its store has ended with rank 0 by now, or it still reads the answer that all have.
    assert ranks[1].result(END_S)[1].error in ("CollectiveError", "ControlPlaneLostError")
    found, old, new, whole = all_say(
        start(
            lab42,
            does,
            Claim(run),
            Load(f"{run}/step_1", 1),
            Save(f"{run}/step_2", 3),
            Load(f"{run}/step_2", 3),
        )
    )
    assert found.names == ("step_1",)
    assert (old, new, whole) == (Outcome(), Outcome(), Outcome())


@pytest.mark.campaign
def test_a_process_whose_thread_hangs_is_told_and_ends(lab42: NfsLab) -> None:
    """An asynchronous save: its caller has the error of all, and the interpreter ends while the call hangs."""
    run, gate = lab42.fresh(), Gate(lab42.b)
    uri, mark = f"faults+file://{run}/step_1", "/scratch/the-interpreter-has-ended"
    ranks = start(lab42, leaves, uri, mark, gate=gate.at("close", "*.distcp"), timeout_s=TIMEOUT_S)
    gate.wait_reached(ranks)
    with lab42.without_server(lab42.b):
        gate.release()
        wait_stuck(ranks[1])
        left: list[Left] = [rank.result(TIMEOUT_S + LATE_S) for rank in reversed(ranks)]
        until(lambda: lab42.b.call(is_there, mark), "the interpreter on b has ended")
    assert {one.error for one in left} == {"CollectiveError"}
    assert left[0].text == left[1].text
    assert "rank 1 on b (pid " in left[0].text
    assert f" of {run}/.ckptfs/attempts/" in left[0].text
    gone = f"/proc/{ranks[1].pid}"
    until(lambda: not lab42.b.call(is_there, gone), "its process is gone")
