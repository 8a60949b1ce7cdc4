"""``ckptfs rm``, ``ckptfs pin`` and ``ckptfs unpin``. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as bound
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import (
    Answer,
    ErrorDocument,
    Exit,
    command,
    error_document,
    exit_of,
    place_text,
    print_error,
)
from ckptfs.errors import CkptfsError
from ckptfs.text import size_text
from ckptfs.tools.changing import Pinned, committed_in, doomed_at, remove, set_pin
from ckptfs.uri import Uri, mask_credentials

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["pin", "rm", "unpin"]

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
) -> Answer:
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
            f"; what lies in domains {', '.join(done.elsewhere)} was not reached and is there still"
        )
    return _RemovedDocument(uri=mask_credentials(uri), elsewhere=done.elsewhere), text


@command("pin", answers=(_PinDocument,))
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@storage_options()
def pin(uris: Sequence[str], storage_options: dict[str, Any]) -> Answer:
    """Retention leaves a pinned checkpoint alone, until it is unpinned. Also while a job trains."""
    return _each("pin", uris, bound(_pin, options=storage_options, pinned=True), _PinDocument)


@command("unpin", answers=(_PinDocument,))
@click.argument("uris", metavar="URI...", nargs=-1, required=True)
@storage_options()
def unpin(uris: Sequence[str], storage_options: dict[str, Any]) -> Answer:
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
        text += f"; on other nodes too? domains {', '.join(done.elsewhere)} were not reached"
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
) -> Answer:
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

    return Answer(document_of(documents), show, exit_of(failed[0]) if failed else Exit.OK)
