"""A file for node_exporter's textfile collector: when, how much and how fast this job saves.

    listeners=[PrometheusTextfile("/var/lib/node_exporter/ckptfs.prom", labels={"job": "llm-7b"})]

    ckptfs_last_commit_timestamp_seconds{job="llm-7b",kind="checkpoint"} 1.79e+09
    ckptfs_last_commit_step{job="llm-7b",kind="checkpoint"} 12000
    ckptfs_save_failures_total{job="llm-7b",type="NoSpaceError",outcome="failed"} 1

The file is replaced as a whole, through a storage: a scrape sees the old one or the new one. It may
also be an object (``s3://``), for collectors that read from there. The figures of the last commit
stay in the file when the job is restarted: an alert on the age of the last commit must not fall
silent because the job died and came back. Counters start again at 0, as Prometheus expects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs.errors import NotFoundError, StateError
from ckptfs.events import (
    CopyCommitted,
    CopyFailed,
    Deleted,
    DeleteFailed,
    Event,
    Retained,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
)
from ckptfs.manager.listeners import TimedListener, rank_rates
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["Figures", "PrometheusTextfile", "render"]

Labels = tuple[tuple[str, str], ...]

_MIB = 1 << 20
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SERIES = re.compile(r"(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+)")
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?=[:(]|$)")
_PHASES = ("plan", "stage", "write", "sync", "commit")
_LAST = "ckptfs_last_"

# name -> (type, help); the order of the file.
_FAMILIES = {
    "ckptfs_last_commit_timestamp_seconds": ("gauge", "Unix time of the last commit."),
    "ckptfs_last_commit_step": ("gauge", "Step of the last commit."),
    "ckptfs_last_commit_bytes": ("gauge", "Bytes of the last commit, on all ranks."),
    "ckptfs_last_save_seconds": ("gauge", "Time of the last save, from the call to the commit."),
    "ckptfs_last_save_phase_seconds": (
        "gauge",
        "Time of each phase of the last save, on its slowest rank.",
    ),
    "ckptfs_last_stall_seconds": ("gauge", "Time for which the last save stopped the training."),
    "ckptfs_last_rank_bytes_per_second": (
        "gauge",
        "Write rate of the slowest and the fastest rank in the last save.",
    ),
    "ckptfs_last_bytes_per_second": ("gauge", "Write rate of all ranks together in the last save."),
    "ckptfs_commits_total": ("counter", "Checkpoints that this process committed."),
    "ckptfs_committed_bytes_total": ("counter", "Bytes that this process committed."),
    "ckptfs_stall_seconds_total": ("counter", "Time for which saves stopped the training."),
    "ckptfs_save_failures_total": ("counter", "Failed saves, by type of error and outcome."),
    "ckptfs_saves_skipped_total": (
        "counter",
        "Saves skipped because an earlier one was in progress.",
    ),
    "ckptfs_checkpoints_kept": ("gauge", "Checkpoints that retention keeps."),
    "ckptfs_deletes_total": ("counter", "Deleted checkpoints: their bytes are removed."),
    "ckptfs_delete_failures_total": ("counter", "Failed deletes; each is tried again."),
    "ckptfs_debris_checkpoints": (
        "gauge",
        "Checkpoints that are deleted in the log, but still have bytes.",
    ),
    "ckptfs_copies_total": ("counter", "Checkpoints that were copied completely."),
    "ckptfs_copied_bytes_total": ("counter", "Bytes that were copied."),
    "ckptfs_copy_failures_total": ("counter", "Failed copies; each is tried again."),
}


@dataclass(slots=True)
class Figures:
    """What the events add up to: samples by name and labels, and deleted saves with bytes left."""

    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)
    debris: set[str] = field(default_factory=set)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.samples[name, tuple(labels.items())] = value

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        key = (name, tuple(labels.items()))
        self.samples[key] = self.samples.get(key, 0.0) + amount

    def hear(self, event: Event, at_ns: int) -> bool:
        """Take an event in; return whether it changed anything."""
        match event:
            case SaveCommitted():
                self._committed(event, at_ns)
            case SaveFailed(error=error, outcome=outcome):
                self.add("ckptfs_save_failures_total", type=error_type(error), outcome=outcome)
            case SaveSkipped():
                self.add("ckptfs_saves_skipped_total")
            case Retained(remaining, deleting):
                self.set("ckptfs_checkpoints_kept", remaining)
                self.debris.update(deleting)
            case Deleted(uri=uri):
                self.add("ckptfs_deletes_total")
                self.debris.discard(uri)
            case DeleteFailed(uri=uri):
                self.add("ckptfs_delete_failures_total")
                self.debris.add(uri)
            case CopyCommitted(size_bytes=size_bytes):
                self.add("ckptfs_copies_total")
                self.add("ckptfs_copied_bytes_total", size_bytes)
            case CopyFailed():
                self.add("ckptfs_copy_failures_total")
            case _:
                return False
        self.set("ckptfs_debris_checkpoints", len(self.debris))
        return True

    def _committed(self, event: SaveCommitted, at_ns: int) -> None:
        kind, result = event.kind, event.result
        total = result.total
        self.set("ckptfs_last_commit_timestamp_seconds", at_ns / 1e9, kind=kind)
        self.set("ckptfs_last_commit_step", result.step or 0, kind=kind)
        self.set("ckptfs_last_commit_bytes", total.size_bytes, kind=kind)
        self.set("ckptfs_last_save_seconds", result.wall_s, kind=kind)
        for phase in _PHASES:
            spent_s = getattr(total, f"{phase}_s")
            self.set("ckptfs_last_save_phase_seconds", spent_s, kind=kind, phase=phase)
        self.set("ckptfs_last_stall_seconds", event.stall_s, kind=kind)
        slowest, fastest = rank_rates(result.per_rank)
        for which, mib_per_s in (("slowest", slowest), ("fastest", fastest)):
            rate = mib_per_s * _MIB
            self.set("ckptfs_last_rank_bytes_per_second", rate, kind=kind, rank=which)
        self.set("ckptfs_last_bytes_per_second", total.mib_per_s * _MIB, kind=kind)
        self.add("ckptfs_commits_total", kind=kind)
        self.add("ckptfs_committed_bytes_total", total.size_bytes, kind=kind)
        self.add("ckptfs_stall_seconds_total", event.stall_s, kind=kind)


def error_type(error: str) -> str:
    """Return the class in front of an error's text ("NoSpaceError: ..." or its repr), else "other".

    The text itself never becomes a label: each distinct label value is a time series that stays.
    """
    found = _ERROR.match(error)
    return found[0].rpartition(".")[2] if found else "other"


def render(samples: Mapping[tuple[str, Labels], float], constant: Labels = ()) -> str:
    """Return the samples in the text format: families together, each with its help and type."""
    lines = []
    for name, (kind, help_text) in _FAMILIES.items():
        series = [(labels, value) for (at, labels), value in samples.items() if at == name]
        if series:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [_sample(name, constant + labels, value) for labels, value in sorted(series)]
    return "".join(f"{line}\n" for line in lines)


def parse_last(text: str, constant: Labels = ()) -> dict[tuple[str, Labels], float]:
    """Return an earlier process's samples of its last commits, under the same constant labels."""
    found: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        match = _SERIES.fullmatch(line)
        if match is None or not match["name"].startswith(_LAST):
            continue
        labels = tuple(
            (key, _unescaped(escaped)) for key, escaped in _PAIR.findall(match["labels"])
        )
        if labels[: len(constant)] == constant:
            found[match["name"], labels[len(constant) :]] = float(match["value"])
    return found


