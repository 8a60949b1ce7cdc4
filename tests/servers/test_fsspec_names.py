"""Names on ``ckptfs+s3://`` mean what they mean to s3fs."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from tests.lab.server import Server

ODD = ("a//b", "a/./b", "/a", "what?", "what?is=this", "100%", "a+b c#d")


def fresh(server: Server) -> str:
    """An unused prefix."""
    return server.fresh().partition("://")[2]


def give_up(fs: Any, key: str, data: bytes) -> None:
    """An exception in the middle of a file."""
    with contextlib.suppress(InterruptedError), fs.open(key, "wb") as file:
        file.write(data)
        raise InterruptedError


@pytest.fixture
def fs(radosgw: Server) -> Any:
    """The filesystem under test."""
    return fsspec.filesystem("ckptfs+s3", **radosgw.options)


@pytest.fixture
def stock(radosgw: Server) -> Any:
    """s3fs."""
    return fsspec.filesystem("s3", **radosgw.options, use_listings_cache=False)


@pytest.mark.parametrize("name", ODD)
def test_a_key_is_what_it_is(fs: Any, stock: Any, radosgw: Server, name: str) -> None:
    """Written, found, read, appended to, copied and removed under the letters that were given."""
    key = f"{fresh(radosgw)}/{name}"
    with fs.open(key, "wb") as file:
        file.write(b"whole")
        assert not stock.exists(key)
    assert stock.cat_file(key) == fs.cat_file(key) == b"whole"
    assert fs.info(key)["size"] == 5
    give_up(fs, key, b"half")
    assert stock.cat_file(key) == b"whole"
    with fs.open(key, "ab") as file:
        file.write(b"!")
    fs.cp_file(key, f"{key}2")
    assert stock.cat_file(f"{key}2") == b"whole!"
    fs.rm_file(key)
    assert not stock.exists(key)


def test_a_large_object_under_an_odd_key(fs: Any, stock: Any, radosgw: Server) -> None:
    """In parts; given up, it leaves neither an object nor an upload."""
    key = f"{fresh(radosgw)}/a//large"
    block = bytes(range(256)) * (80 << 10)
    with fs.open(key, "wb") as file:
        file.write(block)
        file.write(block)
    assert stock.cat_file(key) == block * 2
    give_up(fs, f"{key}2", block)
    assert not stock.exists(f"{key}2")
    bucket = key.partition("/")[0]
    uploads = stock.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])
    assert [upload["Key"] for upload in uploads if "//large" in upload["Key"]] == []


def test_a_checkpoint_is_saved_where_its_uri_leads(radosgw: Server, fs: Any) -> None:
    """torch saves to run//step_1: ckptfs calls that run/step_1, and torch reads it under both."""
    root = f"ckptfs+s3://{fresh(radosgw)}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in radosgw.environment.items():
            patch.setenv(name, value)
        dcp.save({"w": torch.ones(3)}, checkpoint_id=f"{root}//step_1")
        for url in (f"{root}//step_1", f"{root}/step_1"):
            state = {"w": torch.zeros(3)}
            dcp.load(state, checkpoint_id=url)
            assert state["w"].tolist() == [1, 1, 1]
        assert [found.uri.name for found in ckptfs.list_checkpoints(root)] == ["step_1"]


def test_an_object_and_what_lies_below_its_name(fs: Any, stock: Any, radosgw: Server) -> None:
    """``rm`` takes the object, with ``recursive`` what is below it too."""
    root = fresh(radosgw)
    for name in ("a", "a/b", "a/c/d", "ab"):
        fs.pipe_file(f"{root}/{name}", b"x")
    fs.rm(f"{root}/a")
    assert stock.find(root) == [f"{root}/{name}" for name in ("a/b", "a/c/d", "ab")]
    fs.pipe_file(f"{root}/a", b"x")
    fs.rm(f"{root}/a", recursive=True)
    assert stock.find(root) == [f"{root}/ab"]


@pytest.mark.parametrize("prefix", ["a", "ab", "b/c", "b/", "b/c/d", "x", ""])
def test_find_by_prefix(fs: Any, stock: Any, radosgw: Server, prefix: str) -> None:
    """What s3fs finds."""
    root = fresh(radosgw)
    for name in ("a", "ab", "abc/d", "b/c", "b/c/d", "b/cd/e", "c"):
        fs.pipe_file(f"{root}/{name}", b"x")
    assert fs.find(root, prefix=prefix) == stock.find(root, prefix=prefix)
    assert list(fs.find(root, prefix=prefix, detail=True)) == stock.find(root, prefix=prefix)


def test_find_by_prefix_to_a_depth(fs: Any, stock: Any, radosgw: Server) -> None:
    """Levels are counted from the path."""
    root = fresh(radosgw)
    for name in ("a1", "a2/b", "a2/b2/c", "d/e"):
        fs.pipe_file(f"{root}/{name}", b"x")
    for depth in (1, 2):
        found = stock.find(root, prefix="a", maxdepth=depth)
        assert fs.find(root, prefix="a", maxdepth=depth) == found
    assert fs.find(root, prefix="a2/b", maxdepth=2) == [f"{root}/a2/b"]
    assert fs.find(root, prefix="a2/b", maxdepth=1) == []


def test_buckets_are_made_and_removed(radosgw: Server) -> None:
    """``mkdir`` and ``makedirs`` of a bucket; with a key they make nothing, neither bucket nor object."""
    options = radosgw.storage_options()
    options["client_kwargs"].pop("region_name")  # this server knows no regions to make a bucket in
    fs = fsspec.filesystem("ckptfs+s3", **options)
    stock = fsspec.filesystem("s3", **options, use_listings_cache=False)
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    fs.makedirs(f"{name}/run/step", exist_ok=True)
    assert not stock.exists(name)
    fs.mkdir(name)
    assert stock.exists(name)
    with pytest.raises(FileExistsError):
        fs.mkdir(name)
    with pytest.raises(FileExistsError):
        fs.makedirs(name)
    fs.makedirs(name, exist_ok=True)
    fs.mkdir(f"{name}/run")
    assert stock.ls(name) == []
    fs.rmdir(name)
    assert not stock.exists(name)
