"""torch_checkpointing 0.1.1, the real package: its files committed by a DirectoryManager."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.multiprocess.harness import Rank, launch

pytestmark = pytest.mark.integrations
pytest.importorskip("torch_checkpointing")


def manager(*, commits: bool) -> Any:
    """torch_checkpointing's manager. commits: its own commit, by a temporary directory and a rename."""
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    writer = (
        CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=2)
        if commits
        else CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    )
    config = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(writer_config=writer),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    return config.build()


class Unwritable:
    """What cannot be saved on the rank that has it."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def failure(call: Any) -> str:
    """The type of what a call raises, or "nothing"."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__
    return "nothing"


def one_rank_fails(rank: Rank) -> Any:
    """Stock: a save that rank 1 cannot write. Ours, the same; then what both have."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    rank.init_group()
    base = rank.args["base"]
    bad: dict[str, Any] = {"model": {"w": torch.ones(3)}, "extra": rank.number}
    if rank.number == 1:
        bad["extra"] = Unwritable()
    good: dict[str, Any] = {
        "model": {"w": torch.full((3,), 2.0 + rank.number)},
        "extra": rank.number,
    }
    stock = failure(lambda: manager(commits=True).save(f"{base}/stock/step_1", bad))
    dist.barrier()
    manager(commits=True).save(f"{base}/stock/step_1", {"model": good["model"]})
    dist.barrier()
    left = names_in(f"{base}/stock/step_1")
    files = manager(commits=False)
    with ckptfs.DirectoryManager(f"{base}/ours") as run:

        def save(state: dict[str, Any]) -> None:
            with run.writing(1) as path:
                files.save(path, state)

        ours = failure(lambda: save(bad))
        save({"model": good["model"]})
        with run.reading() as opened:
            assert opened is not None
            found = files.load(opened.path, into={"model": None})
    again = manager(commits=True).load(f"{base}/ours/step_1", into={"model": None})
    same = [torch.equal(one["model"]["w"], good["model"]["w"]) for one in (found, again)]
    return [stock, left, ours, names_in(f"{base}/ours/step_1"), same]


def names_in(path: str) -> list[str]:
    """The payload files of a directory."""
    return sorted(name for name in os.listdir(path) if name.endswith(".pt"))


def test_killed_mid_save_it_resumes_bit_identically(store: Store, mode: Mode, cell: Cell) -> None:
    """The example of the page, killed at the fourth commit."""
    with cell("torch_checkpointing", store, mode):
        kill = Kill("create", "*.ckptfs/log/*", nth=5, rank=0)
        story("torch_checkpointing", store, mode, kill=kill)


def test_a_failing_rank_is_told_to_all_at_once(tmp_path: Path) -> None:
    """Stock's bugs: the other rank waits for its barrier's time-out, and the next save commits what
    the failed one left. Ours: both get the error, nothing is left, and stock reads what was saved.
    """
    with launch(one_rank_fails, 2, args={"base": str(tmp_path)}) as ranks:
        values = ranks.values()
    models = ["model_0.pt", "model_1.pt"]
    assert [value[0] for value in values] == ["DistStoreError", "OSError"]  # of 600 s, by default
    assert [value[1] for value in values] == [["extra_0.pt", "extra_1.pt", *models]] * 2
    assert [value[2] for value in values] == ["CollectiveError", "OSError"]
    assert [value[3] for value in values] == [models] * 2
    assert [value[4] for value in values] == [[True, True]] * 2
