"""Mistakes to plant: each breaks one rule of the protocol in the real code, for one search.

    with PLANTED["stopping at ENOENT in a projection"].plant(): explore(scenario)

Most come from the list of mistakes in the protocol; the rest are bugs that this search found here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from ckptfs.commit import decisions, paths
from ckptfs.commit import state as protocol
from ckptfs.commit.decisions import Refusal
from ckptfs.commit.delete import delete_checkpoint, deletion_steps, erase, trash
from ckptfs.commit.log import append as log
from ckptfs.commit.log import fold
from ckptfs.commit.log.append import Appended, RefusedAppend
from ckptfs.commit.log.entries import GENESIS, Entry, Generation, Stamp
from ckptfs.commit.log.saves import Saves
from ckptfs.commit.operations import (
    MakeDir,
    Read,
    Refresh,
    Remove,
    RemoveTree,
    Rename,
    Replace,
    Write,
)
from ckptfs.commit.ownership import recovery
from ckptfs.commit.parts import parts
from ckptfs.commit.paths import AttemptKeys, log_key
from ckptfs.commit.save import owner_steps, projection
from ckptfs.errors import NotFoundError
from tests.model import parts as parts_model
from tests.model import programs, scenarios

__all__ = ["PLANTED", "Mistake"]

Steps = Generator[Any, Any, Any]
Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    """patches: (where, name, the broken version). scenario: where it shows. broken: how the promise
    that it breaks begins.
    """

    scenario: str
    broken: str
    patches: Callable[[], list[Patch]]
    needs_lost_answers: bool = False

    @contextlib.contextmanager
    def plant(self) -> Iterator[None]:
        """The code is wrong inside this block."""
        with contextlib.ExitStack() as stack:
            for where, name, value in self.patches():
                stack.enter_context(patch.object(where, name, value))
            yield


def _sources_not_consumed() -> list[Patch]:
    return [(projection, "_earlier", lambda seal, state: [])]


def _reader_looks_in_the_step_first() -> list[Patch]:
    def homes(self: AttemptKeys) -> tuple[str, ...]:
        return (self.projected_data, self.data)

    return [(paths.AttemptKeys, "homes", homes)]


def _stopping_at_enoent() -> list[Patch]:
    def pieces(seal: Any, keys: AttemptKeys, state: Any, replaces: Any) -> Steps:
        for piece in (keys.save_id, ".metadata", "ckptfs.json"):
            try:
                yield Rename(f"{keys.attempt}/{piece}", f"{keys.name}/{piece}")
            except NotFoundError:
                return

    return [(projection, "_project_pieces", pieces)]


def _what_was_moved_is_not_looked_at() -> list[Patch]:
    def put_back(moved: str, key: str, save_id: str) -> Steps:
        yield Remove(moved)

    return [(trash, "put_back", put_back)]


def _lost_projection_left() -> list[Patch]:
    def repair(*told: Any) -> Steps:
        return
        yield

    def put_back_all(*told: Any) -> Steps:
        return
        yield

    return [(projection, "_repair", repair), (trash, "put_back_all", put_back_all)]


def _equal_generations() -> list[Patch]:
    def newer(a: Generation, b: Generation) -> bool:
        return a[0] > b[0]

    return [(Generation, "__gt__", newer), (Generation, "__ge__", newer)]


def _deleting_a_step_by_name() -> list[Patch]:
    def unproject(keys: AttemptKeys, seal: Any, trash: str) -> Steps:
        yield RemoveTree(keys.name)

    return [(erase, "_unproject", unproject)]


def _deleting_without_looking_who_it_is() -> list[Patch]:
    def names_it(key: str, save_id: str) -> Steps:
        return True
        yield

    return [
        (trash, "names_it", names_it),
        (trash, "belongs_to", lambda *told: True),
        (erase, "belongs_to", lambda *told: True),
    ]


def _old_judgement_trusted() -> list[Patch]:
    def claim(state: Any, fence: Any, judged: Generation) -> Any:
        return decisions.may_fence(state, fence)

    return [(programs, "may_claim", claim)]


def _fence_not_given_back() -> list[Patch]:
    def release(*_: Any) -> Steps:
        return None
        yield

    return [(programs, "release_fence", release)]


def _newest_fence_only() -> list[Patch]:
    real = decisions.unreleased

    def unreleased(views: Mapping[str, Any]) -> Any:
        newest = max(v.generation for v in views.values())
        return real({d: v for d, v in views.items() if v.generation == newest})

    return [(programs, "unreleased", unreleased)]


def _aborting_the_rest() -> list[Patch]:
    real = recovery.plan_recovery

    def plan(reports: Mapping[str, Any], holder: Generation, keep: Any) -> Any:
        older = {
            d: replace(r, attempts=tuple(replace(a, base=GENESIS) for a in r.attempts))
            for d, r in reports.items()
        }
        return real(older, holder, keep)

    return [(recovery, "plan_recovery", plan)]


def _unlinking_below_a_snapshot() -> list[Patch]:
    def snapshot(state: Any, *, write_id: str, stamp: Any = None) -> Steps:
        done: Any = yield from log.append(fold.snapshot_of, write_id=write_id)
        hint = f'{{"snapshot": {done.number}, "next": {done.number + 1}}}'
        yield Replace(paths.HINT, hint.encode())
        for number in range(done.number):
            yield Remove(log_key(number))
        return done.state

    return [(recovery, "write_snapshot", snapshot)]


def _manifest_from_a_fixed_key() -> list[Patch]:
    def find(seal: Any, shape: Any, where: Any) -> Steps:
        from ckptfs.commit.catalog.catalog import LocatedCheckpoint
        from ckptfs.commit.manifest import decode_manifest, digest_of
        from ckptfs.errors import IntegrityError

        raw = yield Read(f"{seal.name}/ckptfs.json")
        if digest_of(raw) != seal.digest:
            raise IntegrityError("the manifest is another one")
        return LocatedCheckpoint(seal.name, "", decode_manifest(raw, where), seal)

    return [(programs, "find", find)]


def _unconditional_put() -> list[Patch]:
    def put(whole: Any, files: Any, caps: Any, known: Any, *, replaces: Any) -> Steps:
        for key, data in files.items():
            yield Replace(key, data)
        return True

    return [(projection, "_put", put)]


def _fresh_name_put_unconditionally() -> list[Patch]:
    def put(files: Any) -> Steps:
        for key, data in files.items():
            yield Replace(key, data)
        return True

    return [(projection, "_put_fresh", put)]


def _old_fold_trusted() -> list[Patch]:
    def catch_up(state: Any = None) -> Steps:
        return state
        yield

    return [(projection, "catch_up", catch_up)]


# -- bugs that the search found in the first draft of this code --------------------------------


def _name_free_at_the_delete_entry() -> list[Patch]:
    real = decisions._conflicts

    def conflicts(state: Any, seal: Any, *, replace: bool) -> bool:
        gone = {k: _gone(s) for k, s in state.saves.items()}
        return real(_with(state, gone), seal, replace=replace)

    return [(decisions, "_conflicts", conflicts)]


def _gone(save: Any) -> Any:
    return replace(save, gone=save.deleted)


def _with(state: Any, saves: Any) -> Any:
    return replace(state, saves=Saves.of(saves.values()))


def _dead_on_arrival() -> list[Patch]:
    return [(decisions, "_rank", lambda seal: (0,))]


def _newer_trash_taken() -> list[Patch]:
    def take(generation: Generation, caps: Any, state: Any) -> Steps:
        from ckptfs.commit.operations import List

        mine = trash.trash_of(generation)
        yield MakeDir(mine)
        for entry in (yield List(paths.TRASH)):
            if f"{paths.TRASH}/{entry.name}" != mine:
                yield RemoveTree(f"{paths.TRASH}/{entry.name}")

    return [(recovery, "take_trash", take)]


def _older_trash_left() -> list[Patch]:
    def take_away(older: str, mine: str, state: Any) -> Steps:
        return
        yield

    return [(trash, "_take_away", take_away)]


def _one_trash_for_all_removers() -> list[Patch]:
    def own(generation: Generation, remover: str) -> str:
        return trash.trash_of(generation)

    return [(delete_checkpoint, "own_trash", own)]


def _replaced_save_comes_back() -> list[Patch]:
    real = protocol.commits

    def undeleted(views: Any) -> Any:
        return [x for x in real(views) if not protocol.is_deleted(x.seal.save_id, views)]

    return [(protocol, "commits", undeleted), (decisions, "commits", undeleted)]


def _pins_forgotten() -> list[Patch]:
    return [
        (
            decisions,
            "_needed_ids",
            lambda views, _: {x.seal.save_id for x in protocol.catalog(views)},
        )
    ]


def _bytes_before_the_entry() -> list[Patch]:
    real = deletion_steps.delete_save

    def delete(seal: Any, views: Any, means: Any, **more: Any) -> Steps:
        yield from erase.erase(seal, views, means.domain, trash.trash_of(means.holder), means.caps)
        return (yield from real(seal, views, means, **more))

    return [(programs, "delete_save", delete), (recovery, "delete_save", delete)]


def _delete_in_one_domain_is_enough() -> list[Patch]:
    real = deletion_steps.finish_delete

    def delete(seal: Any, views: Any, means: Any, **more: Any) -> Steps:
        more.pop("reason")
        more.pop("still", None)
        return (yield from real(seal, views, means, **more))

    return [(recovery, "delete_save", delete)]


def _exists_taken_for_a_conflict() -> list[Patch]:
    real = log._settle

    def settle(number: int) -> Steps:
        entry = yield from real(number)
        return Entry("nobody", entry.body)

    return [(log, "_settle", settle)]


def _decided_once() -> list[Patch]:
    def append(
        decide: Any, *, write_id: str, stamp: Any = Stamp(), state: Any = None, tried: Any = None
    ) -> Steps:
        state = yield from log.catch_up(state or tried)
        body = decide(state)
        if isinstance(body, RefusedAppend):
            return body
        while True:
            number = state.next
            if (yield from log._create(number, Entry(write_id, body, stamp))):
                return Appended(number, fold.fold_entry(state, body))
            state = yield from log.catch_up(state)

    return [(log, "append", append), (owner_steps, "append", append)]


def _plain_saves_ignore_fences() -> list[Patch]:
    real = decisions.may_seal

    def may_seal(state: Any, seal: Any, *, replace: bool) -> Any:
        found = real(state, seal, replace=replace)
        if isinstance(found, RefusedAppend) and found.reason is Refusal.FENCED and not seal.fenced:
            return seal
        return found

    return [(owner_steps, "may_seal", may_seal)]


def _abort_without_base() -> list[Patch]:
    """Recovery aborts nothing."""
    real = recovery.plan_recovery

    def plan(reports: Mapping[str, Any], holder: Generation, keep: Any) -> Any:
        return replace(real(reports, holder, keep), abort=())

    return [(recovery, "plan_recovery", plan)]


def _one_look_for_the_record() -> list[Patch]:
    def begin(keys: AttemptKeys, base: Generation) -> Steps:
        home = keys.record.rsplit("/", 1)[0]
        yield MakeDir(home)
        yield Write(keys.record, recovery.encode_record(keys.save_id, keys.name, base))

    return [(owner_steps, "begin", begin)]


def _a_promise_for_a_commit() -> list[Patch]:
    return [(protocol, "_standing_of_part", lambda part, views: protocol.Standing.COMMITTED)]


def _sealed_parts_aborted() -> list[Patch]:
    real = protocol._standing_of_part

    def pending(part: Any, views: Any) -> Any:
        found = real(part, views)
        lost = found is protocol.Standing.IN_DOUBT
        return protocol.Standing.PENDING if lost else found

    return [(protocol, "_standing_of_part", pending)]


def _open_tickets_taken_for_old() -> list[Patch]:
    real = parts._older

    def older(word: Any, here: Any) -> Iterator[str]:
        return real(replace(word, fence=replace(word.fence, generation=Generation(9, ""))), here)

    return [(parts, "_older", older)]


def _deleted_taken_for_aborted() -> list[Patch]:
    real = parts.state_from_word

    def state_from_word(word: Any, here: Any) -> Any:
        state = real(word, here)
        saves = {
            k: replace(s, deleted=False, aborted=True) if s.deleted and s.seal is None else s
            for k, s in state.saves.items()
        }
        return replace(state, saves=Saves.of(saves.values()))

    return [(parts, "state_from_word", state_from_word)]


def _removal_recorded_without_another_look() -> list[Patch]:
    def lies_nowhere(whole: Any, domain: str, shape: Any) -> Steps:
        yield Refresh("")
        return True

    return [(where, "lies_nowhere", lies_nowhere) for where in (deletion_steps, programs)]


def _parts_left_count_as_nothing() -> list[Patch]:
    real = deletion_steps.lies_nowhere

    def lies_nowhere(whole: Any, domain: str, shape: Any) -> Steps:
        return (yield from real(replace(whole, parts=()), domain, shape))

    return [(where, "lies_nowhere", lies_nowhere) for where in (deletion_steps, parts_model)]


def _swap_without_looking() -> list[Patch]:
    def swap(state: Any, seal: Any, expected: Any) -> Any:
        return decisions.may_seal(state, seal, replace=True)

    return [(scenarios, "may_swap", swap)]


PLANTED: dict[str, Mistake] = {
    "a swap that does not look what it replaces": Mistake(
        "swap-two-domains", "I5", _swap_without_looking
    ),
    "what lies there recorded as removed": Mistake(
        "taken-while-it-moves", "I11", _removal_recorded_without_another_look
    ),
    "parts that are left recorded as removed": Mistake(
        "parts-removed-by-hand", "I11", _parts_left_count_as_nothing
    ),
    "a sealed part taken for a commit": Mistake("parts-remote", "I9", _a_promise_for_a_commit),
    "sealed parts aborted while their home is out of reach": Mistake(
        "parts-home-lost", "I1", _sealed_parts_aborted
    ),
    "open tickets taken for old ones": Mistake(
        "parts-next-ticket", "I", _open_tickets_taken_for_old
    ),
    "what home deleted taken for what it never committed": Mistake(
        "parts-deleted", "I", _deleted_taken_for_aborted
    ),
    "projecting a later save before an earlier one's sources are consumed": Mistake(
        "plain-replaced", "I7", _sources_not_consumed
    ),
    "a reader that looks in step_N before attempts": Mistake(
        "fresh", "I2", _reader_looks_in_the_step_first
    ),
    "stopping at ENOENT in a projection": Mistake(
        "replace-recovered-twice", "I7", _stopping_at_enoent
    ),
    "what was moved to the trash is not looked at": Mistake(
        "retired-beside-session", "I7", _what_was_moved_is_not_looked_at
    ),
    "a projection that a dead remover took away is left so": Mistake(
        "retired-beside-session-recovered", "I7", _lost_projection_left
    ),
    "equal generations": Mistake("tie", "I3", _equal_generations),
    "deleting a step by name": Mistake("delete-saved-again", "foreign", _deleting_a_step_by_name),
    "deleting without looking who it is": Mistake(
        "delete-beside-foreign", "foreign", _deleting_without_looking_who_it_is
    ),
    "a newcomer that trusts an old judgement of the owner": Mistake(
        "newcomers", "I10", _old_judgement_trusted
    ),
    "a newcomer that keeps a part of the domains": Mistake(
        "newcomers-two-domains", "I8", _fence_not_given_back
    ),
    "a newcomer that looks at the newest fence only": Mistake(
        "newcomers-fewer-domains", "I10", _newest_fence_only
    ),
    "aborting the rest, newer bases too": Mistake("plain", "I6", _aborting_the_rest),
    "unlinking entries below a snapshot": Mistake("plain", "", _unlinking_below_a_snapshot),
    "manifest read from a fixed key": Mistake("object-replace", "I2", _manifest_from_a_fixed_key),
    "unconditional projection PUT": Mistake("object-replace", "I", _unconditional_put),
    "a fresh name that is put without a condition": Mistake(
        "object-replace", "I", _fresh_name_put_unconditionally
    ),
    "a projection that trusts what was folded before": Mistake(
        "object-replace", "I", _old_fold_trusted
    ),
    "a name that is free as soon as the delete entry is there": Mistake(
        "directory-deleted-plain", "I", _name_free_at_the_delete_entry
    ),
    "a save that is committed behind its successor": Mistake(
        "plain-overtaken", "I5", _dead_on_arrival
    ),
    "a newcomer that takes a newer one's trash": Mistake(
        "delete-three-generations", "I", _newer_trash_taken
    ),
    "a trash that is not taken from a stalled deleter": Mistake(
        "delete-saved-again", "I", _older_trash_left
    ),
    "removers that hold nothing share a trash": Mistake(
        "delete-unfenced-late", "I4", _one_trash_for_all_removers
    ),
    "a replaced save that comes back when its successor is deleted": Mistake(
        "delete-the-replacement", "", _replaced_save_comes_back
    ),
    "pins forgotten": Mistake("pinned", "I", _pins_forgotten),
    "bytes deleted before the entry": Mistake(
        "delete-the-replacement", "I1", _bytes_before_the_entry
    ),
    "a delete recorded in one domain only": Mistake(
        "two-domains-delete", "I1", _delete_in_one_domain_is_enough
    ),
    "exists taken for a conflict after a lost answer": Mistake(
        "lost", "I9", _exists_taken_for_a_conflict, needs_lost_answers=True
    ),
    "a decision not taken again at the next number": Mistake("plain", "I3", _decided_once),
    "plain saves that ignore fences": Mistake("plain", "I3", _plain_saves_ignore_fences),
    "a recovery that aborts nothing": Mistake("two-domains", "I7", _abort_without_base),
    "an attempt that dies of a recovery's sweep": Mistake("plain", "I6", _one_look_for_the_record),
}
