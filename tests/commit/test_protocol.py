"""The decisions: what is committed, live and latest, who may append, and what may go."""

from __future__ import annotations

import pytest

from ckptfs.commit.decisions import (
    Refusal,
    may_abort,
    may_claim,
    may_delete,
    may_fence,
    may_forget,
    may_seal,
    pending_deletes,
    unreleased,
)
from ckptfs.commit.log.append import RefusedAppend
from ckptfs.commit.log.entries import (
    GENESIS,
    Abort,
    Body,
    Decided,
    Delete,
    FenceMode,
    Generation,
    Gone,
    Kind,
    Outcome,
    Pin,
    Release,
    Seal,
)
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.state import Standing, catalog, latest, next_seq, save_named, standing
from tests.commit.logs import G1, G2, G3, fence, folded, seal

AB = ("A", "B")


def live(*bodies: Body) -> list[str]:
    """Ids of the live saves of a one-domain log, oldest first."""
    return [x.seal.save_id for x in catalog({"A": folded(*bodies)})]


def refusal(found: object) -> Refusal:
    """Why an append was refused."""
    assert isinstance(found, RefusedAppend)
    assert isinstance(found.reason, Refusal)
    return found.reason


# -- standing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], Standing.UNKNOWN),
        (["seal"], [], Standing.PENDING),
        (["seal"], None, Standing.IN_DOUBT),
        (["seal"], ["seal"], Standing.COMMITTED),
        (["seal"], ["abort", "seal"], Standing.ABORTED),
        (["seal", "decided"], None, Standing.COMMITTED),
        (["seal", "decided-aborted"], None, Standing.ABORTED),
        (["seal"], ["seal", "delete"], Standing.DELETED),
        (["seal", "delete"], None, Standing.DELETED),
    ],
)
def test_a_save_of_two_domains(a: list[str], b: list[str] | None, expected: Standing) -> None:
    """Committed needs every listed domain; a record of the decision is worth as much; without
    either an unreached domain leaves it in doubt; one delete is enough.
    """
    words: dict[str, Body] = {
        "seal": seal("x", domains=AB),
        "abort": Abort("x", G2),
        "decided": Decided("x", Outcome.COMMITTED),
        "decided-aborted": Decided("x", Outcome.ABORTED),
        "delete": Delete("x", G1),
    }
    views = {"A": folded(*(words[w] for w in a))}
    if b is not None:
        views["B"] = folded(*(words[w] for w in b))
    assert standing("x", views) is expected


# -- catalog and latest -------------------------------------------------------------------------


def test_latest_is_the_last_commit_not_the_largest_step() -> None:
    """Restored at 50 and retrained to 70, a run must not wake up at the rejected 100."""
    bodies: list[Body] = [
        fence(G1),
        seal("a", step=50, seq=1),
        seal("b", step=100, seq=2),
        fence(G2),
        seal("c", step=70, base=G2, seq=1),
    ]
    newest = latest({"A": folded(*bodies)})
    assert newest is not None
    assert newest.seal.save_id == "c"
    assert live(*bodies) == ["a", "b", "c"]


def test_order_is_generation_then_seq_whatever_the_position() -> None:
    """Two saves on their way at once order by their beginning, unfenced ones after by position."""
    views = {
        "A": folded(
            fence(G1),
            seal("late", seq=2),
            seal("early", seq=1),
            seal("plain2", seq=2, fenced=False),
            seal("plain1", seq=2, fenced=False),
        )
    }
    assert [x.seal.save_id for x in catalog(views)] == ["early", "late", "plain2", "plain1"]


def test_each_kind_has_its_latest_and_failing_runs_none() -> None:
    """A weights-only publication does not hide the checkpoint to resume from."""
    state = folded(
        seal("full", seq=1),
        seal("weights", seq=2, artifact=Kind.WEIGHTS),
        seal("dying", seq=3, failure=True),
    )
    found = {k: latest({"A": state}, k) for k in (None, Kind.CHECKPOINT, Kind.WEIGHTS)}
    assert {k: v.seal.save_id for k, v in found.items() if v} == {
        None: "weights",
        Kind.CHECKPOINT: "full",
        Kind.WEIGHTS: "weights",
    }


