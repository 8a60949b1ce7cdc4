"""NFS operations of one save by 8 ranks on 2 nodes: ckptfs, stock DCP and verl's pattern, side by side.

    python -m tests.nfs.counts [4.2|3 ...]        starts a lab of each version and prints a table
    counted(lab, rounds=3)                        -> {"ours": Tally, "dcp": Tally, "verl": Tally}

A tally adds up both clients' mounts, as their kernels counted; of several rounds it has the lowest and the
highest. ``tests.nfs.counting`` says what is saved and how.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tests.lab.nfs import NfsLab
from tests.nfs.counting import WAYS, count_saves
from tests.nfs.crowd import Crowd

__all__ = ["NAMES", "Tally", "counted", "table"]

# What makes, finds, moves or removes a name, in both versions' words.
NAMES = ("MKDIR", "CREATE", "OPEN", "OPEN_NOATTR", "LOOKUP", "LINK", "RENAME", "REMOVE", "RMDIR")
_PER_NODE = 4


@dataclass(frozen=True)
class Tally:
    """Operations of one way on both clients together. rounds: each by name."""

    rounds: tuple[Mapping[str, int], ...]

    @property
    def names(self) -> set[str]:
        """All operations that occurred."""
        return set().union(*self.rounds)

    def span(self, *names: str) -> tuple[int, int]:
        """The fewest and the most of these together in a round; without names of all."""
        sums = [sum(n for name, n in r.items() if not names or name in names) for r in self.rounds]
        return min(sums), max(sums)


def counted(lab: NfsLab, *, rounds: int = 3) -> dict[str, Tally]:
    """Save in turn, each way once in every round."""
    args = {"run": lab.fresh("counts"), "rounds": rounds}
    with Crowd(lab, count_saves, args, per_node=_PER_NODE) as crowd:
        values = crowd.values()
    found = {}
    for way in WAYS:
        sums: list[dict[str, int]] = [{} for _ in range(rounds)]
        for value in (values[0], values[_PER_NODE]):
            for total, one in zip(sums, value, strict=True):
                for name, n in one[way].items():
                    total[name] = total.get(name, 0) + n
        found[way] = Tally(tuple(sums))
    return found


def table(tallies: Mapping[str, Tally]) -> str:
    """A table for people, in Markdown: one row for each operation, the sum last."""

    def cells(*names: str) -> str:
        spans = [tally.span(*names) for tally in tallies.values()]
        return " | ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)

    every = sorted(set().union(*(tally.names for tally in tallies.values())))
    lines = [f"| operation | {' | '.join(tallies)} |", "|---" * (1 + len(tallies)) + "|"]
    lines += [f"| {name} | {cells(name)} |" for name in every]
    lines.append(f"| of names ({', '.join(n for n in NAMES if n in every)}) | {cells(*NAMES)} |")
    lines.append(f"| all | {cells()} |")
    return "\n".join(lines)


def main(versions: list[str]) -> None:
    """Print a table for each version."""
    for version in versions or ["4.2", "3"]:
        with NfsLab("3" if version == "3" else "4.2") as lab:
            shown = table(counted(lab))
        sys.stdout.write(
            f"NFS {version}, operations of one save by 8 ranks on 2 nodes\n\n{shown}\n\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
