"""`.metadata`: equal to what stock torch writes, and read without executing anything."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import os
import pathlib
import pickle
import pickletools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptfs._torch as ckptfs_torch
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import encode_metadata
from ckptfs.errors import ManifestError
from ckptfs.storage.registry import open_storage
from tests.dcp.fake_ranks import SAVE_ID, our_save, stock_save

Build = Callable[[int], dict[str, Any]]


def dtensor(rank: int, value: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """The part of ``value`` that this rank has; no communication, so a fake group will do."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    local = value
    for dim, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(dim, offset if length else 0, length)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def same_but_paths(ours: Metadata, stock: Metadata) -> None:
    """Fail unless they are equal field by field; only relative_path and the ids may differ, and
    tensors begin at multiples of 64.
    """
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)
    assert ours.planner_data == stock.planner_data
    assert ours.version == stock.version
    assert type(ours.storage_meta) is type(stock.storage_meta)
    moved, ends = {}, dict[str, int]()
    for index, info in sorted(stock.storage_data.items(), key=lambda pair: pair[1].offset):
        begin = ends.get(info.relative_path, 0)
        if isinstance(stock.state_dict_metadata[index.fqn], TensorStorageMetadata):
            begin = -(-begin // 64) * 64
        ends[info.relative_path] = begin + info.length
        path = f"{SAVE_ID}/{info.relative_path}"
        moved[index] = dataclasses.replace(info, relative_path=path, offset=begin)
    assert ours.storage_data == moved
    assert {i: i.index for i in ours.storage_data} == {i: i.index for i in moved}


def compare(size: int, build: Build) -> None:
    """Save with stock and with us on ``size`` ranks and compare what both describe."""
    with tempfile.TemporaryDirectory() as place:
        stock_save(Path(place) / "stock", size, build)
        os.mkdir(f"{place}/ours")
        storage = open_storage(f"{place}/ours")
        our_save(storage, size, build)
        raw = storage.read(".metadata")
        stock = pickle.loads((Path(place) / "stock" / ".metadata").read_bytes())
        same_but_paths(pickle.loads(raw), stock)
        same_but_paths(decode_metadata(raw, "here"), stock)
        # What stock's own reader makes of our file, extension fields and all.
        same_but_paths(FileSystemReader(f"{place}/ours").read_metadata(), stock)


class Model:
    """A Stateful at the top level."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"w": torch.ones(2)}, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


FLATTENED: dict[str, Any] = {
    "nested": {"a": {"b": torch.ones(2), "c": [1, 2]}, "d": [torch.zeros(1), {"e": 5}]},
    "tuple": (1, 2),
    "tuple with a tensor": (torch.ones(1), "x"),
    "empty": {},
    "empty list": [],
    "list": [1, [2, 3]],
    "deep list": [[torch.ones(1)], 7],
    "int keys": {0: torch.ones(1), 1: "a"},
    "none": None,
    "dots.in.key": 1,
    "": 2,
    "stateful": Model(),
    "ordered": collections.OrderedDict(x=torch.ones(1), y=1),
    "scalar": torch.tensor(3.5),
    "no elements": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
}


@pytest.mark.parametrize("key", [*FLATTENED, "all of them"])
def test_flattening_is_stocks(key: str) -> None:
    """Nested, empty, odd keys, tuples, Stateful: names, paths and places are stock's."""
    state = FLATTENED if key == "all of them" else {key: FLATTENED[key]}
    compare(2, lambda _: dict(state))


placements = st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(2)])
shapes = st.lists(st.integers(0, 5), min_size=3, max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(shapes, st.lists(placements, min_size=2, max_size=2), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(2,), (3,), (2, 2), (4, 1)]),
)
def test_sharded_tensors_are_described_as_stock_does(
    tensors: list[tuple[list[int], list[Any], bool]], mesh_shape: tuple[int, ...]
) -> None:
    """Any shape (zero-size chunks too), any placement, 1-D and 2-D meshes, strided (FSDP2 x TP)."""
    size = int(torch.tensor(mesh_shape).prod())

    def build(rank: int) -> dict[str, Any]:
        mesh = DeviceMesh("cpu", torch.arange(size).reshape(mesh_shape))
        state: dict[str, Any] = {"plain": torch.arange(3), "step": 5}
        for number, (shape, where, requires_grad) in enumerate(tensors):
            value = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
            part = dtensor(rank, value, mesh, where[: len(mesh_shape)])
            state[f"t{number}"] = part.requires_grad_(requires_grad)
        return state

    compare(size, build)


