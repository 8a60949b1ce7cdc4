"""JSON from an untrusted source, as typed and bounded values. Pure.

    parse(data)                    the JSON values in it
    Schema(kind).convert(value)    one of them as a ``kind``
    Schema(kind).decode(data)      both

For any bytes the result is the value or ``SchemaError``: no OverflowError, KeyError or
RecursionError leaves this module. The annotations of ``kind`` are the schema; the types below bound
them. Fields that ``kind`` does not have are ignored, so that an older reader can read what a newer
writer wrote.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any, Generic, TypeVar

import msgspec

__all__ = ["Component", "Count", "Number", "Schema", "SchemaError", "Word", "kind_in", "parse"]

T = TypeVar("T")

_MOST = 2**63 - 1  # a file offset, a size and a counter of any store fit into this

Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
"""From 0 on: bytes, counts, numbers of entries and of ranks."""

Number = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]
"""Any whole number that every language can read."""

# Keys are made from it, and the content of a bucket is not trusted. A lone surrogate has no bytes.
Component = Annotated[
    str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\x00\ud800-\udfff]+\Z", max_length=4096)
]
"""One component of a path."""

Word = Annotated[str, msgspec.Meta(max_length=100)]
"""A word of a closed list, which a newer version may have made longer. It is shown to people."""

_PATTERN = re.compile(r"`str` matching regex '.*?Z'")


class SchemaError(ValueError):
    """The bytes are no JSON, or not of that kind; says where in them, and what was expected."""


def parse(data: bytes | str) -> Any:
    """Return the JSON value. NaN and Infinity, which Python writes, are floats."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise SchemaError("nested too deeply") from error
    except ValueError as error:
        raise SchemaError(f"no JSON: {error}") from error


class _Kind(msgspec.Struct):
    kind: str


_KIND = msgspec.json.Decoder(_Kind)


def kind_in(data: bytes) -> str | None:
    """Return the ``kind`` of a JSON object without decoding the rest; None if it has none."""
    try:
        return _KIND.decode(data).kind
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Schema(Generic[T]):
    """What JSON values have to be to make a ``kind``: a dataclass, a named tuple, a union of them.

    Make it when its module is imported, never later: msgspec reads the annotations of a kind at its
    first use, and two threads that do so at once crash the process (0.22.0).
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(None, kind)

    def convert(self, value: Any) -> T:
        """Return a parsed value as that kind. Raises SchemaError if it is not one."""
        try:
            return msgspec.convert(value, self._kind)
        except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
            # A pattern is not readable for a person.
            raise SchemaError(_PATTERN.sub("one component of a path", str(error))) from error

    def decode(self, data: bytes | str) -> T:
        """Parse as ``parse``, then convert as ``convert``."""
        return self.convert(parse(data))
