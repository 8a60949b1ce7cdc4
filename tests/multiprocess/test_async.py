"""ckptfs.async_save by four real ranks: rows 11 and 27 of the needs, and N4's asynchronous part.

away       the main threads train, change tensors and talk over their group while threads save
together   what one rank meets, while staging or while writing, is the same error on all
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from ckptfs.uri import Uri
from tests.multiprocess.harness import Rank, launch

ROWS = 64
OWN = ["own.*"]


# -- inside the ranks ----------------------------------------------------------------------------


def build(rank: Rank, value: float) -> dict[str, Any]:
    """Rows of each rank, two names for one replicated tensor, a leaf of all and one of each."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", list(range(rank.size)))
    local = torch.full((ROWS, 1024), value + rank.number)
    bias = torch.full((100_000,), value)
    return {
        "w": DTensor.from_local(local, mesh, [Shard(0)]),
        "bias": bias,
        "tied": bias,
        "step": int(value),
        "own": {"seed": torch.tensor([value * 10 + rank.number])},
    }


def values(state: dict[str, Any]) -> list[list[float]]:
    """Every value that occurs, by key."""
    tensors = [state["w"].to_local(), state["bias"], state["tied"], state["own"]["seed"]]
    return [*(t.unique().tolist() for t in tensors), [float(state["step"])]]


def loaded(rank: Rank, uri: str) -> list[list[float]]:
    """What the checkpoint holds, by this rank's shards."""
    import ckptfs

    state = build(rank, -1.0)
    assert ckptfs.load(state, uri).verified
    return values(state)


def trains_while_saving(rank: Rank) -> dict[str, Any]:
    """Three saves, each with another bound on each rank; nothing waits for them but the end."""
    import torch
    import torch.distributed as dist

    import ckptfs

    rank.init_group()
    state = build(rank, 0.0)

    def spoil() -> None:
        for _ in range(20):
            state["w"].to_local().add_(1.0)

    sums, pending, expected = [], [], []
    for number, bound in enumerate(rank.args["bounds"][rank.number]):
        for key, tensor in build(rank, float(number + 1)).items():
            state[key] = tensor
        expected.append(values(state))
        save = ckptfs.async_save(
            state,
            f"{rank.args['run']}/step_{number}",
            per_rank=OWN,
            host_memory_bytes=bound,
        )
        other = threading.Thread(target=spoil)
        other.start()
        for tensor in (state["bias"], state["own"]["seed"]):
            tensor.fill_(-9.0)
        # Row 11: the group is the main thread's alone, whatever the other thread does.
        total = torch.ones(1)
        for _ in range(20):
            dist.all_reduce(total)
            total /= rank.size
        sums.append(total.item())
        other.join()
        pending.append(save)
    results = [p.result(60.0) for p in pending]
    return {
        "sums": sums,
        "staged": [p.staged.done() and p.staged.exception() is None for p in pending],
        "durable": [p.durable.result(0).size_bytes > 0 for p in pending],
        "fractions": [p.progress().fraction for p in pending],
        "same": [loaded(rank, r.uri) for r in results] == expected,
        "ids": [r.save_id for r in results],
    }


def one_writer_raises(rank: Rank) -> dict[str, Any]:
    """Three saves in a held run; in the second one a writer thread of rank 2 raises."""
    import ckptfs
    from ckptfs.errors import CollectiveError

    rank.init_group()
    at = rank.args["run"]
    with ckptfs.prepare_run(at) as run:
        ckptfs.async_save(build(rank, 1.0), f"{at}/step_1", run=run, per_rank=OWN).result(60.0)
        failing = ckptfs.async_save(
            build(rank, 2.0), f"{at}/step_2", run=run, per_rank=OWN, threads=2
        )
        error = failing.committed.exception(60.0)
        assert isinstance(error, CollectiveError)
        latest = ckptfs.latest(at)
        assert latest is not None
        intact = loaded(rank, f"{at}/step_1") == values(build(rank, 1.0))
        ckptfs.async_save(build(rank, 3.0), f"{at}/step_3", run=run, per_rank=OWN).result(60.0)
    told = traceback.format_exception(error)
    return {
        "staged": failing.staged.exception() is None,
        "failed": {str(n): [f.errno, f.type] for n, f in error.failures.items()},
        "where": sum("in close" in line and "ckptfs/testing/fault" in line for line in told) > 0,
        "phase": failing.progress().phase.value,
        "latest": latest.uri.name,
        "intact": intact,
        "next": [c.uri.name for c in ckptfs.list_checkpoints(at)],
        "left": os.listdir(f"{rank.args['disk']}/.ckptfs/attempts"),
    }


