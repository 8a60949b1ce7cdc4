"""Leaves of a state dict: what may be saved, how it is loaded, and whether all ranks have the same.

    check_tensor, check_leaf     refuse, before any file is made, what could not be loaded again
    load_leaf                    makes the object from its bytes, and executes nothing
    fingerprint_of               one number for "this rank's value of that key"

Objects are made by an unpickler of our own. It knows what torch's ``weights_only`` knows and the types of
Python and numpy on the list of ``_Makers``: they run nothing, and take no more memory than the file has
bytes. It makes objects of other classes only if they were given to
``torch.serialization.add_safe_globals``, because looking up a class would import a module that the file
names.

If several ranks have a plain tensor or an object, DCP writes it from one of them and drops the others without
a message. Equal values have equal fingerprints on every rank. A fingerprint is computed from values, never
from a pickle: the bytes of a pickle depend on hash seeds and on which equal strings are one object. Tensors up
to 256 KiB are hashed whole, larger ones at 64 evenly spaced pages of 4 KiB, ends included. A rank that really
has other data differs in all of these pages, and a full copy of every replicated tensor from every device
would cost more than the save.
"""

from __future__ import annotations

import _compat_pickle
import collections
import datetime as dt
import functools
import io
import math
import pathlib
import pickle
import re
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckptfs import _torch
from ckptfs._torch import is_sharded_tensor, is_wrapper_subclass
from ckptfs.dcp.metadata.pickle_scan import check_archive, check_hashing
from ckptfs.dcp.write.host_memory import host_tensor, memory_of
from ckptfs.errors import ArgumentChoice

__all__ = [
    "WAYS_OUT",
    "Leaf",
    "Objects",
    "check_leaf",
    "check_leaf_bytes",
    "check_tensor",
    "dtype_round_trips",
    "fingerprint_of",
    "first_line",
    "load_leaf",
    "serialise_leaf",
]

_WHOLE_BYTES = 256 << 10
_PAGE_BYTES = 4 << 10
_PAGES = 64

_ATOMS = (type(None), bool, int, float, complex, str)
_NAMED = (torch.Size, torch.dtype, torch.device, torch.layout)
# An int of more than 255 bytes is pickled with an opcode that weights_only does not know.
_PLAIN_INT_BITS = 255 * 8 - 1

