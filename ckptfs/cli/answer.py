"""What a command returns, and how it is printed.

    Answer(document, show, exit)     document: plain JSON values; show: draws it for a person

With ``--json`` standard output gets one JSON document and nothing else; whatever is said on the way
(progress, warnings) goes to standard error. An error is a document too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.exits import Exit
from ckptfs.errors import CkptfsError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Answer", "error_document", "print_answer", "print_error", "table"]

_PIPE_WIDTH = 1 << 20  # into a pipe nothing is wrapped or cut: the next program wants whole lines


@dataclass(frozen=True, slots=True)
class Answer:
    """document: what ``--json`` prints. show: prints the same for a person. exit: the verdict."""

    document: Mapping[str, Any]
    show: Callable[[Console], None]
    exit: Exit = Exit.OK


def print_answer(name: str, answer: Answer, *, as_json: bool) -> None:
    """The answer on standard output."""
    if as_json:
        click.echo(json.dumps({"command": name, **answer.document}, indent=2))
        return
    answer.show(_console())


def print_error(name: str, error: CkptfsError, *, as_json: bool) -> None:
    """An error on standard error, and with --json also as the document on standard output."""
    if as_json:
        click.echo(json.dumps({"command": name, "error": error_document(error)}, indent=2))
    where = f" [{error.uri}]" if error.uri else ""
    click.echo(f"ckptfs {name}: {error.message}{where}", err=True)
    if error.hint:
        click.echo(f"  hint: {error.hint}", err=True)


def error_document(error: CkptfsError) -> dict[str, Any]:
    """The error as JSON values."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "uri": error.uri,
        "hint": error.hint,
        "outcome": error.outcome,
    }


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns a person can read and ``awk`` can split; a name that ends in ``>`` is set right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.endswith(">")
        drawn.add_column(
            column.rstrip(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=not right,
        )
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


def _console() -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
