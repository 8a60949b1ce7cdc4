"""``ckptfs gc``: show and remove what dead jobs left in a run.

    ckptfs gc s3://bucket/run                   shows it, changes nothing
    ckptfs gc s3://bucket/run --delete          asks and removes it; without a terminal it needs --yes
    ckptfs gc s3://bucket/runs --recursive      does the same for every run below

``ckptfs.tools.collecting`` has the rules for what is dead, and for when nothing is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click

from ckptfs.cli.options import parse_duration, storage_options
from ckptfs.cli.output import (
    Answer,
    ErrorDocument,
    Exit,
    command,
    error_document,
    exit_of,
    say,
    table,
)
from ckptfs.errors import CkptfsError
from ckptfs.text import age_text, size_text
from ckptfs.tools.collecting import Collected, collect, look_for_debris, runs_at
from ckptfs.tools.debris import Debris, Fate, Found
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["gc"]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result for one run, or its error."""

    uri: Uri
    collected: Collected | None = None
    error: CkptfsError | None = None


def _duration(_: click.Context, __: click.Parameter, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundDocument:
    kind: Debris
    name: str
    uri: Uri
    files: int | None
    size_bytes: int | None
    age_s: float | None
    fate: Fate
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunDocument:
    uri: Uri
    holding: str
    found: Sequence[_FoundDocument]
    removed: Sequence[Uri]
    left: Sequence[Uri]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedRunDocument:
    uri: Uri
    error: ErrorDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class _GcDocument:
    dry_run: bool
    runs: Sequence[_RunDocument | _FailedRunDocument]
    found: int
    going: int
    going_bytes: int
    removed: int
    removed_bytes: int


@command("gc", answers=(_GcDocument,))
@click.argument("uri")
@click.option(
    "--delete", "delete", is_flag=True, help="Remove it; without this option it is only shown."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--older-than",
    "older_than_s",
    metavar="AGE",
    default="1d",
    show_default=True,
    callback=_duration,
    help="Leave alone what may be alive and was written to since: 90s, 30m, 1d.",
)
@click.option("-r", "--recursive", is_flag=True, help="Every run below URI.")
@storage_options()
def gc(
    uri: str,
    *,
    delete: bool,
    yes: bool,
    older_than_s: float,
    recursive: bool,
    storage_options: dict[str, Any],
) -> Answer:
    """What dead jobs left in the run at URI: attempts, deleted saves, trash, temporary files, uploads.

    Shows it, with bytes, age and why. With --delete it takes the run as a new job does, removes it, and
    leaves; it asks first, and without a terminal it needs --yes. It does not touch committed checkpoints,
    files of others, and a run with a living owner.
    """
    if delete and not yes and not sys.stdin.isatty():
        # Before anything is read, so that a cron job fails at its first run, not at the first debris.
        raise click.UsageError("not a terminal: pass --yes to delete without confirmation")
    look = partial(look_for_debris, older_than_s=older_than_s, storage_options=storage_options)
    if not recursive:
        outcome = _Outcome(Uri.parse(uri), look(uri))
        outcomes = [outcome]
    else:
        outcomes = [_tried(look, run) for run in runs_at(uri, storage_options)]
    if not delete:
        return _answer(outcomes, delete=False)
    if not _sure(outcomes, yes=yes):
        return _answer(outcomes, delete=False, exit_=Exit.NO)
    act = partial(collect, older_than_s=older_than_s, storage_options=storage_options)
    if not recursive:
        return _answer([_Outcome(outcomes[0].uri, act(uri))], delete=True)
    done = [one if one.error is not None else _tried(act, one.uri) for one in outcomes]
    return _answer(done, delete=True)


def _tried(act: Callable[[Uri], Collected], run: Uri) -> _Outcome:
    """Act on one of several runs. Its error is kept, so that the other runs are still done."""
    try:
        return _Outcome(run, act(run))
    except CkptfsError as error:
        return _Outcome(run, error=error)


def _sure(outcomes: Sequence[_Outcome], *, yes: bool) -> bool:
    removable = [one for o in outcomes if o.collected is not None for one in o.collected.going]
    if yes or not removable:
        return True
    for one in removable:
        say(f"  {one.debris}: {one.uri}")
    question = f"Remove these {len(removable)} ({size_text(_size_bytes(removable))})?"
    return click.confirm(question, err=True)


def _size_bytes(found: Sequence[Found]) -> int:
    return sum(one.size_bytes or 0 for one in found)


# -- the answer -------------------------------------------------------------------------


def _answer(outcomes: Sequence[_Outcome], *, delete: bool, exit_: Exit = Exit.OK) -> Answer:
    found = [one for o in outcomes if o.collected is not None for one in o.collected.found]
    removable = [one for one in found if one.fate is Fate.GOES]
    removed = [one for o in outcomes if o.collected is not None for one in o.collected.removed]
    document = _GcDocument(
        dry_run=not delete,
        runs=[_run_document(one) for one in outcomes],
        found=len(found),
        going=len(removable),
        going_bytes=_size_bytes(removable),
        removed=len(removed),
        removed_bytes=_size_bytes(removed),
    )
    for one in outcomes:
        if one.error is not None:
            exit_ = exit_ or exit_of(one.error)
        elif one.collected is not None and delete and one.collected.left:
            exit_ = exit_ or Exit.NO
    return Answer(document, lambda console: _show(console, outcomes, delete=delete), exit_)


def _run_document(outcome: _Outcome) -> _RunDocument | _FailedRunDocument:
    one = outcome.collected
    if one is None:
        error = error_document(cast("CkptfsError", outcome.error))  # one of the two is set
        return _FailedRunDocument(uri=outcome.uri, error=error)
    return _RunDocument(
        uri=one.uri,
        holding=one.holding.told,
        found=[_found_document(found) for found in one.found],
        removed=[found.uri for found in one.removed],
        left=[found.uri for found in one.left],
        notes=one.notes,
    )


def _found_document(one: Found) -> _FoundDocument:
    return _FoundDocument(
        kind=one.debris,
        name=one.name,
        uri=one.uri,
        files=one.files,
        size_bytes=one.size_bytes,
        age_s=None if one.age_s is None else round(one.age_s, 1),
        fate=one.fate,
        why=one.why,
    )


_COLUMNS = ("WHAT", "WHERE", "FILES>", "SIZE>", "AGE>", "FATE", "WHY")


def _show(console: Console, outcomes: Sequence[_Outcome], *, delete: bool) -> None:
    for outcome in outcomes:
        if len(outcomes) > 1:
            console.print(str(outcome.uri), soft_wrap=True)
        if outcome.error is not None:
            console.print(f"{outcome.error.message}", soft_wrap=True)
            continue
        if outcome.collected is not None:
            _show_run(console, outcome.collected, delete=delete)
    if not outcomes:
        console.print("no runs there")


def _show_run(console: Console, one: Collected, *, delete: bool) -> None:
    gone = {(found.debris, found.uri) for found in one.removed}
    if one.found:
        rows = [_row(found, one.uri, gone=(found.debris, found.uri) in gone) for found in one.found]
        table(console, _COLUMNS, rows)
    for note in one.notes:
        console.print(note, soft_wrap=True)
    count = len(one.going)
    if delete and count:
        text = f"removed {len(one.removed)} of {count}: {size_text(_size_bytes(one.removed))}"
    elif count:
        text = f"{count} would go: {size_text(_size_bytes(one.going))}; --delete removes them"
    elif one.found:
        text = "nothing is to go now"
    else:
        text = "nothing is left over"
    console.print(text, soft_wrap=True)


def _row(one: Found, root: Uri, *, gone: bool) -> tuple[str, ...]:
    where = str(one.uri).removeprefix(f"{root}/")
    files = "-" if one.files is None else str(one.files)
    outcome = "gone" if gone else one.fate.value
    return (
        one.debris.value,
        where,
        files,
        size_text(one.size_bytes),
        age_text(one.age_s),
        outcome,
        one.why,
    )
