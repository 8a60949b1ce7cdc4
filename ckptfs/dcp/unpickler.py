"""The unpickler of ``.metadata``: a dozen names, and nothing that outlives the decoding changes.

A pickle is a program. It calls what it is handed (REDUCE, NEWOBJ, OBJ), gives it attributes (BUILD) and
fills it (SETITEMS, APPENDS, ADDITEMS); only what it is handed is ours to choose:

    torch's classes        a sealed class, made for this decode, whose objects are torch's
    paths, sizes, sets     a function, made for this decode
    enum, layouts          a C method of a table made for this decode; members are never handed out
    dtypes                 torch's own: static C objects without attributes

So BUILD fails, or changes what is thrown away. Extension codes (EXT1, EXT2, EXT4) go past
``find_class`` into registries of the process, and are refused where any are registered.

Nothing is copied out of the stream more often than the stream is long (``_Allowance``): a long list in
the memo, made into a set by five bytes again and again, would fill the memory. What is NOT bounded is
the memo itself: the C unpickler makes it twice as long as the highest index it is told (LONG_BINPUT, PUT:
five bytes for up to 64 GiB), before any Python could look. Where an opcode begins is known only by
reading all before it, which in Python takes several times as long as unpickling, and a limit on the
address space would hit the process's other threads. A manifest's digest keeps damage from getting here;
nothing keeps somebody who may write the run from making its readers run out of memory.
"""

from __future__ import annotations

import collections
import copyreg
import io
import pathlib
import pickle
from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfs import _torch
from ckptfs.errors import ManifestError

__all__ = ["DCP", "FILESYSTEM", "OLD_DCP", "SavedProperties", "Sealed", "Unpickler"]

T = TypeVar("T")
Name = tuple[str, str]  # module and name

DCP = "torch.distributed.checkpoint.metadata"
OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"  # where torch < 2.3 had some
FILESYSTEM = "torch.distributed.checkpoint.filesystem"

_SHORT = 64  # dimensions: not worth counting
_FIELDS_2_13 = 5
_FORMAT = 3  # which of the fields is the memory format


class Sealed(type):
    """The class of classes whose attributes nobody sets, BUILD with a state for slots least of all."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} cannot be given {name!r}")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError(f"{cls.__name__} cannot lose {name!r}")


class SavedProperties(TensorProperties):
    """Stands in for TensorProperties while unpickling: takes the state of any version, with a
    memory format in place of the enum's member.
    """

    def __setstate__(self, state: Any) -> None:
        whole = (*state[:_FORMAT], _member_of(state[_FORMAT]), *state[_FORMAT + 1 :])
        try:
            super().__setstate__(whole)  # type: ignore[no-untyped-call]
        except ValueError:
            # torch 2.15's six fields in an older torch: the new one comes last.
            super().__setstate__(whole[:_FIELDS_2_13])  # type: ignore[no-untyped-call]
        object.__setattr__(self, "__class__", TensorProperties)


class Unpickler(pickle.Unpickler):
    """Makes objects of a dozen classes; ManifestError for any other, before anything is called."""

    def __init__(self, data: bytes, where: object) -> None:
        super().__init__(io.BytesIO(data))
        self._data = data
        self._where = where
        self._names = _names(len(data), self._not_executed)

    def load(self) -> Any:
        """As ``pickle.Unpickler``. ManifestError, and whatever damaged bytes raise."""
        if vars(copyreg)["_inverted_registry"]:
            self._refuse_extension_codes()
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle may use under this name; nothing that it changes is there afterwards."""
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if module.split(".", maxsplit=1)[0] == "pathlib":
            module = "pathlib"  # 3.13 has them in pathlib._local
        known = self._names.get((module, name))
        if known is None:
            raise self._not_executed(f"{module}.{name}")
        return known

    def persistent_load(self, pid: Any) -> Any:
        """There are none."""
        raise ManifestError(".metadata refers to outside objects", uri=self._where)

    def _refuse_extension_codes(self) -> None:
        """ManifestError for opcodes that are looked up in this process, not in ``find_class``, and
        that leave what they find in a cache of the process.
        """
        import pickletools

        for opcode, _, _ in pickletools.genops(self._data):
            if opcode.name in {"EXT1", "EXT2", "EXT4"}:
                raise self._not_executed("an extension code")

    def _not_executed(self, what: str) -> ManifestError:
        return ManifestError(
            f".metadata asks for {what}, which no DCP metadata needs: not executed",
            uri=self._where,
            hint="the file was tampered with, or written by a custom planner; "
            "torch.distributed.checkpoint would execute it",
        )


