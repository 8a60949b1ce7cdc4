"""The keys of the files and directories of a run, relative to its root. Pure names, no I/O.

<run>/
  step_100/                      a projection: what people and stock readers see
    .metadata  ckptfs.json
    <save_id>/                   data, attempt.json, immutable .metadata and ckptfs.json
  _data/<save_id>/               object stores: data files that later saves may use too
  .ckptfs/
    domain  hint  lease
    log/00000042                 entries, numbered without gaps
    tmp/<write_id>               entries that are being written
    attempts/<save_id>/          a save in progress (filesystems): becomes step_100/
    trash/<generation>/          files that are being deleted
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptfs.storage.base import CONTROL, SMALL_BYTES, Shape

__all__ = [
    "ATTEMPTS",
    "CONTROL",
    "DOMAIN",
    "ENTRY_BYTES",
    "HINT",
    "LEASE",
    "LOG",
    "LOG_BYTES",
    "LOG_ENTRIES",
    "LOG_SNAPSHOT_BYTES",
    "MANIFEST",
    "METADATA",
    "PARTIAL_PREFIX",
    "PLAIN_ENTRY_BYTES",
    "SHARED",
    "TMP",
    "TRASH",
    "AttemptKeys",
    "is_save_id",
    "limit_of",
    "log_key",
    "number_order",
    "shared_key",
    "staging_key",
    "step_in",
]

DOMAIN = ".ckptfs/domain"
HINT = ".ckptfs/hint"
LEASE = ".ckptfs/lease"
LOG = ".ckptfs/log"
TMP = ".ckptfs/tmp"
ATTEMPTS = ".ckptfs/attempts"
TRASH = ".ckptfs/trash"
MANIFEST = "ckptfs.json"
METADATA = ".metadata"
SHARED = "_data"
PARTIAL_PREFIX = ".partial-"  # how backends with directories name a file on its way

# The largest size of a file of each kind, in bytes. Far more than any run of ours needs, and far
# less than what fills a machine: a snapshot of the log takes 0.3 kB for each save, a manifest 0.5
# kB for each rank, a sidecar 8 bytes for each MiB of data.
ENTRY_BYTES = 256 << 20
PLAIN_ENTRY_BYTES = 16 << 20  # an entry that is no snapshot; a seal takes 0.3 kB for each part
AHEAD_BYTES = 1 << 20  # of those entries that are read many at once; a snapshot may have more
# How much one reader accepts of a log in total, from the snapshot that it starts at. A run of ours
# has some 100 entries there. If the hint is lost, the whole log is read: 0.3 kB and a few entries
# for each save.
LOG_ENTRIES = 2_000_000
LOG_BYTES = 1 << 30  # of entries that are no snapshots: their content is kept in memory
LOG_SNAPSHOT_BYTES = 16 << 30  # snapshots are skipped one by one, which only takes time
MANIFEST_BYTES = 256 << 20
METADATA_BYTES = 2 << 30
SIDECAR_BYTES = 256 << 20
RECORD_BYTES = 1 << 20  # domain, hint, lease, attempt.json
_RECORDS = frozenset({"domain", "hint", "lease", "attempt.json"})

# The time and a random number; "dcp-" and a digest for copies of stock checkpoints; copies of either
# have "~" and a number of their own behind it (``shared_attempt.AGAIN``).
_SAVE_ID = re.compile(r"(\d{8}T\d{6}-[0-9a-f]{12,16}|dcp-[0-9a-f]{16})(~[0-9a-f]{8})*", re.ASCII)


def is_save_id(name: str) -> bool:
    """Whether ckptfs made the directory of this name, for the data of a save or of a copy."""
    return _SAVE_ID.fullmatch(name) is not None


def step_in(name: str) -> int | None:
    """Return the number at the end of a checkpoint's name, or None if there is none.

    It is 100 for ``step_100`` and for ``ckpt-100``.
    """
    found = re.search(r"\d+$", name, re.ASCII)
    return int(found[0]) if found else None


def number_order(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that sorts names as people read them: ``step_9`` before ``step_10``."""
    words = re.split(r"(\d+)", name, flags=re.ASCII)
    return tuple((int(word) if at % 2 else -1, word) for at, word in enumerate(words))


def log_key(number: int) -> str:
    """The key of entry ``number``; eight digits sort as text for the first hundred million."""
    return f"{LOG}/{number:08d}"


def limit_of(key: str) -> int:
    """Return how many bytes a small file under this key may have. Pure.

    It is the limit for ``Storage.read_small``.
    """
    name = key.rpartition("/")[2]
    if key.startswith(f"{LOG}/"):
        return ENTRY_BYTES
    if name.startswith(MANIFEST):
        return MANIFEST_BYTES
    if name.startswith(METADATA):
        return METADATA_BYTES
    if name.endswith(".xxh3"):
        return SIDECAR_BYTES
    return RECORD_BYTES if name in _RECORDS else SMALL_BYTES


def staging_key(write_id: str) -> str:
    """The key of an entry before it is linked under its number."""
    return f"{TMP}/{write_id}"


def shared_key(path: str) -> str:
    """The key of a data file that later saves may use too.

    ``path`` begins with its writer's save_id.
    """
    return f"{SHARED}/{path}"


@dataclass(frozen=True, slots=True)
class AttemptKeys:
    """The keys of one save, before and after its projection.

    On filesystems data is written below ``attempts/`` and moves with one rename; on object stores
    it is written to its final place, because there is no rename.
    """

    shape: Shape
    name: str
    save_id: str

    @property
    def attempt(self) -> str:
        """The directory that exists only while the save is in progress."""
        return f"{ATTEMPTS}/{self.save_id}"

    @property
    def directory(self) -> str:
        """The directory that becomes the step directory. Files with plain names go there."""
        return self.attempt if self.shape is Shape.FILESYSTEM else self.name

    @property
    def data(self) -> str:
        """The directory that ranks write data to."""
        if self.shape is Shape.FILESYSTEM:
            return f"{ATTEMPTS}/{self.save_id}/{self.save_id}"
        return self.projected_data

    @property
    def record(self) -> str:
        """The key of attempt.json, which holds the base generation for recovery."""
        if self.shape is Shape.FILESYSTEM:
            return f"{self.data}/attempt.json"
        return f"{self.attempt}/attempt.json"

    @property
    def projected_data(self) -> str:
        """The directory of the data after the projection."""
        return f"{self.name}/{self.save_id}"

    def homes(self) -> tuple[str, ...]:
        """The directories where the data may be, in the order in which it moves.

        A reader that looked in the opposite order could miss the data in both places while it
        moves.
        """
        if self.shape is Shape.FILESYSTEM:
            return (self.data, self.projected_data)
        return (self.projected_data,)
