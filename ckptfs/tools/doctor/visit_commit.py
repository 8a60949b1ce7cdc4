"""What commits rest on: the collective part."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.control.world import World
from ckptfs.storage.base import Shape
from ckptfs.tools.doctor.judge import commit as judged
from ckptfs.tools.doctor.look.commit import (
    Racer,
    look_at_links,
    look_at_rename,
    look_at_replace,
)
from ckptfs.tools.doctor.look.uploads import client_of, look_at_multipart
from ckptfs.tools.doctor.seen import Race, Refusal, Replaced
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict
from ckptfs.tools.doctor.visit import Visit
from ckptfs.tools.doctor.visit_sharing import groups_of
from ckptfs.topology.storage_domains import Placement

__all__ = ["check_commit"]


def check_commit(visit: Visit, found: Placement | Refusal) -> list[Finding]:
    """Collective. Exclusive create, replace, and what the shape of the place allows beyond."""
    findings = list(_race(visit, found))
    storage, rank = visit.corner.storage, visit.control.rank
    findings += visit.check(
        "atomic-replace",
        Theme.COMMIT,
        lambda: look_at_replace(storage, rank, visit.settings),
        judged.judge_replace,
    )
    if visit.is_mounted:
        return [*findings, *_mounted(visit)]
    client = client_of(storage)
    if client is not None:
        findings += judged.judge_conditional_replace(visit.control.worlds, visit.caps)
        findings += visit.check(
            "multipart",
            Theme.COMMIT,
            lambda: look_at_multipart(storage, client, rank),
            judged.judge_multipart,
        )
    return findings


def _race(visit: Visit, found: Placement | Refusal) -> tuple[Finding, ...]:
    control, groups = visit.control, groups_of(visit, found)
    name = "exclusive-create" if visit.is_mounted else "conditional-create"
    if isinstance(found, Refusal) and len(groups) > 1:
        why = "not tested: who shares the place is not known"
        return (Finding(name, Theme.COMMIT, Verdict.UNKNOWN, why),)
    racer = Racer(visit.corner.storage, control.rank, visit.settings.clock)
    control.step("doctor.race.make", racer.make)
    rounds = visit.settings.rounds if all(c.exclusive_create for c in visit.caps) else 0
    for _ in range(rounds):
        control.step("doctor.race", racer.run)

    def judge(worlds: Sequence[World], seen: Sequence[Race]) -> tuple[Finding, ...]:
        return judged.judge_race(worlds, visit.caps, seen, groups, name=name)

    return visit.check(name, Theme.COMMIT, racer.result, judge)


def _mounted(visit: Visit) -> list[Finding]:
    storage, rank = visit.corner.storage, visit.control.rank
    moves = [c.shape is Shape.FILESYSTEM for c in visit.caps]
    visit.look_at_mounts()
    kinds = ["" if mount is None else mount.kind for mount in visit.mounts]

    def look() -> Replaced:
        return look_at_rename(storage, rank) if all(moves) else Replaced(0, 0, 0, 0)

    def judge(worlds: Sequence[World], seen: Sequence[Replaced]) -> tuple[Finding, ...]:
        return judged.judge_rename(worlds, moves, seen, kinds)

    findings = list(visit.check("rename-directory", Theme.COMMIT, look, judge))
    findings += judged.judge_fsync(visit.control.worlds, visit.caps)
    if all(moves):
        refused = visit.control.step("doctor.links", lambda: look_at_links(storage, rank))
        findings += judged.judge_links(visit.control.worlds, refused)
    return findings