class _Allowance:
    """How much may still be copied: as many elements as the file has bytes."""

    def __init__(self, left: int) -> None:
        self._left = left

    def of(self, items: T) -> T:
        """The same; ValueError where it is too much."""
        self._left -= len(items) if isinstance(items, Sized) else 0
        if self._left < 0:
            raise ValueError("it repeats more than it holds")
        return items


def _names(
    size_bytes: int, refused: Callable[[str], ManifestError]
) -> Mapping[Name, Callable[..., Any]]:
    """What one decode hands out. size_bytes: of the file."""
    allowed = _Allowance(size_bytes).of
    own = (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorStorageMetadata,
    )
    properties = _sealed(SavedProperties)
    return {
        **{(DCP, kind.__name__): _sealed(kind) for kind in own},
        (DCP, "TensorProperties"): properties,
        (OLD_DCP, "TensorProperties"): properties,
        (FILESYSTEM, "_StorageInfo"): _sealed(_torch.storage_info_type()),
        ("torch", "Size"): lambda lengths: torch.Size(
            lengths if len(lengths) < _SHORT else allowed(lengths)
        ),
        ("torch.serialization", "_get_layout"): _layouts().__getitem__,
        ("collections", "OrderedDict"): lambda: collections.OrderedDict(),  # noqa: PLW0108
        ("builtins", "set"): lambda items=(): set(allowed(items)),
        ("builtins", "frozenset"): lambda items=(): frozenset(allowed(items)),
        **_paths(allowed),
        **_formats(refused),
    }


def _sealed(kind: type) -> type:
    """A class to hand out for ``kind``, whose objects are ``kind``'s."""
    # C, so that no Python runs for each of a million; it is given the class, and ignores it.
    return Sealed(kind.__name__, (), {"__slots__": (), "__new__": partial(object.__new__, kind)})


def _paths(allowed: Callable[[str], str]) -> dict[Name, Callable[..., Any]]:
    def path(kind: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
        # Text alone: a path of two paths, twice as long as each, doubles with every call.
        return lambda *parts: kind(*[allowed(_text(part)) for part in parts])

    # A checkpoint_id of another system cannot be a concrete path here; it is only shown.
    kinds: dict[str, type[pathlib.PurePath]] = {
        "Path": pathlib.PurePath,
        "PurePath": pathlib.PurePath,
        "PosixPath": pathlib.PosixPath,
        "PurePosixPath": pathlib.PurePosixPath,
        "WindowsPath": pathlib.PureWindowsPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
    }
    return {("pathlib", name): path(kind) for name, kind in kinds.items()}


def _formats(refused: Callable[[str], ManifestError]) -> dict[Name, Callable[..., Any]]:
    """The enum of memory formats, called with a number or asked for a name."""
    members = {
        member: made
        for member in _torch.mem_format_encoding()
        if (made := _format_of(member)) is not None
    }
    by_value = {member.value: made for member, made in members.items()}.__getitem__
    by_name = {member.name: made for member, made in members.items()}

    def member_named(kind: Any, name: str) -> torch.memory_format:
        """What stock torch on Python 3.11.2 writes for a member; of nothing else an attribute."""
        if kind is not by_value:
            raise refused("builtins.getattr")
        return by_name[name]

    return {
        (DCP, "_MEM_FORMAT_ENCODING"): by_value,
        (OLD_DCP, "MEM_FORMAT_ENCODING"): by_value,
        ("builtins", "getattr"): member_named,
    }


def _format_of(member: Any) -> torch.memory_format | None:
    """TORCH_CHANNELS_LAST -> torch.channels_last."""
    found = vars(torch).get(member.name.removeprefix("TORCH_").lower())
    return found if isinstance(found, torch.memory_format) else None


def _member_of(made: Any) -> Any:
    for member in _torch.mem_format_encoding() if made is not None else ():
        if _format_of(member) is made:
            return member
    raise TypeError(f"a memory format that is a {type(made).__name__}")


def _layouts() -> dict[str, torch.layout]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _text(part: Any) -> str:
    if type(part) is not str:
        raise TypeError(f"a path with a {type(part).__name__} in it")
    return part
