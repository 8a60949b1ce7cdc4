"""What a heartbeat is made of: lives of processes, silences, and how often to look. No threads.

Life      one life of a process id: gone when the pid is free, a zombie, or somebody else's
Pulses    how long each rank has been silent; pure, the clock is the caller's
Patience  how long one and the same thing has gone on; likewise
Tempo     how often to beat, look and warn
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LEFT", "Life", "Patience", "Pulses", "Tempo", "is_gone"]

LEFT = "left"  # the last beat of a rank that closed its control


@dataclass(frozen=True, slots=True)
class Tempo:
    """How often, in seconds: beats, looks at the node's processes, and when silence is logged."""

    beat_s: float = 2.0
    look_s: float = 0.5
    warn_s: float = 10.0  # a long pickle holds the GIL that long, and is no fault

    @staticmethod
    def within(timeout_s: float) -> Tempo:
        """The usual tempo, faster where timeout_s is too short for it."""
        return Tempo(min(2.0, timeout_s / 5), min(0.5, timeout_s / 10), min(10.0, timeout_s / 2))


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a process id, as /proc shows it; start_ticks tells a reused pid."""

    pid: int
    start_ticks: int

    @staticmethod
    def of_this_process() -> Life | None:
        """This process's life, in the pid namespace of the /proc that its node sees; or None."""
        try:
            # Not os.getpid(): inside a pid namespace /proc may show the outer numbers.
            pid = int(os.readlink("/proc/self"))
            return Life(pid, _start_ticks(Path(f"/proc/{pid}/stat").read_text()))
        except (OSError, ValueError, IndexError):
            return None  # no /proc to look at: silence is what ends a call then


def is_gone(life: Life) -> bool:
    """True when that process has ended: no such pid, a zombie, or a later process of that pid."""
    try:
        stat = Path(f"/proc/{life.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # hidden from us is not gone
    state = stat.rpartition(")")[2].split()[0]
    return state in "ZX" or _start_ticks(stat) != life.start_ticks


def _start_ticks(stat: str) -> int:
    # The name in parentheses may hold anything, so count from its end: field 22 is the start.
    return int(stat.rpartition(")")[2].split()[19])


class Pulses:
    """How long each rank has been silent. Pure: numbers in, seconds out; the clock is the caller's.

    A rank whose beat is LEFT has said goodbye and is never silent.

    longest_tick_s: no tick counts for more, so that a frozen observer does not accuse the others.
    """

    def __init__(self, ranks: Sequence[int], longest_tick_s: float) -> None:
        self._longest_tick_s = longest_tick_s
        self._beats: dict[int, str] = {}
        self._silent_s = dict.fromkeys(ranks, 0.0)

    def tick(self, elapsed_s: float, beats: Mapping[int, str]) -> None:
        """So much time has passed, and these are the beats now."""
        counted_s = min(elapsed_s, self._longest_tick_s)
        for rank in self._silent_s:
            beat = beats.get(rank, "")
            moved = beat == LEFT or beat != self._beats.get(rank, "")
            self._silent_s[rank] = 0.0 if moved else self._silent_s[rank] + counted_s
            self._beats[rank] = beat

    def silent(self, at_least_s: float) -> dict[int, float]:
        """Ranks silent for that long or longer, with their silence in seconds."""
        return {rank: s for rank, s in self._silent_s.items() if s >= at_least_s}


class Patience:
    """How long one and the same thing has gone on. Pure: the clock is the caller's.

    longest_tick_s: no tick counts for more: who was frozen has not waited.
    """

    def __init__(self, longest_tick_s: float) -> None:
        self._longest_tick_s = longest_tick_s
        self._thing: object = None
        self._waited_s = 0.0

    def tick(self, elapsed_s: float, thing: object) -> float:
        """So much time has passed, and this goes on now (None: nothing does); for how long, in seconds."""
        same = thing is not None and thing == self._thing
        self._waited_s = self._waited_s + min(elapsed_s, self._longest_tick_s) if same else 0.0
        self._thing = thing
        return self._waited_s
