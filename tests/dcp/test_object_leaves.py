"""Objects in a checkpoint: which load by default, which only if they are allowed, and that none runs code.

The list is data: numpy's arrays and scalars, generators' states, dates, paths, UUIDs, streams, ranges and
the containers of Python. A type of the user is found only if the user named it.
"""

from __future__ import annotations

import collections
import copy
import datetime as dt
import enum
import io
import logging
import pathlib
import pickle
import random
import resource
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptfs
from ckptfs.dcp.planning.leaves import Objects, check_leaf, load_leaf, serialise_leaf
from ckptfs.errors import CollectiveError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Color(enum.Enum):
    """A class of the user's."""

    RED = 1


class Held:
    """Another one, with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value


def stream(data: bytes, at: int) -> io.BytesIO:
    """A BytesIO that somebody read from."""
    made = io.BytesIO(data)
    made.seek(at)
    return made


def generator() -> torch.Generator:
    """One that has drawn."""
    made = torch.Generator().manual_seed(7)
    torch.rand(3, generator=made)
    return made


PAIRS = [("a", "<f4"), ("b", ">i8", (2,)), ("c", [("d", "U3")])]
VALUES: dict[str, Any] = {
    "array": np.arange(12.0).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "half": np.ones(2, dtype=np.float16),
    "texts": np.array(["a", "\u00e4\u00f6"]),
    "no elements": np.zeros((0, 3)),
    "no dimensions": np.array(5),
    "times": np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    "spans": np.array([1, 2], dtype="timedelta64[25us]"),
    "structured": np.zeros(2, dtype=PAIRS),
    "objects": np.array([1, "a", None], dtype=object),
    "numpy's float": np.float64(0.1),
    "numpy's int": np.int8(-3),
    "numpy's bool": np.True_,
    "numpy's time": np.datetime64("2020-01-01T10:00:00"),
    "numpy's text": np.str_("abc"),
    "a dtype": np.dtype(">f4"),
    "numpy's generator": np.random.default_rng(3).bit_generator.state,
    "numpy's old generator": np.random.RandomState(3).get_state(),
    "numpy's new Mersenne": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    "torch's generator": torch.get_rng_state(),
    "python's generator": random.Random(3).getstate(),
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "datetime": dt.datetime(2026, 11, 24, 5, 30, 1, 7),  # noqa: DTZ001 - naive ones are saved too
    "datetime, zoned": dt.datetime(2026, 11, 24, tzinfo=dt.timezone(dt.timedelta(hours=2), "X")),
    "date": dt.date(2026, 11, 24),
    "time": dt.time(1, 2, tzinfo=dt.UTC),
    "timedelta": dt.timedelta(days=1, microseconds=3),
    "path": pathlib.Path("/a/b c"),
    "relative path": pathlib.PurePosixPath("a/../b"),
    "windows": pathlib.PureWindowsPath("c:/a"),
    "uuid": uuid.UUID(int=2**127 + 5),
    "range": range(3, 10**30, 7),
    "deque": collections.deque([1, {"a": 2}], maxlen=3),
    "deque without end": collections.deque([1, 2]),
    "set": {1, 2},
    "frozenset": frozenset({"a", frozenset({1})}),
    "counter": collections.Counter("abca"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "a long number": 3**5000,
    "all in one": [(np.arange(2), {"t": torch.ones(2), 3: {1j}}), np.float32(2), torch.Size([2])],
    "twice the same": [*([np.arange(3)] * 2), np.dtype("f4"), np.dtype("f4")],
}


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, arrays and streams too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        # numpy's own unpickler makes an array of the machine's byte order
        kinds = [one.dtype.newbyteorder("=") for one in (a, b)]
        layouts = [one.flags.f_contiguous or not one.size for one in (a, b)]
        return (
            kinds[0] == kinds[1]
            and a.shape == b.shape
            and layouts[0] == layouts[1]
            and repr(a.astype(kinds[0])) == repr(b.astype(kinds[0]))
        )
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, collections.deque)):
        limits = [getattr(one, "maxlen", None) for one in (a, b)]
        return limits[0] == limits[1] and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", VALUES)
def test_data_is_loaded(name: str) -> None:
    """Each as it was; and what is saved without looking at its bytes is nothing but what loads."""
    value = VALUES[name]
    assert check_leaf(value) is None
    assert same(load_leaf(serialise_leaf(value)), value)


def test_streams_and_generators_are_loaded() -> None:
    """What has no equality: a stream is where it was, a generator draws what it would have."""
    found = load_leaf(serialise_leaf(stream(b"abc", 2)))
    assert (found.getvalue(), found.tell()) == (b"abc", 2)
    drawn, original = load_leaf(serialise_leaf(generator())), generator()
    assert torch.equal(torch.rand(4, generator=drawn), torch.rand(4, generator=original))


def test_an_array_is_the_callers_own() -> None:
    """It can be written to, and resized."""
    found = load_leaf(serialise_leaf(np.arange(3)))
    found[0] = 5
    assert found.flags.owndata
    assert found.flags.writeable


def leaves() -> dict[str, Any]:
    """What torch's end-to-end tests put into a state, and more."""
    return {"w": torch.ones(3), "stream": stream(b"abc", 0), "objects": copy.deepcopy(VALUES)}


