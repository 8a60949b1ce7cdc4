"""Decode the pickle inside ``.metadata`` without Python's unpickler: nothing is called or hashed.

    decode(data)      -> the root object, as an ``Object``; ValueError and the like for anything else

A pickle is a program, and Python's unpickler runs it: 320 bytes hang it in the hash of a key, ten bytes make
it allocate 4 GB, 2 MB of nesting overflow its stack. Here only the opcodes of protocols 2 to 5 are known, and
the names that a ``.metadata`` needs; each opcode makes at most one small object, so that memory and time are
bounded by the length of the file:

    an object of torch's      an Object: its class, and the state that BUILD gave it, once
    a dtype, a layout         a value of our own with its name: reading one imports no torch
    a dict, a set             a flat list of what was put in; no key is hashed before it was checked
    torch.Size                a tuple of at most 64 integers
    memo                      a list, as long as the file at most

Most of a large file consists of three records that differ only in numbers: a chunk of a tensor, a tensor's
header, and the place of an item. Each is recognised by one regular expression and made at once; the same
bytes in another order are read opcode by opcode, with the same result. Our own writer makes many records of
one length, which are read as columns (``ckptfs.dcp.metadata.pickle_records``).
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple, NoReturn

from ckptfs.dcp.metadata.pickle_records import (
    BINGET,
    LONG_BINGET,
    LONG_BINPUT,
    MEMOIZE,
    NEW,
    PATTERNS,
    SHORT_BINUNICODE,
    STOP,
    TENSOR_HEAD,
    TUPLE1,
    Ints,
    Numbers,
    RecordColumns,
    tuples_of,
)
from ckptfs.dcp.metadata.torch_names import DTYPES, LAYOUTS, MemoryFormat, TensorLayout

__all__ = [
    "DCP",
    "FILESYSTEM",
    "MOST_DIMS",
    "OLD_DCP",
    "Chunk",
    "Dict",
    "FileRange",
    "Index",
    "NotAllowedError",
    "Object",
    "PathOf",
    "SetOf",
    "SetOfList",
    "TorchClass",
    "decode",
    "names",
]

DCP = "torch.distributed.checkpoint.metadata"
OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"  # where torch < 2.3 had some
FILESYSTEM = "torch.distributed.checkpoint.filesystem"

# torch accepts no more; a long tuple with many references to it would be visited once for each.
MOST_DIMS = 64

_new = tuple.__new__  # a NamedTuple's own __new__ is a Python function


class NotAllowedError(ValueError):
    """The pickle asks for something that no ``.metadata`` needs. The message says what."""


def _no_record(*_: Any) -> int:
    return 0


class TorchClass:
    """A class of torch's that a pickle may instantiate.

    ``record`` is the name of the pattern of its usual form.
    """

    __slots__ = ("make", "name", "record")

    def __init__(self, name: str, record: str = "") -> None:
        self.name = name
        self.record = record
        self.make: Callable[[_Machine, re.Pattern[bytes], int, bytes, bool], int] = _no_record


METADATA: Final = TorchClass("Metadata")
STORAGE_META: Final = TorchClass("StorageMeta")
BYTES: Final = TorchClass("BytesStorageMetadata")
PROPERTIES: Final = TorchClass("TensorProperties")
INFO: Final = TorchClass("_StorageInfo")
TENSOR: Final = TorchClass("TensorStorageMetadata", "tensor")
CHUNK: Final = TorchClass("ChunkStorageMetadata", "chunk")
INDEX: Final = TorchClass("MetadataIndex", "item")


class Object:
    """An object of one of torch's classes.

    ``state`` is a Dict or a tuple; None until BUILD sets it.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: TorchClass, state: Any = None) -> None:
        self.kind = kind
        self.state = state


class Dict(list[Any]):
    """Alternating keys and values, in the order in which they were put in."""

    __slots__ = ()


