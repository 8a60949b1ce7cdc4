"""What has to be found after a cut, from what the victim had said before it. Pure.

    begin save {"place": "run", "name": "step_3", "seed": 9, "keep": null}
    done save {...}                                               -> step_3 is there, as of seed 9

Between the two it may be there or not; replaced, it is the old one or the new one. ``keep``: the names
that retention was asked to leave; from the begin on the others may be gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

GONE = None  # in place of a seed: the name need not be there


@dataclass
class Promised:
    """Of one place: by name, the seeds that may be found; and the names that may be the newest."""

    may_be: dict[str, set[int | None]] = field(default_factory=dict)
    newest: set[str | None] = field(default_factory=lambda: {GONE})
    begun: set[str] = field(default_factory=set)

    def begin(self, name: str, seed: int, keep: list[str] | None) -> None:
        """A write was begun."""
        self.may_be.setdefault(name, {GONE}).add(seed)
        self.begun.add(name)
        self.newest.add(name)
        if keep is not None:
            for other in self.may_be.keys() - set(keep):
                self.may_be[other].add(GONE)

    def done(self, name: str, seed: int) -> None:
        """It was acknowledged; what was begun after it may be there too."""
        self.may_be[name] = {seed}
        self.begun.discard(name)
        self.newest = {name, *self.begun}

    def faults(self, found: dict[str, int | None], newest: str | None) -> list[str]:
        """What of it is not so. found: of every name that is believed there, the seed that explains
        it, None if none does.
        """
        told = [f"{name} is torn" for name, seed in found.items() if seed is None]
        for name, seed in found.items():
            if seed is not None and seed not in self.may_be.get(name, set()):
                told.append(f"{name} is of seed {seed}, not of {self.may_be.get(name)}")
        told += [
            f"{name} is lost"
            for name, seeds in self.may_be.items()
            if not ({GONE, *found} & {*seeds, name})
        ]
        if newest not in self.newest:
            told.append(f"the newest is {newest}, not one of {self.newest}")
        return told


def promised(lines: Iterable[str]) -> dict[str, Promised]:
    """By place, from the lines of a victim in their order."""
    places: dict[str, Promised] = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        _, _, told = rest.partition(" ")
        if word not in ("begin", "done") or not told:
            continue
        what = json.loads(told)
        place = places.setdefault(what["place"], Promised())
        if word == "begin":
            place.begin(what["name"], what["seed"], what["keep"])
        else:
            place.done(what["name"], what["seed"])
    return places


def under_way(lines: Iterable[str]) -> str | None:
    """The operation that was begun and not done."""
    begun: list[str] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "begin":
            begun.append(rest)
        elif word == "done":
            begun.remove(rest)
    return begun[-1].partition(" ")[0] if begun else None
