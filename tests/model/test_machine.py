"""The search's own parts can be trusted: processes are distinguished, the model disk is a disk."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from ckptfs.commit.operations import (
    Create,
    List,
    MakeDir,
    Op,
    Read,
    RemoveDir,
    Rename,
    Replace,
    Write,
)
from ckptfs.errors import AlreadyExistsError, NotFoundError
from ckptfs.storage.base import Entry, Shape
from tests.model.disk import Disk, Failed, HalfRemove, apply
from tests.model.machine import Machine, canonical

FS, OBJECT = Shape.FILESYSTEM, Shape.OBJECT


def run(disk: Disk, *ops: Any, shape: Shape = FS) -> tuple[Disk, Any]:
    """The disk and the last reply after operations with one outcome each."""
    reply: Any = None
    for op in ops:
        (outcome,) = apply(disk, op, shape)
        disk, reply = outcome.disk, outcome.reply
    return disk, reply


def _looper(items: tuple[str, ...]) -> Generator[Any, Any, str]:
    for item in list(items):
        _ = item
        del item
        yield Read("same")
    return "end"


def test_a_running_loop_is_part_of_the_local_state() -> None:
    """Equal locals at one line of code are two states when the loop's iterator is elsewhere."""
    machine = Machine("m", lambda: _looper(("a", "b", "c")))
    second = machine.step(machine.start, "x")
    third = machine.step(second, "x")
    assert len({machine.start, second, third}) == 3
    assert machine.op(machine.step(third, "x")) is None


def _forgetful() -> Generator[Any, Any, str]:
    answer = yield Read("first")
    del answer
    yield Read("second")
    return "end"


def test_histories_with_equal_local_states_are_merged() -> None:
    """What a program has forgotten cannot matter: two answers lead to one node."""
    machine = Machine("m", _forgetful)
    assert machine.step(machine.start, "a") == machine.step(machine.start, "b")


def _kept() -> Generator[Any, Any, str]:
    answer = yield Read("first")

    def decide() -> Any:
        return answer

    yield Read("second")
    return str(decide())


def test_closures_are_part_of_the_local_state() -> None:
    """What only a closure remembers keeps two histories apart, and a replay brings it back."""
    machine = Machine("m", _kept)
    a, b = machine.step(machine.start, "a"), machine.step(machine.start, "b")
    assert a != b
    assert machine.value(machine.step(a, None)) == "a"
    assert machine.value(machine.step(b, None)) == "b"


@dataclass(frozen=True)
class _Box:
    items: list[str]


def _gatherer() -> Generator[Any, Any, str]:
    box = _Box([])
    while len(box.items) < 2:
        box.items.append((yield Read("same")))
    return "end"


def test_what_changes_inside_a_frozen_value_is_seen() -> None:
    """The stand-in of a value is made once only where nothing in it can change."""
    machine = Machine("m", _gatherer)
    second = machine.step(machine.start, "x")
    assert second != machine.start
    assert machine.op(machine.step(second, "x")) is None


def test_equal_values_have_one_stand_in() -> None:
    """Two replies that are equal lead to one node, though they are not the same object."""
    one, other = (Failed(NotFoundError, "".join(("k", str(n)))) for n in (1, 1))
    assert one is not other
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical(Failed(NotFoundError, "k2"))
    assert canonical(one) != 0


def test_rename_of_a_directory_takes_only_an_empty_target() -> None:
    """rename(2): onto an empty directory it works, onto a full one both stay."""
    disk, _ = run(Disk.of({}), MakeDir("a"), Write("a/f", b"1"), MakeDir("b"))
    moved, reply = run(disk, Rename("a", "b"))
    assert reply is None
    assert moved.files == {"b": None, "b/f": b"1"}
    full, _ = run(disk, Write("b/g", b"2"))
    stuck, reply = run(full, Rename("a", "b"))
    assert reply == Failed(AlreadyExistsError, "b")
    assert stuck is full


@pytest.mark.parametrize(
    "op", [Rename("x", "y"), Rename("a", "no/b"), Write("no/f", b""), Create("no/f", b"", "s")]
)
def test_missing_sources_and_parents_are_not_found(op: Op) -> None:
    """ENOENT for a missing source and for a target with a missing parent."""
    disk, _ = run(Disk.of({}), MakeDir("a"))
    after, reply = run(disk, op)
    assert isinstance(reply, Failed)
    assert reply.kind is NotFoundError
    assert after is disk


def test_create_has_one_winner_and_replace_checks_the_etag() -> None:
    """The second create fails; a conditional replace happens only while the etag holds."""
    disk, _ = run(Disk.of({}), Create("k", b"1", "s"), shape=OBJECT)
    assert run(disk, Create("k", b"2", "s"), shape=OBJECT)[1] == Failed(AlreadyExistsError, "k")
    assert run(disk, Replace("k", b"2", ""), shape=OBJECT)[1] == Failed(AlreadyExistsError, "k")
    assert run(disk, Replace("new", b"2", ""), shape=OBJECT)[1] is None


def test_a_recursive_removal_can_be_seen_half_done() -> None:
    """The first unlink may hit either end of the tree."""
    disk, _ = run(Disk.of({}), MakeDir("t"), Write("t/a", b"1"), Write("t/z", b"2"))
    halves = {frozenset(o.disk.files) for o in apply(disk, HalfRemove("t"), FS)}
    assert halves == {frozenset({"t", "t/z"}), frozenset({"t", "t/a"})}


def test_listing_names_what_lies_directly_below() -> None:
    """Files and directories, sorted; an object store's prefixes look like directories."""
    disk, reply = run(
        Disk.of({}), Write("s/a/f", b"1"), Write("s/b", b"2"), List("s"), shape=OBJECT
    )
    assert reply == (Entry("a", is_dir=True), Entry("b", is_dir=False))
    assert run(disk, RemoveDir("s"), shape=OBJECT)[0] is disk
