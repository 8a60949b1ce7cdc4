"""Engines: which of them take part at a target, why others do not, and their interface on a rank.

    choose(names, place) -> Chosen ...        before anything starts: imports neither torch nor engines
    ready(Chosen, Setting) -> Driver          .about()  .save(state, at)  .load(target, at, cached)

    name               on a directory                on an object store, and elsewhere
    ckptfs             ckptfs.save, ckptfs.load      the same, through obstore or the fsspec library
    ckptfs:CLIENT      -                             through that library
    dcp                FileSystemWriter, -Reader     FsspecWriter, FsspecReader
    dcp:t2, dcp:t4     with two, four threads        -
    dcp:fsspec         FsspecWriter, FsspecReader    -
    torch.save         one file per rank             the same, into fsspec's file
    safetensors        save_file, load_file          by way of a local file
    s3torchconnector   -                             S3StorageWriter, S3StorageReader: S3 only
    torchsnapshot      Snapshot.take, restore        -
    torch_checkpointing  save_sync, load             -
    raw                O_DIRECT, as many bytes       multipart put and ranged get: no checkpoint
    raw:direct, raw:buffered    one way each, two threads of 16 MiB, from memory as large as the state

Every engine loads into tensors that exist already, as a job does when it restarts. Variants (after a
colon), torchsnapshot and torch_checkpointing take part only if they are named.
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
        driver: The factory of its driver, as "module:factory".
        needs: Modules that must be installed.
        fits: Returns whether the engine can work at a URI.
        variants: What may follow a colon, on a directory only. For ckptfs, clients may follow instead.
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
# These take part only if they are named: what happens to be installed should not make a benchmark longer.
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
        variant: A client of ckptfs, or one of ``Kind.variants``; None: the default.
    """

    name: str
    variant: str | None = None

    @property
    def label(self) -> str:
        """The name with the variant, as the user gives it."""
        return f"{self.name}:{self.variant}" if self.variant else self.name


def choose(asked: Sequence[str], place: Uri) -> tuple[list[Chosen], list[str]]:
    """Choose the engines that take part at a target. Imports none of them.

    Args:
        asked: Names of engines; empty: all that fit and are installed.
        place: The target.

    Returns:
        The engines that take part, and notes about why others do not. A named engine that does not fit
        the target is only a note.

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
        takes_variant = place.protocol in OBJECT_STORES if name == "ckptfs" else place.is_local
        if not kind.fits(place) or (variant and not takes_variant):
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
    """Where the files are when a load begins.

    Attributes:
        COLD: On the disk only.
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
        """Its URI. Use ``/`` for names below it, because the path may be followed by a query."""
        return self.home.root / self.name

    @property
    def path(self) -> str:
        """Its path if it is on a local filesystem; otherwise a UriError is raised."""
        return self.place.local_path

    def checkpoint(self, step: int = 1) -> str:
        """Return the URI of ``step`` in this run, for ckptfs, with credentials and query."""
        return (self.place / f"step_{step}").full


class Driver(ABC):
    """One engine at one target, on one rank. Its calls are collective.

    Args:
        setting: The target, the ranks and the durability.

    Attributes:
        home: The target's home.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.home = setting.home

    @abstractmethod
    def about(self) -> Engine:
        """Return the engine's name, versions and promises."""

    @abstractmethod
    def save(self, state: State, at: Attempt) -> None:
        """Save ``state`` as ``at``. On return it is as durable as ``about`` says."""

    @abstractmethod
    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        """Fill ``target`` with what ``save`` wrote as ``at``; ``cached``: where the files are."""


def ready(chosen: Chosen, setting: Setting) -> Driver:
    """Return the driver of ``chosen`` for ``setting``, and import its libraries."""
    module, _, name = kind_of(chosen.name).driver.partition(":")
    make: Callable[..., Driver] = getattr(import_module(module), name)
    return make(setting, chosen.variant) if chosen.variant else make(setting)


def version_text(*packages: str) -> str:
    """Return ``torch 2.13.0, s3fs 2026.9.0`` for these ``packages``."""
    return ", ".join(f"{name} {version}" for name, version in versions(*packages).items())
