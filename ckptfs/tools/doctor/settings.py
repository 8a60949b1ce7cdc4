"""What the caller asks of a visit, and the clock that it goes by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Clock", "Expect", "Settings"]


class Expect(Enum):
    """What the caller says of the storage.

    Attributes:
        SHARED: All ranks see the same bytes.
        NODE: Each node sees its own.
    """

    SHARED = "shared"
    NODE = "node"


class Clock:
    """Time as the doctor reads it. Tests put another one here."""

    def wall_s(self) -> float:
        """Return seconds since the epoch, as this machine believes."""
        return time.time()

    def now_s(self) -> float:
        """Return seconds that only increase."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let so many ``seconds`` pass."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the doctor measures.

    Attributes:
        size_bytes: Bytes of the file that each rank writes to measure bandwidth; 0 measures none.
        needs_bytes: Bytes that the job will store; None: not known.
        expect: What the caller says of the storage; None: nothing.
        patience_s: How many seconds a write of another rank is waited for.
        rounds: Races for one name.
        replaces: How often at least one file is replaced while others read it.
        replace_s: How many seconds at least that lasts.
        clock: What measures time.
    """

    size_bytes: int = 64 << 20
    needs_bytes: int | None = None
    expect: Expect | None = None
    patience_s: float = 20.0
    rounds: int = 5
    replaces: int = 20
    replace_s: float = 1.0
    clock: Clock = field(default_factory=Clock)
