"""What every command has: ``--json``, and errors as messages and exit codes.

    @command("ls")
    @click.argument("uri")
    @storage_options()
    def ls(uri: str, storage_options: dict[str, Any]) -> Answer: ...

Under torchrun every rank runs a collective command (``bench``, ``cp``, ``doctor``): rank 0 speaks, and all end with
the same code. Any other prints whatever RANK says: a training rank may have started it, or a shell there.

A body does its work and returns an ``Answer``; it prints nothing and exits nowhere. An error of
ckptfs ends the command with its code (see ``exits``), any other exception is a bug and shows itself.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.answer import Answer, print_answer, print_error, say
from ckptfs.cli.exits import Exit, exit_of
from ckptfs.errors import CkptfsError

if TYPE_CHECKING:
    from ckptfs.control.control import Control

__all__ = ["command", "group_command", "outlive", "stream_command"]


def command(
    name: str, *, collective: bool = False, **settings: Any
) -> Callable[[Callable[..., Answer]], click.Command]:
    """A command of its own. collective: all ranks of a launcher run it together."""
    return _made(click.command, name, name, settings, collective=collective)


def stream_command(name: str) -> Callable[[Callable[..., Exit]], click.Command]:
    """A command that prints while it runs: its body takes ``as_json``, and prints one object on each line."""

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
    group: click.Group, name: str, *, collective: bool = False, **settings: Any
) -> Callable[[Callable[..., Answer]], click.Command]:
    """A command below another: ``bench report``."""
    return _made(group.command, name, f"{group.name} {name}", settings, collective=collective)


def _made(
    make: Callable[..., Any],
    name: str,
    told: str,
    settings: dict[str, Any],
    *,
    collective: bool = False,
) -> Callable[[Callable[..., Answer]], click.Command]:
    def decorate(body: Callable[..., Answer]) -> click.Command:
        @functools.wraps(body)
        def run(*args: Any, as_json: bool, **params: Any) -> None:
            speaks = not collective or os.environ.get("RANK", "0") == "0"
            ended = _run(
                functools.partial(body, *args, **params), told, as_json=as_json, speaks=speaks
            )
            click.get_current_context().exit(ended)

        flag = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
        made: click.Command = make(name, **settings)(flag(run))
        return made

    return decorate


def _run(
    body: Callable[[], Answer | Exit],
    told: str,
    *,
    as_json: bool,
    speaks: bool,
    is_stream: bool = False,
) -> Exit:
    try:
        answer = body()
    except CkptfsError as error:
        if speaks:
            print_error(told, error, as_json=as_json, indent=None if is_stream else 2)
        return exit_of(error)
    except KeyboardInterrupt:
        say(f"ckptfs {told}: interrupted")
        return Exit.INTERRUPTED
    if isinstance(answer, Exit):
        return answer
    if speaks:
        print_answer(told, answer, as_json=as_json)
    return answer.exit


def outlive(control: Control) -> None:
    """Collective. The first rank that ends with a failure makes torchrun end the others: nobody ends
    before rank 0 is safe from that, and can say what failed.
    """
    if control.size == 1:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(CkptfsError):
        control.step("told", lambda: None, lambda _: None)