def test_strided_shards_and_ranks_outside_the_mesh() -> None:
    """_StridedShard (FSDP2 over TP) and a mesh that leaves ranks out are described as stock does."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def build(rank: int) -> dict[str, Any]:
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        value = torch.arange(64.0).reshape(8, 8)
        where = [_StridedShard(0, split_factor=2), Shard(0)]
        local = value[:2].clone()
        return {
            "w": DTensor.from_local(
                local, mesh, where, run_check=False, shape=value.shape, stride=value.stride()
            )
        }

    compare(5, build)  # rank 4 is in no mesh


def test_sharded_tensor_of_fsdp1() -> None:
    """ShardedTensor, which FSDP1 gives, is described as stock does."""
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Properties

    def build(rank: int) -> dict[str, Any]:
        shards = [ShardMetadata([2 * r, 0], [2, 3], f"rank:{r}/cpu") for r in range(2)]
        whole = ShardedTensorMetadata(shards, torch.Size([4, 3]), Properties(dtype=torch.float32))
        mine = OldShard(torch.full((2, 3), float(rank)), shards[rank])
        return {"st": ShardedTensor._init_from_local_shards_and_global_metadata([mine], whole)}

    compare(2, build)


def test_properties_are_written_as_torch_2_13_does() -> None:
    """Five fields, whatever the running torch would write: 2.13 cannot unpack six."""
    metadata = Metadata({}, storage_data={}, planner_data=TensorProperties())
    states = []

    class Watch(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name != "TensorProperties":
                return super().find_class(module, name)
            return type("Seen", (), {"__setstate__": lambda _, state: states.append(state)})

    Watch(io.BytesIO(encode_metadata(metadata))).load()
    assert [len(state) for state in states] == [5]
    stock = pickle.dumps(metadata, 4)
    assert encode_metadata(metadata) == stock or b"getattr" in stock  # see AsPython3112


def test_metadata_of_a_newer_torch_is_read() -> None:
    """TensorProperties with six fields, as torch 2.15 writes them, reads as if it had five."""
    raw = pickle.dumps(Metadata({}, storage_data={}, planner_data=TensorProperties()), 4)
    # ... memory_format, pin_memory) -> (..., pin_memory, None): one more before the tuple closes.
    place = next(p for o, _, p in pickletools.genops(raw) if o.name == "TUPLE")
    newer = raw[:place] + b"N" + raw[place:]
    frame = raw.index(b"\x95")
    newer = newer[:frame] + newer[frame + 9 :]  # the frame's length is no longer right: drop it
    with pytest.raises(ValueError, match="too many values"):
        pickle.loads(newer)
    found = decode_metadata(newer, "here")
    assert found.planner_data == TensorProperties()
    assert type(found.planner_data) is TensorProperties


PATHS = [
    pathlib.PurePosixPath("/a/b"),
    pathlib.PosixPath("/a/b"),
    pathlib.PureWindowsPath("C:/a"),
]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: type(p).__name__)
def test_paths_in_it_are_read(path: Any) -> None:
    """Stock puts a pathlib path into storage_meta; any flavour reads on any system."""
    raw = pickle.dumps(Metadata({}, storage_data={}, storage_meta=StorageMeta(path)), 4)
    meta = decode_metadata(raw, "here").storage_meta
    assert meta is not None
    assert str(meta.checkpoint_id) == str(path)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: tuple[Any, ...]) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return self.command


def _mark(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: Evil((os.system, (f"touch {p}",))), "posix.system"),
        (lambda p: Evil((eval, (f"open({p!r}, 'w')",))), "builtins.eval"),
        (lambda p: Evil((getattr, (torch.Size, "count"))), "builtins.getattr"),
        (lambda p: Evil((_mark, (p,))), "_mark"),
        (lambda p: Evil((torch.load, (p,))), "torch.*load"),
        (lambda p: Evil((pathlib.Path.touch, (pathlib.PosixPath(p),))), "getattr|pathlib"),
    ],
)
def test_a_malicious_pickle_is_not_executed(
    tmp_path: Path, make: Callable[[str], Evil], named: str
) -> None:
    """A class outside the list is named with the URI, and nothing of it has run; stock runs it."""
    target = str(tmp_path / "owned")
    raw = pickle.dumps(Metadata({}, storage_data={}, planner_data=make(target)), 4)
    with pytest.raises(ManifestError, match=named) as caught:
        decode_metadata(raw, "s3://bucket/run/.metadata")
    assert "s3://bucket/run/.metadata" in str(caught.value)
    assert not Path(target).exists()


def test_stock_executes_the_same_pickle(tmp_path: Path) -> None:
    """The control: torch's own reader runs what we refuse."""
    target = tmp_path / "owned"
    evil = Evil((eval, (f"open({str(target)!r}, 'w').close()",)))
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Metadata({}, storage_data={}, planner_data=evil), 4)
    )
    FileSystemReader(tmp_path).read_metadata()
    assert target.exists()


