"""A run as one client uses it alone: commit, look, read, delete; through the library's own calls.

Functions that run on the clients of the lab, imported there by name; torch is not imported.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping

import ckptfs
from ckptfs.commit.catalog.catalog import find, live_of, looking_at
from ckptfs.commit.operations import drive
from ckptfs.tools.changing import remove
from ckptfs.uri import Uri

__all__ = [
    "begin_commit",
    "commit",
    "contents",
    "delete",
    "end_commit",
    "fetch",
    "home_of",
    "latest_name",
    "listed_in_manifest",
    "names",
    "overwrite",
    "read_step",
]

_begun = contextlib.ExitStack()


def commit(run: str, name: str, files: Mapping[str, bytes]) -> None:
    """Commit a directory of files."""
    begin_commit(run, name, files)
    end_commit()


def begin_commit(run: str, name: str, files: Mapping[str, bytes]) -> str:
    """Write them, and return before the commit: the path they were written to."""
    path: str = _begun.enter_context(ckptfs.checkpoint_dir(f"{run}/{name}"))
    for file, data in files.items():
        with open(os.path.join(path, file), "xb") as opened:
            opened.write(data)
    return path


def end_commit() -> None:
    """Commit what was begun."""
    _begun.close()


def latest_name(run: str) -> str | None:
    """The name of the newest directory."""
    newest = ckptfs.latest(run, kind="directory")
    return None if newest is None else newest.uri.name


def names(run: str) -> list[str]:
    """What is committed, or is there whole."""
    return [checkpoint.uri.name for checkpoint in ckptfs.list_checkpoints(run)]


def home_of(run: str, name: str) -> str:
    """Where readers find a committed checkpoint's files."""
    with looking_at(run, None) as look:
        seal = live_of(name, look.views, Uri.parse(run))
        assert seal is not None, "no such checkpoint"
        return drive(find(seal, look.storage.capabilities.shape, Uri.parse(run)), look.storage).home


def listed_in_manifest(run: str, name: str) -> list[str]:
    """The files that a checkpoint says it has."""
    with looking_at(run, None) as look:
        seal = live_of(name, look.views, Uri.parse(run))
        assert seal is not None, "no such checkpoint"
        found = drive(find(seal, look.storage.capabilities.shape, Uri.parse(run)), look.storage)
        assert found.manifest is not None
        return [record.path for record in found.manifest.files]


def read_step(run: str, name: str) -> dict[str, bytes]:
    """A checkpoint's plain files, as its readers get them."""
    with ckptfs.checkpoint_dir(f"{run}/{name}", "read") as path:
        found = {}
        for entry in os.scandir(path):
            if entry.is_file() and entry.name != "ckptfs.json":
                with open(entry.path, "rb") as file:
                    found[entry.name] = file.read()
        return found


def fetch(run: str, name: str) -> dict[str, bytes]:
    """As ``read_step``, but copied to this machine's own disk, every file compared with its digest."""
    with (
        tempfile.TemporaryDirectory() as own,
        ckptfs.checkpoint_dir(f"{run}/{name}", "read", into=f"{own}/copy") as path,
    ):
        listed = listed_in_manifest(run, name)
        return {file: contents(os.path.join(path, file)) for file in listed}


def contents(path: str) -> bytes:
    """Of one file."""
    with open(path, "rb") as file:
        return file.read()


def overwrite(path: str, data: bytes) -> None:
    """In place."""
    with open(path, "r+b") as file:
        file.write(data)


def delete(run: str, name: str) -> None:
    """Delete a checkpoint."""
    remove(f"{run}/{name}")
