"""Calls on several machines of the lab at the same time, from threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["at_once"]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned, in order; raises the first that raised, when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