def test_every_reader_and_writer_takes_them(tmp_path: Path) -> None:
    """torch's dcp.save and dcp.load with our pair, and ckptfs.save and load, mixed, stock's reader too."""
    dcp.save(leaves(), storage_writer=ckptfs.StorageWriter(tmp_path / "a"))
    ckptfs.save(leaves(), tmp_path / "b")
    for name in ("a", "b"):
        for reader in (ckptfs.StorageReader, dcp.FileSystemReader):
            found = _emptied()
            dcp.load(found, storage_reader=reader(tmp_path / name))
            assert _is_whole(found)
        found = _emptied()
        ckptfs.load(found, tmp_path / name)
        assert _is_whole(found)


def _emptied() -> dict[str, Any]:
    state = leaves()
    for key, value in state["objects"].items():
        if not isinstance(value, (dict, torch.Tensor, list)):
            state["objects"][key] = None
    return {**state, "w": torch.zeros(3), "stream": None}


def _is_whole(found: dict[str, Any]) -> bool:
    objects = {key: value for key, value in found["objects"].items() if key in VALUES}
    return found["stream"].getvalue() == b"abc" and same(objects, VALUES)


# -- classes of the user's -----------------------------------------------------------------------


def test_a_class_is_told_at_save_and_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """dcp.save says under which key it is, dcp.load and load refuse it by its key and say both ways."""
    state = {"w": torch.ones(3), "deep": {"color": Color.RED, "ok": 1}}
    uri = tmp_path / "a"
    with caplog.at_level(logging.WARNING, "ckptfs"):
        dcp.save(state, storage_writer=ckptfs.StorageWriter(uri))
    told = "\n".join(caplog.messages)
    assert "'deep.color'" in told
    assert "Color" in told
    assert "'deep.ok'" not in told
    with pytest.raises(CheckpointException) as stock:
        dcp.load(dict(state), storage_reader=ckptfs.StorageReader(uri))
    with pytest.raises(CollectiveError) as own:
        ckptfs.load(dict(state), uri)
    for error in (str(stock.value), str(own.value)):
        assert "'deep.color'" in error
        assert "Color" in error
        assert "add_safe_globals" in error
        assert "weights_only=False" in error


def test_both_ways_out_load_it(tmp_path: Path) -> None:
    """weights_only=False trusts the checkpoint, add_safe_globals one class; a mixture of both lists too."""
    state = {"color": [Color.RED, np.arange(2), uuid.UUID(int=4)], "held": Held([np.float32(2)])}
    uri = tmp_path / "a"
    dcp.save(state, storage_writer=ckptfs.StorageWriter(uri))
    found: dict[str, Any] = dict.fromkeys(state)
    dcp.load(found, storage_reader=ckptfs.StorageReader(uri, weights_only=False))
    assert same(found["color"], state["color"])
    with torch.serialization.safe_globals([Color, Held]):
        for load in (
            lambda into: ckptfs.load(into, uri),
            lambda into: dcp.load(into, storage_reader=ckptfs.StorageReader(uri)),
        ):
            found = dict.fromkeys(state)
            load(found)
            assert same(found["color"], state["color"])
            assert same(found["held"].value, [np.float32(2)])
    with pytest.raises(CollectiveError, match=r"'color'.*Color"):
        ckptfs.save(state, tmp_path / "b")


