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

from ckptfs.commit.catalog.catalog import Found, is_run, live_of, looking_at, run_error
from ckptfs.commit.catalog.locate import locate_directory, reading_seat
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.operations import drive
from ckptfs.commit.session import Place
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.errors import NotFoundError, StateError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, options_of

__all__ = ["File", "Located", "file_at", "located", "options_for", "whole_of_parts"]


@dataclass(frozen=True, slots=True)
class Located:
    """A committed checkpoint.

    Attributes:
        uri: Where it is.
        storage: Of its run, open until the block is left.
        name: Its name in the run; of a part ``step_100/actor``.
        found: Where its files are.
        domain: The id of the domain that is seen from here, "" for none.
    """

    uri: Uri
    storage: Storage
    name: str
    found: Found
    domain: str


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Attributes:
        uri: Where it is.
        storage: Of its directory.
        size_bytes: Its bytes.
    """

    uri: Uri
    storage: Storage
    size_bytes: int


@contextlib.contextmanager
def located(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[Located]:
    """The checkpoint, or the part of one, or the directory of files at ``uri``. Local, read-only.

    Args:
        uri: Where.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Raises:
        NotFoundError: There is no such checkpoint.
        IncompleteCheckpointError: Not all of it is there.
        IntegrityError: The description differs from what was written.
        ManifestError: The description is damaged or too new.
        StateError: It consists of parts (see ``whole_of_parts``), or is a run.
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
    """The seal of a checkpoint that several groups of processes wrote. Local, read-only.

    Args:
        uri: The checkpoint.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Returns:
        The seal; None where it is no such checkpoint.

    Raises:
        IncompleteCheckpointError: Whether it was committed is in doubt.
    """
    target = Uri.parse(uri)
    with looking_at(target.parent, {**options_of(uri), **(storage_options or {})}) as look:
        seal = live_of(target.name, look.views, target)
    return seal if seal is not None and seal.parts else None


@contextlib.contextmanager
def file_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[File | None]:
    """The file of that name, until the block is left. Local, read-only.

    Args:
        uri: The file.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Yields:
        The file; None where there is none: a directory, or nothing.

    Raises:
        StorageError: The storage failed.
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
    """The options of a second URI. Pure.

    Args:
        other: The second URI.
        uri: The first URI.
        storage_options: The options of the first; None: no options.
        own: The options of the second; None: those of the first, where both are of one kind of storage.
    """
    if own:
        return own
    alike = Uri.parse(other).protocol == Uri.parse(uri).protocol
    return (storage_options or {}) if alike else {}
