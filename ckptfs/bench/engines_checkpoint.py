"""The engines that make checkpoints: ckptfs, torch's own writers, and those of other libraries.

    Ckptfs               ckptfs.save, ckptfs.load: a committed, verified checkpoint in a run of its own
    FileSystem, Fsspec   torch.distributed.checkpoint with its own writers
    S3TorchConnector     the same with s3torchconnector's writer and reader
    TorchSave, Safetensors   one file per rank, written whole: no commit, no coordination of ranks
    TorchSnapshot, TorchCheckpointing   on a directory

If the target is not a directory, torch.save writes into fsspec's file. safetensors can only write to
paths, so it writes a local file, which is then sent; its load fetches the file first.

torchsnapshot and torch_checkpointing do not make files survive a power cut by themselves. If saves have
to be durable, every file and directory is fsynced after the call, inside the measured time, as a job
would have to do.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import ckptfs
from ckptfs import _torch
from ckptfs.bench.engines import OBJECT_STORES, Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.results import Engine
from ckptfs.bench.target import fsspec_options, fsspec_uri
from ckptfs.bench.workloads import State, local_of, locals_of
from ckptfs.storage.clients.choose import PROTOCOLS

__all__ = [
    "Ckptfs",
    "FileSystem",
    "Fsspec",
    "S3TorchConnector",
    "Safetensors",
    "TorchCheckpointing",
    "TorchSave",
    "TorchSnapshot",
    "open_dcp",
]


class _Files(Driver):
    """An engine that writes one file per rank below the attempt."""

    ending = ""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.filesystem: Any = None
        if not self.home.place.is_local:
            import fsspec

            # Not from fsspec's cache of instances, which could keep the options of another target.
            options = fsspec_options(self.home) | {"skip_instance_cache": True}
            self.filesystem = fsspec.filesystem(_fsspec_name(self.home.place.protocol), **options)

    @property
    def durable(self) -> str:
        """What a save promises, in words."""
        if self.filesystem is not None:
            return "every object's answer"
        return "file and directory fsynced" if self.setting.durable else "no fsync"

    def _remote(self, at: Attempt) -> str:
        uri = fsspec_uri(at.place / self._name())
        found: str = self.filesystem._strip_protocol(uri)  # noqa: SLF001 - its public spelling
        return found

    def _local(self, at: Attempt) -> str:
        return os.path.join(at.path, self._name())

    def _name(self) -> str:
        return f"rank_{self.setting.group.rank}{self.ending}"

    def _settle(self, path: str) -> None:
        if self.setting.durable:
            fsync(path)
            fsync(os.path.dirname(path))


class TorchSave(_Files):
    """torch.save; torch.load and a copy into the tensors."""

    ending = ".pt"

    def about(self) -> Engine:
        return Engine("torch.save", version_text("torch"), self.durable, "nothing")

    def save(self, state: State, at: Attempt) -> None:
        if self.filesystem is not None:
            with self.filesystem.open(self._remote(at), "wb") as file:
                torch.save(locals_of(state), file)
            return
        path = self._local(at)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(locals_of(state), path)
        self._settle(path)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        if self.filesystem is not None:
            with self.filesystem.open(self._remote(at), "rb") as file:
                found = torch.load(file, map_location="cpu", weights_only=True)
        else:
            found = torch.load(self._local(at), map_location="cpu", weights_only=True)
        copy_into(target, found)


class Safetensors(_Files):
    """save_file; load_file and a copy into the tensors."""

    ending = ".safetensors"

    def about(self) -> Engine:
        return Engine("safetensors", version_text("safetensors"), self.durable, "nothing")

    def save(self, state: State, at: Attempt) -> None:
        from safetensors.torch import save_file

        if self.filesystem is None:
            path = self._local(at)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            save_file(locals_of(state), path)
            self._settle(path)
            return
        with tempfile.TemporaryDirectory(prefix="ckptfs-bench-") as directory:
            path = os.path.join(directory, self._name())
            save_file(locals_of(state), path)
            self.filesystem.put_file(path, self._remote(at))

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        from safetensors.torch import load_file

        if self.filesystem is None:
            copy_into(target, load_file(self._local(at)))
            return
        with tempfile.TemporaryDirectory(prefix="ckptfs-bench-") as directory:
            path = os.path.join(directory, self._name())
            self.filesystem.get_file(self._remote(at), path)
            copy_into(target, load_file(path))


def copy_into(target: State, found: Mapping[str, Tensor]) -> None:
    """Copy every tensor of ``found`` into the tensor of the same name in ``target``."""
    for name, tensor in target.items():
        local_of(tensor).copy_(found[name])


def fsync(path: str) -> None:
    """Make a file's bytes, or a directory's names, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsspec_name(protocol: str) -> str:
    return "s3" if protocol == "s3a" else protocol


# -- ckptfs ----------------------------------------------------------------------------------------


class Ckptfs(Driver):
    """``ckptfs.save`` and ``ckptfs.load``.

    Args:
        setting: The target, the ranks and the durability.
        client: The name of the library for an object store; None: the default.

    Attributes:
        options: The storage options.
    """

    def __init__(self, setting: Setting, client: str | None = None) -> None:
        super().__init__(setting)
        self._client = client
        self.options: dict[str, Any] = dict(self.home.asked.storage_options)
        if client is not None:
            self.options["client"] = client

    def about(self) -> Engine:
        stored = self.home.place.protocol in OBJECT_STORES
        library = self._library() if stored else None
        return Engine(
            f"ckptfs:{self._client}" if self._client else "ckptfs",
            version_text("ckptfs", *([library] if library else [])),
            "always: every object's answer, then the commit"
            if stored
            else "always: files and directories fsynced, then the commit",
            "every block's digest",
        )

    def save(self, state: State, at: Attempt) -> None:
        # A new run each time: making its log and its domain, and probing, is part of the measured time.
        ckptfs.save(state, at.checkpoint(), storage_options=self.options)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        ckptfs.load(dict(target), at.checkpoint(), storage_options=self.options)

    def _library(self) -> str | None:
        path: str = getattr(self.home.storage, "data_path", "")  # "obstore, because ..."
        return (self._client or path.partition(",")[0]) if path else None


