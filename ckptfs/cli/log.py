"""``ckptfs log``: the run log as a person reads it. No torch."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.answer import Answer, table
from ckptfs.cli.command import command
from ckptfs.cli.exits import Exit
from ckptfs.cli.options import storage_options
from ckptfs.cli.text import parse_duration
from ckptfs.errors import CkptfsError, NotFoundError
from ckptfs.tools.runlog import Condition, Line, read_log
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["log"]


@command("log")
@click.argument("uri")
@click.option("--since", metavar="AGE", help="Only the last 90s, 30m, 6h, 2d...")
@click.option("--save", metavar="ID|NAME", help="Only of one save, by its id or name.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest so many.")
@storage_options()
def log(
    uri: str,
    storage_options: dict[str, Any],
    since: str | None,
    save: str | None,
    limit: int | None,
) -> Answer:
    """Who saved, fenced and deleted what, when, from where: the run's log, oldest entry first.

    Of a checkpoint's URI: what the log of its run says about it. Times and hosts are what the writers said of themselves; the log is ordered by its numbers. Ends
    with 1 where an entry is damaged or missing.
    """
    try:
        since_s = None if since is None else parse_duration(since)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error
    everything, inside = _entries(uri, storage_options)
    save = save or inside
    is_broken = any(_is_broken(line) for line in everything)
    lines = everything if since_s is None else _since(everything, since_s)
    if save is not None:
        lines = [
            line for line in lines if save in (line.save_id, line.name) or _is_part(line, save)
        ]
    if limit is not None:
        lines = lines[max(0, len(lines) - limit) :]

    def show(console: Console) -> None:
        if lines:
            table(console, ("N>", "WHEN", "WHO", "WHAT"), [_row(line) for line in lines])
        else:
            console.print("no such entries")

    document = {"entries": [_document(line) for line in lines], "broken": is_broken}
    return Answer(document, show, Exit.NO if is_broken else Exit.OK)


def _entries(uri: str, options: dict[str, Any]) -> tuple[list[Line], str | None]:
    """The log at a URI; or of what lies above it, with the name of what was asked for in there."""
    try:
        return read_log(uri, options), None
    except NotFoundError:
        target = Uri.parse(uri)
        with contextlib.suppress(CkptfsError):
            lines = read_log(target.parent, options)
            if any(target.name == line.name or _is_part(line, target.name) for line in lines):
                return lines, target.name
        raise


def _is_broken(line: Line) -> bool:
    return line.condition in (Condition.DAMAGED, Condition.MISSING)


def _is_part(line: Line, save: str) -> bool:
    return line.name is not None and line.name.partition("/")[0] == save


def _since(lines: list[Line], since_s: float) -> list[Line]:
    """From the first entry on that says a time so near; those without a time are where they are."""
    from_then = f"{datetime.now(UTC) - timedelta(seconds=since_s):%Y-%m-%dT%H:%M:%SZ}"
    first = next((at for at, line in enumerate(lines) if line.stamp.at >= from_then), len(lines))
    return lines[first:]


def _row(line: Line) -> tuple[str, str, str, str]:
    stamp = line.stamp
    who = stamp.host + (f" pid {stamp.pid}" if stamp.pid else "")
    rank = f" rank {stamp.rank}" if stamp.rank is not None else ""
    why = f"  [{line.condition.value}: {line.why}]" if line.why else ""
    return str(line.number), stamp.at or "-", f"{who}{rank}" or "-", f"{line.what}{why}"


def _document(line: Line) -> dict[str, Any]:
    stamp = line.stamp
    return {
        "number": line.number,
        "entry": line.entry,
        "condition": line.condition.value,
        "at": stamp.at or None,
        "host": stamp.host or None,
        "pid": stamp.pid or None,
        "rank": stamp.rank,
        "what": line.what,
        "why": line.why or None,
        "save_id": line.save_id,
        "name": line.name,
        "generation": line.generation,
    }