def one_cannot_stage(rank: Rank) -> list[Any]:
    """Rank 1 has a leaf that cannot be saved, then no memory to copy into; the others wait for it."""
    import resource

    import torch

    import ckptfs
    from ckptfs.errors import CollectiveError

    rank.init_group()
    at = rank.args["run"]
    found: list[Any] = []
    with ckptfs.prepare_run(at) as run:
        state = build(rank, 1.0)
        if rank.number == 1:
            state["own"]["big"] = torch.zeros(256 << 20, dtype=torch.uint8)
        no_leaf = state | ({"own": {"f": lambda: None}} if rank.number == 1 else {})
        for number, wrong in enumerate((no_leaf, state)):
            limits = resource.getrlimit(resource.RLIMIT_AS)
            if rank.number == 1 and wrong is state:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                resource.setrlimit(
                    resource.RLIMIT_AS, (pages * resource.getpagesize() + (128 << 20), limits[1])
                )
            pending = ckptfs.async_save(wrong, f"{at}/step_{number}", run=run, per_rank=OWN)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            error = pending.committed.exception(60.0)
            assert isinstance(error, CollectiveError)
            mine = type(pending.staged.exception()).__name__
            failures = {n: [f.type, f.errno] for n, f in error.failures.items()}
            found.append([mine, failures])
        state["own"].pop("big", None)
        ckptfs.async_save(state, f"{at}/step_9", run=run, per_rank=OWN).result(60.0)
    told = []
    for wrong, name in (
        (state | {"step": rank.number}, "leaf"),
        (state | {"bias": state["bias"] + rank.number}, "tensor"),
        (state, str(rank.number)),
    ):
        pending = ckptfs.async_save(wrong, f"{at}/step_{name}", per_rank=OWN)
        told.append(str(pending.committed.exception(60.0)))
    found.append(["'step': ranks" in told[0], "'bias': ranks" in told[1], "given diff" in told[2]])
    return [*found, [c.uri.name for c in ckptfs.list_checkpoints(at)]]


def takes_turns(rank: Rank) -> list[list[float]]:
    """Two saves; when this rank opened and closed its data files, on the clock of the host."""
    import ckptfs
    from ckptfs.commit.save.spec import SaveSpec
    from ckptfs.commit.session import Place, start_session
    from ckptfs.control.control import open_control
    from ckptfs.dcp.saving import WriteOptions, save_at
    from ckptfs.storage.local import LocalStorage
    from ckptfs.storage.local.writers import LocalWriter

    spans: list[list[float]] = []

    class Recorded(LocalStorage):
        def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> LocalWriter:
            if key.endswith(".distcp"):
                spans.append([time.monotonic()])
                rank.tell(f"writing-{len(spans)}")
                rank.hold("go")
            return super().open_write(key, size_hint_bytes=size_hint_bytes)

        def open_parallel(self, key: str, **_: Any) -> None:
            """Written in order: ``open_write`` is where the test looks."""

    rank.init_group()
    uri = Uri.parse(rank.args["run"])
    with open_control() as control:
        storage = Recorded(uri)
        storage.make_dir("")
        session = start_session(control, storage, Place(), write=True)
        for number in (1, 2):
            name = f"step_{number}"
            save_at(
                build(rank, 1.0),
                session,
                uri / name,
                SaveSpec(name, number, per_rank=tuple(OWN)),
                WriteOptions(writers_per_node=rank.args["limit"]),
                tell=lambda _: spans[-1].append(time.monotonic()),
            )
    assert len(ckptfs.list_checkpoints(rank.args["run"])) == 2
    return spans


