"""Who holds a run now, as its log and this machine tell. Read-only, no waiting, no torch.

    free      nobody, or its owner left in peace
    held      an owner that did not leave; whether it lives only its own machine knows at once
    gone      an owner of this machine whose process is not there any more: the next one takes the run

``prepare_run`` decides by itself, and watches the lease where this cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckptfs.commit.log.entries import GENESIS, Fence, Generation
from ckptfs.commit.ownership.lease import alive_here, describe, who_am_i
from ckptfs.commit.state import Views
from ckptfs.control.world import World

__all__ = ["Hold", "Holding", "holding_of"]


class Hold(StrEnum):
    """Whether a process holds the run.

    Attributes:
        FREE: No process does.
        HELD: A process does, as far as is known.
        GONE: Its owner was a process of this node and has died.
    """

    FREE = "free"
    HELD = "held"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Holding:
    """The newest owner of a run.

    Attributes:
        hold: Whether it holds the run.
        generation: Its number; 0 where the run was never claimed, and the rest is empty.
        host: The owner's host, also of one that left.
        pid: The owner's process id.
        job: The owner's job; None where it had no name.
    """

    hold: Hold
    generation: int = 0
    host: str = ""
    pid: int = 0
    job: str | None = None

    @property
    def told(self) -> str:
        """In words."""
        if self.hold is Hold.FREE:
            return "free"
        fence = Fence(Generation(self.generation, ""), host=self.host, pid=self.pid, job=self.job)
        gone = ", whose process is gone" if self.hold is Hold.GONE else ""
        return f"held by {describe(fence)}{gone}"


def holding_of(views: Views) -> Holding:
    """Return who holds the run with the reached logs ``views``."""
    if not views:
        return Holding(Hold.FREE)
    newest = max(views.values(), key=lambda view: view.generation)
    fence = newest.fence
    if fence.generation == GENESIS:
        return Holding(Hold.FREE)
    told = (fence.generation.number, fence.host, fence.pid, fence.job)
    held = [view for view in views.values() if view.generation == newest.generation]
    if all(view.released for view in held):
        return Holding(Hold.FREE, *told)
    if fence.node == who_am_i(World.solo()).node and not alive_here(fence):
        return Holding(Hold.GONE, *told)
    return Holding(Hold.HELD, *told)
