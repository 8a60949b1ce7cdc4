"""Bytes out and back: our files in stock's reader, stock's in ours, any sharding in any other."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import ckptfs
from ckptfs.dcp.boxes import pieces_of, strides_of
from ckptfs.dcp.planning.leaves import check_tensor, dtype_round_trips
from ckptfs.dcp.read.data_file import Verify
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from tests.dcp.fake_ranks import load, our_save, stock_save
from tests.dcp.test_metadata import dtensor

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def _stock_round_trips(dtype: torch.dtype) -> bool:
    """Whether stock DCP itself gets a tensor of this dtype back, bit for bit."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensor = _filled(dtype)
            dcp.save({"t": tensor}, checkpoint_id=place, no_dist=True)
            target = {"t": torch.empty(4, dtype=dtype)}
            dcp.load(target, checkpoint_id=place, no_dist=True)
            return _bits(target["t"]) == _bits(tensor)
        except BaseException:  # noqa: BLE001 - CheckpointException is no Exception
            return False


def _filled(dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(4, dtype=dtype)
    tensor.view(torch.uint8).copy_(torch.arange(tensor.view(torch.uint8).numel()) % 2)
    return tensor


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_stock_round_trips_and_no_other_is_accepted(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Whatever stock DCP gets back we get back, bit for bit; what it cannot is refused at save."""
    assert dtype_round_trips(dtype) == _stock_round_trips(dtype)
    if dtype_round_trips(dtype):
        storage = open_storage(tmp_path)
        our_save(storage, 1, lambda _: {"t": _filled(dtype)})
        [seen] = load(
            storage, 1, lambda _: {"t": torch.empty(4, dtype=dtype)}, view=lambda s: _bits(s["t"])
        )
        assert seen == _bits(_filled(dtype))


BIG = torch.arange(3 << 18, dtype=torch.float32).reshape(768, 1024)  # 3 MiB: several blocks


def rich_state(rank: int) -> dict[str, Any]:
    """Everything at once: big and small, strided, aliased, views of wide storages, leaves."""
    wide = torch.arange(100_000.0)
    return {
        "big": BIG,
        "small": [torch.full((3,), float(n)) for n in range(20)],
        "transposed": BIG[:8, :16].t(),
        "expanded": torch.ones(1).expand(10, 10),
        "view": wide[5:15],
        "alias": wide[10:20],
        "conj": torch.complex(torch.ones(3), torch.ones(3)).conj(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "leaf": {"tuple": (1, "x", torch.ones(2)), "bytes": b"abc", "none": None},
        "ints": {0: "a", 1: torch.ones(1)},
    }


def blank(rank: int) -> dict[str, Any]:
    """The same shapes without the values."""

    def clear(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, dict):
            return {k: clear(v) for k, v in value.items()}
        return [clear(v) for v in value] if isinstance(value, list) else 0

    cleared: dict[str, Any] = clear(rich_state(rank))
    return cleared


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Leaves by path, tensors as lists."""
    found = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path}/{key}", inner)
        elif isinstance(value, (list, tuple)):
            for key, inner in enumerate(value):
                walk(f"{path}/{key}", inner)
        else:
            found[path] = value.tolist() if isinstance(value, torch.Tensor) else value

    walk("", state)
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_our_files_load_by_us_and_by_stock(tmp_path: Path, threads: int) -> None:
    """What we write comes back equal through our reader, verified or not, and through stock's."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, rich_state, threads=threads)
    for verify in Verify:
        [seen] = load(storage, 1, blank, view=flat, verify=verify)
        assert seen == flat(rich_state(0))
    target = blank(0)
    del target["ints"]  # stock adds a key "0" to 0
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert flat(target) == {k: v for k, v in flat(rich_state(0)).items() if "ints" not in k}


def test_stock_files_load_by_us(tmp_path: Path) -> None:
    """A plain DCP checkpoint, without digests, loads through the same reader."""
    stock_save(tmp_path, 2, rich_state)
    for seen in load(open_storage(tmp_path), 2, blank, view=flat):
        assert seen == flat(rich_state(0))


def test_views_are_written_without_their_storages(tmp_path: Path) -> None:
    """A view of ten floats into 400 KB costs ten floats, and is not copied to get there."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, lambda _: {"v": torch.zeros(100_000)[5:15]})
    [name] = [e.name for e in storage.list("save-1") if e.name.endswith(".distcp")]
    assert storage.stat(f"save-1/{name}").size_bytes < 3000


placements = st.sampled_from([Replicate(), Shard(0), Shard(1)])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)),
    st.tuples(st.sampled_from([(1,), (3,), (2, 2)]), st.lists(placements, min_size=2, max_size=2)),
    st.tuples(st.sampled_from([(1,), (4,), (2, 2)]), st.lists(placements, min_size=2, max_size=2)),
    st.booleans(),
)
def test_any_sharding_loads_into_any_other(
    shape: tuple[int, ...],
    saved: tuple[tuple[int, ...], list[Any]],
    asked: tuple[tuple[int, ...], list[Any]],
    stock: bool,
) -> None:
    """Saved on one mesh, loaded on another, by other placements: every element is right."""
    whole = torch.arange(float(math.prod(shape))).reshape(shape)

    def build(where: tuple[tuple[int, ...], list[Any]], value: torch.Tensor) -> Any:
        mesh_shape, parts = where
        size = math.prod(mesh_shape)

        def of_rank(rank: int) -> dict[str, Any]:
            mesh = DeviceMesh("cpu", torch.arange(size).reshape(mesh_shape))
            return {"w": dtensor(rank, value, mesh, parts[: len(mesh_shape)])}

        return size, of_rank

    with tempfile.TemporaryDirectory() as place:
        size, state = build(saved, whole)
        storage: Storage = open_storage(place)
        if stock:
            stock_save(Path(place), size, state)
        else:
            our_save(storage, size, state)
        size, expected = build(asked, whole)
        _, empty = build(asked, torch.zeros(shape))
        seen = load(storage, size, empty, view=lambda s: s["w"].to_local().tolist())
        from tests.dcp.fake_ranks import fake_rank

        for rank in range(size):
            with fake_rank(rank, size):
                assert seen[rank] == expected(rank)["w"].to_local().tolist()


