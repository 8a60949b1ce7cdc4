"""Judges permissions: one finding per kind of operation. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.control.world import World
from ckptfs.tools.doctor.judge.ranks import on_ranks
from ckptfs.tools.doctor.seen import Access, Op, Refusal, Why
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict

__all__ = ["judge_access", "may_write"]

_NAMES = {
    Op.LIST: "list",
    Op.MAKE: "make-directories",
    Op.WRITE: "write",
    Op.READ: "read",
    Op.DELETE: "delete",
}
_MEANING = {
    Op.LIST: "runs cannot be listed: `ckptfs ls`, `latest` without a hint and cleaning up fail",
    Op.MAKE: "no run can be made here",
    Op.WRITE: "training cannot save here; restoring may work",
    Op.READ: "nothing that was saved can be restored, and a save cannot prove what it wrote",
    Op.DELETE: "retention and cleaning up fail: the place fills up",
}
_READ_ONLY = (
    "read-only: a job can restore from here and cannot save; training would fail at its first save"
)


def may_write(seen: Sequence[Access]) -> bool:
    """Whether every rank could write; else what needs writing is not tested."""
    return all(s.tried.get(Op.WRITE, _MISSING) is None for s in seen)


def judge_access(worlds: Sequence[World], seen: Sequence[Access]) -> tuple[Finding, ...]:
    """A finding for each operation that some rank tried."""
    ops = [op for op in Op if any(op in s.tried for s in seen)]
    return tuple(_judge(worlds, seen, op) for op in ops)


def _judge(worlds: Sequence[World], seen: Sequence[Access], op: Op) -> Finding:
    refused = {rank: r for rank, s in enumerate(seen) if (r := s.tried.get(op)) is not None}
    if not refused:
        return Finding(_NAMES[op], Theme.ACCESS, Verdict.OK, "permitted")
    first = next(iter(refused.values()))
    where = on_ranks(worlds, refused)
    read_only = first.why is Why.READ_ONLY or (
        first.why is Why.ACCESS and op in (Op.MAKE, Op.WRITE) and _reads(seen)
    )
    advice = first.hint or (
        "mount it read-write, or give the job's user the right to write"
        if read_only
        else "free space, or ask for quota"
        if first.why is Why.NO_SPACE
        else "give the job's user this right on the run's directory"
    )
    return Finding(
        _NAMES[op],
        Theme.ACCESS,
        Verdict.FAIL,
        f"{where}{first.text}",
        _READ_ONLY if read_only else _MEANING[op],
        advice,
        {"why": first.why.value, "ranks": sorted(refused)},
    )


def _reads(seen: Sequence[Access]) -> bool:
    return any(s.tried.get(Op.LIST, _MISSING) is None for s in seen)


_MISSING = Refusal(Why.OTHER, "not tried")
