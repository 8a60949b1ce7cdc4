"""The page of what was tried: framework x store x mode, rendered from what the tests recorded.

    make integrations-matrix                              runs every cell, then
    python -m tests.integrations.matrix CELLS.jsonl ...   adds them to docs/integrations/matrix.json
                                                          and writes matrix.md from that

A cell is a package, its version, the day, and how it went; the newest of a kind counts, and one cell
that failed makes the whole kind failed that day. What was not tried has no cell and is shown as such.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[2] / "docs" / "integrations"
STORES = {"file": "local", "nfs": "NFS", "s3": "S3", "gcs": "GCS"}
MODES = ("sync", "async")
_HEAD = """\
# What was tried

Each cell is one test with the real package: a run is killed while it saves, resumes, and ends with
the same bits as an undisturbed run. local: ext4 or tmpfs. NFS: a Linux client of a Linux server,
version 4.2. S3: Ceph's gateway. GCS: the server of `tests/lab`, which honours preconditions;
Google's own service was not tried. `make integrations-matrix` writes this page from what the tests
recorded ([matrix.json](matrix.json)).

"yes": the test passed on that day with that version. "FAILED": it did not. "-": not tried. "none":
the framework has no such mode here.

"""


@dataclass(frozen=True, order=True)
class Cell:
    """One combination that was tried."""

    framework: str
    store: str
    mode: str
    package: str
    version: str
    date: str
    passed: bool
    modes: tuple[str, ...] = MODES  # that this framework has


def record(
    target: Path,
    framework: str,
    kind: str,
    mode: str,
    *,
    package: str,
    passed: bool,
    modes: Iterable[str] = MODES,
) -> None:
    """Append one cell as a line of JSON."""
    day = dt.datetime.now(dt.UTC).date().isoformat()
    cell = Cell(framework, kind, mode, package, version(package), day, passed, tuple(modes))
    with target.open("a") as file:
        file.write(json.dumps(asdict(cell)) + "\n")


def merged(old: Iterable[Cell], new: Iterable[Cell]) -> list[Cell]:
    """The cells that count: of each kind the newest, and of one day and version the failed one."""
    kept: dict[tuple[str, str, str], Cell] = {}
    for cell in [*old, *new]:
        kind = (cell.framework, cell.store, cell.mode)
        before = kept.get(kind)
        failed = before is not None and not before.passed
        same_day = before is not None and (before.date, before.version) == (
            cell.date,
            cell.version,
        )
        if not (failed and same_day):
            kept[kind] = cell
    return sorted(kept.values())


def render(cells: Iterable[Cell]) -> str:
    """The page."""
    cells = list(cells)
    columns = [(store, mode) for store in STORES for mode in MODES]
    head = ["framework", "tried with", "on", *(f"{STORES[s]}, {m}" for s, m in columns)]
    rows = [head, ["---"] * len(head)]
    for framework in sorted({cell.framework for cell in cells}, key=str.lower):
        mine = {(c.store, c.mode): c for c in cells if c.framework == framework}
        names = sorted({f"{c.package} {c.version}" for c in mine.values()})
        days = sorted({c.date for c in mine.values()})
        has = {mode for c in mine.values() for mode in c.modes}
        said = [_said(mine.get(column), has=column[1] in has) for column in columns]
        rows.append([framework, ", ".join(names), " to ".join({days[0]: 0, days[-1]: 0}), *said])
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def read(path: Path) -> list[Cell]:
    """The cells of matrix.json."""
    return [_cell(fields) for fields in json.loads(path.read_text())] if path.exists() else []


def _cell(fields: dict[str, Any]) -> Cell:
    return Cell(**{**fields, "modes": tuple(fields.get("modes", MODES))})


def _said(cell: Cell | None, *, has: bool) -> str:
    if cell is None:
        return "-" if has else "none"
    return "yes" if cell.passed else "FAILED"


def main(files: Iterable[str]) -> None:
    """Add the recorded lines and write both files."""
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    new = [_cell(json.loads(line)) for line in lines]
    cells = merged(read(PAGES / "matrix.json"), new)
    text = ",\n".join(json.dumps(asdict(cell)) for cell in cells)
    (PAGES / "matrix.json").write_text(f"[\n{text}\n]\n")
    (PAGES / "matrix.md").write_text(render(cells))


if __name__ == "__main__":
    main(sys.argv[1:])
