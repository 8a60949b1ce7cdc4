"""``ckptfs ls`` and ``ckptfs latest``. Without torch, so that they answer at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptfs.cli.options import parse_duration, storage_options
from ckptfs.cli.output import (
    OMITTED,
    Answer,
    ErrorDocument,
    Exit,
    Omitted,
    command,
    error_document,
    exit_of,
    place_text,
    print_error,
    say,
    table,
)
from ckptfs.commit.catalog.catalog import Origin
from ckptfs.commit.log.entries import Kind
from ckptfs.errors import CkptfsError
from ckptfs.text import age_text, size_text
from ckptfs.tools.lines import Checkpoint, Hold, Holding, Run, Sort, State, age_s
from ckptfs.tools.listing import File, OneOf, RunFound, Runs, Wanted, look_at, newest
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["latest", "ls"]

Place = Run | OneOf | Runs
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
) -> Answer:
    """What is there: the checkpoints of a run, one checkpoint, or the runs below a directory.

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
    return Answer(document, show, exit_of(failed[0]) if failed else Exit.OK)


@command("latest", answers=(_LatestDocument,))
@click.argument("uri")
@click.option("--kind", type=_KINDS, default=Kind.CHECKPOINT.value, show_default=True)
@click.option(
    "--max-age", metavar="AGE", help="Exit 1 if the newest checkpoint is older: 30m, 6h, 2d."
)
@storage_options()
def latest(uri: str, storage_options: dict[str, Any], kind: str, max_age: str | None) -> Answer:
    """The newest committed checkpoint: by commit, never by the largest step. Prints its URI.

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
    return Answer(document, show, Exit.NO if why else Exit.OK)


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


def _owner(holding: Holding) -> _OwnerDocument:
    return _OwnerDocument(
        hold=holding.hold,
        generation=holding.generation,
        host=holding.host,
        pid=holding.pid,
        job=holding.job,
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
