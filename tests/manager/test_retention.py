"""The policy: what stays, what goes, against an oracle that knows no better than to count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.commit.decisions import (
    BY_NAME,
    Cause,
    inherited_pins,
    reason_to_keep,
)
from ckptfs.commit.log.entries import Abort, Body, Decided, Delete, Kind, Outcome, Pin, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.log.saves import Saves
from ckptfs.commit.state import catalog
from ckptfs.errors import StateError
from ckptfs.manager.run_setup import Names, Template
from ckptfs.retention.policy import (
    Best,
    Keep,
    Plan,
    needs_text,
    plan_retention,
    short_of,
)
from tests.commit.logs import G1, G2, fence, folded, seal

NAMES = Names.of_states(Template("step_{N}"), Template("weights_{N}"))
GIB = 1 << 30


def save(step: int, save_id: str | None = None, **more: object) -> Seal:
    """A seal of a manager's save; its place in the order is that in the log."""
    kind = more.pop("artifact", Kind.CHECKPOINT)
    name = f"{'weights' if kind is Kind.WEIGHTS else 'step'}_{step}"
    return seal(save_id or f"s{step}", name, step=step, artifact=kind, **more)  # type: ignore[arg-type]


def in_order(*bodies: Body) -> LogState:
    """A log of these entries; seals get their sequence numbers by their places."""
    numbered = [
        replace(body, seq=at) if isinstance(body, Seal) else body for at, body in enumerate(bodies)
    ]
    return folded(fence(G1), *numbered)


def plan(keep: Keep, *bodies: Body, roots: Sequence[str] = ()) -> Plan:
    """The plan for a run of one domain."""
    return plan_retention({"A": in_order(*bodies)}, keep, NAMES.is_ours, roots)


def going(found: Plan) -> list[str]:
    """The ids that go."""
    return [g.seal.save_id for g in found.going]


def kept(found: Plan) -> list[str]:
    """The ids that stay."""
    return [s.save_id for s in found.kept]


def test_what_cannot_be_deleted_even_by_name() -> None:
    """A pinned save, one with files that another, not deleted itself, uses, and what is not live."""
    saves = [save(1), save(2, references=("s1",)), save(3)]
    log = {"A": in_order(*saves, Pin("s3", pinned=True))}

    def why(save_id: str, *more: Body) -> str | None:
        views = {"A": in_order(*saves, *more)} if more else log
        found = reason_to_keep(save_id, views, BY_NAME)
        return None if found is None else found.text

    assert why("s1") == "step_2 uses its files"
    assert why("s2") is None
    assert why("s3") == "it is pinned"
    assert why("s1", Delete("s2", G1)) is None
    assert why("s4") == why("s2", Delete("s2", G1)) == "it is not live"


def test_each_cause_keeps_what_it_names_and_the_caller_says_which_count() -> None:
    """The same save is kept by its pin, by who uses it, as the newest of its kind, and by a domain out of reach."""
    base = save(1, domains=("A", "B"))
    views = {
        "A": in_order(
            base, save(2, references=("s1",)), save(3, "w", artifact=Kind.WEIGHTS), Pin("s1")
        )
    }
    found = {cause: reason_to_keep("s1", views, (cause,)) for cause in Cause}
    assert {cause: None if one is None else one.names for cause, one in found.items()} == {
        Cause.NOT_LIVE: (),  # in doubt while B is out of reach
        Cause.PINNED: (),
        Cause.USED: ("step_2",),
        Cause.NEWEST: None,
        Cause.UNREACHED: ("B",),
    }
    newest = [
        save_id for save_id in ("s1", "s2", "w") if reason_to_keep(save_id, views, (Cause.NEWEST,))
    ]
    assert newest == ["s2", "w"]
    assert reason_to_keep("s1", views, (Cause.USED,), deleted={"s2"}) is None
    reached = {**views, "B": in_order(base)}
    assert reason_to_keep("s1", reached, (Cause.NOT_LIVE, Cause.NEWEST, Cause.UNREACHED)) is None


def test_a_pin_does_not_keep_what_is_deleted_already() -> None:
    """Its bytes are still removed, even if another domain has a pin."""
    base = save(1, domains=("A", "B"))
    views = {"A": in_order(base, Pin("s1")), "B": in_order(base, Delete("s1", G1))}
    assert reason_to_keep("s1", views, (Cause.PINNED,)) is None