class SetOf(list[Any]):
    """What was put into a set."""

    __slots__ = ()


class PathOf(NamedTuple):
    """A path; ``kind`` is the name of a class of pathlib."""

    kind: str
    parts: tuple[str, ...]


class Chunk(NamedTuple):
    """A ChunkStorageMetadata."""

    offsets: Any
    sizes: Any


class Index(NamedTuple):
    """A MetadataIndex: the key of a place."""

    fqn: Any
    offset: Any
    number: Any


class FileRange(NamedTuple):
    """The place of an item: a path as the manifest has it, and offset and length in bytes."""

    path: Any
    offset: Any
    length: Any


class _Function:
    """A function that REDUCE may call."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class _Hidden:
    """A placeholder in the memo for intermediate values of a record; no pickler refers to them."""

    __slots__ = ()


_HIDDEN = _Hidden()


def _size(lengths: Any) -> tuple[int, ...]:
    if type(lengths) not in (tuple, list) or len(lengths) > MOST_DIMS:
        raise ValueError(f"it has a size that is not a tuple of at most {MOST_DIMS} integers")
    if set(map(type, lengths)) - {int}:
        raise ValueError("it has a size with dimensions that are not integers")
    return tuple(lengths)


def _set_of(items: Any = ()) -> SetOf:
    if type(items) is tuple and not items:
        return SetOf()
    if type(items) is not list:
        raise ValueError("it makes a set from something other than a list")
    return SetOfList(items)


class SetOfList(SetOf):
    """A set of a list that may still grow.

    It is evaluated once everything is read, so that it is copied at most once.
    """

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        super().__init__()
        self.items = items


def _path(kind: str) -> _Function:
    def made(*parts: Any) -> PathOf:
        if set(map(type, parts)) - {str}:
            raise ValueError("it has a path with components that are not strings")
        return PathOf(kind, parts)

    return _Function(made)


def _layout(text: Any) -> TensorLayout:
    if type(text) is not str:  # the hash of nested tuples can take endless time
        raise ValueError("a layout that is no text")
    return LAYOUTS[text]


def _memory_format(number: Any) -> MemoryFormat:
    if type(number) is not int:
        raise ValueError("a memory format that is no number")
    return MemoryFormat(number)


def names() -> Mapping[tuple[str, str], TorchClass | _Function]:
    """Return all that a pickle may name, in addition to torch's dtypes."""
    by_value = _Function(_memory_format)

    def member_named(kind: Any, name: str) -> Any:
        """Return what stock torch on Python 3.11.2 writes for a member; refuse any other getattr."""
        if kind is not by_value or type(name) is not str:
            raise NotAllowedError("builtins.getattr")
        return MemoryFormat[name]

    own = (METADATA, STORAGE_META, BYTES, PROPERTIES, TENSOR, CHUNK, INDEX)
    flavours = ("Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    return {
        **{(DCP, kind.name): kind for kind in own},
        (OLD_DCP, PROPERTIES.name): PROPERTIES,
        (FILESYSTEM, INFO.name): INFO,
        (DCP, "_MEM_FORMAT_ENCODING"): by_value,
        (OLD_DCP, "MEM_FORMAT_ENCODING"): by_value,
        ("builtins", "getattr"): _Function(member_named),
        ("torch", "Size"): _SIZE,
        ("torch.serialization", "_get_layout"): _Function(_layout),
        ("collections", "OrderedDict"): _Function(Dict),
        **{
            (module, name): _Function(_set_of)
            for module in ("builtins", "__builtin__")  # the name in protocol 2
            for name in ("set", "frozenset")
        },
        **{("pathlib", name): _path(name) for name in flavours},
    }


