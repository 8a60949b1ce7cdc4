"""What torch.save writes passes; what would hang, crash or fill the process is refused before torch sees it."""

from __future__ import annotations

import collections
import io
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.dcp.metadata import pickle_scan
from ckptfs.dcp.metadata.pickle_scan import check_archive
from ckptfs.dcp.object_file import read_object
from ckptfs.dcp.planning.leaves import load_leaf
from ckptfs.errors import IntegrityError
from ckptfs.uri import Uri

SHARED = [1.5] * 100


@pytest.mark.parametrize(
    "value",
    [
        {"state": {0: {"step": 3}, 1: {"step": 4}}, "groups": [{"lr": 0.1, "params": [0, 1]}]},
        collections.OrderedDict(a=torch.arange(5), b=(1, "x", None, 2.5, b"y")),
        {(1, 2): "tuple", ("a", (3, 4)): "nested", -1: "a", -2: "b", 2.5: "c", None: "d"},
        {n: n for n in range(5000)},
        [SHARED] * 1000,
        torch.Size([2, 3]),
        {torch.Size([n, 2]): n for n in range(100)},
    ],
    ids=["optimizer", "ordered", "keys", "many keys", "shared", "size", "keys of sizes"],
)
@pytest.mark.parametrize("is_archive", [True, False])
def test_what_torch_saves_passes(value: Any, is_archive: bool) -> None:
    """Archives, and files as torch wrote them before 1.6."""
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=is_archive)
    check_archive(stream)
    assert stream.tell() == 0


def archive(data: bytes, how: int = zipfile.ZIP_STORED) -> io.BytesIO:
    """A torch.save archive around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as made:
        made.writestr("archive/data.pkl", data)
        made.writestr("archive/byteorder", "little")
        made.writestr("archive/version", "3\n")
    return buffer


def doubled(times: int) -> bytes:
    """A tuple of the same two tuples, each of the same two ..."""
    steps = (b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(times))
    return b"\x80\x02})q\x00" + b"".join(steps) + b"Ns."


def lists(times: int) -> bytes:
    """A list of the same two lists, each of the same two ..."""
    steps = (b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(times))
    return b"\x80\x02]q\x00" + b"".join(steps) + b"."


COLLIDING = b"".join(pickle.dumps(n * (2**61 - 1), protocol=2)[2:-1] + b"N" for n in range(1, 1000))
HOSTILE = {
    "tuples in tuples as a key": archive(doubled(44)),
    "many tuples as a key": archive(b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."),
    "keys with one hash": archive(b"\x80\x02}(" + COLLIDING + b"u."),
    "lists that double": archive(lists(44)),
    "a bytearray of 3 GiB": archive(b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
    "compressed zeros": archive(bytes(1 << 20), zipfile.ZIP_DEFLATED),
    "keys with one hash, no archive": io.BytesIO(b"\x80\x02}(" + COLLIDING + b"u."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_hang_or_kill_is_refused(name: str) -> None:
    """Before torch unpickles it, with the error of what would run code."""
    with pytest.raises(pickle.UnpicklingError):
        load_leaf(HOSTILE[name])
    with pytest.raises(ValueError, match=r"."):
        check_archive(HOSTILE[name])


@pytest.mark.parametrize(
    ("begin", "end"), [(b"N" * 300 + b"t", b"\x85"), (b"]", b"a")], ids=["tuples", "lists"]
)
def test_what_is_nested_deeper_than_anybody_writes_is_refused(begin: bytes, end: bytes) -> None:
    """It is read in time that its length pays for, and it cannot be written again."""
    most = pickle_scan._MOST_DEPTH
    lists = begin == b"]"
    for depth, is_fine in ((most // 2, True), (most + 400, False)):
        inner = begin * depth + b"N" if lists else b"(" + begin
        stream = archive(b"\x80\x02" + inner + end * depth + b".")
        if is_fine:
            check_archive(stream)
        else:
            with pytest.raises(ValueError, match="nested more than"):
                check_archive(stream)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_archives_are_one_kind_of_error(data: st.DataObject) -> None:
    """Any byte changed, or cut anywhere: ValueError, or it passes."""
    stream = io.BytesIO()
    torch.save({"a": [1, 2, {"b": (3, "c")}], "t": torch.arange(3)}, stream)
    raw = bytearray(stream.getvalue())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    for damaged in (bytes(raw), bytes(raw[:at]), data.draw(st.binary(max_size=60))):
        try:
            check_archive(io.BytesIO(damaged))
        except ValueError:
            continue


def _colliding(path: Path) -> None:
    """A file of keys with one hash: of 100,000 a dict takes minutes, in C."""
    torch.save({n * (2**61 - 1): n for n in range(1, 200)}, path)


def test_single_files_are_looked_at_before_torch_unpickles_them(tmp_path: Path) -> None:
    """By load_object and by what frameworks' files are read with, from disk and over the wire; a caller that
    trusts a file gets it.
    """
    _colliding(tmp_path / "x.pt")
    for uri in (f"file://{tmp_path}/x.pt", f"fsspec+file://{tmp_path}/x.pt"):
        with pytest.raises(IntegrityError, match="keys have the same hash"):
            ckptfs.load_object(uri)
        for weights_only in (True, None):
            with pytest.raises(IntegrityError, match="keys have the same hash"):
                read_object(Uri.parse(uri), weights_only=weights_only)
        assert len(ckptfs.load_object(uri, trusted=True)) == 199
        assert len(read_object(Uri.parse(uri), weights_only=False)) == 199


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1+cu128", "2.10.0", "2.13.0+cpu", "3.0"])
def test_an_old_torch_is_advised_against_once(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """weights_only had a hole before 2.10: who loads what strangers made has to know."""
    pickle_scan.advise_on_torch.cache_clear()
    for _ in range(2):
        pickle_scan.advise_on_torch(version)
    is_old = version.startswith(("2.6", "2.9"))
    assert len(caplog.records) == is_old
    assert ("CVE-2026-24747" in caplog.text) == is_old


def test_the_advice_comes_where_torch_unpickles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first object of a stranger's that torch itself loads."""
    torch.save([1], tmp_path / "x.pt")
    pickle_scan.advise_on_torch.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    ckptfs.load_object(tmp_path / "x.pt", trusted=True)
    assert caplog.text == ""
    ckptfs.load_object(tmp_path / "x.pt")
    assert "torch 2.6.0" in caplog.text


