"""What one rank does for all, where a framework brings a broadcast of its own.

    value = from_rank_zero(rank, strategy.broadcast, lambda: write(...))

A rank that raised alone would leave the others in a collective call that it never makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckptfs.errors import CollectiveError, Failure

__all__ = ["from_rank_zero"]

T = TypeVar("T")


def from_rank_zero(rank: int, broadcast: Callable[[Any], Any], act: Callable[[], T]) -> T:
    """Collective. Rank 0 acts, every rank returns what that returned (it is pickled).

    broadcast: gives every rank what rank 0 passed. Where rank 0 fails, it raises its own error and the
    others a CollectiveError that tells it.
    """
    told: Any = None
    if rank == 0:
        try:
            told = act()
        except Exception as error:
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            broadcast(Failure(0, "", kind, str(error), getattr(error, "errno", None)))
            raise
    told = broadcast(told)
    if isinstance(told, Failure):
        raise CollectiveError(f"rank 0 failed: {told.message}", failures={0: told})
    return told  # type: ignore[no-any-return]
