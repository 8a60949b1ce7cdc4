"""Megatron-Core's dist_checkpointing (0.16.1): common.pt, shards and metadata.json are one commit.

    with DirectoryManager(uri, name=ITERATIONS, keep_latest=2, pointer=TRACKER) as manager:
        with manager.reading() as opened:          # None: nothing there yet
            state = dist_checkpointing.load(sharded(model), opened.path)
        with manager.writing(iteration) as path:
            dist_checkpointing.save(sharded(model), path, TorchShards())

    run/iter_0000100/          common.pt  metadata.json  .metadata  __0_0.distcp ...
    run/latest_checkpointed_iteration.txt      "100", moved after the commit

Megatron's own loader reads these files. On GPUs its default strategy can be used too.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from ckptfs.errors import CollectiveError, Failure
from ckptfs.manager.run_setup import Pointer

__all__ = ["ITERATIONS", "TRACKER", "TorchShards"]

ITERATIONS = "iter_{N:07}"
TRACKER = Pointer(
    "latest_checkpointed_iteration.txt", lambda name: str(int(name.removeprefix("iter_")))
)


class TorchShards(SaveShardedStrategy):
    """``sharded_strategy=`` of ``dist_checkpointing.save``: "torch_dist", written by DCP.

    The default strategy needs CUDA and forks writers, and if one rank fails, the others wait at a
    barrier. This one runs anywhere, in the process, and raises on all ranks.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: ShardedObjects are written with the tensors."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write the shards below a directory that all ranks of a node see. Collective."""
        # Private to Megatron, but the only translation that keeps the keys that its loader expects.
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        try:
            dcp.save(
                mcore_to_pyt_state_dict(renamed, is_loading=False),
                # One thread: with more, torch loses the errors of all but the first.
                storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        except CheckpointException as error:
            # torch's class is no Exception: an `except Exception` around a save would not catch it.
            raise _collective(error) from error


def _collective(error: CheckpointException) -> CollectiveError:
    failures = {
        rank: Failure(rank, "", _path_of(type(met)), str(met), getattr(met, "errno", None))
        for rank, (met, _) in error.failures.items()
    }
    texts = [f"rank {rank}: {failure.message}" for rank, failure in failures.items()]
    return CollectiveError(f"shards were not written: {'; '.join(texts)}", failures=failures)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