# -- what somebody made up -------------------------------------------------------------------------


class Called:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def global_of(module: str, name: str) -> bytes:
    """A pickle that names something."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."


def leaf_of(data: bytes) -> io.BytesIO:
    """A leaf with this pickle."""
    before, after = io.BytesIO(), io.BytesIO()
    torch.save([], before)
    with zipfile.ZipFile(before) as old, zipfile.ZipFile(after, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
    after.seek(0)
    return after


reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float32(1).__reduce__()[0]
HUGE = 1 << 40
HOSTILE: dict[str, Any] = {
    "system": Called(print, "executed"),
    "a big array": Called(reconstruct, np.ndarray, (HUGE,), b"b"),
    "a big array later": Called(
        reconstruct, np.ndarray, (0,), b"b", state=(1, (HUGE,), np.dtype("f8"), False, b"12345678")
    ),
    "no bytes each": Called(
        reconstruct, np.ndarray, (0,), b"b", state=(1, (HUGE,), np.dtype("V0"), False, b"")
    ),
    "pointers": Called(
        reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), np.dtype("O"), False, b"12345678")
    ),
    "a subclass": Called(reconstruct, np.matrix, (0,), b"b"),
    "a big scalar": Called(scalar, np.dtype(f"V{2**31 - 1}")),
    "a scalar of others": Called(scalar, np.dtype("f8"), b"1234"),
    "a scalar pointer": Called(scalar, np.dtype("O"), b"12345678"),
    "a long deque": Called(collections.deque, range(HUGE)),
    "a long set": Called(frozenset, range(HUGE)),
    "a long bytearray": Called(bytearray, HUGE),
    "a long size": Called(torch.Size, range(HUGE)),
    "a big tensor": Called(torch.Tensor, HUGE),
    "a path of others": Called(pathlib.PurePosixPath, pathlib.PurePosixPath("a"), "b"),
    "a uuid without number": Called(uuid.UUID, state={"int": [1]}),
    "a stream with a method": Called(io.BytesIO, state=(b"a", 0, {"read": print})),
    "a code that is no code": Called(pickle.loads, b"I1\n."),
}
OFFSETS = {"names": ["a"], "formats": ["<f8"], "offsets": [0], "itemsize": 8}
PICKLES: dict[str, bytes] = {
    "an import": global_of("this", "s"),
    "a module's function": global_of("os", "system"),
    "by its text": b"\x80\x02(V__import__('os')\nios\nsystem\n.",
    "an extension code": b"\x80\x02\x82\x01.",
    "bytes that are not there": b"\x80\x05\x96" + (HUGE).to_bytes(8, "little") + b".",
    "a class that gets an attribute": b"\x80\x02ctorch.nn.parameter\nParameter\n"
    b"N}X\x04\x00\x00\x00evilK\x01s\x86b.",
    "a type that gets an attribute": b"\x80\x02cdatetime\ndatetime\nN}X\x03\x00\x00\x00now"
    b"K\x01s\x86b.",
    "never finished": b"\x80\x02cuuid\nUUID\n)\x81.",
    "the same again": b"\x80\x02cbuiltins\nfrozenset\nq\x00]q\x01(" + b"K\x01" * 2000 + b"e0]q\x02("
    + b"h\x00h\x01\x85R" * 5000 + b"e.",
    # Each copy refers to one value; only that they are copied is too much: 400 MB from 140 KB.
    "the same bytes again": b"\x80\x03cbuiltins\nbytearray\nq\x00B" + (20_000).to_bytes(4, "little")
    + b"a" * 20_000 + b"q\x010]q\x02(" + b"h\x00h\x01\x85R" * 20_000 + b"e.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_program_writes_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is called, and no more memory taken than the file is large."""
    _refused(serialise_leaf(HOSTILE[name]))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", PICKLES)
