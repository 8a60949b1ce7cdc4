"""The programs of one save in one domain, run by the domain's owner.

    survey    make the log's directories and fold the log
    begin     make the attempt, its record first
    prepare   manifest and metadata next to the data; every name durable
    seal      append the seal: with one domain this is the commit
    finish    record the decision (several domains), project
    clear     delete what was replaced
    tidy      clear, and remove the attempt's record; in the background if deleting takes requests
    undo      abort what was not sealed everywhere, remove the bytes of our own failed attempt

``attempt.py`` runs them over all ranks; the model search in ``tests/model`` runs the same programs. Which of them
an attempt runs is a value, because the order of its steps is always the same:

    Strategy              a save that one group of ranks begins, writes and commits
    ArrivedStrategy       files that arrived one by one, committed by one process    (shared_attempt)
    ResumableStrategy     a copy that the next process resumes                       (shared_attempt)
    PartStrategy          a part of a checkpoint: its seal is a promise              (parts.parts)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ckptfs.commit.catalog.catalog import find
from ckptfs.commit.decisions import Refusal, may_abort, may_seal, to_clear
from ckptfs.commit.delete.deletion_steps import delete_save, discard_own_attempt
from ckptfs.commit.log.append import (
    Appended,
    HolderMeans,
    Means,
    RefusedAppend,
    append,
    append_here,
    catch_up,
    make_log,
    write_snapshot,
)
from ckptfs.commit.log.entries import Body, Decided, Generation, Kind, Outcome, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import Manifest, encode_manifest
from ckptfs.commit.operations import (
    MakeDir,
    Pause,
    Program,
    Sync,
    Write,
    WriteFiles,
    drive,
    name_is_plain,
)
from ckptfs.commit.ownership.recovery import encode_record
from ckptfs.commit.paths import ATTEMPTS, AttemptKeys
from ckptfs.commit.save.plain_names import other_attempts
from ckptfs.commit.save.planning import SavePlan, plan_save
from ckptfs.commit.save.projection import InHand, drop_record, project
from ckptfs.commit.save.spec import IfExists, SaveSpec, SmallFile
from ckptfs.commit.session import RunSession, View, collect_views
from ckptfs.commit.state import pieces
from ckptfs.errors import CkptfsError, NotFoundError, StaleError, StorageError
from ckptfs.storage.base import Shape, first_of
from ckptfs.uri import Uri

logger = logging.getLogger("ckptfs.commit")

__all__ = [
    "BegunHere",
    "Cleared",
    "Here",
    "Strategy",
    "begin",
    "clear",
    "finish",
    "others_of_name",
    "prepare",
    "record_abort",
    "replaced_bytes",
    "seal_save",
    "survey",
    "tidy",
    "undo",
]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The number of saves with removed bytes, and the log after that."""

    saves: int
    state: LogState


def replaced_bytes(
    seal: Seal,
    here: str,
    state: LogState,
    shape: Shape,
    root: Uri,
    *,
    at_once: frozenset[str],
) -> Program[int]:
    """Return the bytes of older saves of a name that will not be removed soon. Their manifests have the sizes.

    Args:
        seal: The newest save of the name.
        here: The domain.
        state: The domain's log.
        shape: The shape of its storage.
        root: The run, for messages.
        at_once: ids of saves that remove at once what they replaced.
    """
    deleting = {other.seal.save_id for other in to_clear({here: state}, here, at_once=at_once)}
    total = 0
    for save in state.saves.living.values():
        other = save.seal
        if other is None or other.name != seal.name or other.save_id in {seal.save_id, *deleting}:
            continue
        if save.gone or save.aborted or here not in other.everywhere:
            continue
        for one in pieces(other, here):
            total += yield from _bytes_of(one, here, shape, root)
    return total


def _bytes_of(piece: Seal, here: str, shape: Shape, root: Uri) -> Program[int]:
    try:
        found = yield from find(piece, shape, root)
    except (StorageError, CkptfsError) as error:
        logger.debug("how much of save %s stays is not known: %s", piece.save_id, error)
        return 0
    files = () if found.manifest is None else found.manifest.files
    return sum(file.size_bytes for file in files if file.domain in (None, here))


def survey() -> Program[LogState]:
    """Make the log's directories and fold the log."""
    yield from make_log()
    yield MakeDir(ATTEMPTS)
    return (yield from catch_up())


