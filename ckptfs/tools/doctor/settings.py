"""What the caller asks of a visit, and the clock that it goes by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Clock", "Expect", "Settings"]


class Expect(Enum):
    """What the caller says of the place: all ranks see the same bytes, or each node its own."""

    SHARED = "shared"
    NODE = "node"


class Clock:
    """Time as the doctor reads it. Tests put another one here."""

    def wall_s(self) -> float:
        """Seconds since the epoch, as this machine believes."""
        return time.time()

    def now_s(self) -> float:
        """Seconds that only go forward."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Settings:
    """size_bytes: of the file that each rank writes to measure bandwidth; 0 measures none.

    needs_bytes: what the job will store; None: nobody said. expect: None: any. patience_s: how long a
    write of another rank is waited for. rounds: races for one name; replaces: of one file, while others
    read it.
    """

    size_bytes: int = 64 << 20
    needs_bytes: int | None = None
    expect: Expect | None = None
    patience_s: float = 20.0
    rounds: int = 5
    replaces: int = 20
    clock: Clock = field(default_factory=Clock)
