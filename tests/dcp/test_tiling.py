"""Chunks of a tensor fill it exactly, or no reader gets it: a hole would be whatever was in memory."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptfs
from ckptfs import _torch
from ckptfs.dcp.boxes import fills
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import encode_metadata
from ckptfs.dcp.metadata.torch_inventory import TorchInventory
from ckptfs.dcp.planning.saved_state import Saved
from ckptfs.dcp.read.load_planner import LoadPlanner
from ckptfs.errors import CollectiveError, IncompleteCheckpointError, IntegrityError, ManifestError
from ckptfs.storage.registry import open_storage
from ckptfs.tools.contents import Box, TensorLeaf
from ckptfs.tools.exporting import ExportFormat, export
from ckptfs.tools.findings import Damage
from ckptfs.tools.opening import open_contents
from ckptfs.tools.verifying import verify
from tests.dcp.fake_ranks import fake_rank

SIZE = 8
Chunks = Sequence[tuple[Sequence[int], Sequence[int]]]

WRONG: dict[str, tuple[Chunks, Sequence[int]]] = {
    "two at one place": ([([0], [4]), ([0], [4])], [8]),
    "an overlap as large as the hole": ([([0], [4]), ([2], [4])], [8]),
    "a hole": ([([0], [4])], [8]),
    "no chunk": ([], [8]),
    "twice as much": ([([0], [8]), ([4], [4])], [8]),
    "a plane": ([([0, 0], [2, 2]), ([0, 1], [2, 2])], [2, 4]),
    "a plane with a hole in the middle": (
        [([0, 0], [1, 3]), ([0, 2], [3, 1]), ([2, 0], [1, 3]), ([1, 0], [1, 1])],
        [3, 3],
    ),
}
RIGHT: dict[str, tuple[Chunks, Sequence[int]]] = {
    "halves": ([([4], [4]), ([0], [4])], [8]),
    "the same twice": ([([0], [8]), ([0], [8])], [8]),
    "an empty one": ([([0], [8]), ([8], [0])], [8]),
    "a pinwheel": (
        [
            ([0, 0], [1, 2]),
            ([0, 2], [2, 1]),
            ([2, 1], [1, 2]),
            ([1, 0], [2, 1]),
            ([1, 1], [1, 1]),
        ],
        [3, 3],
    ),
    "a number": ([([], [])], []),
    "nothing": ([], [0, 3]),
}


def made(path: Path, chunks: Chunks, sizes: Sequence[int]) -> Path:
    """A plain DCP checkpoint of one tensor "w" in these chunks, each with a blob of its size."""
    path.mkdir(parents=True)
    data, places = bytearray(), {}
    for at, lengths in chunks:
        blob = io.BytesIO()
        torch.save(torch.ones(lengths, dtype=torch.float32), blob)
        info = _torch.storage_info("__0_0.distcp", len(data), len(blob.getvalue()))
        places[MetadataIndex("w", torch.Size(at))] = info
        data += blob.getvalue()
    boxes = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in chunks]
    saved = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(sizes), boxes)
    metadata = Metadata({"w": saved}, planner_data={"w": ("w",)}, storage_data=places)
    (path / "__0_0.distcp").write_bytes(data)
    (path / ".metadata").write_bytes(encode_metadata(metadata))
    return path


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fresh memory of torch is full of NaN: no test takes it for zeros by luck."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


# -- the rule ---------------------------------------------------------------------------------------


@st.composite
def _tilings(draw: st.DrawFn) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """A box cut again and again, and then perhaps a piece moved, taken away, stretched or doubled."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=3))
    pieces = [([0] * len(sizes), list(sizes))]
    for _ in range(draw(st.integers(0, 6)) if sizes else 0):
        at = draw(st.integers(0, len(pieces) - 1))
        begin, length = pieces[at]
        dim = draw(st.integers(0, len(sizes) - 1))
        if length[dim] > 1:
            cut = draw(st.integers(1, length[dim] - 1))
            low, high = [*length], [*length]
            low[dim], high[dim] = cut, length[dim] - cut
            after = [*begin]
            after[dim] += cut
            pieces[at : at + 1] = [(begin, low), (after, high)]
    pieces = draw(st.permutations(pieces))
    for _ in range(draw(st.integers(0, 2)) if sizes else 0):
        match draw(st.sampled_from(["move", "take", "stretch", "double"])):
            case "take":
                pieces = pieces[1:]
            case "double":
                pieces = [*pieces, *pieces[:1]]
            case how if pieces:
                begin, length = [*pieces[0][0]], [*pieces[0][1]]
                dim, by = draw(st.integers(0, len(sizes) - 1)), draw(st.integers(-2, 2))
                (begin if how == "move" else length)[dim] += by
                pieces = [(begin, length), *pieces[1:]]
    return pieces, sizes


