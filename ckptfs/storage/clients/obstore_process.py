"""obstore's deadlines and retries in its own words, and the process that its threads live in."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

from ckptfs.errors import UnsupportedError
from ckptfs.storage.options import Times

__all__ = ["forbid_forked", "is_forked", "retries_of", "stretched", "timeouts"]

_SLOW_BYTES: Final = 8 << 20  # as much as moves in request_s on the slowest line that is waited for


def stretched(size_bytes: int) -> int:
    """How many times ``request_s`` so large a body may take: a power of two, so that few stores do."""
    return 1 << (size_bytes // _SLOW_BYTES).bit_length()


def timeouts(times: Times, stretch: int, *, sends: bool) -> dict[str, Any]:
    """obstore's client options. sends: the large body is the request's."""
    quiet_s = times.request_s * (stretch if sends else 1)
    return {
        "connect_timeout": f"{max(1, round(times.connect_s * 1000))}ms",
        # Until an answer begins, counted from the request's begin and not from its last byte; then
        # between two pieces of the answer.
        "read_timeout": f"{max(1, round(quiet_s * 1000))}ms",
        # The request and its whole answer.
        "timeout": f"{max(1, round(times.request_s * 2 * stretch * 1000))}ms",
    }


def retries_of(times: Times, *, retries: bool) -> dict[str, Any]:
    """obstore's retry configuration: none, or its own inside a multipart upload."""
    if not retries:
        return {"max_retries": 0}
    return {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=max(60.0, times.request_s)),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }


class _Runtime:
    """The process in which obstore's threads run: the one that first used it here."""

    pid: int | None = None


def is_forked() -> bool:
    """Whether this process is a child of one that used obstore."""
    return _Runtime.pid not in {None, os.getpid()}


def forbid_forked() -> None:
    """UnsupportedError in a child of a process that used obstore: a call there would never return."""
    # obstore keeps its threads in a global of its own; this is our copy of that fact.
    if _Runtime.pid is None:
        _Runtime.pid = os.getpid()
    if _Runtime.pid != os.getpid():
        raise UnsupportedError(
            "obstore was used before this process was forked, and does not survive that",
            hint="spawn processes instead of forking them, or choose the fsspec library by client=",
        )