def begin(
    keys: AttemptKeys,
    base: Generation,
    *,
    of: str = "",
    home: str = "",
    replaces: str | None = None,
) -> Program[None]:
    """Make the attempt. Its record is durable before any data, because recovery judges by it.

    Args:
        keys: The keys of the attempt.
        base: The generation that it begins under.
        of: For a part, the id of the whole.
        home: For a part, the domain that decides over the whole.
        replaces: As for ``encode_record``.
    """
    yield from name_is_plain(keys.name, keys.shape)
    record = encode_record(keys.save_id, keys.name, base, of=of, home=home, replaces=replaces)
    home, attempt = keys.record.rsplit("/", 1)[0], 0
    while True:
        # ``prepare`` syncs its name. After a power cut before that, either nothing of the attempt is left, or
        # the data directory is missing, by which recovery knows that it died.
        yield MakeDir(home, is_synced=False)
        try:
            yield Write(keys.record, record)
            break
        except (NotFoundError, StaleError):
            # A recovery removed the empty directory because it took the attempt for a dead one.
            yield Pause(attempt, f"making {home}")
            attempt += 1
    yield Sync(home)


def prepare(keys: AttemptKeys, files: Mapping[str, bytes]) -> Program[None]:
    """Write the small files, and return when every name of the attempt is durable.

    The immutable files are stored next to the data. On filesystems there is a second copy, which
    the projection consumes. Data files are durable under their names too.
    """
    yield WriteFiles(keys.data, tuple(files.items()))
    if keys.shape is Shape.FILESYSTEM:
        yield WriteFiles(keys.attempt, tuple(files.items()))


