"""Finding a checkpoint from all ranks: one answer, decided once, the same on every rank.

    look    one process per node folds its domain's log        -> the coordinator chooses the save
    find    every rank finds its files where they are now       -> found, or all ranks start again
            (and reads the metadata there at once, for a load)

An error of one rank during a step is raised on all of them at the end of the step.

A save may be superseded, deleted or projected during the search. Then some rank finds nothing, and all ranks
start again together: two ranks must never load two different saves. If a save is projected after the search, a
rank that misses a file searches again (``following``).

A part of a checkpoint is one level deeper, ``run/step_100/actor``: its run is found from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptfs.commit.catalog.catalog import (
    LocatedCheckpoint,
    find,
    is_run,
    list_live,
    live_of,
    looking_at,
    missing_files,
    part_of,
    read_view,
    refuse_parts,
    run_error,
    unlogged,
)
from ckptfs.commit.catalog.unlogged import is_overwritten, unlogged_error
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.operations import drive, settled, side_by_side
from ckptfs.commit.session import (
    Place,
    RunSession,
    View,
    open_reading,
    open_session,
    step_with_views,
)
from ckptfs.commit.state import part_name, piece, split_name
from ckptfs.control.control import Control
from ckptfs.control.rank_errors import collective_error, failure_of, log_left_out
from ckptfs.control.world import World
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    Failure,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleError,
    StorageError,
    UriError,
)
from ckptfs.storage.base import Shape
from ckptfs.uri import Uri

__all__ = ["following", "locate", "locate_directory", "node_view", "owner_view", "reading_session"]

logger = logging.getLogger("ckptfs.commit")

TRIES = 5  # a save that moves is found at the second try; only a damaged one is missed by all

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Choice:
    """The save that all ranks search for.

    Attributes:
        seal: The save; None if none is live under the name. ``views`` show whether there was one.
        views: The folded logs.
        where: For a part, the nodes that hold it.
    """

    seal: Seal | None
    views: dict[str, LogState]
    where: str = ""


@dataclass(frozen=True, slots=True)
class _LogReport:
    """What one process of a node reports about its log. is_complete: ``view`` has all saves, not only the living ones.
    is_saved_over: another program's checkpoint has replaced the save.
    """

    view: View
    is_complete: bool
    is_saved_over: bool


@dataclass(frozen=True, slots=True)
class _Miss:
    """This rank found nothing."""

    message: str


@dataclass(frozen=True, slots=True)
class _Unread:
    """This rank found its files, and could not read what it wants of them."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class _Changed:
    """The files that this rank found are not those that were saved."""

    error: IntegrityError | ManifestError


@contextlib.contextmanager
def reading_session(
    given: object, control: Control, place: Place
) -> Iterator[tuple[RunSession, Uri, str]]:
    """Yield a session at the run of a checkpoint, its URI, and its name. Collective, read-only.

    The ranks agree on the URI that they were given. The name is ``step_100``, or ``step_100/actor`` for a part.
    """
    with contextlib.ExitStack() as stack:
        session, target = stack.enter_context(open_reading(given, control, place))
        name = target.name
        if not any(domain.id for domain in session.placement.domains):
            step, run = target.parent.name, target.parent.parent
            is_lead = session.placement.is_node_lead

            def look() -> bool:
                return is_lead and bool(step) and _has_part(run, place, step, name)

            if control.step("run of a part", look, any):
                session = stack.enter_context(open_session(run, control, place, write=False))
                name = part_name(step, name)
        yield session, target, name


def owner_view(session: RunSession) -> View | None:
    """Return the log of the domain that this rank owns; None if it owns none. Local."""
    return drive(read_view(), session.storage) if session.placement.is_owner else None


def node_view(session: RunSession) -> View | None:
    """Return the log as this rank's node sees it, on its first rank; None on others. Local."""
    return drive(read_view(), session.storage) if session.placement.is_node_lead else None


def _has_part(run: Uri, place: Place, step: str, part: str) -> bool:
    """Whether ``run`` is a run, and its log knows that part, or the step as one with other parts."""
    try:
        with looking_at(run, place.storage_options) as look:
            views = look.views
    except (StorageError, UriError, ManifestError):
        return False  # the directory above a copied checkpoint need not be readable
    return any(
        (save.part is not None and (save.part.name, save.part.part) == (step, part))
        or (save.seal is not None and save.seal.name == step and bool(save.seal.parts))
        for view in views.values()
        for save in (*view.saves.living.values(), *view.saves.of_name(step))
    )


