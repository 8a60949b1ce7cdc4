"""What is asked of a benchmark, as one value that travels to every rank. Pure.

    Asked(targets, workloads, engines, rounds, ...)     encode_asked -> text -> decode_asked

The text holds storage options, and with them perhaps secrets: it goes through a pipe to processes of
our own and is stored nowhere. ``settings_of`` is what a result may tell of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckptfs.bench.results import Phase
from ckptfs.bench.workloads import WorkloadSpec, make_workload
from ckptfs.uri import Uri

__all__ = [
    "Asked",
    "Baseline",
    "LoopShape",
    "TargetAsked",
    "WorkloadAsked",
    "decode_asked",
    "encode_asked",
    "settings_of",
]


# What memory a call is charged with: what it added to what the process held before it, or all that
# came since the state was made and the engines' modules were imported (pools, caches, lazy imports).
Baseline = Literal["call", "start"]
_MOVED: tuple[Phase, ...] = ("save", "load_warm", "load_cold")


@dataclass(frozen=True, slots=True)
class TargetAsked:
    """A place, and the directory or prefix of its own that everything is written below.

    uri: as it was given, with credentials. home: the name below it, which nobody else uses.
    """

    uri: str
    home: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

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
    """One kind, by parameters or bytes; its default size without both."""

    kind: str
    params: int | None = None
    size_bytes: int | None = None

    def made(self) -> WorkloadSpec:
        """Its tensors. StateError: see ``make_workload``."""
        return make_workload(self.kind, params=self.params, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True)
class LoopShape:
    """The training loop: so many steps, a save after every ``every``-th but the last."""

    steps: int = 20
    every: int = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """engines: names that were asked for; () takes all that are installed and fit.

    rounds: those that count; warm_ups of them come first and do not. phases: of saves and loads, those
    that are measured; what is loaded has to be saved in any case. memory_from: see ``Baseline``.
    durable: whether writers that have the choice make files survive a power cut. keep: leave what the
    last round wrote.
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


def encode_asked(asked: Asked) -> str:
    """One line of JSON. TypeError: storage options that JSON does not know."""
    return json.dumps(asdict(asked))


def decode_asked(text: str) -> Asked:
    """The same value again."""
    record = json.loads(text)
    targets = tuple(TargetAsked(**one) for one in record.pop("targets"))
    workloads = tuple(WorkloadAsked(**one) for one in record.pop("workloads"))
    engines, loop = tuple(record.pop("engines")), LoopShape(**record.pop("loop"))
    phases = tuple(record.pop("phases"))
    return Asked(targets, workloads, engines, loop=loop, phases=phases, **record)


def settings_of(asked: Asked) -> dict[str, Any]:
    """What changes the numbers, without places and options."""
    found: dict[str, Any] = {
        "ranks": asked.ranks,
        "rounds": asked.rounds,
        "warm_up_rounds": asked.warm_ups,
        "memory_from": asked.memory_from,
        "durable": asked.durable,
        "engines": list(asked.engines) or "all that are installed",
        "storage_options": sorted({name for t in asked.targets for name in t.storage_options}),
    }
    if any(one.kind == "loop" for one in asked.workloads):
        found["loop"] = asdict(asked.loop)
    return found
