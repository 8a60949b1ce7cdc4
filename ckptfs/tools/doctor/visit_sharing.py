"""Who shares the place with whom, how soon one sees another's write, and clocks: the collective part."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.errors import CkptfsError
from ckptfs.tools.doctor.judge.sharing import (
    judge_clocks,
    judge_directory,
    judge_domains,
    judge_visibility,
)
from ckptfs.tools.doctor.look.sharing import Watcher, place_clock
from ckptfs.tools.doctor.seen import Arrivals, Clocks, Refusal
from ckptfs.tools.doctor.verdicts import Finding, Theme
from ckptfs.tools.doctor.visit import Visit
from ckptfs.topology.ensure_dir import ensure_dir
from ckptfs.topology.storage_domains import Placement, probe_domains

__all__ = ["check_sharing", "find_domains", "groups_of"]

_PLAIN_S = 2.0  # a look that does not look afresh is given no longer


def find_domains(visit: Visit) -> Placement | Refusal:
    """Collective. ckptfs's own probe, in the corner; its error is the same on every rank."""
    try:
        return probe_domains(visit.control, visit.corner.storage)
    except CkptfsError as error:
        return Refusal.of(error)


def groups_of(visit: Visit, found: Placement | Refusal) -> list[tuple[int, ...]]:
    """Ranks that see the same bytes; where that was not found out, those of one node."""
    if not isinstance(found, Refusal):
        return [domain.ranks for domain in found.domains]
    worlds = visit.control.worlds
    nodes: dict[str, list[int]] = {}
    for rank, world in enumerate(worlds):
        nodes.setdefault(world.node, []).append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


def check_sharing(visit: Visit, found: Placement | Refusal) -> list[Finding]:
    """Collective. Domains, a directory for all, visibility, clocks."""
    worlds, settings = visit.control.worlds, visit.settings
    domains = found if isinstance(found, Refusal) else found.domains
    findings = list(judge_domains(worlds, domains, settings.expect))
    if not isinstance(found, Refusal) and visit.is_mounted:
        refusal = None
        try:
            ensure_dir(visit.control, visit.corner.storage, found, "shared")
        except CkptfsError as error:
            refusal = Refusal.of(error)
        findings += judge_directory(worlds, refusal)
    findings += _visibility(visit, found)
    findings += _clocks(visit)
    return findings


def _visibility(visit: Visit, found: Placement | Refusal) -> tuple[Finding, ...]:
    control, patience_s = visit.control, visit.settings.patience_s
    rank, everybody = control.rank, tuple(range(control.size))
    # Where nobody knows who shares it, all are asked: that is what the numbers shall tell.
    groups = [everybody] if isinstance(found, Refusal) else groups_of(visit, found)
    mine = next(group for group in groups if rank in group)
    writers = sorted({mine[0], mine[-1]})
    nodes = {world.node for world in control.worlds}
    plain: list[Arrivals] = []
    if len(nodes) > 1:
        plain = _arrivals(visit, writers, "plain", _PLAIN_S)
    fresh = _arrivals(visit, writers, "fresh", patience_s)

    def judge(_: Sequence[None]) -> tuple[Finding, ...]:
        return judge_visibility(control.worlds, fresh, plain, patience_s)

    return control.step("doctor.visibility", lambda: None, judge)


def _arrivals(visit: Visit, writers: Sequence[int], name: str, wait_s: float) -> list[Arrivals]:
    control, storage = visit.control, visit.corner.storage
    watcher = Watcher(storage, control.rank, visit.settings.clock, name, fresh=name == "fresh")
    control.step(f"doctor.{name}.prime", lambda: watcher.prime(writers))
    control.step(
        f"doctor.{name}.write", lambda: watcher.write() if control.rank in writers else None
    )
    return control.step(f"doctor.{name}.watch", lambda: watcher.watch(writers, wait_s))


def _clocks(visit: Visit) -> tuple[Finding, ...]:
    control, clock = visit.control, visit.settings.clock
    called_s = clock.wall_s()
    control.step("doctor.clock.meet", lambda: None, lambda _: None)
    # Every rank reads its clock after rank 0 called the step above and before it leaves this one.
    told_s = control.step("doctor.clock.read", clock.wall_s)
    bounds_s = control.step(
        "doctor.clock.bounds", lambda: (called_s, clock.wall_s()), lambda told: told[0]
    )

    def look() -> Clocks:
        mine_s = told_s[control.rank]
        place_s, source = place_clock(visit.corner.storage, clock, control.rank)
        return Clocks(place_s, (mine_s - bounds_s[1], mine_s - bounds_s[0]), source)

    return visit.check("clock-storage", Theme.SHARING, look, judge_clocks)