def locate(session: RunSession, name: str) -> LocatedCheckpoint:
    """Find the files of checkpoint ``name`` for this rank. Collective, read-only.

    Raises:
        NotFoundError: There is none.
        IncompleteCheckpointError: It is live but its files are missing, or a domain of it is out of
            reach.
        IntegrityError: All ranks found it changed.
        ManifestError: All ranks found its manifest damaged.
        CollectiveError: Some ranks got an error; every rank raises this same error.
        AmbiguousCheckpointError: Another program saved over it.
        StateError: It is a run.
    """
    return _search(session, name)[0]


def _search(
    session: RunSession, name: str, visit: Callable[[LocatedCheckpoint], None] | None = None
) -> tuple[LocatedCheckpoint, CollectiveError | None]:
    """Find the files as ``locate`` does, and visit those of a save in the log in the same step. Collective.

    Returns:
        The files of this rank; and the error that ``visit`` ended with, the same on every rank.
    """
    where = session.storage.uri(name)
    visit_error: list[Exception] = []
    ahead: dict[str, LocatedCheckpoint | CkptfsError] = {}

    def look(ids: Collection[str] | None) -> _LogReport | None:
        view = (
            drive(read_view(session.hint), session.storage)
            if session.placement.is_node_lead
            else None
        )
        if view is None:
            return None
        domain, state = view
        is_replaced = _is_replaced_by_other(session, name, view, ahead)
        if ids is None or not state.saves.settled.size:
            return _LogReport(view, is_complete=True, is_saved_over=is_replaced)
        return _LogReport(
            (domain, state.to_send(ids)), is_complete=False, is_saved_over=is_replaced
        )

    def choose(answers: Sequence[_LogReport | None]) -> _Choice:
        report = [a for a in answers if a is not None]
        views = dict(one.view for one in report)
        step, part = split_name(name)
        checkpoint_seal = live_of(step, views, where)
        if checkpoint_seal is None:
            return _Choice(None, views)
        if any(one.is_saved_over for one in report):
            raise unlogged_error((name,), checkpoint_seal, session.storage.root)
        seal, holders = part_of(checkpoint_seal, part, where)
        # Only this save is sent to every rank, because the log may be long.
        return _Choice(seal, {}, holders)

    def choose_first(answers: Sequence[_LogReport | None]) -> _Choice | None:
        choice = choose(answers)
        is_complete = all(one is None or one.is_complete for one in answers)
        return choice if choice.seal is not None or is_complete else None

    def look_for(choice: _Choice) -> LocatedCheckpoint | _Miss | _Changed:
        try:
            if choice.seal is None:
                return drive(unlogged(name, choice.views, where), session.storage)
            sought = find(choice.seal, session.caps.shape, where, with_metadata=True)
            return _pop_found(ahead, choice.seal.save_id) or drive(sought, session.storage)
        except (NotFoundError, StaleError) as error:
            return _Miss(error.message)
        except (IntegrityError, ManifestError) as error:
            return _Changed(error)

    misses: list[tuple[int, str]] = []
    for _ in range(TRIES):
        chosen = step_with_views(
            session.control,
            "look",
            look,
            lambda report: None if report is None else report.view,
            choose_first,
        )
        # Whether there ever was a save of this name is looked up among all saves, not only the
        # living ones.
        choice = chosen or session.control.step("look", lambda: look(None), choose)
        held: list[LocatedCheckpoint] = []

        def here(
            choice: _Choice = choice, held: list[LocatedCheckpoint] = held
        ) -> _Miss | _Changed | _Unread | None:
            found = look_for(choice)
            if not isinstance(found, LocatedCheckpoint):
                return found
            held.append(found)
            # A copy without a log is checked first.
            return (
                None if choice.seal is None else _visit(visit, found, session.control, visit_error)
            )

        misses, unread = session.control.step(
            "find", here, lambda reports: _found(reports, session.control.worlds)
        )
        found = held[0] if held else None
        if not misses and found is not None:
            if choice.seal is None and found.manifest is not None:
                refuse_parts(found.manifest.parts, name, where)
                _check_copy(session, found, found.manifest)
            return found, _error_of(unread, session.control, visit_error)
        if choice.seal is None and len(misses) == session.control.size:
            if session.control.step("is it a run", lambda: _is_run(session, name), any):
                raise run_error(where)
            raise NotFoundError(
                misses[0][1],
                uri=where,
                hint="call list_checkpoints() on its parent to see what exists",
            )
    ranks = ", ".join(str(rank) for rank, _ in misses)
    holders = f"{choice.where}: start there again" if choice.where else ""
    raise IncompleteCheckpointError(
        f"{name} cannot be found from rank {ranks}: {misses[0][1]}",
        uri=where,
        hint=holders or "it was removed by hand, or these nodes cannot see its disk",
    )


