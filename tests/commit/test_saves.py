"""What is settled changes no decision: a log of any life, seen with and without it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptfs.commit import decisions
from ckptfs.commit import state as protocol
from ckptfs.commit.log.entries import (
    GENESIS,
    Abort,
    Body,
    Decided,
    Delete,
    Entry,
    Fence,
    FenceMode,
    Generation,
    Gone,
    Kind,
    Outcome,
    Part,
    PartRef,
    Pin,
    Seal,
    encode_entry,
)
from ckptfs.commit.log.fold import (
    LogState,
    fold_entries,
    fold_entry,
    snapshot_of,
)
from ckptfs.commit.log.saves import Layers, Saves, SaveState, save_fields, save_from
from ckptfs.commit.state import Live, Standing, Views, standing
from tests.commit.logs import reread

MANY = 400
NAMES = ("step_1", "step_2", "step_3")
IDS = tuple(f"save-{n}" for n in range(7))


class Unsettled(Saves):
    """Saves without one that is ever settled: every decision walks all of them."""

    @classmethod
    def of_all(cls, saves: Iterable[SaveState]) -> Unsettled:
        """All of these, living."""
        return cls({save.save_id: save for save in saves})


def unsettled(state: LogState) -> LogState:
    """The same log, with every save among the living ones, in the order of their first entries."""
    return replace(state, saves=Unsettled.of_all(state.saves.values()))


def seal_of(save_id: str, name: str, base: Generation, seq: int, domains: tuple[str, ...]) -> Seal:
    """A seal by an owner, or without one under GENESIS."""
    return Seal(
        save_id,
        base,
        seq,
        base != GENESIS,
        name,
        None,
        Kind.CHECKPOINT,
        domains,
        f"digest-{save_id}",
    )


@st.composite
def lives(draw: st.DrawFn) -> dict[str, list[Body]]:
    """The logs of one or two domains: seals in the order of their ranks, deletes, fences, anything."""
    domains = draw(st.sampled_from([("A",), ("A",), ("A", "B")]))
    logs: dict[str, list[Body]] = {domain: [] for domain in domains}
    generation, seq = GENESIS, 0
    seals: list[Seal] = []
    for _ in range(draw(st.integers(0, 24))):
        what = draw(
            st.sampled_from(["seal"] * 4 + ["rest"] + ["erase"] * 4 + ["fence", "other"] * 2)
        )
        where = draw(st.sampled_from([domains, domains, domains[-1:]]))
        known = draw(st.sampled_from(seals)).save_id if seals else IDS[-1]
        bodies: list[Body] = []
        if what == "seal" and len(seals) < len(IDS):
            owned = generation != GENESIS and draw(st.booleans())
            seq += owned
            name = draw(st.sampled_from(NAMES))
            seal = seal_of(IDS[len(seals)], name, generation, seq, domains)
            refers = (known,) if draw(st.booleans()) and seals else ()
            seals.append(replace(seal, fenced=owned, references=refers))
            bodies = [seals[-1]]
        elif what == "rest":
            # One that was sealed in one domain only: the other one follows, behind what came in between.
            late = [
                seal for seal in seals if seal not in logs["A"] or seal not in logs[domains[-1]]
            ]
            bodies = [draw(st.sampled_from(late))] if late else []
            where = tuple(one for one in domains if not bodies or bodies[0] not in logs[one])
        elif what == "erase":
            # The entry first, then the bytes, then that they are gone; a crash may come between.
            erased: list[Body] = [Delete(known, generation), Gone(known, generation)]
            bodies = erased[: draw(st.integers(1, 2))]
        elif what == "fence":
            generation, seq, where = Generation(generation.number + 1, "n"), 0, domains
            mode = draw(st.sampled_from(FenceMode))
            bodies = [Fence(generation, mode)]
        else:
            at = ("part-1", IDS[-1], "actor", generation, "step_3", None, "A", "host")
            others: list[Body] = [
                Abort(draw(st.sampled_from(IDS)), generation),
                *_decisions(known, logs),
                Pin(known, pinned=True),
                Pin(known, pinned=draw(st.booleans())),
                Part(*at, domains=("A",), digest="d"),
            ]
            bodies = [others[draw(st.integers(0, len(others) - 1))]]
        for domain in where:
            logs[domain] += bodies
    return logs


G1, G2 = Generation(1, "n"), Generation(2, "n")
REPLACED_BY_A_DELETED_ONE: list[Body] = [
    seal_of(IDS[0], "step_1", G1, 1, ("A",)),
    seal_of(IDS[1], "step_1", G1, 2, ("A",)),
    Delete(IDS[1], G1),
    Gone(IDS[1], G1),
    seal_of(IDS[2], "step_2", G1, 3, ("A",)),
]
USED_BY_A_PINNED_ONE: list[Body] = [
    seal_of(IDS[0], "step_1", G1, 1, ("A",)),
    replace(seal_of(IDS[1], "step_2", G1, 2, ("A",)), references=(IDS[0],)),
    seal_of(IDS[2], "step_1", G1, 3, ("A",)),
    seal_of(IDS[3], "step_3", G1, 4, ("A",)),
    Pin(IDS[1]),
    Delete(IDS[1], G1),
    Gone(IDS[1], G1),
]
HIDDEN_BY_A_DELETED_ONE: list[Body] = [
    seal_of(IDS[0], "step_1", GENESIS, 0, ("A",)),
    Fence(G1, FenceMode.OVERWRITE),
    seal_of(IDS[1], "step_2", G1, 1, ("A",)),
    Fence(G2),
    seal_of(IDS[2], "step_3", G2, 1, ("A",)),
    Delete(IDS[1], G2),
    Gone(IDS[1], G2),
]


def _decisions(save_id: str, logs: dict[str, list[Body]]) -> list[Body]:
    """What may be recorded of a save: committed where every domain sealed it, aborted where one did not.
    What was deleted had been decided before.
    """
    sealed = [
        any(isinstance(b, Seal) and b.save_id == save_id for b in log) for log in logs.values()
    ]
    entries = [body for log in logs.values() for body in log]
    if any(isinstance(one, Delete) and one.save_id == save_id for one in entries):
        return []
    return [Decided(save_id, Outcome.COMMITTED if all(sealed) else Outcome.ABORTED)]


def folded(bodies: Sequence[Body]) -> LogState:
    """Entry by entry."""
    state = LogState()
    for body in bodies:
        state = fold_entry(state, body)
    return state


def keys(lives_: Iterable[Live]) -> list[str]:
    """Their ids, in this order."""
    return [live.seal.save_id for live in lives_]


def meaningful(views: Views) -> list[str]:
    """Of everything that was ever committed, what no log deleted; in commit order."""
    return [s for s in keys(protocol.history(views)) if standing(s, views) is not Standing.DELETED]


def assert_the_same(settled: Views, plain: Views) -> None:
    """Every decision about these logs is the one that walks all saves."""
    assert keys(protocol.catalog(settled)) == keys(protocol.catalog(plain))
    assert protocol.latest(settled) == protocol.latest(plain)
    assert meaningful(settled) == meaningful(plain)
    assert keys(protocol.history(settled)) == keys(protocol.commits(plain))
    assert sorted(d.seal.save_id for d in decisions.pending_deletes(settled)) == sorted(
        d.seal.save_id for d in decisions.pending_deletes(plain)
    )
    newest = max(view.generation for view in plain.values())
    for fenced in (True, False):
        assert protocol.next_seq(newest, settled, fenced=fenced) == protocol.next_seq(
            newest, plain, fenced=fenced
        )
    for save_id in (*IDS, "part-1", "never"):
        assert standing(save_id, settled) is standing(save_id, plain)
        for domain, view in plain.items():
            assert settled[domain].save(save_id) == view.save(save_id)
            assert (save_id in settled[domain].saves) is (save_id in view.saves)
    for name in (*NAMES, "step_4"):
        assert protocol.save_named(name, settled) == protocol.save_named(name, plain)
        assert protocol.occupant(name, settled) == protocol.occupant(name, plain)
        for domain, view in plain.items():
            known = any(s.seal is not None and s.seal.name == name for s in view.saves.values())
            assert settled[domain].saves.knows_name(name) is known
            for base, seq in ((newest, 1), (newest, 99), (GENESIS, 0)):
                wanted = seal_of("new", name, base, seq, tuple(plain))
                for replaces in (True, False):
                    assert decisions._conflicts(
                        settled[domain], wanted, replace=replaces
                    ) is decisions._conflicts(view, wanted, replace=replaces)
    for domain in plain:
        assert sorted(one.seal.save_id for one in decisions.to_clear(settled, domain)) == sorted(
            one.seal.save_id for one in decisions.to_clear(plain, domain)
        )


@settings(max_examples=MANY)
@given(lives(), st.integers(1, 9))
@example({"A": REPLACED_BY_A_DELETED_ONE}, 1)
@example({"A": USED_BY_A_PINNED_ONE}, 2)
@example({"A": HIDDEN_BY_A_DELETED_ONE}, 3)
def test_no_decision_sees_whether_a_save_is_settled(logs: dict[str, list[Body]], size: int) -> None:
    """One by one, in batches, from a snapshot: the fold says the same, and decides the same."""
    states = {domain: folded(bodies) for domain, bodies in logs.items()}
    plain = {domain: unsettled(state) for domain, state in states.items()}
    assert_the_same(states, plain)
    batched = {}
    for domain, bodies in logs.items():
        state = LogState()
        for at in range(0, len(bodies), size):
            state = fold_entries(state, bodies[at : at + size])
        assert state == states[domain]
        assert len(state.saves) == len(dict(state.saves)) == len(plain[domain].saves)
        batched[domain] = state
    assert_the_same(batched, plain)
    again = {domain: reread(state) for domain, state in states.items()}
    for domain, state in states.items():
        assert again[domain].saves == state.saves
    assert_the_same(again, plain)


def sent(views: Views) -> Views:
    """What the coordinator decides by: each log as its owner sends it, asked once more where it must."""
    first = {domain: state.to_send() for domain, state in views.items()}
    ids = protocol.unsent(first)
    return {domain: state.to_send(ids) for domain, state in views.items()} if ids else first


@settings(max_examples=MANY)
@given(lives())
def test_what_lives_is_enough_to_decide_by(logs: dict[str, list[Body]]) -> None:
    """What other ranks are sent of the logs decides about saves as the whole logs do."""
    whole = {domain: folded(bodies) for domain, bodies in logs.items()}
    told = sent(whole)
    newest = max(state.generation for state in whole.values())
    assert protocol.next_seq(newest, told, fenced=True) == protocol.next_seq(
        newest, whole, fenced=True
    )
    assert keys(protocol.catalog(told)) == keys(protocol.catalog(whole))
    assert decisions.pending_deletes(told) == decisions.pending_deletes(whole)
    for name in NAMES:
        assert protocol.save_named(name, told) == protocol.save_named(name, whole)
        assert protocol.occupant(name, told) == protocol.occupant(name, whole)


def test_nothing_more_is_asked_for_while_all_logs_say_the_same() -> None:
    """Two domains with the same three living saves: one step decides, and no gone save is sent."""
    state = lived(50, keep=3, domains=("A", "B"))
    views = {"A": state.to_send(), "B": state.to_send()}
    assert protocol.unsent(views) == frozenset()
    assert len(views["A"].saves) == 3


def test_a_save_that_is_gone_in_one_log_and_lives_in_another_is_asked_for() -> None:
    """Its delete reached one of two domains: without a word from there its name would stay taken."""
    state = lived(50, keep=3, domains=("A", "B"))
    half = fold_entries(state, [Delete("s47", Generation(1, "n")), Gone("s47", Generation(1, "n"))])
    first = {"A": half.to_send(), "B": state.to_send()}
    assert protocol.save_named("step_47", first) is not None
    assert protocol.unsent(first) == {"s47"}
    assert protocol.save_named("step_47", sent({"A": half, "B": state})) is None


def lived(saves: int, keep: int, domains: tuple[str, ...] = ("A",)) -> LogState:
    """A log of so many saves that keeps the last ones."""
    state, base = LogState(), Generation(1, "n")
    state = fold_entry(state, Fence(base))
    for n in range(saves):
        state = fold_entry(state, seal_of(f"s{n}", f"step_{n}", base, n + 1, domains))
        if n >= keep:
            state = fold_entries(state, [Delete(f"s{n - keep}", base), Gone(f"s{n - keep}", base)])
    return state


@pytest.mark.parametrize("saves", [50, 2000])
def test_what_decisions_walk_does_not_grow_with_what_is_gone(saves: int) -> None:
    """With three kept of however many: three living saves, and every gone one is still known."""
    state = lived(saves, keep=3)
    assert len(state.saves.living) == 3
    assert len(state.saves) == saves
    assert standing("s0", {"A": state}) is Standing.DELETED
    assert keys(protocol.catalog({"A": state})) == [f"s{n}" for n in range(saves - 3, saves)]
    assert protocol.next_seq(Generation(1, "n"), {"A": state}, fenced=True) == saves + 1


def test_a_snapshot_encodes_a_settled_save_once() -> None:
    """The second snapshot of a long log takes the texts of the first: equal objects, not equal texts."""
    state = lived(40, keep=3)
    first = [one for one in snapshot_of(state).state["saves"] if isinstance(one, str)]
    after = fold_entry(state, Pin("s39"))
    second = [one for one in snapshot_of(after).state["saves"] if isinstance(one, str)]
    assert len(first) == len(second) == 37
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert json.loads(first[0])["save_id"] == "s0"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers()), max_size=60))
def test_layers_are_a_mapping(items: list[tuple[str, int]]) -> None:
    """The last value of a key counts; every key once; a version never changes."""
    layers, versions, plain = Layers[int](), [], {}
    for key, value in items:
        layers = layers.with_items({key: value})
        plain[key] = value
        versions.append((layers, dict(plain)))
    for version, expected in versions:
        assert {key: version.get(key) for key in version} == expected
        assert len(list(version)) == len(expected)
        assert version.get("nobody") is None


def test_adding_to_layers_copies_little() -> None:
    """A thousand additions make ten layers at most, and copy each item about ten times."""
    layers = Layers[int]()
    for n in range(1000):
        layers = layers.with_items({str(n): n})
    assert len(layers._layers) <= 10


def parted(save_id: str, name: str, seq: int, parts: Sequence[str]) -> list[Body]:
    """What a log says of one save of these parts, all of them in A."""
    base = Generation(1, "n")
    refs = tuple(PartRef(part, f"{save_id}-{part}", "d", ("A",)) for part in parts)
    return [
        *(
            Part(ref.save_id, save_id, ref.name, base, name, None, "A", "h", ("A",), "d")
            for ref in refs
        ),
        replace(seal_of(save_id, name, base, seq, ("A",)), parts=refs),
    ]


def test_parts_are_settled_with_their_whole() -> None:
    """Of a hundred tickets without bytes nothing is walked, and every part is still known."""
    base, state = Generation(1, "n"), fold_entry(LogState(), Fence(Generation(1, "n")))
    for n in range(100):
        state = fold_entries(state, parted(f"s{n}", f"step_{n}", n + 1, ("actor", "critic")))
        if n:
            state = fold_entries(state, [Delete(f"s{n - 1}", base), Gone(f"s{n - 1}", base)])
    assert set(state.saves.living) == {"s99", "s99-actor", "s99-critic"}
    assert standing("s5-actor", {"A": state}) is Standing.DELETED
    assert state.save("s5-actor").sealed_at is not None
    again = reread(state)
    assert again.saves == state.saves
    assert set(again.saves.living) == set(state.saves.living)


def test_a_snapshot_does_not_say_whether_parts_are_settled() -> None:
    """Parts are among the living saves as they were sealed, and what stays living keeps its place."""
    base = Generation(1, "n")
    bodies: list[Body] = [
        *(seal_of("s", "step_1", base, 7, ("A", "B")), seal_of("t", "export", base, 1, ("A",))),
        *(Delete("s", base), Gone("s", base)),
        Part("s-actor", "s", "actor", base, "step_1", None, "B", "h", ("A",), "d"),
        seal_of("u", "other", base, 2, ("A",)),
    ]
    one_by_one = folded(bodies)
    at_once = fold_entries(LogState(), bodies)
    assert "s-actor" not in one_by_one.saves.living
    for state in (one_by_one, at_once, reread(one_by_one), reread(at_once)):
        entry = Entry("w", snapshot_of(state))
        listed = json.loads(encode_entry(entry))["state"]["saves"]
        assert [one["save_id"] for one in listed] == ["s", "t", "s-actor", "u"]


def test_parts_of_what_was_given_up_stay_living() -> None:
    """A process that gives a ticket up walks them to remove their bytes."""
    base = Generation(1, "n")
    *parts, _ = parted("s", "step_1", 1, ("actor", "critic"))
    state = fold_entries(fold_entry(LogState(), Fence(base)), [*parts, Abort("s", base)])
    assert set(state.saves.living) == {"s-actor", "s-critic"}


def of_home(part: str, *, domain: str) -> Part:
    """A part of save "s" in a domain that is not its home."""
    at = (f"s-{part}", "s", part, Generation(1, "n"), "step_1", None, "home", "h")
    return Part(*at, domains=(domain,), digest="d")


def test_a_part_is_sent_with_what_became_of_its_whole() -> None:
    """Home is out of reach, and its abort is settled here: the part was given up, and is not in doubt."""
    state = folded([Fence(Generation(1, "n")), of_home("actor", domain="A")])
    assert standing("s-actor", sent({"A": state})) is Standing.IN_DOUBT
    state = fold_entry(state, Abort("s", Generation(2, "n")))
    assert "s" not in state.saves.living
    assert standing("s-actor", {"A": state}) is Standing.ABORTED
    assert standing("s-actor", sent({"A": state})) is Standing.ABORTED


def test_what_became_of_a_whole_is_asked_for_where_home_is_out_of_reach() -> None:
    """B knows that the whole was committed and deleted, A does not: the part in A is no part in doubt."""
    base = Generation(1, "n")
    refs = tuple(PartRef(n, f"s-{n}", "d", (d,)) for n, d in (("actor", "A"), ("critic", "B")))
    whole = replace(seal_of("s", "step_1", base, 1, ("home",)), parts=refs)
    here = folded([Fence(base), of_home("actor", domain="A")])
    there = folded([Fence(base), of_home("critic", domain="B"), whole, Delete("s", base)])
    there = fold_entries(there, [Gone("s", base), seal_of("t", "step_2", base, 2, ("B",))])
    assert not {"s", "s-critic"} & set(there.saves.living)
    views = {"A": here, "B": there}
    assert standing("s-actor", views) is Standing.DELETED
    assert standing("s-actor", sent(views)) is Standing.DELETED


def test_the_settled_saves_of_a_name_are_found_newest_first() -> None:
    """A name that is saved again and again: each of its saves is found, the greatest rank first."""
    base, state = Generation(1, "n"), fold_entry(LogState(), Fence(Generation(1, "n")))
    for n in (1, 3, 2, 5, 4, 6):  # in the log in this order, by rank in another
        state = fold_entry(state, seal_of(f"s{n}", "last", base, n, ("A",)))
    for n in (1, 2, 3, 4, 5):
        state = fold_entries(state, [Delete(f"s{n}", base), Gone(f"s{n}", base)])
    state = fold_entry(state, seal_of("s7", "other", base, 7, ("A",)))
    settled = state.saves.settled
    newest, *others = settled.ids_of("last")
    assert newest == "s5"
    assert sorted(others) == ["s1", "s2", "s3", "s4"]
    assert (seal := settled.newest_of("last")) is not None
    assert seal.save_id == "s5"
    assert {save.save_id for save in state.saves.of_name("last")} == {f"s{n}" for n in range(1, 7)}


@pytest.mark.parametrize(
    "change",
    [
        {"seal": {"artifact": "hologram"}},
        {"seal": {"parts": [{"name": "actor", "save_id": "p", "digest": "d"}]}},
        {"seal": {"seq": "1"}},
        {"seal": {"base": [1]}},
        {"seal": {"domains": [["A"]]}},
        {"seal": {"metrics": [["loss", 0.5]]}},
        {"seal": {"save_id": "../x"}},
        {"seal": {"name": "a/b"}},
        {"seal": {"color": "red"}},
        {"save_id": ".."},
        {"gone": 1},
        {"sealed_at": "3"},
        {"decided": "maybe"},
        {"pinned": True},
        {"part": None},
    ],
    ids=str,
)
def test_a_record_that_is_not_as_this_version_writes_it_is_decoded_at_once(
    change: dict[str, Any],
) -> None:
    """Read without a check, a damaged or a newer record would fail later, far from the snapshot that has it."""
    base = Generation(1, "n")
    states = {
        save_id: SaveState(save_id, seal_of(save_id, save_id, base, n, ("A",)), n, gone=n == 1)
        for n, save_id in enumerate(("s1", "s2"), 1)
    }
    record = save_fields(replace(states["s1"], deleted=True))
    record |= {
        key: {**record["seal"], **value} if key == "seal" else value
        for key, value in change.items()
    }
    try:
        expected = save_from(record)
    except Exception as error:  # noqa: BLE001
        with pytest.raises(type(error)):
            Saves.read([record, save_fields(states["s2"])])
    else:
        assert Saves.read([record, save_fields(states["s2"])])[expected.save_id] == expected
