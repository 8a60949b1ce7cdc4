"""Check what ``torch.save`` wrote before torch unpickles it: it must not hang or crash the process.

    check_archive(stream)      ValueError for anything that no honest file contains; rewinds the stream
    advise_on_torch(version)   one warning if the torch that will unpickle it has a known hole

``weights_only`` keeps a pickle from running code, and nothing else: it hashes every key, in C and without a
limit. A key of nested tuples overflows the stack or takes 2^44 steps, integers can be chosen to have one
hash, an archive may unpack to a thousand times its size, and a bytearray may be requested by its length
alone.

The opcodes are simulated with values that are at most atoms and small tuples of atoms.
"""

from __future__ import annotations

import functools
import io
import logging
import pickletools
import re
import struct
import sys
import zipfile
from collections.abc import Collection, Iterable
from typing import Any, Final

import numpy as np

__all__ = ["advise_on_torch", "check_archive", "check_collisions", "check_hashing"]

log = logging.getLogger("ckptfs.dcp")

_ZIP = b"PK\x03\x04"
_HEADER = 30  # bytes of a record before its name
_LEGACY_PICKLES = 5  # magic number, protocol, system, the object, keys of its storages
_MOST_PARTS = 300  # of a key, however they are nested
_MOST_DEPTH = 100_000  # of nested containers; pickle writes up to 1,000 with Python's default limit
_COLLISIONS = 64  # keys with one hash; honest files have none
_MODULUS = sys.hash_info.modulus
_SHARED_LEAST, _SHARED_TIMES = 1_000_000, 100
# The opcodes that make up most of a pickle by torch.save; it uses protocol 2.
_BININT, _BININT1, _BINUNICODE, _MARK_, _STOP = b"JKX(."
_BINPUT, _LONG_BINPUT, _BINGET = b"qrh"
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_LINES = {"GLOBAL": 2, "INST": 2, "PERSID": 1}
_BININTS = re.compile(rb"(?:J.{4})+", re.DOTALL)
_BININT_RECORD = np.dtype([("opcode", "u1"), ("value", "<i4")])


class _Opaque:
    """A value that is not simulated."""


class _Name(str):
    """A global, by its dotted name."""

    __slots__ = ()


class _Cell:
    """A list, a dict or a set.

    Attributes:
        parts: How many values it contains, those inside its elements included.
        depth: How deeply containers are nested in it.
    """

    __slots__ = ("depth", "parts")

    def __init__(self, parts: int = 1, depth: int = 0) -> None:
        self.parts = parts
        self.depth = depth


class _Large(_Cell):
    """A tuple with too many parts to be a key."""

    __slots__ = ()


_WITH_PARTS = frozenset({_Cell, _Large, tuple})
_OPAQUE: Final = _Opaque()
_MARK: Final = object()
_ATOMS = (str, int, float, bool, bytes, type(None))


@functools.cache
def advise_on_torch(version: str) -> None:
    """Warn, once, if torch's ``weights_only`` unpickler has a known hole.

    This is CVE-2026-24747, fixed in 2.10: an object from a stranger may corrupt memory, and then run code.
    ``version`` is ``torch.__version__``.
    """
    numbers = [
        int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdecimal()
    ]
    if numbers < [2, 10]:
        log.warning(
            "torch %s has a known vulnerability in weights_only (CVE-2026-24747): upgrade to 2.10 or "
            "newer before you load files that you do not trust",
            version,
        )


