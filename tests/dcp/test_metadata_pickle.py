"""What a hostile `.metadata` can do to the process that reads it: nothing that is there afterwards."""

from __future__ import annotations

import collections
import copy
import copyreg
import pathlib
import pickle
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem, metadata

import ckptfs._torch as ckptfs_torch
from ckptfs.dcp.metadata import metadata_pickle, metadata_reader
from ckptfs.dcp.metadata.metadata_pickle import DCP, names
from ckptfs.dcp.metadata.metadata_reader import decode_metadata, read_inventory
from ckptfs.dcp.metadata.metadata_writer import encode_metadata
from ckptfs.dcp.metadata.torch_names import DTYPES, LAYOUTS, TORCH, MemoryFormat, dtype_of
from ckptfs.dcp.planning import columns
from ckptfs.errors import ManifestError

NAMES = sorted({*names(), ("torch", "float32")})


# -- pickles, opcode by opcode ---------------------------------------------------------------------


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def named(module: str, name: str) -> bytes:
    """STACK_GLOBAL."""
    return text(module) + text(name) + b"\x93"


FROZENSET = named("builtins", "frozenset")
ATTRIBUTES = (
    "x",
    "exists",
    "_value_",
    "append",
    "__setstate__",
    "__class__",
    "__new__",
    "__code__",
)
VALUES = (b"K\x63", FROZENSET)
ARGUMENTS = (
    b")",
    b"K\x00\x85",
    text("torch.strided") + b"\x85",
    b"]\x85",
    b")\x85",
    text("a") + b"\x85",
)


def made(module: str, name: str) -> Iterator[bytes]:
    """The global itself, and all that can be made of it."""
    thing = named(module, name)
    yield thing
    for arguments in ARGUMENTS:
        yield thing + arguments + b"R"  # REDUCE
        yield thing + arguments + b"\x81"  # NEWOBJ
    yield thing + b")}\x92"  # NEWOBJ_EX
    yield thing + b")}" + text("x") + b"Ns\x92"
    yield b"(" + thing + b"o"  # OBJ
    yield b"(" + thing + b"No"
    yield b"(i" + f"{module}\n{name}\n".encode()  # INST
    if name == "getattr":
        yield thing + named(DCP, "_MEM_FORMAT_ENCODING") + text("TORCH_CHANNELS_LAST") + b"\x86R"


def changes() -> Iterator[bytes]:
    """Opcodes that change what is on top of the stack."""
    for attribute in ATTRIBUTES:
        for value in VALUES:
            state = b"}" + text(attribute) + value + b"s"
            yield state + b"b"  # BUILD: the object's __dict__
            yield b"N" + state + b"\x86b"  # BUILD: its slots, by setattr
    yield b"K\x01K\x02s"  # SETITEM
    yield b"(K\x01K\x02u"  # SETITEMS
    yield b"K\x01a"  # APPEND
    yield b"]a"
    yield b"(K\x01]e"  # APPENDS
    yield b"(K\x01]\x90"  # ADDITEMS
    yield b"]b"  # __setstate__ of what there is
    yield b"K\x01b"


# -- what must stay as it is -----------------------------------------------------------------------


def shared() -> list[Any]:
    """Objects of this process that are within reach, or near."""
    encoding: Any = ckptfs_torch.mem_format_encoding()
    found: list[Any] = [encoding, *encoding, collections.OrderedDict, torch.Size, torch.dtype]
    found += [metadata_pickle, metadata_reader, metadata, filesystem, pathlib, copyreg, columns]
    for module in (metadata_pickle, metadata_reader, metadata, filesystem, pathlib):
        found += [value for value in vars(module).values() if hasattr(value, "__dict__")]
    return found