def test_a_replaced_save_stays_dead_when_its_successor_is_deleted() -> None:
    """Deleting a step deletes the step: its older version does not come back to life."""
    bodies: list[Body] = [seal("a", "s", seq=1), seal("b", "s", seq=2), Delete("b", G1)]
    assert live(*bodies) == []
    assert [d.seal.save_id for d in pending_deletes({"A": folded(*bodies)})] == ["a"]


# -- overwriting --------------------------------------------------------------------------------

OVER = fence(G2, FenceMode.OVERWRITE)


def test_an_overwrite_hides_and_a_later_fence_without_a_commit_brings_back() -> None:
    """The old saves leave the catalog at once and return if nothing was committed."""
    assert live(fence(G1), seal("a")) == ["a"]
    assert live(fence(G1), seal("a"), OVER) == []
    assert live(fence(G1), seal("a"), OVER, fence(G3)) == ["a"]


def test_the_first_commit_under_an_overwrite_hides_for_good_and_dooms() -> None:
    """From the first commit on the old saves are gone whatever process fences next, and may be deleted."""
    bodies: list[Body] = [fence(G1), seal("a"), OVER, seal("b", base=G2)]
    assert live(*bodies, fence(G3)) == ["b"]
    assert [(d.seal.save_id, d.reason) for d in pending_deletes({"A": folded(*bodies)})] == [
        ("a", "overwritten")
    ]
    assert pending_deletes({"A": folded(fence(G1), seal("a"), OVER)}) == []
    deleted: list[Body] = [*bodies, Delete("b", G2), fence(G3)]
    assert live(*deleted) == []


# -- what may go --------------------------------------------------------------------------------


def test_a_replaced_save_goes_one_commit_after_its_successor() -> None:
    """Stock readers may still hold the old .metadata until then."""
    bodies: list[Body] = [seal("a", "s", seq=1), seal("b", "s", seq=2)]
    assert pending_deletes({"A": folded(*bodies)}) == []
    found = pending_deletes({"A": folded(*bodies, seal("n", seq=3))})
    assert [(d.seal.save_id, d.reason) for d in found] == [("a", "replaced")]


def test_pinned_and_referenced_saves_stay() -> None:
    """Neither a pin nor a reference of a live or pinned save lets bytes go."""
    bodies: list[Body] = [seal("a", "s", seq=1), seal("b", "s", seq=2), seal("n", seq=3)]
    assert pending_deletes({"A": folded(*bodies, Pin("a"))}) == []
    unpinned = folded(*bodies, Pin("a"), Pin("a", False))  # noqa: FBT003 - as in the log
    assert [d.seal.save_id for d in pending_deletes({"A": unpinned})] == ["a"]
    refers: list[Body] = [*bodies[:2], seal("n", seq=3, references=("a",))]
    assert pending_deletes({"A": folded(*refers)}) == []


# -- appends ------------------------------------------------------------------------------------


def test_a_newer_fence_stops_every_append_of_an_older_generation() -> None:
    """Seals, aborts, deletes and records of a fenced generation are refused, plain saves' too."""
    state = folded(fence(G1), seal("a"), fence(G2))
    assert refusal(may_seal(state, seal("b"), replace=True)) is Refusal.FENCED
    assert refusal(may_seal(state, seal("b", fenced=False), replace=False)) is Refusal.FENCED
    assert refusal(may_abort(state, "b", G1)) is Refusal.FENCED
    assert refusal(may_delete(state, "a", G1, "")) is Refusal.FENCED
    assert refusal(may_forget(state, "a", G1)) is Refusal.FENCED
    assert refusal(may_fence(state, fence(G2))) is Refusal.FENCED
    assert refusal(may_fence(state, fence(Generation(2, "a")))) is Refusal.FENCED
    assert may_fence(state, fence(Generation(2, "z"))) == fence(Generation(2, "z"))


def test_a_newcomer_fences_only_what_it_judged() -> None:
    """Any other fence than the one that was judged refuses a claim, were it the older one."""
    state = folded(fence(G1))
    assert may_claim(state, fence(G2), G1) == fence(G2)
    assert refusal(may_claim(state, fence(G2), GENESIS)) is Refusal.FENCED
    between = folded(fence(G1), fence(Generation(2, "a")))
    assert refusal(may_claim(between, fence(Generation(2, "z")), G1)) is Refusal.FENCED
    assert may_claim(LogState(), fence(G1), GENESIS) == fence(G1)


