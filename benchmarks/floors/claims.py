"""What ckptfs claims of its speed: each row's quantities, the floor and the goal of each. Pure.

    CLAIMS                   every row's claims
    findings_of(row, result) what a result says of them: Finding(claim, value, verdict)
    table, markdown          for a terminal, for a page

A ratio belongs to one round, in which both took their turn; its median over the rounds is given. Of several
others the one with the least median of seconds counts: the least of each round would be a peer that
no user can run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ckptfs.bench.analysis import grouped, spread
from ckptfs.bench.results import Phase, Result, Sample, conditions_text, number_text, phase_text

OURS = "ckptfs"
DCP = ("dcp", "dcp:t2", "dcp:t4")
PEERS = ("torch.save", "safetensors", *DCP, "dcp:fsspec", "torchsnapshot", "torch_checkpointing")
MB = 1e6
BOTH: tuple[Phase, ...] = ("save", "load_warm")
HELD_RANKS, HELD_TENSORS = 1024, 1000  # the world that the planner is held to


class What(Enum):
    """What is divided."""

    SECONDS = "seconds"
    CPU_SECONDS = "CPU seconds"

    def of(self, sample: Sample) -> float:
        """Of one call."""
        return sample.wall_s if self is What.SECONDS else sample.cpu_s


class Sense(Enum):
    """Which side of the floor is good."""

    AT_LEAST = "at least"
    AT_MOST = "at most"

    def holds(self, value: float, bound: float) -> bool:
        """Whether ``value`` is as good as ``bound``."""
        return value >= bound if self is Sense.AT_LEAST else value <= bound


class Verdict(Enum):
    """How a value compares."""

    GOAL = "goal met"
    FLOOR = "floor met"
    MISSED = "MISSED"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Found:
    """A quantity: its median, least and largest over the rounds, and whom it was compared with."""

    value: float
    least: float
    most: float
    beside: str = ""


Engines = dict[str, list[Sample]]
Quantity = Callable[[Engines], "Found | None"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One line. floor and goal are None where a figure is given and nothing is claimed of it; goal alone where a floor is all."""

    row: str
    told: str
    phase: Phase
    quantity: Quantity
    sense: Sense
    floor: float | None
    goal: float | None
    unit: str = ""
    where: Callable[[str, str], bool] = field(default=lambda _workload, _target: True)


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim, and what was found. where: workload and target."""

    claim: Claim
    where: str
    found: Found | None

    @property
    def verdict(self) -> Verdict | None:
        """None where nothing is claimed."""
        if self.claim.floor is None:
            return None
        if self.found is None:
            return Verdict.UNKNOWN
        value, sense = self.found.value, self.claim.sense
        if self.claim.goal is not None and sense.holds(value, self.claim.goal):
            return Verdict.GOAL
        return Verdict.FLOOR if sense.holds(value, self.claim.floor) else Verdict.MISSED


# -- quantities


def others_by_ours(*others: str, ours: str = OURS, what: What = What.SECONDS) -> Quantity:
    """How many times as long the best of the others took: 1.3 is 1.3 times as fast as it."""
    return lambda engines: _ratio(engines, others, ours, lambda o, t: what.of(t) / what.of(o))


def ours_by_others(*others: str, ours: str = OURS, what: What = What.SECONDS) -> Quantity:
    """How many times as long ckptfs took."""
    return lambda engines: _ratio(engines, others, ours, lambda o, t: what.of(o) / what.of(t))


def best_of(engines: Mapping[str, Sequence[Sample]], names: Iterable[str]) -> str | None:
    """The name of the engine with the least median seconds; None where none of them took part.

    One engine for all rounds: the best of each round would be a peer that no user can run.
    """
    there = [name for name in names if engines.get(name)]
    median = lambda name: statistics.median(one.wall_s for one in engines[name])  # noqa: E731
    return min(there, key=median, default=None)


def cpu_per_gb(ours: str = OURS) -> Quantity:
    """CPU seconds of all threads and ranks per 10^9 bytes."""
    return lambda engines: _own(engines, ours, lambda one: one.cpu_s_per_gb)


def cpu_seconds(ours: str = OURS) -> Quantity:
    """CPU seconds of one call."""
    return lambda engines: _own(engines, ours, lambda one: one.cpu_s)


def peak_memory(ours: str = OURS) -> Quantity:
    """The most of any round, in MB: a peak is no median."""

    def most(engines: Engines) -> Found | None:
        found = _own(engines, ours, lambda one: (one.peak_memory_bytes or 0) / MB)
        return found and Found(found.most, found.least, found.most)

    return most


def _own(engines: Engines, ours: str, of: Callable[[Sample], float]) -> Found | None:
    samples = _named(engines, ours)
    return _over([of(one) for one in samples]) if samples else None


def _ratio(
    engines: Engines, others: Iterable[str], ours: str, of: Callable[[Sample, Sample], float]
) -> Found | None:
    mine = {one.round: one for one in _named(engines, ours) if one.is_timed}
    best = best_of(engines, others)
    if not mine or best is None:
        return None
    values = [
        of(mine[one.round], one) for one in engines[best] if one.round in mine and one.is_timed
    ]
    return _over(values, best) if values else None


def _named(engines: Engines, ours: str) -> list[Sample]:
    """ckptfs under its name, or with the client that was asked for."""
    return next((found for name, found in engines.items() if name.partition(":")[0] == ours), [])


def _over(values: list[float], beside: str = "") -> Found:
    told = spread(values)
    return Found(told.median, told.least, told.most, beside)


# -- the rows


def _file_claims() -> Iterable[Claim]:
    """On a directory."""
    least, most = Sense.AT_LEAST, Sense.AT_MOST
    raw = others_by_ours("raw:direct")
    yield Claim("durable", "of raw O_DIRECT", "save", raw, least, 0.80, 0.90)
    yield Claim("durable", "CPU s/GB", "save", cpu_per_gb(), most, 0.20, 0.12)
    faster = others_by_ours(*PEERS)
    yield Claim("durable", "faster than the best peer", "save", faster, least, 1.3, 1.5, "x")
    dcp = others_by_ours(*DCP)
    yield Claim("tmpfs", "faster than DCP's best", "save", dcp, least, 1.0, 1.3, "x")
    yield Claim("tmpfs", "CPU s/GB", "save", cpu_per_gb(), most, None, None)
    preadv = others_by_ours("raw:buffered")
    yield Claim("hot", "of raw preadv", "load_warm", preadv, least, 0.75, 0.85)
    yield Claim("hot", "faster than DCP", "load_warm", others_by_ours("dcp"), least, 4.0, 6.0, "x")
    best = others_by_ours("raw:direct", "raw:buffered")
    yield Claim("cold", "of raw, the better way", "load_cold", best, least, 0.85, 0.95)
    yield Claim("cold", "faster than DCP", "load_cold", dcp, least, None, None, "x")
    for phase in BOTH:
        beside = ours_by_others("safetensors")
        yield Claim("small", "safetensors' time", phase, beside, most, 1.5, 1.0, "x")
        yield Claim("small", "faster than DCP", phase, others_by_ours("dcp"), least, 5.0, 8.0, "x")
        yield Claim("shapes", "safetensors' time", phase, beside, most, None, None, "x")
        yield Claim(
            "shapes", "faster than DCP", phase, others_by_ours("dcp"), least, 4.0, None, "x"
        )
    copy = ours_by_others("memcpy")
    yield Claim("stall", "a bare copy's time", "stall", copy, most, 1.3, 1.1, "x")
    stock = others_by_ours("dcp thread", "dcp process")
    yield Claim("stall", "less than DCP's best", "stall", stock, least, 2.5, 5.0, "x")
    waiting = ours_by_others("ckptfs save")
    yield Claim("first", "a synchronous save's time", "stall", waiting, most, 1.1, 1.0, "x")
    for ours, told, at_most in (("copy", "a copy", 1.5), ("export", "an export", 2.0)):
        beside = ours_by_others("cp", ours=ours)
        yield Claim("copy", f"cp -r's time, {told}", "save", beside, most, at_most, at_most, "x")
        yield Claim("copy", f"CPU s/GB, {told}", "save", cpu_per_gb(ours), most, None, None)
    beside = ours_by_others("safetensors", ours="export")
    yield Claim("copy", "safetensors' time, an export", "save", beside, most, None, None, "x")
    for phase in BOTH:
        stock = ours_by_others("dcp", "dcp:fsspec")
        yield Claim("fixed", "DCP's best time", phase, stock, most, None, None, "x")
        yield Claim("memory", "MB beyond the state", phase, peak_memory(), most, 128.0, 64.0)
        yield Claim("memory", "MB, DCP", phase, peak_memory("dcp"), most, None, None)
        for row in ("ranks2", "ranks4", "nfs"):
            best = others_by_ours(*DCP)
            yield Claim(row, "faster than DCP's best", phase, best, least, None, None, "x")
            yield Claim(row, "CPU s/GB", phase, cpu_per_gb(), most, None, None)
        beside = ours_by_others("dcp")
        yield Claim("ranks2", "DCP's time", phase, beside, most, 1.05, 1.05, "x")
    stock = ours_by_others("dcp")
    yield Claim("ranks2", "DCP's time", "load_cold", stock, most, 1.05, 1.05, "x")


def _server_claims() -> Iterable[Claim]:
    """Compared with torch's FsspecWriter and FsspecReader, s3torchconnector and bare obstore."""
    least, most = Sense.AT_LEAST, Sense.AT_MOST
    for phase in BOTH:
        connector, fsspec = others_by_ours("s3torchconnector"), others_by_ours("dcp")
        for row in ("s3", "s3-unsigned"):
            yield Claim(row, "faster than s3torchconnector", phase, connector, least, 3.0, 5.0, "x")
            yield Claim(row, "faster than FsspecWriter", phase, fsspec, least, 8.0, 14.0, "x")
            yield Claim(row, "CPU s/GB", phase, cpu_per_gb(), most, 0.35, 0.25)
            yield Claim(row, "of bare obstore", phase, others_by_ours("raw"), least, None, None)
        yield Claim(
            "latency", "FsspecWriter's time", phase, ours_by_others("dcp"), most, None, None, "x"
        )
        yield Claim("tls", "faster than FsspecWriter", phase, fsspec, least, None, None, "x")
        yield Claim("tls", "CPU s/GB", phase, cpu_per_gb(), most, None, None)
        yield Claim("tls", "of bare obstore", phase, others_by_ours("raw"), least, None, None)
        yield from _radosgw_claims(phase)


