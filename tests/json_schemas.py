"""``python -m tests.json_schemas``: writes docs/reference/json/*.json, the JSON Schema of each command's ``--json``.

A schema is made of the dataclasses that the command answers with (``answers`` of ``ckptfs.cli.output.command``), so
that it cannot say anything else than the code. It leaves room for new fields, as docs/reference/public.md does;
``violations`` does not, so that the tests see a field that a schema lacks.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from ckptfs.cli.main import COMMANDS, ckptfs
from ckptfs.cli.output import ANSWERS, FailedDocument, Omitted
from ckptfs.uri import Uri

__all__ = ["DIRECTORY", "file_of", "schemas", "violations", "write"]

DIRECTORY = Path(__file__).resolve().parents[1] / "docs" / "reference" / "json"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LISTS = (list, tuple, collections.abc.Sequence)

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """Return the schema of each command, by its name."""
    context = ckptfs.make_context("ckptfs", ["--help"], resilient_parsing=True)
    for name in COMMANDS:
        ckptfs.get_command(context, name)
    return {name: _of_command(name, kinds) for name, kinds in sorted(ANSWERS.items())}


def file_of(name: str) -> Path:
    """Return the file of a command's schema."""
    return DIRECTORY / f"{name.replace(' ', '-')}.json"


def text_of(schema: Schema) -> str:
    """Return the file's text."""
    return json.dumps(schema, indent=2) + "\n"


def write() -> None:
    """Write all of them, and remove those of commands that are gone."""
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.json"):
        path.unlink()
    for name, schema in schemas().items():
        file_of(name).write_text(text_of(schema))


# -- from types to schemas -----------------------------------------------------------------------


def _of_command(name: str, kinds: tuple[type, ...]) -> Schema:
    made = _Made()
    roots = [made.of(kind) for kind in (*kinds, FailedDocument)]
    for root in roots:
        definition = made.definitions[root["$ref"].rpartition("/")[2]]
        definition["properties"] = {"command": {"const": name}, **definition["properties"]}
        definition["required"] = list(dict.fromkeys(["command", *definition["required"]]))
    what = "each line of " if name == "watch" else ""
    return {
        "$schema": _DRAFT,
        "title": f"{what}ckptfs {name} --json",
        "anyOf": roots,
        "$defs": dict(sorted(made.definitions.items())),
    }


class _Made:
    """Schemas of types, and the definitions that they refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._kinds: dict[str, type] = {}

    def of(self, hint: Any) -> Schema:
        """The schema of a type."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return {}
        if hint in _PLAIN:
            return {"type": _PLAIN[hint]}
        if hint is Uri:
            return {"type": "string"}
        if origin is Literal:
            return {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
        if origin in {Union, types.UnionType}:
            return self._of_union([one for one in inner if one is not Omitted])
        if origin in _LISTS:
            return {"type": "array", "items": self.of(inner[0])}
        if origin is collections.abc.Mapping:
            return {"type": "object", "additionalProperties": self.of(inner[1])}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"enum": [one.value for one in hint]}
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._of_dataclass(hint)
        raise TypeError(f"no schema of {hint}")

    def _of_union(self, hints: list[Any]) -> Schema:
        if len(hints) == 1:
            return self.of(hints[0])
        if all(hint in _PLAIN for hint in hints):
            return {"type": [_PLAIN[hint] for hint in hints]}
        return {"anyOf": [self.of(hint) for hint in hints]}

    def _of_dataclass(self, kind: type) -> Schema:
        name = kind.__name__.removeprefix("_").removesuffix("Document")
        if self._kinds.setdefault(name, kind) is not kind:
            raise TypeError(f"{name} is the name of two classes in one schema")
        if name not in self.definitions:
            self.definitions[name] = {}
            hints = typing.get_type_hints(kind, globalns=_names_of(kind.__module__))
            optional = {n for n, hint in hints.items() if Omitted in typing.get_args(hint)}
            shown = [field.name for field in dataclasses.fields(kind)]
            self.definitions[name] |= {
                "type": "object",
                "properties": {one: self.of(hints[one]) for one in shown},
                "required": [one for one in shown if one not in optional],
            }
        return {"$ref": f"#/$defs/{name}"}


@functools.cache
def _names_of(module_name: str) -> dict[str, Any]:
    """The names of a module, those that it imports for type checkers alone as well."""
    module = sys.modules[module_name]
    names = dict(vars(module))
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module_name, "exec"), names)  # noqa: S102 - imports of ours
    return names


# -- what does not fit ---------------------------------------------------------------------------


def violations(schema: Schema, value: Any) -> list[str]:
    """Return where a document differs from its schema, in words; unknown fields are violations too."""
    return list(_violations(schema, schema, value, "$"))


def _violations(root: Schema, schema: Schema, value: Any, where: str) -> Iterator[str]:
    if "$ref" in schema:
        definition = root["$defs"][schema["$ref"].rpartition("/")[2]]
        yield from _violations(root, definition, value, where)
    if "anyOf" in schema:
        tried = [list(_violations(root, one, value, where)) for one in schema["anyOf"]]
        if all(tried):
            yield from min(tried, key=len)
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}, and not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, and none of {schema['enum']}"
    if "type" in schema and not _is_of(schema["type"], value):
        yield f"{where} is {value!r}, and no {schema['type']}"
    elif isinstance(value, list) and "items" in schema:
        for number, one in enumerate(value):
            yield from _violations(root, schema["items"], one, f"{where}[{number}]")
    elif isinstance(value, Mapping) and "type" in schema:
        yield from _of_object(root, schema, value, where)


def _of_object(root: Schema, schema: Schema, value: Mapping[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    other = schema.get("additionalProperties")
    yield from (
        f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value
    )
    for name, inner in value.items():
        if name in known:
            yield from _violations(root, known[name], inner, f"{where}.{name}")
        elif other is None:
            yield f"{where}.{name} is in no schema"
        else:
            yield from _violations(root, other, inner, f"{where}.{name}")


def _is_of(names: str | list[str], value: Any) -> bool:
    fits = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, Mapping),
    }
    return any(fits[name] for name in ([names] if isinstance(names, str) else names))


if __name__ == "__main__":
    write()
