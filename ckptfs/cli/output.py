"""What all commands share: ``--json``, printed answers, errors as messages and exit codes.

    @command("ls")
    @click.argument("uri")
    @storage_options()
    def ls(uri: str, storage_options: dict[str, Any]) -> CommandResult: ...

    CommandResult(document, show, exit)    document: what --json prints; show: prints it for a person

    0  done, or yes                     4  not permitted, or no valid credentials
    1  no: damaged, too old, differs    5  the storage failed, or cannot do that
    2  wrong call                       6  another process has it: busy, fenced, taken
    3  not found                        7  unknown: it may have happened     130  Ctrl-C

There is one code for each thing that a script would do next. The codes are part of the interface:
docs/cli.md lists them, and they do not change.

The body of a command does its work and returns a ``CommandResult``; it does not print or exit. An error of
ckptfs ends the command with its code (see ``exit_of``). Any other exception is a bug and is not caught.

Under torchrun every rank runs a collective command (``bench``, ``cp``, ``doctor``): rank 0 prints, and
all ranks end with the same code. Other commands print whatever RANK says, because a training rank, or a
shell in its environment, may have started them.

Names and texts in a checkpoint can be anything. ``say``, ``table`` and the console that ``show`` prints
to escape what would change a terminal or look like more lines (``printable``).

With ``--json`` standard output gets one JSON document and nothing else; progress and warnings go to
standard error. An error is a document too. A document is a dataclass: a result of ``ckptfs.tools`` as it
is, or, if the JSON has other fields, a class in the command's module. ``to_json`` converts both to JSON
values. The JSON Schemas in docs/reference/json are made from the same classes, which ``answers`` of
``command`` names.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import click

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    CommitInDoubtError,
    FencedError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    Outcome,
    RunBusyError,
    StateError,
    StorageError,
    UriError,
)
from ckptfs.progress import printable
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

    from ckptfs.control.control import Control

__all__ = [
    "ANSWERS",
    "OMITTED",
    "CommandResult",
    "ErrorDocument",
    "Exit",
    "FailedDocument",
    "Omitted",
    "command",
    "error_document",
    "exit_of",
    "group_command",
    "hint_text",
    "outlive",
    "place_text",
    "print_answer",
    "print_error",
    "say",
    "stream_command",
    "table",
    "to_json",
]


class Omitted(Enum):
    """The type of ``OMITTED``, the value of fields that are left out of the JSON."""

    OMITTED = "omitted"


OMITTED = Omitted.OMITTED
# The classes of the --json documents of each command that was imported.
ANSWERS: dict[str, tuple[type, ...]] = {}


class Exit(IntEnum):
    """The exit codes of commands."""

    OK = 0
    NO = 1
    USAGE = 2
    NOT_FOUND = 3
    ACCESS = 4
    STORAGE = 5
    TAKEN = 6
    UNKNOWN = 7
    INTERRUPTED = 130


# The first that matches counts, so a class comes before those that it derives from.
_EXITS: tuple[tuple[type[CkptfsError], Exit], ...] = (
    (CommitInDoubtError, Exit.UNKNOWN),
    (AnswerLostError, Exit.UNKNOWN),
    (IncompleteCheckpointError, Exit.NO),
    (IntegrityError, Exit.NO),
    (ManifestError, Exit.NO),
    (NotFoundError, Exit.NOT_FOUND),
    (AccessError, Exit.ACCESS),
    (AlreadyExistsError, Exit.TAKEN),
    (CommitConflictError, Exit.TAKEN),
    (FencedError, Exit.TAKEN),
    (RunBusyError, Exit.TAKEN),
    (UriError, Exit.USAGE),
    (StateError, Exit.USAGE),
    (StorageError, Exit.STORAGE),
)


def exit_of(error: CkptfsError) -> Exit:
    """Return the exit code of an error; of a collective one, that of its first failed rank."""
    if isinstance(error, CollectiveError):
        # Make an error of each failure alone: it has the type of that failure.
        ones = (
            CollectiveError("", failures={r: error.failures[r]}) for r in sorted(error.failures)
        )
        code = next((code for one in ones if (code := _code_of(one)) is not None), None)
    else:
        code = _code_of(error)
    if code is not None:
        return code
    return Exit.UNKNOWN if error.outcome == "unknown" else Exit.STORAGE


def _code_of(error: CkptfsError) -> Exit | None:
    for kind, code in _EXITS:
        if isinstance(error, kind) or (isinstance(error, CollectiveError) and error.all_are(kind)):
            return code
    return None


# The library's hints name its functions; a user of the command line needs the commands.
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
_PIPE_WIDTH = 1 << 20  # in a pipe nothing is wrapped or cut: the next program needs whole lines


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer of a command.

    document: what ``--json`` prints, an instance of one of the command's ``answers``. show: prints the
    same for a person. exit: the exit code.
    """

    document: object
    show: Callable[[Console], None]
    exit: Exit = Exit.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDocument:
    """An error as a document or as a part of one."""

    type: str
    message: str
    uri: str | None
    hint: str | None
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedDocument:
    """What a failed command prints in place of its answer."""

    error: ErrorDocument


def to_json(value: object) -> Any:
    """Convert a result to JSON values.

    Dataclasses become objects with the same names, a URI becomes its text with credentials masked.
    Fields that are ``OMITTED`` are left out.
    """
    # These two come first: a URI is also a dataclass, and a StrEnum is also a str.
    if isinstance(value, Uri):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if is_dataclass(value):
        named = ((one.name, getattr(value, one.name)) for one in fields(value))
        return {name: to_json(inner) for name, inner in named if inner is not OMITTED}
    return value


