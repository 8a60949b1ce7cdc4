"""The fold: order alone decides what a log means, and a snapshot says nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.commit.log.entries import (
    Abort,
    Body,
    Decided,
    Delete,
    Entry,
    Fence,
    FenceMode,
    Foreign,
    Generation,
    Gone,
    Kind,
    Outcome,
    Part,
    PartRef,
    Pin,
    Release,
    Seal,
    Snapshot,
    Stamp,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry, snapshot_of, state_from_snapshot
from ckptfs.errors import ManifestError
from tests.commit.logs import G1, G2, fence, folded, seal

# -- strategies ---------------------------------------------------------------------------------

_ids = st.sampled_from(["a", "b", "c"])
_generations = st.builds(Generation, st.integers(1, 3), st.sampled_from(["", "x", "y"]))
_texts = st.text(st.characters(codec="utf-8"), max_size=8)
_lists = st.lists(_texts, max_size=2).map(tuple)
_parts = st.builds(PartRef, _ids, _ids, _texts, _lists, _lists)
_seals = st.builds(
    Seal,
    _ids,
    _generations,
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["s1", "s2"]),
    st.one_of(st.none(), st.integers(0, 100)),
    st.sampled_from(list(Kind)),
    st.sampled_from([("A",), ("A", "B")]),
    _texts,
    st.lists(_ids, max_size=2).map(tuple),
    st.lists(_parts, max_size=1).map(tuple),
    st.booleans(),
)
_bodies: st.SearchStrategy[Body] = st.one_of(
    _seals,
    st.builds(Part, _ids, _ids, _ids, _generations, _ids, st.none(), _ids, _texts, _lists, _texts),
    st.builds(Abort, _ids, _generations),
    st.builds(Decided, _ids, st.sampled_from(list(Outcome))),
    st.builds(Fence, _generations, st.sampled_from(list(FenceMode)), _texts, st.integers(0, 9)),
    st.builds(Release, _generations),
    st.builds(Delete, _ids, _generations, _texts),
    st.builds(Gone, _ids, _generations),
    st.builds(Pin, _ids, st.booleans()),
)
_stamps = st.builds(
    Stamp, _texts, _texts, st.integers(0, 99), st.one_of(st.none(), st.integers(0, 2**31))
)


# -- order decides ------------------------------------------------------------------------------


def test_a_seal_is_void_after_an_abort_and_an_abort_after_a_seal() -> None:
    """Whichever is first in the log counts."""
    aborted = folded(Abort("a", G1), seal("a")).save("a")
    assert aborted.aborted
    assert aborted.seal is None
    sealed = folded(seal("a"), Abort("a", G1)).save("a")
    assert sealed.seal == seal("a")
    assert not sealed.aborted


def test_the_first_seal_and_the_first_decision_stand() -> None:
    """Duplicates change nothing: a repeated append after a lost answer is harmless."""
    state = folded(seal("a"), seal("a", seq=9), Decided("a", Outcome.COMMITTED))
    again = fold_entry(state, Decided("a", Outcome.ABORTED))
    assert again.save("a").seal == seal("a")
    assert again.save("a").sealed_at == 0
    assert again.save("a").decided is Outcome.COMMITTED


def test_only_a_newer_fence_counts_and_a_release_only_for_the_newest() -> None:
    """Generations are ordered as pairs; an older fence that came late is ignored."""
    state = folded(fence(G2), fence(G1), fence(Generation(2, "a")))
    assert state.generation == G2
    assert state.fence_at == 0
    assert not fold_entry(state, Release(G1)).released
    assert fold_entry(state, Release(G2)).released
    assert not folded(fence(G1), Release(G1), fence(G2)).released


@given(st.lists(_bodies, max_size=12))
def test_every_entry_counts_one(bodies: list[Body]) -> None:
    """``next`` is the number of entries, whatever they say."""
    assert folded(*bodies).next == len(bodies)


# -- snapshots ----------------------------------------------------------------------------------


@given(st.lists(_bodies, max_size=12), st.lists(_bodies, max_size=6))
def test_a_snapshot_equals_the_fold_of_everything_below(
    below: list[Body], above: list[Body]
) -> None:
    """Starting at a snapshot, through its bytes, gives the state that folding from 0 gives."""
    state = folded(*below)
    entry = Entry("w", snapshot_of(state))
    read = decode_entry(encode_entry(entry), "x").body
    assert isinstance(read, Snapshot)
    short = state_from_snapshot(state.next, read)
    whole = fold_entry(state, read)
    for body in above:
        short, whole = fold_entry(short, body), fold_entry(whole, body)
    assert short == whole


def test_no_snapshot_above_what_this_version_does_not_know() -> None:
    """A kind from the future is tolerated when reading, and forbids summing up."""
    state = folded(seal("a"), Foreign("quota"))
    assert state.save("a").seal is not None
    with pytest.raises(ValueError, match="foreign"):
        snapshot_of(state)


def test_a_newer_versions_snapshot_is_not_summed_up_again() -> None:
    """What a newer snapshot has beyond our fields would be lost in ours."""
    snapshot = snapshot_of(folded(seal("a")))
    newer = Snapshot({**snapshot.state, "quotas": []})
    assert state_from_snapshot(1, newer).foreign
    (save,) = snapshot.state["saves"]
    assert state_from_snapshot(1, Snapshot({**snapshot.state, "saves": [save | {"x": 1}]})).foreign
    assert not state_from_snapshot(1, snapshot).foreign


# -- the codec ----------------------------------------------------------------------------------


@given(_bodies, _texts, _stamps)
def test_entries_round_trip(body: Body, write_id: str, stamp: Stamp) -> None:
    """What was written is what is read, byte for byte the second time too."""
    data = encode_entry(Entry(write_id, body, stamp))
    assert decode_entry(data, "x") == Entry(write_id, body, stamp)
    assert encode_entry(decode_entry(data, "x")) == data
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1


@given(_bodies)
def test_unknown_fields_are_ignored_and_noticed(body: Body) -> None:
    """A newer writer's fields do not disturb an older reader, which must not sum them up though."""
    record = json.loads(encode_entry(Entry("w", body)))
    read = decode_entry(json.dumps(record | {"colour": "blue"}).encode(), "x")
    assert read == Entry("w", body)
    assert read.partial
    assert not decode_entry(json.dumps(record).encode(), "x").partial


