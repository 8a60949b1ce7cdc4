"""Engines: which take part at a target and why others do not, and what an engine does on one rank.

    choose(names, place) -> Chosen ...        before anything starts: imports neither torch nor an engine
    ready(Chosen, Setting) -> Driver          .about()  .save(state, at)  .load(target, at, cached)

    name               on a directory                on an object store, and elsewhere
    ckptfs             ckptfs.save, ckptfs.load      the same, through obstore or the fsspec library
    ckptfs:CLIENT      -                             through that library
    dcp                FileSystemWriter, -Reader     FsspecWriter, FsspecReader
    dcp:t2, dcp:t4     with two, four threads        -
    dcp:fsspec         FsspecWriter, FsspecReader    -
    torch.save         one file a rank               the same, into fsspec's file
    safetensors        save_file, load_file          to a local file, then up; down, then from there
    s3torchconnector   -                             S3StorageWriter, S3StorageReader: S3 only
    torchsnapshot      Snapshot.take, restore        -
    torch_checkpointing  save_sync, load             -
    raw                O_DIRECT, as many bytes       multipart put and ranged get: no checkpoint
    raw:direct, raw:buffered    one way each, two threads of 16 MiB, from memory as large as the state

All of them end a load with the bytes in the tensors that were there before: as a job starts again.
What stands after a colon, and torchsnapshot and torch_checkpointing, take part only where they are named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec

from ckptfs.bench.clock import Group
from ckptfs.bench.machine import versions
from ckptfs.bench.results import Engine
from ckptfs.bench.target import Home
from ckptfs.bench.workloads import State
from ckptfs.errors import MissingDriverError, StateError
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.uri import Uri

__all__ = [
    "ENGINES",
    "OBJECT_STORES",
    "ON_REQUEST",
    "Attempt",
    "Cached",
    "Chosen",
    "Driver",
    "Kind",
    "Setting",
    "choose",
    "kind_of",
    "ready",
    "version_text",
]

OBJECT_STORES = tuple(PROTOCOLS)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine.

    Attributes:
        driver: Where its driver is, "module:factory".
        needs: What has to be installed.
        fits: Whether it makes sense at a URI.
        variants: What may be after a colon; on a directory only, but for clients of ckptfs.
    """

    driver: str
    needs: tuple[str, ...] = ()
    fits: Callable[[Uri], bool] = lambda _: True
    variants: tuple[str, ...] = ()


def _on_s3(uri: Uri) -> bool:
    return uri.protocol in ("s3", "s3a")


def _known_to_fsspec(uri: Uri) -> bool:
    return uri.is_local or uri.protocol in (*OBJECT_STORES, *_FSSPEC)


