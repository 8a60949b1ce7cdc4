"""What is settled changes no decision: a log of any life, seen with and without it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptfs.commit import decisions, protocol
from ckptfs.commit.entries import (
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
    Pin,
    Seal,
    Snapshot,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.fold import (
    LogState,
    fold_entries,
    fold_entry,
    snapshot_of,
    state_from_snapshot,
)
from ckptfs.commit.protocol import Live, Standing, Views, standing
from ckptfs.commit.saves import Layers, Saves, SaveState
from ckptfs.commit.saving import to_clear

MANY = 400
NAMES = ("step_1", "step_2", "step_3")
IDS = tuple(f"save-{n}" for n in range(7))


class Unsettled(Saves):
    """Saves of which none is ever settled: every decision walks all of them."""

    @classmethod
    def of_all(cls, saves: Iterable[SaveState]) -> Unsettled:
        """All of these, living."""
        return cls({save.save_id: save for save in saves})


def unsettled(state: LogState) -> LogState:
    """The same log, with every save among the living ones, in the order of their first entries."""
    return replace(state, saves=Unsettled.of_all(state.saves.values()))


def seal_of(save_id: str, name: str, base: Generation, seq: int, domains: tuple[str, ...]) -> Seal:
    """A seal by an owner, or by nobody in particular under GENESIS."""
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
            # One that was sealed in one domain only: the other one follows, behind what came meanwhile.
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
    assert sorted(d.seal.save_id for d in protocol.doomed(settled)) == sorted(
        d.seal.save_id for d in protocol.doomed(plain)
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
        assert protocol.name_taken(name, settled) == protocol.name_taken(name, plain)
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
        assert sorted(s.save_id for s, _ in to_clear(settled, domain)) == sorted(
            s.save_id for s, _ in to_clear(plain, domain)
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
    reread = {}
    for domain, state in states.items():
        entry = decode_entry(encode_entry(Entry("w", snapshot_of(state))), domain)
        assert isinstance(entry.body, Snapshot)
        reread[domain] = state_from_snapshot(state.next, entry.body)
        assert reread[domain].saves == state.saves
    assert_the_same(reread, plain)


@given(lives())
def test_a_decision_about_one_domain_needs_no_settled_save(logs: dict[str, list[Body]]) -> None:
    """What another rank is sent of a run in one domain decides about a new save as the whole does."""
    state = folded(logs["A"])
    whole, sent = {"A": state}, {"A": state.to_send(1)}
    assert protocol.next_seq(state.generation, sent, fenced=True) == protocol.next_seq(
        state.generation, whole, fenced=True
    )
    assert keys(protocol.catalog(sent)) == keys(protocol.catalog(whole))
    for name in NAMES:
        assert protocol.name_taken(name, sent) == protocol.name_taken(name, whole)
        assert protocol.occupant(name, sent) == protocol.occupant(name, whole)
    assert state.to_send(2) is state


def lived(saves: int, keep: int) -> LogState:
    """A log of so many saves, of which the last ones are kept."""
    state, base = LogState(), Generation(1, "n")
    state = fold_entry(state, Fence(base))
    for n in range(saves):
        state = fold_entry(state, seal_of(f"s{n}", f"step_{n}", base, n + 1, ("A",)))
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
        layers = layers.with_item(key, value)
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
        layers = layers.with_item(str(n), n)
    assert len(layers._layers) <= 10