@given(st.data())
def test_boxes_are_cut_into_ranges_that_cover_them_once(data: st.DataObject) -> None:
    """Every element of the box is in one piece, at the place that its strides say."""
    sizes = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [data.draw(st.integers(0, n - 1)) for n in sizes]
    lengths = [data.draw(st.integers(0, n - o)) for n, o in zip(sizes, offsets, strict=True)]
    window, whole = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    chunk = torch.arange(math.prod(sizes)).reshape(sizes)
    box = chunk
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        box = box.narrow(dim, offset, length)
    result = torch.full(lengths, -1)
    for piece in pieces_of(sizes, offsets, lengths, window, full=whole):
        assert piece.stop - piece.start <= window or (whole and piece.is_contiguous)
        span = chunk.reshape(-1)[piece.start : piece.stop].clone()
        part = result
        for dim, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        assert bool((part == -1).all())
        part.copy_(span.as_strided(piece.lengths, strides_of(sizes)))
    assert torch.equal(result, box)


@pytest.mark.parametrize(
    ("hole", "spans"), [(None, [(1, 12)]), (1, [(1, 12)]), (0, [(1, 4), (5, 8), (9, 12)])]
)
def test_a_piece_spans_no_hole_wider_than_allowed(
    hole: int | None, spans: list[tuple[int, int]]
) -> None:
    """Three columns of four, the window is wide: rows are read apart where the gap between them is
    more than what a reader wants to skip.
    """
    found = pieces_of([3, 4], [0, 1], [3, 3], 100, full=True, hole=hole)
    assert [(piece.start, piece.stop) for piece in found] == spans


def test_ranges_of_large_tensors_are_verified_by_their_blocks(tmp_path: Path) -> None:
    """Columns and odd row ranges of a tensor of several blocks come back right, verified."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, lambda _: {"big": BIG})
    for size, parts in ((3, [Shard(0)]), (3, [Shard(1)]), (5, [Shard(0)])):

        def empty(rank: int, size: int = size, parts: list[Any] = parts) -> dict[str, Any]:
            mesh = DeviceMesh("cpu", torch.arange(size))
            return {"big": dtensor(rank, torch.zeros_like(BIG), mesh, parts)}

        seen = load(storage, size, empty, view=lambda s: s["big"].to_local().clone())
        assert torch.equal(torch.cat(seen, dim=parts[0].dim), BIG)


def test_dtypes_are_converted_only_where_asked(tmp_path: Path) -> None:
    """strict=False converts as stock does; also into a strided target."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, lambda _: {"w": torch.arange(6.0).reshape(2, 3)})
    target = torch.zeros(3, 2, dtype=torch.float64).t()
    load(storage, 1, lambda _: {"w": target}, strict=False)
    assert target.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_rank_with_nothing_to_save_makes_no_file(tmp_path: Path) -> None:
    """Rank 1 has nothing: no empty file, no sidecar, and the checkpoint loads."""
    storage = open_storage(tmp_path)
    our_save(storage, 2, lambda rank: {} if rank else {"w": torch.ones(2)})
    assert sorted(os.listdir(tmp_path / "save-1")) == ["__0_0.distcp", "__0_0.xxh3"]


def test_tensors_that_have_no_memory_are_refused() -> None:
    """Meta, sparse and wrapper tensors are named for what they are."""
    assert "meta" in str(check_tensor(torch.empty(2, device="meta")))
    assert "layout" in str(check_tensor(torch.eye(2).to_sparse()))
    assert check_tensor(torch.ones(2)) is None


def test_a_torch_built_for_a_device_saves_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The wheels of PyPI are built for CUDA, and name it as the accelerator on a machine without a driver too."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    state = {"w": torch.arange(10.0)}
    ckptfs.save(state, tmp_path / "run" / "step_1")
    with ckptfs.CheckpointManager(tmp_path / "kept", mode="async") as manager:
        manager.save(1, state)
    loaded = {"w": torch.zeros(10)}
    ckptfs.load(loaded, tmp_path / "kept" / "step_1")
    assert torch.equal(loaded["w"], state["w"])
    assert not torch.cuda.is_initialized()
