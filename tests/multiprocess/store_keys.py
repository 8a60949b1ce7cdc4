"""What is in the store that the ranks of a test talk through."""

from __future__ import annotations

import time
from typing import Any

import pytest

__all__ = ["keys_of", "until_key"]


def keys_of(store: Any) -> list[str]:
    """All of them. Skips the test where torch has no way to ask."""
    if not hasattr(store, "list_keys"):
        pytest.skip("this torch cannot list the keys of a store")
    return list(store.list_keys())


def until_key(store: Any, part: str) -> None:
    """Return when a key with this part in it is there."""
    deadline = time.monotonic() + 20
    while not any(part in key for key in keys_of(store)):
        assert time.monotonic() < deadline, f"no key with {part}"
        time.sleep(0.01)
