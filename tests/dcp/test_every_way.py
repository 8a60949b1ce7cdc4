"""Every writer with every reader: whatever the dtypes, shapes, strides and shards, the bits are the same.

    written by    ckptfs: auto, direct, buffered, in one stream; stock DCP
    read by       ckptfs from a disk, warm and cold, verifying and not; in ranges from a store that has no
                  files; stock DCP

What was written is a set of files, and is put where its reader looks: it does not know who wrote them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptfs.bench.target import evict
from ckptfs.dcp.planning.leaves import dtype_round_trips
from ckptfs.dcp.read.data_file import Verify
from ckptfs.dcp.write.rank_files import WriteEngine, WriteEngineName, engine_for, stream_engine
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from ckptfs.uri import Uri
from tests.dcp.fake_ranks import SAVE_ID, fake_rank, load, our_save, stock_save
from tests.dcp.test_metadata import dtensor

Files = dict[str, bytes]
Build = Callable[[int], dict[str, Any]]
ALL = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
DTYPES = sorted(filter(dtype_round_trips, ALL), key=str)
ENGINES: dict[str, WriteEngine] = {
    **{name.value: engine_for(name) for name in WriteEngineName},
    "stream": stream_engine,
}
WRITERS = (*ENGINES, "stock")


# -- states -------------------------------------------------------------------------------------


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int | None) -> torch.Tensor:
    """Any bits that the dtype may have: NaNs with a payload, denormals, both zeros. None: zeros."""
    data = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    if seed is not None:
        data.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        data %= 2
    return data.view(dtype).reshape(shape)


def laid_out(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides, in a larger storage, or neither."""
    if not tensor.dim():
        return tensor
    if how == "turned":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if how == "stepped":
        wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype)
        inside = wide[..., 1::2]
        inside.copy_(tensor)
        return inside
    if how == "inside":
        wide = torch.empty(tensor.numel() + 13, dtype=tensor.dtype)
        inside = wide[5 : 5 + tensor.numel()].view(tensor.shape)
        inside.copy_(tensor)
        return inside
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    """Of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


tensors = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from(("plain", "turned", "stepped", "inside")),
    st.sampled_from((Replicate(), Shard(0), Shard(1))),
    st.integers(0, 1000),
)
LARGE = (torch.bfloat16, (1500, 1025), "plain", Shard(0), 1)
HUGE = (torch.float32, (2500, 1024), "plain", Replicate(), 3)  # of two windows
TURNED = (torch.float32, (1111, 997), "turned", Shard(1), 2)

SMALL = [(torch.float32, (5, n), "plain", Replicate(), n) for n in range(1, 30)]


def state_of(specs: list[Any], size: int, *, blank: bool) -> Build:
    """What each of ``size`` ranks has: sharded where the tensor has the dimension, else a plain one."""

    def of_rank(rank: int) -> dict[str, Any]:
        mesh = DeviceMesh("cpu", torch.arange(size))
        state: dict[str, Any] = {}
        for number, (dtype, shape, how, place, seed) in enumerate(specs):
            value = filled(dtype, shape, None if blank else seed)
            is_cut = not isinstance(place, Shard) or place.dim < len(shape)
            if is_cut and value.numel():
                whole = dtensor(rank, value, mesh, [place])
                local = laid_out(whole.to_local(), how)
                state[f"t{number}"] = DTensor.from_local(
                    local, mesh, [place], run_check=False, shape=whole.shape, stride=whole.stride()
                )
            else:
                state[f"t{number}"] = laid_out(value, how)
        return state

    return of_rank


# -- ways ---------------------------------------------------------------------------------------


def written(way: str, size: int, build: Build) -> Files:
    """All that a save left."""
    with tempfile.TemporaryDirectory() as place:
        if way == "stock":
            stock_save(Path(place), size, build)
        else:
            our_save(LocalStorage(Uri.parse(place)), size, build, engine=ENGINES[way])
        found = [path for path in Path(place).rglob("*") if path.is_file()]
        return {str(path.relative_to(place)): path.read_bytes() for path in found}


def _on_disk(files: Files, place: str) -> LocalStorage:
    for name, data in files.items():
        path = Path(place, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return LocalStorage(Uri.parse(place))


def read_cold(files: Files, size: int, build: Build, see: Callable[..., Any]) -> list[Any]:
    """Past the page cache where the disk allows it."""
    with tempfile.TemporaryDirectory() as place:
        storage = _on_disk(files, place)
        evict(path for path in Path(place).rglob("*") if path.is_file())
        return load(storage, size, build, view=see)


def read_warm(files: Files, size: int, build: Build, see: Callable[..., Any]) -> list[Any]:
    """Out of the page cache."""
    with tempfile.TemporaryDirectory() as place:
        return load(_on_disk(files, place), size, build, view=see)


def read_unverified(files: Files, size: int, build: Build, see: Callable[..., Any]) -> list[Any]:
    """Without a look at the digests."""
    with tempfile.TemporaryDirectory() as place:
        return load(_on_disk(files, place), size, build, view=see, verify=Verify.OFF)


def read_in_ranges(files: Files, size: int, build: Build, see: Callable[..., Any]) -> list[Any]:
    """From a store of objects."""
    storage = ObjectStorage(Uri.parse("s3://bucket/run"), MemoryObjectClient(MemoryObjects()))
    for name, data in files.items():
        with storage.open_write(name) as writer:
            writer.write(data)
    return load(storage, size, build, view=see)


def read_by_stock(files: Files, size: int, build: Build, see: Callable[..., Any]) -> list[Any]:
    """torch's reader and planner, rank by rank."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        _on_disk(files, place)
        for rank in range(size):
            with fake_rank(rank, size):
                state = build(rank)
                reader, planner = dcp.FileSystemReader(place), dcp.DefaultLoadPlanner()
                metadata = reader.read_metadata()
                planner.set_up_planner(state, metadata, rank == 0)
                reader.set_up_storage_reader(metadata, rank == 0)
                plan = reader.prepare_local_plan(planner.create_local_plan())
                reader.read_data(planner.finish_plan(plan), planner).wait()
                found.append(see(state))
    return found


READERS = (read_warm, read_cold, read_unverified, read_in_ranges, read_by_stock)


@pytest.mark.parametrize("way", WRITERS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@example(specs=[LARGE, TURNED], size=3)
@example(specs=[*SMALL, HUGE, LARGE, *SMALL], size=1)
@example(specs=[(dtype, (3, 5), "stepped", Shard(1), n) for n, dtype in enumerate(DTYPES)], size=2)
@given(specs=st.lists(tensors, min_size=1, max_size=6), size=st.integers(1, 3))
def test_what_any_writer_writes_every_reader_reads_bit_by_bit(
    way: str, specs: list[Any], size: int
) -> None:
    """Each rank's part of each tensor, whichever rank wrote it and whichever reads it."""

    def see(state: dict[str, Any]) -> dict[str, bytes]:
        return {key: bits(value) for key, value in state.items()}

    build = state_of(specs, size, blank=False)
    wanted = []
    for rank in range(size):
        with fake_rank(rank, size):
            wanted.append(see(build(rank)))
    files = written(way, size, build)
    assert any(name.startswith(f"{SAVE_ID}/") for name in files) == (way != "stock")
    for read in READERS:
        seen = read(files, size, state_of(specs, size, blank=True), see)
        assert seen == wanted, read.__name__