# -- torch.distributed.checkpoint ------------------------------------------------------------------


_UNVERIFIED = "nothing"


def open_dcp(setting: Setting, variant: str | None = None) -> Driver:
    """Return the driver with torch's own writer for the target.

    Args:
        setting: The target, the ranks and the durability.
        variant: "t2" or "t4" for two or four threads, "fsspec" for FsspecWriter on a directory; None: the
            default.
    """
    if variant == "fsspec" or not setting.home.place.is_local:
        return Fsspec(setting, variant)
    return FileSystem(setting, int(variant[1:]) if variant else 1)


class FileSystem(Driver):
    """FileSystemWriter and FileSystemReader with torch's defaults, except for the threads.

    Args:
        setting: The target, the ranks and the durability.
        threads: How many threads write.
    """

    def __init__(self, setting: Setting, threads: int = 1) -> None:
        super().__init__(setting)
        self._threads = threads

    def about(self) -> Engine:
        return Engine(
            "dcp" if self._threads == 1 else f"dcp:t{self._threads}",
            f"{version_text('torch')} (FileSystemWriter)",
            "data files fsynced, not their directory" if self.setting.durable else "no fsync",
            _UNVERIFIED,
        )

    def save(self, state: State, at: Attempt) -> None:
        writer = dcp.FileSystemWriter(
            at.path, sync_files=self.setting.durable, thread_count=self._threads
        )
        dcp.save(state, storage_writer=writer)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        dcp.load(dict(target), storage_reader=dcp.FileSystemReader(at.path))


class Fsspec(Driver):
    """FsspecWriter and FsspecReader over the library that fsspec has for the protocol.

    Args:
        setting: The target, the ranks and the durability.
        variant: Shown in the engine's name; None: nothing.

    Attributes:
        options: The options for fsspec's filesystem.
    """

    def __init__(self, setting: Setting, variant: str | None = None) -> None:
        super().__init__(setting)
        self._name = f"dcp:{variant}" if variant else "dcp"
        self.options = fsspec_options(self.home)
        # On an object store each file would cost an os.sync() of the whole machine, for no benefit.
        self._syncs = self.home.place.is_local and setting.durable

    def about(self) -> Engine:
        known = PROTOCOLS.get(self.home.place.protocol)
        library = known.usual if known else "fsspec"
        stored = "data files fsynced, not their directory" if self._syncs else "no fsync"
        return Engine(
            self._name,
            f"{version_text('torch', library)} (FsspecWriter)",
            stored if self.home.place.is_local else "every object's answer",
            _UNVERIFIED,
        )

    def save(self, state: State, at: Attempt) -> None:
        writer = _torch.fsspec_writer(fsspec_uri(at.place), sync_files=self._syncs, **self.options)
        dcp.save(state, storage_writer=writer)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        reader = _torch.fsspec_reader(fsspec_uri(at.place), **self.options)
        dcp.load(dict(target), storage_reader=reader)


class S3TorchConnector(Driver):
    """Amazon's S3StorageWriter and S3StorageReader, with their defaults, for ``setting``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from s3torchconnector import S3ClientConfig

        options = fsspec_options(self.home)
        client: dict[str, Any] = dict(options.get("client_kwargs") or {})
        endpoint = options.get("endpoint_url") or client.get("endpoint_url")
        environment = {
            "AWS_ACCESS_KEY_ID": options.get("key"),
            "AWS_SECRET_ACCESS_KEY": options.get("secret"),
            "AWS_SESSION_TOKEN": options.get("token"),
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_PROFILE": options.get("profile"),
        }
        # It takes credentials and endpoint only from the environment; this process belongs to us.
        os.environ.update({name: str(value) for name, value in environment.items() if value})
        self._region = client.get("region_name") or os.environ.get("AWS_REGION") or "us-east-1"
        # Path style: otherwise it finds no bucket on a server that is given by its address.
        self._config = S3ClientConfig(force_path_style=endpoint is not None)

    def about(self) -> Engine:
        version = version_text("s3torchconnector")
        return Engine(
            "s3torchconnector", f"{version} (S3StorageWriter)", "every object's answer", _UNVERIFIED
        )

    def save(self, state: State, at: Attempt) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(
            region=self._region,
            path=f"{_s3(at)}/",
            s3client_config=self._config,
            overwrite=True,
        )
        dcp.save(state, storage_writer=writer)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(
            region=self._region,
            path=f"{_s3(at)}/",
            s3client_config=self._config,
            reader_constructor=S3ReaderConstructor.dcp_optimized(),
        )
        dcp.load(dict(target), storage_reader=reader)


def _s3(at: Attempt) -> str:
    return f"s3://{at.place.authority}{at.place.path}"


# -- others ----------------------------------------------------------------------------------------


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

        # It restores in place, into the tensors of the dictionary.
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
        # It loads in place, into the existing tensors.
        self._manager.load(at.path, {"state": dict(target)})
