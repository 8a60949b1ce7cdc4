"""Contents, comparing and exporting as functions: sharded sources, bounded memory, odd names."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.errors import StateError
from ckptfs.progress import SILENT
from ckptfs.storage.io import is_aligned
from ckptfs.tools.comparing import Basis, Change, compare
from ckptfs.tools.contents import Box, Shard, TensorLeaf, batches
from ckptfs.tools.exporting import Selection, _in_place, export, nested
from ckptfs.tools.inspecting import inspect, values
from ckptfs.tools.opening import open_contents
from tests.formats.state import state

STOCK = Path(__file__).parent.parent / "formats" / "torch-2.13.0"  # by two ranks


def test_shards_of_two_ranks_are_told() -> None:
    """A checkpoint of stock torch: each shard's place in the tensor, and the file of its rank."""
    found = {leaf.key: leaf for leaf in inspect(STOCK).leaves}
    weight = found["model.weight"]
    assert isinstance(weight, TensorLeaf)
    assert [(s.offsets, s.sizes, s.file) for s in weight.shards] == [
        ((0, 0), (4, 4), "__0_0.distcp"),
        ((4, 0), (4, 4), "__1_0.distcp"),
    ]


def test_another_sharding_is_compared_by_data(tmp_path: Path) -> None:
    """The same values saved by two ranks and by one are equal; one changed element is reported with its
    bytes, whatever the sharding.
    """
    whole = state(sharded=False)
    ckptfs.save(whole, tmp_path / "run" / "step_1")
    compared = compare(STOCK, tmp_path / "run" / "step_1")
    assert compared.changed == compared.unknown == ()
    bases = {leaf.key: leaf.basis for leaf in compared.leaves}
    assert bases["model.weight"] is bases["model.uneven"] is Basis.DATA
    whole["model"]["weight"].view(-1)[17] += 1
    ckptfs.save(whole, tmp_path / "run" / "step_2")
    (changed,) = compare(STOCK, tmp_path / "run" / "step_2").changed
    assert (changed.key, changed.change) == ("model.weight", Change.BYTES)
    assert 0 < changed.changed_bytes <= torch.float32.itemsize


def test_sharded_sources_are_exported_whole(tmp_path: Path) -> None:
    """Two ranks' shards become one tensor in safetensors and torch.save; plain DCP keeps the shards."""
    weight = state(sharded=False)["model"]["weight"]
    only = Selection(["model.weight"])
    export(STOCK, tmp_path / "hf", "safetensors", only)
    export(STOCK, tmp_path / "x.pt", "torch", only)
    export(STOCK, tmp_path / "dcp", "dcp", only)
    exported = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")["model.weight"]
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)["model"]["weight"]
    into = {"model": {"weight": torch.zeros_like(weight)}}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for found in (exported, loaded, into["model"]["weight"]):
        assert torch.equal(found, weight)
    (leaf,) = inspect(tmp_path / "dcp").leaves
    assert isinstance(leaf, TensorLeaf)
    assert len(leaf.shards) == len(torch.chunk(weight, 2))