def test_no_pickle_runs_anything(name: str) -> None:
    """Opcodes other than calls: names, attributes of classes, sizes before bytes, copies of copies."""
    _refused(leaf_of(PICKLES[name]))
    assert not hasattr(torch.nn.Parameter, "evil")


def test_offsets_of_a_structure_are_looked_at() -> None:
    """A field beyond its element would read other memory."""
    array = np.zeros(1, dtype=[("a", "<f8")])
    whole: Any = array.__reduce__()
    function, arguments, state = whole
    described: Any = array.dtype.__reduce__()
    dtype, named, inner = described
    moved = (*inner[:4], {"a": (np.dtype("<f8"), 1 << 20)}, *inner[5:])
    hostile = Called(dtype, *named, state=moved)
    _refused(serialise_leaf(Called(function, *arguments, state=(1, (1,), hostile, *state[3:]))))


def _refused(leaf: io.BytesIO) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), limits[1]))
    try:
        with pytest.raises(pickle.UnpicklingError) as caught:
            load_leaf(leaf)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    text = str(caught.value)
    assert "PytorchStreamReader" not in text, "the archive itself is whole"
    assert "MemoryError" not in text


PLAIN = {
    "numbers": [1, 2.5, 1 + 2j, True, None, 10**40],
    "text": {"a": ("b", {"c"}, frozenset({1})), 3: b"bytes", "d": bytearray(b"x")},
    "ordered": collections.OrderedDict(a=1),
    "of torch": [torch.float32, torch.Size([2, 3]), torch.device("cpu")],
    "tensors": ({"t": torch.arange(3)},),
}
NOT_PLAIN = {
    "array": np.arange(3),
    "date": dt.date(2026, 1, 1),
    "path": pathlib.PurePosixPath("/x"),
    "uuid": uuid.UUID(int=1),
    "stream": stream(b"x", 0),
    "generator": generator(),
    "nested": [{"a": (np.float32(1),)}],
    "users": Color.RED,
}


@pytest.mark.parametrize("key", PLAIN)
def test_plain_values_load_where_objects_are_refused(key: str) -> None:
    """And tensors in them."""
    made = load_leaf(serialise_leaf(PLAIN[key]), objects=Objects.REFUSE)
    assert type(made) is type(PLAIN[key])
    assert repr(made) == repr(PLAIN[key])


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("key", NOT_PLAIN)
def test_any_other_object_is_refused(key: str, weights_only: bool) -> None:
    """Also what the user allowed torch to load, and where everything else is: no class of anybody's is made."""
    blob = serialise_leaf(NOT_PLAIN[key])
    with (
        torch.serialization.safe_globals([Color]),
        pytest.raises(pickle.UnpicklingError, match="is not a plain value"),
    ):
        load_leaf(blob, weights_only=weights_only, objects=Objects.REFUSE)


def test_objects_refuse_names_the_key_of_what_is_no_plain_value(tmp_path: Path) -> None:
    """By load and by restore; a checkpoint of tensors and plain values loads."""
    with ckptfs.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.ones(3), "lr": 0.5})
        manager.save(2, {"w": torch.ones(3), "lr": 0.5, "day": dt.date(2026, 1, 1)})
        state: dict[str, Any] = {"w": torch.zeros(3), "lr": None}
        ckptfs.load(state, tmp_path / "step_1", objects="refuse")
        assert state["lr"] == 0.5
        assert torch.equal(state["w"], torch.ones(3))
        assert manager.restore(state, step=1, objects="refuse") is not None
        state["day"] = None
        with pytest.raises(ckptfs.CkptfsError, match="object under 'day' is not a plain value"):
            ckptfs.load(state, tmp_path / "step_2", objects="refuse")
        with pytest.raises(ckptfs.CkptfsError, match="object under 'day' is not a plain value"):
            manager.restore(state, objects="refuse")
        ckptfs.load(state, tmp_path / "step_2")
        assert state["day"] == dt.date(2026, 1, 1)
    with pytest.raises(ckptfs.StateError, match='"load" or "refuse"'):
        ckptfs.load(state, tmp_path / "step_1", objects="no")  # type: ignore[arg-type]


