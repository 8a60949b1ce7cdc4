"""Two jobs, one run directory on what both machines see: the newer one has it, whatever the older does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.lab import training
from tests.lab.job import Job, Machine
from tests.nodes.conftest import MakeNodes

pytestmark = pytest.mark.timeout(600)

RUN = "/shared/run"


def test_two_jobs_on_one_run_from_two_nodes(make_nodes: MakeNodes, tmp_path: Path) -> None:
    """The second job learns who has the run; after it took the run by force the first one, with a seal that
    was on its way, commits nothing any more, on no rank; all that is listed is whole.
    """
    one, two = make_nodes(2)
    fencing_holds([one], [two], RUN, tmp_path, warm=True)


def fencing_holds(
    one: list[Machine], two: list[Machine], run: str, home: Path, *, warm: bool = False
) -> None:
    """Two torchruns, two ranks each; the files of ``Job`` say which has the turn."""
    gate = home / "gate"
    # The log: fence, seal of old_1; the seal of old_2 stops before it is written.
    fault = f"hold={gate}:create:*/log/*:3@0"
    with jobs(one, two, run, home, fault, warm) as (old, new):
        old.release("claim")
        assert {told["generation"] for told in old.wait("owns").values()} == {1}
        old.release("old_1")
        old.wait("saved old_1")
        new.release("claim")
        for told in new.wait("busy").values():
            assert told["kind"] == "RunBusyError"
            assert f"host {one[0].name} pid " in told["text"]
            assert "last commit old_1" in told["text"]
        old.release("old_2")
        old.reached(gate)
        new.release("take over")
        assert {told["generation"] for told in new.wait("owns").values()} == {2}
        new.release("new_1")
        new.wait("saved new_1")
        gate.touch()
        for told in old.wait("refused old_2").values():
            assert (told["kind"], told["ranks"]) in [("FencedError", []), ("CollectiveError", [0])]
            assert "FencedError" in told["text"] or told["kind"] == "FencedError"
        old.release("old_3")
        for told in old.wait("refused old_3").values():
            assert "FencedError" in told["text"] or told["kind"] == "FencedError"
        old.succeed()
        new.release("new_2")
        new.release("new_3")
        new.succeed()
        wanted = ["old_1", "new_1", "new_2", "new_3"]
        for told in [*old.wait("done").values(), *new.wait("done").values()]:
            assert told["live"] in (wanted, wanted[:2]), told["live"]
        assert new.wait("done")[0]["live"] == wanted


@contextmanager
def jobs(
    one: list[Machine], two: list[Machine], run: str, home: Path, fault: str, warm: bool
) -> Iterator[tuple[Job, Job]]:
    """Both have started, and neither has claimed anything."""
    with ExitStack() as stack:
        program, place = training.__file__, f"faults+file://{run}"
        words = [program, "own", place, "--until", "3"]
        env = {"CKPTFS_TEST_FAULT": fault}
        old = stack.enter_context(
            Job(one, [*words, "--name", "old"], home=home, env=env, warm=warm)
        )
        new = stack.enter_context(Job(two, [*words, "--name", "new"], home=home, warm=warm))
        yield old, new
