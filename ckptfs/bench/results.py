"""A benchmark's result: every single measurement, and what it was measured on.

    Result
      machine  versions  date  command  settings        without these a number means nothing
      workloads  targets  engines                       what was moved, where, and by which engine
      samples    one call each: engine, workload, target, phase, round, seconds, bytes, CPU, memory
      notes      what was cached, what could not be measured

Medians and verdicts are not stored: ``analysis`` computes them from the samples, so that two files can be
compared. The file is JSON; unknown fields are ignored, and a newer ``schema`` is refused. Values that no
clock can have measured are refused too: an error is better than a page of wrong numbers or a traceback.

    read_result(path)            decodes it, or raises an error that names the file
    try_place(path)              raises an error before the measurements rather than after them
    write_result(path, result)   makes directories; replaces an existing file atomically

Texts give numbers with three digits, which is all that a benchmark can support, and times below one
second in milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ckptfs.errors import ManifestError
from ckptfs.schema import Count, Schema, parse
from ckptfs.storage.os_errors import translated
from ckptfs.text import number_text, seconds_text, size_text
from ckptfs.uri import Uri

__all__ = [
    "PHASES",
    "SCHEMA",
    "Engine",
    "Phase",
    "Result",
    "Sample",
    "Target",
    "Workload",
    "conditions_text",
    "decode_result",
    "encode_result",
    "number_text",
    "phase_text",
    "read_result",
    "seconds_text",
    "try_place",
    "write_file",
    "write_result",
]

SCHEMA = 1
_SHORTEST_S, _LONGEST_S = 1e-12, 1e9  # with other values a rate or a ratio could overflow
_ROUNDED_S = 1e-3  # CPU seconds are a difference of sums: zero may come out slightly negative
Seconds = Annotated[float, msgspec.Meta(ge=-_ROUNDED_S, le=_LONGEST_S)]

# save, load: one call and nothing else. steps: the training loop alone; steps_saving: the same loop with
# asynchronous saves; stall: how long one of its saves blocked it. load_cold: the files were evicted from
# the page cache before; load_warm: they had just been written or read.
Phase = Literal["save", "load_cold", "load_warm", "stall", "steps", "steps_saving"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A state that was moved.

    Attributes:
        name: Its name.
        tensors: The number of tensors, of all ranks together.
        size_bytes: Bytes of all ranks together.
        told: Its description in words.
        least_tensor_bytes: Bytes of its smallest tensor; None if not recorded.
        half_tensor_bytes: Half of all bytes are in tensors of up to this many bytes; None if not
            recorded.
        largest_tensor_bytes: Bytes of its largest tensor; None if not recorded.
    """

    name: str
    tensors: Count
    size_bytes: Count
    told: str = ""
    least_tensor_bytes: Count | None = None
    half_tensor_bytes: Count | None = None
    largest_tensor_bytes: Count | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A place that was measured.

    Attributes:
        uri: The URI, with credentials masked.
        kind: The kind of storage, such as "ext4" or "s3 at 127.0.0.1".
        cached: Which caches may have held its files, in words.
    """

    uri: str
    kind: str
    cached: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """A library that moved the bytes.

    Attributes:
        name: Its name.
        version: Its version, and those of its libraries.
        durable: What a save promises on return.
        verified: What a load verifies.
        is_limit: Whether it only moves raw bytes of the same size and makes no checkpoint.
    """

    name: str
    version: str
    durable: str
    verified: str
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured call.

    Attributes:
        engine: The name of the engine.
        workload: The name of the workload.
        target: The target's URI.
        phase: "save", "load_cold", "load_warm", "stall", "steps" or "steps_saving".
        round: The number of the round.
        wall_s: Seconds of the slowest rank.
        cpu_s: Seconds of all ranks, threads included.
        size_bytes: Bytes of the tensors of all ranks.
        sent_bytes: Bytes sent on the network; None if they could not be measured.
        received_bytes: Bytes received from the network; None if they could not be measured.
        peak_memory_bytes: Bytes that the call added to the largest rank's resident memory, compared with
            the memory before it, so without pools that existed already. None if they could not be
            measured.
    """

    engine: str
    workload: str
    target: str
    phase: Phase
    round: Count
    wall_s: Seconds
    cpu_s: Seconds
    size_bytes: Count
    sent_bytes: Count | None = None
    received_bytes: Count | None = None
    peak_memory_bytes: Count | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the time can have a rate and a ratio; False if the clock measured no time."""
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
    """One run of ``ckptfs bench``, or of a row of ``benchmarks/``.

    Attributes:
        what: What was measured, in words.
        date: The date, in ISO 8601, UTC.
        command: The command, with credentials masked.
        machine: Properties of the machine.
        versions: Versions of packages.
        settings: The settings that change the numbers.
        workloads: The states.
        targets: The places.
        engines: The engines.
        samples: One for each measured call.
        notes: Other observations.
        schema: The version of this format.
    """

    what: str
    date: str
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    targets: tuple[Target, ...]
    engines: tuple[Engine, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    schema: Count = field(default=SCHEMA)


def encode_result(result: Result) -> str:
    """Return ``result`` as the text of its file."""
    return json.dumps(asdict(result), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class _Versioned:
    """The part of a result that every version can read."""

    schema: Count


_VERSIONED, _RESULT = Schema(_Versioned), Schema(Result)


def decode_result(text: str, where: str) -> Result:
    """Return the result in a file.

    Args:
        text: The file's text.
        where: The file's name, for the message.

    Raises:
        ManifestError: It is not a result, or is too new.
    """
    try:
        record = parse(text)
        schema = _VERSIONED.convert(record).schema
        if schema > SCHEMA:
            raise ManifestError(
                f"this result has schema {schema}; this version reads up to {SCHEMA}",
                uri=where,
                hint="upgrade ckptfs",
            )
        # A lone surrogate would fail in the page.
        json.dumps(record, ensure_ascii=False).encode()
        _check_depth(record, _MOST_DEEP)
        return _RESULT.convert(record)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"no benchmark result: {error}",
            uri=where,
            hint="give the JSON file that ckptfs bench wrote",
        ) from error


_MOST_DEEP = 16  # levels of nested objects: they are walked by recursion later


def _check_depth(value: Any, left: int) -> None:
    """Raise ValueError if ``value`` is nested too deeply or has a number that is not finite.

    JSON such as ``1e999`` is read as infinite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    if isinstance(value, dict | list):
        if not left:
            raise ValueError(f"nested more than {_MOST_DEEP} times")
        for one in value.values() if isinstance(value, dict) else value:
            _check_depth(one, left - 1)