# Types without parts that load with any value.
_WITHOUT_PARTS = frozenset(
    {
        *(bytes, bytearray, range, uuid.UUID),
        *(dt.date, dt.timedelta, dt.timezone),
        *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    }
)
_ARRAYS = frozenset("biufcSUmM")  # kinds of dtypes without parts
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PurePath": pathlib.PurePath,
    "PosixPath": pathlib.PosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    # a concrete path of another system cannot be made here
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_DTYPE = re.compile(r"[A-Za-z?]\d{0,9}")
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
WAYS_OUT = "trusted? torch.serialization.add_safe_globals([its class]), or StorageReader(weights_only=False)"
_BUILTINS = frozenset({"bytes", "bytearray", "complex", "set", "frozenset"})
_PLAIN = {  # under the names of Python 2 too, which protocol 2 uses
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "_codecs": frozenset({"encode"}),
    "collections": frozenset({"OrderedDict"}),
}
_ZIP = b"PK\x03\x04"
_COPIES = 4  # how often a pickle's content may be copied: text becomes bytes, and bytes an array


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is one leaf whatever it contains: DCP does not flatten it.

    Its bytes are those of the plain value, so every reader gets the plain value.

    Attributes:
        value: The value.
        owner: The object that the value belongs to, for messages.
        any_rank: Whether values may differ between ranks; any rank's value is good then.
    """

    value: Any
    owner: str = ""
    any_rank: bool = False


# -- what may be saved -----------------------------------------------------------------------


def check_tensor(tensor: torch.Tensor) -> str | None:
    """Return why this tensor, or local shard, could not be loaded again; None if it can."""
    if tensor.is_meta:
        return "it is on the meta device and has no data; materialise it first"
    if is_wrapper_subclass(tensor):
        return f"{type(tensor).__name__} has no memory of its own; save its inner tensors"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} is not supported; save its indices and values"
    if tensor.is_quantized or not dtype_round_trips(tensor.dtype):
        return f"{tensor.dtype} does not survive torch.save and torch.load; view it as another"
    return None


def check_leaf(leaf: object, blob: io.BytesIO | None = None) -> str | None:
    """Return why ``load_leaf`` could not load this object; None if it can.

    Plain values are judged by their types. Anything else is serialised and loaded, once. ``blob`` has the
    object's bytes if it was serialised before.
    """
    if isinstance(leaf, Leaf):
        reason = check_leaf(leaf.value, blob)
        return f"in the state of {leaf.owner}, {reason}" if reason and leaf.owner else reason
    if inside := _sharded_inside(leaf):
        return f"it holds a {inside}, and only the part of one rank would be kept; use a list"
    if _is_plain(leaf):
        return None
    try:
        blob = serialise_leaf(leaf) if blob is None else blob
    except Exception as error:  # noqa: BLE001 - any __reduce__ of the user's may run here
        return f"{_name(leaf)} cannot be serialised: {error}"
    reason = check_leaf_bytes(blob)
    return None if reason is None else f"{_name(leaf)} {reason}"


def check_leaf_bytes(blob: io.BytesIO) -> str | None:
    """Return why the object in these bytes could not be loaded; None if it can.

    The position of the stream does not change.
    """
    at = blob.tell()
    try:
        load_leaf(blob)
    except Exception as error:  # noqa: BLE001 - whatever it raises here it would raise at load
        return f"could not be loaded without executing code ({_first_line(error)})"
    finally:
        blob.seek(at)
    return None


def serialise_leaf(leaf: object) -> io.BytesIO:
    """Return the bytes that stock DCP's planner makes of an object; of a Leaf, those of its value."""
    buffer = io.BytesIO()
    torch.save(leaf.value if isinstance(leaf, Leaf) else leaf, buffer)
    buffer.seek(0)
    return buffer


class Objects(ArgumentChoice, parameter="objects"):
    """What a load does with objects in a checkpoint: the ``objects=`` of loads."""

    LOAD = "load"  # load types of Python, numpy and torch that are data, and what the user allowed
    REFUSE = (
        "refuse"  # load only plain values: numbers, text, bytes, their containers, tensors in those
    )


def load_leaf(
    blob: io.BytesIO, *, weights_only: bool = True, objects: Objects = Objects.LOAD
) -> Any:
    """Return the object in a leaf's blob; tensors in it are loaded to the host.

    pickle.UnpicklingError if it would have to execute anything or to import a module that it names, or if
    ``objects`` refuses it.
    """
    blob.seek(0)
    is_plain_only = objects is Objects.REFUSE
    if not weights_only and not is_plain_only:
        return torch.load(blob, map_location="cpu", weights_only=False)
    try:
        check_archive(blob)
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from error
    is_archive = blob.read(len(_ZIP)) == _ZIP
    blob.seek(0)
    if not is_archive and is_plain_only:
        raise pickle.UnpicklingError("torch has not written such a file since 1.6")
    try:
        if not is_archive:  # as torch wrote before 1.6; DCP never did
            return torch.load(blob, map_location="cpu", weights_only=True)
        return _torch.load_archive(blob, _Plain if is_plain_only else _AllowListed)
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        # A pickle that fits none of the makers can fail with any error: it is refused in each case.
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


