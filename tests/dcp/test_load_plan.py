"""The load's own plan: the metadata in columns, and the same pieces as torch plans."""

from __future__ import annotations

import collections
import gc
import itertools
import math
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import ckptfs
import ckptfs._torch as ckptfs_torch
from ckptfs.dcp.metadata.metadata_reader import (
    Inventory,
    MetadataColumns,
    SavedTensor,
    decode_metadata,
    read_inventory,
)
from ckptfs.dcp.metadata.metadata_writer import encode_metadata
from ckptfs.dcp.metadata.torch_inventory import Renamed, TorchInventory
from ckptfs.dcp.planning.state_dicts import flat_to_load, marked_key, unmarked_key, view_for
from ckptfs.dcp.read.load_planner import LoadPlanner, RequestedKeys, unexpected_keys
from ckptfs.dcp.read.read_plan import PlannedRead, meetings
from ckptfs.errors import IntegrityError, ManifestError, StateError
from ckptfs.storage.registry import open_storage
from tests.dcp.fake_ranks import fake_rank, our_save, stock_save
from tests.dcp.test_metadata import FLATTENED, dtensor

FORMATS = Path(__file__).parents[1] / "formats"


# -- metadata in columns ---------------------------------------------------------------------------


def says_the_same(inventory: Inventory, metadata: Metadata) -> None:
    """Fail unless both say the same of every key, in the same order."""
    other = TorchInventory(metadata)
    assert list(inventory.keys) == list(other.keys)
    for key in inventory.keys:
        one, two = inventory.tensor(key), other.tensor(key)
        assert (one is None) == (two is None)
        if one is None or two is None:
            assert inventory.place(key, None) == other.place(key, None)
            continue
        assert (tuple(one.sizes), one.dtype) == (tuple(two.sizes), two.dtype)
        assert len(one.chunks) == len(two.chunks)
        for number in range(len(one.chunks)):
            assert one.box(number) == two.box(number)
            offsets = one.box(number)[0]
            assert inventory.place(key, offsets) == other.place(key, offsets)
            assert inventory.number(key, offsets) in {None, number}


@pytest.mark.parametrize("torch_version", ["2.6.0", "2.10.0", "2.13.0", "2.15.0"])
def test_what_every_torch_wrote_is_read_in_columns(torch_version: str) -> None:
    """Metadata of four versions of torch: none goes the long way, and all is as its unpickler says."""
    raw = (FORMATS / f"torch-{torch_version}" / ".metadata").read_bytes()
    inventory = read_inventory(raw, "here")
    assert isinstance(inventory, MetadataColumns)
    says_the_same(inventory, decode_metadata(raw, "here"))


placements = st.sampled_from([Replicate(), Shard(0), Shard(1)])
meshes = st.tuples(
    st.sampled_from([(1,), (3,), (2, 2)]), st.lists(placements, min_size=2, max_size=2)
)


def build(
    where: tuple[tuple[int, ...], list[Any]], shape: tuple[int, ...]
) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """How many ranks there are, and the state of each: a sharded tensor and the leaves of FLATTENED."""
    mesh_shape, parts = where
    size = math.prod(mesh_shape)

    def of_rank(rank: int) -> dict[str, Any]:
        mesh = DeviceMesh("cpu", torch.arange(size).reshape(mesh_shape))
        value = torch.arange(float(math.prod(shape))).reshape(shape)
        plain = dict.fromkeys(FLATTENED) and {
            k: v for k, v in FLATTENED.items() if k not in {"stateful", "tuple with a tensor"}
        }
        return {"w": dtensor(rank, value, mesh, parts[: len(mesh_shape)]), **plain}

    return size, of_rank


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(meshes, st.tuples(st.integers(0, 7), st.integers(1, 7)), st.booleans())
def test_columns_are_what_is_unpickled(
    where: tuple[tuple[int, ...], list[Any]], shape: tuple[int, ...], stock: bool
) -> None:
    """Whatever stock or we save, on any mesh: read in columns, equal to pickle.loads."""
    with tempfile.TemporaryDirectory() as place:
        if stock:
            stock_save(Path(place), *build(where, shape))
        else:
            our_save(open_storage(place), *build(where, shape))
        raw = (Path(place) / ".metadata").read_bytes()
    inventory = read_inventory(raw, "here")
    assert isinstance(inventory, MetadataColumns)
    says_the_same(inventory, pickle.loads(raw))
    assert inventory.metadata() == pickle.loads(raw)


def info(path: str = "s/__0_0.distcp", offset: int = 0, length: int = 1) -> Any:
    """Where an item is."""
    return ckptfs_torch.storage_info(path, offset, length)


