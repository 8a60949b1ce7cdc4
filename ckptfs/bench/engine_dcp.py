"""torch.distributed.checkpoint with its own writers, and with s3torchconnector's."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as dcp

from ckptfs import _torch
from ckptfs.bench.engines import Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.places import fsspec_options, fsspec_uri
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State
from ckptfs.storage.clients.choose import PROTOCOLS

__all__ = ["FileSystem", "Fsspec", "S3TorchConnector", "open_dcp"]

_UNVERIFIED = "nothing"


def open_dcp(setting: Setting, variant: str | None = None) -> Driver:
    """Return the writer that torch has for the target.

    Args:
        setting: What it works with.
        variant: "t2" and "t4" are its threads, "fsspec" is FsspecWriter on a directory; None: the default.
    """
    if variant == "fsspec" or not setting.home.place.is_local:
        return Fsspec(setting, variant)
    return FileSystem(setting, int(variant[1:]) if variant else 1)


class FileSystem(Driver):
    """FileSystemWriter and FileSystemReader with torch's defaults, but for the number of threads.

    Args:
        setting: What it works with.
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
        setting: What it works with.
        variant: Shown in the engine's name; None: nothing.

    Attributes:
        options: What fsspec's filesystem gets.
    """

    def __init__(self, setting: Setting, variant: str | None = None) -> None:
        super().__init__(setting)
        self._name = f"dcp:{variant}" if variant else "dcp"
        self.options = fsspec_options(self.home)
        # On an object store every file would cost an os.sync() of this whole machine, and gain nothing.
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
        told = {
            "AWS_ACCESS_KEY_ID": options.get("key"),
            "AWS_SECRET_ACCESS_KEY": options.get("secret"),
            "AWS_SESSION_TOKEN": options.get("token"),
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_PROFILE": options.get("profile"),
        }
        # It takes credentials and endpoint from the environment only; this process is ours.
        os.environ.update({name: str(value) for name, value in told.items() if value})
        self._region = client.get("region_name") or os.environ.get("AWS_REGION") or "us-east-1"
        # Path style, or it finds no bucket on a server that was named by its address.
        self._config = S3ClientConfig(force_path_style=endpoint is not None)

    def about(self) -> Engine:
        told = version_text("s3torchconnector")
        return Engine(
            "s3torchconnector", f"{told} (S3StorageWriter)", "every object's answer", _UNVERIFIED
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
