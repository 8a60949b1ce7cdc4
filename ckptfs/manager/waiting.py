"""Waiting for checkpoints that another job writes: for evaluation jobs and inference servers.

    seen = None
    while True:
        seen = ckptfs.wait_for_new(run_uri, after=seen, timeout_s=3600)
        evaluate(seen.uri)

    with ckptfs.Watcher(run_uri) as watcher:      the same, but remembers its place in the log
        for checkpoint in watcher: ...            until watcher.stop(), from any thread

Local and read-only: no other rank is involved, nothing is appended, read permission is enough.
After each news, and every eighth poll without, the run is listed once, if that is permitted: stock
torch may save there. A poll requests the one log entry after the last that was seen:

    nothing yet    0.5 s, then longer and longer, up to 10 s, each with jitter        one request
    an entry       folded; the newest live commit is compared with what the caller has

The order of commits, never the number of the step, decides which checkpoint is newer: a run that
was restored at 50 and trained to 70 again is announced to a caller that has seen 100.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from ckptfs.commit.catalog.catalog import Checkpoint, logged, read_domain
from ckptfs.commit.catalog.unlogged import Unlogged, check_unlogged, views_if_gone
from ckptfs.commit.log.advisory_log import AdvisoryLog, LogKind, kind_of_log
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.state import Live, Views, catalog, commits, history, order_key, seal_of
from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CommitInDoubtError,
    DeadlineError,
    StateError,
    TransientError,
)
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, options_of

__all__ = ["Pace", "Watcher", "newer_than", "wait_for_new"]

logger = logging.getLogger("ckptfs.manager")

After = int | Checkpoint | None
Kinds = Literal["checkpoint", "weights"]

_LOOK_ROUND_EVERY = 8  # idle polls until the next check that this is still the same run
_READ_S = 5.0  # for how long one poll repeats a read that fails; the next poll tries again


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to rest between polls, in seconds.

    The rest is ``first_s``, then ``growth`` times as long each time, up to ``longest_s``. Each rest
    is varied by a quarter: a thousand servers must not poll at the same moment.
    """

    first_s: float = 0.5
    longest_s: float = 10.0
    growth: float = 1.5

    def pause_s(self, idle: int) -> float:
        """Return the pause before poll number ``idle`` since the last news: first_s to longest_s."""
        # The exponent is bounded: a week of waiting would overflow the power.
        grown = min(self.longest_s, self.first_s * self.growth ** min(idle, 64))
        return min(self.longest_s, max(self.first_s, grown * random.uniform(0.75, 1.25)))  # noqa: S311


