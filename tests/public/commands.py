"""Commands, their arguments and options, as click knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from ckptfs.cli.main import ckptfs

__all__ = ["commands"]


def commands() -> Iterator[str]:
    """``ckptfs ls --sort: one of commit|step|name|age|size, by default commit``, for everything."""
    yield from _command("ckptfs", ckptfs)


def _command(name: str, command: click.Command) -> Iterator[str]:
    yield name
    for parameter in command.params:
        yield from _parameter(name, parameter)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _command(f"{name} {below}", found)


def _parameter(name: str, parameter: click.Parameter) -> Iterator[str]:
    told = [_type(parameter)]
    if isinstance(parameter, click.Option):
        spelt = sorted([*parameter.opts, *parameter.secondary_opts], key=len)
        main = max(parameter.opts, key=len)
        told += [f"also {' '.join(o for o in spelt if o != main)}"] if len(spelt) > 1 else []
        told += ["repeatable"] if parameter.multiple else []
    else:
        main = (parameter.name or "").upper()
        told += ["any number"] if parameter.nargs == -1 else []
    told += ["required"] if parameter.required else []
    told += [f"by default {text}"] if (text := _default(parameter)) else []
    yield f"{name} {main}: {', '.join(told)}"


def _type(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option) and (parameter.is_flag or parameter.count):
        return "a flag" if parameter.is_flag else "counted"
    if isinstance(parameter.type, click.Choice):
        return f"one of {'|'.join(str(choice) for choice in parameter.type.choices)}"
    return parameter.type.name


def _default(parameter: click.Parameter) -> str:
    value: Any = parameter.to_info_dict()["default"]
    if callable(value) or value in (None, False, (), 0) or "UNSET" in repr(value):
        return ""
    return str(value)
