"""Barriers and broadcasts of frameworks, extended so that they carry failures.

    with meeting_at_barriers(control):
        framework.save(path)          on every rank: writes, torch.distributed.barrier(), writes, ...

If a rank has failed, a framework's own barrier waits for it until the process group gives up. Inside the block,
on this thread, the barrier is a step of the control plane: if one rank raises an error anywhere in the block, the
others raise it at their next barrier or at the end.

    value = from_rank_zero(rank, strategy.broadcast, lambda: write(...))

A rank that raised alone would leave the others in a collective call that it never makes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ckptfs._torch import exchange_barrier
from ckptfs.control.control import Control
from ckptfs.errors import CollectiveError, Failure

__all__ = [
    "from_rank_zero",
    "meeting_at_barriers",
]


@contextlib.contextmanager
def meeting_at_barriers(control: Control) -> Iterator[None]:
    """Make the barriers in the block carry failures. Collective to leave.

    The rank that failed raises its own error, the others a CollectiveError. Barriers of other
    threads, and of subgroups, are not changed. Other collectives in the block are not covered: a
    rank that fails before one leaves the others in it.
    """
    thread_id, reported = threading.get_ident(), False

    def meet(problem: BaseException | None = None) -> None:
        nonlocal reported
        try:
            control.step("barrier", lambda: _raise(problem))
        except BaseException:
            reported = True
            raise

    def barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is not None or threading.get_ident() != thread_id:
            return stock(group, *args, **kwargs)
        return meet()

    stock = exchange_barrier(barrier)
    try:
        yield
    except BaseException as error:
        if not reported:
            with contextlib.suppress(Exception):  # its own error is raised below
                meet(error)
        raise
    finally:
        exchange_barrier(stock)
    meet()


def _raise(problem: BaseException | None) -> None:
    if problem is not None:
        raise problem


T = TypeVar("T")


def from_rank_zero(rank: int, broadcast: Callable[[Any], Any], act: Callable[[], T]) -> T:
    """Run ``act`` on rank 0 and return its result, which is pickled, on every rank. Collective.

    broadcast: Gives every rank the value that rank 0 passed. If rank 0 fails, it raises its own
    error, and the others raise a CollectiveError with the same message.
    """
    answer: Any = None
    if rank == 0:
        try:
            answer = act()
        except Exception as error:
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            broadcast(Failure(0, "", kind, str(error), getattr(error, "errno", None)))
            raise
    answer = broadcast(answer)
    if isinstance(answer, Failure):
        raise CollectiveError(f"rank 0 failed: {answer.message}", failures={0: answer})
    return answer  # type: ignore[no-any-return]