def print_answer(name: str, answer: CommandResult, *, as_json: bool) -> None:
    """Print the answer on standard output."""
    if as_json:
        click.echo(json.dumps({"command": name, **to_json(answer.document)}, indent=2))
        return
    answer.show(_console())


def print_error(name: str, error: CkptfsError, *, as_json: bool, indent: int | None = 2) -> None:
    """Print an error on standard error, and with --json also as a document on standard output."""
    if as_json:
        document = to_json(FailedDocument(error=error_document(error)))
        click.echo(json.dumps({"command": name, **document}, indent=indent))
    where = f" [{error.uri}]" if error.uri else ""
    say(f"ckptfs {name}: {error.message}{where}")
    if error.hint:
        say(f"  hint: {hint_text(error.hint)}")


def say(text: str) -> None:
    """Print one line on standard error."""
    click.echo(printable(text), err=True)


def hint_text(hint: str) -> str:
    """Return a hint of the library with commands in place of functions. Pure."""
    for call, command in _COMMANDS:
        hint = re.sub(call, command, hint)
    return hint


def error_document(error: CkptfsError) -> ErrorDocument:
    """Return the document of an error, with its hint in terms of the command line."""
    return ErrorDocument(
        type=type(error).__name__,
        message=error.message,
        uri=error.uri,
        hint=None if error.hint is None else hint_text(error.hint),
        outcome=error.outcome,
    )


def place_text(uri: Uri) -> str:
    """Return a place as a user types it: the path of a local directory, otherwise the URI."""
    return uri.local_path if uri.is_local else str(uri)


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns that people can read and ``awk`` can split; ``>`` after a name aligns right."""
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
        """A console that prints each text as one line, without control characters."""

        def print(self, *objects: Any, **settings: Any) -> None:
            for one in objects:
                if isinstance(one, Text):
                    one.plain = printable(one.plain)
            shown = (printable(one) if isinstance(one, str) else one for one in objects)
            super().print(*shown, **settings)

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Escaping(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def command(
    name: str, *, answers: tuple[type, ...], collective: bool = False, **settings: Any
) -> Callable[[Callable[..., CommandResult]], click.Command]:
    """Return a decorator that makes a command.

    answers: the classes of its documents. collective: all ranks of a launcher run it together.
    """
    ANSWERS[name] = answers
    return _made(click.command, name, name, settings, collective=collective)


def stream_command(
    name: str, *, answers: tuple[type, ...]
) -> Callable[[Callable[..., Exit]], click.Command]:
    """Return a decorator that makes a command that prints while it runs.

    Its body takes ``as_json``, and then prints one object on each line.
    """
    ANSWERS[name] = answers

    def decorate(body: Callable[..., Exit]) -> click.Command:
        @functools.wraps(body)
        def run(*, as_json: bool, **params: Any) -> None:
            bound = functools.partial(body, as_json=as_json, **params)
            ended = _run(bound, name, as_json=as_json, speaks=True, is_stream=True)
            click.get_current_context().exit(ended)

        flag = click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
        return click.command(name)(flag(run))

    return decorate


def group_command(
    group: click.Group,
    name: str,
    *,
    answers: tuple[type, ...],
    collective: bool = False,
    **settings: Any,
) -> Callable[[Callable[..., CommandResult]], click.Command]:
    """Return a decorator that makes a command in a group, such as ``bench report``."""
    ANSWERS[f"{group.name} {name}"] = answers
    return _made(group.command, name, f"{group.name} {name}", settings, collective=collective)


def _made(
    make: Callable[..., Any],
    name: str,
    command_name: str,
    settings: dict[str, Any],
    *,
    collective: bool = False,
) -> Callable[[Callable[..., CommandResult]], click.Command]:
    def decorate(body: Callable[..., CommandResult]) -> click.Command:
        @functools.wraps(body)
        def run(*args: Any, as_json: bool, **params: Any) -> None:
            speaks = not collective or os.environ.get("RANK", "0") == "0"
            ended = _run(
                functools.partial(body, *args, **params),
                command_name,
                as_json=as_json,
                speaks=speaks,
            )
            click.get_current_context().exit(ended)

        flag = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
        made: click.Command = make(name, **settings)(flag(run))
        return made

    return decorate


def _run(
    body: Callable[[], CommandResult | Exit],
    command_name: str,
    *,
    as_json: bool,
    speaks: bool,
    is_stream: bool = False,
) -> Exit:
    try:
        answer = body()
    except CkptfsError as error:
        if speaks:
            print_error(command_name, error, as_json=as_json, indent=None if is_stream else 2)
        return exit_of(error)
    except KeyboardInterrupt:
        say(f"ckptfs {command_name}: interrupted")
        return Exit.INTERRUPTED
    if isinstance(answer, Exit):
        return answer
    if speaks:
        print_answer(command_name, answer, as_json=as_json)
    return answer.exit


def outlive(control: Control) -> None:
    """Keep all ranks alive until rank 0 ignores SIGTERM and can report what failed. Collective.

    Without it, the first rank that ends with a failure would make torchrun end the others.
    """
    if control.size == 1:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(CkptfsError):
        control.step("told", lambda: None, lambda _: None)
