"""N2: eight processes prepare one run for overwriting, again and again, and no process ever fails.

The processes live through all rounds. The same processes in the same rounds with what scripts do
instead (every rank removes and makes the directory) fail, so the rounds do meet the race.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, launch

RANKS = 8
ROUNDS = 20  # the campaign does 1000
DEADLINE_S = 60.0  # promised: seconds; the machine of the tests may be busy
FOREIGN = ("notes.txt", "global_step_3/data.pt", "theirs/deep/backup.bin", ".hidden")

# What goes wrong in the owner, and nowhere else. The log, its directories, and the domain's name.
FAULTS = (
    "fail=EROFS:*:*:1",
    "fail=EROFS:create:.ckptfs/log/*:1",
    "fail-after=EIO:create:.ckptfs/log/*:1",
    "fail=EIO:read:.ckptfs/log/*:1",
    "fail=EIO:sync:.ckptfs/log*:1",
)


def overwrite(rank: Rank) -> object:
    """Every round claims the run for overwriting; a checkpoint is committed in each tenth."""
    import torch

    import ckptfs

    rank.init_group()
    run = str(rank.args["run"])
    generations = []
    for number in range(int(rank.args["rounds"])):
        with ckptfs.prepare_run(run, mode="overwrite") as held:
            generations.append(list(held.generation))
            if number % 10 == 0:
                ckptfs.save({"w": torch.arange(8)}, f"{run}/global_step_{number}", run=held)
                assert [c.step for c in ckptfs.list_checkpoints(run)] == [number]
    return generations


def unguarded(rank: Rank) -> object:
    """What scripts do: each rank removes the directory, makes it, and writes into it."""
    import torch.distributed as dist

    rank.init_group()
    run = str(rank.args["run"])
    failed: Counter[str] = Counter()
    for number in range(int(rank.args["rounds"])):
        dist.barrier()
        try:
            if os.path.exists(run):
                shutil.rmtree(run)
            os.mkdir(run)
            Path(run, f"rank_{rank.number}").write_text(str(number))
        except OSError as error:
            failed[type(error).__name__] += 1
    return failed


def fail_in_the_owner(rank: Rank) -> object:
    """One prepare_run for each fault, and a good one after it; how and when did they end?"""
    import ckptfs

    rank.init_group()
    ends = []
    for fault in rank.args["faults"]:
        if rank.number == 0:
            os.environ["CKPTFS_TEST_FAULT"] = fault
        begun = time.monotonic()
        try:
            ckptfs.prepare_run(f"faults+file://{rank.args['run']}", "overwrite").release()
            end: list[Any] = ["nothing", "", ""]
        except ckptfs.CkptfsError as error:
            end = [type(error).__name__, str(error), str(sorted(getattr(error, "failures", {})))]
        took_s = time.monotonic() - begun
        os.environ.pop("CKPTFS_TEST_FAULT", None)
        with ckptfs.prepare_run(f"faults+file://{rank.args['run']}", takeover="force") as held:
            ends.append({"end": end, "took_s": took_s, "then": list(held.generation)})
    return ends


def prepare_once(rank: Rank) -> object:
    """One prepare_run."""
    import ckptfs

    rank.init_group()
    return str(ckptfs.prepare_run(f"faults+file://{rank.args['run']}", "overwrite").generation)


def furnish(run: Path) -> None:
    """Put somebody's files into the run, one of them in a step directory."""
    for name in FOREIGN:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"foreign {name}")


def assert_furnished(run: Path) -> None:
    """Every foreign file is there, byte for byte."""
    assert {n: (run / n).read_text() for n in FOREIGN} == {n: f"foreign {n}" for n in FOREIGN}


def all_rounds_are_calm(run: Path, rounds: int) -> None:
    """Overwrite a furnished run by RANKS processes, ``rounds`` times."""
    furnish(run)
    with launch(overwrite, RANKS, args={"run": str(run), "rounds": rounds}) as ranks:
        values = ranks.values(timeout_s=max(100.0, rounds * 2.0))
    assert all(value == values[0] for value in values), "ranks hold different generations"
    assert [number for number, _ in values[0]] == list(range(1, rounds + 1))
    assert_furnished(run)
    last = (rounds - 1) // 10 * 10
    steps = {p.name for p in run.iterdir() if p.name.startswith("global_step_")}
    # Overwritten checkpoints go after the next commit and not before.
    assert steps == {"global_step_3", f"global_step_{last}"}