def tensor(*sizes: int) -> TensorStorageMetadata:
    """A tensor in one chunk."""
    chunk = ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
    return TensorStorageMetadata(TensorProperties(), torch.Size(sizes), [chunk])


def crooked(**changed: Any) -> TensorStorageMetadata:
    """A tensor that is inventory as none should be."""
    made = tensor(4)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("entries", "places"),
    [
        ({"k": "text"}, {}),
        ({"k": crooked(properties=TensorProperties)}, {}),
        ({"k": crooked(size=torch.Size([4, 4]))}, {}),
        ({}, {"k": info()}),
        ({}, {MetadataIndex("k"): "text"}),
        ({}, {MetadataIndex("k"): info("../x")}),
        ({}, {MetadataIndex("k"): info("/etc/passwd")}),
        ({}, {MetadataIndex("k"): info("s3://b/x")}),
        ({}, {MetadataIndex("k"): info(offset=-1)}),
        ({}, {MetadataIndex("k"): info(length=-1)}),
    ],
)
def test_what_is_refused_whole_is_refused_in_columns(
    entries: dict[str, Any], places: dict[Any, Any]
) -> None:
    """Wrong kinds, dimensions, paths and ranges: the same ManifestError as decode_metadata's."""
    raw = pickle.dumps(Metadata(entries, storage_data=places), 4)
    with pytest.raises(ManifestError) as whole:
        decode_metadata(raw, "here")
    with pytest.raises(ManifestError) as columns:
        read_inventory(raw, "here")
    assert str(columns.value) == str(whole.value)


DESCRIBED = encode_metadata(
    Metadata(
        {"k": BytesStorageMetadata(), "t": tensor(4), "u": tensor(2, 3)},
        storage_data={MetadataIndex(key): info() for key in "ktu"},
        planner_data={key: (key,) for key in "ktu"},
    )
)


def read_of(inventory: Inventory) -> list[Any]:
    """All that a load asks an inventory for."""
    found: list[Any] = []
    for key in inventory.keys:
        saved = inventory.tensor(key)
        begins: list[Any] = [None]
        if saved is not None:
            begins = [saved.box_of(chunk)[0] for chunk in saved.chunks]
            found.append((key, tuple(saved.sizes), saved.dtype, begins))
        found += [inventory.place(key, begin) for begin in begins]
    return found


def test_properties_that_torch_does_not_take_are_refused_in_columns_too() -> None:
    """A memory format that is none: no load reads it, and stock torch would refuse the file."""
    raw = DESCRIBED[:283] + bytes([136]) + DESCRIBED[284:]
    for read in (decode_metadata, read_inventory):
        with pytest.raises(ManifestError):
            read(raw, "here")


@settings(max_examples=300, deadline=None)
@example(283, 136)  # a memory format that is none
@example(439, 41)  # an object among the keys of what no load reads
@example(322, 97)  # a state that is appended, not given
@given(st.integers(0, len(DESCRIBED) - 1), st.integers(0, 255))
def test_damage_is_read_in_columns_as_it_is_read_whole(at: int, byte: int) -> None:
    """Any byte changed: both refuse it, or both read the same; or it changed nothing that a load reads."""
    raw = DESCRIBED[:at] + bytes([byte]) + DESCRIBED[at + 1 :]
    try:
        whole = decode_metadata(raw, "here")
    except ManifestError:
        try:
            unread = read_of(read_inventory(raw, "here"))
        except ManifestError:
            return
        assert unread == read_of(read_inventory(DESCRIBED, "here"))
        return
    inventory = read_inventory(raw, "here")
    assert list(inventory.keys) == list(whole.state_dict_metadata)
    for key, saved in whole.state_dict_metadata.items():
        found = inventory.tensor(key)
        if isinstance(saved, TensorStorageMetadata):
            assert found is not None
            assert (tuple(found.sizes), found.dtype) == (saved.size, saved.properties.dtype)
        else:
            assert found is None


def test_stream_extensions_are_refused_by_key() -> None:
    """Data that torch transformed on its way: StateError with the key, and nothing is read."""
    transformed = info()
    transformed.transform_descriptors = ["zstd"]
    raw = pickle.dumps(Metadata({"t": tensor(4)}, storage_data={}), 4)
    metadata = pickle.loads(raw)
    metadata.storage_data[MetadataIndex("t", torch.Size([0]))] = transformed
    planner = LoadPlanner()
    planner.set_up_planner({"t": torch.zeros(4)})
    with pytest.raises(StateError, match=r"'t' was written through stream extensions.*zstd"):
        planner.create_reads(read_inventory(pickle.dumps(metadata, 4), "here"))


