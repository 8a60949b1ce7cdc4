"""Which saves are copied, in which order, and which the primary need not wait for: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.commit.log.entries import Delete, Fence, Generation, Kind, PartRef, Seal
from ckptfs.commit.log.fold import LogState, fold_entry
from ckptfs.replication.backlog import Every, Policy, fresh_id, origin_of, plan_copies
from ckptfs.retention.policy import Best, Keep

HOLDER = Generation(1, "x")


def seal(step: int, *, name: str = "", save_id: str = "", kind: Kind = Kind.CHECKPOINT) -> Seal:
    """A save; its place is given when it is folded."""
    return Seal(
        save_id=save_id or f"id{step}{kind.value[0]}",
        base=HOLDER,
        seq=0,
        fenced=True,
        name=name or f"{kind.value}_{step}",
        step=step,
        artifact=kind,
        domains=("d",),
        digest="",
        metrics=(("loss", float(step % 7)),),
    )


def log_of(*seals: Seal, deleted: Sequence[str] = ()) -> dict[str, LogState]:
    """A log in which these were committed in this order, and some deleted since."""
    state = fold_entry(LogState(), Fence(HOLDER))
    for seq, one in enumerate(seals):
        state = fold_entry(state, replace(one, seq=seq + 1))
    for save_id in deleted:
        state = fold_entry(state, Delete(save_id, HOLDER))
    return {"d": state}


def policy(keep: Keep | None = None, every: Every = Every.ALL) -> Policy:
    """Everything is the manager's."""
    return Policy(keep or Keep(), every, lambda _: True)


def planned(
    primary: dict[str, LogState], copy: dict[str, LogState], how: Policy
) -> list[int | None]:
    """The steps to copy, in order."""
    return [one.seal.step for one in plan_copies(primary, copy, how).copies]


STEPS = [seal(n) for n in (10, 20, 30, 40, 50, 60)]


def test_what_came_after_the_last_that_the_copy_held_is_copied_in_commit_order() -> None:
    """Never an older one later: the copy would call it its latest."""
    assert planned(log_of(*STEPS), {}, policy()) == [10, 20, 30, 40, 50, 60]
    held = log_of(STEPS[0], STEPS[2])
    assert planned(log_of(*STEPS), held, policy()) == [40, 50, 60]
    # Deleted there since: it was copied once.
    gone = log_of(STEPS[0], STEPS[2], deleted=["id30c"])
    assert planned(log_of(*STEPS), gone, policy()) == [40, 50, 60]
    # Deleted on the primary, after it was copied.
    assert planned(log_of(*STEPS, deleted=["id30c"]), held, policy()) == [40, 50, 60]
    # A try that was repeated has another id, and is known by its origin.
    again = log_of(replace(STEPS[4], save_id="id50c~aa"))
    assert planned(log_of(*STEPS), again, policy()) == [60]


def test_a_run_retrained_from_an_older_step_is_copied_in_its_order() -> None:
    """70 after 100, and the same name again: the order is the commits', the replaced one is left out."""
    lives = [seal(100), seal(70), seal(100, save_id="new")]
    assert planned(log_of(*lives), log_of(lives[0]), policy()) == [70, 100]
    todo = plan_copies(log_of(*lives), {}, policy())
    assert [one.save_id for one in todo.copies] == ["id70c", "new"]


def test_what_the_copys_retention_would_drop_is_not_copied() -> None:
    """Of many that wait, those that would stay: the last ones, and the milestones and the best."""
    keep = Keep(latest=2, every=30, best=Best("loss"))  # the loss is the step modulo 7
    plan = plan_copies(log_of(*STEPS), {}, policy(keep))
    assert [one.seal.step for one in plan.copies] == [30, 50, 60]
    assert plan.settled == {"id10c", "id20c", "id40c"}


def test_latest_alone_is_one_of_each_kind() -> None:
    """Weights do not push out the checkpoint before them, nor a failing run's save a
    healthy one.
    """
    mixed = [*STEPS, seal(60, kind=Kind.WEIGHTS), replace(seal(61), failure=True)]
    todo = plan_copies(log_of(*mixed), {}, policy(every=Every.LATEST))
    assert [one.seal.save_id for one in todo.copies] == ["id60c", "id60w", "id61c"]
    assert "id50c" in todo.settled


def test_directories_and_checkpoints_of_parts_are_copied_as_well() -> None:
    """Whatever kind of checkpoint it is, the primary's retention waits for its copy."""
    parts = replace(seal(3), parts=(PartRef("actor", "p", "digest", ("d",)),))
    plan = plan_copies(log_of(seal(1), seal(2, kind=Kind.DIRECTORY), parts), {}, policy())
    assert [one.seal.step for one in plan.copies] == [1, 2, 3]
    assert not plan.settled


def test_what_cannot_be_copied_is_settled_and_holds_up_nobody() -> None:
    """Given up: newer ones are copied, and the primary's retention may have it."""
    plan = plan_copies(log_of(*STEPS[:2]), {}, policy(), given_up=["id10c"])
    assert [one.seal.step for one in plan.copies] == [20]
    assert plan.settled == {"id10c"}


def test_an_id_is_used_for_one_try() -> None:
    """The save's own first; after a try that began, here or in an earlier process, a fresh one."""
    views = log_of(seal(1))
    assert fresh_id("other", views) == "other"
    for known, tried in ((views, ()), ({}, ("id1c",))):
        one, two = (fresh_id("id1c", known, tried) for _ in range(2))
        assert len({one, two, "id1c"}) == 3
        assert origin_of(one) == origin_of(two) == origin_of("id1c") == "id1c"


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.sampled_from([Keep(), Keep(latest=1), Keep(latest=3, every=2)]),
    st.sampled_from(Every),
    st.data(),
)
def test_round_by_round_copies_keep_the_order_and_nothing_waits_for_ever(
    steps: list[int], keep: Keep, every: Every, data: st.DataObject
) -> None:
    """Whatever is committed between the rounds: the copy's commits are a subsequence of the primary's,
    the newest is always there after a round, and every live save is copied or settled.
    """
    made = [seal(step, save_id=f"s{at}") for at, step in enumerate(steps)]
    copied: list[Seal] = []
    until = 0
    while until < len(made):
        until = data.draw(st.integers(until + 1, len(made)))
        primary, copy = log_of(*made[:until]), log_of(*copied)
        plan = plan_copies(primary, copy, policy(keep, every))
        ids = {one.seal.save_id for one in plan.copies}
        assert not ids & plan.settled
        copied += [one.seal for one in plan.copies]
        after = plan_copies(primary, log_of(*copied), policy(keep, every))
        assert after.copies == ()
        assert made[until - 1].save_id in after.settled
        assert copied[-1].save_id == made[until - 1].save_id
    order = [one.save_id for one in made]
    places = [order.index(one.save_id) for one in copied]
    assert places == sorted(set(places))


@pytest.mark.parametrize("every", Every)
def test_nothing_to_copy_is_nothing(every: Every) -> None:
    """No lives, no plan."""
    assert plan_copies({}, {}, policy(every=every)).copies == ()
