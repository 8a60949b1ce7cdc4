"""Judges what commits rest on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.control.world import World
from ckptfs.storage.base import Capabilities
from ckptfs.tools.doctor.judge.ranks import many, on_ranks
from ckptfs.tools.doctor.seen import FEW_LOOKS, Multipart, Race, Refusal, Replaced, Why
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict

__all__ = [
    "judge_conditional_replace",
    "judge_fsync",
    "judge_links",
    "judge_multipart",
    "judge_race",
    "judge_rename",
    "judge_replace",
]

_THEME = Theme.COMMIT
_TWO_WRITERS = "two jobs on one run are not kept apart: fences and exclusive names are advice, every save says so"


def judge_race(
    worlds: Sequence[World],
    caps: Sequence[Capabilities],
    seen: Sequence[Race],
    domains: Sequence[Sequence[int]],
    *,
    name: str,
) -> tuple[Finding, ...]:
    """Exclusive create. domains: the ranks of each; a race is among those that share the name. name:
    "exclusive-create" on a mounted place, "conditional-create" on a store.
    """
    without = [rank for rank, c in enumerate(caps) if not c.exclusive_create]
    if without:
        return (_no_create(worlds, name, without, seen),)
    refused = {rank: r.refusal for rank, r in enumerate(seen) if r.refusal is not None}
    if refused:
        first = next(iter(refused.values()))
        text = f"{on_ranks(worlds, refused)}{first.text}"
        return (Finding(name, _THEME, Verdict.FAIL, text, _TWO_WRITERS, first.hint),)
    rounds, racers, wrong = len(seen[0].wins), 0, []
    for ranks in domains:
        racers += 4 * len(ranks)
        for number in range(rounds):
            won = [mark for rank in ranks for mark in seen[rank].wins[number]]
            held = {seen[rank].holds[number] for rank in ranks}
            if len(won) != 1 or held != set(won):
                wrong.append(f"round {number}: {many(len(won), 'winner')}, {_read(held)}")
    data = {"rounds": rounds, "racers": racers, "wrong": len(wrong)}
    if wrong:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                f"{racers} writers raced for one name, {many(rounds, 'round')}: {wrong[0]}",
                "two jobs can both believe that they own a run: a checkpoint can be lost",
                "do not save here; `ckptfs doctor` on the bucket's own URI, without gateway or cache, "
                "may show who breaks it",
                data,
            ),
        )
    told = f"one of {racers} writers won each of {many(rounds, 'race')}, and all read its bytes"
    return (Finding(name, _THEME, Verdict.OK, told, data=data),)


def _read(held: set[str]) -> str:
    return "and what was read is another's" if len(held) == 1 else "and ranks read different bytes"


def _no_create(
    worlds: Sequence[World], name: str, without: Sequence[int], seen: Sequence[Race]
) -> Finding:
    told = next((r.refusal.text for r in seen if r.refusal is not None), "no exclusive create here")
    advice = (
        "use a filesystem with hard links, or the object store's own URI instead of its mount"
        if name == "exclusive-create"
        else "use a server that honours If-None-Match (AWS, GCS, Azure, MinIO, Ceph do), or make sure "
        "by other means that one job at a time writes a run"
    )
    return Finding(
        name, _THEME, Verdict.WARN, f"{on_ranks(worlds, without)}{told}", _TWO_WRITERS, advice
    )


def judge_conditional_replace(
    worlds: Sequence[World], caps: Sequence[Capabilities]
) -> tuple[Finding, ...]:
    """Replacing an object by its etag, as the probe saw it."""
    without = [rank for rank, c in enumerate(caps) if not c.conditional_replace]
    name = "conditional-replace"
    if not without:
        return (Finding(name, _THEME, Verdict.OK, "honoured: a stale etag was refused"),)
    return (
        Finding(
            name,
            _THEME,
            Verdict.WARN,
            f"{on_ranks(worlds, without)}the store or its client does not honour If-Match",
            "what stock readers see of a step may be an older writer's for a moment; commits are safe",
            "nothing, where ckptfs reads its own checkpoints",
        ),
    )


def judge_rename(
    worlds: Sequence[World], renames: Sequence[bool], seen: Sequence[Replaced], kinds: Sequence[str]
) -> tuple[Finding, ...]:
    """Directory renames of a mounted place. kinds: each rank's mount type, for the words only."""
    copies = [rank for rank, moved in enumerate(renames) if not moved]
    name = "rename-directory"
    if copies:
        kind = kinds[copies[0]]
        return (
            Finding(
                name,
                _THEME,
                Verdict.WARN,
                f"{on_ranks(worlds, copies)}a renamed directory was copied file by file"
                f"{f' ({kind} mount)' if kind else ''}",
                "this is an object store behind a mount: ckptfs uses it as one, whatever else relies on "
                "rename (torch.save and mv, other tools) can leave half a checkpoint",
                "give ckptfs the store's own URI (s3://, gs://, az://): it is faster, and commits there "
                "are exclusive",
            ),
        )
    return (_of_looks(worlds, seen, name, "renamed with files in it", "half a directory was seen"),)


