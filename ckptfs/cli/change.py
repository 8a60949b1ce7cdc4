"""``ckptfs rm``, ``pin``, ``unpin`` and ``gc``: the commands that change a run. No torch.

    ckptfs rm s3://bucket/run/step_100          deletes one checkpoint, and asks before
    ckptfs pin s3://bucket/run/step_100         retention leaves it alone
    ckptfs gc s3://bucket/run                   shows what dead jobs left in a run, changes nothing
    ckptfs gc s3://bucket/run --delete          asks and removes it; without a terminal it needs --yes
    ckptfs gc s3://bucket/runs --recursive      does the same for every run below

``ckptfs.tools.collecting`` has the rules for what is dead, and for when nothing is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as bound
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

from ckptfs.cli.options import parse_duration, storage_options
from ckptfs.cli.output import (
    CommandResult,
    ErrorDocument,
    Exit,
    command,
    error_document,
    exit_of,
    place_text,
    print_error,
    say,
    table,
)
from ckptfs.errors import CkptfsError
from ckptfs.text import age_text, size_text
from ckptfs.tools.changing import Pinned, committed_in, doomed_at, remove, set_pin
from ckptfs.tools.collecting import Collected, collect, look_for_debris, runs_at
from ckptfs.tools.debris import Debris, Fate, Found
from ckptfs.uri import Uri, mask_credentials

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["gc", "pin", "rm", "unpin"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemovedDocument:
    uri: str
    deleted: Literal[True] = True
    elsewhere: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PinnedDocument:
    uri: str
    save_id: str
    pinned: bool
    changed: bool
    elsewhere: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedCheckpointDocument:
    uri: str
    error: ErrorDocument


@dataclass(frozen=True, slots=True)
class _RmDocument:
    checkpoints: Sequence[_RemovedDocument | _FailedCheckpointDocument]


@dataclass(frozen=True, slots=True)
class _PinDocument:
    checkpoints: Sequence[_PinnedDocument | _FailedCheckpointDocument]


@command("rm", answers=(_RmDocument,))
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--partial",
    is_flag=True,
    help="Delete what is here of one that is also on the disks of other nodes.",
)
@click.option("--all", "all_of", is_flag=True, help="URI is a run: all of its checkpoints.")
@storage_options()
def rm(
    uris: Sequence[str],
    storage_options: dict[str, Any],
    *,
    yes: bool,
    partial: bool,
    all_of: bool,
) -> CommandResult:
    """Delete checkpoints: first in the log, then their bytes. Files of others stay.

    Exit codes: 2 one is pinned, or part of it cannot be reached from here; 3 no log knows it; 6 a job holds the
    run, and its own retention deletes.
    """
    if all_of:
        uris = [one for run in uris for one in committed_in(run, storage_options)]
    for uri in uris:
        # Before anything is deleted: one wrong name stops the whole command.
        lines = doomed_at(uri, storage_options, partial=partial)
        if yes:
            continue
        size = sum(line.size_bytes or 0 for line in lines)
        if not sys.stdin.isatty():
            raise click.UsageError("not a terminal: pass --yes to delete without confirmation")
        click.confirm(
            f"delete {place_text(Uri.parse(uri))} ({size_text(size)})?", abort=True, err=True
        )
    return _each("rm", uris, bound(_remove, options=storage_options, partial=partial), _RmDocument)


def _remove(uri: str, options: dict[str, Any], *, partial: bool) -> tuple[_RemovedDocument, str]:
    done = remove(uri, options, partial=partial)
    text = f"deleted {place_text(done.uri)}"
    if done.elsewhere:
        text += (
            f"; its data in domains {', '.join(done.elsewhere)} was unreachable and was not deleted"
        )
    return _RemovedDocument(uri=mask_credentials(uri), elsewhere=done.elsewhere), text


@command("pin", answers=(_PinDocument,))
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@storage_options()
def pin(uris: Sequence[str], storage_options: dict[str, Any]) -> CommandResult:
    """Retention leaves a pinned checkpoint alone, until it is unpinned. Also while a job trains."""
    return _each("pin", uris, bound(_pin, options=storage_options, pinned=True), _PinDocument)


@command("unpin", answers=(_PinDocument,))
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@storage_options()
def unpin(uris: Sequence[str], storage_options: dict[str, Any]) -> CommandResult:
    """Retention may take it again, after the next commit of the run. Also while a job trains."""
    return _each("unpin", uris, bound(_pin, options=storage_options, pinned=False), _PinDocument)


def _pin(uri: str, options: dict[str, Any], *, pinned: bool) -> tuple[_PinnedDocument, str]:
    done: Pinned = set_pin(uri, pinned=pinned, storage_options=options)
    words = {
        (True, True): "is pinned",
        (True, False): "was pinned already",
        (False, True): "is unpinned",
        (False, False): "was not pinned",
    }
    text = f"{place_text(done.uri)} {words[pinned, done.changed]}"
    if done.elsewhere and not pinned:
        text += (
            f"; domains {', '.join(done.elsewhere)} were unreachable and may still have it pinned"
        )
    document = _PinnedDocument(
        uri=mask_credentials(uri),
        save_id=done.save_id,
        pinned=done.pinned,
        changed=done.changed,
        elsewhere=done.elsewhere,
    )
    return document, text


def _each(
    name: str,
    uris: Sequence[str],
    do: Callable[[str], tuple[_T, str]],
    document_of: Callable[[Sequence[_T | _FailedCheckpointDocument]], object],
) -> CommandResult:
    """Do each URI in turn. A failure does not stop the others; the first one sets the exit code."""
    documents: list[_T | _FailedCheckpointDocument] = []
    done: list[str | CkptfsError] = []
    for uri in uris:
        try:
            document, text = do(uri)
        except CkptfsError as error:
            if len(uris) == 1:
                raise
            failure = _FailedCheckpointDocument(
                uri=mask_credentials(uri), error=error_document(error)
            )
            documents.append(failure)
            done.append(error)
        else:
            documents.append(document)
            done.append(text)
    failed = [one for one in done if isinstance(one, CkptfsError)]

    def show(console: Console) -> None:
        for one in done:
            if isinstance(one, CkptfsError):
                print_error(name, one, as_json=False)
            else:
                console.print(one, soft_wrap=True)

    return CommandResult(document_of(documents), show, exit_of(failed[0]) if failed else Exit.OK)


# -- gc -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GcOutcome:
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
    "--delete",
    "delete",
    is_flag=True,
    help="Remove what was found; without this option it is only shown.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--older-than",
    "older_than_s",
    metavar="AGE",
    default="1d",
    show_default=True,
    callback=_duration,
    help="Keep what was written to within this time and may be in use: 90s, 30m, 1d.",
)
@click.option("-r", "--recursive", is_flag=True, help="Include every run below URI.")
@storage_options()
def gc(
    uri: str,
    *,
    delete: bool,
    yes: bool,
    older_than_s: float,
    recursive: bool,
    storage_options: dict[str, Any],
) -> CommandResult:
    """Find what dead jobs left in the run at URI: attempts, deleted saves, trash, temporary files, uploads.

    Shows each with its size, its age and the reason. --delete claims the run as a new job does, removes what
    was found and releases the run. It asks first; without a terminal it needs --yes. Committed checkpoints,
    files of other programs and runs with a living owner are not touched.
    """
    if delete and not yes and not sys.stdin.isatty():
        # Before anything is read, so that a cron job fails at its first run, not at the first debris.
        raise click.UsageError("not a terminal: pass --yes to delete without confirmation")
    look = bound(look_for_debris, older_than_s=older_than_s, storage_options=storage_options)
    if not recursive:
        outcome = _GcOutcome(Uri.parse(uri), look(uri))
        outcomes = [outcome]
    else:
        outcomes = [_tried(look, run) for run in runs_at(uri, storage_options)]
    if not delete:
        return _gc_answer(outcomes, delete=False)
    if not _sure(outcomes, yes=yes):
        return _gc_answer(outcomes, delete=False, exit_=Exit.NO)
    act = bound(collect, older_than_s=older_than_s, storage_options=storage_options)
    if not recursive:
        return _gc_answer([_GcOutcome(outcomes[0].uri, act(uri))], delete=True)
    done = [one if one.error is not None else _tried(act, one.uri) for one in outcomes]
    return _gc_answer(done, delete=True)


def _tried(act: Callable[[Uri], Collected], run: Uri) -> _GcOutcome:
    """Act on one of several runs. Its error is kept, so that the other runs are still done."""
    try:
        return _GcOutcome(run, act(run))
    except CkptfsError as error:
        return _GcOutcome(run, error=error)


def _sure(outcomes: Sequence[_GcOutcome], *, yes: bool) -> bool:
    removable = [one for o in outcomes if o.collected is not None for one in o.collected.going]
    if yes or not removable:
        return True
    for one in removable:
        say(f"  {one.debris}: {one.uri}")
    question = f"Remove these {len(removable)} ({size_text(_size_bytes(removable))})?"
    return click.confirm(question, err=True)


def _size_bytes(found: Sequence[Found]) -> int:
    return sum(one.size_bytes or 0 for one in found)


# -- the answer of gc -------------------------------------------------------------------------


def _gc_answer(
    outcomes: Sequence[_GcOutcome], *, delete: bool, exit_: Exit = Exit.OK
) -> CommandResult:
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
    return CommandResult(
        document, lambda console: _show_gc(console, outcomes, delete=delete), exit_
    )


def _run_document(outcome: _GcOutcome) -> _RunDocument | _FailedRunDocument:
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


def _show_gc(console: Console, outcomes: Sequence[_GcOutcome], *, delete: bool) -> None:
    for outcome in outcomes:
        if len(outcomes) > 1:
            console.print(str(outcome.uri), soft_wrap=True)
        if outcome.error is not None:
            console.print(f"{outcome.error.message}", soft_wrap=True)
            continue
        if outcome.collected is not None:
            _show_run(console, outcome.collected, delete=delete)
    if not outcomes:
        console.print("no run was found there")


def _show_run(console: Console, one: Collected, *, delete: bool) -> None:
    gone = {(found.debris, found.uri) for found in one.removed}
    if one.found:
        rows = [
            _debris_row(found, one.uri, gone=(found.debris, found.uri) in gone)
            for found in one.found
        ]
        table(console, _COLUMNS, rows)
    for note in one.notes:
        console.print(note, soft_wrap=True)
    count = len(one.going)
    if delete and count:
        text = f"removed {len(one.removed)} of {count}: {size_text(_size_bytes(one.removed))}"
    elif count:
        text = f"{count} can be removed: {size_text(_size_bytes(one.going))}; pass --delete to remove them"
    elif one.found:
        text = "nothing to remove now"
    else:
        text = "nothing to remove"
    console.print(text, soft_wrap=True)


def _debris_row(one: Found, root: Uri, *, gone: bool) -> tuple[str, ...]:
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
