"""What a bucket with versions keeps of objects that nobody sees any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Versions", "summed"]


@dataclass(frozen=True, slots=True)
class Versions:
    """What noncurrent versions below a prefix keep: objects and bytes, and delete markers."""

    count: int
    size_bytes: int
    markers: int


def summed(pages: Iterable[Mapping[str, Any]]) -> Versions | None:
    """The sum over pages of ListObjectVersions; None: the bucket keeps no versions."""
    count = size_bytes = markers = 0
    versioned = False
    for page in pages:
        for item in page.get("Versions", ()):
            # An object from before versioning, and every object of a bucket without, is "null".
            versioned |= item.get("VersionId", "null") != "null"
            if not item.get("IsLatest", True):
                count += 1
                size_bytes += int(item.get("Size", 0))
        markers += len(page.get("DeleteMarkers", ()))
    return Versions(count, size_bytes, markers) if versioned or markers or count else None
