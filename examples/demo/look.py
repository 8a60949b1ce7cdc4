"""What is in a run directory, as a person with ``ls`` and ``cat`` would find it. No torch.

leftovers(run)     the attempts that never became checkpoints, file by file
log_entries(run)   the run log: one line of JSON per decision
operations(trace)  the storage operations of one rank, as ckptfs.testing.faults wrote them down
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Leftover:
    """One attempt directory. files: path below it -> bytes."""

    save_id: str
    name: str
    files: dict[str, int]

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(self.files.values())


@dataclass(frozen=True)
class Operation:
    """One storage operation of one rank."""

    op: str
    key: str


def leftovers(run: Path) -> list[Leftover]:
    """Every attempt below ``.ckptfs/attempts``."""
    found = []
    for attempt in sorted((run / ".ckptfs/attempts").iterdir()):
        files = {
            str(path.relative_to(attempt)): path.stat().st_size
            for path in sorted(attempt.rglob("*"))
            if path.is_file()
        }
        record = json.loads((attempt / attempt.name / "attempt.json").read_text())
        found.append(Leftover(attempt.name, record["name"], files))
    return found


def log_entries(run: Path) -> list[dict[str, Any]]:
    """The entries of the run log in their order, their number added."""
    return [
        {"number": int(path.name), **json.loads(path.read_text())}
        for path in sorted((run / ".ckptfs/log").iterdir())
    ]


def operations(trace: Path) -> list[Operation]:
    """A trace that CKPTFS_TEST_TRACE asked for."""
    lines = (line.split(" ", 2) for line in trace.read_text().splitlines())
    return [Operation(op, key) for _, op, key in lines]


def events(path: Path) -> list[dict[str, Any]]:
    """What rank 0 of train.py reported. A line that a kill cut short is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