def _is_run(session: RunSession, name: str) -> bool:
    if not session.placement.is_node_lead:
        return False
    try:
        return drive(is_run(name), session.storage)
    except StorageError:
        return False  # it is no checkpoint, whatever else it is


def _pop_found(
    ahead: dict[str, LocatedCheckpoint | CkptfsError], save_id: str
) -> LocatedCheckpoint | None:
    """Return what was found ahead, and forget it. An error that was met there is raised."""
    found = ahead.pop(save_id, None)
    if isinstance(found, CkptfsError):
        raise found
    return found


def _is_replaced_by_other(
    session: RunSession, name: str, view: View, ahead: dict[str, LocatedCheckpoint | CkptfsError]
) -> bool:
    """Whether another program's ``.metadata`` is in the place of this save's. One process of each domain checks
    this: loading our save would ignore the later one.

    ahead: a process alone at an object store looks for the files at the same time, since no other rank decides which
    save it is; what it finds goes there, by save_id.
    """
    if not session.placement.is_owner:
        return False
    views, (step, part) = dict([view]), split_name(name)
    seals = [seal for seal in list_live(views) if seal.name == step]
    if part is not None:
        seals = [piece(seal, ref) for seal in seals for ref in seal.parts if ref.name == part]
    shape = session.caps.shape
    if len(seals) == 1 and session.control.size == 1 and shape is Shape.OBJECT:
        (seal,) = seals
        search = find(seal, shape, session.storage.uri(name), with_metadata=True)
        both = side_by_side(is_overwritten(seal, views, shape), settled(search))
        is_replaced, ahead[seal.save_id] = drive(both, session.storage)
        return bool(is_replaced)
    return any(drive(is_overwritten(seal, views, shape), session.storage) for seal in seals)


def _visit(
    visit: Callable[[LocatedCheckpoint], None] | None,
    found: LocatedCheckpoint,
    control: Control,
    own: list[Exception],
) -> _Unread | None:
    """Visit what this rank found. The error, which goes to ``own`` too, is raised once all found their files."""
    try:
        if visit is not None:
            visit(found)
    except Exception as error:  # noqa: BLE001 - raised on every rank
        own[:] = [error]
        return _Unread(failure_of(error, control.world))
    return None


def _error_of(
    unread: Mapping[int, Failure], control: Control, own: Sequence[Exception]
) -> CollectiveError | None:
    """Return the error of ranks that could not read what they found, the same on every rank."""
    if not unread:
        return None
    error = collective_error("metadata", unread, control.worlds)
    if control.rank == 0:
        log_left_out(error, control.worlds)
    if control.rank in unread and own:
        error.__cause__ = own[0]
    return error


def _found(
    answers: Sequence[_Miss | _Changed | _Unread | None], worlds: Sequence[World]
) -> tuple[list[tuple[int, str]], dict[int, Failure]]:
    """Return which ranks found nothing, and if all found their files, which could not read them.

    If all ranks found the save changed, that error is raised. If only some did, their error names
    them.
    """
    changed = {rank: one.error for rank, one in enumerate(answers) if isinstance(one, _Changed)}
    if len(changed) == len(answers):
        raise changed[0]
    if changed:
        failures = {rank: failure_of(error, worlds[rank]) for rank, error in changed.items()}
        raise collective_error("find", failures, worlds)
    misses = [(rank, one.message) for rank, one in enumerate(answers) if isinstance(one, _Miss)]
    if misses:
        return misses, {}  # all ranks start again, whatever some of them read
    return [], {r: one.failure for r, one in enumerate(answers) if isinstance(one, _Unread)}


