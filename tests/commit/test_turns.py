"""Turns: one program at a time in a domain, and the turn is given back however a program ends."""

from __future__ import annotations

import threading

import pytest

from ckptfs.commit.operations import Program, Read, RemoveTree, drive, take_turns
from ckptfs.errors import NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan


def _reads() -> Program[bytes]:
    data: bytes = yield Read("there")
    return data


def _removes(turn: threading.Lock, seen: list[bool]) -> Program[None]:
    seen.append(turn.locked())
    yield RemoveTree("there")
    seen.append(turn.locked())


def _storage(faults: list[Fault]) -> Storage:
    storage = open_storage("memory://turns")
    with storage.open_write("there") as writer:
        writer.write(b"x")
    return FaultyStorage(storage, Plan(faults))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotFoundError("gone"), MemoryError()])
def test_the_turn_is_given_back_whatever_ends_a_program(error: BaseException) -> None:
    """Ctrl-C in a projection leaves no lock behind that a release would wait for, even while the
    traceback, and with it the program, is still alive.
    """
    turn = threading.Lock()
    with pytest.raises(type(error)) as caught:
        drive(take_turns(_reads(), turn), _storage([Fault("read", "*", 1, Fail(error))]))
    assert not turn.locked()
    assert caught.value is not None


def test_others_have_the_turn_while_something_long_is_done() -> None:
    """Unlinking a terabyte keeps no projection waiting; around it the program is alone."""
    turn, seen = threading.Lock(), list[bool]()

    class Looking(FaultyStorage):
        def remove_tree(self, key: str) -> None:
            seen.append(turn.locked())
            super().remove_tree(key)

    storage = Looking(_storage([]), Plan([]))
    drive(take_turns(_removes(turn, seen), turn), storage)
    assert seen == [True, False, True]
    assert not turn.locked()


def test_nobody_has_the_turn_while_something_short_is_done() -> None:
    """What was read in a check still holds at the rename that follows it."""
    turn, seen = threading.Lock(), list[bool]()

    class Looking(FaultyStorage):
        def read_small(self, key: str, limit_bytes: int) -> bytes:
            seen.append(turn.locked())
            return super().read_small(key, limit_bytes)

    drive(take_turns(_reads(), turn), Looking(_storage([]), Plan([])))
    assert seen == [True]
