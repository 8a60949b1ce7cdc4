"""ckptfs.json: every field with values of another kind, and documents that are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.hostile.corpus import Group, add
from tests.hostile.place import On, Place

COMMANDS = ("load", "latest", "ls", "verify", "rm", "restore", "cp")

VALUES: dict[str, Any] = {
    "infinite": float("inf"),
    "nan": float("nan"),
    "huge": 2**80,
    "negative": -7,
    "text": "x",
    "list": [1],
    "dict": {"a": 1},
    "null": None,
    "escape": "\x1b]0;owned\x07\r\nforged",
    "surrogate": "\udc80",
}
# Each field meets those that say something of its type.
FIELDS: dict[str, tuple[str, ...]] = {
    "format_version": ("infinite", "text", "list", "null", "huge"),
    "min_reader_version": ("infinite", "nan", "text", "list", "huge", "negative"),
    "save_id": ("list", "null", "escape", "surrogate", "infinite"),
    "name": ("list", "null", "escape", "surrogate"),
    "step": ("infinite", "text", "list", "huge", "negative", "escape"),
    "artifact": ("text", "list", "null"),
    "base": ("infinite", "text", "list", "null", "dict"),
    "world_size": ("infinite", "nan", "text", "huge", "negative"),
    "created_at": ("list", "escape", "infinite"),
    "writer": ("list", "escape", "surrogate"),
    "references": ("infinite", "text", "dict"),
    "per_rank": ("list", "dict", "infinite", "escape"),
    "domains": ("infinite", "text", "list", "dict", "null"),
    "files": ("infinite", "text", "list", "dict", "null"),
}
FILE_FIELDS: dict[str, tuple[str, ...]] = {
    "path": ("list", "null", "escape", "surrogate"),
    "size": ("infinite", "text", "negative", "huge", "null"),
    "domain": ("list", "dict", "escape"),
    "digests": ("list", "text", "infinite"),
    "digest": ("list", "dict", "infinite", "text"),
    "origin": ("list", "text", "escape"),
}
DOMAIN_FIELDS: dict[str, tuple[str, ...]] = {
    "id": ("list", "escape", "null"),
    "ranks": ("infinite", "text", "dict", "null"),
    "hosts": ("infinite", "list", "dict", "escape", "surrogate"),
}
PATHS = {
    "up": "../../victim/secret.txt",
    "absolute": "/etc/passwd",
    "uri": "file:///etc/passwd",
    "nul": "a\0b",
    "backslash": "..\\victim",
    "dot": ".",
    "twice": "a//b",
    "itself": "ckptfs.json",
}
RAW: dict[str, tuple[str, bytes]] = {
    "empty": ("No byte.", b""),
    "list": ("A list.", b"[]"),
    "number": ("A number.", b"7"),
    "not-json": ("No JSON.", b"{"),
    "not-utf8": ("Bytes that are no text.", b"\xff\xfe{"),
    "deep": ("A hundred thousand brackets.", b"[" * 100_000),
    "deep-field": ("A hundred thousand brackets in a field.", b'{"min_reader_version": 1, "x": ' + b"[" * 100_000),
    "long-number": ("A number of a million digits.", b'{"min_reader_version": ' + b"9" * 1_000_000 + b"}"),
    "exponent": ("A number of 10^400.", b'{"min_reader_version": 1e400}'),
}  # fmt: skip


def _of_record(place: Place, field: str, value: Any) -> None:
    place.change_manifest(lambda record: record.update({field: value}))


def _of_item(place: Place, among: str, field: str, value: Any) -> None:
    place.change_manifest(lambda record: record[among][0].update({field: value}))


def _lacks(place: Place, field: str) -> None:
    def drop(record: dict[str, Any]) -> None:
        del record[field]

    place.change_manifest(drop)


def _raw(place: Place, data: bytes) -> None:
    place.set_manifest(data)


def _add(name: str, tries: str, build: Callable[[Place], None]) -> None:
    add(name, tries, Group.MANIFESTS, build, on=On.RUN, commands=COMMANDS, forged=True)


for _field, _values in FIELDS.items():
    for _value in _values:
        _add(
            f"manifest-{_field}-{_value}",
            f"{_field} of ckptfs.json is {_value}.",
            partial(_of_record, field=_field, value=VALUES[_value]),
        )
    _add(
        f"manifest-without-{_field}",
        f"ckptfs.json lacks {_field}.",
        partial(_lacks, field=_field),
    )

for _among, _fields in (("files", FILE_FIELDS), ("domains", DOMAIN_FIELDS)):
    for _field, _values in _fields.items():
        for _value in _values:
            _add(
                f"manifest-{_among}-{_field}-{_value}",
                f"{_field} of one of the {_among} in ckptfs.json is {_value}.",
                partial(_of_item, among=_among, field=_field, value=VALUES[_value]),
            )

for _name, _path in PATHS.items():
    for _field in ("path", "digests"):
        _add(
            f"manifest-{_field}-leads-{_name}",
            f"A file of ckptfs.json has the {_field} {_path!r}.",
            partial(_of_item, among="files", field=_field, value=_path),
        )

for _name, (_tries, _data) in RAW.items():
    _add(f"manifest-is-{_name}", f"ckptfs.json: {_tries}", partial(_raw, data=_data))