def _by_counting(pieces: Chunks, sizes: Sequence[int]) -> bool:
    cells = dict.fromkeys(itertools.product(*map(range, sizes)), 0)
    for begin, length in {(tuple(a), tuple(n)) for a, n in pieces}:
        if any(n < 0 for n in length):
            return False
        for cell in itertools.product(
            *(range(a, a + n) for a, n in zip(begin, length, strict=True))
        ):
            if cell not in cells:
                return False
            cells[cell] += 1
    return set(cells.values()) <= {1}


@given(_tilings())
def test_pieces_fill_a_box_exactly_if_each_element_is_in_one(
    case: tuple[list[tuple[list[int], list[int]]], list[int]],
) -> None:
    """The same answer as counting the pieces that hold each element; empty pieces outside of the box
    are no tiling either.
    """
    pieces, sizes = case
    outside = any(
        a < 0 or a + n > m
        for begin, length in pieces
        for a, n, m in zip(begin, length, sizes, strict=True)
    )
    assert fills(pieces, sizes) == (_by_counting(pieces, sizes) and not outside)


def test_many_pieces_of_no_grid_are_compared() -> None:
    """Thousands of bricks, each row shifted: a tiling, and none if one of them overlaps its neighbour."""
    rows, width = 60, 100
    bricks = [
        ([row, at], [1, min(2, width - at)])
        for row in range(rows)
        for at in range(row % 2, width, 2)
    ]
    bricks += [([row, 0], [1, 1]) for row in range(1, rows, 2)]
    assert fills(bricks, [rows, width])
    assert len(bricks) > 2048
    begin, length = bricks[1500]
    bricks[1500] = ([begin[0], begin[1] - 1], length)
    assert not fills(bricks, [rows, width])


# -- who reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("strict", [True, False])
def test_a_load_refuses_what_is_no_tiling(tmp_path: Path, name: str, strict: bool) -> None:
    """No tensor is changed: neither by a whole load, nor by one that torch plans."""
    place = made(tmp_path / "step_1", *WRONG[name])
    into = {"w": torch.full(WRONG[name][1], 7.0)}
    with pytest.raises(CollectiveError, match="'w'") as raised:
        ckptfs.load(into, place, strict=strict)
    assert raised.value.all_are(IntegrityError)
    planner = LoadPlanner(strict=strict)
    planner.set_up_planner(into, decode_metadata((place / ".metadata").read_bytes(), "here"))
    with pytest.raises(IntegrityError, match="'w'"):
        planner.create_local_plan()
    assert torch.equal(into["w"], torch.full(WRONG[name][1], 7.0))


@pytest.mark.parametrize("to", ExportFormat)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("nan_memory")
def test_an_export_refuses_what_is_no_tiling(tmp_path: Path, name: str, to: ExportFormat) -> None:
    """In every format; nothing is at the target, least of all memory that was never written."""
    place = made(tmp_path / "step_1", *WRONG[name])
    with pytest.raises(IntegrityError, match="'w'"):
        export(place, tmp_path / "out", to)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1"]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.usefixtures("nan_memory")
