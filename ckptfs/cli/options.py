"""``-o key=value``: storage options on a command line.

    -o profile=train                     a string
    -o anon=true -o concurrency=8        a value that is JSON is parsed as JSON
    -o client_kwargs.endpoint_url=http://127.0.0.1:9000     dots reach into nested options
    -o @options.json                     a file with options: secrets stay out of ``ps``

Environment variables and configuration files of the client libraries work as they do without ckptfs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["parse_duration", "parse_storage_options", "secrets_in", "storage_options"]

_SECRET = re.compile(
    r"secret|token|passw|credential|sas|signature|connection_?string|access_?key|account_?key"
    r"|storage_?key|encryption_?key|^key$",
    re.IGNORECASE,
)
_LEAST_CHARS = 8  # shorter values ("anon", "cloud") are no secrets, and occur in many lines
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhdw]?)")

_F = TypeVar("_F", bound=Callable[..., Any])


def parse_storage_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the options as fsspec takes them; later ones win.

    Raises:
        click.BadParameter: An option cannot be read; the message says why.
    """
    found: dict[str, Any] = {}
    for text in texts:
        if text.startswith("@"):
            _merge(found, _read_file(text[1:]))
            continue
        key, separator, value = text.partition("=")
        if not separator or not key or "" in key.split("."):
            raise click.BadParameter(f"{text!r} is not key=value or @file.json")
        nested: Any = _value(value)
        for name in reversed(key.split(".")):
            nested = {name: nested}
        _merge(found, nested)
    return found


def secrets_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the values, also nested ones, with names like a credential's; no file paths. Pure."""
    found: set[str] = set()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= secrets_in(value)
        elif (
            isinstance(value, str)
            and _SECRET.search(name)
            and len(value) >= _LEAST_CHARS
            and not value.startswith(("/", "~"))
        ):
            found.add(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_file(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise click.BadParameter(f"{path} does not contain a JSON object")
    return found


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def storage_options(
    name: str = "-o", long: str = "--storage-option", of: str = "URI"
) -> Callable[[_F], _F]:
    """Return a repeatable option. The command gets one mapping, under the plural of ``long``."""

    def parse(context: click.Context, _: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
        found = parse_storage_options(texts)
        secrets = context.find_root().obj
        if isinstance(secrets, set):  # those that the log masks
            secrets |= secrets_in(found)
        return found

    return click.option(
        name,
        long,
        long.removeprefix("--").replace("-", "_") + "s",
        multiple=True,
        metavar="KEY=VALUE",
        callback=parse,
        help=f"Storage options of {of}, as fsspec takes them; @FILE reads JSON.",
    )


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``30m``, ``1.5h``, ``2d`` or ``90``.

    Raises:
        ValueError: ``text`` is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 90s, 30m, 1.5h, 2d or 1w")
    return float(match["number"]) * _UNITS[match["unit"] or "s"]
