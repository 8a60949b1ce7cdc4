"""Copies of a run: every committed checkpoint drained to other places, in the background.

    CheckpointManager("/nvme/run", keep_latest=2, copies=[Copy("s3://bucket/run", keep=Keep(10))])

    commit on the primary ---> after_commit (local, at once) ---> the copier's thread, on every rank
                               the save is a retention root       look    the primary's logs
                               of the primary from here on        round   of each copy (draining.py)

Every rank makes one with a control of its own; rounds are collective, one for each commit and each
``wait``, so they come in the same order everywhere. What a dead job left uncopied is copied first:
the first round compares the catalogs. Nothing here ever fails a save.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptfs.commit.claim import Takeover
from ckptfs.commit.entries import Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import catch_up
from ckptfs.commit.opening import Place, agree_uri, open_seat
from ckptfs.commit.ops import drive
from ckptfs.commit.protocol import Views, catalog
from ckptfs.commit.run import Run
from ckptfs.commit.seat import Known, Seat, View, step_with_views
from ckptfs.errors import CkptfsError, ControlPlaneLostError, DeadlineError, StateError
from ckptfs.events import SaveResult
from ckptfs.manager.copy_plan import Every, Policy, can_be_copied
from ckptfs.manager.draining import Drain, Goal
from ckptfs.manager.erasing import Clock, Tell
from ckptfs.manager.retention import Keep
from ckptfs.topology.control import Control
from ckptfs.topology.domain import Scope
from ckptfs.uri import Uri, options_of

__all__ = ["Copier", "Copy", "copies_of", "open_copies"]

logger = logging.getLogger(__name__)

LAST_S = 30.0  # how long a close waits for what is under way, and again after it was told to stop


@dataclass(frozen=True, slots=True)
class Copy:
    """Another place for the checkpoints of a run.

    uri: a run of its own, on any storage. keep: what stays there, as for the manager; everything by
    default. every: of several checkpoints that wait, "all" that ``keep`` would keep, or the "latest"
    alone: then the primary never holds back more than one for a copy that is slow or out of reach.
    attempts: how often a checkpoint that is damaged on the primary is tried before newer ones go
    first. storage_options, scope, domain: as for ``ckptfs.save``. StateError: no such ``every``.
    """

    uri: Any
    keep: Keep = field(default_factory=Keep)
    every: Literal["all", "latest"] = "all"
    storage_options: Mapping[str, Any] | None = None
    scope: Scope = "auto"
    domain: str | None = None
    attempts: int = 3

    def __repr__(self) -> str:
        # Its URI and its options may hold credentials.
        return f"Copy({str(Uri.parse(self.uri))!r}, keep={self.keep!r}, every={self.every!r})"

    def __post_init__(self) -> None:
        Uri.parse(self.uri)
        if self.every not in ("all", "latest"):
            raise StateError(f'Copy.every is {self.every!r}; it is "all" or "latest"')
        if self.attempts < 1:
            raise StateError(f"Copy.attempts is {self.attempts}; it counts tries, from 1")

    @property
    def place(self) -> Place:
        """How to reach it."""
        options = {**options_of(self.uri), **(self.storage_options or {})}
        return Place(options, self.scope, self.domain)


def copies_of(given: Sequence[Any], run_uri: Any) -> tuple[Copy, ...]:
    """What ``copies=`` was given, URIs or Copy objects. Pure. StateError: one of them is the run
    itself, or given twice.
    """
    copies = tuple(one if isinstance(one, Copy) else Copy(one) for one in given)
    seen = {Uri.parse(run_uri)}
    for copy in copies:
        uri = Uri.parse(copy.uri)
        if uri in seen:
            raise StateError(
                "a copy lies somewhere else than the run and the other copies",
                uri=uri,
                hint="give each place once",
            )
        seen.add(uri)
    return copies


@contextlib.contextmanager
def open_copies(copies: Sequence[Copy], control: Control) -> Iterator[tuple[Seat, ...]]:
    """Collective. Seats that only read, for a restore from whichever place is ahead.

    A copy that was never written is an empty run. One that is out of reach is an error: it may hold
    the newest checkpoint, and going on without it must be somebody's decision.
    """
    with contextlib.ExitStack() as stack:
        seats = []
        for copy in copies:
            root = agree_uri(control, copy.uri)
            seats.append(stack.enter_context(open_seat(root, control, copy.place, write=False)))
        yield tuple(seats)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One round that the thread is asked for. left: what it could not copy."""

    urgent: bool
    done: threading.Event = field(default_factory=threading.Event)
    left: list[str] = field(default_factory=list)


