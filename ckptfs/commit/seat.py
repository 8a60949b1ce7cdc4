"""A rank's seat at a run: the ranks it talks with, the run's storage, and who shares which disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptfs.commit.background import Background
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import LOG
from ckptfs.commit.ops import Program, drive
from ckptfs.commit.protocol import unsent
from ckptfs.errors import CollectiveError
from ckptfs.storage.base import Capabilities, Storage
from ckptfs.topology.control import Control
from ckptfs.topology.domain import Placement
from ckptfs.uri import Uri

__all__ = ["TOUCH_AFTER_S", "Common", "Seat", "View", "naming", "step_with_views"]

T = TypeVar("T")
R = TypeVar("R")

View = tuple[str, LogState]

TOUCH_AFTER_S = 0.05  # beyond one tick of the server's clock, see touch_log_later


@dataclass(slots=True)
class Known:
    """The newest fold that this process made of a log it holds: entries never change, so the next
    call goes on from here. An old one is as right as a new one, only longer to go on from. seq: the
    last place in commit order that a ticket of this process took; what begins later comes later.
    """

    state: LogState | None = None
    seq: int = 0

    def learn(self, state: LogState | None) -> None:
        """Keep ``state`` if it is longer."""
        if state is not None and (self.state is None or state.next > self.state.next):
            self.state = state


@dataclass(slots=True, eq=False)
class Common:
    """What all seats of one process at one domain of a held run have in common. spared: save_ids whose
    deletes are in the log and whose bytes somebody of this process removes later, in its own time;
    clearing leaves them alone. turn: whose turn it is to project or to remove, see ``take_turns``.

    A second seat with its own of these would remove at once what a grace period still keeps, and would
    remove and project one name at the same time. Another process has its own.
    """

    spared: set[str] = field(default_factory=set)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type[Common], tuple[()]]:
        return (Common, ())  # a lock cannot travel, and says nothing to another process


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank sits. storage is rooted at the run; caps are those that the owner of this
    rank's domain found by its probe, equal on all ranks of the domain. background: where an owner
    that holds the run leaves deletes to, where they take requests. known: what an owner that holds
    the run folded so far. common: what this process's other seats at the same domain share with it.
    """

    control: Control
    storage: Storage
    placement: Placement
    caps: Capabilities
    background: Background | None = None
    known: Known = field(default_factory=Known)
    common: Common = field(default_factory=Common, compare=False)

    @property
    def spared(self) -> set[str]:
        """Deleted saves whose bytes somebody of this process removes later."""
        return self.common.spared

    @property
    def turn(self) -> threading.Lock:
        """Whose turn it is to project or to remove."""
        return self.common.turn

    @property
    def spans_nodes(self) -> bool:
        """Whether some domain is seen from several nodes; equal on all ranks."""
        return any(len(domain.nodes) > 1 for domain in self.placement.domains)

    def touch_log_later(self, *, last: bool = False) -> None:
        """Move the log's timestamp a little after an append, from a thread of its own.

        Of two entries within one tick of the server's clock, an NFSv3 reader that saw the first may
        never see the second: its cached directory looks unchanged. last: of this process at the run,
        which may end now: its end waits for it.
        """
        timer = threading.Timer(TOUCH_AFTER_S, self._touch_log)
        timer.daemon = not last
        with contextlib.suppress(RuntimeError):  # the interpreter is ending: no thread starts
            timer.start()

    def drive_aside(self, program: Program[T], background: Background) -> T:
        """Run a program of a chore, which appends to the log when nobody waits any more."""
        try:
            return drive(program, self.storage, stopped=background.stopped)
        finally:
            self.touch_log_later()

    def _touch_log(self) -> None:
        try:
            self.storage.touch(LOG)
        except OSError:
            return  # it only makes readers see sooner what is committed already


@dataclass(frozen=True, slots=True)
class _Ask:
    """Saves that the coordinator must know of from every log before it can decide."""

    ids: frozenset[str]


def step_with_views(
    control: Control,
    label: str,
    look: Callable[[Collection[str]], T],
    view_of: Callable[[T], View | None],
    decide: Callable[[Sequence[T]], R],
    *,
    also: Callable[[Sequence[T]], Collection[str]] = lambda _: (),
) -> R:
    """Collective. A control step that decides about logs of which only what lives is sent.

    look: on every rank, what it tells; where it owns a log, with ``state.to_send(ids)``. view_of: the
    log in that. A second step asks for what may be settled in one log and lives in another; between two
    crashes there is nothing of the kind. also: where there are several logs, further saves that every one
    must be asked for.
    """

    def first(found: list[T]) -> R | _Ask:
        views = dict(view for one in found if (view := view_of(one)) is not None)
        ids = unsent(views, also(found))
        return _Ask(ids) if ids else decide(found)

    answer: R | _Ask = control.step(label, lambda: look(()), first)
    if isinstance(answer, _Ask):
        ids = answer.ids
        return control.step(label, lambda: look(ids), decide)
    return answer


@contextlib.contextmanager
def naming(checkpoint: Uri) -> Iterator[None]:
    """A step's error that passes says which checkpoint it is about: a step knows files only. Those of
    the run are then named as they lie in it.
    """
    try:
        yield
    except CollectiveError as error:
        if error.uri is None:
            error.uri = str(checkpoint)
            error.message = error.message.replace(f" at {checkpoint.parent}/", " at ")
        raise
