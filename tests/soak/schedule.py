"""What happens to a run that is tortured: jobs, faults and deaths, all from one seed. Pure.

    schedule(seed, ranks=4)  ->  Life(saves=7, ending=Ending.KILL_ONE, faults=(...)), ...

Each life is one job: its ranks start, restore, save so many times, and end well, or by SIGKILL to one
or to all of them at some storage operation. On its way single operations meet ENOSPC or EIO.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["Ending", "Life", "brief", "schedule"]

# Where a rank is killed: what fits every kind of operation, and what is short and would be missed.
_DEATHS = (
    "*:*",
    "*:*",
    "write:*.distcp",
    "close:*.distcp",
    "create:*/log/*",
    "rename:*",
    "replace:*",
)
_MOMENTS = ("kill", "kill-half", "kill-after")
_FAULTS = (
    "open_write:*.distcp",
    "write:*.distcp",
    "close:*.distcp",
    "write:*",
    "make_dir:*",
    "create:*",
    "sync:*",
    "rename:*",
    "remove*:*",
)


class Ending(Enum):
    """How a job ends."""

    WELL = "well"
    KILL_ONE = "one rank is killed"
    KILL_ALL = "every rank is killed"


@dataclass(frozen=True)
class Life:
    """One job. faults: texts of CKPTFS_TEST_FAULT, each for one rank; the last is the victim's death."""

    saves: int
    ending: Ending = Ending.WELL
    victim: int = 0
    faults: tuple[str, ...] = ()


def schedule(seed: int, *, ranks: int) -> Iterator[Life]:
    """Lives without end; each saves 3 to 20 times, if no rank dies early."""
    chance = random.Random(seed)
    while True:
        count = chance.randint(3, 20)
        ending = chance.choice(list(Ending))
        victim = chance.randrange(ranks)
        faults = [
            _fault(chance, ranks, count) for _ in range(chance.randint(0, max(1, count // 4)))
        ]
        if ending is not Ending.WELL:
            faults.append(_death(chance, victim, count))
        yield Life(count, ending, victim, tuple(faults))


def brief(ranks: int) -> list[Life]:
    """The short one: a full disk, the death of one rank while it writes, of all while they seal."""
    last = ranks - 1
    return [
        Life(
            3,
            Ending.KILL_ONE,
            last,
            (
                f"fail=ENOSPC:open_write:*__{ranks // 2}_0.distcp:2@{ranks // 2}",
                f"kill-after:open_write:*__{last}_0.distcp:3@{last}",
            ),
        ),
        # The entries of its log: fence, seal, seal.
        Life(2, Ending.KILL_ALL, 0, ("kill:create:*/log/*:3@0",)),
    ]


def _fault(chance: random.Random, ranks: int, saves: int) -> str:
    what = chance.choice(("ENOSPC", "EIO"))
    when = chance.choice(("fail", "fail-half"))
    nth = chance.randint(1, 4 * saves)
    return f"{when}={what}:{chance.choice(_FAULTS)}:{nth}@{chance.randrange(ranks)}"


def _death(chance: random.Random, victim: int, saves: int) -> str:
    where = chance.choice(_DEATHS)
    often = 60 if where == "*:*" and victim == 0 else 12 if where == "*:*" else 2
    nth = chance.randint(1, often * saves)
    return f"{chance.choice(_MOMENTS)}:{where}:{nth}@{victim}"