def test_nothing_goes_unasked() -> None:
    """keep_latest=None deletes nothing."""
    assert going(plan(Keep(), *(save(n) for n in range(9)))) == []


def test_the_last_commits_stay_and_the_reason_is_told() -> None:
    """keep_latest counts commits from the end; whatever goes says by which rule."""
    found = plan(Keep(2), *(save(n) for n in range(5)))
    assert kept(found) == ["s3", "s4"]
    assert [(g.seal.save_id, g.reason) for g in found.going] == [
        (f"s{n}", "keep_latest=2") for n in range(3)
    ]


def test_the_order_is_that_of_commits_and_not_of_steps() -> None:
    """A run that was restored at 50 and trained to 70 keeps 60 and 70, not the rejected 100."""
    found = plan(Keep(2), save(50), save(100), save(60), save(70))
    assert kept(found) == ["s60", "s70"]


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), st.integers(-1, 9), st.integers(1, 3))
def test_nothing_further_than_the_run_goes(steps: list[int], at: int, latest: int) -> None:
    """Of what the policy would delete, what is beyond the step that the run has come to stays, no more."""
    log = {"A": in_order(*(save(n) for n in steps))}
    freely = plan_retention(log, Keep(latest), NAMES.is_ours)
    bound = plan_retention(log, Keep(latest), NAMES.is_ours, at=at)
    assert [g.seal.step for g in bound.going] == [
        g.seal.step for g in freely.going if (g.seal.step or 0) <= at
    ]
    assert sorted(kept(bound) + going(bound)) == sorted(f"s{n}" for n in steps)


def test_what_is_further_keeps_what_it_refers_to() -> None:
    """What a step uses that stays for being further stays with it."""
    log = {"A": in_order(save(1), save(9, references=("s1",)), save(2), save(3))}
    assert kept(plan_retention(log, Keep(1), NAMES.is_ours, at=3)) == ["s1", "s9", "s3"]


def test_every_nth_step_stays_for_ever() -> None:
    """keep_every asks whether it divides the step; a save that gave no step is not divided."""
    numbers = [save(n) for n in (0, 5, 10, 15, 20, 21)]
    assert kept(plan(Keep(1, every=10), *numbers)) == ["s0", "s10", "s20", "s21"]
    unnumbered = replace(save(3, "none"), step=None)
    assert going(plan(Keep(1, every=10), unnumbered, save(21))) == ["none"]


@pytest.mark.parametrize(("mode", "best"), [("min", "s2"), ("max", "s1")])
def test_the_best_stays_wherever_it_stands(mode: str, best: str) -> None:
    """keep_best ranks by the metric, down or up."""
    values = [(1, 0.9), (2, 0.1), (3, 0.5), (4, 0.6)]
    saves = [save(n, metrics=(("loss", value), ("other", -value))) for n, value in values]
    assert kept(plan(Keep(1, best=Best("loss", mode=mode)), *saves)) == [best, "s4"]  # type: ignore[arg-type]


def test_a_save_without_the_metric_is_never_best() -> None:
    """Neither without the metric nor with NaN, whichever way is better."""
    saves = [
        save(1),
        save(2, metrics=(("loss", math.nan),)),
        save(3, metrics=(("loss", 5.0),)),
        save(4, metrics=(("acc", 0.0),)),
    ]
    for mode in ("min", "max"):
        assert kept(plan(Keep(1, best=Best("loss", 3, mode)), *saves)) == ["s3", "s4"]


def test_of_equals_the_older_stays() -> None:
    """A new save that is only as good pushes nothing out."""
    saves = [save(n, metrics=(("loss", 1.0),)) for n in range(4)]
    assert kept(plan(Keep(1, best=Best("loss")), *saves)) == ["s0", "s3"]


def test_each_kind_counts_for_itself() -> None:
    """Weights among checkpoints push none of them out, and keep their own last."""
    weights = [save(n, f"w{n}", artifact=Kind.WEIGHTS) for n in range(3)]
    assert kept(plan(Keep(1), save(1), *weights)) == ["s1", "w2"]


