"""The model of one storage: an immutable map of names, and what each operation does to it.

    Disk        frozen: path -> bytes, or DIR for a directory (filesystem shape only)
    apply(disk, op, shape) -> [Outcome(note, disk', reply)]     every way that the operation may end

One operation is one atomic step, except ``RemoveTree`` and ``RemoveMany``, which the search runs as
a first unlink of any one end and then the rest. ``rename`` follows rename(2): a directory may replace an
empty directory only, ENOENT for a missing source or a missing parent of the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from ckptfs.commit.operations import (
    Create,
    Link,
    List,
    MakeDir,
    Op,
    Read,
    ReadAhead,
    RefuseLink,
    Remove,
    RemoveDir,
    RemoveMany,
    RemoveTree,
    Rename,
    Replace,
    StatOf,
    Write,
)
from ckptfs.errors import AlreadyExistsError, NotFoundError, StorageError
from ckptfs.storage.base import Entry, Shape, Stat

DIR = None
Files = dict[str, bytes | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """A reply that is thrown into the program."""

    kind: type[Exception]
    key: str

    def error(self) -> Exception:
        """A fresh exception: the same one twice would collect tracebacks."""
        return self.kind(f"{self.kind.__name__} at {self.key}")


@dataclass(frozen=True, slots=True)
class Puts:
    """Test-only operation: several new files (and their directories) in one step."""

    files: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class HalfRemove:
    """Test-only operation: the first unlink of a removal of many, from either end."""

    key: str = ""
    keys: tuple[str, ...] = ()


class Disk:
    """One interned state of a storage: equal contents are the same object."""

    __slots__ = ("files", "memo", "number")
    _known: dict[frozenset[tuple[str, bytes | None]], Disk] = {}  # noqa: RUF012 - the intern table

    files: Files
    number: int
    memo: dict[object, Any]

    @classmethod
    def of(cls, files: Files) -> Disk:
        """The one Disk with these contents."""
        key = frozenset(files.items())
        disk = cls._known.get(key)
        if disk is None:
            disk = cls.__new__(cls)
            disk.files, disk.number, disk.memo = dict(files), len(cls._known), {}
            cls._known[key] = disk
        return disk

    @classmethod
    def forget(cls) -> None:
        """Drop the intern table between scenarios."""
        cls._known.clear()

    def below(self, key: str) -> list[str]:
        """Every path under ``key``, sorted."""
        prefix = key + "/" if key else ""
        return sorted(path for path in self.files if path.startswith(prefix))

    def with_file(self, path: str, data: bytes) -> Disk:
        """This disk with one file more, parents included."""
        files = dict(self.files)
        _add_parents(files, path)
        files[path] = data
        return Disk.of(files)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way an operation may end. ``late``: the request is still on its way."""

    note: str
    disk: Disk
    reply: Any
    late: bool = False


def _add_parents(files: Files, path: str) -> None:
    parts = path.split("/")[:-1]
    for n in range(1, len(parts) + 1):
        files.setdefault("/".join(parts[:n]), DIR)


class MalformedKeyError(ValueError):
    """A program asked for a key that is no path: it dies of it, and the search reports that."""


def _malformed(key: str) -> bool:
    return key.startswith("/") or key.endswith("/") or "//" in key


def _parent_missing(files: Files, key: str, shape: Shape) -> bool:
    if shape is Shape.OBJECT:
        return False
    parent = key.rpartition("/")[0]
    return parent != "" and (parent not in files or files[parent] is not DIR)


def apply(disk: Disk, op: Op | Puts | HalfRemove, shape: Shape) -> list[Outcome]:
    """Every way that ``op`` may end when its answer arrives."""
    files = disk.files
    if isinstance(op, HalfRemove):
        return list(_half_remove(disk, op))
    if isinstance(op, Puts):
        changed = dict(files)
        for key, data in op.files:
            if shape is Shape.FILESYSTEM and _parent_missing(files, key, shape):
                return [Outcome("", disk, Failed(NotFoundError, key))]
            changed[key] = data
        return [Outcome("", Disk.of(changed), None)]
    for key in (getattr(op, name) for name in ("key", "source", "target") if hasattr(op, name)):
        if _malformed(key):
            return [Outcome("", disk, Failed(MalformedKeyError, key))]
    new, reply = _apply(files, op, shape)
    return [Outcome("", disk if new is files else Disk.of(new), reply)]


