"""Two programs of one process over one domain take turns: a removal and a projection of one name.

    turn = threading.Lock()                       one per domain, see Seat
    drive(take_turns(program, turn), storage)

A removal reads that ``.metadata`` is the old save's and then renames it away; a projection that comes
in between loses what it has just put there, and nobody ever puts it back. Between processes fences and
trash directories see to that; within one, who retires, who clears and who projects may be three threads.
What takes long, unlinking and waiting, is done between turns: whoever goes on after it looks again.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from ckptfs.commit.ops import Op, Pause, Program, RemoveMany, RemoveTree

__all__ = ["is_long", "take_turns"]

T = TypeVar("T")


def is_long(op: Op) -> bool:
    """Whether others may have the turn while this is done."""
    return isinstance(op, RemoveTree | RemoveMany | Pause)


def take_turns(program: Program[T], turn: threading.Lock) -> Program[T]:
    """The same program, alone in its domain between its long operations."""
    reply: Any = None
    failure: Exception | None = None
    with turn:
        while True:
            try:
                op = program.send(reply) if failure is None else program.throw(failure)
            except StopIteration as stop:
                value: T = stop.value
                return value
            reply = failure = None
            away = is_long(op)
            if away:
                turn.release()
            try:
                reply = yield op
            except Exception as error:  # noqa: BLE001 - all of them belong to the program
                failure = error
            finally:
                if away:
                    turn.acquire()