def check_archive(stream: Any) -> None:
    """Check what ``torch.save`` wrote. ValueError: torch would hang, crash or fill the memory.

    ``stream`` is binary and seekable; it is read from its start to its end and rewound to its start.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    try:
        is_archive = stream.read(len(_ZIP)) == _ZIP
        stream.seek(0)
        if is_archive:
            _check_zip(stream, size)
        else:
            _check_legacy(stream, size)
    except ValueError:
        raise
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        OverflowError,
        EOFError,
        struct.error,
    ) as error:
        raise ValueError(f"it is neither an archive nor a pickle: {error}") from error
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a complete pickle: {error}") from error
    finally:
        stream.seek(0)


def check_collisions(keys: Iterable[Any]) -> None:
    """Raise ValueError if so many different keys have one hash that a dict would take endless time."""
    found = [*keys]
    hashes = [*map(hash, found)]
    if len(set(hashes)) + _COLLISIONS >= len(hashes):
        return
    alike: dict[int, list[Any]] = {}
    for one, key in zip(hashes, found, strict=True):
        alike.setdefault(one, []).append(key)
    for group in alike.values():
        # Their texts are compared, because texts cannot be made to collide; equal keys do no harm.
        if len(group) > _COLLISIONS and len(set(map(repr, group))) > _COLLISIONS:
            raise ValueError("too many of its keys have the same hash")


def check_hashing(keys: Iterable[Any]) -> None:
    """Raise ValueError if it would take endless time to hash these keys or to look one of them up."""
    found = [*keys]
    if set(map(type, found)) <= {str}:
        return
    for key in found:
        if type(key) is tuple and not _is_short(key):
            raise ValueError("one of its keys is too long or nested too deeply")
    check_collisions(found)


def _is_short(key: tuple[Any, ...]) -> bool:
    left, parts = _MOST_PARTS, [key]
    while parts and left > 0:
        inner = parts.pop()
        left -= 1 + len(inner)
        parts += [one for one in inner if type(one) is tuple]
    return left > 0


def _check_zip(stream: Any, size: int) -> None:
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
        if sum(record.file_size for record in records) > size:
            raise ValueError("its records hold more bytes than the file")
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its records are compressed, as torch.save never does")
        for record in records:
            if record.filename.endswith(".pkl"):
                _Followed(size).run_all(_bytes_of(stream, record))


def _bytes_of(stream: Any, record: zipfile.ZipInfo) -> bytes:
    """Return a record's bytes without zipfile, which would check the CRC: our archives have none."""
    stream.seek(record.header_offset)
    head = stream.read(_HEADER)
    if len(head) < _HEADER:
        raise ValueError("one of its records has no header")
    skipped = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    stream.seek(record.header_offset + _HEADER + skipped)
    found: bytes = stream.read(record.file_size)
    return found


def _check_legacy(stream: Any, size: int) -> None:
    for _ in range(_LEGACY_PICKLES):
        if stream.tell() >= size:
            return
        _Followed(size).run(stream)


