"""Space, bucket rules, mount, names and speed: the collective part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptfs.control.world import World
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.tools.doctor.judge.rules import judge_rules
from ckptfs.tools.doctor.judge.space import judge_mount, judge_names, judge_room
from ckptfs.tools.doctor.judge.speed import judge_bandwidth, judge_latency
from ckptfs.tools.doctor.look.rules import how_to_look, look_at_rules
from ckptfs.tools.doctor.look.space import look_at_names, look_at_room
from ckptfs.tools.doctor.look.speed import look_at_latency, read_back, write_whole
from ckptfs.tools.doctor.look.uploads import client_of
from ckptfs.tools.doctor.seen import Access, Room, Rules, Transfer, Why
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict
from ckptfs.tools.doctor.visit import Visit

__all__ = ["check_place"]

_NOT_TESTED = (
    ("atomic-replace", Theme.COMMIT),
    ("domains", Theme.SHARING),
    ("visibility-delay", Theme.SHARING),
    ("latency", Theme.SPEED),
    ("write-bandwidth", Theme.SPEED),
)


def check_place(
    visit: Visit, access: Sequence[Access], groups: Sequence[Sequence[int]], *, writable: bool
) -> list[Finding]:
    """Collective. Space, rules, mount; names and speed where something can be written.

    groups: ranks that see the same bytes.
    """
    if not visit.mounts:
        visit.look_at_mounts()
    rooms = _rooms(visit, access)
    worlds, settings = visit.control.worlds, visit.settings
    findings = list(judge_room(worlds, rooms, visit.mounts, settings.needs_bytes))
    if _is_bucket(visit):
        findings += _rules(visit)
        findings += _data_path(visit)
    findings += judge_mount(worlds, visit.mounts)
    if not writable:
        why = "not tested: nothing could be written"
        create = "exclusive-create" if visit.is_mounted else "conditional-create"
        names = ((create, Theme.COMMIT), *_NOT_TESTED)
        return findings + [Finding(n, t, Verdict.UNKNOWN, why) for n, t in names]
    storage, rank = visit.corner.storage, visit.control.rank
    findings += visit.check("names", Theme.MOUNT, lambda: look_at_names(storage, rank), judge_names)
    findings += visit.check(
        "latency", Theme.SPEED, lambda: look_at_latency(storage, rank), judge_latency
    )
    findings += _bandwidth(visit, rooms, groups)
    return findings + list(_lacks(visit))


def _lacks(visit: Visit) -> tuple[Finding, ...]:
    """What the client of the corner learnt of the server from all requests before."""
    client = client_of(visit.corner.storage)
    if client is None:
        return ()

    def judge(_: Sequence[World], answers: Sequence[tuple[str, ...]]) -> tuple[Finding, ...]:
        lacking = list(dict.fromkeys(text for answer in answers for text in answer))
        if not lacking:
            text = "ranges are read and batches deleted as ckptfs asks"
            return (Finding("requests", Theme.SPEED, Verdict.OK, text),)
        meaning = "it works, with more bytes or more requests than elsewhere"
        advice = "fsspec+ before the URI may read ranges there (docs/stores/s3.md)"
        text = "; ".join(lacking)
        return (Finding("requests", Theme.SPEED, Verdict.WARN, text, meaning, advice),)

    return visit.check("requests", Theme.SPEED, lambda: client.lacks, judge)


def _rooms(visit: Visit, access: Sequence[Access]) -> list[Room]:
    told = visit.control.step("doctor.room", lambda: look_at_room(visit.corner.run))
    full = [
        next((r for r in s.tried.values() if r is not None and r.why is Why.NO_SPACE), None)
        for s in access
    ]
    return [replace(t, full=t.full or f) for t, f in zip(told, full, strict=True)]


def _is_bucket(visit: Visit) -> bool:
    named = visit.uri.protocol.rpartition("+")[2] in PROTOCOLS
    return named or client_of(visit.corner.run) is not None


def _rules(visit: Visit) -> tuple[Finding, ...]:
    run, rank = visit.corner.run, visit.control.rank

    def judge(_: Sequence[World], seen: Sequence[Rules | None]) -> tuple[Finding, ...]:
        return judge_rules(seen[0], how_to_look(visit.uri.protocol))

    # One bucket has one set of rules: rank 0 asks.
    return visit.check(
        "versioning", Theme.RULES, lambda: look_at_rules(run) if rank == 0 else None, judge
    )


def _data_path(visit: Visit) -> tuple[Finding, ...]:
    """Which library carries the data, and why; nothing where there is no choice."""
    run = visit.corner.run

    def judge(_: Sequence[World], seen: Sequence[str]) -> tuple[Finding, ...]:
        paths = list(dict.fromkeys(path for path in seen if path))
        slow = any(not path.startswith("obstore") for path in paths)
        meaning = "each file is written and read in one stream, not in parts" if slow else ""
        text = "; ".join(paths)
        return (Finding("data-path", Theme.SPEED, Verdict.OK, text, meaning),) if paths else ()

    return visit.check("data-path", Theme.SPEED, lambda: getattr(run, "data_path", ""), judge)


def _bandwidth(
    visit: Visit, rooms: Sequence[Room], groups: Sequence[Sequence[int]]
) -> tuple[Finding, ...]:
    control, settings, storage = visit.control, visit.settings, visit.corner.storage
    wanted = 2 * settings.size_bytes * control.size
    if not settings.size_bytes:
        return ()
    if any(r.free_bytes is not None and r.free_bytes < wanted for r in rooms):
        why = "not measured: too little space"
        return (Finding("write-bandwidth", Theme.SPEED, Verdict.UNKNOWN, why, "", "--size 8MiB"),)
    rank = control.rank
    written = control.step("doctor.write", lambda: write_whole(storage, rank, settings.size_bytes))
    mine = next(group for group in groups if rank in group)

    def read() -> Transfer:
        return read_back(storage, _reads(control.worlds, mine, rank), written[rank])

    def judge(worlds: Sequence[World], seen: Sequence[Transfer]) -> tuple[Finding, ...]:
        return judge_bandwidth(worlds, seen, settings.needs_bytes)

    return visit.check("write-bandwidth", Theme.SPEED, read, judge)


def _reads(worlds: Sequence[World], group: Sequence[int], rank: int) -> int:
    """Whose file a rank reads: another node's where it sees one, for its own may be in its memory."""
    others = [r for r in group if worlds[r].node != worlds[rank].node]
    return others[list(group).index(rank) % len(others)] if others else rank