def test_any_box_is_read(tmp_path: Path) -> None:
    """Of a sharded tensor, also one that crosses the shards; of an empty one, nothing."""
    weight = state(sharded=False)["model"]["weight"]
    with open_contents(STOCK) as opened:
        leaf = opened.contents.leaves["model.weight"]
        assert isinstance(leaf, TensorLeaf)
        across, none = opened.contents.read([Box(leaf, (3, 1), (2, 2)), Box(leaf, (0, 0), (0, 4))])
    assert torch.equal(across, weight[3:5, 1:3])
    assert none.shape == (0, 4)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 300), max_size=4).map(tuple), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.int8, torch.float32, torch.complex64]),
)
def test_batches_hold_every_element_once_in_order_and_stay_small(
    shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Pieces of at most 8 MiB, batches of at most 32, and the pieces of a tensor one after another
    are its bytes: an export writes them so.
    """
    leaves = [TensorLeaf(str(n), dtype, shape, ()) for n, shape in enumerate(shapes)]
    held = list(batches(leaves))
    boxes = [box for batch in held for box in batch]
    assert all(sum(box.size_bytes for box in batch) <= 32 << 20 for batch in held)
    assert all(box.size_bytes <= 8 << 20 for box in boxes)
    assert [box.leaf.key for box in boxes] == sorted((b.leaf.key for b in boxes), key=int)
    for leaf in leaves:
        mine = [box for box in boxes if box.leaf is leaf]
        at = 0
        strides = [math.prod(leaf.shape[d + 1 :]) for d in range(len(leaf.shape))]
        for box in mine:
            start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
            assert not math.prod(box.lengths) or start == at
            at += math.prod(box.lengths)
        assert at == math.prod(leaf.shape)


@pytest.mark.campaign
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """256 MiB in one tensor are exported to safetensors with less than 128 MiB more than the process had,
    and compared with that, which is as large, with less than 320.
    """
    big = {"w": torch.zeros(64 << 20)}
    ckptfs.save(big, tmp_path / "run" / "step_1")
    del big
    code = f"""
from ckptfs.tools.comparing import compare
from ckptfs.tools.exporting import _in_place, export
from ckptfs.tools.opening import open_contents
uri = {str(tmp_path / "run" / "step_1")!r}
def peak():
    # Not ru_maxrss: that begins with what the parent process had.
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
with open_contents(uri) as opened:
    before = peak()
export(uri, {str(tmp_path / "hf")!r}, "safetensors")
print((peak() - before) // 1024)
compare(uri, {str(tmp_path / "hf")!r}, norms=True)
print((peak() - before) // 1024)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=400
    )
    exported, compared = map(int, ran.stdout.split())
    assert exported < 128
    assert compared < 320  # both whole would be 512


def test_small_leaves_are_shown_and_code_is_not_run(tmp_path: Path) -> None:
    """Numbers, text, short tensors; large ones are left out."""
    held = {"lr": 0.5, "name": "x" * 500, "step": torch.tensor(7), "w": torch.zeros(100)}
    ckptfs.save(held, tmp_path / "run" / "step_1")
    told = values(tmp_path / "run" / "step_1")
    assert (told["lr"], told["step"]) == ("0.5", "7")
    assert len(told["name"]) == 200
    assert "w" not in told


@pytest.mark.parametrize(
    ("strip", "prefix", "wanted"),
    [
        ("", "", ("model", "a.b", 0)),
        ("model.", "", ("a.b", 0)),
        ("model.a.b.", "", (0,)),
        ("mod", "", ("el", "a.b", 0)),
        ("", "x.", ("x.model", "a.b", 0)),
        ("optimizer.", "", ("model", "a.b", 0)),
    ],
)
def test_paths_are_stripped_as_keys_are(
    strip: str, prefix: str, wanted: tuple[str | int, ...]
) -> None:
    """Also where one component has dots in it."""
    shard = Shard((0,), (1,), "f", 0, 4)
    leaf = TensorLeaf("model.a.b.0", torch.float32, (1,), (shard,), ("model", "a.b", 0))
    (chosen,) = Selection(strip=strip, prefix=prefix).of([leaf])
    assert chosen.path == wanted
    assert chosen.key == ".".join(str(part) for part in wanted)


def test_two_leaves_never_get_one_name(tmp_path: Path) -> None:
    """Stripping would make them alike: refused before anything is written."""
    ckptfs.save({"a": {"w": torch.ones(1)}, "w": torch.ones(1)}, tmp_path / "run" / "step_1")
    with pytest.raises(StateError, match="would both be called"):
        export(tmp_path / "run" / "step_1", tmp_path / "x", "dcp", Selection(strip="a."))
    assert not (tmp_path / "x").exists()


def test_nested_gives_lists_back_only_where_they_are_whole() -> None:
    """A filtered list must not move what is left of it to other places."""
    pairs: list[tuple[tuple[str | int, ...], object]] = [
        (("a", 0), 1),
        (("a", 1), 2),
        (("b", 1), 3),
        (("c", "0"), 4),
    ]
    assert nested(pairs) == {"a": [1, 2], "b": {1: 3}, "c": {"0": 4}}


def _odd_state() -> dict[str, torch.Tensor]:
    """Tensors of every width, none of whole pages, some of no bytes, and one of several batches."""
    torch.manual_seed(1)
    return {
        "complex": torch.randn(70_001, dtype=torch.complex64),
        "large": torch.randn(5_000_003),
        "half": torch.randn(999, 1001).bfloat16(),
        "f8": torch.randn(4097).to(torch.float8_e4m3fn),
        "flags": torch.randn(13_001) > 0,
        "scalar": torch.tensor(7, dtype=torch.int64),
        "none": torch.empty(0, 3),
        "bytes": torch.arange(255, dtype=torch.uint8),
    }


@pytest.mark.parametrize("source", ["checkpoint", "torch.save"])
def test_an_export_has_every_tensor_bit_for_bit(tmp_path: Path, source: str) -> None:
    """As safetensors itself loads it, over several parts in memory, which begin and end inside tensors."""
    tensors = _odd_state()
    uri = tmp_path / "step_1"
    if source == "checkpoint":
        ckptfs.save(tensors, uri)
    else:
        torch.save(tensors, uri)
    export(uri, tmp_path / "out", "safetensors")
    (file,) = (tmp_path / "out").iterdir()
    found = safetensors.torch.load_file(file)
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert bool(memory_of(found[key]) == memory_of(value)), key


def test_a_header_of_many_pages_is_written_before_its_tensors(tmp_path: Path) -> None:
    """A thousand small tensors."""
    small = {
        f"layer.{number}.with_a_long_name": torch.full((number,), 1.5) for number in range(1000)
    }
    ckptfs.save(small, tmp_path / "step_1")
    export(tmp_path / "step_1", tmp_path / "out", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == small.keys()
    assert all(torch.equal(found[key], value) for key, value in small.items())


def test_parts_of_an_export_are_whole_pages_in_aligned_memory(tmp_path: Path) -> None:
    """So that a disk gets them as they are; what fills no page comes last."""
    ckptfs.save({"a": torch.randn(9_000_001), "b": torch.randn(3)}, tmp_path / "step_1")
    with open_contents(tmp_path / "step_1") as opened:
        chosen = Selection().of(opened.contents.leaves.values())
        parts = [*_in_place(opened.contents, chosen, b"header", SILENT)]
    *whole, rest = parts
    assert len(whole) == 3
    assert all(is_aligned(part) and len(part) % 4096 == 0 for part in whole)
    # One is written and one waits for that while the third is filled.
    assert len({id(part.obj) for part in whole}) == 3
    assert len(rest) < 4096
    assert sum(map(len, parts)) == len(b"header") + 4 * 9_000_004


def test_damage_in_a_large_tensor_stops_its_export(tmp_path: Path) -> None:
    """Nothing is left at the target, though parts before it were written."""
    ckptfs.save({"a": torch.randn(9_000_001)}, tmp_path / "step_1")
    (data,) = tmp_path.glob("step_1/*/*.distcp")
    with data.open("r+b") as file:
        file.seek(30_000_000)
        file.write(b"damage")
    with pytest.raises(ckptfs.IntegrityError):
        export(tmp_path / "step_1", tmp_path / "out", "safetensors")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