class AsPython3112(pickle.Pickler):
    """Writes members of enums as stock torch does on Python 3.11.2."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, enum.Enum):
            return getattr, (type(obj), obj.name)
        return NotImplemented


def test_what_stock_wrote_on_an_older_python_is_read() -> None:
    """There an enum is getattr(its class, its name); nothing else may be reached that way."""
    metadata = Metadata({"x": tensor_metadata()}, storage_data={})
    buffer = io.BytesIO()
    AsPython3112(buffer, 4).dump(metadata)
    assert b"getattr" in buffer.getvalue()
    assert decode_metadata(buffer.getvalue(), "here") == metadata


def test_an_enum_is_written_alike_under_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of ckptfs, and other Pythons, read what this one writes."""
    metadata = Metadata({"x": tensor_metadata()}, storage_data={})
    usual = encode_metadata(metadata)
    kind = type(metadata.state_dict_metadata["x"].properties.memory_format)  # type: ignore[union-attr]
    encoding = ckptfs_torch.mem_format_encoding()
    assert issubclass(encoding, enum.Enum)
    assert kind is torch.memory_format
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (encoding, self.name)))
    assert encode_metadata(metadata) == usual
    assert b"getattr" not in usual


def test_dotted_names_do_not_reach_further() -> None:
    """Protocol 4 lets a name be 'Size.__class__...'; such a name is not on the list."""
    raw = b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93."
    with pytest.raises(ManifestError, match=r"Size\.__class__"):
        decode_metadata(raw, "here")


def tensor_metadata() -> TensorStorageMetadata:
    """A tensor of four elements in one chunk."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    return TensorStorageMetadata(TensorProperties(), torch.Size([4]), [chunk])


def _info(path: str, offset: int = 0) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, 1)


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "s3://b/x", "a\\b", "", ".", "..", "a\0b"]
)
def test_paths_that_leave_the_checkpoint_are_refused(path: str) -> None:
    """relative_path comes from a bucket: it may name only what is below."""
    raw = encode_metadata(Metadata({}, storage_data={MetadataIndex("k"): _info(path)}))
    with pytest.raises(ManifestError, match="leaves the checkpoint"):
        decode_metadata(raw, "here")


DAMAGED = Metadata(
    {"k": BytesStorageMetadata(), "t": tensor_metadata()},
    storage_data={MetadataIndex("k"): _info("s/__0_0.distcp")},
    planner_data={"k": ("k",)},
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_metadata_is_one_kind_of_error(data: st.DataObject) -> None:
    """Cut anywhere or with any byte changed, it is a ManifestError or still metadata."""
    raw = encode_metadata(DAMAGED)
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] = data.draw(st.integers(0, 255))
    for broken in (raw[:at], bytes(changed), data.draw(st.binary(max_size=40))):
        try:
            found = decode_metadata(broken, "here")
        except ManifestError:
            continue
        assert isinstance(found, Metadata)