def test_other_tilings_are_read(tmp_path: Path, name: str) -> None:
    """Whatever order and shapes the pieces have: all ones are loaded, and exported in every format."""
    chunks, sizes = RIGHT[name]
    place = made(tmp_path / "step_1", chunks, sizes)
    into = {"w": torch.zeros(sizes)}
    ckptfs.load(into, place)
    assert torch.equal(into["w"], torch.ones(sizes))
    export(place, tmp_path / "dcp", "dcp")
    again = {"w": torch.zeros(sizes)}
    dcp.load(again, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(again["w"], torch.ones(sizes))
    export(place, tmp_path / "w.pt", "torch")
    assert torch.equal(torch.load(tmp_path / "w.pt")["w"], torch.ones(sizes))


@pytest.mark.parametrize("name", WRONG)
def test_contents_are_read_whole_or_not(tmp_path: Path, name: str) -> None:
    """A box of a part, as inspect and diff read it: every element, or an IntegrityError."""
    chunks, sizes = WRONG[name]
    with open_contents(made(tmp_path / "step_1", chunks, sizes), None) as opened:
        leaf = opened.contents.leaves["w"]
        assert isinstance(leaf, TensorLeaf)
        for at in itertools.product(*map(range, sizes)):
            box = Box(leaf, at, (1,) * len(sizes))
            # What exactly one chunk holds may be read; nothing else may.
            held = sum(
                all(a <= x < a + n for a, n, x in zip(begin, length, at, strict=True))
                for begin, length in dict.fromkeys((tuple(a), tuple(n)) for a, n in chunks)
            )
            if held:
                assert torch.equal(opened.contents.read([box])[0], torch.ones(box.lengths))
                continue
            with pytest.raises(IntegrityError):
                opened.contents.read([box])


def test_a_declared_size_is_no_memory(tmp_path: Path) -> None:
    """An object that claims 8 PiB of a file of some bytes is refused before any memory is taken."""
    place = tmp_path / "step_1"
    dcp.save({"x": {1, 2}}, checkpoint_id=str(place), no_dist=True)
    metadata = open_storage(tmp_path).read("step_1/.metadata")
    import pickle

    described = pickle.loads(metadata)
    (index,) = described.storage_data
    described.storage_data[index].length = 1 << 53
    (place / ".metadata").write_bytes(pickle.dumps(described))
    with (
        open_contents(place, None) as opened,
        pytest.raises((IntegrityError, IncompleteCheckpointError)),
    ):
        opened.contents.blob(opened.contents.leaves["x"])  # type: ignore[arg-type]


# -- blanks -------------------------------------------------------------------------------------------


def described(paths: dict[str, Any]) -> Saved:
    """A checkpoint of a tensor under each key, with these paths."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([5]))
    one = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([5]), [chunk])
    return Saved(Metadata(dict.fromkeys(paths, one), planner_data=paths))


@pytest.mark.parametrize(
    "path", [("x", "v"), ("x.w",), ("x", "w", "v"), ("y", "w"), ("x",), (), ("", "x.w")]
)
def test_a_blank_lies_where_its_key_says(path: tuple[str, ...]) -> None:
    """A path in .metadata that is not the key's own is not believed: no reader would fill what is made
    for it, and the object would get it as it is.
    """
    assert described({"x.w": path}).below(("x",)) == [(("w",), "x.w")]


@pytest.mark.parametrize("index", [-1, 400_000_000])
def test_a_list_of_a_made_up_length_is_refused(index: int) -> None:
    """An index in .metadata is not memory, and never counts from the end."""
    with pytest.raises(ManifestError, match="list"):
        described({f"x.a.{index}.w": ("x", "a", index, "w")}).blank(("x",))
    assert described({"x.a.3.w": ("x", "a", 3, "w")}).blank(("x",))["a"][3].keys() == {"w"}


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")  # torch's own call
@pytest.mark.usefixtures("nan_memory")
def test_memory_that_a_load_makes_is_loaded_or_zero(tmp_path: Path) -> None:
    """A tensor without memory that the checkpoint lacks, with strict=False: zeros; the others are loaded."""
    ckptfs.save({"a": torch.ones(5)}, tmp_path / "step_1")
    metadata = decode_metadata((tmp_path / "step_1/.metadata").read_bytes(), "here")
    for plan in (LoadPlanner.create_local_plan, lambda p: p.create_reads(TorchInventory(metadata))):
        with torch.device("meta"):
            state: dict[str, Any] = {"a": torch.zeros(5), "deep": [{"b": torch.zeros(5)}]}
        planner = LoadPlanner(strict=False)
        with fake_rank(0, 1):
            planner.set_up_planner(state, metadata)
            plan(planner)
        assert planner.missing == ("deep.0.b",)
        assert torch.equal(state["deep"][0]["b"], torch.zeros(5))
        assert torch.equal(state["a"].isnan(), torch.ones(5, dtype=torch.bool))  # until it is read


def test_volumes_alone_prove_nothing() -> None:
    """The cases above have the volume of the box where they say so: the sum is not what finds them."""
    for name in ("an overlap as large as the hole", "a plane", "a plane with a hole in the middle"):
        chunks, sizes = WRONG[name]
        assert sum(math.prod(n) for _, n in chunks) >= math.prod(sizes)


@pytest.mark.parametrize("case", [*WRONG, *RIGHT])
def test_verify_reports_chunks_that_overlap_or_leave_a_hole(tmp_path: Path, case: str) -> None:
    """A finding of its own that names the tensor, as a load would refuse it; none where they fill it."""
    chunks, sizes = {**WRONG, **RIGHT}[case]
    made(tmp_path / "run/step_1", chunks, sizes)
    (one,) = verify([tmp_path / "run/step_1"]).checkpoints
    found = [finding for finding in one.findings if "chunks" in finding.what]
    assert [finding.tensors for finding in found] == ([("w",)] if case in WRONG else [])
    assert all(finding.damage is Damage.METADATA for finding in found)
    if case == "an overlap as large as the hole":
        assert "overlap and leave a part of it uncovered" in found[0].what


@pytest.mark.parametrize("chunk", [((0, 0), (2, 4)), ((0, 0), (4, 1)), ((0, 0), (2, 2))])
@pytest.mark.parametrize("partial", [True, False])
def test_torch_s_planner_gets_no_tensor_that_is_half_filled(
    chunk: tuple[tuple[int, ...], tuple[int, ...]], partial: bool, tmp_path: Path
) -> None:
    """torch plans whatever chunks meet a tensor: the rest of it would keep what it held."""
    resaved(tmp_path, chunk)
    state = {"k": torch.zeros(4, 2)}
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    with pytest.raises(CheckpointException, match=r"values that 'k' asks for"):
        dcp.load(state, storage_reader=ckptfs.StorageReader(tmp_path / "step_1"), planner=planner)


@pytest.mark.parametrize("chunk", [((0, 0), (-4, -2)), ((-2, 0), (4, 2))])
def test_negative_sizes_are_refused(
    chunk: tuple[tuple[int, ...], tuple[int, ...]], tmp_path: Path
) -> None:
    """By whichever call loads."""
    resaved(tmp_path, chunk)
    with pytest.raises((ManifestError, CollectiveError), match="negative"):
        ckptfs.load({"k": torch.zeros(4, 2)}, tmp_path / "step_1")
    reader = ckptfs.StorageReader(tmp_path / "step_1")
    with pytest.raises((CheckpointException, AssertionError), match="negative"):
        dcp.load({"k": torch.zeros(4, 2)}, storage_reader=reader)


def test_who_plans_less_gets_less(tmp_path: Path) -> None:
    """A planner of somebody's own, and keys that are not there where that is allowed."""

    class Nothing(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            return dataclasses.replace(super().create_local_plan(), items=[])

    dcp.save({"k": torch.ones(4, 2)}, checkpoint_id=tmp_path / "step_1")
    reader = ckptfs.StorageReader(tmp_path / "step_1")
    state = {"k": torch.zeros(4, 2)}
    dcp.load(state, storage_reader=reader, planner=Nothing())
    assert not state["k"].any()
    more = {**state, "new": torch.zeros(1)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(more, storage_reader=reader, planner=planner)
    assert more["k"].all()


def resaved(folder: Path, chunk: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """A checkpoint of stock torch with one tensor, said to be this box."""
    dcp.save({"k": torch.arange(8.0).reshape(4, 2)}, checkpoint_id=folder / "step_1")
    path = folder / "step_1" / ".metadata"
    saved = pickle.loads(path.read_bytes())
    offsets, sizes = map(torch.Size, chunk)
    saved.state_dict_metadata["k"].chunks = [ChunkStorageMetadata(offsets, sizes)]
    (place,) = saved.storage_data.values()
    saved.storage_data = {MetadataIndex("k", offsets, 0): place}
    path.write_bytes(pickle.dumps(saved))
