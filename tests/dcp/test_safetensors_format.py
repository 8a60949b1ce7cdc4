"""The safetensors codec and the plan of an export: what is written comes back, what is false is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.dcp.metadata.torch_names import DTYPES
from ckptfs.dcp.safetensors import safetensors_format as format_of
from ckptfs.dcp.safetensors.exporter import HeldTensor, order, plan_files
from ckptfs.dcp.safetensors.safetensors_format import (
    TensorEntry,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
)
from ckptfs.errors import IntegrityError, ManifestError, StateError

KEYS = st.text(min_size=1, max_size=8).filter(lambda key: key != "__metadata__")
KINDS = st.sampled_from([DTYPES[n] for n in ("float64", "bfloat16", "float8_e4m3fn", "bool")])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ENTRIES = st.dictionaries(KEYS, st.tuples(KINDS, SHAPES), max_size=6).map(
    lambda found: [TensorEntry(key, *rest) for key, rest in found.items()]
)


def file_of(described: Any, data: bytes = b"") -> tuple[bytes, int]:
    """The head of a file with this JSON, and the size of the whole."""
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + len(data)


@settings(max_examples=100, deadline=None)
@given(ENTRIES, st.dictionaries(KEYS, st.text(max_size=5), max_size=3))
def test_what_is_encoded_comes_back(entries: list[TensorEntry], metadata: dict[str, str]) -> None:
    """Any tensors and metadata; each begins aligned, right behind the one before."""
    head, header = encode_header(entries, metadata)
    size = header.size_bytes + sum(entry.size_bytes for entry in entries)
    found = decode_header(head, size, "here")
    assert found.metadata == metadata
    assert {e.key: (e.dtype, e.shape, e.start) for e in found.entries} == {
        e.key: (e.dtype, e.shape, e.start) for e in header.entries
    }
    assert {e.key for e in header.entries} == {e.key for e in entries}
    assert all(e.start % e.dtype.itemsize == 0 for e in header.entries)


@settings(max_examples=120, deadline=None)
@given(ENTRIES, st.data())
def test_a_changed_header_never_leads_out_of_its_file(
    entries: list[TensorEntry], data: Any
) -> None:
    """Whatever byte is changed: refused with a typed error, or every tensor is still in the file."""
    head, header = encode_header(entries, {"format": "pt"})
    size = header.size_bytes + sum(entry.size_bytes for entry in entries)
    damaged = bytearray(head)
    damaged[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_header(bytes(damaged), size, "here")
    except (ManifestError, IntegrityError):
        return
    at = found.size_bytes
    for entry in found.entries:
        assert entry.start == at
        at += entry.size_bytes
    assert at == size


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "does not fill"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "begins at"),
        ({"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, "Q9"),
        ({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, "torch does not have"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "not described"),
        ({"a": 1}, "not described"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        (b'{"a": {}, "a": {}}', "twice"),
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (b"[" * 50_000, "JSON"),
        ({}, "after its tensors"),
    ],
)
def test_headers_that_cannot_be_are_refused(described: Any, why: str) -> None:
    """Each false claim is named, before anything is read by it."""
    head, size = file_of(described, b"1234")
    with pytest.raises(ManifestError, match=why):
        decode_header(head, size, "here")


def test_two_tensors_never_share_bytes() -> None:
    """Overlapping ranges would give two tensors one content."""
    fields = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    head, size = file_of({"a": fields, "b": fields}, b"1234")
    with pytest.raises(ManifestError, match="begins at"):
        decode_header(head, size, "here")


def test_a_file_that_is_cut_short_is_an_integrity_error() -> None:
    """In the length, in the header, and in the data; a huge length is refused, not allocated."""
    head, header = encode_header([TensorEntry("a", DTYPES["float32"], (4,))], {})
    for size, raw in ((4, head[:4]), (header.size_bytes - 1, head[:8]), (len(head) + 15, head)):
        with pytest.raises(IntegrityError, match="cut short"):
            decode_header(raw, size, "here")
    with pytest.raises(ManifestError, match="its header would have"):
        format_of.header_size(struct.pack("<Q", 1 << 60), 1 << 62, "here")


def test_an_index_names_files_of_its_own_directory_only() -> None:
    """What is encoded comes back; a name that leads elsewhere is refused."""
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert decode_index(encode_index(files, 8), "here") == files
    for name in ("../a.safetensors", "/a.safetensors", "a.bin", "b\\a.safetensors"):
        with pytest.raises(ManifestError, match="not the name of a file in this directory"):
            decode_index(encode_index({"a": name}, 8), "here")
    for raw in (b"{}", b'{"weight_map": {"a": 1}}', b"nonsense"):
        with pytest.raises(ManifestError):
            decode_index(raw, "here")


def held(
    *sizes: int, ranks: Callable[[int], tuple[int, ...]] = lambda _: (0, 1)
) -> list[HeldTensor]:
    """Tensors of so many bytes."""
    return [
        HeldTensor(TensorEntry(f"t{n}", DTYPES["int8"], (size,)), ranks(n))
        for n, size in enumerate(sizes)
    ]


def test_files_are_filled_up_to_the_limit_and_shared_out() -> None:
    """No file is larger than asked for unless one tensor is; owners have about as much each."""
    files = plan_files(held(4, 4, 4, 20, 4), max_bytes=8, world=2)
    assert [[e.key for e in f.entries] for f in files] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert [f.name for f in files][-1] == "model-00004-of-00004.safetensors"
    load = [sum(f.size_bytes for f in files if f.owner == rank) for rank in (0, 1)]
    assert sorted(load) == [16, 20]


def test_one_file_has_the_plain_name_and_many_ranks_get_files_each() -> None:
    """A small model is one file; where 256 MiB are left for each, every rank writes."""
    [file] = plan_files(held(4, 4), max_bytes=5 * 10**9, world=2)
    assert file.name == "model.safetensors"
    large = plan_files(held(*[128 << 20] * 8), max_bytes=5 * 10**9, world=2)
    assert sorted(f.owner for f in large) == [0, 1]


def test_only_a_rank_that_holds_all_of_a_file_writes_it() -> None:
    """Pipeline stages get files of their own; a mapping that mixes them is refused."""
    stages = held(4, 4, 4, 4, ranks=lambda n: (n % 2,))
    files = plan_files(stages, max_bytes=100, world=2)
    assert {tuple(e.key for e in f.entries): f.owner for f in files} == {
        ("t0", "t2"): 0,
        ("t1", "t3"): 1,
    }
    with pytest.raises(StateError, match="no rank holds"):
        plan_files(
            stages, max_bytes=100, world=2, fqn_to_index_mapping={h.entry.key: 1 for h in stages}
        )


def test_a_mapping_decides_alone() -> None:
    """Numbers are those of the user, the highest one names all; a key without one is refused."""
    mapping = {"t0": 2, "t1": 1, "gone": 3}
    files = plan_files(held(4, 4), max_bytes=1, world=2, fqn_to_index_mapping=mapping)
    assert {f.name: f.entries[0].key for f in files} == {
        "model-00001-of-00003.safetensors": "t1",
        "model-00002-of-00003.safetensors": "t0",
    }
    with pytest.raises(StateError, match="gives 't1' no file"):
        plan_files(held(4, 4), max_bytes=1, world=2, fqn_to_index_mapping={"t0": 1})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 4))
def test_every_tensor_is_gathered_once_and_files_stay_in_order(
    sizes: list[int], limit: int, world: int
) -> None:
    """Of each owner one file after another, and in each the order of its header."""
    everybody = tuple(range(world))
    files = plan_files(held(*sizes, ranks=lambda _: everybody), max_bytes=limit, world=world)
    seen = list(order(files))
    assert sorted(e.key for _, e in seen) == sorted(f"t{n}" for n in range(len(sizes)))
    for owner in everybody:
        mine = [e for n, e in seen if files[n].owner == owner]
        assert mine == [e for f in files if f.owner == owner for e in f.entries]


def test_owners_take_turns() -> None:
    """While one owner writes a tensor the next is gathered for another: all have something to do."""
    files = plan_files(held(*[4] * 8), max_bytes=16, world=2)
    assert [files[n].owner for n, _ in order(files)] == [0, 1] * 4
