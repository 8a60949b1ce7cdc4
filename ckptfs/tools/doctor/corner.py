"""The doctor's corner: one directory (or prefix) of its own below the run, and what dead doctors left.

    run/.ckptfs-doctor-20261122T101130-0123456789ab/
        about.txt                      says whose it is; only what holds it is ever removed as a leftover

The run itself is read by one listing and never written. Directories that had to be made for the
corner, the run's own included, go again if nobody put anything into them meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ckptfs.errors import AccessError, CkptfsError, NotFoundError, StorageError, UnsupportedError
from ckptfs.storage.base import SMALL_BYTES, Shape, Storage
from ckptfs.uri import Uri

__all__ = ["ABOUT", "PREFIX", "Corner", "Opener", "begun_s", "new_id"]

log = logging.getLogger("ckptfs.tools")

PREFIX = ".ckptfs-doctor-"
OLD_S = 86400.0
_NOTE = "about.txt"
ABOUT = b"`ckptfs doctor` tests this storage here. Older than a day: it was killed, remove all of this.\n"
_NAME = re.compile(r"\.ckptfs-doctor-(\d{8}T\d{6})-[0-9a-f]{12}")

Opener = Callable[[Uri, Mapping[str, Any]], Storage]


def new_id(wall_s: float) -> str:
    """A name for one visit, with its time in UTC."""
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"


def begun_s(name: str) -> float | None:
    """When the doctor whose corner has this name began, in seconds since the epoch; None: no corner."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        begun = datetime.strptime(match[1], "%Y%m%dT%H%M%S")  # noqa: DTZ007 - UTC by our own naming
    except ValueError:
        return None
    return begun.replace(tzinfo=UTC).timestamp()


class Corner:
    """One rank's way to the corner. run: rooted at the run; storage: rooted at the corner.

    Several ranks hold the same one; ``clean`` is safe from many at once and after a half-made start.
    """

    def __init__(
        self, uri: Uri, doctor_id: str, options: Mapping[str, Any], opener: Opener
    ) -> None:
        self.name = f"{PREFIX}{doctor_id}"
        self.run = opener(uri, options)
        self.storage = opener(uri / self.name, options)
        self._missing = _missing_above(self.run)
        self._is_made = False

    def make(self) -> None:
        """Make it, with the file that says whose it is. StorageError: it cannot be made."""
        self.storage.make_dir("")
        self._is_made = True
        self.storage.replace(_NOTE, ABOUT)

    def leftovers(self, wall_s: float) -> tuple[str, ...]:
        """Corners of doctors that began more than a day ago and are still there."""
        self.run.refresh("")
        try:
            names = [entry.name for entry in self.run.list("")]
        except NotFoundError:
            return ()
        return tuple(n for n in names if (at := begun_s(n)) is not None and wall_s - at > OLD_S)

    def remove_leftover(self, name: str) -> None:
        """Remove a leftover, if it is what it says. StorageError: it is not, or it stays."""
        if self.run.read_small(f"{name}/{_NOTE}", SMALL_BYTES) != ABOUT:
            raise StorageError("this is no corner of a doctor", uri=self.run.uri(name))
        if self.storage.capabilities.shape is Shape.FILESYSTEM:
            # Into our own corner in one step: what is removed is a name that only we have.
            self.run.rename(name, f"{self.name}/{name}")
            return
        self.run.remove_tree(name)

    def clean(self) -> None:
        """Remove the corner and the directories that were made for it; absent is success.

        StorageError: something stays behind.
        """
        try:
            self.storage.sweep_uploads(0.0)
        except (AccessError, UnsupportedError) as error:
            log.info("uploads of the doctor may stay: %s", error)
        self.run.remove_tree(self.name)
        for path in self._missing:
            try:
                os.rmdir(path)
            except OSError:
                return  # somebody uses it by now, or another rank was faster

    def clean_quietly(self) -> None:
        """The same after an error or Ctrl-C: the way out matters more than what stays."""
        try:
            self.clean()
        except (CkptfsError, OSError) as error:
            level = logging.WARNING if self._is_made else logging.DEBUG
            log.log(level, "left behind: %s (%s)", self.storage.root, error)

    def close(self) -> None:
        """Close both storages."""
        self.storage.close()
        self.run.close()


def _missing_above(run: Storage) -> tuple[str, ...]:
    """The run's directory and those above it that are not there yet, deepest first."""
    path, missing = run.local_path(""), []
    while path is not None and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return tuple(missing)
