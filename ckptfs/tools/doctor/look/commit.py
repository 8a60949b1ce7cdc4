"""What commits rest on: one of many wins a name, a file is replaced whole, a directory moves at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfs.errors import AlreadyExistsError, CkptfsError, NotFoundError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.tools.doctor.seen import FEW_LOOKS, Race, Refusal, Replaced
from ckptfs.tools.doctor.settings import Clock, Settings

__all__ = ["Racer", "look_at_links", "look_at_rename", "look_at_replace"]

_THREADS = 4
_SEEN_S = 5.0
_DIGITS, _REPEATS = 9, 500
_FILE = b"%09d" * _REPEATS
_FILES = 8
_MOST = 50_000  # replaces, by whatever clock


class Racer:
    """One rank's threads in the races. Each ``run`` is one round; ranks begin it together."""

    def __init__(self, storage: Storage, rank: int, clock: Clock) -> None:
        self._clock = clock
        self._storage = storage
        self._rank = rank
        self._wins: list[tuple[str, ...]] = []
        self._refusal: Refusal | None = None

    def make(self) -> None:
        """The directory of the races."""
        self._storage.make_dir("race")

    def run(self) -> None:
        """Every thread tries to create this round's name, with bytes that tell whose they are."""
        if self._refusal is not None:
            return
        start, key = threading.Barrier(_THREADS), f"race/{len(self._wins)}"
        wins: list[str] = []

        def try_once(thread: int) -> None:
            mark = f"{self._rank}.{thread}"
            start.wait()
            try:
                self._storage.create(key, mark.encode(), staging=f"{key}.staging.{mark}")
            except AlreadyExistsError:
                return
            except StorageError as error:
                self._refusal = Refusal.of(error)
                return
            wins.append(mark)

        threads = [threading.Thread(target=try_once, args=(n,)) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._wins.append(tuple(sorted(wins)))

    def result(self) -> Race:
        """What was won, and what the names hold now that all are done."""
        if self._refusal is not None:
            return Race(refusal=self._refusal)
        return Race(tuple(self._wins), tuple(self._held(n) for n in range(len(self._wins))))

    def _held(self, number: int) -> str:
        until_s = self._clock.now_s() + _SEEN_S
        while True:
            self._storage.refresh("race")
            try:
                return self._storage.read(f"race/{number}").decode(errors="replace")
            except NotFoundError:
                # How soon others see it is another question than whose bytes they see.
                if self._clock.now_s() > until_s:
                    return ""
            self._clock.wait(0.05)


@dataclass(slots=True)
class _Looks:
    """What a reader saw while a writer was at work."""

    done: threading.Event = field(default_factory=threading.Event)
    looks: int = 0
    missing: int = 0
    torn: int = 0


def _watched(look: Callable[[_Looks], None], act: Callable[[_Looks], int]) -> Replaced:
    """Run ``act`` while ``look`` is repeated on another thread; how often, and what was wrong."""
    seen, failed = _Looks(), []

    def watch() -> None:
        try:
            while not seen.done.is_set():
                look(seen)
                seen.looks += 1
        except CkptfsError as error:
            failed.append(error)
            seen.done.set()

    thread = threading.Thread(target=watch)
    thread.start()
    times, refusal = 0, None
    try:
        times = act(seen)
    except StorageError as error:
        refusal = Refusal.of(error)
    finally:
        seen.done.set()
        thread.join()
    if failed and refusal is None:
        return Replaced(
            times, seen.looks, seen.missing, seen.torn, Refusal.of(failed[0]), by_reader=True
        )
    return Replaced(times, seen.looks, seen.missing, seen.torn, refusal)


def look_at_replace(storage: Storage, rank: int, settings: Settings) -> Replaced:
    """Replace one file for a while, while a thread reads it: a gap of microseconds is met now and then."""
    key, clock = f"replace/rank-{rank}", settings.clock

    def look(seen: _Looks) -> None:
        try:
            data = storage.read(key)
        except NotFoundError:
            seen.missing += 1
            return
        if data != data[:_DIGITS] * _REPEATS:
            seen.torn += 1

    def act(reader: _Looks) -> int:
        begun_s, times = clock.now_s(), 1
        while True:
            taken_s = clock.now_s() - begun_s
            long_enough = taken_s >= settings.replace_s and reader.looks >= FEW_LOOKS
            ended = reader.done.is_set() or taken_s >= settings.patience_s or times >= _MOST
            if times >= settings.replaces and (long_enough or ended):
                return times
            storage.replace(key, _FILE % ((times,) * _REPEATS))
            times += 1

    try:
        storage.make_dir("replace")
        storage.replace(key, _FILE % ((0,) * _REPEATS))
    except StorageError as error:
        return Replaced(0, 0, 0, 0, Refusal.of(error))
    return _watched(look, act)


def look_at_rename(storage: Storage, rank: int) -> Replaced:
    """Rename a directory with files in it while a thread looks: some of its files are torn."""
    before, after = f"rename/before-{rank}", f"rename/after-{rank}"

    def look(seen: _Looks) -> None:
        try:
            names = storage.list(after)
        except NotFoundError:
            return
        if len(names) != _FILES:
            seen.torn += 1

    def act(_: _Looks) -> int:
        storage.rename(before, after)
        try:
            storage.stat(before)
        except NotFoundError:
            return 1
        raise StorageError("both names stand after a rename", uri=storage.uri(before))

    try:
        storage.make_dir(before)
        for number in range(_FILES):
            storage.replace(f"{before}/{number}", b"x")
    except StorageError as error:
        return Replaced(0, 0, 0, 0, Refusal.of(error))
    return _watched(look, act)


def look_at_links(storage: Storage, rank: int) -> Refusal | None:
    """Give a file a second name, and read it by that."""
    first, second = f"links/{rank}.first", f"links/{rank}.second"
    try:
        storage.make_dir("links")
        storage.replace(first, b"linked")
        storage.link(first, second)
        if storage.read(second) != b"linked":
            raise StorageError("the second name holds other bytes", uri=storage.uri(second))
    except StorageError as error:
        return Refusal.of(error)
    return None