@pytest.mark.parametrize(
    ("body", "field"),
    [(seal("a"), "artifact"), (fence(G1), "mode"), (Decided("a", Outcome.ABORTED), "outcome")],
)
def test_a_word_from_the_future_makes_an_entry_foreign(body: Body, field: str) -> None:
    """An older reader continues past an entry with a closed word that it does not know."""
    record: dict[str, Any] = json.loads(encode_entry(Entry("w", body))) | {field: "telepathy"}
    assert decode_entry(json.dumps(record).encode(), "x").body == Foreign(record["kind"])


def wrong(name: str, value: object) -> bytes:
    """A seal with one field of another type."""
    record = json.loads(encode_entry(Entry("w", seal("a"))))
    return json.dumps({**record, name: value}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 40,
        b"[]",
        b"null",
        b"{}",
        b'{"kind":"seal","id":"w"}',
        b'{"kind":"abort","id":"w","save_id":"a","by":["x","y"]}',
        b'{"kind":"abort","id":"w","save_id":"a","by":7}',
        b'{"kind":"seal","id":"w","save_id":',
        b'{"kind":"abort","id":"w","save_id":"a","by":[1]}',
        b'{"kind":"abort","id":"w","save_id":"../a","by":[1,"x"]}',
        b'{"kind":"abort","id":"w","save_id":"","by":[1,"x"]}',
        b'{"kind":"pin","id":"w","save_id":".."}',
        b"[" * 100_000,
        b'{"kind":"pin","id":"w","save_id":"a","pinned":[]}',
        b'{"kind":"fence","id":"w","generation":[1,"x"],"pid":"7"}',
        b'{"kind":"release","id":"w","generation":[Infinity,"x"]}',
        b'{"kind":"snapshot","id":"w","state":[]}',
        *(
            wrong(name, value)
            for name in ("seq", "step", "digest", "fenced", "failure")
            for value in ({"a": 1}, [1])
        ),
        wrong("seq", None),
    ],
)
def test_damage_is_a_typed_error_that_names_the_place(data: bytes) -> None:
    """Torn, empty or foreign bytes are a ManifestError with the key in it, never another error."""
    with pytest.raises(ManifestError, match="log/00000007"):
        decode_entry(data, "log/00000007")


def test_a_foreign_entry_is_never_written() -> None:
    """No process writes what it does not understand."""
    with pytest.raises(TypeError, match="foreign"):
        encode_entry(Entry("w", Foreign("quota")))


def test_the_empty_log_knows_nothing() -> None:
    """The fold of no entries: generation 0, no saves."""
    assert LogState().generation == (0, "")
    assert LogState().save("a").seal is None
