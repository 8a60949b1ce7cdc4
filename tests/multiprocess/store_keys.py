"""What is in the store that the ranks of a test talk through."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["keys_of", "until", "until_key"]


def keys_of(store: Any) -> list[str]:
    """All of them. Skips the test where torch has no way to ask."""
    if not hasattr(store, "list_keys"):
        pytest.skip("this torch cannot list the keys of a store")
    return list(store.list_keys())


def until_key(store: Any, part: str) -> None:
    """Return when a key with this part in it is there."""
    until(lambda: any(part in key for key in keys_of(store)), f"a key with {part}")


def until(is_there: Callable[[], bool], what: str) -> None:
    """Return when it is there."""
    deadline = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < deadline, f"there is not {what}"
        time.sleep(0.01)
