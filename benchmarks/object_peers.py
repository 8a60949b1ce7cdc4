"""Who is compared over an object store: each saves a state below a URI and loads it again.

    ckptfs           ckptfs.save and ckptfs.load, digests compared, through one client library
    fsspec           torch's FsspecWriter and FsspecReader over s3fs
    s3torchconnector its S3StorageWriter and S3StorageReader (Amazon's CRT)
    raw              obstore.put and get_range of as many bytes: no checkpoint at all, the limit

All get the same parallelism, ``AT_ONCE`` requests, and the same part size where they take one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp

import ckptfs

AT_ONCE = 8
PART_BYTES = 16 << 20

State = dict[str, torch.Tensor]


class Peer(Protocol):
    """One way to put a state into a bucket. ``at`` is a URI that nobody used, s3://bucket/prefix."""

    name: str

    def save(self, state: State, at: str) -> None:
        """Durable when it returns."""

    def load(self, target: State, at: str) -> None:
        """Fill ``target`` with what ``save`` wrote."""


class Ckptfs:
    """This package, through the client library ``client``."""

    def __init__(self, client: str, options: Mapping[str, Any]) -> None:
        self.name = f"ckptfs ({client})"
        self._options = {**options, "client": client, "concurrency": AT_ONCE}

    def save(self, state: State, at: str) -> None:
        """A new run each time: log, domain and probe are made anew."""
        ckptfs.save(state, f"{at}/step_1", storage_options=self._options)

    def load(self, target: State, at: str) -> None:
        """With every block compared with its digest."""
        ckptfs.load(target, f"{at}/step_1", storage_options=self._options)


class Fsspec:
    """torch's own over s3fs. files: data files, each written by a thread of its own."""

    def __init__(self, options: Mapping[str, Any], files: int = 1) -> None:
        self.name = "FsspecWriter" if files == 1 else f"FsspecWriter, {files} files"
        self._files = files
        self._options = {**options, "max_concurrency": AT_ONCE}

    def save(self, state: State, at: str) -> None:
        """sync_files=False: with it every file costs an os.sync() of this whole machine."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(at, sync_files=False, thread_count=self._files, **self._options)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, target: State, at: str) -> None:
        """One file after another, item by item: it has no other way."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(target, storage_reader=FsspecReader(at, **self._options), no_dist=True)


class S3TorchConnector:
    """Amazon's, with its own defaults; path style, or it finds no bucket on 127.0.0.1."""

    name = "s3torchconnector"

    def __init__(self, options: Mapping[str, Any]) -> None:
        from s3torchconnector import S3ClientConfig

        # It takes credentials and endpoint from the environment only.
        os.environ["AWS_ACCESS_KEY_ID"] = options["key"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret"]
        os.environ["AWS_ENDPOINT_URL"] = options["endpoint_url"]
        self._region = options["client_kwargs"]["region_name"]
        self._config = S3ClientConfig(force_path_style=True, part_size=PART_BYTES)

    def save(self, state: State, at: str) -> None:
        """Its writer streams one multipart upload."""
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(
            region=self._region, path=f"{at}/", s3client_config=self._config, overwrite=True
        )
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, target: State, at: str) -> None:
        """Its reader for checkpoints: ranges of what is asked for."""
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(
            region=self._region,
            path=f"{at}/",
            s3client_config=self._config,
            reader_constructor=S3ReaderConstructor.dcp_optimized(),
        )
        dcp.load(target, storage_reader=reader, no_dist=True)


class Raw:
    """obstore by itself: the state's bytes as one object, and back, thrown away. No copy, no digest."""

    name = "obstore put / get_range"

    def __init__(self, options: Mapping[str, Any], bucket: str) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            bucket,
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            endpoint=options["endpoint_url"],
            region=options["client_kwargs"]["region_name"],
            client_options={"allow_http": True},
        )
        self._bucket = bucket
        self._bytes: dict[int, Any] = {}

    def save(self, state: State, at: str) -> None:
        """One multipart put."""
        import obstore

        data = self._data(sum(tensor.nbytes for tensor in state.values()))
        obstore.put(
            self._store,
            self._key(at),
            data,
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=AT_ONCE,
        )

    def load(self, target: State, at: str) -> None:
        """Ranges of a part each, so many at once; the answers are dropped."""
        import obstore

        size = sum(tensor.nbytes for tensor in target.values())

        def get(start: int) -> None:
            end = min(start + PART_BYTES, size)
            obstore.get_range(self._store, self._key(at), start=start, end=end)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(get, range(0, size, PART_BYTES)))

    def _data(self, size: int) -> Any:
        if size not in self._bytes:
            self._bytes = {size: torch.rand(size // 4).numpy().view("u1").data}
        return self._bytes[size]

    def _key(self, at: str) -> str:
        return f"{at.removeprefix(f's3://{self._bucket}/')}/raw"


def make_peers(names: list[str], options: Mapping[str, Any], bucket: str) -> list[Peer]:
    """The peers of these names. LookupError: no such peer."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    makers: dict[str, Callable[[], Peer]] = {
        "s3fs": lambda: Ckptfs("s3fs", options),
        "obstore": lambda: Ckptfs("obstore", options),
        "fsspec": lambda: Fsspec(options),
        "fsspec8": lambda: Fsspec(options, AT_ONCE),
        "s3torch": lambda: S3TorchConnector(options),
        "raw": lambda: Raw(options, bucket),
    }
    return [makers[name]() for name in names]
