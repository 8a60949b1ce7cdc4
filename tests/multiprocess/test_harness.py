"""The harness itself: what the other multi-process tests rely on."""

from __future__ import annotations

import time

import pytest

from tests.multiprocess.harness import Rank, launch, torchrun


def add_up(rank: Rank) -> float:
    """All ranks reduce their numbers over gloo."""
    import torch
    import torch.distributed as dist

    rank.init_group()
    total = torch.tensor([float(rank.number)])
    dist.all_reduce(total)
    return float(total)


def wait_to_be_killed(rank: Rank) -> str:
    """Announce, then wait for a release that a killed rank never sees."""
    rank.tell("ready", number=rank.number)
    return str(rank.hold("go")["word"])


def fail(rank: Rank) -> None:
    """Raise."""
    raise ValueError(f"rank {rank.number} fails")


def env_rank(rank: Rank) -> int:
    """Under torchrun the group comes from the environment."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size * 10 + rank.number


@pytest.mark.parametrize("store", ["test", "rank0", "apart"])
def test_ranks_meet_over_the_store_wherever_it_is_hosted(store: str) -> None:
    """A gloo group forms over the store of the test, of rank 0 and of a process apart."""
    with launch(add_up, 3, store=store) as ranks:  # type: ignore[arg-type]
        assert ranks.values() == [3.0, 3.0, 3.0]


def test_killed_rank_is_seen_as_died_and_others_are_released() -> None:
    """kill() ends one rank only; the others continue when released."""
    with launch(wait_to_be_killed, 3, store="none") as ranks:
        assert ranks.wait("ready", rank=1)["number"] == 1
        ranks.kill(1)
        ranks.release("go", word="on")
        results = ranks.results()
    assert [(r.died, r.value) for r in results] == [(False, "on"), (True, None), (False, "on")]


def test_errors_come_back_as_data() -> None:
    """An exception in a body is reported by class path and text."""
    with launch(fail, 1, store="none") as ranks:
        (result,) = ranks.results()
    assert result.error_type == "ValueError"
    assert result.error
    assert "rank 0 fails" in result.error["message"]


def test_leaving_the_block_kills_ranks_that_never_end() -> None:
    """No rank outlives its launch."""
    with launch(wait_to_be_killed, 1, store="none", warm=False) as ranks:
        ranks.wait("ready")
        process = ranks._processes[0]
    with process.news:
        assert process.news.wait_for(lambda: process.ended, 60)


def test_deadline_is_hard() -> None:
    """A rank that never answers costs timeout_s, and the logs are shown."""
    with launch(wait_to_be_killed, 1, store="none") as ranks:
        begun = time.monotonic()
        with pytest.raises(AssertionError, match="not within"):
            ranks.results(timeout_s=0.5)
        assert time.monotonic() - begun < 60


def test_bodies_run_under_torchrun_with_two_agents() -> None:
    """The same bodies run under the real launcher, two nodes of two ranks."""
    results = torchrun(env_rank, 2, nnodes=2, warm=True)
    assert [r.value for r in results] == [40, 41, 42, 43], results[0].log[-3000:]


def test_a_body_that_fails_under_torchrun_ends_the_job_with_its_error() -> None:
    """Also where agents and workers are forked: no one waits for what a dead worker returns."""
    results = torchrun(fail, 1, nnodes=1, warm=True)
    assert [r.error_type for r in results] == ["ValueError"], results[0].log[-3000:]
    assert "rank 0 fails" in str(results[0].error)
