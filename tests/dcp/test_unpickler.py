"""What a hostile `.metadata` can do to the process that reads it: nothing that is there afterwards."""

from __future__ import annotations

import collections
import copyreg
import pathlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem, metadata

import ckptfs._torch as ckptfs_torch
from ckptfs.dcp import columns, decoding, standins, unpickler
from ckptfs.dcp.decoding import decode_metadata
from ckptfs.dcp.standins import read_inventory
from ckptfs.dcp.unpickler import DCP, Unpickler
from ckptfs.errors import ManifestError

NAMES = sorted({*Unpickler(b"", "here")._names, *standins._STAND_INS, ("torch", "float32")})


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
    found += [unpickler, standins, decoding, metadata, filesystem, pathlib, copyreg, columns]
    for module in (unpickler, standins, decoding, metadata, filesystem, pathlib):
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
    """Fail unless it is refused by both decoders: what one does not read the other is asked for."""
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
    with pytest.raises(ValueError, match="'onnx' is no dtype"):
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
        decoding._check(made, "here")
    assert len(str(caught.value)) < 1000


def test_classes_that_are_handed_out_take_no_attribute() -> None:
    """Not even from Python: what a pickle gets is sealed."""
    known: dict[tuple[str, str], Callable[..., Any]] = dict(Unpickler(b"", "here")._names)
    kinds = [
        kind for kind in [*known.values(), *standins._STAND_INS.values()] if type(kind) is type
    ]
    assert not kinds
    sealed = [kind for kind in known.values() if isinstance(kind, type)]
    assert len(sealed) == 9
    for kind in sealed:
        with pytest.raises(TypeError, match="cannot be given 'x'"):
            kind.x = 1  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="cannot lose '__new__'"):
            del kind.__new__
