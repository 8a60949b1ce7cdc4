"""Judges who shares what with whom, how soon it is seen, and the clocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.control.world import World
from ckptfs.tools.doctor.judge.ranks import hosts, many, on_ranks, seconds
from ckptfs.tools.doctor.seen import Arrivals, Clocks, Refusal
from ckptfs.tools.doctor.settings import Expect
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict
from ckptfs.topology.storage_domains import Domain

__all__ = ["judge_clocks", "judge_directory", "judge_domains", "judge_visibility"]

_THEME = Theme.SHARING
_LATE_S = 1.0  # what a directory call waits for another node's token
_DEAD_S = LeaseTimes().still_s - LeaseTimes().rewrite_s  # then a living owner's lease stands still
_SKEW_WARN_S = 5.0
_SKEW_FAIL_S = 600.0  # S3 refuses signatures that are 15 minutes off


def judge_domains(
    worlds: Sequence[World], found: Sequence[Domain] | Refusal, expect: Expect | None
) -> tuple[Finding, ...]:
    """Who shares the place with whom, against what the caller expects."""
    name, nodes = "domains", len({w.node for w in worlds})
    if isinstance(found, Refusal):
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                found.text,
                "a run cannot be opened here: nobody knows who shares it",
                found.hint or "see the visibility below",
            ),
        )
    told = [f"{hosts(worlds, d.nodes)} ({many(len(d.ranks), 'rank')})" for d in found]
    data = {"domains": [{"ranks": list(d.ranks), "nodes": list(d.nodes)} for d in found]}
    shared = next((d for d in found if len(d.nodes) > 1), None)
    if expect is Expect.SHARED and len(found) > 1:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                f"said to be shared, and is not: {'; '.join(told)} see different bytes",
                "each node would write its part to a disk of its own; another node, or the same job "
                "elsewhere, restores nothing",
                "mount the shared filesystem on every node at this path, or save with --expect node",
                data,
            ),
        )
    if expect is Expect.NODE and shared is not None:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                f"said to be each node's own, and {hosts(worlds, shared.nodes)} see the same bytes",
                "what was sized for a local disk goes to a shared one",
                "give a path on the nodes' own disks",
                data,
            ),
        )
    if expect is not None and nodes == 1:
        seen = f"{many(len(worlds), 'rank')} of one node took part"
        meaning = f"whether nodes share it was not shown (--expect {expect.value})"
        advice = "start it on every node, as the job is: torchrun ... --no-python ckptfs doctor ..."
        return (Finding(name, _THEME, Verdict.UNKNOWN, seen, meaning, advice, data),)
    if len(found) == 1:
        seen = f"one: {told[0]}" if nodes == 1 else f"one: {told[0]} see the same bytes"
        return (Finding(name, _THEME, Verdict.OK, seen, data=data),)
    meaning = (
        "every node keeps its own part of a checkpoint: a restart must come back to these nodes"
    )
    return (
        Finding(
            name,
            _THEME,
            Verdict.OK,
            f"{len(found)}: {'; '.join(told)}",
            meaning,
            "keep copies on a shared place (copies=) if a node may be lost",
            data,
        ),
    )


def judge_directory(worlds: Sequence[World], refusal: Refusal | None) -> tuple[Finding, ...]:
    """A directory that one rank makes and all use, by ckptfs's own call."""
    name = "shared-directory"
    if refusal is None:
        told = f"made by one, seen by {many(len(worlds), 'rank')}"
        return (Finding(name, _THEME, Verdict.OK, told),)
    meaning = "ensure_dir, and every save, would fail here the same way"
    return (Finding(name, _THEME, Verdict.FAIL, refusal.text, meaning, refusal.hint),)