def test_saves_of_a_failing_run_count_apart() -> None:
    """They push out no healthy save, are never best, and their own last stays."""
    metrics = (("loss", 1.0),)
    failing = [save(n, failure=True, metrics=(("loss", -9.0),)) for n in (7, 8)]
    healthy = [save(n, metrics=metrics) for n in (4, 5)]
    found = plan(Keep(1, best=Best("loss")), *healthy, *failing)
    assert kept(found) == ["s4", "s5", "s8"]


def test_pinned_saves_stay_until_they_are_unpinned() -> None:
    """A pin outweighs the policy; the last pin entry counts."""
    saves = [save(n) for n in range(3)]
    assert kept(plan(Keep(1), *saves, Pin("s0"))) == ["s0", "s2"]
    assert kept(plan(Keep(1), *saves, Pin("s0"), Pin("s0", pinned=False))) == ["s2"]


def test_a_pin_in_one_domain_is_enough() -> None:
    """Its owner may have died before the other domains had it."""
    saves = [save(n, domains=("A", "B")) for n in range(2)]
    views = {"A": in_order(*saves), "B": in_order(*saves, Pin("s0"))}
    assert going(plan_retention(views, Keep(1), NAMES.is_ours)) == []
    for order in (("A", "B"), ("B", "A")):
        kept = reason_to_keep("s0", {domain: views[domain] for domain in order}, BY_NAME)
        assert kept is not None
        assert kept.text == "it is pinned"


def test_a_pin_is_the_steps_and_passes_to_its_successor() -> None:
    """Saved again, a pinned step stays pinned: the replaced save hands it on, once, and may go."""
    old, new = save(1, "old"), save(1, "new")
    state = in_order(old, Pin("old"), new, save(2))
    assert inherited_pins({"A": state}) == [("old", "new")]
    handed = in_order(old, Pin("old"), new, save(2), Pin("new"), Pin("old", pinned=False))
    assert inherited_pins({"A": handed}) == []
    assert inherited_pins({"A": in_order(old, Pin("old"), save(2))}) == []
    assert inherited_pins({"A": in_order(old, Pin("old"), new, Delete("old", G1))}) == []


def test_what_a_save_refers_to_stays_with_it() -> None:
    """References count through references, for as long as the last save that has them."""
    base, middle = save(1), save(2, references=("s1",))
    tip, other = save(3, references=("s2",)), save(4)
    assert kept(plan(Keep(1), base, middle, tip)) == ["s1", "s2", "s3"]
    assert kept(plan(Keep(1), base, middle, tip, other)) == ["s4"]


def test_an_unsettled_save_keeps_what_it_refers_to() -> None:
    """Sealed in one of two domains: recovery may commit it yet, or abort it."""
    old = [save(n, domains=("A", "B")) for n in range(2)]
    half = save(5, "half", domains=("A", "B"), references=("s0",))
    views = {"A": in_order(*old, half), "B": in_order(*old)}
    assert going(plan_retention(views, Keep(1), NAMES.is_ours)) == []
    views = {"A": in_order(*old, half), "B": in_order(*old, Abort("half", G1))}
    assert going(plan_retention(views, Keep(1), NAMES.is_ours)) == ["s0"]


def test_roots_of_the_caller_stay_with_what_they_refer_to() -> None:
    """The save that the run was restored from, a base of an unfinished save, one to be copied."""
    saves = [save(1), save(2, references=("s1",)), save(3), save(4)]
    assert kept(plan(Keep(1), *saves, roots=["s2", "unheard-of"])) == ["s1", "s2", "s4"]


def test_row14_names_that_are_not_ours_are_foreign() -> None:
    """A user's backup of a step, other templates, other kinds: never counted and never deleted."""
    names = ("step_1_backup", "my_step_2", "step_2.old", "step_007", "best", "step_", "step_-3")
    foreign = [seal(f"f{at}", name, step=1) for at, name in enumerate(names)]
    directory = seal("dir", "step_6", artifact=Kind.DIRECTORY)
    found = plan(Keep(1), *foreign, directory, save(1), save(2))
    assert going(found) == ["s1"]
    assert kept(found) == ["s2"]


