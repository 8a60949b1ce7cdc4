"""What is in a bucket after a save: whole, readable by us through any client, by stock, by anybody."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from tests.lab import raw
from tests.lab.server import Server

CLIENTS = ("s3fs", "obstore")
MIB = 1 << 20


def state(*, fill: bool = True) -> dict[str, Any]:
    """Tensors of several parts, of a few blocks, many small ones, and an object."""
    make = torch.rand if fill else torch.zeros
    torch.manual_seed(7)
    found: dict[str, Any] = {f"small.{n}": make(500 + n) for n in range(200)}
    found |= {"large": make(9 * MIB), "middle": make(1000, 1500)}
    return found | {"step": 12 if fill else 0}


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Bit for bit."""
    return got.keys() == wanted.keys() and all(
        torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
        for key, value in wanted.items()
    )


@pytest.mark.parametrize("writer", CLIENTS)
def test_what_one_client_wrote_every_reader_reads(radosgw: Server, writer: str) -> None:
    """36 MiB in parts, through either client: read back bit-exact by both and, over s3fs, by torch's
    FsspecReader, which knows nothing of us.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    at = f"{radosgw.fresh('data')}/step_12"
    ckptfs.save(state(), at, storage_options=radosgw.storage_options(client=writer))
    for client in CLIENTS:
        got = state(fill=False)
        result = ckptfs.load(got, at, storage_options=radosgw.storage_options(client=client))
        assert same(got, state()), client
        assert result.verified
    got = state(fill=False)
    dcp.load(got, storage_reader=FsspecReader(at, **radosgw.storage_options()), no_dist=True)
    assert same(got, state())


def test_what_stock_wrote_is_read_in_parallel_too(radosgw: Server) -> None:
    """A checkpoint of FsspecWriter over s3fs, without digests: loaded whole, unverified and said so."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    at = f"{radosgw.fresh('stock')}/step_12"
    options = radosgw.storage_options()
    writer = FsspecWriter(at, sync_files=False, thread_count=3, **options)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    got = state(fill=False)
    result = ckptfs.load(got, at, storage_options=options)
    assert same(got, state())
    assert not result.verified


@pytest.mark.parametrize("client", CLIENTS)
def test_a_hugging_face_prefix_has_plain_names_and_plain_bytes(
    radosgw: Server, client: str
) -> None:
    """Files written into checkpoint_dir are objects of the same names: a plain GET has their bytes."""
    at = f"{radosgw.fresh('hf')}/model"
    written = {
        "config.json": b'{"model_type": "tiny"}',
        "model-00001-of-00002.safetensors": os.urandom(20 * MIB + 17),
        "model-00002-of-00002.safetensors": os.urandom(3 * MIB),
        "model.safetensors.index.json": b'{"weight_map": {}}',
        "tokenizer/vocab.txt": b"a\nb\n",
        "empty.txt": b"",
        **{f"extra/{n}.bin": bytes([n]) * n for n in range(20)},
    }
    with ckptfs.checkpoint_dir(at, storage_options=radosgw.storage_options(client=client)) as path:
        for name, data in written.items():
            file = Path(path) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    assert not os.path.exists(path)
    prefix = at.removeprefix(f"{radosgw.uri()}/") + "/"
    with contextlib.closing(raw.s3(radosgw)) as s3:
        for name, data in written.items():
            body = s3.get_object(Bucket=radosgw.bucket, Key=prefix + name)["Body"].read()
            assert hashlib.sha256(body).digest() == hashlib.sha256(data).digest(), name
        listed = s3.list_objects_v2(Bucket=radosgw.bucket, Prefix=prefix)["Contents"]
    names = {line["Key"].removeprefix(prefix) for line in listed}
    # In addition only what makes it a checkpoint: the manifest, and its directory.
    assert {name for name in names - written.keys() if "/" not in name} <= {"ckptfs.json"}
    assert written.keys() <= names