_FSSPEC = ("hdfs", "webhdfs", "abfs", "sftp", "ssh", "smb", "memory")
ENGINES = {
    "ckptfs": Kind("ckptfs.bench.engines_checkpoint:Ckptfs"),
    "dcp": Kind(
        "ckptfs.bench.engines_checkpoint:open_dcp",
        fits=_known_to_fsspec,
        variants=("t2", "t4", "fsspec"),
    ),
    "torch.save": Kind("ckptfs.bench.engines_checkpoint:TorchSave", fits=_known_to_fsspec),
    "safetensors": Kind(
        "ckptfs.bench.engines_checkpoint:Safetensors", ("safetensors",), fits=_known_to_fsspec
    ),
    "s3torchconnector": Kind(
        "ckptfs.bench.engines_checkpoint:S3TorchConnector",
        ("s3torchconnector", "tenacity"),
        fits=_on_s3,
    ),
    "raw": Kind(
        "ckptfs.bench.engine_raw:open_raw", fits=_known_to_fsspec, variants=("direct", "buffered")
    ),
}
# Who takes part only where it is named: a benchmark is not made longer by what happens to be installed.
ON_REQUEST = {
    "torchsnapshot": Kind(
        "ckptfs.bench.engines_checkpoint:TorchSnapshot",
        ("torchsnapshot",),
        lambda uri: uri.is_local,
    ),
    "torch_checkpointing": Kind(
        "ckptfs.bench.engines_checkpoint:TorchCheckpointing",
        ("torch_checkpointing",),
        lambda uri: uri.is_local,
    ),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine that takes part.

    Attributes:
        name: Its name.
        variant: A client of ckptfs, or one of ``Kind.variants``; None: none of them.
    """

    name: str
    variant: str | None = None

    @property
    def label(self) -> str:
        """As it was asked for."""
        return f"{self.name}:{self.variant}" if self.variant else self.name


def choose(asked: Sequence[str], place: Uri) -> tuple[list[Chosen], list[str]]:
    """Choose who takes part at a target. Imports none of them.

    Args:
        asked: Names of engines; empty: all that fit and are installed.
        place: The target.

    Returns:
        Those that take part, and notes about why others do not. One that does not fit here is a note.

    Raises:
        StateError: There is no such engine.
        MissingDriverError: An engine that was named is not installed.
    """
    chosen, notes = [], []
    for word in asked or ENGINES:
        name, _, variant = word.partition(":")
        kind = ENGINES.get(name) or ON_REQUEST.get(name)
        if kind is None or (variant and name != "ckptfs" and variant not in kind.variants):
            raise StateError(f"no engine is called {word!r}", hint=f"one of {', '.join(_words())}")
        there = place.protocol in OBJECT_STORES if name == "ckptfs" else place.is_local
        if not kind.fits(place) or (variant and not there):
            notes.append(f"{word} does not take part at {place}: not made for it")
            continue
        missing = [module for module in kind.needs if find_spec(module) is None]
        if missing and asked:
            raise MissingDriverError(
                f"the engine {word} needs {', '.join(missing)}",
                hint=f"pip install {' '.join(missing)}",
            )
        if missing:
            notes.append(f"{word} does not take part: {', '.join(missing)} is not installed")
            continue
        chosen.append(Chosen(name, variant or None))
    return chosen, notes


def kind_of(name: str) -> Kind:
    """Return the kind of the chosen engine ``name``."""
    return ENGINES[name] if name in ENGINES else ON_REQUEST[name]


def _words() -> list[str]:
    known = {**ENGINES, **ON_REQUEST}
    return [*known, *(f"{name}:{one}" for name, kind in known.items() for one in kind.variants)]


class Cached(Enum):
    """Where a load finds the files.

    Attributes:
        COLD: On the disk.
        WARM: In the page cache.
    """

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a driver works with.

    Attributes:
        home: The target's home.
        group: The ranks.
        durable: Whether saves are to be durable.
    """

    home: Home
    group: Group
    durable: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save and its loads: a name below the home that is not used yet.

    Attributes:
        home: The target's home.
        name: The name.
    """

    home: Home
    name: str

    @property
    def place(self) -> Uri:
        """Where. What is below it is named with ``/``: a query stands behind the path."""
        return self.home.root / self.name

    @property
    def path(self) -> str:
        """Of a directory. UriError: it is none."""
        return self.place.local_path

    def checkpoint(self, step: int = 1) -> str:
        """Return the URI of ``step`` of the run that this is, for ckptfs: with credentials and the query."""
        return (self.place / f"step_{step}").full


class Driver(ABC):
    """One engine on one target, on one rank; its calls are collective.

    Args:
        setting: What it works with.

    Attributes:
        home: The target's home.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.home = setting.home

    @abstractmethod
    def about(self) -> Engine:
        """Return who it is and what it promises."""

    @abstractmethod
    def save(self, state: State, at: Attempt) -> None:
        """Save ``state`` as ``at``; durable as ``about`` says when it returns."""

    @abstractmethod
    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        """Fill ``target`` with what ``save`` wrote as ``at``, from where ``cached`` says."""


def ready(chosen: Chosen, setting: Setting) -> Driver:
    """Return the driver of ``chosen`` for ``setting``, its libraries imported."""
    module, _, name = kind_of(chosen.name).driver.partition(":")
    make: Callable[..., Driver] = getattr(import_module(module), name)
    return make(setting, chosen.variant) if chosen.variant else make(setting)


def version_text(*packages: str) -> str:
    """Return ``torch 2.13.0, s3fs 2026.9.0`` for these ``packages``."""
    return ", ".join(f"{name} {told}" for name, told in versions(*packages).items())
