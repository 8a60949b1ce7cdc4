"""A benchmark's result: every single measurement, and what it was measured on. Pure.

    Result
      machine  versions  date  command  settings        without them a number means nothing
      workloads  targets  engines                       what was moved, where, and by whom
      samples    one call each: engine, workload, target, phase, round, seconds, bytes, CPU, memory
      notes      what was cached, what could not be had

Medians and verdicts are not stored: ``stats`` makes them of the samples, so that two files can be
held side by side. The file is JSON; unknown fields are ignored, a newer ``schema`` is refused. So is
every value that no clock measured: a page of wrong numbers, or a traceback, would be worse than an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from ckptfs.errors import ManifestError

__all__ = [
    "SCHEMA",
    "Engine",
    "Phase",
    "Result",
    "Sample",
    "Target",
    "Workload",
    "decode_result",
    "encode_result",
]

SCHEMA = 1
_SHORTEST_S, _LONGEST_S = 1e-12, 1e9  # a rate or a ratio of others would overflow

# save, load: one call, nothing else to do. steps: the training loop alone; steps_saving: the same
# loop with asynchronous saves; stall: how long one of its saves held it. load_cold: the page cache
# was emptied of the files before; load_warm: they had just been written or read.
Phase = Literal["save", "load_cold", "load_warm", "stall", "steps", "steps_saving"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What was moved. tensors and size_bytes: of all ranks together."""

    name: str
    tensors: int
    size_bytes: int
    told: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """Where: a URI with credentials masked, and what it is ("ext4", "s3 at 127.0.0.1")."""

    uri: str
    kind: str
    cached: str = ""  # what of it may have been in a cache, in words


@dataclass(frozen=True, slots=True)
class Engine:
    """Who moved it. is_limit: raw bytes of the same size, no checkpoint at all.

    durable: what a save promises on return; verified: what a load compares.
    """

    name: str
    version: str
    durable: str
    verified: str
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One call. wall_s: of the slowest rank. cpu_s: of all ranks, threads included. size_bytes: tensors'
    bytes of all ranks. Bytes on the wire and peak_memory_bytes (what the call added to the largest
    rank's resident memory, over what the process held before it: pools that stay are not in it) are
    None where they could not be measured.
    """

    engine: str
    workload: str
    target: str
    phase: Phase
    round: int
    wall_s: float
    cpu_s: float
    size_bytes: int
    sent_bytes: int | None = None
    received_bytes: int | None = None
    peak_memory_bytes: int | None = None

    @property
    def is_timed(self) -> bool:
        """False where the clock saw nothing pass: then there is neither a rate nor a ratio."""
        return _SHORTEST_S <= self.wall_s <= _LONGEST_S

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of tensors per second."""
        return self.size_bytes / 1e9 / self.wall_s if self.is_timed else 0.0

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_s / (self.size_bytes / 1e9) if self.size_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run of ``ckptfs bench``, or of a script in ``benchmarks/``."""

    what: str
    date: str  # ISO 8601, UTC
    command: str  # credentials masked
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    targets: tuple[Target, ...]
    engines: tuple[Engine, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    schema: int = field(default=SCHEMA)


_T = TypeVar("_T", Workload, Target, Engine, Sample)


def encode_result(result: Result) -> str:
    """The file's text."""
    return json.dumps(asdict(result), indent=1) + "\n"


def decode_result(text: str, where: str) -> Result:
    """The result in a file; ManifestError that names ``where`` when it is none, or too new."""
    try:
        record = _parsed(text)
        schema = _checked("schema", "int", record["schema"])
        if schema > SCHEMA:
            raise ManifestError(
                f"this result has schema {schema}; this version reads up to {SCHEMA}",
                uri=where,
                hint="upgrade ckptfs",
            )
        return Result(
            **{name: _checked(name, "str", record[name]) for name in ("what", "date", "command")},
            machine=_checked("machine", "object", record["machine"]),
            versions=_texts("versions", record["versions"]),
            settings=_checked("settings", "object", record["settings"]),
            workloads=_made(Workload, "workloads", record),
            targets=_made(Target, "targets", record),
            engines=_made(Engine, "engines", record),
            samples=_made(Sample, "samples", record),
            notes=tuple(
                _checked("notes", "str", one)
                for one in _checked("notes", "list", record.get("notes", []))
            ),
            schema=schema,
        )
    except RecursionError as error:
        raise ManifestError("no benchmark result: nested too deeply", uri=where) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(
            f"no benchmark result: {type(error).__name__}: {error}",
            uri=where,
            hint="give the JSON file that ckptfs bench wrote",
        ) from error


# -- what a value may be: whatever a file says is drawn, divided and compared later


_MOST_DEEP = 16  # objects in objects: whoever walks them later walks by calling itself
_MOST = 2**63  # bytes and counts: beyond it a rate would overflow
_ROUNDED_S = 1e-3  # CPU seconds are a difference of sums: nothing may be a little less than nothing


def _parsed(text: str) -> dict[str, Any]:
    """ValueError: no JSON object, or one with text that can be written nowhere."""
    record = json.loads(text, parse_constant=_no_number)
    if not isinstance(record, dict):
        raise TypeError(f"the file is {_kind(record)}, not an object")
    json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate would fail in the page
    _check_depth(record, _MOST_DEEP)
    return record


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_depth(value: Any, left: int) -> None:
    """Of all numbers inside of it too: ``1e999`` is read as infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    if isinstance(value, dict | list):
        if not left:
            raise ValueError(f"nested more than {_MOST_DEEP} times")
        for one in value.values() if isinstance(value, dict) else value:
            _check_depth(one, left - 1)


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST  # a bool is an int to isinstance


def _is_seconds(value: Any) -> bool:
    return type(value) in {int, float} and -_ROUNDED_S <= value <= _LONGEST_S


# By the annotation of a field.
_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "str": ("a text", lambda value: isinstance(value, str)),
        "Phase": ("a text", lambda value: isinstance(value, str)),
        "bool": ("true or false", lambda value: isinstance(value, bool)),
        "int": ("a whole number from 0 on", _is_int),
        "int | None": ("a whole number from 0 on, or null", lambda v: v is None or _is_int(v)),
        "float": ("a number of seconds", _is_seconds),
        "object": ("an object", lambda value: isinstance(value, dict)),
        "list": ("a list", lambda value: isinstance(value, list)),
    }
)


def _checked(name: str, kind: str, value: Any) -> Any:
    told, fits = _CHECKS[kind]
    if not fits(value):
        raise TypeError(f"{name} is {_kind(value)}, not {told}")
    return value


def _kind(value: Any) -> str:
    """How a wrong value is told: short, whatever it is."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{json.dumps(value):.40}"


def _texts(name: str, value: Any) -> dict[str, str]:
    told: dict[str, Any] = _checked(name, "object", value)
    return {key: _checked(f"{name}: {key}", "str", one) for key, one in told.items()}


def _made(cls: type[_T], name: str, record: Mapping[str, Any]) -> tuple[_T, ...]:
    kinds = {one.name: str(one.type) for one in fields(cls)}
    made = []
    for number, told in enumerate(_checked(name, "list", record[name])):
        where = f"{name}[{number}]"
        values: dict[str, Any] = _checked(where, "object", told)
        known = {
            key: _checked(f"{where}.{key}", kinds[key], value)
            for key, value in values.items()
            if key in kinds
        }
        made.append(cls(**known))
    return tuple(made)