# -- keys of ranks ---------------------------------------------------------------------------------


def test_a_rank_sees_its_own_keys_in_columns_as_in_metadata() -> None:
    """Renamed says of a rank's keys what view_for says, and makes the same Metadata."""
    keys = ["a", *(marked_key("own.seed", ("own", "seed"), rank)[0] for rank in range(3))]
    metadata = Metadata(
        {key: tensor(4) for key in keys},
        storage_data={
            MetadataIndex(key, torch.Size([0])): info(offset=n) for n, key in enumerate(keys)
        },
        planner_data={key: tuple(key.split(".")) for key in keys},
    )
    inventory = read_inventory(encode_metadata(metadata), "here")
    for rank in range(3):
        view = view_for(metadata, rank, 3, 3, ())
        seen = Renamed(inventory, {f"own@rank{rank}.seed": "own.seed"})
        says_the_same(seen, view)
        assert seen.metadata() == view


names = st.sampled_from(["a", "b", "c.d", "a@rank0", "a@rank1", "c@rank1.d"])


@given(st.lists(names, unique=True), st.lists(st.lists(names, unique=True), min_size=1, max_size=3))
def test_what_nobody_asks_for_is_the_same_however_it_is_told(
    saved: list[str], ranks: list[list[str]]
) -> None:
    """Ranks tell what they ask for or all the rest, whichever is shorter; the answer is that of sets."""
    asked = {key for keys in ranks for key in keys}
    expected = tuple(
        key
        for key in saved
        if key not in asked and ((own := unmarked_key(key)) is None or own[0] not in asked)
    )
    told = [RequestedKeys.of(saved, keys) for keys in ranks]
    assert unexpected_keys(saved, told) == expected
    assert all(len(one.keys) <= len(keys) for one, keys in zip(told, ranks, strict=True))


# -- the plan --------------------------------------------------------------------------------------


boxes = st.tuples(st.integers(0, 9), st.integers(0, 9))


def cuts(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """A dimension cut into parts: (begin, size) of each."""

    def parts(marks: list[int]) -> list[tuple[int, int]]:
        edges = [0, *sorted(marks), length]
        return [(a, b - a) for a, b in itertools.pairwise(edges)]

    return st.lists(st.integers(0, length), max_size=4).map(parts)


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], list[ChunkStorageMetadata], Any]:
    """A tensor's sizes, a grid of chunks that it is saved in, in any order, and a box of it."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=3))
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for length in sizes:
        parts = draw(cuts(length))
        chunks = [((*o, a), (*s, n)) for o, s in chunks for a, n in parts]
    low = [draw(st.integers(0, length)) for length in sizes]
    lengths = [draw(st.integers(0, n - a)) for a, n in zip(low, sizes, strict=True)]
    saved = [
        ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in draw(st.permutations(chunks))
    ]
    mine = draw(
        st.sampled_from([*saved, ChunkStorageMetadata(torch.Size(low), torch.Size(lengths))])
    )
    return sizes, saved, mine


@settings(max_examples=400, deadline=None)
@given(grids(), st.one_of(st.none(), st.integers(0, 200)))
def test_chunks_meet_a_box_as_torch_says(
    grid: tuple[list[int], list[ChunkStorageMetadata], Any], hint: int | None
) -> None:
    """Any grid of chunks, any box, with or without a hint, right or wrong: torch's pieces."""
    sizes, chunks, box = grid
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(sizes), chunks)
    items = create_read_items_for_chunk_list("t", stored, [box])
    expected: list[tuple[Any, ...]] = sorted(
        (i.storage_index.index, *map(tuple, (i.storage_offsets, i.dest_offsets, i.lengths)))
        for i in items
        if math.prod(i.lengths)  # an empty box is met by the chunk that it is in: nothing to read
    )
    saved = SavedTensor(sizes, torch.float32, chunks, lambda c: (c.offsets, c.sizes))
    found = [
        (m.chunk, tuple(m.in_chunk), tuple(m.in_box), tuple(m.lengths))
        for m in meetings(saved, box.offsets, box.sizes, hint)
    ]
    assert found == expected


