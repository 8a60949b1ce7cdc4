"""``ckptfs+X://`` inside an event loop: fsspec's generic copies, and what zarr asks of a store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.asyn import get_loop, sync
from fsspec.generic import GenericFileSystem, rsync

import ckptfs
from tests.lab.server import Server

URL = "ckptfs+s3://"


def generic(server: Server) -> GenericFileSystem:
    """Copies between any URLs."""
    return GenericFileSystem(
        default_method="options", storage_options={"ckptfs+s3": dict(server.options)}
    )


def made(server: Server, **more: Any) -> Any:
    """The filesystem under test."""
    return fsspec.filesystem("ckptfs+s3", **server.options, **more)


def fresh(server: Server) -> str:
    """An unused prefix."""
    return server.fresh().partition("://")[2]


def test_generic_copies_in_all_directions(radosgw: Server, tmp_path: Path) -> None:
    """From a disk, within the store, and back."""
    fs, root = generic(radosgw), fresh(radosgw)
    (tmp_path / "a").write_bytes(b"one")
    fs.cp(f"file://{tmp_path}/a", f"{URL}{root}/a", on_error="raise")
    fs.cp([f"{URL}{root}/a"], [f"{URL}{root}/b"], on_error="raise")
    fs.cp(f"{URL}{root}/b", f"file://{tmp_path}/b", on_error="raise")
    assert (tmp_path / "b").read_bytes() == b"one"
    assert made(radosgw).cat(f"{root}/b") == b"one"


def test_rsync_makes_and_deletes(radosgw: Server, tmp_path: Path) -> None:
    """A tree to the store, a change, what is missing deleted, and back."""
    fs, root, source = generic(radosgw), fresh(radosgw), tmp_path / "source"
    for name in ("a", "sub/b", "sub/c"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    rsync(f"file://{source}", f"{URL}{root}", fs=fs)
    (source / "sub" / "c").unlink()
    (source / "a").write_text("longer")
    rsync(f"file://{source}", f"{URL}{root}", delete_missing=True, fs=fs)
    assert made(radosgw).find(root) == [f"{root}/a", f"{root}/sub/b"]
    rsync(f"{URL}{root}", f"file://{tmp_path}/back", fs=fs)
    assert (tmp_path / "back" / "a").read_text() == "longer"


async def store(fs: Any, root: str) -> None:
    """What zarr 3's FsspecStore does with its filesystem, in a running loop."""
    assert not await fs._exists(f"{root}/zarr.json")
    await fs._pipe_file(f"{root}/zarr.json", b"{}")
    await asyncio.gather(*(fs._pipe_file(f"{root}/c/{i}", b"%d" % i * 10) for i in range(40)))
    assert await fs._cat_file(f"{root}/c/7", start=2, end=5) == b"777"
    ranges = await fs._cat_ranges([f"{root}/c/1", f"{root}/none"], [0, 0], [2, 2])
    assert ranges[0] == b"11"
    assert isinstance(ranges[1], FileNotFoundError)
    names = await fs._ls(root, detail=False)
    assert sorted(names) == [f"{root}/c", f"{root}/zarr.json"]
    assert (await fs._info(f"{root}/c/7"))["size"] == 10
    assert await fs._isdir(f"{root}/c")
    assert len(await fs._find(f"{root}/c")) == 40
    with pytest.raises(FileExistsError):
        await fs._pipe_file(f"{root}/zarr.json", b"{}", mode="create")
    await fs._rm(f"{root}/c", recursive=True)
    assert await fs._ls(root, detail=False) == [f"{root}/zarr.json"]


def test_a_store_in_fsspecs_loop(radosgw: Server) -> None:
    """Where fsspec's own coroutines run, s3fs's among them."""
    sync(get_loop(), store, made(radosgw), fresh(radosgw), timeout=120)


def test_a_store_in_a_loop_of_its_own(radosgw: Server) -> None:
    """As zarr opens it: asynchronous=True, in another loop, more calls than there are threads."""
    asyncio.run(store(made(radosgw, asynchronous=True), fresh(radosgw)))


def local(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it in a loop of its own."""
    return asyncio.run(work)


def test_files_that_are_streamed(tmp_path: Path) -> None:
    """``open_async``: visible when closed, nothing where an exception leaves the block."""
    fs = fsspec.filesystem("ckptfs+file")

    async def write(name: str, *, fail: bool = False) -> None:
        async with await fs.open_async(f"{tmp_path}/{name}", "wb") as file:
            await file.write(b"half")
            assert not (tmp_path / name).exists()
            if fail:
                raise RuntimeError
            await file.write(b" whole")

    async def read() -> bytes:
        async with await fs.open_async(f"{tmp_path}/good") as file:
            assert file.size == 10
            await file.seek(2)
            found: bytes = await file.read()
            return found

    local(write("good"))
    with pytest.raises(RuntimeError):
        local(write("bad", fail=True))
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert local(read()) == b"lf whole"
    with pytest.raises(ValueError, match="binary"):
        local(fs.open_async(f"{tmp_path}/good", "r"))


def test_a_checkpoint_is_removed_as_a_whole(tmp_path: Path) -> None:
    """``_rm``, as ``rm``: by the log."""
    run = tmp_path / "run"
    ckptfs.save({"w": torch.ones(3)}, run / "step_1")
    ckptfs.save({"w": torch.ones(3)}, run / "step_2")
    fs = fsspec.filesystem("ckptfs+file", asynchronous=True)
    local(fs._rm(f"{run}/step_2", recursive=True))
    assert [found.uri.name for found in ckptfs.list_checkpoints(run)] == ["step_1"]


def test_the_loop_is_not_held_up(tmp_path: Path) -> None:
    """While one call waits for its file, another one ends."""
    fs = fsspec.filesystem("ckptfs+file", skip_instance_cache=True)
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def __fspath__(self) -> str:
            begun.set()
            assert go_on.wait(60)
            return f"{tmp_path}/none"

    async def both() -> bool:
        slow = asyncio.create_task(fs._exists(Slow()))
        assert await asyncio.to_thread(begun.wait, 60)
        there: bool = await fs._exists(str(tmp_path))
        go_on.set()
        return there and not await slow

    assert local(both())
