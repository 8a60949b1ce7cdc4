"""The moment of commit: every owner appends the seal, and all ranks learn the outcome.

    append here   -> sealed | fenced | conflict | failed | in doubt      (owners)
    judge         one verdict over all domains                            (coordinator)
    undo          a certain failure: abort where unsealed, record where sealed

With one domain the append is the commit. With several, the save is committed when every listed
domain sealed it. A failure that is certain in any domain makes the save fail everywhere, because
no other process will ever append its seal there. Without certainty nothing is deleted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ckptfs.commit.decisions import Refusal
from ckptfs.commit.log.append import Appended, Means, RefusedAppend, append_here, catch_up
from ckptfs.commit.log.entries import Body, Fence, Generation, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import AttemptKeys
from ckptfs.commit.save.owner_steps import record_abort, undo
from ckptfs.commit.session import RunSession
from ckptfs.control.control import step_keeping
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    CommitInDoubtError,
    ControlPlaneLostError,
    DeadlineError,
    Failure,
    FencedError,
    ManifestError,
    NotFoundError,
    StaleError,
    StorageError,
)
from ckptfs.uri import Uri

__all__ = [
    "NameConflict",
    "fenced_rather_than_missing",
    "lost_while_sealing",
    "seal_everywhere",
    "undo_here",
]

logger = logging.getLogger("ckptfs.commit")

UNDO_S = 5.0


class _What(Enum):
    FENCED = "fenced"
    CONFLICT = "conflict"
    FAILED = "failed"  # certainly not in the log
    IN_DOUBT = "in doubt"
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class _Answer:
    domain: str
    what: _What
    message: str = ""
    failure: Failure | None = None
    is_sealed: bool = False  # in some domain, whatever happened in the others


class NameConflict(CommitConflictError):  # noqa: N818 - an answer, which no caller of a save ever sees
    """Another save took the name while this one was written.

    Nothing of this save is sealed or undone.
    """


def seal_everywhere(
    session: RunSession,
    keys: AttemptKeys,
    seal: Seal,
    means: Means,
    state: LogState | None,
    *,
    decide: Callable[[LogState], Body | RefusedAppend[Refusal]],
    may_try_again: bool = False,
) -> LogState | None:
    """Seal the save in every domain. It is committed when this returns. Collective.

    Args:
        session: The session at the run.
        keys: The keys of the attempt.
        seal: The seal.
        means: The domain and its capabilities.
        state: An earlier fold of the log, or None.
        decide: Returns what an owner appends to its log, or why it does not.
        may_try_again: If the name was taken and no domain has the seal, undo nothing and raise
            NameConflict.

    Returns:
        The owner's log with the seal; None on other ranks.

    Raises:
        FencedError: The run has a newer owner, or the save was aborted. Certainly not committed.
        CommitConflictError: The name was taken. Certainly not committed.
        CollectiveError: A rank failed. Certainly not committed.
        CommitInDoubtError: An answer or a rank was lost. The next begin or prepare_run settles it.
    """
    where = session.storage.uri(seal.name)

    def local() -> tuple[_Answer | None, LogState | None]:
        if not session.placement.is_owner:
            return None, None
        return _append(session, seal, means, state, decide=decide)

    try:
        verdict, after = step_keeping(session.control, "seal", local, _judge)
    except (CollectiveError, ControlPlaneLostError, DeadlineError) as error:
        raise lost_while_sealing(seal.name, where, error) from error
    if verdict.what is _What.SEALED:
        return after
    if verdict.what is _What.IN_DOUBT:
        raise CommitInDoubtError(
            f"domain {verdict.domain} gave no definite answer: {verdict.message}",
            uri=where,
            hint="nothing was deleted; the next save or prepare_run settles it",
        )
    if may_try_again and verdict.what is _What.CONFLICT and not verdict.is_sealed:
        raise NameConflict(verdict.message, uri=where)
    sealed_here = after is not None and after.save(seal.save_id).seal is not None
    _undo_everywhere(session, keys, seal, means, sealed_here=sealed_here)
    raise _failure(verdict, seal, where)


def lost_while_sealing(name: str, where: Uri, error: CkptfsError) -> CommitInDoubtError:
    """Return the error of a save if the step that seals it ended with ``error``."""
    return CommitInDoubtError(
        f"the ranks lost contact while {name} was being sealed: {error.message}",
        uri=where,
        hint="nothing was deleted; latest() and the next save show whether it was committed",
    )


def _append(
    session: RunSession,
    seal: Seal,
    means: Means,
    state: LogState | None,
    *,
    decide: Callable[[LogState], Body | RefusedAppend[Refusal]],
) -> tuple[_Answer, LogState | None]:
    """Append the seal to this log. Returns the answer, and the log after it if it could be read."""
    try:
        outcome = drive(append_here(decide, means, state), session.storage)
    except CommitInDoubtError as error:
        return _Answer(means.domain, _What.IN_DOUBT, str(error)), None
    except (StorageError, ManifestError) as error:
        # There is a damaged entry before ours: nothing was appended after it.
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        rank, node = session.control.rank, session.control.world.node
        failure = Failure(rank, node, kind, str(error), getattr(error, "errno", None))
        return _Answer(means.domain, _What.FAILED, str(error), failure), None
    after = outcome.state
    if isinstance(outcome, Appended):
        return _Answer(means.domain, _What.SEALED), after
    if outcome.reason in (Refusal.FENCED, Refusal.ABORTED):
        return _Answer(means.domain, _What.FENCED, _who(after.fence)), after
    conflict = f"{seal.name} was committed during this save"
    return _Answer(means.domain, _What.CONFLICT, conflict), after


def _judge(answers: Sequence[_Answer | None]) -> _Answer:
    """Return what the domains reached together: the first answer in the order of ``_What``."""
    order = list(_What)
    first = min((a for a in answers if a is not None), key=lambda a: order.index(a.what))
    return replace(first, is_sealed=any(a and a.what is _What.SEALED for a in answers))


def _failure(verdict: _Answer, seal: Seal, where: object) -> CkptfsError:
    if verdict.what is _What.FENCED:
        return _fenced_by(verdict.message, where)
    if verdict.what is _What.CONFLICT:
        return CommitConflictError(
            verdict.message, uri=where, hint='choose another name, or if_exists="replace"'
        )
    failed = verdict.failure
    return CollectiveError(
        f"domain {verdict.domain} could not seal {seal.name}: {verdict.message}",
        failures={} if failed is None else {failed.rank: failed},
        uri=where,
        hint="earlier commits are untouched",
    )


def _who(fence: Fence) -> str:
    return f"generation {fence.generation.number} (host {fence.host} pid {fence.pid})"


def _fenced_by(who: str, where: object) -> FencedError:
    return FencedError(
        f"the run was taken over by {who}",
        uri=where,
        hint="this process must stop; nothing of this save was committed",
    )


@contextlib.contextmanager
def fenced_rather_than_missing(session: RunSession, base: Generation, name: str) -> Iterator[None]:
    """Raise FencedError if files are missing because a newer owner removed them. Collective.

    Otherwise a writer that slept through a takeover would get an error about a missing file of its
    own, and its caller would try again instead of stopping.
    """
    try:
        yield
    except CollectiveError as error:
        for kind in (FencedError, CommitConflictError):
            # Before each put of a plain name the log is read, so a single rank may find this out first.
            met = [f for f in error.failures.values() if f.type.endswith(f".{kind.__name__}")]
            if met:
                raise kind(met[0].message, uri=session.storage.uri(name)) from error
        if error.all_are(NotFoundError) or error.all_are(StaleError):
            who = _newer_owner(session, base)
            if who is not None:
                raise _fenced_by(who, session.storage.uri(name)) from error
        raise


def _newer_owner(session: RunSession, base: Generation) -> str | None:
    def local() -> Fence | None:
        return drive(catch_up(), session.storage).fence if session.placement.is_owner else None

    def decide(fences: Sequence[Fence | None]) -> str | None:
        newer = [f for f in fences if f is not None and f.generation > base]
        return _who(max(newer, key=lambda f: f.generation)) if newer else None

    try:
        return session.control.step("taken over?", local, decide)
    except CkptfsError as error:
        logger.warning("it is unknown whether a newer owner took the run: %s", error)
        return None


def _undo_everywhere(
    session: RunSession, keys: AttemptKeys, seal: Seal, means: Means, *, sealed_here: bool
) -> None:
    """Abort where the seal is missing. Only then record the abort where the seal is present."""
    try:
        aborted = session.control.step(
            "undo", lambda: undo_here(session, keys, seal.base, means), any
        )
        if aborted and len(seal.domains) > 1:

            def record() -> None:
                if session.placement.is_owner and sealed_here:
                    drive(record_abort(seal.save_id, means), session.storage)
                    session.touch_log_later()

            session.control.step("record", record)
    except CkptfsError as error:
        logger.warning("the failed save %s is left to recovery: %s", seal.save_id, error)


def undo_here(session: RunSession, keys: AttemptKeys, base: Generation, means: Means) -> bool:
    """Abort the attempt in this domain and remove its bytes. Returns whether it is aborted now.

    Only owners do anything.
    """
    if not session.placement.is_owner:
        return False
    # If it cannot be undone soon, recovery does it: the caller waits for its error.
    try:
        return drive(undo(keys, base, means), session.storage, deadline_s=UNDO_S)
    finally:
        session.touch_log_later()
