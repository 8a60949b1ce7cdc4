"""``ckptfs log`` and ``ckptfs watch``: show the run log, whole or as it grows. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptfs.cli.options import parse_duration, storage_options
from ckptfs.cli.output import Answer, Exit, command, place_text, say, stream_command, table, to_json
from ckptfs.commit.log.entries import Kind, Stamp
from ckptfs.errors import CkptfsError, NotFoundError
from ckptfs.progress import printable
from ckptfs.tools.runlog import Condition, EventKind, Line, RunEvent, RunWatcher, read_log
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["log", "watch"]

_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _LineDocument:
    number: int
    entry: str
    condition: Condition
    at: str | None
    host: str | None
    pid: int | None
    rank: int | None
    what: str
    why: str | None
    save_id: str | None
    name: str | None
    generation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogDocument:
    entries: Sequence[_LineDocument]
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventDocument:
    command: Literal["watch"] = "watch"
    event: EventKind
    number: int | None
    at: str | None
    host: str | None
    pid: int | None
    rank: int | None
    what: str
    uri: Uri | None
    name: str | None
    step: int | None
    kind: Kind | None
    save_id: str | None
    generation: int | None


@command("log", answers=(_LogDocument,))
@click.argument("uri")
@click.option("--since", metavar="AGE", help="Show only the last 90s, 30m, 6h, 2d...")
@click.option("--save", metavar="ID|NAME", help="Show only one save, given by its id or name.")
@click.option("--limit", type=click.IntRange(min=1), help="Show only the newest N.")
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

    document = _LogDocument(entries=[_document(line) for line in lines], broken=is_broken)
    return Answer(document, show, Exit.NO if is_broken else Exit.OK)


def _entries(uri: str, options: dict[str, Any]) -> tuple[list[Line], str | None]:
    """Return the log at a URI and None, or its parent's log and the checkpoint's name in it."""
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
    """Return the lines from the first one with a time in the last ``since_s`` seconds.

    Lines without a time keep their place in the order.
    """
    from_then = f"{datetime.now(UTC) - timedelta(seconds=since_s):%Y-%m-%dT%H:%M:%SZ}"
    first = next((at for at, line in enumerate(lines) if line.stamp.at >= from_then), len(lines))
    return lines[first:]


def _row(line: Line) -> tuple[str, str, str, str]:
    stamp = line.stamp
    why = f"  [{line.condition.value}: {line.why}]" if line.why else ""
    return str(line.number), stamp.at or "-", _writer(stamp) or "-", f"{line.what}{why}"


def _writer(stamp: Stamp) -> str:
    pid = f" pid {stamp.pid}" if stamp.pid else ""
    rank = f" rank {stamp.rank}" if stamp.rank is not None else ""
    return f"{stamp.host}{pid}{rank}"


def _document(line: Line) -> _LineDocument:
    stamp = line.stamp
    return _LineDocument(
        number=line.number,
        entry=line.entry,
        condition=line.condition,
        at=stamp.at or None,
        host=stamp.host or None,
        pid=stamp.pid or None,
        rank=stamp.rank,
        what=line.what,
        why=line.why or None,
        save_id=line.save_id,
        name=line.name,
        generation=line.generation,
    )


@stream_command("watch", answers=(_EventDocument,))
@click.argument("uri")
@click.option(
    "--event",
    "kinds",
    type=click.Choice([kind.value for kind in EventKind]),
    multiple=True,
    help="Show only these; repeatable.",
)
@click.option(
    "--exec",
    "program",
    metavar="CMD",
    help="Run CMD by the shell at each event, one at a time; CKPTFS_EVENT, CKPTFS_URI and others tell it.",
)
@click.option("--from", "from_entry", type=click.IntRange(min=0), help="Start with this entry.")
@click.option("--until-end", is_flag=True, help="End once the owner of the run left or died.")
@storage_options()
def watch(
    uri: str,
    *,
    storage_options: dict[str, Any],
    kinds: Sequence[str],
    program: str | None,
    from_entry: int | None,
    until_end: bool,
    as_json: bool,
) -> Exit:
    """Print a line for each commit, failure, fence, release and delete of a run, as it happens.

    Reads only, every one or two seconds, until Ctrl-C. The run need not exist yet. Ends with 1 where the owner
    died (--until-end) or a CMD failed, and where the log is damaged.
    """
    ended = Exit.OK
    with RunWatcher(
        uri, from_entry=from_entry, until_end=until_end, storage_options=storage_options
    ) as watcher:
        say(f"ckptfs watch: {place_text(watcher.root)}")
        for event in watcher:
            is_death = event.event is EventKind.FAILURE and event.number is None
            if is_death and until_end:
                ended = Exit.NO
            if kinds and event.event.value not in kinds:
                continue
            document = to_json(_event_document(event))
            click.echo(json.dumps(document) if as_json else _event_line(event))
            if program is not None and not _run_program(program, document):
                ended = Exit.NO
    return ended


def _event_line(event: RunEvent) -> str:
    who = _writer(event.stamp)
    line = f"{event.stamp.at or '-':20}  {event.event.value:7}  {event.what}"
    return printable(f"{line}  by {who}" if who else line)


def _run_program(program: str, document: dict[str, Any]) -> bool:
    """Run ``program`` by the shell, with the event in its environment; False if it failed."""
    fields = {name: value for name, value in document.items() if value is not None}
    values = {f"CKPTFS_{name.upper()}": str(value) for name, value in fields.items()}
    # Any writer can put any text into a log: it is only a value of a variable, never shell input.
    done = subprocess.run(  # noqa: S602
        program,
        shell=True,
        check=False,
        env={**os.environ, **values},
        input=json.dumps(document) + "\n",
        text=True,
        stdout=_STDERR,  # standard output is for the events alone
    )
    if done.returncode:
        say(f"ckptfs watch: the program ended with {done.returncode} at {document['what']}")
    return not done.returncode


def _event_document(event: RunEvent) -> _EventDocument:
    stamp = event.stamp
    return _EventDocument(
        event=event.event,
        number=event.number,
        at=stamp.at or None,
        host=stamp.host or None,
        pid=stamp.pid or None,
        rank=stamp.rank,
        what=event.what,
        uri=event.uri,
        name=event.name,
        step=event.step,
        kind=event.kind,
        save_id=event.save_id,
        generation=event.generation,
    )