# -- files -----------------------------------------------------------------------------------------


def read_result(path: str | Path) -> Result:
    """Read the result in a file.

    Args:
        path: The file.

    Returns:
        The result.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        ManifestError: It is not a result.
        UriError: The path is not on a mounted filesystem.
    """
    uri = Uri.parse(str(path))
    source = Path(uri.local_path)
    with translated(uri, "read"):
        raw = source.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(
            "no benchmark result: not even text",
            uri=str(path),
            hint="give the JSON file that ckptfs bench wrote",
        ) from error
    return decode_result(text, str(path))


def try_place(path: str | Path) -> None:
    """Check that ``write_result`` could write to ``path``. Nothing stays there.

    Args:
        path: The file.

    Raises:
        IsADirectoryError: It is a directory; raised as a StorageError.
        AccessError: It may not be written.
        NoSpaceError: The disk is full.
        StorageError: Any other failure.
    """
    uri = Uri.parse(str(path))
    target = Path(uri.local_path)
    made = [p for p in target.parents if not p.exists()]
    scratch = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with translated(uri, "write"):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(b"{}")
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()
            for directory in made:
                with contextlib.suppress(OSError):
                    directory.rmdir()


def write_result(path: str | Path, result: Result) -> None:
    """Write a result. The file appears whole or not at all.

    So a half-written file cannot cost minutes of measurements.

    Args:
        path: The file; its directory is made as needed.
        result: The result.

    Raises:
        StorageError: As for ``write_file``.
    """
    write_file(path, encode_result(result).encode())


def write_file(path: str | Path, data: bytes) -> None:
    """Write a small file. It appears whole or not at all.

    Args:
        path: The file; its directory is made as needed.
        data: Its bytes.

    Raises:
        AccessError: It may not be written.
        NoSpaceError: The disk is full.
        StorageError: Any other failure.
    """
    uri = Uri.parse(str(path))
    target = Path(uri.local_path)
    scratch = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with translated(uri, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_bytes(data)
            scratch.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise


# -- in words --------------------------------------------------------------------------------------


# In the order of reports.
PHASES: dict[Phase, tuple[str, str]] = {
    "save": ("save", "one call, until the bytes are as durable as the engine promises"),
    "load_cold": ("load, cold", "the files were taken out of the page cache before"),
    "load_warm": ("load, warm", "the files had just been written or read"),
    "stall": ("stall", "how long one asynchronous save held the training loop"),
    "steps": ("training loop alone", "steps that save nothing"),
    "steps_saving": ("training loop saving", "the same steps with asynchronous saves"),
}


def phase_text(phase: str) -> str:
    """The name of ``phase`` for people; a phase of a newer version is returned as it is."""
    return PHASES[phase][0] if phase in PHASES else phase


def conditions_text(result: Result, workload: str) -> str:
    """Return the tensor sizes, ranks and threads that the ratios of a workload hold for.

    Ratios differ under other conditions.

    Args:
        result: The result.
        workload: The name of the workload.

    Returns:
        A phrase; "" if the result does not say.
    """
    found = next((one for one in result.workloads if one.name == workload), None)
    phrases = []
    if found is not None and found.half_tensor_bytes is not None:
        least, largest = (
            size_text(found.least_tensor_bytes),
            size_text(found.largest_tensor_bytes),
        )
        half = size_text(found.half_tensor_bytes)
        phrases.append(f"tensors of {least} to {largest}, half of the bytes in those up to {half}")
    if "ranks" in result.settings:
        phrases.append(f"ranks: {result.settings['ranks']}")
    if "omp_num_threads" in result.settings:
        phrases.append(f"OMP_NUM_THREADS={result.settings['omp_num_threads']}")
    return "; ".join(phrases)