def snapshot() -> dict[str, Any]:
    """Their attributes, each by its identity, and the process's registries."""
    seen: dict[str, Any] = {
        f"{number}: {one!r}": {name: id(value) for name, value in vars(one).items()}
        for number, one in enumerate(shared())
    }
    for one in shared():
        if callable(one) and hasattr(one, "__code__"):
            seen[f"code of {one!r}"] = (id(one.__code__), one.__defaults__)
    seen["torch"] = list(vars(torch))
    seen["modules"] = set(sys.modules)
    seen["codes"] = dict(vars(copyreg)["_extension_cache"])
    return seen


def refused(pickle: bytes) -> None:
    """Fail unless it is refused."""
    try:
        read_inventory(pickle, "here")
    except ManifestError:
        return
    raise AssertionError(pickle)


@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_what_is_handed_out_does_not_change_the_process(name: tuple[str, str]) -> None:
    """BUILD, SETITEMS, APPENDS, ADDITEMS on every known name and on all that can be made of it."""
    before = snapshot()
    for thing in made(*name):
        for change in changes():
            refused(b"\x80\x04" + thing + change + b".")
    assert snapshot() == before


pieces = st.sampled_from(
    [
        *(named(*name) for name in NAMES),
        *(thing for name in NAMES for thing in made(*name)),
        *changes(),
        *(text(attribute) for attribute in ATTRIBUTES),
        *VALUES,
        *ARGUMENTS,
        *(b"(", b"]", b"\x8f", b"R", b"\x81", b"\x92", b"b", b"s", b"u", b"a", b"e", b"\x90"),
        *(b"\x85", b"\x86", b"\x87", b"t", b"l", b"d", b"\x91", b"0", b"1", b"2", b"o", b"\x94"),
        *(bytes([opcode, number]) for opcode in b"hqK" for number in range(3)),
        *(b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"\x97", b"\x98", b"Q"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=12))
def test_no_sequence_of_opcodes_changes_the_process(opcodes: list[bytes]) -> None:
    """Any opcodes in any order: ManifestError, or metadata, and the process is as it was."""
    before = snapshot()
    raw = b"\x80\x04" + b"".join(opcodes) + b"."
    for read in (decode_metadata, read_inventory):
        try:
            read(raw, "here")
        except ManifestError:
            continue
    assert snapshot() == before


# -- ways past the list of names -------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_extension_codes_are_refused(
    opcode: bytes, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code that the process has registered, looked up before or not: nothing is called or kept."""
    called: list[str] = []
    codes: dict[int, Any] = {0xF0: called.append} if is_cached else {}
    cache = vars(copyreg)["_extension_cache"]
    for code, found in codes.items():
        monkeypatch.setitem(cache, code, found)
    copyreg.add_extension(DCP, "Metadata", 0xF0)
    try:
        before = dict(cache)
        raw = b"\x80\x04" + opcode + text("called") + b"\x85R."
        for read in (decode_metadata, read_inventory):
            with pytest.raises(ManifestError, match="an extension code"):
                read(raw, "here")
        assert cache == before
        assert not called
    finally:
        vars(copyreg)["_inverted_registry"].pop(0xF0)
        vars(copyreg)["_extension_registry"].pop((DCP, "Metadata"))
        cache.pop(0xF0, None)


def test_no_name_makes_torch_import_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports some of its modules when they are asked for: only what is there is looked at."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    refused(b"\x80\x04" + named("torch", "onnx") + b".")
    refused(b"\x80\x04" + named("torch.serialization", "_get_layout") + text("onnx") + b"\x85R.")
    with pytest.raises(ValueError, match="'onnx' is not a dtype"):
        columns._named("onnx", torch.dtype)
    assert not asked


# -- memory ----------------------------------------------------------------------------------------


def put(number: int) -> bytes:
    """BINPUT."""
    return b"q" + bytes([number])


def doubled_path(times: int) -> bytes:
    """A path of two paths of two paths ..."""
    path = named("pathlib", "PurePosixPath") + put(0) + b"0"
    one = b"h\x00" + text("directory") + b"\x85R" + put(1) + b"0"
    return path + one + (b"h\x00h\x01h\x01\x86R" + put(1) + b"0") * times + b"h\x01"


def copied(module: str, name: str, times: int) -> bytes:
    """One list of a thousand numbers, made into something again and again."""
    numbers = b"](" + b"".join(b"M" + n.to_bytes(2, "little") for n in range(1000)) + b"e"
    start = named(module, name) + put(0) + b"0" + numbers + put(1) + b"0]"
    return start + b"(" + b"h\x00h\x01\x85R" * times + b"e"


@pytest.mark.parametrize(
    "opcodes",
    [
        doubled_path(22),
        copied("builtins", "set", 2000),
        copied("builtins", "frozenset", 2000),
        copied("torch", "Size", 2000),
    ],
    ids=["path", "set", "frozenset", "Size"],
)
def test_nothing_is_copied_more_often_than_the_file_is_long(opcodes: bytes) -> None:
    """A few bytes that copy what is in the memo: refused before it is megabytes."""
    for read in (decode_metadata, read_inventory):
        tracemalloc.start()
        try:
            with pytest.raises(ManifestError):
                read(b"\x80\x04" + opcodes + b".", "here")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3_000_000


def test_an_error_does_not_tell_all_of_what_is_wrong() -> None:
    """A path that is a list of two lists of two lists ...: its repr would be as long as two to the ..."""
    nested: Any = []
    for _ in range(20):
        nested = [nested, nested]
    made = metadata.Metadata(
        {}, storage_data={metadata.MetadataIndex("k"): ckptfs_torch.storage_info(nested, 0, 1)}
    )
    with pytest.raises(ManifestError) as caught:
        decode_metadata(encode_metadata(made), "here")
    assert len(str(caught.value)) < 1000


# -- what hangs or kills an unpickler --------------------------------------------------------------


def metadata_with(planner_data: bytes, items: bytes = b"}") -> bytes:
    """A .metadata that is whole but for these opcodes."""
    return b"".join(
        [
            b"\x80\x04",
            named(DCP, "Metadata"),
            b")\x81}(",
            text("state_dict_metadata") + b"}",
            text("planner_data") + planner_data,
            text("storage_data") + items,
            b"ub.",
        ]
    )


def colliding_index(number: int) -> bytes:
    """The index of an item with an offset that has the hash of (0, 0), whatever the number is."""
    multiple = number * ((1 << 61) - 1)
    raw = multiple.to_bytes(8, "little", signed=True)
    size = named("torch", "Size") + b"\x8a\x08" + raw + b"K\x00\x86\x85R"
    index = named(DCP, "MetadataIndex") + b")\x81}("
    return index + text("fqn") + text("k") + text("offset") + size + b"ub"


def crafted_offsets(count: int) -> list[tuple[int, int]]:
    """Offsets of two positive numbers with one hash: tuples are hashed without a key."""
    mask, p1, p2, p5 = (
        (1 << 64) - 1,
        11400714785074694791,
        14029467366897019727,
        2870177450012600261,
    )

    def turned(acc: int) -> int:
        return ((acc << 31) | (acc >> 33)) & mask

    found: list[tuple[int, int]] = []
    back = pow(p2, -1, 1 << 64)
    first = 0
    target = 12345678901234567
    while len(found) < count:
        first += 1
        acc = turned((p5 + first * p2) & mask) * p1 & mask
        second = (target - acc) * back & mask
        if second < (1 << 61) - 1:
            found.append((first, second))
    assert len({hash(one) for one in found}) == 1
    return found


def crafted_items(count: int) -> bytes:
    """Items of one key with places that collide."""
    info = named("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81}("
    info += text("relative_path") + text("f") + text("offset") + b"K\x00"
    info += text("length") + b"K\x01" + b"ub"
    pieces = [b"}("]
    for pair in crafted_offsets(count):
        numbers = b"".join(b"\x8a\x08" + n.to_bytes(8, "little") for n in pair)
        size = named("torch", "Size") + numbers + b"\x86\x85R"
        index = named(DCP, "MetadataIndex") + b")\x81}(" + text("fqn") + text("k")
        pieces.append(index + text("index") + b"N" + text("offset") + size + b"ub" + info)
    return b"".join([*pieces, b"u"])


def doubled(times: int) -> bytes:
    """A tuple of the same two tuples, each of the same two ...: its hash takes 2 ** times steps."""
    return b")" + b"\x94" + b"2\x86\x94" * times


HOSTILE = {
    "tuples in tuples as a key": metadata_with(b"}" + doubled(44) + b"Ns"),
    "two million tuples as a key": metadata_with(b"})" + b"\x85" * 2_000_000 + b"Ns"),
    "tuples in tuples as a layout": metadata_with(
        named("torch.serialization", "_get_layout") + doubled(44) + b"\x85R"
    ),
    "tuples in tuples as a memory format": metadata_with(
        named(DCP, "_MEM_FORMAT_ENCODING") + doubled(44) + b"\x85R"
    ),
    "tuples in tuples as a member's name": metadata_with(
        named("builtins", "getattr") + named(DCP, "_MEM_FORMAT_ENCODING") + doubled(44) + b"\x86R"
    ),
    "two million lists": metadata_with(b"]" * 200_000 + b"a" * 199_999),
    "a list in itself": metadata_with(b"]\x942a"),
    "a memo of 2 ** 28": b"\x80\x02Nr\x00\x00\x00\x10.",
    "a memo of 2 ** 32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a text of 2 ** 62 bytes": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",
    "a bytearray of 2 ** 40": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "an integer of a megabyte": b"\x80\x02\x8b"
    + (1 << 20).to_bytes(4, "little")
    + bytes(1 << 20)
    + b".",
    "integers with one hash": metadata_with(
        b"}("
        + b"".join(
            b"\x8a\x0d" + (n * ((1 << 61) - 1)).to_bytes(13, "little") + b"N" for n in range(50_000)
        )
        + b"u"
    ),
    "keys of tuples with one hash": metadata_with(
        b"}("
        + b"".join(
            b"\x8a\x08" + a.to_bytes(8, "little") + b"\x8a\x08" + b.to_bytes(8, "little") + b"\x86N"
            for a, b in crafted_offsets(20_000)
        )
        + b"u"
    ),
    "places with one hash": metadata_with(b"}", crafted_items(20_000)),
    "lists that double": metadata_with(b"]\x94" + b"](h\x00h\x00e\x94q\x00" * 60),
    "one list of chunks in many tensors": b"",
}
del HOSTILE["one list of chunks in many tensors"]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_hangs_or_kills_an_unpickler_is_a_typed_error(name: str) -> None:
    """Small files that make Python's unpickler hang, overflow its stack or allocate gigabytes: ManifestError,
    in memory of the size of the file.
    """
    raw = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError):
            read_inventory(raw, "here")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000 + 100 * len(raw)


def test_one_list_of_chunks_in_many_tensors_is_refused() -> None:
    """A thousand tensors that share a list of a thousand chunks: it is not walked a thousand times."""
    chunk = named(DCP, "ChunkStorageMetadata") + b")\x81}(" + text("offsets") + SIZE_1
    chunks = b"](" + (chunk + text("sizes") + SIZE_1 + b"ub") * 1000 + b"eq\x000"
    state = b"(" + named("torch", "float32") + b"NNNNt"
    tensor = named(DCP, "TensorStorageMetadata") + b")\x81}(" + text("properties")
    tensor += named(DCP, "TensorProperties") + b")\x81" + state + b"b" + text("size") + SIZE_1
    tensor += text("chunks") + b"h\x00ub"
    entries = b"}(" + b"".join(text(f"t{n}") + tensor for n in range(5000)) + b"u"
    raw = b"\x80\x04" + chunks + named(DCP, "Metadata") + b")\x81}(" + text("state_dict_metadata")
    raw += entries + text("storage_data") + b"}ub."
    with pytest.raises(ManifestError, match="more chunks than it has bytes"):
        read_inventory(raw, "here")


SIZE_1 = named("torch", "Size") + b"K\x04\x85\x85R"


def test_a_state_that_is_given_twice_is_refused() -> None:
    """BUILD again on one object."""
    raw = b"\x80\x04" + named(DCP, "TensorProperties") + b")\x81q\x00(K\x01tb" + b"h\x00b."
    with pytest.raises(
        ManifestError, match="it sets the state of a value that takes none or has one already"
    ):
        read_inventory(raw, "here")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value", [{1, 2}, frozenset({"a"}), set(), (1, {1, 2}), [{"a": {3.5}}], torch.channels_last]
)
def test_what_a_planner_left_is_read_as_it_was(value: Any, protocol: int) -> None:
    """Sets above all, which older protocols make by a call."""
    saved = metadata.Metadata({}, {"key": value}, {}, None)
    if isinstance(value, torch.memory_format):
        encoding: Any = ckptfs_torch.mem_format_encoding()
        saved = metadata.Metadata({}, {"key": encoding.TORCH_CHANNELS_LAST}, {}, None)
    found = decode_metadata(pickle.dumps(saved, protocol), "here")
    assert found.planner_data == saved.planner_data
    assert type(found.planner_data["key"]) in (type(saved.planner_data["key"]), set)


@pytest.mark.parametrize("named_only", [torch.Size, set, collections.OrderedDict, pathlib.PurePath])
def test_what_may_be_called_is_no_value(named_only: Any) -> None:
    """Our stand-in for it would be handed to torch's planner."""
    saved = metadata.Metadata({}, {"key": named_only}, {}, None)
    with pytest.raises(ManifestError, match="where none is allowed"):
        decode_metadata(pickle.dumps(saved), "here")


def test_a_record_is_read_alike_whole_and_opcode_by_opcode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records that are recognised at once give what their opcodes give one after the other."""
    size = torch.Size([2, 70_000, 1, 1 << 40])
    begin = torch.Size([0, 0, 0, 0])
    chunk = metadata.ChunkStorageMetadata(begin, size)
    entries: dict[str, Any] = {
        f"t{n}": metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.float16, requires_grad=bool(n % 2)), size, [chunk]
        )
        for n in range(3)
    }
    nothing = metadata.ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    entries["scalar"] = metadata.TensorStorageMetadata(
        metadata.TensorProperties(), torch.Size([]), [nothing]
    )
    items = {
        metadata.MetadataIndex(f"t{n}", begin, n or None): ckptfs_torch.storage_info(
            "f", 1 << n * 15, 7
        )
        for n in range(3)
    }
    items[metadata.MetadataIndex("object")] = ckptfs_torch.storage_info("g", 0, 7)
    made = metadata.Metadata(entries, storage_data=items)
    raw = encode_metadata(made)
    at_once = decode_metadata(raw, "here")
    assert at_once == made
    monkeypatch.setattr(metadata_pickle._Machine, "record", lambda *_: 0)
    assert decode_metadata(raw, "here") == made
    assert {i: i.index for i in at_once.storage_data} == {i: i.index for i in made.storage_data}


# -- files as the bulk writer makes them -----------------------------------------------------------

NUMBERS = st.sampled_from([0, 70_000, 80_000, 1, 4, 300, 1 << 31, (1 << 62) + 7, 1 << 40])


def number(value: int) -> bytes:
    """As the bulk writer has it: BININT, or LONG1 of eight bytes; small ones and middling ones as pickle has."""
    if value in (1, 4):
        return b"K" + bytes([value])
    if value == 300:
        return b"M" + value.to_bytes(2, "little")
    if value == 1 << 40:
        return b"\x8a\x06" + value.to_bytes(6, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x08" + value.to_bytes(8, "little")


class Bulk:
    """Opcodes without MEMOIZE: names and keys come from the memo, by numbers."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.head = b"\x80\x04"

    def kept(self, thing: object, opcodes: bytes) -> None:
        """Put something into the memo."""
        place = self.numbers[thing] = len(self.numbers)
        self.head += opcodes + b"r" + place.to_bytes(4, "little") + b"0"

    def get(self, thing: object) -> bytes:
        """Get it from there."""
        place = self.numbers[thing]
        return b"h" + bytes([place]) if place < 18 else b"j" + place.to_bytes(4, "little")

    def size(self, lengths: list[int]) -> bytes:
        """A torch.Size."""
        end = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}[len(lengths)]
        return self.get("Size") + b"".join(map(number, lengths)) + end + b"\x85R"

    def new(self, name: str) -> bytes:
        """An object, to be built."""
        return self.get(name) + b")\x81}("