class Copier:
    """All copies of a held run, seen from one rank. Making it is collective; so is ``wait``.

    mine: whether a save is the manager's, for the copies' retention. grace_s, begin_again: as for the
    manager.
    tell: hears CopyCommitted, CopyFailed, Deleted and DeleteFailed, on the copier's thread.
    """

    def __init__(
        self,
        run: Run,
        copies: Sequence[Copy],
        mine: Callable[[Seal], bool],
        *,
        takeover: Takeover = Takeover.AUTO,
        grace_s: float = 0.0,
        begin_again: bool = False,
        tell: Tell = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._control = run.seat.control.clone()
        self._stopped = threading.Event()
        # A fold of its own: the saves learn theirs on another thread.
        self._source = replace(run.seat, control=self._control, known=Known(run.seat.known.state))
        self._drains = tuple(
            Drain(
                self._source,
                Goal(
                    copy.uri,
                    copy.place,
                    Policy(copy.keep, Every(copy.every), mine),
                    copy.attempts,
                    takeover,
                    grace_s,
                    begin_again,
                ),
                tell,
                self._stopped,
                clock,
            )
            for copy in copies
        )
        self._lock = threading.Lock()
        self._known = self._first_known(run.seat)
        self._turns: _Turns = queue.SimpleQueue()
        self._closed = False
        self._told = False
        self._apart = False  # the ranks do not hear each other any more
        self._turns.put((self, _Turn(urgent=False)))
        self._thread = threading.Thread(
            target=_work, args=(self._turns,), name="ckptfs-copies", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._turns.put, None).atexit = False

    def after_commit(self, result: SaveResult) -> None:
        """Local, on every rank after each commit and before retention: copy this one too."""
        with self._lock:
            if self._closed:
                return
            self._known.add(result.save_id)
            self._turns.put((self, _Turn(urgent=False)))

    def waiting(self) -> frozenset[str]:
        """Local. Save_ids that the primary's retention must keep until they are copied: all of them
        before the catalogs were compared. Only the coordinator knows all; retention unites all ranks'.
        """
        with self._lock:
            return frozenset(
                s for s in self._known if not all(drain.is_settled(s) for drain in self._drains)
            )

    def wait(self, timeout_s: float | None = None) -> tuple[str, ...]:
        """Collective. Return when what was committed so far is copied, or was tried once more; the
        names that are left, or the run's URI where that is not known. DeadlineError after timeout_s:
        it goes on.
        """
        turn = _Turn(urgent=True)
        with self._lock:
            if self._closed:
                return ()
            self._turns.put((self, turn))
        if not turn.done.wait(timeout_s):
            raise DeadlineError(
                f"waited {timeout_s:g} s for copies",
                uri=self._source.storage.root,
                hint="they go on; wait again, or give them more time",
            )
        if turn.left and self._control.rank == 0:
            logger.warning("not copied yet: %s", ", ".join(turn.left))
        return tuple(turn.left)

    def close(self, timeout_s: float = LAST_S) -> bool:
        """Local. Finish the rounds that were begun, for up to ``timeout_s``, then leave the copies'
        runs; whether all were finished. Harmless twice. What is left is copied by the next job.
        """
        with self._lock:
            if self._closed:
                return not self._thread.is_alive()
            self._closed = True
            self._turns.put(None)
        self._thread.join(timeout_s)
        finished = not self._thread.is_alive()
        if not finished:
            self._stopped.set()
            self._thread.join(LAST_S)
            logger.warning("a copy was stopped half way; the next job makes it")
        if self._thread.is_alive():
            # Its storage hangs. Releasing would let others in while it may still write.
            logger.warning("the copies' runs are not released: a thread still holds them")
            return False
        for drain in self._drains:
            drain.close(LAST_S)
        self._control.close()
        return finished

    # -- the thread -----------------------------------------------------------------------

    def serve(self, turn: _Turn) -> None:
        """One round, as it was asked for; on the copier's thread."""
        turn.left.append(str(self._source.storage.root))
        try:
            if not self._apart:
                turn.left[:] = self._round(urgent=turn.urgent)
        except (ControlPlaneLostError, DeadlineError) as error:
            logger.warning("nothing is copied any more: %s", error)
            self._apart = True
        except CkptfsError as error:
            # Every rank comes here: an error of a step is the same everywhere.
            logger.warning("copies wait for the next commit: %s", error)
        except Exception:
            logger.exception("nothing is copied any more by this process")
            self._apart = True
            self._control.close()  # the others learn it at their next step
        finally:
            turn.done.set()

    def _round(self, *, urgent: bool) -> tuple[str, ...]:
        """Collective."""
        kept: list[dict[str, LogState]] = []
        with self._lock:
            before = frozenset(self._known)

        def gather(found: Sequence[View | None]) -> None:
            kept.append(dict(f for f in found if f is not None))

        step_with_views(self._control, "copy: look", self._look, lambda view: view, gather)
        views = kept[0] if kept else {}
        left = [name for drain in self._drains for name in drain.round(views, urgent=urgent)]
        lives = {x.seal.save_id for x in catalog(views) if can_be_copied(x.seal)}
        self._tell_what_is_left_out(views)
        with self._lock:
            # Deleted by hand, copied everywhere or never: nobody needs to remember it.
            self._known -= {
                s for s in before if s not in lives or all(d.is_settled(s) for d in self._drains)
            }
        return tuple(dict.fromkeys(left))

    def _tell_what_is_left_out(self, views: Views) -> None:
        """Coordinator, once: somebody may rely on a copy of what is never copied."""
        parts = [live.seal.name for live in catalog(views) if live.seal.parts]
        if parts and not self._told:
            self._told = True
            logger.warning("checkpoints of several parts are not copied: %s", parts[-1])

    def _look(self, ids: Collection[str]) -> View | None:
        if not self._source.placement.is_owner:
            return None
        known = self._source.known.state if self._source.caps.exclusive_create else None
        state = drive(catch_up(known), self._source.storage)
        self._source.known.learn(state)
        # How far a copy came is found once in all that ever was, and known from then on.
        whole = not all(drain.is_planned for drain in self._drains)
        return self._source.placement.mine.id, state if whole else state.to_send(ids)

    def _first_known(self, seat: Seat) -> set[str]:
        """Collective. All live saves wait, until the catalogs were compared."""
        kept: list[set[str]] = []

        def gather(found: Sequence[View | None]) -> None:
            views = dict(f for f in found if f is not None)
            seals = [live.seal for live in catalog(views)]
            kept.append({seal.save_id for seal in seals if can_be_copied(seal)})

        step_with_views(seat.control, "copy: what there is", self._look, lambda view: view, gather)
        return kept[0] if kept else set()


_Turns = queue.SimpleQueue[tuple[Copier, _Turn] | None]


def _work(turns: _Turns) -> None:
    """The thread. Idle it keeps no copier alive: the runs of one that nobody has any more are released."""
    while (asked := turns.get()) is not None:
        copier, turn = asked
        copier.serve(turn)
        del asked, copier, turn
