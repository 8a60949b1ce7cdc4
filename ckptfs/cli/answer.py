"""What a command returns, and how it is printed.

    Answer(document, show, exit)     document: plain JSON values; show: draws it for a person

Names and texts that a checkpoint brings are anybody's: ``say``, ``table`` and the console that ``show`` draws
on escape what would change a terminal or look like further lines (``printable``).

With ``--json`` standard output gets one JSON document and nothing else; whatever is said on the way
(progress, warnings) goes to standard error. An error is a document too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.exits import Exit
from ckptfs.errors import CkptfsError
from ckptfs.progress import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Answer", "error_document", "hint_text", "print_answer", "print_error", "say", "table"]

# The library's hints name its calls; whoever reads them at a terminal has the commands.
_COMMANDS = (
    (r"call list_checkpoints\(\) on its parent", "run ckptfs ls on its parent"),
    (r"see steps or list_checkpoints\(\) for what exists", "run ckptfs ls to see what exists"),
    (r"latest\(\) and the next save show", "ckptfs latest shows"),
    (r"the next save or prepare_run(?:\(\))? ", "the next job of the run "),
    (r"claim it again with prepare_run\(\)", "start its job again"),
    (r"call prepare_run\(\) to (settle|clean)", r"run ckptfs gc --delete to \1"),
    (r'\bor if_exists="replace"', "or --overwrite"),
    (r'ckptfs\.save\(\.\.\., if_exists="replace"\)', "--overwrite where the command has it"),
    (r', or pass takeover="force"', ""),
    (
        r'(, or|,)? pass unlogged="ignore"( to a call that takes the newest| to continue with [^,;]+)?',
        "",
    ),
    (r'load with verify="off"( to read it unverified)?', "a load in Python can read it unverified"),
    (r" or call prepare_run\(\)", " or start a job of the run"),
    (r"storage_options key= and secret= or profile=", "-o key= and -o secret=, or -o profile="),
    (r"storage_options=\{\"fo\": (\"[^\"]*\")\}", r"-o fo=\1"),
    (r"\bin storage_options\b", "with -o"),
    (
        r"; ckptfs\.load\(state, uri\) loads this checkpoint",
        "; ckptfs inspect shows this checkpoint",
    ),
)
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


def print_error(name: str, error: CkptfsError, *, as_json: bool, indent: int | None = 2) -> None:
    """An error on standard error, and with --json also as the document on standard output."""
    if as_json:
        document = {"command": name, "error": error_document(error)}
        click.echo(json.dumps(document, indent=indent))
    where = f" [{error.uri}]" if error.uri else ""
    say(f"ckptfs {name}: {error.message}{where}")
    if error.hint:
        say(f"  hint: {hint_text(error.hint)}")


def say(text: str) -> None:
    """One line on standard error."""
    click.echo(printable(text), err=True)


def hint_text(hint: str) -> str:
    """A hint of the library in the words of the command line. Pure."""
    for call, command in _COMMANDS:
        hint = re.sub(call, command, hint)
    return hint


def error_document(error: CkptfsError) -> dict[str, Any]:
    """The error as JSON values."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "uri": error.uri,
        "hint": None if error.hint is None else hint_text(error.hint),
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
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    console.print(drawn)


def _console() -> Console:
    from rich.console import Console
    from rich.text import Text

    class Escaping(Console):
        """Each text that is printed is one line, and changes nothing in the terminal."""

        def print(self, *objects: Any, **settings: Any) -> None:
            for one in objects:
                if isinstance(one, Text):
                    one.plain = printable(one.plain)
            shown = (printable(one) if isinstance(one, str) else one for one in objects)
            super().print(*shown, **settings)

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Escaping(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