class Counted:
    """Counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> Any:
        type(self).pickled += 1
        return Counted, ()


def test_an_object_is_serialised_once_and_looked_at_in_those_bytes(tmp_path: Path) -> None:
    """A __reduce__ of the user's may be dear, or not repeatable."""
    before = Counted.pickled
    with torch.serialization.safe_globals([Counted]):
        dcp.save({"k": Counted()}, storage_writer=ckptfs.StorageWriter(tmp_path / "step_1"))
    assert Counted.pickled == before + 1


def test_bytes_are_looked_at_only_where_types_do_not_tell() -> None:
    """A tuple of parameters may have gigabytes; nothing is copied. The stream stays where it is."""
    broken = io.BytesIO(b"no archive")
    broken.seek(3)
    assert check_leaf((torch.nn.Parameter(torch.ones(2)),), broken) is None
    assert "could not be loaded" in str(check_leaf(Counted(), broken))
    assert broken.tell() == 3


def test_attributes_of_a_tensor_are_looked_at() -> None:
    """They are pickled with it."""
    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert check_leaf([tensor]) is None
        tensor.note = Counted()  # type: ignore[attr-defined]
        assert "Counted" in str(check_leaf([tensor]))


@pytest.mark.parametrize(
    ("function", "kind", "arguments"),
    [
        (torch.UntypedStorage, torch.UntypedStorage, (1 << 31,)),
        (np.ndarray, np.ndarray, ((1 << 31,),)),
        (torch.Tensor, torch.Tensor, (1 << 29,)),
        (bytearray, torch.Tensor, (1 << 31,)),
    ],
)
def test_a_tensor_s_class_is_given_to_tensors_alone(
    function: Any, kind: Any, arguments: tuple[Any, ...]
) -> None:
    """What torch names for tensors with attributes calls any function, for memory of any size."""
    rebuild = torch._tensor._rebuild_from_type_v2
    stream = serialise_leaf(Called(rebuild, function, kind, arguments, {}))
    with pytest.raises(pickle.UnpicklingError, match="not pickled as its type usually is"):
        load_leaf(stream)


def test_a_tensor_with_attributes_is_loaded() -> None:
    """They come back with it."""
    tensor = torch.arange(3.0)
    tensor.note = "a"  # type: ignore[attr-defined]
    found = load_leaf(serialise_leaf([tensor, torch.nn.Parameter(tensor)]))
    assert found[0].note == "a"
    assert torch.equal(found[0], tensor)
    assert torch.equal(found[1], tensor)


def collision_of(count: int) -> list[int]:
    """Different integers with one hash."""
    return [n * (2**61 - 1) for n in range(1, count)]


def doubled_tuple(times: int) -> tuple[Any, ...]:
    """The same two tuples, each of the same two ..."""
    made: tuple[Any, ...] = ()
    for _ in range(times):
        made = (made, made)
    return made


@pytest.mark.parametrize(
    "made",
    [
        *(Called(kind, collision_of(500)) for kind in (set, frozenset)),
        Called(collections.OrderedDict, [(n, 0) for n in collision_of(500)]),
        Called(collections.OrderedDict, [[n, 0] for n in collision_of(500)]),
        *(Called(kind, [doubled_tuple(12)]) for kind in (set, frozenset)),
        Called(collections.OrderedDict, [(doubled_tuple(12), 0)]),
    ],
)
def test_what_is_slow_to_hash_comes_into_no_set(made: Called) -> None:
    """torch.save makes sets by a call of a list: the time that they take grows as its square, or as 2^n."""
    with pytest.raises(
        pickle.UnpicklingError, match=r"keys have the same hash|is too long or nested too deeply"
    ):
        load_leaf(serialise_leaf(made))


def test_honest_sets_are_loaded() -> None:
    """Of many numbers, of texts, of tuples."""
    found = [set(range(-5000, 5000)), {str(n) for n in range(5000)}, frozenset({(1, ("a", 2.5))})]
    assert load_leaf(serialise_leaf(found)) == found
