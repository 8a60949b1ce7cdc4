"""Measure rows of the table of floors; see ``python -m benchmarks.floors --help``.

    python -m benchmarks.floors                       every row: an hour
    python -m benchmarks.floors durable hot           two of them
    python -m benchmarks.floors hot --size 500MB --pairs 3 --only ckptfs,raw:buffered
    python -m benchmarks.floors --record --markdown build/floors.md

Each row is one run in which everybody takes turns. Its result, all measurements with machine, versions,
command, date and load average, is a file that ``ckptfs bench report`` draws.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.floors.claims import COLUMNS, Finding, Verdict, cells, findings_of, markdown
from benchmarks.floors.rows import NO_WARM_UP, ROWS, Sizes
from ckptfs.bench.results import read_result, write_result
from ckptfs.bench.workloads import parse_size

RECORD = tables.HERE / "results"


def main() -> int:
    """Measure, write a result for each row, print the table; 1 where a floor is missed and --check asks."""
    options = _options()
    findings: list[Finding] = []
    if options.read:
        for path in options.read:
            findings += findings_of(_row_of(path), read_result(path))
    else:
        out = RECORD if options.record else options.out or Path(tempfile.mkdtemp(prefix="floors-"))
        for row in options.rows or _rows_of_all(options):
            findings += _measured(row, options, out)
    show(findings)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(findings))
    missed = any(one.verdict is Verdict.MISSED for one in findings)
    return 1 if missed and options.check else 0


def _measured(row: str, options: argparse.Namespace, out: Path) -> list[Finding]:
    sizes = Sizes(
        options.size, options.small, options.pairs, options.dir, options.memory, options.only,
        options.worlds, options.tensors, options.ranks, options.device, options.steps, options.saves,
        options.old,
    )  # fmt: skip
    command = command_of(sys.argv[1:])
    found = replace(ROWS[row](sizes), what=f"floors: {row}", command=command)
    path = out / f"floors-{row}-{found.date[:10]}.json"
    write_result(path, found)
    tables.show(found)
    findings = findings_of(row, found)
    show(findings)
    print(f"every measurement: {os.path.relpath(path)}")
    return findings


def show(findings: list[Finding]) -> None:
    """The table."""
    out = Console(highlight=False, markup=False)
    if not out.is_terminal:
        out = Console(highlight=False, markup=False, width=170)
    table = Table(title="floors", title_justify="left", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column)
    for one in findings:
        table.add_row(*cells(one))
    out.print(table)


def _rows_of_all(options: argparse.Namespace) -> list[str]:
    """Every row, but one for which no other tree was given."""
    if options.old is None:
        tables.say("readers: left out, it needs --old TREE")
    return [row for row in ROWS if row != "readers" or options.old is not None]


def _row_of(path: Path) -> str:
    return path.name.removeprefix("floors-").rpartition("-20")[0]


def _rows(text: str) -> str:
    if text not in ROWS:
        raise argparse.ArgumentTypeError(f"no row is called {text!r}: {', '.join(ROWS)}")
    return text


def command_of(words: Sequence[str]) -> str:
    """The command as a result has it: without the paths of this machine, because results are published."""
    shown = [re.sub(r"^(--\w+=)?/.*", r"\1DIR", word) for word in words]
    return shlex.join(["python", "-m", "benchmarks.floors", *shown])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floors", description="the floors of ckptfs' speed, row by row"
    )
    parser.add_argument("rows", nargs="*", type=_rows, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--size", type=parse_size, default=2_000_000_000, help="of the state: 2GB")
    parser.add_argument("--small", type=int, default=20_000, help="number of small tensors")
    cold = f"{', '.join(NO_WARM_UP[:-1])} and {NO_WARM_UP[-1]}"
    parser.add_argument(
        "--pairs",
        type=int,
        default=5,
        help=f"rounds that count; one more comes first, but not in {cold}",
    )
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--dir", type=Path, default=temporary, help="on the disk to be measured")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs")  # noqa: S108
    parser.add_argument(
        "--only", type=_names, default=(), help="engines, such as ckptfs,raw:direct"
    )
    parser.add_argument("--worlds", type=_numbers, default=(256, 1024, 4096), help="planner: ranks")
    parser.add_argument("--tensors", type=int, default=1000, help="planner: of each rank")
    parser.add_argument("--ranks", type=_numbers, default=(4, 16, 32), help="fixed: processes")
    parser.add_argument("--device", default="cpu", help="stall: where the state lies, such as cuda")
    parser.add_argument(
        "--steps", action="store_true", help="stall: train while a save is under way"
    )
    parser.add_argument(
        "--saves", type=int, default=20_000, help="history, catalog: of the old run"
    )
    parser.add_argument("--old", type=Path, help="readers: another checkout of ckptfs")
    parser.add_argument("--out", type=Path, help="the results' directory (default: a new one)")
    parser.add_argument("--record", action="store_true", help="into benchmarks/results")
    parser.add_argument("--markdown", type=Path, help="the table as a file")
    parser.add_argument("--read", type=Path, nargs="+", help="results of before: measure nothing")
    parser.add_argument("--check", action="store_true", help="fail where a floor is missed")
    options = parser.parse_args()
    if "readers" in options.rows and options.old is None:
        parser.error("readers measures another tree beside this one: --old TREE")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
