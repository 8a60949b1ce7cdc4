"""SIGKILL of every rank in turn at random moments of its life, on two nodes with a disk each.

    a life    claim, restore, compare bit for bit, save on and on      until the test kills one rank
    then      the three others raise an error that names it, and end
    next      the same four again: what they restore was acknowledged by the life before, or begun by it

Nothing is repaired or removed between two lives, so a hundred of them are one long history.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from tests.lab.nodes import Nodes
from tests.multiprocess.harness import Rank, Ranks, launch

RANKS = 4
NUMBERS = 50_000
TIMEOUT_S = 20.0
TOLD_WITHIN_S = 20.0  # promised: seconds, where a process of the victim's node lives
SAVES = 3  # of a life, before which the victim dies
SPREAD_S = 0.15  # about two saves


def state_of(rank: int, step: int) -> dict[str, Any]:
    """What one rank has after ``step`` steps, and what all have."""
    import torch

    made = torch.Generator().manual_seed(step * RANKS + rank)
    return {f"w{rank}": torch.rand(NUMBERS, generator=made), "lr": torch.full((5,), float(step))}


def live(rank: Rank) -> list[Any]:
    """One life; returns how it ended."""
    import torch

    import ckptfs

    rank.init_group()
    try:
        with ckptfs.CheckpointManager(
            rank.args["run"], keep_latest=2, mode=rank.args["mode"], timeout_s=TIMEOUT_S
        ) as manager:
            rank.tell("begin 0")
            state = state_of(rank.number, -1)
            restored = manager.restore(state)
            first = 0 if restored is None else int(restored.step or 0)
            if restored is not None:
                wanted = state_of(rank.number, first)
                assert all(torch.equal(state[key], wanted[key]) for key in wanted), "a mix"
            rank.tell("restored", step=first)
            for number in range(1, rank.args["saves"] + 1):
                rank.tell(f"begin {number}")
                rank.tell("begun", step=first + number)
                manager.save(first + number, state_of(rank.number, first + number))
                manager.wait()
                rank.tell("saved", step=first + number)
    except ckptfs.CkptfsError as error:
        return [type(error).__name__, str(error)]
    return ["done", ""]


def one_life(
    nodes: Nodes, chance: random.Random, victim: int | None, phase: int, *, at_least: int, run: str
) -> tuple[int, int]:
    """Four ranks live; one of them dies at a moment of chance. Returns the last step that one of them
    reported as saved, and the last that one of them began. phase: 0 from the start, else from that save on.
    at_least: what they must find.
    """
    mode, later_s = chance.choice(["sync", "async"]), 0.0
    args = {"run": run, "mode": mode, "saves": 2 if victim is None else 1000}
    with launch(
        live,
        RANKS,
        args=args,
        env={"CKPTFS_JOB_ID": "one"},
        warm=True,
        prefix=lambda rank: nodes[rank // 2].prefix,
    ) as ranks:
        if victim is not None:
            ranks.wait(f"begin {phase}", rank=victim, timeout_s=240)
            later_s = chance.uniform(0, SPREAD_S)
            time.sleep(later_s)  # the moment itself, nothing waits for it
            ranks.kill(victim)
        killed = time.monotonic()
        ends = ranks.results(timeout_s=90)
        took_s = time.monotonic() - killed
        story = f"victim {victim}, {mode}, phase {phase} + {later_s:.3f} s: {ends}"
        for end in ends:
            if end.rank == victim:
                assert end.died, story
            elif victim is None:
                assert end.value == ["done", ""], story
            else:
                assert end.error is None, story
                kind, text = end.value
                if kind == "DeadlineError":  # it died before it ever met the others: timeout_s
                    assert f"ranks [{victim}] of {RANKS} did not open" in text, story
                    continue
                assert kind in ("CollectiveError", "CommitInDoubtError"), story
                assert f"rank {victim} " in text, story
                assert took_s < TOLD_WITHIN_S, story
        found = {data["step"] for rank in range(RANKS) for data in ranks.told("restored", rank)}
        assert all(step >= at_least for step in found), f"{at_least} is lost, {found}: {story}"
        assert len(found) <= 1, f"ranks went on from different steps: {story}"
        saved, begun = (_last(ranks, event) for event in ("saved", "begun"))
    return max(saved, at_least, *found), begun


def _last(ranks: Ranks, event: str) -> int:
    steps = [data["step"] for rank in range(RANKS) for data in ranks.told(event, rank)]
    return max(steps, default=0)


def many_lives(nodes: Nodes, kills_of_each: int, seed: int, *, first_phase: int, run: str) -> None:
    """Kill each rank so often, in turn; then live in peace, and look at both disks."""
    chance = random.Random(seed)
    saved, begun = 0, 0
    for number in range(kills_of_each * RANKS):
        before, began = saved, begun
        phase = chance.randint(first_phase, SAVES)
        saved, begun = one_life(nodes, chance, number % RANKS, phase, at_least=saved, run=run)
        assert saved <= max(begun, began, before), f"seed {seed}: nobody began step {saved}"
    saved, _ = one_life(nodes, chance, None, 0, at_least=saved, run=run)
    for node in [nodes[0], nodes[1]]:
        there = node.run(["ls", run, f"{run}/.ckptfs/attempts"]).split()
        steps = [f"step_{step}" for step in (saved - 1, saved)]
        assert sorted(there) == sorted([f"{run}:", *steps, f"{run}/.ckptfs/attempts:"]), there


@pytest.mark.timeout(600)
def test_each_rank_is_killed_at_a_random_moment(trainers: Nodes) -> None:
    """Whichever rank dies, and when: the others get an error, the next start finds the old or the new state whole."""
    many_lives(trainers, 1, random.randrange(1 << 32), first_phase=1, run="/scratch/few")


@pytest.mark.campaign
def test_campaign_each_rank_is_killed_at_a_hundred_moments(trainers: Nodes) -> None:
    """The same a hundred times for each rank; CKPTFS_KILLS says how often, CKPTFS_KILLS_SEED repeats."""
    seed = int(os.environ.get("CKPTFS_KILLS_SEED", random.randrange(1 << 32)))
    print(f"CKPTFS_KILLS_SEED={seed}")
    kills = int(os.environ.get("CKPTFS_KILLS", "100"))
    many_lives(trainers, kills, seed, first_phase=0, run="/scratch/many")