_SIZE: Final = _Function(_size)
_CHUNK_NAMES = ("offsets", _SIZE, "sizes", _SIZE)
_TENSOR_NAMES = ("properties", PROPERTIES, "size", _SIZE, "chunks")
# The groups of the patterns that may be columns. Of a chunk: offsets and sizes. Of an item: key, number,
# where the chunk begins, path, offset and length.
_CHUNK_COLUMNS = (3, 6)
_ITEM_COLUMNS = (2, 4, 7, 10, 12, 14)
_WORTH_A_TRY = 4  # after as many records of one form in a row, the next are tried as columns
_ITEM_NAMES = ("fqn", "index", INFO, "relative_path", "offset", "length", "offset", _SIZE)


# -- the machine -----------------------------------------------------------------------------------


class _Machine:
    """The state of one decode: stack, marks, memo."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        # Whether PUT left out numbers: then unpicklers disagree about the number that MEMOIZE uses.
        self.has_holes = False
        self.names = names()
        self.numbers = Numbers()
        self.ints = Ints()
        # Opcodes of records with names that were looked up; cleared by a PUT that overwrites an entry.
        self.known: set[tuple[Any, ...]] = set()
        self.states: dict[tuple[bytes, ...], tuple[Any, ...]] = {}
        self.tensors: dict[bytes, tuple[Any, ...]] = {}

    # -- what every opcode needs

    def take(self, count: int) -> bytes:
        """Return the next bytes. ValueError: there are fewer."""
        start = self.at
        self.at = end = start + count
        if end > len(self.data):
            raise ValueError("it ends in the middle")
        return self.data[start:end]

    def skip(self, count: int) -> None:
        """Skip bytes that have no meaning here."""
        self.at += count

    def sized(self, width: int) -> bytes:
        """Return bytes that follow their own length."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def get(self, number: int) -> Any:
        """Return a memo entry."""
        value = self.memo[number]
        if value is _HIDDEN:
            raise ValueError(f"it refers to memo entry {number}, which no pickler does")
        return value

    def got(self, raw: bytes) -> Any:
        """Return what BINGET or LONG_BINGET push."""
        return self.get(raw[1] if raw[0] == BINGET else int.from_bytes(raw[1:], "little"))

    def put(self, number: int) -> None:
        """Perform PUT: store the top of the stack under this number."""
        memo = self.memo
        if number == len(memo):
            memo.append(self.stack[-1])
            return
        if number > len(memo):
            if number > len(self.data):
                raise ValueError(f"it has a memo of {number} entries in {len(self.data)} bytes")
            memo.extend([_HIDDEN] * (number + 1 - len(memo)))
            self.has_holes = True
        elif memo[number] is not _HIDDEN:  # no cached record refers to a hidden entry
            self.known.clear()
            self.states.clear()
            self.tensors.clear()
        memo[number] = self.stack[-1]

    def marked(self) -> list[Any]:
        """Pop and return what was pushed since the last mark."""
        begin = self.marks.pop()
        if begin > len(self.stack):
            raise ValueError("it has a mark beyond the top of the stack")
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    # -- opcodes

    def record(self, kind: TorchClass, at: int, got: bytes) -> int:
        """Make a record, and the records of the same class that follow it directly.

        The record begins after ``got``, the opcode that gets its class from the memo.

        Returns:
            Where the records end; 0 if the first one does not have the usual form.
        """
        is_memoized = self.data[at + 2 : at + 3] == b"\x94"
        if is_memoized and self.has_holes:
            return 0
        return kind.make(self, PATTERNS[is_memoized][kind.record], at, got, is_memoized)

    def are(self, raws: tuple[Any, ...], values: Sequence[Any]) -> bool:
        """Return whether these opcodes get these values; if they do, remember them as known."""
        for raw, value in zip(raws, values, strict=True):
            if raw is not None:
                found = self.got(raw)
                if type(found) is not type(value) or found != value:
                    return False
        self.known.add(raws)
        return True

    def chunks(self, pattern: re.Pattern[bytes], at: int, got: bytes, is_memoized: bool) -> int:  # noqa: FBT001
        """Make chunks with their offsets and sizes."""
        data, end, count = self.data, 0, 0
        while found := pattern.match(data, at):
            made = self.chunk(found.groups(), is_memoized)
            if made is None:
                break
            self.stack.append(made)
            end = found.end()
            if not data.startswith(got, end):
                break
            count += 1
            if count == _WORTH_A_TRY and not is_memoized:
                end = self.many_chunks(
                    RecordColumns(data, at - len(got), found, _CHUNK_COLUMNS), end
                )
                count = 0
                if not data.startswith(got, end):
                    break
            at = end + len(got)
        return end

    def many_chunks(self, alike: RecordColumns, at: int) -> int:
        """Make the chunks from ``at`` on that have the form of the one before; return their end."""
        for block in alike.blocks(at):
            count = len(block)
            offsets, sizes = (tuples_of(alike.numbers(block, n), count) for n in (0, 1))
            self.stack += map(_new, repeat(Chunk), zip(offsets, sizes, strict=True))
            at += count * alike.length
        return at

    def chunk(self, groups: tuple[Any, ...], is_memoized: bool) -> Chunk | None:  # noqa: FBT001
        """Return a chunk; None if it does not have the usual form."""
        one, size, raw, two, size_too, raw_too = groups
        raws = (one, size, two, size_too)
        if raws not in self.known and not self.are(raws, _CHUNK_NAMES):
            return None
        offsets, sizes = self.numbers[raw], self.numbers[raw_too]
        made = _new(Chunk, (offsets, sizes))
        if is_memoized:
            if offsets and sizes:
                entries = (made, _HIDDEN, offsets, _HIDDEN, offsets, sizes, _HIDDEN, sizes)
                self.memo += entries
            else:
                self.memo += (made, _HIDDEN)
                self.keep_size(raw, offsets)
                self.keep_size(raw_too, sizes)
        return made

    def keep_size(self, raw: bytes, numbers: tuple[int, ...]) -> None:
        """Add to the memo what a pickler keeps of a torch.Size: numbers, arguments, and the size."""
        self.memo += (_HIDDEN, numbers) if raw == b")" else (numbers, _HIDDEN, numbers)

    def tensor(self, pattern: re.Pattern[bytes], at: int, _: bytes, is_memoized: bool) -> int:  # noqa: FBT001
        """Make a tensor's properties and size, and the list for its chunks.

        If there is one chunk, which is the usual case, make the whole tensor.
        """
        found = pattern.match(self.data, at)
        if found is None:
            return 0
        end = found.end()
        parts = None if is_memoized else self.tensors.get(self.data[at:end])
        if parts is None:
            parts = self.tensor_parts(found, is_memoized)
            if parts is None:
                return 0
            if not is_memoized:  # the same bytes have the same meaning when they occur again
                self.tensors[self.data[at:end]] = parts
        state, size, raw, chunk = parts
        properties, made, fields = Object(PROPERTIES, state), Object(TENSOR), Dict()
        chunks: list[Any] = [] if chunk is None else [chunk]
        if is_memoized:
            self.memo += (made, fields, properties, state)
            self.keep_size(raw, size)
            self.memo.append(chunks)
            groups = found.groups()
            if groups[13] and self.got(groups[13]) is CHUNK:
                chunk = self.chunk(groups[14:20], is_memoized)
                if chunk is not None:
                    chunks.append(chunk)
        filled = ("properties", properties, "size", size, "chunks", chunks)
        if chunk is not None:
            fields += filled
            made.state = fields
            self.stack.append(made)
            return end
        stack = self.stack
        stack += (made, fields)
        self.marks.append(len(stack))
        stack += filled
        return found.end(TENSOR_HEAD)

    def tensor_parts(self, found: re.Match[bytes], is_memoized: bool) -> tuple[Any, ...] | None:  # noqa: FBT001
        """Return the state of the properties, the size, the size's opcodes, and the only chunk.

        The chunk is made only if nothing is kept in the memo. None if the tensor does not have the usual
        form.
        """
        groups = found.groups()
        one, kind, first, second, flag, fourth, flag_too, two, size_name, raw, three = groups[:11]
        raws = (one, kind, two, size_name, three)
        if raws not in self.known and not self.are(raws, _TENSOR_NAMES):
            return None
        size = self.numbers[raw]
        if is_memoized:
            parts = (first, second, flag, fourth, flag_too)
            state = self.states.get(parts)
            if state is None:
                got, flags = self.got, (flag == b"\x88", flag_too == b"\x88")
                state = (got(first), got(second), flags[0], got(fourth), flags[1])
                self.states[parts] = state
            return state, size, raw, None
        state = self.got(first)
        if type(state) is not tuple:
            return None
        chunk = None
        if groups[13] and self.got(groups[13]) is CHUNK:
            chunk = self.chunk(groups[14:20], is_memoized)
        return state, size, raw, chunk

    def items(self, pattern: re.Pattern[bytes], at: int, got: bytes, is_memoized: bool) -> int:  # noqa: FBT001
        """Make the indexes of items, and their places."""
        data, stack, memo, known = self.data, self.stack, self.memo, self.known
        numbers, ints = self.numbers, self.ints
        last = -1 if is_memoized else None
        end = count = 0
        while found := pattern.match(data, at):
            groups = found.groups()
            fqn, key, hint, number, begin_name, size, raw, kind, path_name, path = groups[:10]
            offset_name, offset, length_name, length = groups[10:]
            raws = (fqn, hint, kind, path_name, offset_name, length_name, begin_name, size)
            if raws not in known and not self.are(raws, _ITEM_NAMES):
                break
            begin = None if raw is None else numbers[raw]
            is_new, is_new_path = key[0] == SHORT_BINUNICODE, path[0] == SHORT_BINUNICODE
            name = str(key[2:last], "utf-8", "surrogatepass") if is_new else self.got(key)
            file = str(path[2:last], "utf-8", "surrogatepass") if is_new_path else self.got(path)
            index = _new(Index, (name, begin, ints[number]))
            place = _new(FileRange, (file, ints[offset], ints[length]))
            if is_memoized:
                memo += (index, _HIDDEN, name) if is_new else (index, _HIDDEN)
                if begin:
                    memo += (begin, _HIDDEN, begin)
                elif begin is not None:
                    self.keep_size(raw, begin)
                memo += (place, _HIDDEN, file) if is_new_path else (place, _HIDDEN)
            stack += (index, place)
            end = found.end()
            if not data.startswith(got, end):
                break
            count += 1
            if count == _WORTH_A_TRY and not is_memoized and not (is_new or is_new_path):
                alike = RecordColumns(data, at - len(got), found, _ITEM_COLUMNS)
                end = self.many_items(alike, end, has_begin=begin is not None)
                count = 0
                if not data.startswith(got, end):
                    break
            at = end + len(got)
        return end

    def many_items(self, alike: RecordColumns, at: int, *, has_begin: bool) -> int:
        """Make the items from ``at`` on that have the form of the one before; return their end."""
        for block in alike.blocks(at):
            count = len(block)
            keys, hints, begins, paths, offsets, lengths = (
                alike.numbers(block, n) for n in range(len(_ITEM_COLUMNS))
            )
            names = map(self.get, *keys)
            first = tuples_of(begins, count) if has_begin else repeat(None, count)
            hint = hints[0] if hints else repeat(None, count)
            indexes = map(_new, repeat(Index), zip(names, first, hint, strict=True))
            places = map(
                _new,
                repeat(FileRange),
                zip(map(self.get, *paths), *offsets, *lengths, strict=True),
            )
            self.stack += chain.from_iterable(zip(indexes, places, strict=True))
            at += count * alike.length
        return at

    def global_of(self, module: Any, name: Any) -> Any:
        """Return what the pickle may use under this name."""
        if type(module) is not str or type(name) is not str:
            raise ValueError("it names a class by something other than a string")
        if module.split(".", maxsplit=1)[0] == "pathlib":
            module = "pathlib"  # 3.13 has them in pathlib._local
        known = self.names.get((module, name))
        if known is None and module == "torch":
            with contextlib.suppress(KeyError):
                return DTYPES[name]
        if known is None:
            raise NotAllowedError(f"{module}.{name}"[:200])
        return known

    def new_object(self) -> None:
        """Perform NEWOBJ for a class of torch's, without arguments."""
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not TorchClass or arguments != ():
            raise ValueError("it makes an object of something that is not a class of DCP")
        self.stack.append(Object(kind))

    def reduce(self) -> None:
        """Perform REDUCE for a function of the list, called with a tuple."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not _Function or type(arguments) is not tuple:
            raise ValueError("it calls something that is not a function of DCP")
        self.stack.append(function.call(*arguments))

    def build(self) -> None:
        """Perform BUILD: give an object its state, once."""
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Object or made.state is not None or type(state) not in (Dict, tuple):
            raise ValueError("it sets the state of a value that takes none or has one already")
        made.state = state

    def put_in(self, items: Sequence[Any]) -> None:
        """Perform SETITEM or SETITEMS."""
        target = self.stack[-1]
        if type(target) is not Dict or len(items) % 2:
            raise ValueError("it sets an item of something that is not a dict")
        target.extend(items)

    def append(self, items: Sequence[Any], kind: type[list[Any]] = list) -> None:
        """Perform APPEND, APPENDS or ADDITEMS."""
        target = self.stack[-1]
        if type(target) is not kind:
            raise ValueError("it adds an element to something that is not a list or a set")
        target.extend(items)

    def run(self) -> Any:
        """Perform all opcodes up to STOP, and return the root object."""
        data, stack, memo = self.data, self.stack, self.memo
        append, opcodes = stack.append, _OPCODES
        at = self.at
        while True:
            op = data[at]
            at += 1
            if op == BINGET or op == LONG_BINGET:  # noqa: PLR1714, SIM109 - a tuple is slower
                if op == BINGET:
                    end = at + 1
                    value = memo[data[at]]
                else:
                    end = at + 4
                    value = memo[int.from_bytes(data[at:end], "little")]
                kind = type(value)
                if kind is TorchClass:
                    if value.record and (past := self.record(value, end, data[at - 1 : end])):
                        at = past
                        continue
                    if data.startswith(NEW, end):
                        at = end + len(NEW)
                        append(Object(value))
                        continue
                if kind is _Hidden:
                    raise ValueError("it refers to a memo entry that no pickler refers to")
                append(value)
                at = end
            elif op == SHORT_BINUNICODE:
                end = at + 1 + data[at]
                append(str(data[at + 1 : end], "utf-8", "surrogatepass"))
                at = end
            elif op == MEMOIZE:
                if self.has_holes:
                    raise ValueError("it memoizes a value after a PUT that skipped numbers")
                memo.append(stack[-1])
            elif op == TUPLE1:
                stack[-1] = (stack[-1],)
            elif op == LONG_BINPUT:
                self.put(int.from_bytes(data[at : at + 4], "little"))
                at += 4
            elif op == STOP:
                return self.root()
            else:
                handler = opcodes.get(op)
                if handler is None:
                    raise _unknown(op)
                self.at = at
                handler(self)
                at = self.at

    def root(self) -> Any:
        """Return the only value on the stack at STOP."""
        if len(self.stack) != 1 or self.marks:
            raise ValueError("it ends with values left on the stack")
        return self.stack[0]


CHUNK.make, INDEX.make, TENSOR.make = _Machine.chunks, _Machine.items, _Machine.tensor


def _unknown(op: int) -> ValueError:
    if op in (0x82, 0x83, 0x84):
        return NotAllowedError("an extension code")
    if op in (0x50, 0x51):
        return NotAllowedError("an object outside the file")
    return ValueError(f"it has the opcode {op:#x}, which no .metadata needs")


def _text(m: _Machine, raw: bytes) -> None:
    m.stack.append(raw.decode("utf-8", "surrogatepass"))


def _long(m: _Machine, width: int) -> None:
    raw = m.sized(width)
    if len(raw) > 8:  # noqa: PLR2004
        raise ValueError(f"it has an integer of {len(raw)} bytes")
    m.stack.append(int.from_bytes(raw, "little", signed=True))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def made(m: _Machine) -> None:
        stack = m.stack
        if len(stack) < count:
            raise ValueError("it makes a tuple of more values than the stack holds")
        stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]

    return made


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _global_line(m: _Machine) -> None:
    lines: list[str] = []
    for _ in range(2):
        end = m.data.index(b"\n", m.at)
        lines.append(m.data[m.at : end].decode("utf-8"))
        m.at = end + 1
    m.stack.append(m.global_of(*lines))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.global_of(module, name))


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.put_in((key, value))


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.append((value,))


def _dict(m: _Machine) -> None:
    items = m.marked()
    m.stack.append(Dict())
    m.put_in(items)


def _pop(m: _Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()


def _pop_mark(m: _Machine) -> None:
    m.marked()


def _bad_new(_: _Machine) -> NoReturn:
    raise ValueError("it makes an object with arguments")


_OPCODES: Mapping[int, Callable[[_Machine], None]] = {
    0x80: lambda m: m.skip(1),  # PROTO
    0x95: lambda m: m.skip(8),  # FRAME: a hint for buffers
    0x28: lambda m: m.marks.append(len(m.stack)),  # MARK
    0x30: _pop,
    0x31: _pop_mark,  # POP_MARK
    0x32: lambda m: m.stack.append(m.stack[-1]),  # DUP
    0x29: _constant(()),
    0x4E: _constant(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    0x4B: lambda m: m.stack.append(m.take(1)[0]),
    0x4D: lambda m: m.stack.append(int.from_bytes(m.take(2), "little")),
    0x4A: lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
    0x8A: lambda m: _long(m, 1),
    0x8B: lambda m: _long(m, 4),
    0x47: lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x58: lambda m: _text(m, m.sized(4)),
    0x8D: lambda m: _text(m, m.sized(8)),
    0x43: lambda m: m.stack.append(m.sized(1)),
    0x42: lambda m: m.stack.append(m.sized(4)),
    0x8E: lambda m: m.stack.append(m.sized(8)),
    0x96: lambda m: m.stack.append(bytearray(m.sized(8))),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x74: lambda m: m.stack.append(tuple(m.marked())),
    0x5D: lambda m: m.stack.append([]),
    0x6C: lambda m: m.stack.append(m.marked()),
    0x61: _append,
    0x65: lambda m: m.append(m.marked()),
    0x7D: lambda m: m.stack.append(Dict()),
    0x64: _dict,
    0x73: _set_item,
    0x75: lambda m: m.put_in(m.marked()),
    0x8F: lambda m: m.stack.append(SetOf()),
    0x90: lambda m: m.append(m.marked(), SetOf),
    0x91: lambda m: m.stack.append(SetOf(m.marked())),
    0x71: lambda m: m.put(m.take(1)[0]),
    0x63: _global_line,
    0x93: _stack_global,
    0x81: lambda m: m.new_object(),
    0x92: _bad_new,
    0x52: lambda m: m.reduce(),
    0x62: lambda m: m.build(),
}


def decode(data: bytes) -> Any:
    """Return the root of the pickle, in time and memory of its length.

    NotAllowedError: it asks for something that no ``.metadata`` needs. Damaged or hostile bytes raise
    ValueError, IndexError, KeyError or TypeError.
    """
    return _Machine(data).run()