def seal_save(
    seal: Seal, means: Means, state: LogState | None, *, replace: bool
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Append the seal in this domain, or return why not."""
    return (
        yield from append_here(
            lambda current: may_seal(current, seal, replace=replace), means, state
        )
    )


def finish(
    seal: Seal,
    means: Means,
    state: LogState,
    *,
    spare: Container[str] = frozenset(),
    replaces: str | None = None,
    in_hand: InHand | None = None,
    at_once: bool = False,
) -> Program[LogState]:
    """Record the decision if several domains made it, project the save, and clear.

    Args:
        seal: The seal of the committed save.
        means: The domain and its capabilities. If they are those of the run's holder, what earlier
            commits replaced is deleted, see ``clear``.
        state: This domain's fold with the seal.
        spare: As for ``clear``.
        replaces: As for ``project``.
        in_hand: As for ``project``.
        at_once: Delete what this save itself replaced too, because its holder commits nothing after
            it.

    Returns:
        The folded log.
    """
    if len(seal.domains) > 1:
        state = yield from _record(seal.save_id, Outcome.COMMITTED, means, state)
    views = {means.domain: state}
    yield from project(seal, views, means.domain, means.caps, replaces=replaces, in_hand=in_hand)
    if isinstance(means, HolderMeans):
        own = frozenset({seal.save_id} if at_once else ())
        outcome = yield from clear(means, state, spare, own)
        state = outcome.state
        if isinstance(outcome, RefusedAppend):
            return state
    return (yield from write_snapshot(state, write_id=next(means.ids), stamp=means.stamp))


def tidy(
    keys: AttemptKeys,
    means: HolderMeans,
    state: LogState | None,
    *,
    spare: Container[str],
    at_once: Container[str],
) -> Program[None]:
    """Remove a save's record and the doomed saves, after a save on an object store.

    No process waits for this. ``spare`` and ``at_once``: as for ``clear``.
    """
    yield from drop_record(keys)
    if state is None or to_clear({means.domain: state}, means.domain, spare, at_once):
        yield from clear(means, state, spare, at_once)


def clear(
    means: HolderMeans,
    state: LogState | None,
    spare: Container[str] = frozenset(),
    at_once: Container[str] = frozenset(),
) -> Program[Cleared | RefusedAppend[Refusal]]:
    """Delete what later commits of the run replaced or an overwrite hid. Refused once fenced.

    This may run while the next save does: an entry comes before each byte, and no process reads
    bytes of a save with a delete in the log.

    Args:
        means: The domain, its capabilities, and our generation.
        state: An earlier fold of the log, or None.
        spare: Deleted saves with bytes that another task removes. It is checked each time, because
            it may grow during the call.
        at_once: As for ``pending_deletes``.

    Returns:
        How many saves were deleted, or the refusal.
    """
    views = {means.domain: (yield from catch_up(state))}
    done, failures = 0, []
    for one in to_clear(views, means.domain, spare, at_once):
        try:
            gone = yield from delete_save(
                one.seal,
                views,
                means,
                reason=one.reason,
                still=lambda now, s=one.seal: any(  # type: ignore[misc]
                    s.save_id == other.seal.save_id
                    for other in to_clear({means.domain: now}, means.domain, spare, at_once)
                ),
            )
        except StorageError as error:
            # A save that cannot be deleted now (because of a lock, say) must not stop the others.
            failures.append(error)
            continue
        views = {means.domain: gone.state}
        if isinstance(gone, RefusedAppend):
            if gone.reason is Refusal.FENCED:
                return gone
            continue
        done += 1
    if failures:
        raise first_of(failures, len(failures) + done)
    return Cleared(done, views[means.domain])


def _record(
    save_id: str, outcome: Outcome, means: Means, state: LogState | None
) -> Program[LogState]:
    def decide(current: LogState) -> Decided | RefusedAppend[Refusal]:
        if current.save(save_id).decided is not None:
            return RefusedAppend(Refusal.NOTHING, current)
        return Decided(save_id, outcome)

    done = yield from append(decide, write_id=next(means.ids), stamp=means.stamp, state=state)
    return done.state


def undo(keys: AttemptKeys, base: Generation, means: Means) -> Program[bool]:
    """Abort our own attempt in this domain and remove its bytes.

    It returns False and keeps the bytes if the save was sealed here (then the abort of another
    domain settles it), or if a newer owner took the run (then recovery does).
    """
    outcome = yield from append(
        lambda current: may_abort(current, keys.save_id, base),
        write_id=next(means.ids),
        stamp=means.stamp,
    )
    if not outcome.state.save(keys.save_id).aborted:
        return False
    yield from discard_own_attempt(keys.save_id, keys.name, means.caps)
    return True


def record_abort(save_id: str, means: Means) -> Program[LogState]:
    """Record that another domain aborted a save that is sealed here."""
    return (yield from _record(save_id, Outcome.ABORTED, means, None))


@dataclass(frozen=True, slots=True)
class Here:
    """A save as one rank knows it once it has its keys.

    Attributes:
        session: The session at the run.
        spec: What is saved.
        keys: The keys of its files.
        base: The generation that it carries.
        state: The log of this rank's domain, on its owner.
        foreign: The digest of another program's checkpoint under the name, which this save replaces.
    """

    session: RunSession
    spec: SaveSpec
    keys: AttemptKeys
    base: Generation
    state: LogState | None
    foreign: str | None


@dataclass(frozen=True, slots=True)
class BegunHere:
    """How a save began in one domain, or in all of them.

    Attributes:
        others: Other attempts of the same name.
        is_occupied: Nothing was made, because there is something under the name.
        base: The generation that another process began this save under.
    """

    others: tuple[str, ...] = ()
    is_occupied: bool = False
    base: Generation | None = None


class Strategy:
    """A save that one group of ranks begins, writes and commits. Other kinds of save override what they do otherwise.

    A strategy has no state: what it learns goes into its answers, and the attempt keeps it.

    Attributes:
        surveys_ahead: Whether the survey can be a stage of a step before ``begin``.
        reads_log: Whether an owner reads its log in the survey. If not, ``before_begin`` has left it.
        projects: Whether the save is committed by its seal, and shown under its name then.
        keeps_files: Whether the files of a failed attempt stay for the next process: ``leave`` ends it then.
    """

    surveys_ahead: ClassVar[bool] = True
    reads_log: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    keeps_files: ClassVar[bool] = False

    @property
    def asks_for(self) -> Collection[str]:
        """The ids of further saves to be sent in the survey."""
        return ()

    def before_begin(self, session: RunSession) -> LogState | None:
        """Do what has to be in the logs first; return the log of the domain that this rank owns. Collective."""
        del session
        return None

    def plan(self, spec: SaveSpec, views: Sequence[View | None], session: RunSession) -> SavePlan:
        """Decide the id, place and base of the save from all logs. On the coordinator."""
        return plan_save(spec, collect_views(views), session)

    def begin(self, here: Here) -> BegunHere:
        """Make the attempt's directories and its record. On an owner."""
        drive(begin(here.keys, here.base, replaces=here.foreign), here.session.storage)
        # After our own record: if two attempts begin at the same time, at least one sees the other.
        return BegunHere(others_of_name(here, lambda: here.state or LogState()))

    def described(self, manifest: Manifest, here: Here) -> bytes:
        """Return the manifest as it is sealed. On the coordinator, which is an owner if there is one domain."""
        del here
        return encode_manifest(manifest)

    def before_prepare(self, files: Mapping[str, SmallFile], here: Here) -> None:
        """Do what has to be done before the small files are stored. On an owner."""

    def decision(
        self, seal: Seal, spec: SaveSpec
    ) -> Callable[[LogState], Body | RefusedAppend[Refusal]]:
        """Return what decides, at each new state of the log, whether the seal may be appended, and as what."""
        # Without the run it replaces nothing: the name may have been taken while the save was written.
        replaces = spec.if_exists is IfExists.REPLACE and spec.run is not None
        return lambda current: may_seal(current, seal, replace=replaces)

    def leave(self, here: Here) -> None:
        """End an attempt with files that stay. Local, on an owner."""


def others_of_name(here: Here, log_of: Callable[[], LogState]) -> tuple[str, ...]:
    """Return other attempts of the same name, where two at once would write the same names.

    ``log_of`` returns the log of the domain. It is called only there, because it may have to read.
    """
    if here.spec.artifact is Kind.DIRECTORY and here.keys.shape is Shape.OBJECT:
        return drive(other_attempts(here.keys, log_of()), here.session.storage)
    return ()
