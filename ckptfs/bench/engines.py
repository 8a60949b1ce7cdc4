"""What an engine is, seen from one rank: it saves a state to an attempt and loads it again.

    ready(Chosen, Setting) -> Driver        .about()  .save(state, at)  .load(target, at, cached)

Who there is stands in ``choosing``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module

from ckptfs.bench.choosing import Chosen, kind_of
from ckptfs.bench.clock import Group
from ckptfs.bench.machine import versions
from ckptfs.bench.places import Home
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State
from ckptfs.uri import Uri

__all__ = [
    "Attempt",
    "Cached",
    "Driver",
    "Setting",
    "ready",
    "version_text",
]


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
