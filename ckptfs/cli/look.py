"""``ckptfs ls`` and ``ckptfs latest``. No torch: they answer at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import (
    Answer,
    Exit,
    command,
    error_document,
    exit_of,
    print_error,
    say,
    table,
)
from ckptfs.cli.text import age_text, parse_duration, place_text, size_text
from ckptfs.commit.log.entries import Kind
from ckptfs.errors import CkptfsError
from ckptfs.tools.lines import Checkpoint, Holding, Run, Sort, age_s
from ckptfs.tools.listing import OneOf, Runs, Wanted, look_at, newest

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["latest", "ls"]

Place = Run | OneOf | Runs
_KINDS = click.Choice([kind.value for kind in Kind])


@command("ls")
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

    document = {"places": [_document(place, files=ask.files) for _, place in found]}
    return Answer(document, show, exit_of(failed[0]) if failed else Exit.OK)


@command("latest")
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
    looked = newest(uri, Kind(kind), storage_options)
    found = looked.checkpoint
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
        for note in (*looked.notes, why):
            if note:
                say(f"ckptfs latest: {note}")

    document = {
        "uri": None if found is None else str(found.uri),
        "checkpoint": None if found is None else line_document(found),
        "age_s": age,
        "max_age_s": limit_s,
        "why": why or None,
        "notes": list(looked.notes),
    }
    return Answer(document, show, Exit.NO if why else Exit.OK)


# -- documents --------------------------------------------------------------------------------


def line_document(line: Checkpoint) -> dict[str, Any]:
    """One checkpoint as JSON values."""
    return {
        "name": line.name,
        "uri": str(line.uri),
        "state": line.state.value,
        "step": line.step,
        "kind": None if line.kind is None else line.kind.value,
        "save_id": line.save_id,
        "created_at": line.created_at,
        "age_s": age_s(line.created_at),
        "size_bytes": line.size_bytes,
        "files": line.files,
        "ranks": line.ranks,
        "parts": list(line.parts),
        "pinned": line.pinned,
        "failure": line.failure,
        "origin": None if line.origin is None else line.origin.value,
        "generation": line.generation,
        "domains": list(line.domains),
        "note": line.note or None,
    }


def _owner(holding: Holding) -> dict[str, Any]:
    return {
        "hold": holding.hold.value,
        "generation": holding.generation,
        "host": holding.host,
        "pid": holding.pid,
        "job": holding.job,
    }


def _document(place: Place | CkptfsError, *, files: bool) -> dict[str, Any]:
    match place:
        case CkptfsError():
            return {"type": "error", "uri": place.uri, "error": error_document(place)}
        case Run():
            return {
                "type": "run",
                "uri": str(place.uri),
                "owner": _owner(place.holding),
                "checkpoints": [line_document(line) for line in place.checkpoints],
                "withheld": place.withheld,
                "notes": list(place.notes),
            }
        case OneOf():
            told = [
                {"path": f.path, "size_bytes": f.size_bytes, "domain": f.domain}
                for f in place.files or ()
            ]
            return {
                "type": "checkpoint",
                "uri": str(place.uri),
                "owner": _owner(place.holding),
                "checkpoints": [line_document(line) for line in place.lines],
            } | ({"files": told} if files else {})
        case Runs():
            return {
                "type": "runs",
                "uri": str(place.uri),
                "runs": [
                    {
                        "uri": str(run.uri),
                        "owner": None if run.holding is None else _owner(run.holding),
                        "checkpoints": run.checkpoints,
                        "latest": run.latest,
                        "step": run.step,
                        "created_at": run.created_at,
                        "age_s": age_s(run.created_at),
                        "trouble": run.trouble or None,
                    }
                    for run in place.runs
                ],
            }


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
# Only where some line has something to say in it.
_SOMETIMES: tuple[_Column, ...] = (
    ("PARTS", lambda one: ",".join(one.parts)),
    ("FROM", lambda one: "" if one.origin in (None, "log") else str(one.origin.value)),
    ("NOTE", lambda one: "; ".join(_remarks(one))),
)


def _remarks(line: Checkpoint) -> list[str]:
    told = ["pinned"] if line.pinned else []
    told += ["saved by a failing run"] if line.failure else []
    return [*told, line.note] if line.note else told


def _show_lines(console: Console, lines: Sequence[Checkpoint]) -> None:
    if not lines:
        return
    columns = [*_ALWAYS, *(c for c in _SOMETIMES if any(c[1](line) for line in lines))]
    names = [name for name, _ in columns]
    table(console, names, [[tell(line) for _, tell in columns] for line in lines])
