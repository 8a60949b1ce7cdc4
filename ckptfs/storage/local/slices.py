"""Buffers that one call fills or empties one after the other: what is left of them, and their beginning.

behind(views, count)   without their first count bytes      after a call that did so many
first(views, count)    those alone
scatter(data, views)   data copied into them                behind what that filled
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["behind", "first", "scatter"]

_COPIED_HERE_BYTES = 256 << 10  # giving up the interpreter's lock takes longer than such a copy


def behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]] if count else list(views[index:])
        count -= len(view)
    return []


def first(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Their first ``count`` bytes."""
    found = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= len(view)
    return found


def scatter(data: memoryview, views: Sequence[memoryview]) -> list[memoryview]:
    """Copy ``data`` into them, one after the other; what is left of them."""
    at = 0
    for view in views:
        if at == len(data):
            break
        size = min(len(view), len(data) - at)
        if size <= _COPIED_HERE_BYTES:
            view[:size] = data[at : at + size]
        else:
            _copy(view[:size], data[at : at + size])
        at += size
    return behind(views, at)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the interpreter's lock, so that threads copy side by side."""
    byte = ctypes.c_char
    ctypes.memmove(
        ctypes.addressof(byte.from_buffer(target)),
        ctypes.addressof(byte.from_buffer(source)),
        len(source),
    )