def following(
    session: RunSession,
    name: str,
    load: Callable[[LocatedCheckpoint], T],
    visit: Callable[[LocatedCheckpoint], None],
) -> T:
    """Return the result of ``load`` for what ``locate`` finds. Collective, read-only.

    If a file was missing because the save was projected between the search and the read, this is
    done once more. Errors are those of both.

    Args:
        session: The session at the run.
        name: The checkpoint.
        load: Loads what was found. Collective.
        visit: Reads what this rank needs first, in the step that finds the files. Not called for a
            checkpoint without a log: ``load`` then finds no ``seal``. Local; it may be called again.

    Returns:
        The result of ``load``.
    """
    found, error = _search(session, name, visit)
    try:
        return _loaded(load, found, error)
    except CollectiveError as problem:
        missing = (IncompleteCheckpointError, NotFoundError, StaleError)
        if not (any(problem.all_are(kind) for kind in missing) and _has_moved(session, found)):
            raise
        logger.info("%s was projected during the read: reading it again", session.storage.uri(name))
    return _loaded(load, *_search(session, name, visit))


def _loaded(
    load: Callable[[LocatedCheckpoint], T], found: LocatedCheckpoint, error: CollectiveError | None
) -> T:
    if error is not None:
        raise error
    return load(found)


def _has_moved(session: RunSession, found: LocatedCheckpoint) -> bool:
    """Whether some rank finds the same save elsewhere now. Collective."""

    def look() -> bool:
        if found.seal is None:
            return False
        where = session.storage.uri(found.seal.name)
        try:
            return (
                drive(find(found.seal, session.caps.shape, where), session.storage).home
                != found.home
            )
        except (NotFoundError, StaleError):
            return False

    return session.control.step("has it moved", look, any)


def locate_directory(session: RunSession, name: str) -> LocatedCheckpoint:
    """Collective, read-only. As ``locate``; also finds a directory of files that another tool wrote, without a
    manifest. IncompleteCheckpointError: on an object store, in a run, it may also be what an interrupted save of
    ours left, because plain names exist there before the commit.
    """
    try:
        return locate(session, name)
    except NotFoundError as error:
        why = error  # the same on every rank

    def look() -> str | None:
        """Return why it cannot be read, "" if it can; None on ranks that do not check."""
        if not session.placement.is_node_lead:
            return None
        view = drive(read_view(), session.storage)
        known = {name, split_name(name)[0]}  # of a part, the step that it is of
        if view is not None and any(view[1].saves.knows_name(one) for one in known):
            return why.message
        try:
            if not session.storage.list(name):
                return why.message
        except NotFoundError:
            return why.message
        if view is not None and session.caps.shape is Shape.OBJECT:
            return "its files were never committed, or not by ckptfs"
        return ""

    def judge(answers: Sequence[str | None]) -> None:
        refused = next((text for text in answers if text), None)
        if refused is None:
            return
        kind = NotFoundError if refused == why.message else IncompleteCheckpointError
        raise kind(refused, uri=session.storage.uri(name), hint=why.hint)

    session.control.step("look at the directory", look, judge)
    logger.info("%s has no manifest: its files are read without one", session.storage.uri(name))
    return LocatedCheckpoint(name, "", None, None)


def _check_copy(session: RunSession, found: LocatedCheckpoint, manifest: Manifest) -> None:
    """Check that every listed file of a copy without a log exists on some node. Collective."""

    def look() -> frozenset[str] | None:
        if not session.placement.is_node_lead:
            return None
        return frozenset(drive(missing_files(manifest, found.home), session.storage))

    def judge(answers: Sequence[frozenset[str] | None]) -> None:
        nowhere = frozenset.intersection(*(a for a in answers if a is not None))
        if nowhere:
            first = min(nowhere)
            record = next(file for file in manifest.files if file.path == first)
            raise IncompleteCheckpointError(
                f"{len(nowhere)} files are missing or have another size; the first is {first}",
                uri=session.storage.uri(file_key(record, found.home)),
                hint="it shares files with other saves: copy what it lists of _data/ too"
                if record.is_shared
                else "the copy was interrupted: copy it again",
            )

    session.control.step("look at the copy", look, judge)
