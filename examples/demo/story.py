"""What the demo prints: acts, tables, and claims, each checked before it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from look import Leftover, Operation
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ckptfs.text import size_text

WIDTH = 100  # where there is no terminal to ask
_MB = 1e6


class Story:
    """The narrator. claims: name -> whether it holds. facts: numbers for machines."""

    def __init__(self, *, quiet: bool) -> None:
        self._out = Console(quiet=quiet, highlight=False)
        if not self._out.is_terminal:
            self._out = Console(quiet=quiet, highlight=False, width=WIDTH)
        self.claims: dict[str, bool] = {}
        self.facts: dict[str, Any] = {}

    @property
    def all_hold(self) -> bool:
        """True when there are claims and each holds."""
        return bool(self.claims) and all(self.claims.values())

    def claim(self, name: str, holds: bool, text: str) -> None:  # noqa: FBT001 - that is the point
        """Print what was found to be true, or, loudly, that it is not."""
        self.claims[name] = holds
        mark = "[green]ok[/]  " if holds else "[bold red]FAILED[/]"
        self._out.print(f"   {mark} {text}")

    def title(self, steps: int, every: int) -> None:
        """Open."""
        self._out.print(
            "[bold]ckptfs demo[/]: 4 ranks as 2 nodes, FSDP2 over gloo, "
            f"{steps} steps, a checkpoint every {every}"
        )
        self._out.print("[dim]each job starts six processes, and each of these imports torch[/]")

    def act(self, text: str, wall_s: float | None = None) -> None:
        """Begin the next part."""
        took = "" if wall_s is None else f"  [dim]{wall_s:.1f} s[/]"
        self._out.print(f"\n[bold]{text}[/]{took}")

    def saves(self, run: Path, saved: Sequence[dict[str, Any]]) -> None:
        """What was saved where, and how fast, from each SaveResult."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for heading in (
            "saved",
            "MB",
            "files",
            "seconds",
            "plan",
            "write",
            "sync",
            "commit",
            "MB/s",
        ):
            table.add_column(heading, justify="left" if heading == "saved" else "right")
        for one in saved:
            table.add_row(
                f"{run.name}/{one['name']}",
                f"{one['size_bytes'] / _MB:.1f}",
                str(one["files"]),
                f"{one['wall_s']:.3f}",
                *(f"{one[phase]:.3f}" for phase in ("plan_s", "write_s", "sync_s", "commit_s")),
                f"{one['mib_per_s'] * (1 << 20) / _MB:.0f}",
            )
        self._indented(table)
        self.facts.setdefault("saves", []).extend(
            {k: one[k] for k in ("name", "size_bytes", "wall_s", "mib_per_s", "rank_bytes")}
            for one in saved
        )

    def nodes(self, files: dict[str, list[str]]) -> None:
        """Say which node holds which data files."""
        held = "; ".join(f"{node}: {' '.join(names)}" for node, names in files.items())
        self._out.print(f"   on disk  {held}; .metadata on both")

    def kill(self, rank: int, operation: Operation, number: int, of: int) -> None:
        """Say where the kill hit."""
        key = operation.key.rsplit("/", 3)
        self._out.print(
            f"   SIGKILL to rank {rank}, half-way through {operation.op} {number} of {of} to "
            f".../{'/'.join(key[-2:])}"
        )

    def leftovers(self, run: Path, left: Leftover) -> None:
        """List what the kill left behind."""
        self._out.print(
            f"   left behind: {run.name}/.ckptfs/attempts/{left.save_id}/ ({left.name})"
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(justify="right")
        table.add_column()
        for path, size in left.files.items():
            table.add_row(f"{size:,} bytes", path.rsplit("/", 1)[-1])
        self._indented(table)

    def recovery(self, entries: Sequence[dict[str, Any]], left: Leftover, generation: int) -> None:
        """Say what the new owner wrote into the run log before it trained."""
        told = []
        for entry in entries:
            if entry["kind"] == "fence":
                told.append(f"{entry['number']} fence, generation {generation}")
            elif entry.get("save_id") == left.save_id:
                told.append(f"{entry['number']} {entry['kind']} {left.name}")
        self._out.print(f"   run log: {'; '.join(told)}")

    def loaded(self, one: dict[str, Any]) -> None:
        """Say what was loaded, and how fast."""
        if one:
            self._out.print(
                f"   loaded {one['name']}: {size_text(one['size_bytes'])} in {one['wall_s']:.3f} s, "
                "every block compared with its digest"
            )

    def end(self, wall_s: float, home: Path | None) -> None:
        """Close, and say where things are."""
        held = sum(self.claims.values())
        self.facts["wall_s"] = round(wall_s, 2)
        self._out.print(f"\n{held} of {len(self.claims)} claims hold; {wall_s:.0f} s in all.")
        self._out.print(
            f"Look at it: {home}" if home else "make demo keeps nothing; --dir DIR does."
        )

    def _indented(self, table: Table) -> None:
        self._out.print(Padding(table, (0, 0, 0, 3), expand=False))
