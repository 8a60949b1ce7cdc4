"""The crc32c that GCS verifies and tells, as it writes it: base64 of the big-endian number."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import numpy as np

from ckptfs.storage.clients.base import Buffer

__all__ = ["crc32c_of", "crc32c_told"]


def crc32c_of(data: Buffer) -> str:
    """The checksum of any buffer, without a copy of it (numpy lends it to google_crc32c)."""
    import google_crc32c

    value = google_crc32c.value(np.frombuffer(data, np.uint8) if len(data) else b"")
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def crc32c_told(headers: Mapping[str, str]) -> str | None:
    """The checksum of a whole object, where an answer tells it (x-goog-hash: crc32c=...,md5=...)."""
    pairs = headers.get("X-Goog-Hash", "").split(",")
    found = dict(pair.strip().split("=", 1) for pair in pairs if "=" in pair)
    return found.get("crc32c")
