"""The invariants over whole states: the oracle's reading against what is on the disks.

    I1  an acknowledged save is committed, and every committed, undeleted save is whole where our
        readers look: in attempts/, else in the step directory
    I2  a reader got one save, whole, and found a live one
    I4  a stock reader sees a committed whole save or nothing
    I7  after a recovery that ended, nothing older is unsettled, and the newest live save of every
        name is projected; where no owner recovers, what was finished is projected when all is over
    I8  when all is over, the newest fence's holder is ready, or gave it back
    I10 a newcomer that takes no run from its owner fences only what has no holder
    I11 of a save that the log has as removed by hand nothing is there
    C   the code's own fold, catalog and latest agree with the oracle

Windows that protocol.md documents: a deleted but whole save before its removal; ``late-put``: on
object stores a delayed PUT may leave a dangling ``.metadata`` of a dead save; ``stale-projection``:
without conditional PUTs a stalled writer may leave the older projection; ``stalled-deleter``: on
object stores, which have no conditional DELETE here, a stalled deleter may take the successor's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptfs.commit.delete.deletion_steps import REMOVED_BY_HAND
from ckptfs.commit.log.entries import decode_entry
from ckptfs.commit.log.fold import LogState, fold_entry
from ckptfs.commit.state import Standing, catalog, latest, standing
from ckptfs.storage.base import Shape
from tests.model import oracle
from tests.model.disk import Disk

if TYPE_CHECKING:
    from tests.model.search import Scenario

__all__ = ["Judge", "fold_disk"]


def _entries(disk: Disk) -> tuple[bytes, ...]:
    found: tuple[bytes, ...] | None = disk.memo.get("entries")
    if found is None:
        entries: list[bytes] = []
        while (data := disk.files.get(f".ckptfs/log/{len(entries):08d}")) is not None:
            entries.append(data)
        found = disk.memo["entries"] = tuple(entries)
    return found


@lru_cache(maxsize=100_000)
def _fold(entries: tuple[bytes, ...]) -> LogState:
    if not entries:
        return LogState()
    return fold_entry(_fold(entries[:-1]), decode_entry(entries[-1], "model").body)


@lru_cache(maxsize=100_000)
def _parsed(entries: tuple[bytes, ...]) -> oracle.Log:
    return oracle.parse_log({f".ckptfs/log/{n:08d}": data for n, data in enumerate(entries)})


def fold_disk(disk: Disk) -> LogState:
    """The code's own fold of a disk's log, from entry 0."""
    return _fold(_entries(disk))


def log_of(disk: Disk) -> oracle.Log:
    """The oracle's view of a disk's log."""
    return _parsed(_entries(disk))


class Judge:
    """Judges the states of one scenario; every judgement is remembered by what it depends on."""

    def __init__(self, scenario: Scenario, domains: tuple[str, ...]) -> None:
        self._scenario = scenario
        self._domains = domains
        self._filesystem = scenario.shape is Shape.FILESYSTEM
        self._states: dict[Any, list[str]] = {}
        self._changes: dict[Any, list[str]] = {}
        self._readings: dict[Any, oracle.Reading] = {}

    # -- entry points -----------------------------------------------------------------------

    def state(self, disks: Sequence[Disk], facts: frozenset[Any], *, quiet: bool) -> list[str]:
        """What is wrong with a state in which every process may have stopped forever."""
        key = (tuple(d.number for d in disks), facts, quiet)
        bad = self._states.get(key)
        if bad is None:
            bad = self._states[key] = [
                *self._safe(disks, facts),
                *self._settled(disks, facts, quiet),
            ]
        return bad

    def change(self, before: Sequence[Disk], after: Sequence[Disk]) -> list[str]:
        """What is wrong with a step from one set of disks to another."""
        key = (tuple(d.number for d in before), tuple(d.number for d in after))
        bad = self._changes.get(key)
        if bad is None:
            bad = self._changes[key] = self._judge_change(before, after)
        return bad

    def end(self, disks: Sequence[Disk], facts: frozenset[Any]) -> list[str]:
        """What is wrong when every process ran to its end."""
        told = {fact for fact, _ in facts}
        reading = self.reading(disks)
        top = max(reading.fences.values())
        if top in self._held():
            # No owner recovered anything: what was finished is to be seen all the same.
            by_name = dict(zip(self._domains, disks, strict=True))
            mine = [reading.saves[save_id] for save_id in reading.live]
            done = [s for s in mine if all(("finished", s.save_id, d) in told for d in s.domains)]
            return [bad for s in done for bad in self._projected(s.save_id, s.domains, by_name)]
        if top == (0, ""):
            return []
        marked = [log_of(d) for d in disks]
        if all(oracle.released(log) for log in marked if oracle.read({"": log}).fences[""] == top):
            return []
        if not any(f[0] == "ready" and (int(f[1]), f[2]) == top for f in told):
            return [f"I8 all processes ended and the holder of {top} is not ready"]
        return []

    def _held(self) -> set[oracle.Gen]:
        """Generations that were fenced before the scenario began."""
        first = [log_of(d) for d in self._scenario.files.values()]
        return {oracle.gen(e["generation"]) for log in first for e in log if e["kind"] == "fence"}

    def reading(self, disks: Sequence[Disk]) -> oracle.Reading:
        logs = {name: log_of(d) for name, d in zip(self._domains, disks, strict=True)}
        key = tuple(id(log) for log in logs.values())
        found = self._readings.get(key)
        if found is None:
            found = self._readings[key] = oracle.read(logs)
        return found

    # -- judgements -------------------------------------------------------------------------

    def _safe(self, disks: Sequence[Disk], facts: frozenset[Any]) -> list[str]:
        reading = self.reading(disks)
        by_name = dict(zip(self._domains, disks, strict=True))
        told = dict(facts)
        bases = {f[1]: oracle.gen(v[0]) for f, v in told.items() if f[0] == "base"}
        bad = oracle.judge_logs({n: log_of(d) for n, d in by_name.items()}, bases)
        for disk in disks:
            bad += oracle.robbed(log_of(disk), self._scenario.polite)
        for fact in told:
            if fact[0] == "acknowledged" and not reading.committed(fact[1]):
                bad.append(f"I1 {fact[1]} was acknowledged and is not committed")
            if fact[0] == "failed" and reading.committed(fact[1]):
                bad.append(f"I9 {fact[1]} was reported as failed and is committed")
            if fact[0] in ("unreadable", "mixed"):
                bad.append(f"I2 a reader found the live save {fact[1]} {fact[0]}")
            if fact[0] == "broke" and bases[fact[1]] >= max(reading.fences.values()):
                bad.append(f"I6 {fact[1]}, of the newest generation, was broken: {fact[2]}")
            if fact[0] == "broke" and bases[fact[1]] >= max(reading.fences.values()):
                bad.append(f"I6 {fact[1]}, of the newest generation, was broken: {fact[2]}")
            if fact[0] == "read" and not reading.committed(fact[1]):
                bad.append(f"I2 a reader read the uncommitted save {fact[1]}")
        for save in reading.saves.values():
            if save.committed and not save.deleted and save.save_id not in self._scenario.removed:
                for domain in save.domains:
                    if domain in by_name and not self._whole(by_name[domain], save.save_id, domain):
                        bad.append(f"I1 committed save {save.save_id} is not whole in {domain}")
        for part_id, domain in reading.kept:
            if part_id in self._scenario.removed:
                continue
            if not self._whole(by_name[domain], part_id, domain):
                bad.append(f"I1 the promised part {part_id} is not whole in {domain}")
        for domain, disk in by_name.items():
            bad += self._stock(disk, reading, domain)
            bad += self._partial(disk, domain, reading)
            bad += self._foreign(disk, domain)
            bad += self._removed(disk, domain)
        return bad + self._agreement(by_name, reading)

    def _whole(self, disk: Disk, save_id: str, domain: str) -> bool:
        """Whether our reader finds every file of a save, all of them under one home."""
        what = self._scenario.whats[save_id]
        homes = [f".ckptfs/attempts/{save_id}", what.name]
        if not self._filesystem:
            homes = [what.name]
        small = {f"{save_id}/{n}": b for n, b in what.small().items()}
        for home in homes:
            if all(disk.files.get(f"{home}/{p}") == b for p, b in small.items()):
                if what.data_path(domain) is None:
                    return True
                data = what.data(domain)
                # Plain names of a directory artifact move one by one.
                places = homes if what.artifact == "directory" else [home]
                return any(disk.files.get(f"{p}/{what.data_path(domain)}") == data for p in places)
        return False

    def _stock(self, disk: Disk, reading: oracle.Reading, domain: str) -> list[str]:
        bad = []
        for what in self._scenario.whats.values():
            data = disk.files.get(f"{what.name}/.metadata")
            if data is None or data != what.metadata or what.save_id in self._scenario.removed:
                continue
            save = self._deciding(reading, what)
            if save is None or not save.committed:
                bad.append(f"I4 stock readers see the uncommitted {what.save_id} in {domain}")
                continue
            present = disk.files.get(f"{what.name}/{what.data_path(domain)}") == what.data(domain)
            dead = save.deleted or save.save_id not in reading.live
            if not present and not (dead and "late-put" in self._scenario.windows):
                bad.append(f"I4 .metadata of {what.save_id} dangles in {domain}")
        return bad

    def _deciding(self, reading: oracle.Reading, what: Any) -> oracle.Save | None:
        """The save that decides over another: itself, or the whole that a part is chosen for."""
        save = reading.saves.get(getattr(what, "of", what.save_id))
        chosen = not hasattr(what, "of") or (
            save is not None and any(p["save_id"] == what.save_id for p in save.parts)
        )
        return save if chosen else None

    def _partial(self, disk: Disk, domain: str, reading: oracle.Reading) -> list[str]:
        """A reader that reaches this domain only must not believe what is not there."""
        if len(self._domains) == 1:
            return []
        view = fold_disk(disk)
        bad = []
        for save_id in view.saves:
            if standing(save_id, {domain: view}) is Standing.COMMITTED:
                what = self._scenario.whats[save_id]
                save = self._deciding(reading, what)
                if save is None or not save.committed:
                    bad.append(f"I9 {domain} alone believes the uncommitted {save_id}")
                elif (
                    domain in what.domains
                    and save_id not in self._scenario.removed
                    and not self._whole(disk, save_id, domain)
                ):
                    bad.append(f"I1 {domain} alone believes {save_id}, which is not whole there")
        return bad

    def _removed(self, disk: Disk, domain: str) -> list[str]:
        log = log_of(disk)
        gone = {
            e["save_id"] for e in log if e["kind"] == "delete" and e["reason"] == REMOVED_BY_HAND
        }
        seals = [e for e in log if e["kind"] == "seal" and e["save_id"] in gone]
        gone |= {part["save_id"] for e in seals for part in e.get("parts", ())}
        return [
            f"I11 {save_id} is recorded as removed by hand, and {path} lies in {domain}"
            for save_id in gone
            for path in disk.files
            if save_id in path.split("/")
        ]

    def _foreign(self, disk: Disk, domain: str) -> list[str]:
        held = set(disk.files.values())
        return [
            f"foreign file {path} was destroyed in {domain}"
            for path, data in self._scenario.foreign.items()
            if data not in held
        ]

    def _agreement(self, by_name: Mapping[str, Disk], reading: oracle.Reading) -> list[str]:
        views = {name: fold_disk(d) for name, d in by_name.items()}
        code = tuple(live.seal.save_id for live in catalog(views))
        newest = latest(views)
        bad = []
        if code != reading.live:
            bad.append(f"C catalog() says {code}, the oracle {reading.live}")
        if (None if newest is None else newest.seal.save_id) != reading.latest:
            bad.append(f"C latest() disagrees with the oracle's {reading.latest}")
        return bad

    def _settled(self, disks: Sequence[Disk], facts: frozenset[Any], quiet: bool) -> list[str]:
        told = {fact for fact, _ in facts}
        reading = self.reading(disks)
        by_name = dict(zip(self._domains, disks, strict=True))
        top = max(reading.fences.values())
        ready = next(
            (f for f in told if f[0] == "ready" and (int(f[1]), f[2]) == top),
            None,
        )
        idle = ("idle", str(top[0]), top[1]) in told
        if ready is None or not quiet or any(reading.fences[d] != top for d in ready[3:]):
            return []
        reached = ready[3:]
        bad = []
        bad += self._promises(by_name, reading, top, reached)
        for save in reading.saves.values():
            if not set(save.domains) <= set(reached):
                continue
            old = save.base < top
            if old and not save.committed and save.save_id not in reading.aborted:
                bad.append(f"I7 {save.save_id} is unsettled after the recovery of {top}")
            if old and len(save.domains) > 1:
                bad += self._recorded(save, by_name)
            finished = all(("finished", save.save_id, d) in told for d in save.domains)
            if save.save_id in reading.live and (old or (finished and idle)):
                bad += self._projected(save.save_id, save.domains, by_name)
                for part in save.parts:
                    here = tuple(d for d in part["domains"] if d in reached)
                    bad += self._projected(part["save_id"], here, by_name)
        for domain in reached:
            bad += self._tidy(by_name[domain], reading, top, domain, idle=idle)
        return bad

    def _recorded(self, save: oracle.Save, by_name: Mapping[str, Disk]) -> list[str]:
        return [
            f"I7 {domain} has no record of what became of {save.save_id}"
            for domain in save.domains
            if save.save_id in fold_disk(by_name[domain]).saves
            and fold_disk(by_name[domain]).saves[save.save_id].seal is not None
            and fold_disk(by_name[domain]).saves[save.save_id].decided is None
            and not fold_disk(by_name[domain]).saves[save.save_id].deleted
        ]

    def _promises(
        self,
        by_name: Mapping[str, Disk],
        reading: oracle.Reading,
        top: oracle.Gen,
        reached: Sequence[str],
    ) -> list[str]:
        """Where home and a part were reached, the part is published, or gone."""
        bad = []
        for domain in reached:
            log = log_of(by_name[domain])
            for part_id, e in oracle.promises(log).items():
                if e["home"] not in reached or oracle.gen(e["base"]) >= top:
                    continue
                kept = (part_id, domain) in reading.kept
                told = any(x["kind"] == "seal" and x["save_id"] == e["of"] for x in log)
                if kept and not told:
                    bad.append(f"I7 {domain} was not told that {e['of']} is committed")
                here = f".ckptfs/attempts/{part_id}/{part_id}/ckptfs.json"
                if not kept and by_name[domain].files.get(here) is not None:
                    bad.append(f"I7 the released part {part_id} lies in {domain} still")
        return bad

    def _projected(
        self, save_id: str, domains: Sequence[str], by_name: Mapping[str, Disk]
    ) -> list[str]:
        what = self._scenario.whats[save_id]
        if self._scenario.windows & {"stale-projection", "stalled-deleter"}:
            return []
        if save_id in self._scenario.removed:
            return []
        bad = []
        for domain in domains:
            disk = by_name[domain]
            for name, data in what.small().items():
                if disk.files.get(f"{what.name}/{name}") != data:
                    bad.append(f"I7 {save_id} is live and its {name} is not projected in {domain}")
            path = what.data_path(domain)
            if path is None:
                continue
            if disk.files.get(f"{what.name}/{path}") != what.data(domain):
                bad.append(f"I7 {save_id} is live and its data is not projected in {domain}")
        return bad

    def _tidy(
        self, disk: Disk, reading: oracle.Reading, top: oracle.Gen, domain: str, *, idle: bool
    ) -> list[str]:
        """Deleted saves of older generations are gone from where stock readers look."""
        bad = []
        for what in self._scenario.whats.values():
            save = self._deciding(reading, what)
            if save is None or not save.deleted or domain not in what.domains:
                continue
            by = [e for e in log_of(disk) if e["kind"] == "delete" and e["save_id"] == save.save_id]
            if by and (oracle.gen(by[0]["by"]) < top or idle):
                if "late-put" in self._scenario.windows:
                    continue
                if disk.files.get(f"{what.name}/.metadata") == what.metadata:
                    bad.append(f"I7 stock readers still see the deleted {save.save_id} in {domain}")
        return bad

    def _judge_change(self, before: Sequence[Disk], after: Sequence[Disk]) -> list[str]:
        bad = []
        for old, new in zip(before, after, strict=True):
            was, now = log_of(old), log_of(new)
            if len(now) == len(was):
                continue
            if now[: len(was)] != was or len(now) != len(was) + 1:
                return ["log: entries were removed or rewritten"]
            bad += oracle.judge_change(self.reading(before), self.reading(after), now[-1])
        return bad
