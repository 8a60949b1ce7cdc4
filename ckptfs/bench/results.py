"""A benchmark's result: every single measurement, and what it was measured on.

    Result
      machine  versions  date  command  settings        without them a number means nothing
      workloads  targets  engines                       what was moved, where, and by whom
      samples    one call each: engine, workload, target, phase, round, seconds, bytes, CPU, memory
      notes      what was cached, what could not be had

Medians and verdicts are not stored: ``analysis`` makes them of the samples, so that two files can be
held side by side. The file is JSON; unknown fields are ignored, a newer ``schema`` is refused. So is
every value that no clock measured: a page of wrong numbers, or a traceback, would be worse than an error.

    read_result(path)            decoded, or an error that names the file
    try_place(path)              an error now rather than after the measuring
    write_result(path, result)   directories are made; a file that was there is replaced as a whole

In words, three digits of a number are what a benchmark can carry; seconds below one are given in milliseconds.
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
    "bytes_text",
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
_SHORTEST_S, _LONGEST_S = 1e-12, 1e9  # a rate or a ratio of others would overflow
_ROUNDED_S = 1e-3  # CPU seconds are a difference of sums: nothing may be a little less than nothing
Seconds = Annotated[float, msgspec.Meta(ge=-_ROUNDED_S, le=_LONGEST_S)]

# save, load: one call, nothing else to do. steps: the training loop alone; steps_saving: the same
# loop with asynchronous saves; stall: how long one of its saves held it. load_cold: the page cache
# was emptied of the files before; load_warm: they had just been written or read.
Phase = Literal["save", "load_cold", "load_warm", "stall", "steps", "steps_saving"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What was moved.

    Attributes:
        name: Its name.
        tensors: How many tensors, of all ranks together.
        size_bytes: Bytes of all ranks together.
        told: What it is, in words.
        least_tensor_bytes: Bytes of its smallest tensor; None where they were not recorded.
        half_tensor_bytes: Half of all bytes are in tensors of up to so many bytes; None where they were not
            recorded.
        largest_tensor_bytes: Bytes of its largest tensor; None where they were not recorded.
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
    """Where.

    Attributes:
        uri: The URI, credentials masked.
        kind: What it is, "ext4" or "s3 at 127.0.0.1".
        cached: What of it may have been in a cache, in words.
    """

    uri: str
    kind: str
    cached: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """Who moved the bytes.

    Attributes:
        name: Its name.
        version: Its version, and those of its libraries.
        durable: What a save promises on return.
        verified: What a load compares.
        is_limit: It moves raw bytes of the same size, no checkpoint at all.
    """

    name: str
    version: str
    durable: str
    verified: str
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One call.

    Attributes:
        engine: The name of the engine.
        workload: The name of the workload.
        target: The target's URI.
        phase: "save", "load_cold", "load_warm", "stall", "steps" or "steps_saving".
        round: The number of the round.
        wall_s: Seconds of the slowest rank.
        cpu_s: Seconds of all ranks, threads included.
        size_bytes: Bytes of the tensors of all ranks.
        sent_bytes: Bytes sent on the network; None where they could not be measured.
        received_bytes: Bytes received from the network; None where they could not be measured.
        peak_memory_bytes: Bytes that the call added to the largest rank's resident memory, over what the
            process held before it: pools that stay are not in it. None where they could not be measured.
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
    """One run of ``ckptfs bench``, or of a script in ``benchmarks/``.

    Attributes:
        what: What was measured, in words.
        date: ISO 8601, UTC.
        command: The command, credentials masked.
        machine: What is known of the machine.
        versions: Of the packages.
        settings: What changes the numbers.
        workloads: The states.
        targets: The places.
        engines: The engines.
        samples: One for each call that was measured.
        notes: What else was noticed.
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
    """Return the file's text, of ``result``."""
    return json.dumps(asdict(result), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class _Versioned:
    """What every version can read of a result."""

    schema: Count


_VERSIONED, _RESULT = Schema(_Versioned), Schema(Result)


def decode_result(text: str, where: str) -> Result:
    """Return the result in a file.

    Args:
        text: The file's text.
        where: The file's name, for the message.

    Raises:
        ManifestError: It is no result, or too new.
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


_MOST_DEEP = 16  # objects in objects: whoever walks them later walks by calling itself


def _check_depth(value: Any, left: int) -> None:
    """Of all numbers inside of it too: ``1e999`` is read as infinite."""
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
        ManifestError: It is no result.
        UriError: The path is none of a mounted filesystem.
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
    """Check that ``write_result`` could write there; nothing stays.

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
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with translated(uri, "write"):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(b"{}")
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
            for directory in made:
                with contextlib.suppress(OSError):
                    directory.rmdir()


def write_result(path: str | Path, result: Result) -> None:
    """Write a result: it appears whole, or an error says why not.

    Minutes of measuring are not lost to half a file.

    Args:
        path: The file; its directory is made as needed.
        result: The result.

    Raises:
        StorageError: As for ``write_file``.
    """
    write_file(path, encode_result(result).encode())


def write_file(path: str | Path, data: bytes) -> None:
    """Write a small file, whole under its name or not at all.

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
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with translated(uri, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_bytes(data)
            aside.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise


# -- in words --------------------------------------------------------------------------------------


# In the order in which they are told.
PHASES: dict[Phase, tuple[str, str]] = {
    "save": ("save", "one call, until the bytes are as durable as the engine promises"),
    "load_cold": ("load, cold", "the files were taken out of the page cache before"),
    "load_warm": ("load, warm", "the files had just been written or read"),
    "stall": ("stall", "how long one asynchronous save held the training loop"),
    "steps": ("training loop alone", "steps that save nothing"),
    "steps_saving": ("training loop saving", "the same steps with asynchronous saves"),
}


def phase_text(phase: str) -> str:
    """The name of ``phase``; an unknown one, of a newer version, as it is written."""
    return PHASES[phase][0] if phase in PHASES else phase


def bytes_text(value: float | None) -> str:
    """Return ``1.23 GB``, of 10^9, for ``value`` bytes; ``-`` where it could not be measured, None."""
    return size_text(value)


def conditions_text(result: Result, workload: str) -> str:
    """Return for which tensor sizes, ranks and threads the ratios of a workload hold: they differ for others.

    Args:
        result: The result.
        workload: The name of the workload.

    Returns:
        A phrase; empty where the result does not say.
    """
    found = next((one for one in result.workloads if one.name == workload), None)
    told = []
    if found is not None and found.half_tensor_bytes is not None:
        least, largest = (
            bytes_text(found.least_tensor_bytes),
            bytes_text(found.largest_tensor_bytes),
        )
        half = bytes_text(found.half_tensor_bytes)
        told.append(f"tensors of {least} to {largest}, half of the bytes in those up to {half}")
    if "ranks" in result.settings:
        told.append(f"ranks: {result.settings['ranks']}")
    if "omp_num_threads" in result.settings:
        told.append(f"OMP_NUM_THREADS={result.settings['omp_num_threads']}")
    return "; ".join(told)
