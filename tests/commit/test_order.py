"""Commit order, as far as a node sees the logs: the same for everybody who sees enough."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from ckptfs.commit.log.entries import Body, Decided, Outcome, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.save.spec import save_id_at
from ckptfs.commit.state import commits, latest
from tests.commit.logs import G0, folded, seal
from tests.crash import rig

DOMAINS = ("A", "B", "C")
Logs = Mapping[str, LogState]
Lists = Sequence[tuple[str, ...]]  # of each save in turn, the domains that it lists

listed = st.lists(
    st.lists(st.sampled_from(DOMAINS), min_size=1, max_size=3, unique=True).map(
        lambda found: tuple(sorted(found))
    ),
    min_size=1,
    max_size=6,
)
VIEWS = [
    views for n in (1, 2, 3) for views in itertools.combinations(DOMAINS, n)
]  # who reaches which logs


def plain(number: int, domains: tuple[str, ...]) -> Seal:
    """A save that no fence covers; its id says when it began."""
    return seal(f"2026110{number}", base=G0, seq=0, fenced=False, domains=domains)


def logs_of(saves: Sequence[Seal], orders: Mapping[str, Sequence[int]]) -> Logs:
    """Each domain's log: its saves in that order, each recorded as committed."""
    out = {}
    for domain in DOMAINS:
        bodies: list[Body] = []
        for number in orders[domain]:
            if domain in saves[number].domains:
                bodies += [saves[number], Decided(saves[number].save_id, Outcome.COMMITTED)]
        out[domain] = folded(*bodies)
    return out


def seen(logs: Logs, views: Sequence[str]) -> list[Seal]:
    """The committed saves in the order that a node makes of the logs that it reaches."""
    return [live.seal for live in commits({domain: logs[domain] for domain in views})]


@given(listed)
@example([("B", "C"), ("A", "B")])  # the lowest domain of the newer one is lost
@example([("A", "B"), ("B", "C")])
@example([("C",), ("B", "C"), ("A", "C")])
def test_saves_one_after_the_other_are_in_that_order_for_everybody(lists: Lists) -> None:
    """Whatever logs a node reaches, whatever nodes each save had: latest is the last that is to be seen."""
    saves = [plain(number, domains) for number, domains in enumerate(lists)]
    in_turn = range(len(saves))
    logs = logs_of(saves, dict.fromkeys(DOMAINS, in_turn))
    for views in VIEWS:
        visible = [one for one in saves if not set(one.domains).isdisjoint(views)]
        assert seen(logs, views) == visible
        newest = latest({domain: logs[domain] for domain in views})
        assert (None if newest is None else newest.seal) == (visible[-1] if visible else None)


moments = st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 1, 0, 0, 3))  # noqa: DTZ001


@given(moments, moments)
def test_ids_of_saves_within_a_second_sort_in_the_order_of_their_beginning(
    one: datetime, other: datetime
) -> None:
    """Where no log that is reached orders them, the ids do. They have the form that all versions read."""
    first, second = sorted((one, other))
    ids = [save_id_at(moment) for moment in (first, second)]
    assert all(re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{12}", name) for name in ids)
    assert ids[0] != ids[1]
    if second - first >= timedelta(microseconds=16):  # one tick of 1/65536 s
        assert ids[0] < ids[1]


def test_plain_saves_one_after_the_other_have_ids_in_that_order(tmp_path: Path) -> None:
    """Five of them take less than a second, mostly."""
    made: list[str] = []
    for name in ("best", "mine", "also", "then", "last"):
        body = partial(rig.save, name=name, label=name)
        made += rig.values(rig.sessions(rig.SOLO, str(tmp_path), body, job="j"))
    assert made == sorted(made)
    assert len(set(made)) == len(made)


@given(listed, st.data())
def test_whoever_reaches_the_lowest_domain_sees_one_order_and_so_do_all_others(
    lists: Lists, data: st.DataObject
) -> None:
    """Saves at once may be sealed in another order in each log. Two nodes that go by the same domain's
    log, and two that go by none, agree on what both see.
    """
    saves = [plain(number, domains) for number, domains in enumerate(lists)]
    numbers = list(range(len(saves)))
    orders = {domain: data.draw(st.permutations(numbers)) for domain in DOMAINS}
    logs = logs_of(saves, orders)
    found: dict[str | None, list[list[Seal]]] = {}
    for views in VIEWS:
        order = seen(logs, views)
        lowest = {min(one.domains) for one in order}
        by = next(iter(lowest)) if len(lowest) == 1 and lowest <= set(views) else None
        if by is not None:
            there = [saves[number] for number in orders[by] if by in saves[number].domains]
            assert order == there
        else:
            assert order == sorted(order, key=lambda one: one.save_id)
        found.setdefault(by, []).append(order)
    for same in found.values():
        for one, other in itertools.combinations(same, 2):
            common = {s.save_id for s in one} & {s.save_id for s in other}
            assert [s for s in one if s.save_id in common] == [
                s for s in other if s.save_id in common
            ]
