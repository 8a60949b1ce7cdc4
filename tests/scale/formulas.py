"""What a world costs, as formulas in R ranks on N nodes, two nodes and more; the tests hold them exact.

formula(Kind.SHARED, "save")["create"].at(sizes)      2R + 6 at these sizes
STOCK["mkdir"].text                                   "R": what torch.distributed.checkpoint does

On node-local disks the sum over all nodes is counted: every disk has its N-th part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.scale.simulation import Kind, Sizes

__all__ = ["FORMULAS", "STEP_OPERATIONS", "STEP_PIECES", "STOCK", "Linear", "formula"]


@dataclass(frozen=True, slots=True)
class Linear:
    """ranks * R + nodes * N + fixed, and one for each batch of ``batch`` of 2R + 3 names."""

    ranks: int = 0
    nodes: int = 0
    fixed: int = 0
    batch: int = 0

    def at(self, sizes: Sizes) -> int:
        """The number."""
        batches = -(-(2 * sizes.ranks + 3) // self.batch) if self.batch else 0
        return self.ranks * sizes.ranks + self.nodes * sizes.nodes + self.fixed + batches

    @property
    def text(self) -> str:
        """For people: ``2R + 6``."""
        parts = [(self.ranks, "R"), (self.nodes, "N"), (self.fixed, "")]
        told = " + ".join(f"{'' if k == 1 and name else k}{name}" for k, name in parts if k)
        told = told.replace("+ -", "- ").replace("- 1N", "- N")
        return f"{told} + (2R + 3)/{self.batch}" if self.batch else told or "0"


def _read(text: str) -> dict[str, Linear]:
    """``create 2R+6, mkdir 3`` as formulas by operation."""
    found = {}
    for one in text.split(","):
        name, _, terms = one.strip().rpartition(" ")
        numbers = {"R": 0, "N": 0, "": 0}
        batch = 0
        for term in terms.replace("-", "+-").split("+"):
            if term.startswith("/"):
                batch = int(term[1:])
                continue
            kind = term[-1] if term[-1:] in "RN" else ""
            count = term.removesuffix(kind) if kind else term
            numbers[kind] += int({"": "1", "-": "-1"}.get(count, count)) if term else 0
        found[name] = Linear(numbers["R"], numbers["N"], numbers[""], batch)
    return found


_SHARED = {
    "open": "create 4N+1, link 2N+1, list N+1, mkdir 2N+4, open 5N-1, open dir 10N+1, rename 3N, rmdir N,"
    " stat 4N+1, sync N+1, sync dir 5N+1, unlink 5N+1",
    "ensure": "create 1, mkdir N, open N-1, open dir 2N, rename 1, stat R-N, sync 1, sync dir N+1, unlink 1",
    "prepare": "create 2, link 1, list 6, mkdir 6, open R+4, open dir N+14, rename 1, stat 1, sync 2,"
    " sync dir 9, unlink 1, utime 2",
    "save": "create 2R+6, link 1, mkdir 2, open N+4, open dir R+2N+7, rename 2R+6, stat 1, statvfs 1,"
    " sync 2R+6, sync dir R+5, unlink 1, utime 1",
    "retain": "create 2, link 2, list 1, open 12, open dir 11, rename 4, rmdir 3, stat 2, sync 2,"
    " sync dir 6, unlink 2R+7, utime 2",
    "release": "create 1, link 1, open 1, open dir 2, sync 1, sync dir 1, unlink 1, utime 1",
    "resume": "create 2, link 1, list 7, mkdir 5, open R+10, open dir N+13, rename 1, rmdir 1, stat 1,"
    " sync 2, sync dir 8, unlink 1, utime 2",
    "latest": "open 10, open dir 2",
}
_LOCAL = {
    "open": "create 5N, link 3N, list 2N, mkdir 6N, open 4N, open dir 11N, rename 3N, rmdir N, stat 5N,"
    " sync 2N, sync dir 6N, unlink 6N",
    "ensure": "mkdir N, open dir N, stat R-N, sync dir N",
    "prepare": "create 2N, link N, list 6N, mkdir 6N, open R+4N, open dir 15N, rename N, stat N, sync 2N,"
    " sync dir 9N, unlink N, utime 2N",
    "save": "create 2R+7N, link 2N, mkdir 2N, open 6N, open dir R+11N, rename 2R+6N, stat N, statvfs N,"
    " sync 2R+7N, sync dir R+6N, unlink 2N, utime N",
    "retain": "create 2N, link 2N, list N, open 12N, open dir 11N, rename 4N, rmdir 3N, stat 2N, sync 2N,"
    " sync dir 6N, unlink 2R+7N, utime 2N",
    "release": "create N, link N, open N, open dir 2N, sync N, sync dir N, unlink N, utime N",
    "resume": "create 2N, link N, list 7N, mkdir 5N, open R+12N, open dir 15N, rename N, rmdir N, stat N,"
    " sync 2N, sync dir 8N, unlink N, utime 2N",
    "latest": "open 12, open dir 3",
}
_OBJECTS = {
    "open": "delete 1, get 2, head 1, list_keys 1, put 5",
    "ensure": "",
    "prepare": "get R+11, list_keys 2, list_uploads 1, put 2",
    "save": "delete 1, get N+2, put 2R+6",
    "retain": "delete 1+/1000, get 6, put 2",
    "release": "get 1, put 1",
    "resume": "get R+11, list_keys 3, list_uploads 1, put 2",
    "latest": "get 10",
}

FORMULAS: Mapping[Kind, Mapping[str, str]] = {
    Kind.SHARED: _SHARED,
    Kind.LOCAL: _LOCAL,
    Kind.OBJECTS: _OBJECTS,
}

# A save of torch.distributed.checkpoint into a new directory with a parent that is there.
STOCK = _read("create R+1, mkdir R, rename 1, stat 2R, sync R+1")

# One step of a control over a store, its keys deleted again by the next one; R ranks.
STEP_OPERATIONS: Mapping[str, Callable[[int], int]] = {
    "set": lambda r: r + 1,
    "add": lambda r: 2 * r,
    "wait": lambda r: r,
    "get": lambda r: r - 1,
    "multi_get": lambda r: -(-(r - 1) // 32),
    "compare_set": lambda r: 3,
    "delete_key": lambda r: r - 1 + 6,
}
# What is added where each rank gets a piece of its own.
STEP_PIECES: Mapping[str, Callable[[int], int]] = {
    "set": lambda r: r - 1,
    "get": lambda r: r - 1,
    "delete_key": lambda r: r - 1,
}


def formula(kind: Kind, phase: str) -> dict[str, Linear]:
    """What a phase costs, by operation."""
    text = FORMULAS[kind][phase]
    return _read(text) if text else {}


LARGE = Sizes(4096, 8)


def save_table() -> list[str]:
    """A save on a filesystem, ours and stock's: the rows of docs/scale.md, with 4096 ranks on 512 nodes."""
    shared, local = formula(Kind.SHARED, "save"), formula(Kind.LOCAL, "save")
    rows = [
        "| | shared directory | at 4096 | node-local disks, all | at 4096 | stock DCP | at 4096 |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for op in ("mkdir", *sorted({*shared, *STOCK} - {"mkdir"})):
        cells = [f"{line.text} | {line.at(LARGE)}" for line in _lines(op, shared, local, STOCK)]
        rows.append(f"| {op} | {' | '.join(cells)} |")
    return rows


def phase_table(kind: Kind) -> list[str]:
    """All phases on one kind of storage, as formulas."""
    rows = ["| | operations |", "|---|---|"]
    for phase in FORMULAS[kind]:
        told = ", ".join(f"{op} {line.text}" for op, line in formula(kind, phase).items())
        rows.append(f"| {PHASES[phase]} | {told or 'none'} |")
    return rows


PHASES = {
    "open": "open a new run",
    "ensure": "`ensure_dir`",
    "prepare": "`prepare_run`",
    "save": "a save",
    "retain": "let an older save go",
    "release": "leave the run",
    "resume": "`prepare_run` again",
    "latest": "`latest`, one process",
}


def _lines(op: str, *tables: Mapping[str, Linear]) -> list[Linear]:
    return [table.get(op, Linear()) for table in tables]
