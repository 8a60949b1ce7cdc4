"""What all rows share: a result as a table on the terminal, parts of a result joined, what a result says of its run."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ckptfs.bench.analysis import Row, interval_text, rows_of, spread_text, verdict_text
from ckptfs.bench.machine import describe, versions
from ckptfs.bench.results import Result, number_text, phase_text

HERE = Path(__file__).resolve().parent
COLUMNS = ("engine", "rounds", "seconds", "GB/s", "CPU s/GB", "seconds by ckptfs's")


@dataclasses.dataclass(frozen=True, slots=True)
class Began:
    """When a row began, and the load average of then."""

    at: datetime = dataclasses.field(default_factory=lambda: datetime.now(UTC))
    load: tuple[float, ...] = dataclasses.field(default_factory=os.getloadavg)

    def about(self, within: Path, packages: Sequence[str]) -> dict[str, Any]:
        """What every result says of its run, which ends now. The floors' command puts itself in."""
        machine_load = {"before": list(self.load), "after": list(os.getloadavg())}
        return {
            "date": self.at.isoformat(timespec="seconds"),
            "command": "",
            "machine": {**describe(within), "load_average": machine_load},
            "versions": versions(*packages),
        }


def say(text: str) -> None:
    """Progress, for a person who waits."""
    print(text, file=sys.stderr, flush=True)


def joined(results: Sequence[Result], *, what: str, command: str, note: str) -> Result:
    """Results of one script as one; machine, date and versions are the first's."""
    first = results[0]
    return dataclasses.replace(
        first,
        what=what,
        command=command,
        workloads=_once(one for r in results for one in r.workloads),
        targets=_once(one for r in results for one in r.targets),
        engines=_once(one for r in results for one in r.engines),
        samples=tuple(one for r in results for one in r.samples),
        notes=tuple(filter(None, (note, *dict.fromkeys(n for r in results for n in r.notes)))),
    )


def _once(found: Iterable[Any]) -> tuple[Any, ...]:
    """One of each name, the first."""
    kept: dict[str, Any] = {}
    for one in found:
        kept.setdefault(getattr(one, "name", None) or one.uri, one)
    return tuple(kept.values())


def placed(result: Result, name: str) -> Result:
    """The same with every target under one name that stays, in notes too: the real one was made for the run."""
    notes = result.notes
    for one in result.targets:
        notes = tuple(note.replace(one.uri, name) for note in notes)
    return dataclasses.replace(
        result,
        targets=tuple(dataclasses.replace(one, uri=name) for one in result.targets[:1]),
        samples=tuple(dataclasses.replace(one, target=name) for one in result.samples),
        notes=notes,
    )


def show(result: Result) -> None:
    """Print it for a person."""
    out = Console(highlight=False, markup=False)
    if not out.is_terminal:
        out = Console(highlight=False, markup=False, width=150)
    about, load = result.machine, result.machine.get("load_average", {})
    told = [about.get("cpu"), f"{about.get('cores')} cores", about.get("filesystem")]
    told += [f"fsync {about['fsync_ms']} ms"] * ("fsync_ms" in about)
    told += [f"load average {load['before'][0]:.1f} before"] * ("before" in load)
    out.print(", ".join(filter(None, told)))
    if about.get("reverse_lookup_s", 0) > 0.1:
        out.print(f"Looking up ::1 took {about['reverse_lookup_s']} s: put it into /etc/hosts")
    for note in result.notes:
        out.print(note)
    rows = rows_of(result)
    for place in dict.fromkeys((row.workload, row.target, row.phase) for row in rows):
        table = Table(title=_title(*place), title_justify="left", box=None, pad_edge=False)
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            if (row.workload, row.target, row.phase) == place:
                table.add_row(*_cells(row))
        out.print(table)


def _title(workload: str, target: str, phase: str) -> str:
    return f"{phase_text(phase)}, {workload}, {target}"


def _cells(row: Row) -> list[str]:
    beside = row.to_ours
    return [
        row.engine + (" (limit)" * row.is_limit),
        str(row.seconds.count),
        spread_text(row.seconds),
        number_text(row.gb_per_s.median) if row.gb_per_s else "",
        number_text(row.cpu_s_per_gb.median) if row.cpu_s_per_gb else "",
        f"{interval_text(beside)} {verdict_text(beside).partition(';')[0]}" if beside else "",
    ]
