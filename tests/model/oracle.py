"""The oracle: what a set of run logs means, written a second time and small enough to be believed.

A save of parts is sealed by its home alone, and by no other; the same seal in another domain is
recorded there, after the home's, and decides nothing. A part is promised from its entry on; the promise
is kept until its home aborts or deletes the whole, commits it with another, or can never commit it.

Nothing here comes from ``ckptfs.commit``: entries are plain JSON objects. One rule reads the logs,

    sealed in d     a seal is in d's log and no abort of the save is before it
    committed       sealed in every domain that the seal lists
    deleted         a delete is in any of them, after its seal
    superseded      a later commit of the same name exists, deleted or not
    hidden          an overwriting fence is after the seal, and it is the newest fence of that log
                    or something was committed under it
    live            committed, and none of the last three
    order           (base, seq, unfenced, position in the lowest listed domain)

and the judgements compare two of its readings, or a reading with what is on the disks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Gen = tuple[int, str]
Log = tuple[Mapping[str, Any], ...]
Logs = Mapping[str, Log]  # domain id -> entries


def parse_log(files: Mapping[str, bytes | None]) -> Log:
    """The contiguous entries of one disk."""
    entries: list[Mapping[str, Any]] = []
    while (data := files.get(f".ckptfs/log/{len(entries):08d}")) is not None:
        entries.append(json.loads(data))
    return tuple(entries)


def gen(value: Sequence[Any]) -> Gen:
    """A generation as it compares."""
    return (int(value[0]), str(value[1]))


@dataclass(frozen=True)
class Save:
    """One save as all logs together tell it."""

    save_id: str
    name: str
    domains: tuple[str, ...]
    base: Gen
    digest: str
    failure: bool
    committed: bool
    deleted: bool
    aborted: bool
    order: tuple[Any, ...]
    pinned: bool = False
    parts: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Reading:
    """What the logs mean: every sealed save, and the live ones in commit order."""

    saves: Mapping[str, Save]
    live: tuple[str, ...]
    fences: Mapping[str, Gen]
    aborted: frozenset[str]
    overwritten: bool
    kept: tuple[tuple[str, str], ...] = ()  # (part, domain) of promises that are to be kept
    notes: tuple[str, ...] = field(default=())

    def committed(self, save_id: str) -> bool:
        """Whether every listed domain sealed it."""
        return save_id in self.saves and self.saves[save_id].committed

    @property
    def latest(self) -> str | None:
        """The last live save that was not saved by a failing run."""
        good = [s for s in self.live if not self.saves[s].failure]
        return good[-1] if good else None


def _sealed(log: Log) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """Effective seals of one log: save_id -> (position, seal)."""
    out: dict[str, tuple[int, Mapping[str, Any]]] = {}
    dead = set()
    for at, entry in enumerate(log):
        if entry["kind"] == "abort" and entry["save_id"] not in out:
            dead.add(entry["save_id"])
        if entry["kind"] == "seal" and entry["save_id"] not in dead:
            out.setdefault(entry["save_id"], (at, entry))
    return out


def _aborted(log: Log) -> set[str]:
    sealed = _sealed(log)
    return {e["save_id"] for e in log if e["kind"] == "abort" and e["save_id"] not in sealed}


def _fences(log: Log) -> list[tuple[int, Gen, bool]]:
    """The fences that took effect: (position, generation, overwriting)."""
    out: list[tuple[int, Gen, bool]] = []
    for at, entry in enumerate(log):
        if entry["kind"] == "fence":
            new = gen(entry["generation"])
            if not out or new > out[-1][1]:
                out.append((at, new, entry.get("mode") == "overwrite"))
    return out


def robbed(log: Log, polite: frozenset[Gen]) -> list[str]:
    """I10: a newcomer that takes no run from its owner fenced only what had no holder."""
    bad = []
    owner: Gen | None = None
    newest: Gen = (0, "")
    for e in log:
        if e["kind"] == "release" and gen(e["generation"]) == newest:
            owner = None
        if e["kind"] == "fence" and gen(e["generation"]) > newest:
            newest = gen(e["generation"])
            if owner is not None and newest in polite:
                bad.append(f"I10 {newest} took the run from {owner}, which did not release it")
            owner = newest
    return bad


def released(log: Log) -> bool:
    """Whether the newest fence of a log was released."""
    marks = _fences(log)
    return bool(marks) and any(
        e["kind"] == "release" and gen(e["generation"]) == marks[-1][1] for e in log
    )


def read(logs: Logs) -> Reading:
    """Fold all logs together, every domain reached."""
    sealed = {d: _sealed(log) for d, log in logs.items()}
    aborted = {s for log in logs.values() for s in _aborted(log)}
    deletes = {
        e["save_id"]
        for d, log in logs.items()
        for at, e in enumerate(log)
        if e["kind"] == "delete" and sealed[d].get(e["save_id"], (len(log),))[0] < at
    }
    fences = {d: _fences(log) for d, log in logs.items()}
    pinned: dict[str, bool] = {}
    for log in logs.values():
        for e in log:
            if e["kind"] == "pin":
                pinned[e["save_id"]] = e["pinned"]
    saves = {}
    for marks in sealed.values():
        for save_id, (_, e) in marks.items():
            home = min(e["domains"])
            at = sealed.get(home, {}).get(save_id, (-1, {}))[0]
            base = gen(e["base"])
            saves[save_id] = Save(
                save_id,
                e["name"],
                tuple(e["domains"]),
                base,
                e["digest"],
                bool(e.get("failure")),
                all(save_id in sealed.get(d, {}) for d in e["domains"]),
                save_id in deletes,
                save_id in aborted,
                (base, e["seq"], not e["fenced"], at, save_id),
                pinned.get(save_id, False),
                tuple(e.get("parts", ())),
            )
    committed = sorted((s for s in saves.values() if s.committed), key=lambda s: s.order)
    newest = {s.name: s.save_id for s in committed}
    used = {s.base for s in committed}

    def hidden(save: Save) -> bool:
        return any(
            at > sealed[d][save.save_id][0] and over and (g == fences[d][-1][1] or g in used)
            for d in save.domains
            for at, g, over in fences[d]
        )

    live = tuple(
        s.save_id
        for s in committed
        if not s.deleted and newest[s.name] == s.save_id and not hidden(s)
    )
    newest_fence = {d: (marks[-1][1] if marks else (0, "")) for d, marks in fences.items()}
    overwritten = any(over for marks in fences.values() for _, _, over in marks)
    kept = tuple(_kept(logs, saves, aborted, newest_fence))
    return Reading(saves, live, newest_fence, frozenset(aborted), overwritten, kept)


def promises(log: Log) -> dict[str, Mapping[str, Any]]:
    """The parts that one log holds: an abort before it voids one."""
    out: dict[str, Mapping[str, Any]] = {}
    dead = set()
    for e in log:
        if e["kind"] == "abort":
            dead.add(e["save_id"])
        if e["kind"] == "part" and e["save_id"] not in dead:
            out.setdefault(e["save_id"], e)
    return out


def _kept(
    logs: Logs, saves: Mapping[str, Save], aborted: set[str], fences: Mapping[str, Gen]
) -> list[tuple[str, str]]:
    kept = []
    for domain, log in logs.items():
        for part_id, e in promises(log).items():
            whole = saves.get(e["of"])
            if whole is not None and whole.committed:
                if not whole.deleted and any(p["save_id"] == part_id for p in whole.parts):
                    kept.append((part_id, domain))
            elif e["home"] in logs:
                given_up = e["of"] in _aborted(logs[e["home"]])
                late = fences[e["home"]] > gen(e["base"])
                broken = part_id in aborted
                if not (given_up or late or broken):
                    kept.append((part_id, domain))
    return kept


# -- judgements on logs alone ---------------------------------------------------------------


def judge_logs(logs: Logs, bases: Mapping[str, Gen]) -> list[str]:
    """I3, I6 and I9: no entry after a newer fence, no abort by an equal or older generation, and
    ``decided`` says what the seals say. ``bases``: the generation each save began under.
    """
    bad = []
    reading = read(logs)
    for domain, log in logs.items():
        fence: Gen = (0, "")
        for at, e in enumerate(log):
            kind = e["kind"]
            if kind == "fence":
                fence = max(fence, gen(e["generation"]))
                continue
            if kind == "seal" and domain not in e["domains"]:
                told = logs.get(e["domains"][0], ())
                if not any(t["kind"] == "seal" and t["save_id"] == e["save_id"] for t in told):
                    bad.append(f"I9 {domain} was told of {e['save_id']}, which home never sealed")
                continue
            by = e.get("base") or (e.get("by") if kind in ("abort", "delete", "gone") else None)
            if by is not None and gen(by) < fence:
                bad.append(f"I3 {kind} by {gen(by)} at {domain}:{at} lies after fence {fence}")
            own = e["id"].startswith(f"{e.get('save_id')}-")
            if kind == "abort" and _heard(logs, domain, e["save_id"]):
                continue
            if kind == "abort" and not own and gen(e["by"]) <= bases.get(e["save_id"], (0, "")):
                bad.append(f"I6 abort of {e['save_id']}, which began under {bases[e['save_id']]}")
            if kind == "decided":
                save = reading.saves.get(e["save_id"])
                committed = save is not None and save.committed
                if (e["outcome"] == "committed") != committed and (
                    committed or e["outcome"] == "committed"
                ):
                    bad.append(f"I9 {e['save_id']} decided {e['outcome']} but is not")
    return bad


def _heard(logs: Logs, domain: str, save_id: str) -> bool:
    """Whether a domain of a part repeats what the home of the whole said first."""
    homes = {e["of"]: e["home"] for e in promises(logs[domain]).values()}
    home = homes.get(save_id, domain)
    return home != domain and save_id in _aborted(logs.get(home, ()))


def judge_change(before: Reading, after: Reading, entry: Mapping[str, Any]) -> list[str]:
    """I5: one append changed the live set only as its kind may, and latest went back by a delete
    that somebody asked for, or by an overwriting fence, only.
    """
    bad = []
    was, now = set(before.live), set(after.live)
    kind, save_id = entry["kind"], entry.get("save_id")
    if kind == "seal":
        gained, lost = now - was, was - now
        mine = after.saves.get(save_id or "")
        if (
            mine is not None
            and mine.committed
            and not before.committed(mine.save_id)
            and mine.save_id not in now
            and mine.base >= max(after.fences.values())
        ):
            bad.append(f"I5 {save_id} was committed behind another: dead on arrival")
        if not gained <= {save_id}:
            bad.append(f"I5 seal of {save_id} brought back {sorted(gained - {save_id})}")
        if any(after.saves[s].name != entry["name"] for s in lost) and not after.overwritten:
            bad.append(f"I5 seal of {save_id} removed {sorted(lost)}")
    elif kind == "delete":
        victim = before.saves.get(save_id or "")
        if victim is not None and victim.pinned and entry["reason"] in ("replaced", "overwritten"):
            bad.append(f"I5 the pinned save {save_id} was deleted unasked")
        allowed = set() if entry["reason"] in ("replaced", "overwritten") else {save_id}
        if was - now - allowed or now - was:
            bad.append(
                f"I5 delete of {save_id} ({entry['reason']}) took {was - now} gave {now - was}"
            )
    elif kind == "fence":
        if was != now and not after.overwritten:
            bad.append(f"I5 a fence changed the live set from {sorted(was)} to {sorted(now)}")
    elif was != now:
        bad.append(f"I5 {kind} changed the live set from {sorted(was)} to {sorted(now)}")
    old, new = before.latest, after.latest
    behind = old is not None and (new is None or after.saves[new].order < before.saves[old].order)
    if behind and kind not in ("delete", "fence"):
        bad.append(f"I5 latest went back from {old} to {new} by a {kind}")
    return bad