@functools.cache
def dtype_round_trips(dtype: torch.dtype) -> bool:
    """Return whether DCP plans tensors of this dtype and torch loads them back bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "ComplexHalf is experimental": it round trips
        try:
            tensor, copied = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype)
            _planned_bytes(tensor)
            memory_of(tensor)[:] = bytes([1, *bytes(len(memory_of(tensor)) - 1)])
            copied.copy_(load_leaf(serialise_leaf(tensor)))
        except Exception:  # noqa: BLE001 - each exotic dtype fails with its own error: it is refused
            return False
    return bytes(memory_of(copied)) == bytes(memory_of(tensor))


def _planned_bytes(tensor: torch.Tensor) -> int | None:
    """Return the size that DCP plans for a tensor; it knows fewer dtypes than torch does."""
    chunk = ChunkStorageMetadata(torch.Size([0]), tensor.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.shape)
    item = WriteItem(MetadataIndex("t"), WriteItemType.TENSOR, tensor_data=data)
    return item.tensor_storage_size()


def _is_plain(leaf: object) -> bool:
    """Return whether the exact types alone show that ``load_leaf`` loads it."""
    kind = type(leaf)
    if kind is int:
        return bool(leaf.bit_length() <= _PLAIN_INT_BITS)  # type: ignore[attr-defined]
    if kind in _ATOMS or kind in (torch.Size, torch.dtype, torch.device):
        return True
    if kind in _WITHOUT_PARTS:
        return True
    if kind in (list, tuple, set, frozenset, collections.deque):
        return all(map(_is_plain, leaf))  # type: ignore[call-overload]
    if kind in (dict, collections.OrderedDict):
        return all(_is_plain(k) and _is_plain(v) for k, v in leaf.items())  # type: ignore[attr-defined]
    if kind in (torch.Tensor, torch.nn.Parameter):
        # Attributes that were set on the tensor are pickled with it.
        return not vars(leaf) and check_tensor(leaf) is None  # type: ignore[arg-type]
    if kind is np.ndarray or isinstance(leaf, np.generic):
        return leaf.dtype.kind in _ARRAYS  # type: ignore[attr-defined]
    if kind in (dt.datetime, dt.time):
        return type(leaf.tzinfo) in (type(None), dt.timezone)  # type: ignore[attr-defined]
    return kind is io.BytesIO and not vars(leaf)


def _sharded_inside(leaf: object) -> str | None:
    """Return the kind of a sharded tensor inside; DCP would pickle only one rank's part of it."""
    if isinstance(leaf, DTensor):
        return "DTensor"
    if is_sharded_tensor(leaf):
        return "ShardedTensor"
    inner: Iterable[object] = ()
    if isinstance(leaf, dict):
        inner = leaf.values()
    elif isinstance(leaf, (list, tuple, set, frozenset)):
        inner = leaf
    return next((found for value in inner if (found := _sharded_inside(value))), None)


