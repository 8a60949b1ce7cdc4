"""What rank 0 tells while it measures, and what is gathered of it. Pure.

Told = one of workload, target, engine, sample, note, progress      a line of JSON each
Gathered.take(told)  ...  Gathered.result(...)                      -> Result
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckptfs.bench.results import Engine, Result, Sample, Target, Workload

__all__ = ["Gathered", "Progress", "Told", "decode_told", "encode_told"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What is under way, for a person.

    Attributes:
        text: In words.
    """

    text: str


Told = Workload | Target | Engine | Sample | Progress | str  # str: a note
_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (Workload, Target, Engine, Sample, Progress)
}


def encode_told(told: Told) -> str:
    """Return one line of JSON, of ``told``."""
    if isinstance(told, str):
        return json.dumps({"kind": "note", "text": told})
    return json.dumps({"kind": type(told).__name__, "value": asdict(told)})


def decode_told(record: Mapping[str, Any]) -> Told:
    """Return the value that ``encode_told`` made ``record`` of."""
    if record["kind"] == "note":
        return str(record["text"])
    found: Told = _KINDS[record["kind"]](**record["value"])
    return found


@dataclass
class Gathered:
    """Everything that was reported until now.

    Attributes:
        workloads: The states.
        targets: The places.
        engines: The engines.
        samples: One for each call that was measured.
        notes: What else was noticed.
    """

    workloads: list[Workload] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, told: Told) -> None:
        """Add ``told``; what was there before counts once."""
        if isinstance(told, Sample):
            self.samples.append(told)
        elif isinstance(told, Workload):
            _once(self.workloads, told)
        elif isinstance(told, Target):
            _once(self.targets, told)
        elif isinstance(told, Engine):
            self.engines.append(told)
        elif isinstance(told, str):
            _once(self.notes, told)

    def result(
        self,
        *,
        date: str,
        command: str,
        machine: Mapping[str, Any],
        versions: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> Result:
        """Return the whole.

        Args:
            date: ISO 8601, UTC.
            command: The command, credentials masked.
            machine: What is known of the machine.
            versions: Of the packages.
            settings: What changes the numbers.
        """
        return Result(
            what="saves and loads of one state by each engine in turn, at each target",
            date=date,
            command=command,
            machine=machine,
            versions=versions,
            settings=settings,
            workloads=tuple(self.workloads),
            targets=tuple(self.targets),
            engines=tuple(_merged(self.engines)),
            samples=tuple(self.samples),
            notes=tuple(self.notes),
        )


def _once(found: list[Any], one: Any) -> None:
    if one not in found:
        found.append(one)


def _merged(told: Sequence[Engine]) -> list[Engine]:
    """One entry per name: an engine promises other things on a directory than on an object store."""
    found: dict[str, Engine] = {}
    for one in told:
        before = found.get(one.name)
        if before is None:
            found[one.name] = one
            continue
        found[one.name] = replace(
            before,
            version=_both(before.version, one.version),
            durable=_both(before.durable, one.durable),
            verified=_both(before.verified, one.verified),
        )
    return list(found.values())


def _both(a: str, b: str) -> str:
    return a if b in a.split("; ") else f"{a}; {b}"
