"""Judges latency and bandwidth: numbers first, verdicts only where something is badly wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ckptfs.control.world import World
from ckptfs.tools.doctor.judge.ranks import many, on_ranks, seconds, size
from ckptfs.tools.doctor.seen import Latency, Refusal, Transfer
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict

__all__ = ["judge_bandwidth", "judge_latency"]

_SLOW_S = 1.0
_SLOW_BYTES_PER_S = 5e6
_LONG_S = 1.0  # what took less tells of latency, not of bandwidth


def judge_latency(worlds: Sequence[World], seen: Sequence[Latency]) -> tuple[Finding, ...]:
    """Small operations of all ranks at once."""
    name = "latency"
    if failed := _refused(seen):
        return (_failed(worlds, name, failed, reads=all(seen[r].by_reader for r in failed)),)
    told, data, worst_s = [], {}, 0.0
    for what in seen[0].taken_s:
        times = [t for s in seen for t in s.taken_s[what]]
        middle_s, most_s = median(times), max(times)
        told.append(f"{what} {seconds(middle_s)} (at most {seconds(most_s)})")
        data[what] = {"median_s": middle_s, "max_s": most_s}
        worst_s = max(worst_s, middle_s)
    text = f"{', '.join(told)}; {many(len(seen), 'rank')} at once"
    if worst_s <= _SLOW_S:
        return (Finding(name, Theme.SPEED, Verdict.OK, text, data=data),)
    meaning = "every commit takes several such operations one after another"
    advice = "look at the load of the server, the distance to it, and proxies on the way"
    return (Finding(name, Theme.SPEED, Verdict.WARN, text, meaning, advice, data),)


def judge_bandwidth(
    worlds: Sequence[World], seen: Sequence[Transfer], needs_bytes: int | None
) -> tuple[Finding, ...]:
    """A file of each rank, all at once: written durably, read back by another where there is one."""
    if failed := _refused(seen):
        # What was written and cannot be read back: saves go through.
        reads = all(seen[rank].write_s is not None for rank in failed)
        name = "read-bandwidth" if reads else "write-bandwidth"
        return (_failed(worlds, name, failed, reads=reads),)
    total = sum(s.size_bytes for s in seen)
    each = f"{many(len(seen), 'rank')} x {size(seen[0].size_bytes)}"
    write_s = max(s.write_s or 0.0 for s in seen)
    read_s = max(s.read_s or 0.0 for s in seen)
    cached = next((s.cached for s in seen if s.cached), "")
    written = _of("write-bandwidth", total, write_s, f"{each}, durable")
    read = _of(
        "read-bandwidth", total, read_s, each + (f"; from {cached} perhaps" if cached else "")
    )
    if needs_bytes is None:
        return written, read
    takes = f"{size(needs_bytes)} at this rate: {seconds(needs_bytes * write_s / total)}"
    return (
        Finding(written.name, written.theme, written.verdict, f"{written.seen}; {takes}",
                written.meaning, written.advice, written.data),
        read,
    )  # fmt: skip


def _of(name: str, total_bytes: int, taken_s: float, how: str) -> Finding:
    rate = total_bytes / max(taken_s, 1e-9)
    text = f"{rate / 1e6:.0f} MB/s ({how})"
    data = {"bytes_per_s": rate, "bytes": total_bytes, "seconds": taken_s}
    if rate >= _SLOW_BYTES_PER_S or taken_s < _LONG_S:
        return Finding(name, Theme.SPEED, Verdict.OK, text, data=data)
    meaning = "a checkpoint of 10 GB takes more than half an hour"
    advice = (
        "look at the network and the server's load; save in the background (async_save), less often"
    )
    return Finding(name, Theme.SPEED, Verdict.WARN, text, meaning, advice, data)


def _refused(seen: Sequence[Latency] | Sequence[Transfer]) -> dict[int, Refusal]:
    told = [s.refusal for s in seen]
    return {rank: refusal for rank, refusal in enumerate(told) if refusal is not None}


def _failed(
    worlds: Sequence[World], name: str, failed: dict[int, Refusal], *, reads: bool
) -> Finding:
    first = next(iter(failed.values()))
    text = f"{on_ranks(worlds, failed)}{first.text}"
    meaning = f"a {'load' if reads else 'save'} would fail here the same way"
    return Finding(name, Theme.SPEED, Verdict.FAIL, text, meaning, first.hint)
