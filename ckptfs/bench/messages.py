"""What travels between the process that starts a benchmark and its ranks: the request, then the findings. Pure.

    Asked(targets, workloads, engines, rounds, ...)     encode_asked -> text -> decode_asked
    Told = one of workload, target, engine, sample, note, progress      a line of JSON each
    Gathered.take(told)  ...  Gathered.result(...)                      -> Result

A request holds storage options, and with them perhaps secrets: it goes through a pipe to processes of
our own and is stored nowhere. ``settings_of`` is what a result may tell of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ckptfs.bench.results import Engine, Phase, Result, Sample, Target, Workload
from ckptfs.bench.workloads import WorkloadSpec, make_workload
from ckptfs.uri import Uri

__all__ = [
    "Asked",
    "Baseline",
    "Gathered",
    "LoopShape",
    "Progress",
    "TargetAsked",
    "Told",
    "WorkloadAsked",
    "decode_asked",
    "decode_told",
    "encode_asked",
    "encode_told",
    "settings_of",
]

# What memory a call is charged with: what it added to what the process held before it, or all that
# came since the state was made and the engines' modules were imported (pools, caches, lazy imports).
Baseline = Literal["call", "start"]
_MOVED: tuple[Phase, ...] = ("save", "load_warm", "load_cold")


@dataclass(frozen=True, slots=True)
class TargetAsked:
    """A place, and the directory or prefix of its own that everything is written below.

    Attributes:
        uri: As it was given, with credentials.
        home: The name below it, which is used by no other program.
        storage_options: What fsspec's filesystem of that protocol takes.
    """

    uri: str = field(repr=False)
    home: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def place(self) -> Uri:
        """Where, parsed."""
        return Uri.parse(self.uri)

    @property
    def root(self) -> Uri:
        """The home."""
        return self.place / self.home


@dataclass(frozen=True, slots=True)
class WorkloadAsked:
    """One kind of state, by parameters or bytes; its default size without both.

    Attributes:
        kind: Which kind.
        params: How many parameters; None: not by parameters.
        size_bytes: How many bytes; None: not by bytes.
    """

    kind: str
    params: int | None = None
    size_bytes: int | None = None

    def made(self) -> WorkloadSpec:
        """Return its tensors.

        Raises:
            StateError: See ``make_workload``.
        """
        return make_workload(self.kind, params=self.params, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True)
class LoopShape:
    """The training loop: a save after every ``every``-th step but the last.

    Attributes:
        steps: How many steps.
        every: How many steps between two saves.
    """

    steps: int = 20
    every: int = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured.

    Attributes:
        targets: Where.
        workloads: Which states.
        engines: Names of engines; () takes all that are installed and fit.
        rounds: How many rounds count.
        within_s: No round begins that would end later than so many seconds after the first began, over all
            targets and workloads; one round counts in any case. None: all rounds, however long they take.
        ranks: How many processes.
        durable: Whether writers that have the choice make files survive a power cut.
        keep: Leave what the last round wrote.
        loop: The training loop of the workload "loop".
        warm_ups: How many rounds come first and do not count.
        phases: Those of saves and loads that are measured; what is loaded has to be saved in any case.
        memory_from: What peak memory is compared with: that before the "call", or that at the "start" of the
            process.
    """

    targets: tuple[TargetAsked, ...]
    workloads: tuple[WorkloadAsked, ...]
    engines: tuple[str, ...] = ()
    rounds: int = 5
    ranks: int = 1
    durable: bool = True
    keep: bool = False
    loop: LoopShape = LoopShape()
    warm_ups: int = 1
    phases: tuple[Phase, ...] = _MOVED
    memory_from: Baseline = "call"
    within_s: float | None = None


def encode_asked(asked: Asked) -> str:
    """Return one line of JSON.

    Args:
        asked: The value.

    Raises:
        TypeError: Storage options that JSON does not know.
    """
    return json.dumps(asdict(asked))


def decode_asked(text: str) -> Asked:
    """Return the value that ``encode_asked`` made ``text`` of."""
    record = json.loads(text)
    targets = tuple(TargetAsked(**one) for one in record.pop("targets"))
    workloads = tuple(WorkloadAsked(**one) for one in record.pop("workloads"))
    engines, loop = tuple(record.pop("engines")), LoopShape(**record.pop("loop"))
    phases = tuple(record.pop("phases"))
    return Asked(targets, workloads, engines, loop=loop, phases=phases, **record)


def settings_of(asked: Asked) -> dict[str, Any]:
    """Return what of ``asked`` changes the numbers, without places and options."""
    found: dict[str, Any] = {
        "ranks": asked.ranks,
        "rounds": asked.rounds,
        "warm_up_rounds": asked.warm_ups,
        "memory_from": asked.memory_from,
        "durable": asked.durable,
        "engines": list(asked.engines) or "all that are installed",
        "storage_options": sorted({name for t in asked.targets for name in t.storage_options}),
    }
    if asked.within_s is not None:
        found["within_s"] = asked.within_s
    if any(one.kind == "loop" for one in asked.workloads):
        found["loop"] = asdict(asked.loop)
    return found


# -- findings --------------------------------------------------------------------------------------


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