def _half_remove(disk: Disk, op: HalfRemove) -> Iterator[Outcome]:
    paths = disk.below(op.key) if op.key else [key for key in op.keys if key in disk.files]
    inside = [path for path in paths if disk.files[path] is not DIR]
    if len(inside) < 2:
        yield Outcome("", disk, None)
        return
    for path in (inside[0], inside[-1]):
        changed = {p: v for p, v in disk.files.items() if p != path}
        yield Outcome(f" [{path.rpartition('/')[2]} first]", Disk.of(changed), None)


def _apply(files: Files, op: Op, shape: Shape) -> tuple[Files, Any]:
    match op:
        case Read(key):
            data = files.get(key)
            return files, Failed(NotFoundError, key) if data is None else data
        case ReadAhead(keys):
            there = list(itertools.takewhile(lambda key: files.get(key) is not None, keys))
            return files, tuple(files[key] for key in there)
        case StatOf(key):
            if key not in files:
                return files, Failed(NotFoundError, key)
            data = files[key]
            if data is None:
                return files, Stat(0, is_dir=True)
            return files, Stat(len(data), is_dir=False, etag=xxhash.xxh64(data).hexdigest())
        case List(key):
            return files, _list(files, key, shape)
        case RefuseLink():
            return files, None  # this disk has no links
        case Create(key, data):
            if _parent_missing(files, key, shape):
                return files, Failed(NotFoundError, key)
            if key in files:
                return files, Failed(AlreadyExistsError, key)
            return {**files, key: data}, None
        case Replace(key, data, if_match):
            if _parent_missing(files, key, shape):
                return files, Failed(NotFoundError, key)
            old = files.get(key)
            etag = "" if old is None else xxhash.xxh64(old).hexdigest()
            if if_match is not None and if_match != etag:
                return files, Failed(AlreadyExistsError, key)
            return {**files, key: data}, None
        case Write(key, data):
            if _parent_missing(files, key, shape):
                return files, Failed(NotFoundError, key)
            return {**files, key: data}, None
        case MakeDir(key):
            if shape is Shape.OBJECT or key in files:
                return files, None
            changed = dict(files)
            _add_parents(changed, key + "/x")
            return changed, None
        case Rename(source, target):
            return _rename(files, source, target)
        case Link(source, target):
            if files.get(source) is None:
                return files, Failed(NotFoundError, source)
            if _parent_missing(files, target, shape):
                return files, Failed(NotFoundError, target)
            if target in files:
                return files, Failed(AlreadyExistsError, target)
            return {**files, target: files[source]}, None
        case Remove(key):
            return (
                ({p: v for p, v in files.items() if p != key}, None)
                if key in files
                else (files, None)
            )
        case RemoveMany(keys):
            left = {p: v for p, v in files.items() if p not in keys}
            return (files if len(left) == len(files) else left), None
        case RemoveDir(key):
            if shape is Shape.OBJECT or key not in files:
                return files, None
            if any(p.startswith(key + "/") for p in files):
                return files, Failed(AlreadyExistsError, key)
            return {p: v for p, v in files.items() if p != key}, None
        case RemoveTree(key):
            kept = {p: v for p, v in files.items() if p != key and not p.startswith(key + "/")}
            return (files if len(kept) == len(files) else kept), None
    raise AssertionError(f"the model does not know {op!r}")


def _list(files: Files, key: str, shape: Shape) -> Any:
    if shape is Shape.FILESYSTEM and key and key not in files:
        return Failed(NotFoundError, key)
    prefix = key + "/" if key else ""
    names: dict[str, bool] = {}
    for path, data in files.items():
        if path.startswith(prefix) and path != key:
            name, slash, _ = path[len(prefix) :].partition("/")
            names[name] = names.get(name, False) or bool(slash) or data is DIR
    return tuple(Entry(name, is_dir) for name, is_dir in sorted(names.items()))


def _rename(files: Files, source: str, target: str) -> tuple[Files, Any]:
    if source not in files:
        return files, Failed(NotFoundError, source)
    if _parent_missing(files, target, Shape.FILESYSTEM):
        return files, Failed(NotFoundError, target)
    if source == target:
        return files, None
    moved = {p: v for p, v in files.items() if p == source or p.startswith(source + "/")}
    if files[source] is DIR and target in files:
        if files[target] is not DIR:
            return files, Failed(StorageError, target)
        if any(p.startswith(target + "/") for p in files):
            return files, Failed(AlreadyExistsError, target)
    changed = {p: v for p, v in files.items() if p not in moved and p != target}
    changed |= {target + p[len(source) :]: v for p, v in moved.items()}
    return changed, None
