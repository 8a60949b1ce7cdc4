"""``ckptfs ls``, ``latest``, ``log`` and ``watch``: what a run holds, and what happened in it.

    ckptfs ls s3://bucket/run         its checkpoints; the runs below a directory
    ckptfs latest s3://bucket/run     the URI of the newest committed checkpoint
    ckptfs log s3://bucket/run        the run log, whole
    ckptfs watch s3://bucket/run      the run log as it grows

They read only, and import no torch, so that they answer at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptfs.cli.options import parse_duration, storage_options
from ckptfs.cli.output import (
    OMITTED,
    CommandResult,
    ErrorDocument,
    Exit,
    Omitted,
    command,
    error_document,
    exit_of,
    place_text,
    print_error,
    say,
    stream_command,
    table,
    to_json,
)
from ckptfs.commit.catalog.catalog import Origin
from ckptfs.commit.log.entries import Kind, Stamp
from ckptfs.errors import CkptfsError, NotFoundError
from ckptfs.progress import printable
from ckptfs.text import age_text, size_text
from ckptfs.tools.lines import Checkpoint, Hold, Holding, Run, Sort, State, age_s
from ckptfs.tools.listing import File, OneOf, RunFound, Runs, Wanted, look_at, newest
from ckptfs.tools.runlog import Condition, EventKind, Line, RunEvent, RunWatcher, read_log
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["latest", "log", "ls", "watch"]

Place = Run | OneOf | Runs
_STDERR = 2
_KINDS = click.Choice([kind.value for kind in Kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckpointDocument:
    name: str
    uri: Uri
    state: State
    step: int | None
    kind: Kind | None
    save_id: str | None
    created_at: str | None
    age_s: float | None
    size_bytes: int | None
    files: int | None
    ranks: int | None
    parts: Sequence[str]
    pinned: bool
    failure: bool
    origin: Origin | None
    generation: int | None
    domains: Sequence[str]
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnerDocument:
    hold: Hold
    generation: int
    host: str
    pid: int
    job: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedPlaceDocument:
    type: Literal["error"] = "error"
    uri: str | None
    error: ErrorDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunPlaceDocument:
    type: Literal["run"] = "run"
    uri: Uri
    owner: _OwnerDocument
    checkpoints: Sequence[_CheckpointDocument]
    withheld: int
    notes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnePlaceDocument:
    type: Literal["checkpoint"] = "checkpoint"
    uri: Uri
    owner: _OwnerDocument
    checkpoints: Sequence[_CheckpointDocument]
    files: Sequence[File] | Omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunFoundDocument:
    uri: Uri
    owner: _OwnerDocument | None
    checkpoints: int
    latest: str | None
    step: int | None
    created_at: str | None
    age_s: float | None
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunsPlaceDocument:
    type: Literal["runs"] = "runs"
    uri: Uri
    runs: Sequence[_RunFoundDocument]


_PlaceDocument = _FailedPlaceDocument | _RunPlaceDocument | _OnePlaceDocument | _RunsPlaceDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class _LsDocument:
    places: Sequence[_PlaceDocument]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatestDocument:
    uri: Uri | None
    checkpoint: _CheckpointDocument | None
    age_s: float | None
    max_age_s: float | None
    why: str | None
    notes: Sequence[str]


@command("ls", answers=(_LsDocument,))
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Show history too: deleted, aborted..."
)
@click.option("--files", is_flag=True, help="Show the files of a checkpoint.")
@click.option(
    "--kind", "kinds", type=_KINDS, multiple=True, help="Show only this kind; repeatable."
)
@click.option("--sort", type=click.Choice([sort.value for sort in Sort]), default=Sort.COMMIT.value)
@click.option("--limit", type=click.IntRange(min=1), help="Show only the last N.")
@storage_options()
def ls(
    uris: Sequence[str],
    storage_options: dict[str, Any],
    kinds: Sequence[str],
    sort: str,
    **wanted: Any,
) -> CommandResult:
    """List the checkpoints of a run, one checkpoint, or the runs below a directory.

    Reads only, and only one small file of each checkpoint. Run ckptfs verify to check the other files.
    """
    ask = Wanted(kinds=tuple(Kind(kind) for kind in kinds), sort=Sort(sort), **wanted)
    found: list[tuple[str, Place | CkptfsError]] = []
    for uri in uris:
        try:
            found.append((uri, look_at(uri, ask, storage_options)))
        except CkptfsError as error:
            if len(uris) == 1:
                raise
            found.append((uri, error))
    failed = [place for _, place in found if isinstance(place, CkptfsError)]

    def show(console: Console) -> None:
        for number, (_, place) in enumerate(found):
            if number:
                console.print()
            if isinstance(place, CkptfsError):
                print_error("ls", place, as_json=False)
            else:
                _show(console, place)

    document = _LsDocument(places=[_document(place, files=ask.files) for _, place in found])
    return CommandResult(document, show, exit_of(failed[0]) if failed else Exit.OK)


@command("latest", answers=(_LatestDocument,))
@click.argument("uri")
@click.option("--kind", type=_KINDS, default=Kind.CHECKPOINT.value, show_default=True)
@click.option(
    "--max-age", metavar="AGE", help="Exit 1 if the newest checkpoint is older: 30m, 6h, 2d."
)
@storage_options()
def latest(
    uri: str, storage_options: dict[str, Any], kind: str, max_age: str | None
) -> CommandResult:
    """Print the URI of the newest committed checkpoint: by commit, never by the largest step.

    Ends with 1 where there is none, or where it is older than --max-age.
    """
    try:
        limit_s = None if max_age is None else parse_duration(max_age)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--max-age") from error
    result = newest(uri, Kind(kind), storage_options)
    found = result.checkpoint
    age = None if found is None else age_s(found.created_at)
    why = ""
    if found is None:
        why = f"no committed {kind} there"
    elif limit_s is not None and age is None:
        why = f"{found.name} does not say when it was made"
    elif limit_s is not None and age is not None and age > limit_s:
        why = f"{found.name} is {age_text(age)} old, more than {max_age}"

    def show(console: Console) -> None:
        if found is not None:
            console.print(place_text(found.uri), soft_wrap=True)
        for note in (*result.notes, why):
            if note:
                say(f"ckptfs latest: {note}")

    document = _LatestDocument(
        uri=None if found is None else found.uri,
        checkpoint=None if found is None else _checkpoint_document(found),
        age_s=age,
        max_age_s=limit_s,
        why=why or None,
        notes=result.notes,
    )
    return CommandResult(document, show, Exit.NO if why else Exit.OK)


# -- documents --------------------------------------------------------------------------------


def _checkpoint_document(line: Checkpoint) -> _CheckpointDocument:
    return _CheckpointDocument(
        name=line.name,
        uri=line.uri,
        state=line.state,
        step=line.step,
        kind=line.kind,
        save_id=line.save_id,
        created_at=line.created_at,
        age_s=age_s(line.created_at),
        size_bytes=line.size_bytes,
        files=line.files,
        ranks=line.ranks,
        parts=line.parts,
        pinned=line.pinned,
        failure=line.failure,
        origin=line.origin,
        generation=line.generation,
        domains=line.domains,
        note=line.note or None,
    )


def _owner(holder: Holding) -> _OwnerDocument:
    return _OwnerDocument(
        hold=holder.hold,
        generation=holder.generation,
        host=holder.host,
        pid=holder.pid,
        job=holder.job,
    )


def _document(place: Place | CkptfsError, *, files: bool) -> _PlaceDocument:
    match place:
        case CkptfsError():
            return _FailedPlaceDocument(uri=place.uri, error=error_document(place))
        case Run():
            return _RunPlaceDocument(
                uri=place.uri,
                owner=_owner(place.holding),
                checkpoints=[_checkpoint_document(line) for line in place.checkpoints],
                withheld=place.withheld,
                notes=place.notes,
            )
        case OneOf():
            return _OnePlaceDocument(
                uri=place.uri,
                owner=_owner(place.holding),
                checkpoints=[_checkpoint_document(line) for line in place.lines],
                files=(place.files or ()) if files else OMITTED,
            )
        case Runs():
            return _RunsPlaceDocument(uri=place.uri, runs=[_run_document(r) for r in place.runs])


def _run_document(run: RunFound) -> _RunFoundDocument:
    return _RunFoundDocument(
        uri=run.uri,
        owner=None if run.holding is None else _owner(run.holding),
        checkpoints=run.checkpoints,
        latest=run.latest,
        step=run.step,
        created_at=run.created_at,
        age_s=age_s(run.created_at),
        trouble=run.trouble or None,
    )


# -- for a person -----------------------------------------------------------------------------


def _show(console: Console, place: Place) -> None:
    match place:
        case Run():
            console.print(f"{place_text(place.uri)}: {place.holding.told}", soft_wrap=True)
            _show_lines(console, place.checkpoints)
            if not place.checkpoints:
                console.print("no checkpoints")
            if place.withheld:
                console.print(f"{place.withheld} more with -a: deleted, aborted or replaced")
            for note in place.notes:
                console.print(f"note: {note}", soft_wrap=True)
        case OneOf():
            console.print(f"{place_text(place.uri.parent)}: {place.holding.told}", soft_wrap=True)
            _show_lines(console, place.lines)
            if place.files is not None:
                console.print()
                sizes = [(file.path, size_text(file.size_bytes)) for file in place.files]
                table(console, ("FILE", "SIZE>"), sizes)
        case Runs():
            rows = [
                (
                    place_text(run.uri),
                    str(run.checkpoints),
                    run.latest or "-",
                    age_text(age_s(run.created_at)),
                    run.trouble or (run.holding.told if run.holding else ""),
                )
                for run in place.runs
            ]
            table(console, ("RUN", "CHECKPOINTS>", "LATEST", "AGE>", "OWNER"), rows)


_Column = tuple[str, Callable[[Checkpoint], str]]
_ALWAYS: tuple[_Column, ...] = (
    ("NAME", lambda one: one.name),
    ("STEP>", lambda one: "-" if one.step is None else str(one.step)),
    ("STATE", lambda one: one.state.value),
    ("KIND", lambda one: "-" if one.kind is None else one.kind.value),
    ("AGE>", lambda one: age_text(age_s(one.created_at))),
    ("SIZE>", lambda one: size_text(one.size_bytes)),
    ("RANKS>", lambda one: "-" if one.ranks is None else str(one.ranks)),
)
# Columns that are shown only if some line has a value for them.
_SOMETIMES: tuple[_Column, ...] = (
    ("PARTS", lambda one: ",".join(one.parts)),
    ("FROM", lambda one: "" if one.origin in (None, "log") else str(one.origin.value)),
    ("NOTE", lambda one: "; ".join(_remarks(one))),
)


def _remarks(line: Checkpoint) -> list[str]:
    remarks = ["pinned"] if line.pinned else []
    remarks += ["saved by a failing run"] if line.failure else []
    return [*remarks, line.note] if line.note else remarks


def _show_lines(console: Console, lines: Sequence[Checkpoint]) -> None:
    if not lines:
        return
    columns = [*_ALWAYS, *(c for c in _SOMETIMES if any(c[1](line) for line in lines))]
    names = [name for name, _ in columns]
    table(console, names, [[tell(line) for _, tell in columns] for line in lines])


# -- the log ------------------------------------------------------------------------


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
) -> CommandResult:
    """Show who saved, fenced and deleted what, when, from where: the run log, oldest entry first.

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
            table(console, ("N>", "WHEN", "WHO", "WHAT"), [_log_row(line) for line in lines])
        else:
            console.print("no such entries")

    document = _LogDocument(entries=[_line_document(line) for line in lines], broken=is_broken)
    return CommandResult(document, show, Exit.NO if is_broken else Exit.OK)


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


def _log_row(line: Line) -> tuple[str, str, str, str]:
    stamp = line.stamp
    why = f"  [{line.condition.value}: {line.why}]" if line.why else ""
    return str(line.number), stamp.at or "-", _writer(stamp) or "-", f"{line.what}{why}"


def _writer(stamp: Stamp) -> str:
    pid = f" pid {stamp.pid}" if stamp.pid else ""
    rank = f" rank {stamp.rank}" if stamp.rank is not None else ""
    return f"{stamp.host}{pid}{rank}"


def _line_document(line: Line) -> _LineDocument:
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