def every_round_is_a_race(run: Path, rounds: int) -> None:
    """The unguarded pattern by as many processes, as often: the race must show."""
    with launch(unguarded, RANKS, args={"run": str(run), "rounds": rounds}) as ranks:
        values = ranks.values(timeout_s=max(60.0, rounds * 1.0))
    failed = sum((Counter(value) for value in values), Counter[str]())
    assert failed["FileNotFoundError"] + failed["FileExistsError"] > rounds, failed


def test_n2_eight_processes_overwrite_one_run_without_an_error(tmp_path: Path) -> None:
    """N2: no rank fails in any round, all report one generation, foreign files stay."""
    all_rounds_are_calm(tmp_path / "run", ROUNDS)


def test_n2_the_unguarded_pattern_fails_in_the_same_rounds(tmp_path: Path) -> None:
    """N2: rmtree and mkdir by every rank do fail, so the rounds above met the race."""
    every_round_is_a_race(tmp_path / "run", ROUNDS)


@pytest.mark.campaign
def test_campaign_n2_a_thousand_rounds(tmp_path: Path) -> None:
    """N2 as it is promised: 1000 rounds, and the unguarded pattern for as many."""
    all_rounds_are_calm(tmp_path / "run", 1000)
    every_round_is_a_race(tmp_path / "unguarded", 1000)


def assert_same_ends(values: list[Any]) -> None:
    """Every rank ended each round in the same way, in time, and the next claim was well."""
    for ends in zip(*values, strict=True):
        assert all(end["end"] == ends[0]["end"] for end in ends), ends
        assert all(end["then"] == ends[0]["then"] for end in ends), ends
        assert max(end["took_s"] for end in ends) < DEADLINE_S, ends


def test_n2_owner_that_fails_is_one_typed_error_on_every_rank(tmp_path: Path) -> None:
    """N2: EROFS or EIO in the owner only: the same type and message on all eight, within seconds."""
    run = tmp_path / "run"
    furnish(run)
    args = {"run": str(run), "faults": FAULTS}
    with launch(fail_in_the_owner, RANKS, args=args) as ranks:
        values = ranks.values()
    assert_same_ends(values)
    for fault, found in zip(FAULTS, values[3], strict=True):
        kind, text, failed = found["end"]
        assert kind == "CollectiveError", f"{fault}: {found}"
        assert failed == "[0]", f"{fault}: {found}"
        assert ("Read-only" if "EROFS" in fault else "Input/output") in text, f"{fault}: {found}"
        assert "rank 0" in text
        assert str(run) in text
    assert_furnished(run)


@pytest.mark.campaign
def test_campaign_n2_owner_fails_at_every_operation(tmp_path: Path) -> None:
    """N2: whichever of the owner's operations fails, all ranks agree on what came of it."""
    run = tmp_path / "run"
    furnish(run)
    faults = [f"fail=EIO:*:*:{k}" for k in range(1, 120)]
    with launch(fail_in_the_owner, RANKS, args={"run": str(run), "faults": faults}) as ranks:
        values = ranks.values(timeout_s=900)
    assert_same_ends(values)
    assert values[0][-1]["end"][0] == "nothing", "there are more operations than faults"
    assert sum(end["end"][0] == "CollectiveError" for end in values[0]) > 10
    assert_furnished(run)


def test_n2_owner_killed_inside_prepare_run_is_named_by_every_other_rank(tmp_path: Path) -> None:
    """N2: SIGKILL as the owner appends its fence; the seven others raise, naming rank 0."""

    def env(rank: int) -> dict[str, str]:
        return {"CKPTFS_TEST_FAULT": "kill-half:create:.ckptfs/log/*:1"} if rank == 0 else {}

    with launch(prepare_once, RANKS, args={"run": str(tmp_path / "run")}, env=env) as ranks:
        for result in ranks.results(ranks=range(1, RANKS)):
            assert result.error_type == "CollectiveError", result.log
            assert result.error
            assert list(result.error["data"]["failures"]) == ["0"]
        assert ranks.results(ranks=[0])[0].died