@pytest.mark.parametrize("hint", range(4))
def test_a_hint_of_an_equal_chunk_elsewhere_is_not_believed(hint: int) -> None:
    """Four rows of one size: whichever is hinted at, the row that was asked for is read."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(4)]
    saved = SavedTensor([4, 3], torch.float32, chunks, lambda c: (c.offsets, c.sizes))
    (found,) = meetings(saved, (2, 0), (1, 3), hint)
    assert (found.chunk, *found.in_chunk, *found.lengths) == (2, 0, 0, 1, 3)


def plain(read: PlannedRead) -> tuple[Any, ...]:
    """What a PlannedRead says, with its memory as address, shape and strides."""
    target = read.target
    memory = target is not None and (target.data_ptr(), tuple(target.shape), target.stride())
    numbers = (read.sizes, read.box_offsets, read.box_lengths)
    return (*read[:4], read.dtype, memory, *map(tuple, numbers))


def as_stock_plans(state: dict[str, Any], metadata: Metadata) -> list[tuple[Any, ...]]:
    """The pieces that torch's own planner reads."""
    planner = DefaultLoadPlanner(allow_partial_load=True)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    told = []
    for item in planner.create_local_plan().items:
        place = metadata.storage_data[item.storage_index]
        at = (item.storage_index.fqn, place.relative_path, place.offset, place.length)
        saved = metadata.state_dict_metadata[item.storage_index.fqn]
        if isinstance(saved, BytesStorageMetadata):
            told.append(plain(PlannedRead(*at)))
            continue
        if not math.prod(item.lengths):
            continue
        [sizes] = [c.sizes for c in saved.chunks if c.offsets == item.storage_index.offset]
        target = planner.resolve_tensor(item)
        box = (item.storage_offsets, item.lengths)
        told.append(plain(PlannedRead(*at, sizes, saved.properties.dtype, *box, target)))
    return told


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(meshes, meshes, st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)))
def test_a_rank_reads_what_torch_would_have_it_read(
    saved: tuple[tuple[int, ...], list[Any]],
    asked: tuple[tuple[int, ...], list[Any]],
    shape: tuple[int, ...],
) -> None:
    """Saved on one mesh, asked for on another, with nested states: torch's pieces, into torch's memory."""
    with tempfile.TemporaryDirectory() as place:
        our_save(open_storage(place), *build(saved, shape))
        raw = (Path(place) / ".metadata").read_bytes()
    size, of_rank = build(asked, shape)
    for rank in range(size):
        with fake_rank(rank, size):
            state = of_rank(rank)
            expected = as_stock_plans(state, pickle.loads(raw))
            for inventory in (read_inventory(raw, "here"), TorchInventory(pickle.loads(raw))):
                planner = LoadPlanner()
                planner.set_up_planner(state)
                reads = planner.create_reads(inventory)
                assert sorted(map(plain, reads), key=repr) == sorted(expected, key=repr)


def test_what_only_torch_can_cut_torch_cuts() -> None:
    """A subclass that cuts itself is planned by torch, into the memory that it names."""

    class Halves(torch.Tensor):
        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return [ChunkStorageMetadata(torch.Size([n]), torch.Size([2])) for n in (0, 2)]

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            assert index.offset is not None
            return self.as_subclass(torch.Tensor)[index.offset[0] : index.offset[0] + 2]

    metadata = Metadata(
        {"t": tensor(4)}, storage_data={MetadataIndex("t", torch.Size([0])): info(length=900)}
    )
    state = {"t": torch.zeros(4).as_subclass(Halves)}
    planner = LoadPlanner()
    planner.set_up_planner(state)
    reads = planner.create_reads(read_inventory(encode_metadata(metadata), "here"))
    assert sorted(map(plain, reads)) == sorted(as_stock_plans(state, metadata))
    assert [tuple(read.box_lengths) for read in reads] == [(2,), (2,)]