def wait_for_new(
    run_uri: Any,
    after: After = None,
    kind: Kinds = "checkpoint",
    timeout_s: float | None = None,
    *,
    unlogged: Literal["error", "ignore"] = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Wait until a run has a checkpoint that the caller has not seen; the newest there is.

    Local, read-only. The checkpoint is committed and whole. It stays whole for the manager's
    ``delete_grace_s`` after it was deleted, so an inference server has that long to read it. On
    node-local disks this node's log answers. Checkpoints without a log (copied, or of stock torch)
    and saves of a failing run are not announced. Read permission is enough. Failures of the storage
    other than those below are waited out. Ctrl-C ends it at any time.

    Args:
        run_uri: The run; it need not exist yet.
        after: What the caller has seen last: the Checkpoint that this function returned, or its
            step; None for nothing. A step means the last commit of it; one that the run never
            committed means nothing.
        kind: "checkpoint" or "weights", each with a newest of its own.
        timeout_s: How long, in seconds, with one last look; 0 looks once, None waits for as long as
            it takes.
        unlogged: "error" raises AmbiguousCheckpointError if stock torch saved into the run after
            its newest commit; "ignore" does not look.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of
            ``run_uri``, if it has any.

    Returns:
        The newest checkpoint.

    Raises:
        DeadlineError: Nothing new within ``timeout_s``. It is a TimeoutError.
        AmbiguousCheckpointError: Stock torch saved a checkpoint after the newest commit.
        IncompleteCheckpointError: The newest one was removed by hand: ``ckptfs rm`` records that.
        StateError: ``kind`` is another word.
        UriError: The URI cannot be read, or its driver is not installed.
        AccessError: The log may not be read; with CredentialsError.
        ManifestError: The log is damaged or too new.
    """
    with Watcher(run_uri, kind, unlogged=unlogged, storage_options=storage_options) as watcher:
        found = watcher.wait(after, timeout_s)
    if found is None:
        raise AssertionError("only this process can stop this watcher")
    return found


class Watcher:
    """A place in a run's log. One thread waits at a time; any thread may ``stop`` it.

    Iterating first yields the newest checkpoint, and then each one that becomes the newest, until
    stopped.

    Args:
        run_uri: The run; it need not exist yet.
        kind: "checkpoint" or "weights", as for ``wait_for_new``.
        unlogged: "error" or "ignore", as for ``wait_for_new``.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of
            ``run_uri``, if it has any.
        pace: The pauses between polls; None: 0.5 s, growing up to 10 s.
        storage: The run's storage, opened by the caller; None: opened here.
        rest: Waits for the given number of seconds and returns whether to stop; for tests. None:
            until ``stop``.

    Attributes:
        root: The run's URI.
    """

    def __init__(
        self,
        run_uri: Any,
        kind: Kinds = "checkpoint",
        *,
        unlogged: Literal["error", "ignore"] = "error",
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        storage: Storage | None = None,
        rest: Callable[[float], bool] | None = None,
    ) -> None:
        self.root = Uri.parse(run_uri)
        if kind not in ("checkpoint", "weights"):
            raise StateError(f'kind is "checkpoint" or "weights", not {kind!r}', uri=self.root)
        self._kind = Kind(kind)
        options = {**options_of(run_uri), **(storage_options or {})}
        self._plain = storage or open_storage(self.root, options)
        self._pace = pace or Pace()
        self._stopped = threading.Event()
        self._rest = rest or self._stopped.wait
        self._end = _End(self._plain)
        self._checked: Views | None = None
        self._asks = Unlogged(unlogged) is Unlogged.ERROR and self._kind is Kind.CHECKPOINT
        self._last: Checkpoint | None = None

    def wait(self, after: After = None, timeout_s: float | None = None) -> Checkpoint | None:
        """As ``wait_for_new``; None once it was stopped.

        Args:
            after: What the caller has seen last, as for ``wait_for_new``; None for nothing.
            timeout_s: How long, in seconds; None: as long as it takes.

        Returns:
            The newest checkpoint; None once it was stopped.

        Raises:
            DeadlineError: Nothing new within ``timeout_s``.
            CkptfsError: As for ``wait_for_new``.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        idle, trouble = 0, ""
        judged: Views | None = None
        while not self._stopped.is_set():
            try:
                views = self._end.poll(idle)
                # After a new entry, or a round of polls without one: if another program saves the next
                # checkpoints, the caller would never stop waiting.
                is_round = idle > 0 and idle % _LOOK_ROUND_EVERY == 0
                if views is not None and (views is not self._checked or is_round):
                    self._refuse_unlogged(views)
                if views is not None and views is not judged:
                    found = newer_than(after, self._kind, views)
                    if found is not None and self._still_exists(found.seal, views):
                        save_id = found.seal.save_id
                        return next(c for c in logged(views, self.root) if c.save_id == save_id)
                judged, trouble = views, ""
            except (TransientError, AnswerLostError, CommitInDoubtError) as error:
                if not trouble:
                    logger.warning("still waiting for %s after an error: %s", self.root, error)
                trouble = str(error)
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise self._too_late(timeout_s or 0.0, trouble)
            pause_s = self._pace.pause_s(idle)
            if self._rest(pause_s if left is None else min(pause_s, left)):
                return None
            idle += 1
        return None

    def _refuse_unlogged(self, views: Views) -> None:
        self._checked = views
        if self._asks:
            shape = self._plain.capabilities.shape
            # Without permission to list this cannot be known; the wait continues as before.
            with contextlib.suppress(AccessError):
                program = check_unlogged(views, self.root, shape)
                drive(program, self._end.log, deadline_s=_READ_S)

    def _still_exists(self, seal: Seal, views: Views) -> bool:
        """False if the save was deleted since ``views``: the next poll folds that."""
        shape = self._plain.capabilities.shape
        # Without permission this cannot be known: the load will show it.
        with contextlib.suppress(AccessError):
            program = views_if_gone(seal, views, self.root, shape)
            return drive(program, self._end.log, deadline_s=_READ_S) is None
        return True

    def __iter__(self) -> Iterator[Checkpoint]:
        while (found := self.wait(self._last)) is not None:
            self._last = found
            yield found

    def stop(self) -> None:
        """End the wait that is under way, and all later ones.

        Any thread may call it, or a signal handler.
        """
        self._stopped.set()

    def close(self) -> None:
        """Stop, and release the storage. Harmless twice."""
        self.stop()
        self._plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _too_late(self, timeout_s: float, trouble: str) -> DeadlineError:
        return DeadlineError(
            f"no new {self._kind.value} within {timeout_s:g} s"
            + (f"; the storage failed last: {trouble}" if trouble else ""),
            uri=self.root,
            hint="no job has committed one, or this is not the right run",
        )


def newer_than(after: After, kind: Kind, views: Views) -> Live | None:
    """Return the newest live commit of a kind, if it is newer than what the caller has seen.

    Pure.
    """
    lives = [x for x in catalog(views) if x.seal.artifact is kind and not x.seal.failure]
    if not lives:
        return None
    # Deleted and replaced ones count too: what was seen may be gone by now, but keeps its place in the
    # order.
    if isinstance(after, Checkpoint):
        seal = None if after.save_id is None else seal_of(after.save_id, views)
        keys = [] if seal is None else [order_key(seal, views)]
    else:
        keys = [live.key for live in commits(views) if _is(live, after, kind)]
    if not keys and isinstance(after, int):
        keys = [live.key for live in history(views) if _is(live, after, kind)]
    return lives[-1] if not keys or lives[-1].key > keys[-1] else None


def _is(live: Live, step: int | None, kind: Kind) -> bool:
    return step is not None and live.seal.artifact is kind and live.seal.step == step


class _End:
    """The end of one log, and what was folded up to there."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._log: Storage | None = None
        self._domain: str | None = None
        self._state: LogState | None = None
        self._views: Views | None = None

    def poll(self, idle: int) -> Views | None:
        """Return the log as it is now: the same object if nothing came, None if there is no run.

        After TransientError, AnswerLostError or CommitInDoubtError, call it again.
        """
        if self._domain is None or (idle and idle % _LOOK_ROUND_EVERY == 0):
            self._look_round()
        if self._domain is None or not self._find_log():
            return None
        # Without exclusive creates an entry may appear below what was folded already.
        known = None if isinstance(self._log, AdvisoryLog) else self._state
        state = drive(catch_up(known), self._log or self._storage, deadline_s=_READ_S)
        if self._views is None or state is not self._state:
            self._state, self._views = state, {self._domain: state}
        return self._views

    @property
    def log(self) -> Storage:
        """The storage, seen with the kind of log that it has."""
        return self._log or self._storage

    def _look_round(self) -> None:
        """Read the domain's id: the run may have been removed and begun again."""
        domain = drive(read_domain(), self._storage, deadline_s=_READ_S)
        if domain != self._domain:
            self._domain, self._log, self._state, self._views = domain, None, None, None

    def _find_log(self) -> bool:
        """Find out which kind of log the run has; return False if it has no entry yet."""
        if self._log is None:
            match kind_of_log(self._storage):
                case LogKind.NONE:
                    return False
                case LogKind.EXCLUSIVE:
                    self._log = self._storage
                case LogKind.ADVISORY:
                    self._log = AdvisoryLog(self._storage)
        return True
