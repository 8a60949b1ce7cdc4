"""The messages between the process that starts a benchmark and its ranks. Pure.

    ``Asked(targets, workloads, engines, rounds, ...)``             to each rank
    ``StoreAt(port)``                                               from rank 0, and to the others
    ``Told``: a workload, target, engine, sample, note or progress  from rank 0
    ``Gathered.take(told)``  ...  ``Gathered.result(...)``              -> Result

A request holds storage options, which may contain secrets. It goes through a pipe to our own processes
and is stored nowhere. ``settings_of`` returns the part of it that a result may show.
"""

from __future__ import annotations

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
    "StoreAt",
    "TargetAsked",
    "Told",
    "WorkloadAsked",
    "settings_of",
]

# The memory that a call is charged with: what it added to the memory before the call, or everything that
# was added since the state was made and the engines' modules imported (pools, caches, lazy imports).
Baseline = Literal["call", "start"]
_MOVED: tuple[Phase, ...] = ("save", "load_warm", "load_cold")


@dataclass(frozen=True, slots=True)
class TargetAsked:
    """A place to measure, and the new directory or prefix in it that everything is written below.

    Attributes:
        uri: The URI as it was given, with credentials.
        home: The name of the directory or prefix; no other program uses it.
        storage_options: Options for fsspec's filesystem of that protocol.
    """

    uri: str = field(repr=False)
    home: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def place(self) -> Uri:
        """The parsed URI."""
        return Uri.parse(self.uri)

    @property
    def root(self) -> Uri:
        """The URI of the home."""
        return self.place / self.home


@dataclass(frozen=True, slots=True)
class WorkloadAsked:
    """A kind of state and its size, by parameters or bytes; without both it has its default size.

    Attributes:
        kind: The kind.
        params: The number of parameters; None: not by parameters.
        size_bytes: The size in bytes; None: not by bytes.
    """

    kind: str
    params: int | None = None
    size_bytes: int | None = None

    def made(self) -> WorkloadSpec:
        """Return its specification.

        Raises:
            StateError: See ``make_workload``.
        """
        return make_workload(self.kind, params=self.params, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True)
class LoopShape:
    """The training loop: a save after every ``every``-th step but the last.

    Attributes:
        steps: The number of steps.
        every: The number of steps between two saves.
    """

    steps: int = 20
    every: int = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure.

    Attributes:
        targets: The places.
        workloads: The states.
        engines: Names of engines; empty: all that are installed and fit.
        rounds: How many rounds count.
        within_s: A time limit in seconds from the start, for all targets and workloads together. No round
            begins that would end later, but one round always counts. None: all rounds, however long they
            take.
        ranks: The number of processes.
        durable: Whether writers that have the choice make files survive a power cut.
        keep: Whether to leave what the last round wrote.
        loop: The training loop of the workload "loop".
        warm_ups: How many rounds come first and do not count.
        phases: The phases of saves and loads to measure. The save is always made, because loads need it.
        memory_from: What peak memory is compared with: the memory before the "call", or at the "start" of
            the process.
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


def settings_of(asked: Asked) -> dict[str, Any]:
    """Return the settings of ``asked`` that change the numbers; no places, no values of options."""
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


@dataclass(frozen=True, slots=True)
class StoreAt:
    """Where the ranks meet.

    Attributes:
        port: The port of the store that rank 0 hosts.
    """

    port: int


# -- findings --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """What is under way, for people.

    Attributes:
        text: A text.
    """

    text: str


Told = Workload | Target | Engine | Sample | Progress | str  # str: a note


@dataclass
class Gathered:
    """Everything that was reported so far.

    Attributes:
        workloads: The states.
        targets: The places.
        engines: The engines.
        samples: One for each measured call.
        notes: Other observations.
    """

    workloads: list[Workload] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, told: Told) -> None:
        """Add ``told``. Equal workloads, targets and notes are kept once."""
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
        """Return the result.

        Args:
            date: The date, in ISO 8601, UTC.
            command: The command, with credentials masked.
            machine: Properties of the machine.
            versions: Versions of packages.
            settings: The settings that change the numbers.
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


def _merged(engines: Sequence[Engine]) -> list[Engine]:
    """Return one engine per name, because engines promise different things at different targets."""
    found: dict[str, Engine] = {}
    for one in engines:
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