leaves = st.sampled_from(
    [None, 1, "x", (), (1, 2), torch.zeros(2), torch.nn.Parameter(torch.ones(1))]
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", 0, 1, "a.b"]), inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2).map(
            collections.OrderedDict
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "a.b", 7]), nested, max_size=3))
def test_states_are_flattened_as_torch_does(state: dict[Any, Any]) -> None:
    """Dicts, lists, tuples, odd keys: torch's keys, paths and order; torch's error where it has one."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    found = flat_to_load(state)
    try:
        expected = flatten_state_dict(state)
    except ValueError:
        assert found is None
        return
    assert found is not None
    assert list(found[0]) == list(expected[0])
    assert all(found[0][key] is expected[0][key] for key in expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize(
    "holder",
    [lambda t: t, lambda t: [t], lambda t: ([t],), lambda t: {"x": t}],
    ids=["tensor", "list", "tuple", "dict"],
)
def test_meta_tensors_are_left_to_torch(holder: Callable[[Any], Any]) -> None:
    """However deep one is: torch gives it memory."""
    assert flat_to_load({"a": holder(torch.zeros(1, device="meta"))}) is None
    assert flat_to_load({"a": holder(torch.zeros(1))}) is not None


# -- what it costs -----------------------------------------------------------------------------------


def calls_of(work: Callable[[], Any]) -> collections.Counter[str]:
    """Python functions that ``work`` called, by name."""
    seen: collections.Counter[str] = collections.Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def world(ranks: int, tensors: int) -> bytes:
    """The metadata of tensors in rows on many ranks."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for number in range(tensors):
        key = f"layers.{number}.weight"
        chunks = [
            ChunkStorageMetadata(torch.Size([r, 0]), torch.Size([1, 4])) for r in range(ranks)
        ]
        entries[key] = TensorStorageMetadata(TensorProperties(), torch.Size([ranks, 4]), chunks)
        for rank, chunk in enumerate(chunks):
            place = info(f"s/__{rank}_0.distcp", number * 900, 800)
            places[MetadataIndex(key, chunk.offsets, rank)] = place
    return encode_metadata(Metadata(entries, storage_data=places))


def test_metadata_of_a_big_world_makes_nothing_of_torchs() -> None:
    """256 ranks x 20 tensors: reading it and planning one rank makes none of torch's objects, and runs five
    Python functions for each record: a chunk, or where an item is.
    """
    raw = world(256, 20)
    mesh = None
    with fake_rank(3, 256):
        mesh = DeviceMesh("cpu", torch.arange(256))
        state = {
            f"layers.{n}.weight": dtensor(3, torch.zeros(256, 4), mesh, [Shard(0)])
            for n in range(20)
        }
        planner = LoadPlanner()
        planner.set_up_planner(state)
        reads: list[PlannedRead] = []
        seen = calls_of(lambda: reads.extend(planner.create_reads(read_inventory(raw, "here"))))
    assert len(reads) == 20
    assert seen["MetadataIndex.__hash__"] == seen["MetadataIndex.__init__"] == 0
    assert seen["TensorProperties.__setstate__"] == 0
    # 5120 chunks, and as many items. Paths are looked at once for each of the 256 files.
    records = 2 * 20 * 256
    assert sum(seen.values()) <= 5 * records, seen.most_common(9)


def test_a_small_tensor_costs_few_calls_to_plan() -> None:
    """A thousand plain tensors: some Python calls for each, metadata and flattening included."""
    count = 1000
    metadata = Metadata(
        {f"t{n}": tensor(4) for n in range(count)},
        storage_data={
            MetadataIndex(f"t{n}", torch.Size([0])): info(offset=n * 900) for n in range(count)
        },
        planner_data={f"t{n}": (f"t{n}",) for n in range(count)},
    )
    raw = encode_metadata(metadata)
    state: Mapping[str, Any] = {f"t{n}": torch.zeros(4) for n in range(count)}

    def plan() -> None:
        planner = LoadPlanner()
        planner.set_up_planner(dict(state))
        assert len(planner.create_reads(read_inventory(raw, "here"))) == count

    plan()
    assert sum(calls_of(plan).values()) < 35 * count


def test_a_load_wakes_the_collector_a_few_times(tmp_path: Path) -> None:
    """Between its parts, however many tensors there are; not once for each 700 objects that they make."""
    state = {f"t{n}": torch.zeros(4) for n in range(2000)}
    ckptfs.save(state, tmp_path / "step_1")
    ckptfs.load(state, tmp_path / "step_1")  # what is imported is
    seen: list[str] = []

    def note(phase: str, _: object) -> None:
        seen.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        ckptfs.load(state, tmp_path / "step_1")
    finally:
        gc.callbacks.remove(note)
    assert seen.count("start") <= 4  # the metadata of 2000 tensors alone is some 28,000 objects


def test_a_tensor_that_no_chunk_fills_is_an_error() -> None:
    """What is not saved would keep the values that it had; the planner says which key it is."""
    properties = TensorProperties(torch.float32)
    half = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    saved = TensorStorageMetadata(properties, torch.Size([4]), [half])
    place = {MetadataIndex("a", torch.Size([0])): ckptfs_torch.storage_info("f", 0, 8)}
    metadata = Metadata({"a": saved}, planner_data={"a": ("a",)}, storage_data=place)
    planner = LoadPlanner(strict=True)
    planner.set_up_planner({"a": torch.zeros(4)})
    with pytest.raises(IntegrityError, match="2 of the 4 values that 'a' asks for"):
        planner.create_reads(TorchInventory(metadata))
