"""The run log as one client uses it: append, race, fold, poll. Imported on the clients by name.

Everything goes through the library's own programs and storage; a writer touches the log a little later, as
every writer of the library does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckptfs.commit.log.append import (
    Appended,
    RefusedAppend,
    append,
    catch_up,
    make_log,
    write_snapshot,
)
from ckptfs.commit.log.entries import Body, Fence, FenceMode, Generation, Pin, decode_entry
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import Program, drive
from ckptfs.commit.paths import LOG, AttemptKeys
from ckptfs.commit.save.projection import discard_source
from ckptfs.commit.session import TOUCH_AFTER_S
from ckptfs.storage.base import Shape
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.uri import Uri

__all__ = [
    "Race",
    "add",
    "add_through_a_lying_client",
    "discard",
    "entries_behind",
    "fold",
    "look_again",
    "make",
    "pairs",
    "race",
    "see_pairs",
    "touch",
    "watch",
]

_seen: dict[str, LogState] = {}  # what this client folded of a run, to continue from


@dataclass(frozen=True)
class Race:
    """What one racer came to. mine: number -> write id of every append that was acknowledged."""

    mine: dict[int, str]
    met: int


class LyingLinks(Posix):
    """A client that gets "exists" for a LINK that succeeded, as after a server's restart."""

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        super().link(source, target)


def storage(run: str, posix: Posix | None = None) -> LocalStorage:
    """A new one."""
    return LocalStorage(Uri.parse(run), posix=posix)


def make(run: str) -> None:
    """The log's directories."""
    drive(make_log(), storage(run))


def _append(
    store: LocalStorage, write_id: str, decide: Callable[[LogState], Body], state: LogState | None
) -> Appended:
    program: Program[Appended | RefusedAppend[str]] = append(decide, write_id=write_id, state=state)
    done = drive(program, store)
    assert isinstance(done, Appended)
    return done


def add(run: str, write_id: str) -> int:
    """One append, that knows nothing of what this client saw before; its number."""
    return _add(storage(run), write_id)


def add_through_a_lying_client(run: str, write_id: str) -> int:
    """As ``add``."""
    return _add(storage(run, LyingLinks()), write_id)


def _add(store: LocalStorage, write_id: str) -> int:
    return _append(store, write_id, partial(_pin, write_id), None).number


def touch(run: str) -> None:
    """What a writer does TOUCH_AFTER_S after its append."""
    storage(run).touch(LOG)


def fold(run: str) -> int:
    """How many entries a cold fold sees."""
    return drive(catch_up(), storage(run)).next


def look_again(run: str) -> int:
    """How many entries a reader sees that continues from what it saw."""
    _seen[run] = drive(catch_up(_seen.get(run)), storage(run))
    return _seen[run].next


def race(run: str, who: str, appends: int, *, lying: bool = False) -> Race:
    """Append fences and pins as fast as it goes, with a snapshot when one is due."""
    store = storage(run, LyingLinks() if lying else None)
    state = _met(store, who)
    mine = {state.next - 1: f"{who}-here"}
    met = 0
    for turn in range(appends):
        write_id = f"{who}-{turn}"

        def decide(seen: LogState, write_id: str = write_id, turn: int = turn) -> Body:
            if turn % 5:
                return Pin(write_id)
            return Fence(Generation(seen.generation.number + 1, write_id), FenceMode.RESUME)

        before = state.next
        done = _append(store, write_id, decide, state)
        mine[done.number] = write_id
        met += done.number > before
        state = drive(write_snapshot(done.state, write_id=f"{write_id}-s"), store)
        if turn % 7 == 0:
            store.touch(LOG)
    store.touch(LOG)
    return Race(mine, met)


def _met(store: LocalStorage, who: str) -> LogState:
    """Say that this racer is there, and wait for the other; the fold up to the later one's word."""
    done = _append(store, f"{who}-here", partial(_pin, f"{who}-here"), None)
    state, until = done.state, time.monotonic() + 60.0
    while state.next < 2:
        assert time.monotonic() < until, "the other racer did not come"
        time.sleep(0.02)
        store.touch(LOG)
        state = drive(catch_up(state), store)
    return done.state


def watch(run: str, until: int, timeout_s: float) -> int:
    """Fold all the time, cold and warm, until so many entries are seen; how many folds.

    What is seen only grows, and both see the same owner of the run where they see the same prefix.
    """
    store, deadline, folds = storage(run), time.monotonic() + timeout_s, 0
    warm: LogState | None = None
    while warm is None or warm.next < until:
        assert time.monotonic() < deadline, f"{0 if warm is None else warm.next} entries seen"
        before = 0 if warm is None else warm.next
        warm = drive(catch_up(warm), store)
        assert warm.next >= before
        cold = drive(catch_up(), store)
        assert cold.next >= warm.next
        if cold.next == warm.next:
            assert cold.generation == warm.generation
        folds += 1
    return folds


def pairs(run: str, rounds: int) -> dict[int, float]:
    """Two entries at once, again and again, each pair touched as writers do: number -> when it was there."""
    store, when = storage(run), {}
    state: LogState | None = None
    for turn in range(rounds):
        for half in "ab":
            write_id = f"pair-{turn}{half}"
            done = _append(store, write_id, partial(_pin, write_id), state)
            state, when[done.number] = done.state, time.time()
        time.sleep(TOUCH_AFTER_S)
        store.touch(LOG)
    return when


def see_pairs(run: str, until: int, timeout_s: float) -> dict[int, float]:
    """Poll the log tightly until so many entries are seen: number -> when."""
    store, when, state = storage(run), {}, LogState()
    deadline = time.monotonic() + timeout_s
    while state.next < until and time.monotonic() < deadline:
        before = state.next
        state = drive(catch_up(state), store)
        when.update(dict.fromkeys(range(before, state.next), time.time()))
    return when


def _pin(write_id: str, seen: LogState) -> Body:
    del seen
    return Pin(write_id)


def entries_behind(directory: str) -> dict[str, str]:
    """On the server's own disk: entry name -> write id; an entry that cannot be decoded raises."""
    found = {}
    for name in sorted(os.listdir(directory)):
        with open(f"{directory}/{name}", "rb") as file:
            found[name] = decode_entry(file.read(), name).write_id
    return found


def discard(run: str, name: str, save_id: str) -> None:
    """What the library does to an attempt that is not needed."""
    drive(discard_source(AttemptKeys(Shape.FILESYSTEM, name, save_id)), storage(run))