def bulk(chunks: list[list[int]], items: list[tuple[Any, ...]]) -> bytes:
    """One tensor of these offsets in chunks of one; items: key, hint, offsets, path, and a range."""
    out = Bulk()
    for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"):
        out.kept(name, named(DCP, name))
    out.kept("MetadataIndex", named(DCP, "MetadataIndex"))
    out.kept("_StorageInfo", named(metadata_pickle.FILESYSTEM, "_StorageInfo"))
    out.kept("Size", named("torch", "Size"))
    fields = ("state_dict_metadata", "storage_data", "properties", "size", "chunks", "offsets")
    for name in (*fields, "sizes", "fqn", "index", "offset", "relative_path", "length"):
        out.kept(name, text(name))
    flags = named("torch", "float32") + named("torch.serialization", "_get_layout")
    state = flags + text("torch.strided") + b"\x85R" + b"\x89" + named(DCP, "_MEM_FORMAT_ENCODING")
    out.kept("state", b"(" + state + b"K\x00\x85R\x89t")
    for name in ("a", "b", "f", "g"):
        out.kept(name, text(name))
    dims = len(chunks[0])
    body = [out.new("Metadata"), out.get("state_dict_metadata"), b"}(", out.get("a")]
    body += [out.new("TensorStorageMetadata"), out.get("properties"), out.get("TensorProperties")]
    body += [b")\x81", out.get("state"), b"b", out.get("size"), out.size([9] * dims)]
    body += [out.get("chunks"), b"]("]
    for offsets in chunks:
        body += [out.new("ChunkStorageMetadata"), out.get("offsets"), out.size(offsets)]
        body += [out.get("sizes"), out.size([1] * dims), b"ub"]
    body += [b"eubu", out.get("storage_data"), b"}("]
    for key, hint, offsets, path, begin, length in items:
        body += [out.new("MetadataIndex"), out.get("fqn"), out.get(key), out.get("index")]
        body += [b"N" if hint is None else number(hint)]
        body += [] if offsets is None else [out.get("offset"), out.size(offsets)]
        body += [b"ub", out.new("_StorageInfo"), out.get("relative_path"), out.get(path)]
        body += [out.get("offset"), number(begin), out.get("length"), number(length), b"ub"]
    return out.head + b"".join([*body, b"uub."])


