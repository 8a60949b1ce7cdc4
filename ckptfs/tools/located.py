"""One checkpoint, found by one process: what inspect, verify and export begin with. No torch.

    with located(uri, options) as here:     here.storage  here.name  here.found  here.whole
    with file_at(uri, options) as file:     one file by its URI, or None: it is a directory

Read-only, local, needs read permission alone: a reader that talks to no other rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.catalog import Found, live_of
from ckptfs.commit.entries import Seal
from ckptfs.commit.locate import locate_directory, reading_seat
from ckptfs.commit.looking import looking_at
from ckptfs.commit.misplaced import is_run, run_error
from ckptfs.commit.opening import Place
from ckptfs.commit.ops import drive
from ckptfs.errors import NotFoundError, StateError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.topology.control import SoloControl
from ckptfs.topology.world import World
from ckptfs.uri import Uri, options_of

__all__ = ["File", "Located", "file_at", "located", "options_for", "whole_of_parts"]


@dataclass(frozen=True, slots=True)
class Located:
    """A committed checkpoint. storage: of its run, open until the block is left. name: in the run;
    of a part ``step_100/actor``. domain: the id of the domain that is seen from here, "" for none.
    """

    uri: Uri
    storage: Storage
    name: str
    found: Found
    domain: str


@dataclass(frozen=True, slots=True)
class File:
    """One file. storage: of the directory that it lies in."""

    uri: Uri
    storage: Storage
    size_bytes: int


@contextlib.contextmanager
def located(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[Located]:
    """The checkpoint, or the part of one, or the directory of files at ``uri``.

    NotFoundError, IncompleteCheckpointError, IntegrityError, ManifestError as ``ckptfs.load`` raises
    them. StateError: it consists of parts (see ``whole_of_parts``).
    """
    target = Uri.parse(uri)
    place = Place({**options_of(uri), **(storage_options or {})})
    with reading_seat(target, SoloControl(World.solo()), place) as (seat, name):
        try:
            found = locate_directory(seat, name)
        except StateError:
            if drive(is_run(name), seat.storage):
                shown = target.local_path if target.is_local else str(target)
                raise run_error(
                    target,
                    f"ckptfs ls {shown} lists its checkpoints, ckptfs latest {shown} names the newest",
                ) from None
            raise
        yield Located(target, seat.storage, name, found, seat.placement.mine.id)


def whole_of_parts(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Seal | None:
    """The seal of a checkpoint that several groups of processes wrote; None where it is none.

    IncompleteCheckpointError: whether it was committed is in doubt.
    """
    target = Uri.parse(uri)
    with looking_at(target.parent, {**options_of(uri), **(storage_options or {})}) as look:
        seal = live_of(target.name, look.views, target)
    return seal if seal is not None and seal.parts else None


@contextlib.contextmanager
def file_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[File | None]:
    """The file of that name, None where there is none: a directory, or nothing. Errors are the
    storage's.
    """
    target = Uri.parse(uri)
    storage = open_storage(target.parent, {**options_of(uri), **(storage_options or {})})
    try:
        try:
            stat = storage.stat(target.name)
        except (NotFoundError, NotADirectoryError):
            yield None
        except StorageError:
            # Above a bucket's root nothing may be permitted: whoever looks next says what is wrong.
            yield None
        else:
            yield None if stat.is_dir else File(target, storage, stat.size_bytes)
    finally:
        storage.close()


def options_for(
    other: Any, uri: Any, storage_options: Mapping[str, Any] | None, own: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """The options of a second URI: its own, where it was given some; else those of the first, where
    both are of one kind of storage. Pure.
    """
    if own:
        return own
    alike = Uri.parse(other).protocol == Uri.parse(uri).protocol
    return (storage_options or {}) if alike else {}