def test_what_the_log_does_not_call_live_is_not_looked_at() -> None:
    """Aborted, in doubt, deleted, and replaced saves neither count nor go."""
    two = ("A", "B")
    doubt = save(3, "doubt", domains=two)
    bodies: list[Body] = [
        save(1),
        save(2),
        doubt,
        save(4),
        Delete("s4", G1),
        save(1, "again"),
        save(5),
    ]
    found = plan(Keep(2), *bodies)
    assert kept(found) == ["again", "s5"]
    assert going(found) == ["s2"]


def test_a_decided_save_counts_although_its_other_disk_is_gone() -> None:
    """Where a node's disk was wiped, the other disk must not fill with saves that no job can load."""
    saves = [save(n, domains=("A", "B")) for n in range(3)]
    decided = [Decided(s.save_id, Outcome.COMMITTED) for s in saves]
    new = save(9, domains=("A", "C"))
    views = {"A": in_order(*saves, *decided, new, Decided("s9", Outcome.COMMITTED))}
    assert going(plan_retention(views, Keep(2), NAMES.is_ours)) == ["s0", "s1"]


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "3"])
def test_a_number_below_one_is_refused(wrong: object) -> None:
    """keep_latest=0 would be a run without its last checkpoint."""
    for make in (
        lambda: Keep(wrong),  # type: ignore[arg-type]
        lambda: Keep(1, every=wrong),  # type: ignore[arg-type]
        lambda: Best("loss", wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(StateError, match="from 1"):
            make()


def test_exceptions_without_a_rule_are_refused() -> None:
    """every and best alone would look like a rule and delete nothing."""
    for keep in ({"every": 10}, {"best": Best("loss")}):
        with pytest.raises(StateError, match="keep_latest"):
            Keep(**keep)
    with pytest.raises(StateError, match="metric"):
        Best("")
    with pytest.raises(StateError, match="min"):
        Best("loss", mode="least")  # type: ignore[arg-type]


def test_the_needs_are_told_in_bytes() -> None:
    """One more than is kept fits in addition while it is written; without a limit that is said."""
    assert "needs 4.29 GB" in needs_text(GIB, Keep(3))
    assert "needs 6.44 GB" in needs_text(GIB, Keep(3, best=Best("loss", 2)))
    assert "nothing is deleted" in needs_text(5 << 20, Keep())
    assert "5.24 MB" in needs_text(5 << 20, Keep())
    assert short_of(GIB, Keep(3), 3 * GIB) == 0
    assert short_of(GIB, Keep(3), 2 * GIB) == GIB
    assert short_of(GIB, Keep(3), 2 * GIB, held=2) == 0


# -- against an oracle ------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One save as Hypothesis makes it up."""

    step: int
    weights: bool
    failure: bool
    loss: float | None
    refers: int | None  # to the save so many places before it
    pinned: bool
    root: bool
    foreign: bool


ITEMS = st.lists(
    st.builds(
        Item,
        step=st.integers(0, 30),
        weights=st.booleans(),
        failure=st.integers(0, 4).map(lambda n: n == 0),
        loss=st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0, -1.0])),
        refers=st.one_of(st.none(), st.none(), st.integers(1, 3)),
        pinned=st.integers(0, 6).map(lambda n: n == 0),
        root=st.integers(0, 6).map(lambda n: n == 0),
        foreign=st.integers(0, 4).map(lambda n: n == 0),
    ),
    max_size=12,
    unique_by=lambda item: (item.step, item.weights, item.foreign),
)
KEEPS = st.builds(
    Keep,
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(
        st.none(),
        st.builds(Best, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
    ),
)


def lay(items: list[Item]) -> tuple[LogState, list[str]]:
    """A log of these saves, and the roots."""
    bodies: list[Body] = []
    for at, item in enumerate(items):
        refers = () if item.refers is None or item.refers > at else (f"i{at - item.refers}",)
        made = save(
            item.step,
            f"i{at}",
            artifact=Kind.WEIGHTS if item.weights else Kind.CHECKPOINT,
            failure=item.failure,
            metrics=() if item.loss is None else (("loss", item.loss),),
            references=refers,
        )
        bodies.append(replace(made, name=f"{made.name}_copy") if item.foreign else made)
    bodies += [Pin(f"i{at}") for at, item in enumerate(items) if item.pinned]
    return in_order(*bodies), [f"i{at}" for at, item in enumerate(items) if item.root]


def oracle(items: list[Item], keep: Keep) -> set[str]:
    """Who goes, by asking every save every question, one by one."""
    assert keep.latest is not None
    stays = set()
    for at, item in enumerate(items):
        after = [x for x in items[at + 1 :] if _alike(x, item)]
        if item.foreign or item.pinned or item.root or len(after) < keep.latest:
            stays.add(at)
        if keep.every is not None and item.step % keep.every == 0:
            stays.add(at)
        if keep.best is not None and item.loss is not None and not item.failure:
            sign = 1 if keep.best.mode == "min" else -1
            better = [
                x
                for n, x in enumerate(items)
                if _alike(x, item)
                and x.loss is not None
                and (sign * x.loss < sign * item.loss or (x.loss == item.loss and n < at))
            ]
            if len(better) < keep.best.count:
                stays.add(at)
    while True:
        more = {at - (items[at].refers or 0) for at in stays if (items[at].refers or at + 1) <= at}
        if more <= stays:
            return {f"i{at}" for at in range(len(items))} - {f"i{at}" for at in stays}
        stays |= more


def _alike(one: Item, other: Item) -> bool:
    return (
        one.weights == other.weights
        and one.failure == other.failure
        and not one.foreign
        and not other.foreign
    )


@given(ITEMS, KEEPS)
def test_the_plan_is_the_oracles(items: list[Item], keep: Keep) -> None:
    """For any run, policy, pins, references and roots: exactly those go that the oracle names."""
    state, roots = lay(items)
    found = plan_retention({"A": state}, keep, NAMES.is_ours, roots)
    assert set(going(found)) == oracle(items, keep)


@given(ITEMS, KEEPS, st.integers(0, 11))
def test_no_plan_breaks_what_is_promised(items: list[Item], keep: Keep, again: int) -> None:
    """Nothing foreign goes, the newest of a kind never goes, nothing that stays refers to what goes,
    both halves are in commit order and complete, and after the deletes nothing more goes.
    """
    state, roots = lay(items)
    found = plan_retention({"A": state}, keep, NAMES.is_ours, roots)
    lives = [live.seal for live in catalog({"A": state})]
    gone = set(going(found))
    assert not [s for s in lives if s.save_id in gone and not NAMES.is_ours(s)]
    for kind in Kind:
        last = [s.save_id for s in lives if s.artifact is kind and NAMES.is_ours(s)][-1:]
        assert not gone & set(last)
    assert not [s for s in lives if s.save_id not in gone and gone & set(s.references)]
    order = [s.save_id for s in lives if NAMES.is_ours(s)]
    assert kept(found) == [i for i in order if i not in gone]
    assert going(found) == [i for i in order if i in gone]
    # Deleted in any order, also half-way: the rest is what goes next.
    done = going(found)[: again % (len(gone) + 1)]
    left = lay_deletes(state, done)
    rest = going(plan_retention({"A": left}, keep, NAMES.is_ours, roots))
    assert rest == going(found)[len(done) :]


def lay_deletes(state: LogState, ids: list[str]) -> LogState:
    """The log with these saves deleted."""
    saves = {i: replace(state.save(i), deleted=True) for i in ids}
    return replace(state, saves=Saves.of({**state.saves, **saves}.values()))


def test_saves_of_an_older_generation_count_too() -> None:
    """The policy reads the catalog, so a restart changes nothing: old and new count together."""
    bodies: list[Body] = [save(1), save(2), fence(G2), *(replace(save(n), base=G2) for n in (3, 4))]
    assert kept(plan(Keep(3), *bodies)) == ["s2", "s3", "s4"]


@pytest.mark.parametrize("best", ["loss", ("loss", "min")])
def test_keep_best_is_a_best(best: Any) -> None:
    """The name of a metric alone is refused where the manager is made, not at the first save."""
    with pytest.raises(StateError, match=r"must be a ckptfs\.Best"):
        Keep(latest=2, best=best)
    with pytest.raises(StateError, match=r"must be a ckptfs\.Best"):
        Keep(best=best)