# -- the tests -----------------------------------------------------------------------------------


def test_row11_row27_training_goes_on_while_threads_save(tmp_path: Path) -> None:
    """Tensors change, by other threads too, and the main threads use their group while a background
    thread saves: every checkpoint has the values of its call, with copies, waves, or both at once.
    """
    bounds = [[0, 300_000, None], [None, 0, None], [300_000, None, None], [0, 500_000, None]]
    with launch(trains_while_saving, 4, args={"run": str(tmp_path / "run"), "bounds": bounds}) as r:
        found = r.values()
    for value in found:
        assert value["sums"] == [1.0] * 3
        assert value["staged"] == [True] * 3
        assert value["durable"] == [True] * 3
        assert value["fractions"] == [1.0] * 3
        assert value["same"]
        assert value["ids"] == found[0]["ids"]


def test_n4_a_writer_thread_that_raises_on_one_of_four_ranks_is_seen_on_all_four(
    tmp_path: Path,
) -> None:
    """All ranks hold the same error with the thread's traceback; nothing is deleted, latest is where
    it was, and the next save works.
    """
    disk = tmp_path / "run"
    fault = "fail=EIO:close:*__2_0.distcp:2"
    with launch(
        one_writer_raises,
        4,
        args={"run": f"faults+file://{disk}", "disk": str(disk)},
        env=lambda number: {"CKPTFS_TEST_FAULT": fault} if number == 2 else {},
    ) as ranks:
        results = ranks.results()
    for result in results:
        assert result.value == {
            "staged": True,
            "failed": {"2": [errno.EIO, "ckptfs.errors.StorageError"]},
            "where": True,
            "phase": "failed",
            "latest": "step_1",
            "intact": True,
            "next": ["step_1", "step_3"],
            "left": [],
        }, result.error or result.value
        assert "step_2 failed: " in result.log  # no call has to ask


def test_a_rank_that_cannot_stage_fails_the_save_on_all(tmp_path: Path) -> None:
    """A leaf that cannot be saved, and no host memory, on one rank: its call returns like the others',
    with its own error in ``staged`` and the common one in ``committed``; the next save works. Ranks
    that disagree, on a leaf, a tensor or the URI, get the error of ``save``.
    """
    with launch(one_cannot_stage, 3, args={"run": str(tmp_path / "run")}) as ranks:
        found = ranks.values()
    for number, (leaf, memory, disagreed, names) in enumerate(found):
        there = number == 1
        assert leaf == [
            "StateError" if there else "NoneType",
            {"1": ["ckptfs.errors.StateError", None]},
        ]
        assert memory == [
            "OSError" if there else "NoneType",
            {"1": ["builtins.OSError", errno.ENOMEM]},
        ]
        assert disagreed == [True, True, True]
        assert names == ["step_9"]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_than_so_many_ranks_of_a_node_write_at_once(tmp_path: Path, limit: int) -> None:
    """Four ranks, one node: by their own records never more than the limit have a file open, and all
    of them get their turn.
    """
    with launch(takes_turns, 4, args={"run": str(tmp_path / "run"), "limit": limit}) as ranks:
        released: set[tuple[int, int]] = set()

        def waiting() -> list[tuple[int, int]]:
            told = itertools.product(range(4), (1, 2))
            return [
                (rank, nth)
                for rank, nth in told
                if (rank, nth) not in released
                and ranks._processes[rank].find(f"writing-{nth}") is not None
            ]

        while len(released) < 8:
            # As many as may write have a file open before the first of them may close it.
            many = min(limit, 4 - len(released) % 4)
            ranks._until("writers", 120.0, lambda: len(waiting()) >= many)  # noqa: B023 - at once
            rank, nth = waiting()[0]
            released.add((rank, nth))
            ranks.release("go", rank=rank)
        spans = [span for found in ranks.values() for span in found]
    begins = [begin for begin, _ in spans]
    assert max(sum(a <= at < b for a, b in spans) for at in begins) == limit