def _name(leaf: object) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def _first_line(error: Exception) -> str:
    # torch explains in ten lines how to allow a class; only the name of the class matters here.
    text = str(error).replace("Weights only load failed.", "").strip()
    named = [line for line in text.splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (named or text.splitlines() or [type(error).__name__])[0].strip()[:300]


# -- how objects are made ---------------------------------------------------------------------


class _Memo(dict[int, Any]):
    """A memo that records where unfinished objects are kept."""

    def __setitem__(self, place: int, value: Any) -> None:
        if type(value) is _Half:
            value.places.append(place)
        super().__setitem__(place, value)


class _Half:
    """An object that was created but has no state yet.

    ``build`` makes the object from its state. ``places`` are its numbers in the memo.
    """

    __slots__ = ("build", "places")

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.places: list[int] = []


def _users() -> dict[str, Any]:
    """Return what was given to ``torch.serialization.add_safe_globals``, by name."""
    named = (
        one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        for one in torch.serialization.get_safe_globals()
    )
    return {name: made for made, name in named}


class _Makers:
    """What a pickle may create, by the name that the pickle uses, within one decode.

    Each maker takes the arguments in the pickle and no more memory than they do: ``size_bytes`` is the size of
    the pickle, and all copies together are at most a few times as large. Nothing is imported, and no code of
    the user is called except what was given to ``torch.serialization.add_safe_globals``.
    """

    def __init__(self, size_bytes: int) -> None:
        self._left = _COPIES * size_bytes + 1024
        self.users = _users()
        self._users_calls = {id(made) for made in self.users.values()}

    def find(self, module: str, name: str) -> Any:
        """Return what a pickle may name. pickle.UnpicklingError for anything else."""
        if module == "torch" and isinstance(found := vars(torch).get(name), _TORCH_VALUES):
            return found
        if module.split(".", maxsplit=1)[0] == "pathlib":
            module = "pathlib"  # 3.13 has them in pathlib._local
        found = _by_name().get((module, name)) or self.users.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found

    def make(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Make the call that a pickle requests."""
        is_method = _calls().get(id(function))
        if is_method:
            return function(self, *arguments)
        if is_method is None and id(function) not in self._users_calls:
            raise pickle.UnpicklingError(f"it calls {function!r:.100}")
        return function(*arguments)

    def is_users(self, value: object) -> bool:
        """Return whether the value is of a class that the user allowed."""
        return any(type(value) is kind for kind in self.users.values())

    def _copied(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it repeats more values than it holds")

    def _bytes(self, text: str, encoding: str) -> bytes:
        _need(type(text) is str and encoding in ("latin1", "latin-1"))
        self._copied(len(text))
        return text.encode("latin-1")

    def _no_bytes(self) -> bytes:
        return b""  # protocol 2 writes empty bytes as a call without arguments

    def _bytearray(self, data: Any = b"", encoding: str = "latin-1") -> bytearray:
        if type(data) is str:
            data = self._bytes(data, encoding)
        _need(type(data) is bytes)
        self._copied(len(data))
        return bytearray(data)

    def _complex(self, real: float, imaginary: float) -> complex:
        _need(type(real) is type(imaginary) is float)
        return complex(real, imaginary)

    def _items(self, items: Any) -> Any:
        _need(type(items) in (list, tuple, dict))
        self._copied(len(items))
        return items

    def _hashed(self, items: Any) -> Any:
        check_hashing(self._items(items))
        return items

    def _set(self, items: Any = ()) -> set[Any]:
        return set(self._hashed(items))

    def _frozenset(self, items: Any = ()) -> frozenset[Any]:
        return frozenset(self._hashed(items))

    def _deque(self, items: Any = (), longest: int | None = None) -> collections.deque[Any]:
        _need(longest is None or type(longest) is int)
        return collections.deque(self._items(items), longest)

    def _ordered(self, items: Any = ()) -> collections.OrderedDict[Any, Any]:
        if type(self._items(items)) is not dict:
            _need(all(type(pair) in (list, tuple) and len(pair) == 2 for pair in items))  # noqa: PLR2004
            check_hashing([key for key, _ in items])
        return collections.OrderedDict(items)

    def _counter(self, counts: Any = ()) -> collections.Counter[Any]:
        _need(type(counts) is dict or counts == ())
        return collections.Counter(self._items(counts))

    def _range(self, *numbers: int) -> range:
        _need(all(type(number) is int for number in numbers))
        return range(*numbers)

    def _size(self, lengths: Any) -> torch.Size:
        return torch.Size(self._items(lengths))

    def _tensor_of_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """Make a tensor with attributes, or of a class that the user allowed.

        torch's own function of this name would call any function.
        """
        _need(
            any(function is one for one in _torch.tensor_rebuilders()) and type(arguments) is tuple
        )
        _need(kind in (torch.Tensor, torch.nn.Parameter) or kind in self.users.values())
        return _torch.rebuilt_as(function, kind, arguments, state)

    def _path(self, *parts: str, kind: type[pathlib.PurePath]) -> pathlib.PurePath:
        _need(all(type(part) is str for part in parts))
        self._copied(sum(map(len, parts)))
        return kind(*parts)

    def _uuid(self) -> _Half:
        def build(state: Any) -> uuid.UUID:
            safe = uuid.SafeUUID(state.get("is_safe"))
            return uuid.UUID(int=state["int"], is_safe=safe)

        return _Half(build)

    def _stream(self) -> _Half:
        def build(state: Any) -> io.BytesIO:
            data, at, more = state
            _need(type(data) is bytes and type(at) is int and not more)
            self._copied(len(data))
            stream = io.BytesIO(data)
            stream.seek(at)
            return stream

        return _Half(build)

    def _generator(self, device: torch.device) -> _Half:
        def build(state: Any) -> torch.Generator:
            generator = torch.Generator()
            generator.set_state(state[2])
            return generator

        if device.type != "cpu":
            raise pickle.UnpicklingError(f"it has a generator of {device}; save its get_state()")
        return _Half(build)

    # numpy: numpy's own unpickling trusts sizes and offsets; here they are compared with the bytes

    def _dtype(self, name: str, align: Any = False, copy: Any = True) -> _Half:  # noqa: FBT002
        _need(type(name) is str and _DTYPE.fullmatch(name) is not None)
        return _Half(partial(_dtype_of, np.dtype(name)))

    def _scalar(self, dtype: Any, raw: Any = None) -> Any:
        _need(isinstance(dtype, np.dtype) and type(raw) is bytes and not dtype.hasobject)
        _need(0 < dtype.itemsize == len(raw))
        self._copied(len(raw))
        return np.frombuffer(raw, dtype)[0]

    def _array(self, kind: Any, shape: Any, code: Any) -> _Half:
        _need(kind is np.ndarray and shape == (0,))
        return _Half(self._filled)

    def _filled(self, state: Any) -> np.ndarray[Any, Any]:
        _, shape, dtype, is_fortran, raw = state
        _need(isinstance(dtype, np.dtype) and type(shape) is tuple)
        _need(all(type(n) is int and n >= 0 for n in shape))
        count = math.prod(shape)
        order: Literal["C", "F"] = "F" if is_fortran is True else "C"
        if dtype.kind == "O":
            _need(type(raw) is list and len(raw) == count)
            self._copied(8 * count)
            flat = np.empty(count, dtype=object)
            for place, value in enumerate(raw):
                flat[place] = value
            return flat.reshape(shape, order=order)
        _need(type(raw) is bytes and not dtype.hasobject and dtype.subdtype is None)
        _need(count * dtype.itemsize == len(raw) and (dtype.itemsize > 0 or not count))
        self._copied(len(raw))
        if not count:
            return np.empty(shape, dtype, order=order)
        return np.frombuffer(raw, dtype).reshape(shape, order=order).copy(order)

    # Methods that count what they copy; they are called with the _Makers before the arguments.
    METHODS: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        ("numpy", "dtype"): _dtype,
        ("_codecs", "encode"): _bytes,
        ("builtins", "bytes"): _no_bytes,
        ("builtins", "bytearray"): _bytearray,
        ("builtins", "complex"): _complex,
        ("builtins", "set"): _set,
        ("builtins", "frozenset"): _frozenset,
        ("builtins", "range"): _range,
        ("collections", "OrderedDict"): _ordered,
        ("collections", "Counter"): _counter,
        ("collections", "deque"): _deque,
        ("uuid", "UUID"): _uuid,
        ("_io", "BytesIO"): _stream,
        ("torch", "Size"): _size,
        ("torch._C", "Generator"): _generator,
        ("torch._tensor", "_rebuild_from_type_v2"): _tensor_of_type,
    }
    for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        METHODS[_module, "_reconstruct"] = _array
        METHODS[_module, "scalar"] = _scalar
    for _name, _kind in _PATHS.items():
        METHODS["pathlib", _name] = partial(_path, kind=_kind)


# Allowed as arguments only: a call of one could allocate memory of any size.
_NAMED_ONLY: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
}


@functools.cache
def _functions() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the functions that are called as they are."""
    kinds = (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone)
    return {
        **{("datetime", kind.__name__): kind for kind in kinds},
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): _layout,
        **{(one.__module__, one.__name__): one for one in _torch.tensor_rebuilders()},
    }


@functools.cache
def _by_name() -> dict[tuple[str, str], Any]:
    return {**_NAMED_ONLY, **_functions(), **_Makers.METHODS}


@functools.cache
def _calls() -> dict[int, bool]:
    """Return what may be called, by identity, and whether it is a method of ``_Makers``."""
    return {
        **{id(one): False for one in _functions().values()},
        **{id(one): True for one in _Makers.METHODS.values()},
    }


def _dtype_of(named: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """Return a dtype with the state that numpy pickles.

    It is created through numpy's constructor, so that numpy checks the numbers.
    """
    _, order, inner, names, fields, size_bytes, *more = state
    if inner is not None:
        base, shape = inner
        _need(isinstance(base, np.dtype) and type(shape) is tuple)
        return np.dtype((base, shape))
    if names is not None:
        formats = [fields[name][0] for name in names]
        _need(all(isinstance(one, np.dtype) and _levels(one) <= 1 for one in formats))
        offsets = [offset for name in names for _, offset in [fields[name]]]
        return np.dtype(
            {
                "names": list(names),
                "formats": formats,
                "offsets": offsets,
                "itemsize": size_bytes,
            }
        )
    if named.kind in "Mm":
        unit, number, divisor, _ = more[-1][1]
        _need(type(unit) is bytes and unit.isalpha() and type(number) is int and divisor == 1)
        if unit != b"generic":
            named = np.dtype(f"{named.kind}8[{number}{unit.decode()}]")
    return named.newbyteorder(order) if order in ("<", ">") else named


def _levels(dtype: np.dtype[Any]) -> int:
    """Return how deeply structures are nested; numpy visits them recursively."""
    base = dtype if dtype.subdtype is None else dtype.subdtype[0]
    return 1 + max(_levels(f[0]) for f in base.fields.values()) if base.fields else 0


def _layout(name: str) -> torch.layout:
    layouts = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}
    return layouts[name]


def _need(is_so: bool) -> None:  # noqa: FBT001
    if not is_so:
        raise pickle.UnpicklingError("it is not pickled as its type usually is")


class _ListedUnpickler(pickle._Unpickler):  # noqa: SLF001 - the one in Python: its opcodes can be replaced
    """An unpickler that makes what ``_Makers`` knows and calls nothing else.

    A state goes to an object that waits for one (_Half), to an OrderedDict, or to an object of a class that
    the user allowed. It never goes to a class or a function, which would keep it.
    """

    stack: Any
    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self.memo: Any = _Memo()
        at = file.tell()
        self._makers = _Makers(file.seek(0, io.SEEK_END) - at)
        file.seek(at)
        self._halves = 0

    def load(self) -> Any:
        """Return the object; pickle.UnpicklingError, or any error that damaged bytes cause."""
        made = super().load()
        _need(not self._halves)
        return made

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle may name."""
        # Python 2's names, which protocol 2 uses
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        return self._makers.find(_compat_pickle.IMPORT_MAPPING.get(module, module), name)

    def _called(self) -> None:
        arguments = self.stack.pop()
        made = self._makers.make(self.stack[-1], arguments)
        self._halves += isinstance(made, _Half)
        self.stack[-1] = made

    def _new(self) -> None:
        function = self.stack[-2]
        if any(function is kind for kind in self._makers.users.values()):
            arguments = self.stack.pop()
            self.stack[-1] = function.__new__(function, *arguments)
        else:
            self._called()

    def _built(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is _Half:
            self.stack[-1] = built = made.build(state)
            for place in made.places:
                self.memo[place] = built
            self._halves -= 1
        elif type(made) is collections.OrderedDict and type(state) is dict:
            vars(made).update(state)
        elif self._makers.is_users(made):
            if (take := getattr(made, "__setstate__", None)) is not None:
                take(state)
            else:
                vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"it gives a state to a {type(made).__name__}")

    def _refused(self) -> None:
        raise pickle.UnpicklingError("it has an opcode that torch.save does not write")

    for _code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_code[0]] = _refused
    # These opcodes allocate memory of the size in their argument before they look for the bytes.
    for _code in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):
        dispatch[_code[0]] = _refused
    dispatch[pickle.REDUCE[0]] = _called
    dispatch[pickle.NEWOBJ[0]] = _new
    dispatch[pickle.BUILD[0]] = _built


class _AllowListed:
    """A pickle module for ``torch.load``."""

    Unpickler = _ListedUnpickler


class _PlainUnpickler(_ListedUnpickler):
    """An unpickler that makes only numbers, text, bytes, their containers and tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle may name."""
        found = super().find_class(module, name)
        if module.startswith("torch"):
            is_plain = f"{module}.{name}" not in self._makers.users and name != "Generator"
        else:
            is_plain = name in _PLAIN.get(module, ())
        if not is_plain:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a plain value")
        return found


class _Plain:
    """A pickle module for ``torch.load``."""

    Unpickler = _PlainUnpickler


# -- whether ranks agree ---------------------------------------------------------------------


def fingerprint_of(value: object) -> int:
    """Return 64 bits that are equal on all ranks that have an equal value."""
    state = xxhash.xxh3_64()
    _update_hash(state, value)
    return state.intdigest()


def _update_hash(state: xxhash.xxh3_64, value: object) -> None:
    kind = type(value)
    if isinstance(value, Leaf):
        return None if value.any_rank else _update_hash(state, value.value)
    if kind in _ATOMS or kind in _NAMED:
        return state.update(f"{kind.__name__} {value!r};".encode("utf-8", "surrogatepass"))
    if isinstance(value, torch.Tensor):
        return _update_hash_tensor(state, value)
    state.update(f"{kind.__module__}.{kind.__qualname__}(".encode())
    if isinstance(value, (bytes, bytearray)):
        return state.update(b"%d:" % len(value) + value)
    if kind in (list, tuple, collections.deque):
        return _update_hash_parts(state, map(fingerprint_of, value))  # type: ignore[call-overload]
    if kind in (set, frozenset):
        return _update_hash_parts(state, sorted(map(fingerprint_of, value)))  # type: ignore[call-overload]
    if kind in (dict, collections.Counter, collections.defaultdict):
        return _update_hash_parts(state, sorted(map(fingerprint_of, value.items())))  # type: ignore[attr-defined]
    if kind is collections.OrderedDict:
        return _update_hash_parts(state, map(fingerprint_of, value.items()))  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return state.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    return state.update(_unshared_pickle(value))


def _update_hash_parts(state: xxhash.xxh3_64, parts: Iterable[int]) -> None:
    for part in parts:
        state.update(part.to_bytes(8, "little"))


def _update_hash_tensor(state: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    state.update(f"Tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    if check_tensor(tensor) is not None:
        return  # the planner refuses it by its key; there is nothing to compare
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes > _WHOLE_BYTES:
        tensor = _sample(tensor.detach())
    state.update(memory_of(host_tensor(tensor)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced pages, gathered on the tensor's own device: one small copy to the host."""
    # A tensor that is not contiguous, which is rare, is made contiguous first: its pages have to be
    # the same as those of another rank's contiguous tensor.
    flat = tensor.reshape(-1)
    page = max(1, _PAGE_BYTES // tensor.element_size())
    step = (flat.numel() - page) / (_PAGES - 1)
    return torch.cat([flat[(at := int(step * n)) : at + page] for n in range(_PAGES)])


def _unshared_pickle(value: object) -> bytes:
    """Return a pickle that does not depend on which equal parts are the same object."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - cycles; the planner refuses by its key what cannot be pickled
        return b"?"
    return buffer.getvalue()


def first_line(error: BaseException) -> str:
    """Return the first line of one of torch's error messages, or the error's type if it is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)