def judge_replace(worlds: Sequence[World], seen: Sequence[Replaced]) -> tuple[Finding, ...]:
    """Replacing a file while it is read."""
    name, times = "atomic-replace", max(s.times for s in seen)
    done, wrong = f"replaced {times} times", "a reader saw neither whole"
    return (_of_looks(worlds, seen, name, done, wrong, least=FEW_LOOKS),)


def _of_looks(
    worlds: Sequence[World],
    seen: Sequence[Replaced],
    name: str,
    done: str,
    wrong: str,
    *,
    least: int = 0,
) -> Finding:
    """least: looks of each rank, below which nothing is said."""
    refused = {rank: s.refusal for rank, s in enumerate(seen) if s.refusal is not None}
    if refused:
        first = next(iter(refused.values()))
        text = f"{on_ranks(worlds, refused)}{first.text}"
        reads = all(s.by_reader for s in seen if s.refusal is not None)
        meaning = f"a {'load' if reads else 'save'} would fail here the same way"
        return Finding(name, _THEME, Verdict.FAIL, text, meaning, first.hint)
    bad = [rank for rank, s in enumerate(seen) if s.missing or s.torn]
    looks = sum(s.looks for s in seen)
    data = {"looks": looks, "wrong": sum(s.missing + s.torn for s in seen)}
    if bad:
        torn, missing = sum(s.torn for s in seen), sum(s.missing for s in seen)
        return Finding(
            name,
            _THEME,
            Verdict.FAIL,
            f"{on_ranks(worlds, bad)}{wrong}: of {looks} looks {torn} torn, {missing} missing",
            "a reader, or a restart at the wrong moment, can meet a torn file",
            "use a filesystem whose rename is atomic, or an object store's own URI",
            data,
        )
    text = f"{done}; {many(looks, 'look')}, all whole"
    if least and min(s.looks for s in seen) < least:
        advice = "ask again when the place is less busy"
        return Finding(name, _THEME, Verdict.UNKNOWN, f"{text}: too few to tell", "", advice, data)
    return Finding(name, _THEME, Verdict.OK, text, data=data)


def judge_fsync(worlds: Sequence[World], caps: Sequence[Capabilities]) -> tuple[Finding, ...]:
    """Whether a directory can be synced; files are, or the writes before would have failed."""
    without = [rank for rank, c in enumerate(caps) if not c.durable]
    if not without:
        return (Finding("fsync", _THEME, Verdict.OK, "accepted for files and directories"),)
    return (
        Finding(
            "fsync",
            _THEME,
            Verdict.WARN,
            f"{on_ranks(worlds, without)}fsync of a directory is not accepted",
            "a checkpoint that was acknowledged may be gone after a power cut of the file server",
            "ask for a mount that accepts it; keep a copy elsewhere (`ckptfs cp`)",
        ),
    )


def judge_links(worlds: Sequence[World], seen: Sequence[Refusal | None]) -> tuple[Finding, ...]:
    """Hard links: exclusive create rests on them, and unchanged data is saved by them."""
    refused = {rank: s for rank, s in enumerate(seen) if s is not None}
    if not refused:
        return (Finding("hard-links", _THEME, Verdict.OK, "a file got a second name"),)
    first = next(iter(refused.values()))
    known = first.why in (Why.UNSUPPORTED, Why.ACCESS)
    return (
        Finding(
            "hard-links",
            _THEME,
            Verdict.WARN if known else Verdict.FAIL,
            f"{on_ranks(worlds, refused)}{first.text}",
            "no exclusive create, and unchanged tensors are written again at each save",
            "use a filesystem with hard links for fences that hold",
        ),
    )


def judge_multipart(worlds: Sequence[World], seen: Sequence[Multipart]) -> tuple[Finding, ...]:
    """Uploads in parts: completing, aborting, and listing those that nobody completed."""
    found = []
    for name, told, failed, meaning in (
        ("multipart", "two parts were put and completed", [s.completed for s in seen],
         "files of more than one part cannot be saved"),
        ("multipart-abort", "an upload was thrown away", [s.aborted for s in seen],
         "uploads that were cut short stay, invisible and paid for"),
        ("multipart-list",
         "the store drops unfinished uploads by itself" if all(s.forgets for s in seen)
         else "an upload under way is listed", [s.listed for s in seen],
         "`ckptfs gc` cannot find what killed jobs left behind; a lifecycle rule can"),
    ):  # fmt: skip
        refused = {rank: r for rank, r in enumerate(failed) if r is not None}
        if not refused:
            found.append(Finding(name, _THEME, Verdict.OK, told))
            continue
        first = next(iter(refused.values()))
        verdict = Verdict.FAIL if name == "multipart" else Verdict.WARN
        text = f"{on_ranks(worlds, refused)}{first.text}"
        found.append(Finding(name, _THEME, verdict, text, meaning, first.hint))
    return tuple(found)
