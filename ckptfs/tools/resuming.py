"""Which segments of which files were verified already: one small JSON file, safe from kill -9.

    {"version": 1, "verified": {"<uri>": {"proof": "...", "segment": 268435456, "done": [0, 1]}}}

A copy lies at another URI and is another file. ``proof`` names the digests that the bytes were held
against, and size, time and etag of the file then: one that was written anew, or whose digests changed,
is verified anew. The state is replaced whole, at most once a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from ckptfs.errors import StateError

__all__ = ["Resumed"]

_VERSION = 1
_EVERY_S = 1.0


class Resumed:
    """What earlier calls did, and this one. Any thread.

    The file is written at once, so that a place that takes no file is found before the work. A file that is
    none of these, or cannot be written, is a StateError: a verification that was meant to be resumable must
    not run without.

    Args:
        path: The file; None remembers nothing.
        every_s: How many seconds pass between two writes of the file.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, every_s: float = _EVERY_S) -> None:
        self._path = None if path is None else Path(path)
        self._every_s = every_s
        self._lock = threading.Lock()
        self._written = -math.inf  # the first segment is written down at once
        self._is_dirty = False
        self._done: dict[str, dict[str, Any]] = {} if self._path is None else _read(self._path)
        if self._path is not None:
            self._write(self._path)
            self._written = -math.inf

    def has(self, name: str, proof: str, segment: int, segment_bytes: int) -> bool:
        """Whether this segment was verified against the same digests.

        Args:
            name: The file's URI.
            proof: Of its digests, and of the file as it is now.
            segment: The number of the segment.
            segment_bytes: The size of segments in bytes.
        """
        known = self._done.get(name)
        return (
            known is not None
            and known["proof"] == proof
            and known["segment"] == segment_bytes
            and segment in known["done"]
        )

    def add(self, name: str, proof: str, segment: int, segment_bytes: int) -> None:
        """Note that this segment is as it was written. The arguments are as for ``Resumed.has``."""
        if self._path is None:
            return
        with self._lock:
            known = self._done.get(name)
            if known is None or (known["proof"], known["segment"]) != (proof, segment_bytes):
                known = self._done[name] = {"proof": proof, "segment": segment_bytes, "done": []}
            known["done"].append(segment)
            self._is_dirty = True
            if time.monotonic() - self._written >= self._every_s:
                self._write(self._path)

    def write(self) -> None:
        """All of it is in the file."""
        with self._lock:
            if self._path is not None and self._is_dirty:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        record = {"version": _VERSION, "verified": self._done}
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        try:
            with partial.open("w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut leaves an empty file under the name
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise StateError(
                f"what was verified cannot be written down: {error}",
                uri=path,
                hint="name a file in a directory that exists and may be written",
            ) from error
        self._written, self._is_dirty = time.monotonic(), False


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        record = json.loads(path.read_text())
        if record["version"] != _VERSION:
            raise ValueError(f"version {record['version']} is not {_VERSION}")
        return {
            str(name): {
                "proof": str(known["proof"]),
                "segment": int(known["segment"]),
                "done": [int(number) for number in known["done"]],
            }
            for name, known in record["verified"].items()
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StateError(
            f"what was verified cannot be read: {error}",
            uri=path,
            hint="name a file of ckptfs verify --resume, or one that does not exist yet",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"not a state file of a verification: {error}",
            uri=path,
            hint="name a file of ckptfs verify --resume, or one that does not exist yet",
        ) from error