@pytest.mark.parametrize("pickled", [b"cf\\qo\nb\n.", b"S'\\q'\n.", b"P\\q\n.", b"if\\qo\nb\n."])
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_backslash_is_no_warning(pickled: bytes, is_archive: bool) -> None:
    """Python's own reader of these lines warns of escapes, which is an error where warnings are."""
    with pytest.raises(ValueError, match=r"."):
        check_archive(archive(b"(" + pickled[:-1]) if is_archive else io.BytesIO(pickled[:-1]))


def test_honest_integer_keys_cost_no_memory() -> None:
    """As an optimizer's state and a vocabulary have them: the hash of a number below 2**61 - 1 is the number."""
    stream = io.BytesIO()
    torch.save(dict.fromkeys(range(50_000)), stream)
    tracemalloc.start()
    try:
        check_archive(stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def followed(data: bytes, *, in_memory: bool) -> Any:
    """What is on the stack at the end; None where it is refused."""
    state = pickle_scan._Followed(len(data))
    try:
        if in_memory:
            state.run_all(data)
        else:
            state.run(io.BytesIO(data))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        return None
    return repr([*map(_shown, state.stack)])


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    return getattr(value, "parts", value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(PLAIN, st.binary(max_size=4), st.none() | st.integers(0), st.integers(2, 5))
def test_the_quick_way_refuses_what_the_slow_one_refuses(
    value: Any, noise: bytes, at: int | None, protocol: int
) -> None:
    """A pickle in memory is followed with a look ahead, one in a stream opcode by opcode."""
    data = pickle.dumps(value, protocol)
    if at is not None:
        at %= len(data)
        data = data[:at] + noise + data[at + len(noise) :]
    assert followed(data, in_memory=True) == followed(data, in_memory=False)