def runs(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Two elements in any order, and then another two: many have the form of the one before."""
    turns = st.lists(st.booleans(), min_size=1, max_size=40)
    several = st.lists(st.tuples(of, of, turns), min_size=1, max_size=4)
    return several.map(lambda found: [(a, b)[turn] for a, b, turns in found for turn in turns])


SIZES = st.integers(0, 3).flatmap(
    lambda dims: runs(st.lists(NUMBERS, min_size=dims, max_size=dims))
)
PLACED = st.tuples(
    st.sampled_from("ab"),
    st.none() | NUMBERS,
    st.none() | st.lists(NUMBERS, max_size=3),
    st.sampled_from("fg"),
    NUMBERS,
    NUMBERS,
)


def test_a_key_that_nobody_kept_is_refused_among_many() -> None:
    """A number that PUT left out means nothing, in columns too."""
    raw = bulk(
        [[0]] * 40, [("a", 0, [number], "f", number, 7) for number in range(0, 4_000_000, 100_000)]
    )
    last = raw.rindex(b"j\x14\0\0\0")
    assert read_or_refused(raw) is not None
    hole = raw.replace(b"r\x15\0\0\0", b"r\x25\0\0\0")  # of "b", which nothing gets
    assert read_or_refused(hole) is not None
    hidden = hole[:last] + b"j\x15\0\0\0" + hole[last + 5 :]
    with pytest.raises(ManifestError, match="refers to"):
        decode_metadata(hidden, "here")


def read_or_refused(raw: bytes) -> Any:
    """The metadata, with the hints of its places; None where it is refused."""
    try:
        found = decode_metadata(raw, "here")
    except ManifestError:
        return None
    return found, [(place, place.index, info) for place, info in found.storage_data.items()]


@settings(max_examples=300, deadline=None)
@given(SIZES, runs(PLACED), st.binary(max_size=6), st.none() | st.integers(0))
def test_columns_are_read_as_their_opcodes_are(
    chunks: list[list[int]], items: list[tuple[Any, ...]], noise: bytes, at: int | None
) -> None:
    """Many records of one length are read at once: what comes out is what each opcode says, or an error
    where these are one, damaged bytes included.
    """
    raw = bulk(chunks, items)
    if at is None:
        assert read_or_refused(raw) is not None
    else:
        at %= len(raw)
        raw = raw[:at] + noise + raw[at + len(noise) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_pickle._Machine, "record", lambda *_: 0)
        expected = read_or_refused(raw)
    assert read_or_refused(raw) == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 4000))
def test_damaged_bytes_are_a_typed_error(noise: bytes, at: int) -> None:
    """Any bytes written over a .metadata of real records: ManifestError, or metadata."""
    size = torch.Size([2, 3])
    begin = torch.Size([0, 0])
    tensor = metadata.TensorStorageMetadata(
        metadata.TensorProperties(), size, [metadata.ChunkStorageMetadata(begin, size)]
    )
    raw = encode_metadata(
        metadata.Metadata(
            {f"t{n}": tensor for n in range(9)},
            storage_data={
                metadata.MetadataIndex(f"t{n}", begin, 0): ckptfs_torch.storage_info("f", n, 7)
                for n in range(9)
            },
            planner_data={f"t{n}": ("t", n) for n in range(9)},
        )
    )
    at %= len(raw)
    damaged = raw[:at] + noise + raw[at + len(noise) :]
    try:
        decode_metadata(damaged, "here")
    except ManifestError:
        return


# -- the names of torch's values ---------------------------------------------------------------------


def of_kind(kind: type) -> dict[str, Any]:
    """Torch's values of one kind, by their names."""
    return {name: value for name, value in vars(torch).items() if isinstance(value, kind)}


def test_dtypes_and_layouts_are_known_as_torch_has_them() -> None:
    """Name, size and object of each; what is not in the table is found in the torch that is installed."""
    for name, dtype in of_kind(torch.dtype).items():
        known = DTYPES[name]
        assert (TORCH[known], repr(known), known.itemsize) == (dtype, str(dtype), dtype.itemsize)
        assert known is DTYPES[name] is dtype_of(dtype)
    for name, layout in of_kind(torch.layout).items():
        assert TORCH[LAYOUTS[f"torch.{name}"]] == layout
    for name in ("Size", "load", "float1024"):
        with pytest.raises(KeyError):
            DTYPES[name]
        with pytest.raises(KeyError):
            LAYOUTS[name]


def test_a_name_that_was_sent_to_another_process_is_the_value_of_that_name() -> None:
    """Ranks compare what each described; values are compared by identity."""
    for value in (*DTYPES.values(), *LAYOUTS.values(), *MemoryFormat):
        assert pickle.loads(pickle.dumps(value)) is value
        assert copy.deepcopy(value) is value


def test_memory_formats_are_those_of_torch() -> None:
    """Members, values and their order."""
    encoding: Any = ckptfs_torch.mem_format_encoding()
    assert {one.name: one.value for one in MemoryFormat} == {
        one.name: one.value for one in encoding
    }
    assert [TORCH[one] for one in MemoryFormat] == [*encoding]
