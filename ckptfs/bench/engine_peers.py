"""torchsnapshot and torch_checkpointing on a directory: what others offer instead of DCP.

Neither makes files survive a power cut by itself: where saves are to be durable, every file and
directory is fsynced after the call, inside the measured time, as a job would have to do.
"""

from __future__ import annotations

import os

from ckptfs.bench.engine_files import fsync
from ckptfs.bench.engines import Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State

__all__ = ["TorchCheckpointing", "TorchSnapshot"]


class _Settled(Driver):
    name = ""

    def about(self) -> Engine:
        return Engine(
            self.name,
            version_text(self.name),
            "files and directories fsynced after it" if self.setting.durable else "no fsync",
            "nothing",
        )

    def _settle(self, at: Attempt) -> None:
        if self.setting.durable and self.setting.group.rank == 0:
            for directory, _, files in os.walk(at.path):
                for path in (*(os.path.join(directory, name) for name in files), directory):
                    fsync(path)


class TorchSnapshot(_Settled):
    """Snapshot.take and Snapshot.restore."""

    name = "torchsnapshot"

    def save(self, state: State, at: Attempt) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(at.path, {"state": StateDict(**state)})
        self._settle(at)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        from torchsnapshot import Snapshot, StateDict

        # In place: what is restored is what the dictionary holds.
        Snapshot(at.path).restore({"state": StateDict(**target)})


class TorchCheckpointing(_Settled):
    """CheckpointManager with synchronous saves, for ``setting``."""

    name = "torch_checkpointing"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its O_DIRECT, on by default, writes lengths that ext4 and xfs refuse.
        self._manager = CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()

    def save(self, state: State, at: Attempt) -> None:
        self._manager.save(at.path, {"state": dict(state)})
        self._settle(at)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        # In place: tensors that are there are filled.
        self._manager.load(at.path, {"state": dict(target)})