def judge_visibility(
    worlds: Sequence[World], fresh: Sequence[Arrivals], plain: Sequence[Arrivals], patience_s: float
) -> tuple[Finding, ...]:
    """How long until a rank sees another's write: by a fresh look, and (plain) by any program's."""
    name = "visibility-delay"
    refused = {rank: a.refusal for rank, a in enumerate(fresh) if a.refusal is not None}
    if refused:
        first = next(iter(refused.values()))
        text = f"{on_ranks(worlds, refused)}{first.text}"
        return (Finding(name, _THEME, Verdict.FAIL, text, "what ranks write cannot be read"),)
    waited = {
        (reader, writer): patience_s if at is None else at
        for reader, arrivals in enumerate(fresh)
        for writer, at in arrivals.seen_s.items()
    }
    never = [pair for pair, at in waited.items() if fresh[pair[0]].seen_s[pair[1]] is None]
    (reader, writer), most_s = max(waited.items(), key=lambda item: item[1])
    data = {"max_s": most_s, "never": len(never), "stale_plain_looks": _stale(plain)}
    who = f"rank {reader} on {worlds[reader].site} saw rank {writer}'s write"
    if never:
        who = f"rank {never[0][0]} on {worlds[never[0][0]].site} did not see rank {never[0][1]}'s write"
    seen = f"{who} {'in' if never else 'after'} {seconds(most_s)}"
    if most_s > _DEAD_S:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                seen,
                f"beyond {_DEAD_S:.0f} s a living job looks dead to the next one, and is taken over",
                "mount without attribute caching (actimeo=1, noac), or use another place",
                data,
            ),
        )
    if most_s > _LATE_S:
        return (
            Finding(
                name,
                _THEME,
                Verdict.WARN,
                seen,
                "saves and restores wait this long between nodes; calls on directories give up after "
                f"{_LATE_S:.0f} s",
                "shorten the mount's caching (actimeo=1, lookupcache=positive)",
                data,
            ),
        )
    meaning = ""
    if data["stale_plain_looks"]:
        meaning = "programs that do not look afresh, as ckptfs does, see new files late: absence is cached"
    told = f"at most {seconds(most_s)} from write to read, {many(len(worlds), 'rank')}"
    return (Finding(name, _THEME, Verdict.OK, told, meaning, data=data),)


def _stale(plain: Sequence[Arrivals]) -> int:
    return sum(at is None for arrivals in plain for at in arrivals.seen_s.values())


def judge_clocks(worlds: Sequence[World], seen: Sequence[Clocks]) -> tuple[Finding, ...]:
    """Clocks of the place and of the ranks. No decision of ckptfs rests on one."""
    found = []
    if len(worlds) > 1:
        skews = {rank: _least(s.rank_s) for rank, s in enumerate(seen) if rank}
        rank = max(skews, key=lambda r: abs(skews[r]))
        who = f"rank {rank} on {worlds[rank].site} against rank 0"
        found.append(_skew("clock-ranks", skews[rank], who, max(_slack(s.rank_s) for s in seen)))
    told = {rank: s for rank, s in enumerate(seen) if s.place_s is not None}
    if not told:
        nobody = "the place does not tell its time"
        return (*found, Finding("clock-storage", _THEME, Verdict.UNKNOWN, nobody))
    rank = max(told, key=lambda r: abs(_least(told[r].place_s)))
    worst = told[rank]
    who = f"{worst.source} against {worlds[rank].site}"
    found.append(_skew("clock-storage", _least(worst.place_s), who, _slack(worst.place_s)))
    return tuple(found)


def _least(bounds: tuple[float, float] | None) -> float:
    """The offset that is sure, nearest to none."""
    low, high = bounds or (0.0, 0.0)
    return low if low > 0 else high if high < 0 else 0.0


def _slack(bounds: tuple[float, float] | None) -> float:
    low, high = bounds or (0.0, 0.0)
    return high - low


def _skew(name: str, off_s: float, who: str, slack_s: float) -> Finding:
    data = {"offset_s": off_s, "uncertainty_s": slack_s}
    if abs(off_s) <= _SKEW_WARN_S:
        told = (
            f"{who}: {'none' if abs(off_s) < 1 else seconds(abs(off_s))}, within {seconds(slack_s)}"
        )
        return Finding(name, _THEME, Verdict.OK, told, data=data)
    ahead = "ahead" if off_s > 0 else "behind"
    return Finding(
        name,
        _THEME,
        Verdict.FAIL if abs(off_s) > _SKEW_FAIL_S else Verdict.WARN,
        f"{who}: {seconds(abs(off_s))} {ahead}",
        "ages in `ckptfs ls`, alerts by age and retention by age are off; S3 refuses signatures that are "
        "15 minutes off",
        "let NTP (chrony) set the clocks",
        data,
    )