def _age_claims() -> Iterable[Claim]:
    """CPU seconds: the tensors are small, and other work may share the machine."""
    most, cpu = Sense.AT_MOST, What.CPU_SECONDS
    old = ours_by_others("a new run", ours="an old run", what=cpu)
    yield Claim("history", "CPU, an old run by a new one", "save", old, most, 1.3, 1.3, "x")
    yield Claim("catalog", "CPU, many saves by few", "load_warm", old, most, 2.0, 2.0, "x")
    new = ours_by_others("the other tree", ours="this tree", what=cpu)
    yield Claim("readers", "CPU, this tree by the other", "load_warm", new, most, 1.05, 1.05, "x")


def _radosgw_claims(phase: Phase) -> Iterable[Claim]:
    """On a real gateway, with large tensors; what small ones and moto show is given."""

    def is_held(workload: str, _: str) -> bool:
        return workload.startswith("llm")

    most = Sense.AT_MOST
    stock, raw = ours_by_others("dcp"), ours_by_others("raw")
    cpu = ours_by_others("dcp", what=What.CPU_SECONDS)
    for told, quantity, bound in (
        ("FsspecWriter's time", stock, 1 / 3),
        ("FsspecWriter's CPU", cpu, 0.5),
        ("bare obstore's time", raw, 1.15),
    ):
        yield Claim("radosgw", told, phase, quantity, most, bound, bound, "x", where=is_held)
    yield Claim("moto", "FsspecWriter's time", phase, stock, most, None, None, "x")


