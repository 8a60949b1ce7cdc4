"""Plays a life on a disk, cuts its power again and again, and reports what was found each time.

One operation after the other, in turn; the cut comes before one of the disk's writes or flushes that
belong to it, or when it was just acknowledged. The life continues as if nothing had been, so that the
next cut finds a longer history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cuts.finding import faults_after
from tests.cuts.promises import under_way
from tests.cuts.victim import Syncs
from tests.lab.powercut import Cut, Lose, PowerCut
from tests.lab.witness import Witness

OPERATIONS = ("prepare", "save", "overwrite", "retention", "background", "pointer", "copy")
_FIRST_GUESS = 40  # writes and flushes of an operation that was not seen yet
_LOSSES = (Lose.EVERYTHING, Lose.EVERYTHING, Lose.SOMETHING, Lose.SOMETHING, Lose.NOTHING)


@dataclass
class Tally:
    """during: cuts by the operation that was under way, "idle" if none. lost: by number of the cut,
    what was not found as it was promised. promises: acknowledgements that were held against it.
    """

    during: Counter[str] = field(default_factory=Counter)
    faults: dict[int, list[str]] = field(default_factory=dict)
    dropped: int = 0  # writes that were not flushed and did not survive
    promises: int = 0

    @property
    def cuts(self) -> int:
        """How many there were."""
        return sum(self.during.values())


@contextmanager
def life_on(disk: PowerCut, victim: Witness, syncs: Syncs, seed: int) -> Iterator[None]:
    """A new life of the victim on that disk, over with the block."""
    victim.forget()
    victim.tell(f"live {_home(disk, seed)} {syncs} {seed}")
    victim.wait_for("lives")
    try:
        yield
    finally:
        victim.tell("end")
        victim.wait_for("dead")


def _home(disk: PowerCut, seed: int) -> Path:
    """Where a life has its runs; ckptfs makes it."""
    return disk.directory / f"life-{seed}"


def play(
    disk: PowerCut,
    victim: Witness,
    *,
    cuts: int,
    seed: int,
    operations: Sequence[str] = OPERATIONS,
    syncs: Syncs = Syncs.ALL,
    promised_only: bool = False,
    until_fault: bool = False,
) -> Tally:
    """Cut so often, in one life. promised_only: just after acknowledgements, never before them;
    until_fault: or until something is not as it was promised.
    """
    chance, tally, sizes = random.Random(seed), Tally(), dict.fromkeys(operations, _FIRST_GUESS)
    with life_on(disk, victim, syncs, seed):
        for number in range(cuts):
            operation = operations[number % len(operations)]
            before = disk.operations()
            size = None if promised_only or chance.random() < 0.25 else sizes[operation]
            cut = _cut_in(disk, victim, operation, size, chance)
            sizes[operation] = max(1, disk.operations() - before)
            said = victim.said(cut.at_ns)
            tally.during[under_way(said) or "idle"] += 1
            tally.dropped += cut.lost
            tally.promises += sum(line.startswith("done") for line in said)
            with disk.after(cut) as found:
                if faults := faults_after(found / _home(disk, seed).name, said):
                    tally.faults[number] = [f"{operation}: {one}" for one in faults]
            if until_fault and tally.faults:
                break
    return tally


def _cut_in(
    disk: PowerCut, victim: Witness, operation: str, size: int | None, chance: random.Random
) -> Cut:
    lose, seed = chance.choice(_LOSSES), chance.randrange(1 << 32)
    if size is None:
        victim.tell(operation)
        victim.wait_for(f"done {operation}")
        cut = disk.cut(lose=lose, seed=seed)
        victim.wait_for(f"idle {operation}")
        return cut
    after = chance.randint(1, size)
    armed = disk.arm(after=after, lose=lose, seed=seed)
    victim.tell(operation)
    victim.wait_for(f"idle {operation}")
    return armed.now()  # where it had fewer operations than the one before it