class _Followed:
    """The state of one simulated pickle; ``size`` is the size of the file in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.most = max(_SHARED_LEAST, _SHARED_TIMES * size)
        self.stack: list[Any] = []
        self.marks: list[int] = []  # positions on the stack; some marks may have been popped since
        self.memo: dict[int, Any] = {}
        self.alike: dict[int, set[str]] = {}

    def run(self, stream: Any) -> None:
        """Simulate all opcodes up to STOP."""
        name = ""
        while name != "STOP":
            opcode = _opcode_of(stream.read(1))
            name = opcode.name
            self.step(name, _argument_of(opcode, stream))

    def run_all(self, data: bytes) -> None:
        """Simulate a pickle in memory; the most frequent opcodes are handled without a table."""
        stack, memo, stream = self.stack, self.memo, io.BytesIO(data)
        at = 0
        while True:
            op = data[at]
            at += 1
            if op == _BININT:
                run = _BININTS.match(data, at - 1)
                if run is None:
                    raise ValueError("it ends in the middle")
                numbers = np.frombuffer(
                    data, _BININT_RECORD, (run.end() - run.start()) // 5, at - 1
                )
                stack += numbers["value"].tolist()
                at = run.end()
            elif op == _BINUNICODE:
                end = at + 4 + int.from_bytes(data[at : at + 4], "little")
                if end > len(data):
                    raise ValueError("it ends in the middle")
                stack.append(str(data[at + 4 : end], "utf-8", "surrogatepass"))
                at = end
            elif op in (_BINPUT, _LONG_BINPUT):
                end = at + (1 if op == _BINPUT else 4)
                self.keep(int.from_bytes(data[at:end], "little"))
                at = end
            elif op == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif op == _BININT1:
                stack.append(data[at])
                at += 1
            elif op == _MARK_:
                self.mark()
            else:
                opcode = _opcode_of(data[at - 1 : at])
                argument = None
                if opcode.arg is not None:
                    stream.seek(at)
                    argument = _argument_of(opcode, stream)
                    at = stream.tell()
                self.step(opcode.name, argument)
                if op == _STOP:
                    return

    def keep(self, number: int) -> None:
        """Simulate PUT. ValueError if there is only a mark on the stack."""
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("it stores a mark, which is not a value")
        self.memo[number] = value

    def mark(self) -> None:
        """Simulate MARK."""
        self.marks.append(len(self.stack))
        self.stack.append(_MARK)

    def step(self, name: str, argument: Any) -> None:  # noqa: PLR0915 - one line for each opcode
        """Simulate one opcode."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self.mark()
            case "MEMOIZE":
                self.keep(len(self.memo))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.keep(argument)
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.tuple_of(self.popped(int(name[-1])))
            case "TUPLE":
                self.tuple_of(self.marked())
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                stack.append(_Cell())
            case "LIST":
                self.fill(_Cell(), self.marked())
            case "DICT":
                self.fill_dict(_Cell(), self.marked())
            case "APPEND":
                item = stack.pop()
                self.fill(stack.pop(), [item])
            case "APPENDS":
                items = self.marked()
                self.fill(stack.pop(), items)
            case "ADDITEMS" | "FROZENSET":
                items = self.marked()
                self.keys(items)
                self.fill(stack.pop() if name == "ADDITEMS" else _Cell(), items)
            case "SETITEM":
                items = self.popped(2)
                self.fill_dict(stack.pop(), items)
            case "SETITEMS":
                items = self.marked()
                self.fill_dict(stack.pop(), items)
            case "GLOBAL" | "INST":
                if name == "INST":
                    self.marked()
                stack.append(_Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, attribute = self.popped(2)
                stack.append(_Name(f"{module}.{attribute}"))
            case "REDUCE" | "NEWOBJ":
                function, arguments = self.popped(2)
                self.called(function, arguments)
            case "NEWOBJ_EX":
                self.popped(3)
                stack.append(_OPAQUE)
            case "OBJ":
                self.marked()
                stack.append(_OPAQUE)
            case "BUILD":
                stack.pop()
            case "BINPERSID" | "PERSID":
                if name == "BINPERSID":
                    stack.pop()
                stack.append(_OPAQUE)
            case "POP":
                stack.pop()
            case "POP_MARK":
                self.marked()
            case "DUP":
                if stack[-1] is _MARK:
                    self.mark()
                else:
                    stack.append(stack[-1])
            case _:
                stack.append(argument if isinstance(argument, _ATOMS) else _OPAQUE)

    def popped(self, count: int) -> list[Any]:
        """Pop the topmost values, and return them in their order."""
        if len(self.stack) < count:
            raise ValueError("it takes more values from the stack than the stack holds")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def marked(self) -> list[Any]:
        """Pop and return what was pushed since the last mark."""
        at = self.marks.pop()
        while at >= len(self.stack) or self.stack[at] is not _MARK:
            at = self.marks.pop()
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def tuple_of(self, items: list[Any]) -> None:
        """Push a tuple of these items."""
        made = tuple(items)
        parts = 1 + _parts_in(items)
        self.bounded(parts)
        is_small = parts <= _MOST_PARTS
        self.stack.append(made if is_small else _Large(parts, self.depth_around(items)))

    def depth_around(self, items: list[Any]) -> int:
        """Return the depth of a container of these items; small tuples count as atoms.

        ValueError if it is deeper than any honest file.
        """
        depth = 1 + max((one.depth for one in items if isinstance(one, _Cell)), default=0)
        if depth > _MOST_DEPTH:
            raise ValueError(f"its containers are nested more than {_MOST_DEPTH} times")
        return depth

    def bounded(self, parts: int) -> None:
        """Raise ValueError if shared values would take endless time to visit."""
        if parts > self.most:
            raise ValueError("it refers to the same values too many times")

    def fill(self, target: Any, items: list[Any]) -> None:
        """Put these items into a container."""
        if isinstance(target, _Cell):
            parts = _parts_in(items)
            target.parts += parts
            self.bounded(target.parts)
            if parts > len(items):
                target.depth = max(target.depth, self.depth_around(items))
        self.stack.append(target)

    def fill_dict(self, target: Any, items: list[Any]) -> None:
        """Put these items into a dict; keys and values alternate."""
        self.keys(items[::2])
        self.fill(target, items)

    def keys(self, keys: list[Any]) -> None:
        """Raise ValueError if one of these keys takes long to hash or to find among the others."""
        if set(map(type, keys)) <= {str}:
            return
        for key in keys:
            if type(key) is str or (type(key) is int and -_MODULUS < key < _MODULUS):
                continue  # the hash of such a number is the number itself: no two of them collide
            if isinstance(key, _Large):
                raise ValueError(  # noqa: TRY004
                    "one of its keys is too long or nested too deeply"
                )
            if isinstance(key, (tuple, *_ATOMS)):
                alike = self.alike.setdefault(hash(key), set())
                alike.add(repr(key))
                if len(alike) > _COLLISIONS:
                    raise ValueError("too many of its keys have the same hash")

    def called(self, function: Any, arguments: Any) -> None:
        """Simulate a call.

        ValueError if it would allocate memory of a size that is only given by a number.
        """
        if isinstance(function, _Name) and isinstance(arguments, tuple):
            last = function.rpartition(".")[2]
            sizes = [a for a in arguments if type(a) is int]
            if last == "_reconstruct":
                sizes = [
                    a for one in arguments if type(one) is tuple for a in one if type(a) is int
                ]
            if last in ("bytearray", "bytes", "_reconstruct") and any(a > self.size for a in sizes):
                raise ValueError(f"it calls {last} for more bytes than the file has")
        self.stack.append(arguments if isinstance(arguments, (_Large, tuple)) else _OPAQUE)


def _opcode_of(code: bytes) -> pickletools.OpcodeInfo:
    """Return the opcode with this code.

    ValueError if there is none, and for STRING, which torch refuses: its text is quoted and escaped.
    """
    opcode = _OPCODES.get(code[0]) if code else None
    if opcode is None or opcode.name == "STRING":
        raise ValueError(f"it has the opcode {code!r}, which torch never writes")
    return opcode


def _argument_of(opcode: pickletools.OpcodeInfo, stream: Any) -> Any:
    if opcode.arg is None:
        return None
    if opcode.name not in _LINES:
        return opcode.arg.reader(stream)
    # An unpickler uses these lines unchanged; pickletools would decode escapes in them, or warn.
    lines = [stream.readline() for _ in range(_LINES[opcode.name])]
    if not all(line.endswith(b"\n") for line in lines):
        raise ValueError("it ends in the middle")
    return " ".join(line[:-1].decode() for line in lines)


def _parts_in(values: Collection[Any]) -> int:
    """Return how many values these contain, themselves included."""
    if _WITH_PARTS.isdisjoint(map(type, values)):
        return len(values)
    return sum(map(_parts_of, values))


def _parts_of(value: Any) -> int:
    """Return how many values this contains, itself included."""
    if isinstance(value, _Cell):
        return value.parts
    return 1 + _parts_in(value) if type(value) is tuple else 1
