"""JSON that anybody may have written: whatever it is, a value or one typed error."""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfs
from ckptfs.bench.results import decode_result, encode_result
from ckptfs.commit.log.append import read_hint
from ckptfs.commit.log.entries import (
    Delete,
    Entry,
    Fence,
    Generation,
    Gone,
    Kind,
    PartRef,
    Seal,
    Snapshot,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entries, snapshot_of, state_from_snapshot
from ckptfs.commit.manifest import (
    DomainRecord,
    FileRecord,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from ckptfs.commit.ownership.recovery_plan import decode_record, encode_record
from ckptfs.commit.save.foreign_metadata import names_save
from ckptfs.errors import ManifestError
from ckptfs.schema import Component, Count, Schema, SchemaError, parse
from tests.bench.made import made_result

BASE = Generation(1, "nonce")
SEAL = Seal(
    *("id-1", BASE, 0, True, "step_1", 1, Kind.CHECKPOINT, ("d",), "0" * 32),
    parts=(PartRef("actor", "id-2", "1" * 32, ("e",), ("host",)),),
    metrics=(("loss", 1.5),),
)
GONE = Seal(*("id-0", BASE, 0, True, "step_0", 0, Kind.CHECKPOINT, ("d",), "0" * 32))
STATE = fold_entries(
    LogState(), [Fence(BASE), GONE, SEAL, Delete("id-0", BASE), Gone("id-0", BASE)]
)
MANIFEST = Manifest(
    *("id-1", "step_1", 1),
    files=(FileRecord("id-1/__0_0.distcp", 8, "d", "id-1/__0_0.xxh3"),),
    domains=(DomainRecord("d", (0, 1), ("host",)),),
    parts=SEAL.parts,
)


def _snapshot(data: bytes) -> object:
    entry = decode_entry(data, "log/7")
    return state_from_snapshot(7, entry.body) if isinstance(entry.body, Snapshot) else entry


VALID: Mapping[str, tuple[bytes, Callable[[bytes], object]]] = MappingProxyType(
    {
        "entry": (encode_entry(Entry("w", SEAL)), lambda data: decode_entry(data, "log/1")),
        "snapshot": (encode_entry(Entry("w", snapshot_of(STATE))), _snapshot),
        "manifest": (encode_manifest(MANIFEST), lambda data: decode_manifest(data, "ckptfs.json")),
        "manifest's id": (encode_manifest(MANIFEST), names_save),
        "attempt": (encode_record("id-1", "step_1", BASE, replaces="0" * 32), decode_record),
        "part": (encode_record("id-1", "step_1", BASE, of="id", home="d"), decode_record),
        "hint": (b'{"snapshot": 7}', read_hint),
        "result": (
            encode_result(made_result()).encode(),
            lambda data: decode_result(data.decode(errors="surrogateescape"), "x.json"),
        ),
    }
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _places(one, (*path, key))
    elif isinstance(value, list):
        for number, one in enumerate(value[:4]):
            yield from _places(one, (*path, number))


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = value.copy()
    if new is ... and len(path) == 1:
        del changed[path[0]]
        return changed
    changed[path[0]] = _put(changed[path[0]], path[1:], new)
    return changed


PLACES = {name: sorted(_places(json.loads(data)), key=str) for name, (data, _) in VALID.items()}
STRANGE: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, "", "x", "..", "a/b", "\0", "\ud800", "é" * 300, "NaN"),
        *(-1, 0, 2**63, -(2**70), 10**4000, 1.5, float("nan"), float("inf")),
        *([], {}, [[]], [1], [1, "x", 2], {"": 1}, {"a": {"b": []}}, [None] * 50),
    ]
)


@pytest.mark.parametrize("name", VALID)
def test_what_was_written_is_read(name: str) -> None:
    """Each sample is one: else the mutations below would all fail at the same place."""
    data, decode = VALID[name]
    assert decode(data) is not None


@pytest.mark.parametrize("name", VALID)
@given(data=st.data())
def test_a_changed_document_is_a_value_or_a_typed_error(name: str, data: st.DataObject) -> None:
    """Any place in it replaced by anything, or taken away; twice."""
    valid, decode = VALID[name]
    record = json.loads(valid)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(PLACES[name]))
        new = data.draw(STRANGE | st.just(...)) if path else data.draw(STRANGE)
        try:
            record = _put(record, path, new)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # the first change took the place away
    _typed(decode, json.dumps(record).encode())


@pytest.mark.parametrize("name", VALID)
@given(data=st.data())
def test_changed_bytes_are_a_value_or_a_typed_error(name: str, data: st.DataObject) -> None:
    """A few of them replaced, or the end cut off."""
    valid, decode = VALID[name]
    changed = bytearray(valid[: data.draw(st.integers(0, len(valid)) | st.just(len(valid)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(changed) - 1)), max_size=4)):
        if changed:
            changed[at] = data.draw(st.integers(0, 255))
    _typed(decode, bytes(changed))


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize(
    "data",
    [b"", b"[" * 200_000, b'{"a":' * 200_000, b"9" * 5_000_000, b"\xff\xfe", b"null", b"[]", b'""'],
    ids=["nothing", "deep list", "deep object", "digits", "no text", "null", "list", "text"],
)
def test_what_is_none_is_refused(name: str, data: bytes) -> None:
    """Nothing of it is a document: a typed error, or None where the question is only who owns it."""
    _, decode = VALID[name]
    try:
        assert decode(data) is None
    except (ManifestError, SchemaError):
        return
    assert name == "manifest's id"


def _typed(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except (ManifestError, SchemaError):
        return


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "a\0b", "\ud800", "x" * 5000, 1, None])
def test_a_component_is_one(value: Any) -> None:
    """Keys are made of it; the text of the error has no pattern in it."""
    with pytest.raises(SchemaError, match=r"^(?!.*regex)"):
        Schema(Component).convert(value)
    assert Schema(Component).convert("...a b") == "...a b"


@pytest.mark.parametrize("value", [-1, 2**63, 10**400, True, 1.0, "1"])
def test_a_count_is_bounded(value: Any) -> None:
    """What is added and allocated later fits into 63 bits."""
    with pytest.raises(SchemaError):
        Schema(Count).convert(value)
    assert Schema(Count).convert(2**63 - 1) == 2**63 - 1


def test_a_schema_is_made_where_its_module_is_imported() -> None:
    """Two threads that make one crash msgspec: no function makes one."""
    made = []
    for path in sorted(Path(ckptfs.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                made += [
                    f"{path.name}:{call.lineno}"
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Name)
                    and call.func.id == "Schema"
                ]
    assert made == []


def test_threads_of_a_new_process_read_at_once() -> None:
    """The first reads of a process, from four threads, in fifty processes: none of them crashes."""
    data, decode = VALID["entry"]
    manifest, decode_it = VALID["manifest"]
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            sys.setswitchinterval(1e-6)
            barrier = threading.Barrier(4)

            def read(barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                for _ in range(20):
                    decode(data)
                    decode_it(manifest)

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0


def test_no_other_module_parses_what_lies_on_storage() -> None:
    """Everything of the log and of checkpoints goes through this module: ``json.loads`` is not called there."""
    package = Path(ckptfs.__file__).parent
    calls = [
        path.name
        for path in sorted((package / "commit").rglob("*.py"))
        if "json.loads" in path.read_text()
    ]
    assert calls == ["write.py"], "what ranks send each other is no storage"
    assert parse(b'{"a": NaN}')["a"] != parse(b'{"a": NaN}')["a"]