def test_who_may_still_hold_a_run() -> None:
    """Every unreleased fence of the newest number does, in whichever domain it is."""
    a, b = fence(Generation(2, "a")), fence(Generation(2, "b"))
    assert unreleased({}) == ()
    assert unreleased({"A": LogState()}) == ()
    assert unreleased({"A": folded(fence(G1)), "B": folded(a)}) == (a,)
    assert unreleased({"A": folded(a), "B": folded(b)}) == (b, a)
    assert unreleased({"A": folded(a), "B": folded(b, Release(b.generation))}) == (a,)
    assert unreleased({"A": folded(a, Release(a.generation))}) == ()
    assert unreleased({"A": folded(a, Release(a.generation)), "B": folded(a)}) == (a,)


def test_an_abort_and_a_seal_are_final() -> None:
    """After the one the other is refused; nothing is said twice."""
    sealed, aborted = folded(fence(G1), seal("a")), folded(fence(G1), Abort("a", G1))
    assert refusal(may_abort(sealed, "a", G1)) is Refusal.NOTHING
    assert refusal(may_seal(sealed, seal("a"), replace=True)) is Refusal.NOTHING
    assert refusal(may_seal(aborted, seal("a"), replace=True)) is Refusal.ABORTED
    assert refusal(may_delete(aborted, "a", G1, "")) is Refusal.NOTHING


@pytest.mark.parametrize(
    ("bodies", "mine", "ok"),
    [
        ([seal("a", "s")], seal("b", "s", seq=2), False),
        ([seal("a", "s"), Decided("a", Outcome.ABORTED)], seal("b", "s", seq=2), True),
        ([seal("a", "s"), Delete("a", G1)], seal("b", "s", seq=2), True),
        ([seal("a", "s"), Delete("a", G1)], seal("b", "s", fenced=False), False),
        ([seal("a", "s"), Delete("a", G1), Gone("a", G1)], seal("b", "s", fenced=False), True),
        ([seal("a", "s", seq=5), Delete("a", G1), Gone("a", G1)], seal("b", "s", seq=4), False),
        ([seal("a", "s"), OVER], seal("b", "s", base=G2, fenced=False), True),
        ([seal("a", "other")], seal("b", "s"), True),
    ],
)
def test_a_name_has_one_save_at_a_time(bodies: list[Body], mine: Seal, ok: bool) -> None:
    """A living save holds its name, a deleted one holds it against plain saves until its bytes are
    gone, an aborted or hidden one does not; and no save is committed behind its successor.
    """
    found = may_seal(folded(fence(G1), *bodies), mine, replace=False)
    assert (found == mine) if ok else (refusal(found) is Refusal.CONFLICT)


def test_replacing_takes_the_name_of_a_living_save() -> None:
    """Asked to replace, the seal goes in and the old save is superseded."""
    assert may_seal(folded(seal("a", "s")), seal("b", "s", seq=2), replace=True) is not None
    assert live(seal("a", "s"), seal("b", "s", seq=2)) == ["b"]


def test_a_name_in_doubt_is_taken() -> None:
    """A save may be committed while its other domain is out of reach: its name is not free."""
    held = save_named("s", {"A": folded(seal("a", "s", domains=AB))})
    assert held is not None
    assert held.save_id == "a"
    assert save_named("s", {"A": folded(Abort("a", G1))}) is None


def test_seq_goes_up_for_holders_and_stays_for_plain_saves() -> None:
    """A holder's save comes after all it saw; a plain one after the last of them, by position."""
    views = {
        "A": folded(seal("a", seq=4), seal("u", seq=4, fenced=False), seal("o", base=G2, seq=9))
    }
    assert next_seq(G1, views, fenced=True) == 5
    assert next_seq(G1, views, fenced=False) == 4
    assert next_seq(G3, views, fenced=True) == 1


def test_a_delete_is_told_gone_once() -> None:
    """Only what was deleted can be gone, and only once."""
    deleted = folded(seal("a"), Delete("a", G1))
    assert may_forget(deleted, "a", G1) == Gone("a", G1)
    assert refusal(may_forget(folded(seal("a")), "a", G1)) is Refusal.NOTHING
    assert refusal(may_forget(folded(seal("a"), Delete("a", G1), Gone("a", G1)), "a", G1)) is (
        Refusal.NOTHING
    )