def _sample(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


class PrometheusTextfile(TimedListener):
    """Writes the file again after each event that changes a figure; on the coordinator only.

    With ``EveryRank`` every rank needs a file of its own. A label name that Prometheus does not
    accept is a StateError. A failure to write is logged, and no save fails because of it; the next
    event writes again. A crash leaves the file of the previous event.

    Args:
        path_or_uri: The file; its directory exists and node_exporter reads it (``*.prom``).
        labels: Put on every sample; two jobs of one node need two files and different labels. None:
            no labels.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of
            ``path_or_uri``, if it has any.
    """

    def __init__(
        self,
        path_or_uri: Any,
        labels: Mapping[str, str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._labels = tuple((str(k), str(v)) for k, v in (labels or {}).items())
        reserved = {"kind", "phase", "rank", "type", "outcome"}
        for name, _ in self._labels:
            if not _LABEL.fullmatch(name) or name.startswith("__") or name in reserved:
                raise StateError(
                    f"{name!r} cannot be a label here",
                    hint="use letters, digits and _; do not start with __, and do not use "
                    f"{sorted(reserved)}",
                )
        target = Uri.parse(path_or_uri)
        self._key = target.name
        self._storage: Storage = open_storage(target.parent, storage_options)
        self._figures = Figures()
        self._carried = False

    def hear(self, event: Event, at_ns: int) -> None:
        """Write the file if the event changes it."""
        if not self._figures.hear(event, at_ns):
            return
        if not self._carried:
            for key, value in parse_last(self._read_before(), self._labels).items():
                self._figures.samples.setdefault(key, value)
            self._carried = True
        text = render(self._figures.samples, self._labels)
        self._storage.replace(self._key, text.encode())

    def _read_before(self) -> str:
        try:
            return self._storage.read(self._key).decode("utf-8", "replace")
        except NotFoundError:
            return ""