def _planner_claims() -> Iterable[Claim]:
    """The floor is of one size of world; others are given."""

    def is_held(workload: str, _: str) -> bool:
        return workload.startswith(f"{HELD_RANKS} ranks x {HELD_TENSORS} ")

    stock, least = others_by_ours("dcp"), Sense.AT_LEAST
    yield Claim("planner", "less than DCP", "save", stock, least, 5.0, 10.0, "x", where=is_held)
    cpu = others_by_ours("dcp", what=What.CPU_SECONDS)
    yield Claim("planner", "less CPU than DCP", "save", cpu, least, None, None, "x", where=is_held)
    yield Claim(
        "planner", "less than DCP", "save", stock, least, None, None, "x",
        where=lambda workload, target: not is_held(workload, target),
    )  # fmt: skip
    yield Claim("planner", "coordinator's CPU s", "save", cpu_seconds(), Sense.AT_MOST, None, None)
    yield Claim("planner", "its process, MB", "save", peak_memory(), Sense.AT_MOST, None, None)


CLAIMS: tuple[Claim, ...] = (
    *_file_claims(),
    *_planner_claims(),
    *_age_claims(),
    *_server_claims(),
)


def findings_of(row: str, result: Result) -> list[Finding]:
    """Every claim of the row, at every place where its phase was measured."""
    places = grouped(result)
    found = []
    for claim in (one for one in CLAIMS if one.row == row):
        for (workload, target, phase), engines in places:
            if phase == claim.phase and claim.where(workload, target):
                where = "; ".join(
                    filter(None, (f"{workload}, {target}", conditions_text(result, workload)))
                )
                found.append(Finding(claim, where, claim.quantity(engines)))
    return found


# -- for people

COLUMNS = ("row", "phase", "what", "found", "least-most", "floor", "goal", "", "beside", "at")


def cells(finding: Finding) -> list[str]:
    """One line of the table."""
    claim, found = finding.claim, finding.found
    sign = ">=" if claim.sense is Sense.AT_LEAST else "<="
    bounds = [
        "" if bound is None else f"{sign} {number_text(bound)}{claim.unit}"
        for bound in (claim.floor, claim.goal)
    ]
    told = f"{number_text(found.value)}{claim.unit}" if found else "-"
    ends = f"{number_text(found.least)}-{number_text(found.most)}" if found else ""
    verdict = finding.verdict.value if finding.verdict else ""
    beside = found.beside if found else ""
    return [
        claim.row, phase_text(claim.phase), claim.told, told, ends, *bounds, verdict, beside,
        finding.where,
    ]  # fmt: skip


def markdown(findings: Sequence[Finding]) -> str:
    """The table as a page has it."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(cells(one))} |" for one in findings), ""])
