"""The storage options of ckptfs itself, for all object stores. The others belong to the client library.

    client              "auto"    obstore if it can do what the options ask for, else the fsspec library;
                                  or one of them by name: "s3fs" "gcsfs" "adlfs" "obstore"
    part_size_bytes     by size   bytes of one part of an upload: 16 MiB, more for huge files
    concurrency         8         requests in flight at once, per opened storage
    memory_bytes        256 MiB   what one upload holds beyond the caller's tensors
    retry_s             60        from the first failure of one request until it is given up
    connect_timeout_s   10        until a connection is established
    request_timeout_s   60        silence on one request

Sizes may be written "16 MiB" or "64MB" and durations "60 s", because a URI's query is text. A value that makes no
sense raises a UriError with the option and the values that it takes. A part size is adjusted to what the store
and the object's size allow (multipart.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.errors import StateError, UriError
from ckptfs.text import parse_size
from ckptfs.uri import Uri

__all__ = ["OURS", "ObjectOptions", "Times", "parse_boolean", "parse_options"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*s?")
_MIN_PART_BYTES = 64 << 10
_MIN_MEMORY_BYTES = 8 << 20  # S3 takes no part below 5 MiB
_MAX_CONCURRENCY = 256


@dataclass(frozen=True, slots=True)
class Times:
    """Time limits of one request."""

    connect_s: float = 10.0  # until a connection is established
    request_s: float = 60.0  # without a byte in either direction


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """The options of the table above."""

    client: str = "auto"
    part_size_bytes: int | None = None  # None: by the object's size
    concurrency: int = 8
    memory_bytes: int = 256 << 20
    retry_s: float = 60.0
    times: Times = Times()


OURS = (
    "client",
    "part_size_bytes",
    "concurrency",
    "memory_bytes",
    "retry_s",
    "connect_timeout_s",
    "request_timeout_s",
)


def parse_options(
    uri: Uri, storage_options: Mapping[str, Any]
) -> tuple[ObjectOptions, dict[str, Any]]:
    """Split storage options into those of ckptfs, parsed, and all others, as they were given.

    Raises:
        UriError: A value makes no sense.
    """
    ours = {name: value for name, value in storage_options.items() if name in OURS}
    others = {name: value for name, value in storage_options.items() if name not in OURS}
    usual = ObjectOptions()
    part = ours.get("part_size_bytes")
    options = ObjectOptions(
        client=_text(uri, "client", ours.get("client", usual.client)),
        part_size_bytes=None
        if part is None
        else _size(uri, "part_size_bytes", part, _MIN_PART_BYTES),
        concurrency=_count(uri, "concurrency", ours.get("concurrency", usual.concurrency)),
        memory_bytes=_size(
            uri, "memory_bytes", ours.get("memory_bytes", usual.memory_bytes), _MIN_MEMORY_BYTES
        ),
        retry_s=_duration(uri, "retry_s", ours.get("retry_s", usual.retry_s), zero=True),
        times=Times(
            _duration(
                uri, "connect_timeout_s", ours.get("connect_timeout_s", usual.times.connect_s)
            ),
            _duration(
                uri, "request_timeout_s", ours.get("request_timeout_s", usual.times.request_s)
            ),
        ),
    )
    if options.part_size_bytes is not None and options.part_size_bytes > options.memory_bytes:
        raise UriError(
            f"part_size_bytes is {options.part_size_bytes}, but an upload may hold only "
            f"memory_bytes={options.memory_bytes}",
            uri=uri,
            hint="set memory_bytes to several parts, or make the part smaller",
        )
    return options, others


def parse_boolean(uri: Uri, name: str, value: object) -> bool:
    """Return a boolean option of a client library. A URI's query is text, and "false" must not mean true.

    Raises:
        UriError: It is neither true nor false.
    """
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    found = known.get(str(value).lower())
    if found is None:
        raise UriError(f"storage option {name} takes true or false", uri=uri)
    return found


def _text(uri: Uri, name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _nonsense(uri, name, value, "a name such as 'auto'")
    return value


def _size(uri: Uri, name: str, value: object, least: int) -> int:
    takes = f"bytes, at least {least}: {16 << 20} or '16 MiB'"
    try:
        return parse_size(value, least=least)  # type: ignore[arg-type]  # it refuses any other
    except StateError as error:
        raise _nonsense(uri, name, value, takes) from error


def _count(uri: Uri, name: str, value: object) -> int:
    found = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= _MAX_CONCURRENCY:
        raise _nonsense(uri, name, value, f"a number from 1 to {_MAX_CONCURRENCY}")
    return found


def _duration(uri: Uri, name: str, value: object, *, zero: bool = False) -> float:
    found: float = math.nan
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        found = float(match[1])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    if not (found > 0 or (zero and found == 0)) or math.isinf(found):
        raise _nonsense(uri, name, value, "seconds: 60 or '60 s'")
    return found


def _nonsense(uri: Uri, name: str, value: object, takes: str) -> UriError:
    return UriError(f"storage option {name}={value!r}: it takes {takes}", uri=uri)
