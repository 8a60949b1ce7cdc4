"""A rank's session at a run: the ranks it talks with, the run's storage, and who shares which disk.

It is opened from the URI that the user gave, and is the same on every rank. The ranks first agree on the
URI: relative paths become absolute once, on the coordinator, and if the ranks were given different URIs,
they get an error instead of two half checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfs.commit.log.advisory_log import AdvisoryLog, LogKind, kind_of_log, other_kind, with_log
from ckptfs.commit.log.append import FoundHint, Means
from ckptfs.commit.log.entries import Stamp
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import Program, drive, read_limited
from ckptfs.commit.ownership.background_owner import Background
from ckptfs.commit.paths import CONTROL, HINT, LOG, log_key, step_in
from ckptfs.commit.save.spec import checked_step, fresh_ids, now_text
from ckptfs.commit.state import unsent
from ckptfs.control.control import Control, open_control, step_keeping, step_of_stages
from ckptfs.control.messages import Stage
from ckptfs.errors import CollectiveError, NotFoundError, StateError, UriError
from ckptfs.storage.base import Capabilities, Shape, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.topology.storage_domains import (
    Placement,
    Probe,
    Scope,
    leads_node,
    placement_in,
    probe_domains,
    reading_stage,
)
from ckptfs.uri import Uri

__all__ = [
    "TOUCH_AFTER_S",
    "Common",
    "Place",
    "RunSession",
    "View",
    "agree_uri",
    "collect_views",
    "finish_with_views",
    "is_relative",
    "naming",
    "open_reading",
    "open_session",
    "stage_with_views",
    "start_session",
    "step_of",
    "step_with_views",
    "uri_stage",
]

T = TypeVar("T")
R = TypeVar("R")

View = tuple[str, LogState]

TOUCH_AFTER_S = 0.05  # beyond one tick of the server's clock, see touch_log_later


@dataclass(slots=True)
class Known:
    """The newest fold of a held run's log that this process made.

    Entries never change, so the next call continues from this fold. An old fold is as correct as a
    new one; it only takes longer to continue.

    Attributes:
        state: The fold; None before the first.
        seq: The last place in commit order that a ticket of this process took. A save that begins
            later gets a later place.
    """

    state: LogState | None = None
    seq: int = 0

    def learn(self, state: LogState | None) -> None:
        """Keep ``state`` if it covers more entries."""
        if state is not None and (self.state is None or state.next > self.state.next):
            self.state = state


@dataclass(slots=True, eq=False)
class Common:
    """What all sessions of one process at one domain of a held run share.

    If a second session had its own values, it would immediately remove what a grace period still
    keeps, and both could remove and project one name at the same time. Another process has its own
    values.

    Attributes:
        deferred_deletes: ids of saves with a delete in the log and bytes that this process removes later;
            clearing keeps them.
        turn: The lock for projecting and removing, see ``take_turns``.
    """

    deferred_deletes: set[str] = field(default_factory=set)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type[Common], tuple[()]]:
        return (Common, ())  # a lock cannot be pickled, and is of no use to another process


@dataclass(frozen=True, slots=True)
class RunSession:
    """The session of one rank at a run.

    Attributes:
        control: The control plane of the ranks.
        storage: The storage, rooted at the run.
        placement: All domains, and the domain of this rank.
        caps: The capabilities that the owner of this rank's domain found by its probe; equal on all
            ranks of the domain.
        background: On an owner that holds the run, the queue that takes deletes, where removing
            takes requests; else None.
        known: On an owner that holds the run, the newest fold so far.
        common: What this process's other sessions at the same domain share with this one.
        hint: On a reader, the hint of the log, if it was read together with the domain's id.
    """

    control: Control
    storage: Storage
    placement: Placement
    caps: Capabilities
    background: Background | None = None
    known: Known = field(default_factory=Known)
    common: Common = field(default_factory=Common, compare=False)
    hint: FoundHint | None = None

    @property
    def deferred_deletes(self) -> set[str]:
        """Deleted saves with bytes that this process removes later."""
        return self.common.deferred_deletes

    @property
    def turn(self) -> threading.Lock:
        """The lock for projecting and removing."""
        return self.common.turn

    @property
    def spans_nodes(self) -> bool:
        """Whether some domain is seen from several nodes; equal on all ranks."""
        return any(len(domain.nodes) > 1 for domain in self.placement.domains)

    def stamp(self) -> Stamp:
        """Return who writes an entry now, and when, for people."""
        return Stamp(now_text(), self.control.world.hostname, os.getpid(), self.control.rank)

    def means(self) -> Means:
        """Return what a program of this rank's domain needs.

        Each program gets a new one, because one generator of ids must not serve two threads.
        """
        return Means(self.placement.mine.id, self.caps, fresh_ids(), self.stamp())

    @property
    def fold_from(self) -> LogState | None:
        """The fold from which this rank continues its log, or None to fold from the beginning."""
        # Without exclusive creates entries may appear below the end of the fold.
        return self.known.state if self.caps.exclusive_create else None

    def touch_log_later(self, *, last: bool = False) -> None:
        """Change the log's timestamp a little after an append, from a thread of its own.

        If two entries are made within one tick of the server's clock, an NFSv3 reader that saw the
        first may never see the second, because its cached directory looks unchanged.

        last: This is the process's last append at the run, and the process may end now: its end
        then waits for the touch.
        """
        timer = threading.Timer(TOUCH_AFTER_S, self._touch_log)
        timer.daemon = not last
        with contextlib.suppress(RuntimeError):  # the interpreter is ending: no thread starts
            timer.start()

    def drive_in_background(self, program: Program[T], background: Background) -> T:
        """Run a program of a background task. It may append to the log after all calls returned."""
        try:
            return drive(program, self.storage, stopped=background.stopped)
        finally:
            self.touch_log_later()

    def _touch_log(self) -> None:
        try:
            self.storage.touch(LOG)
        except OSError:
            return  # the touch only makes readers see a commit sooner


@dataclass(frozen=True, slots=True)
class _Ask:
    """Saves that the coordinator must know about from every log before it can decide."""

    ids: frozenset[str]


def collect_views(found: Iterable[View | None]) -> dict[str, LogState]:
    """Return the logs that ranks sent, by domain. A rank that reads none sends None. Pure."""
    return dict(view for view in found if view is not None)


def step_with_views(
    control: Control,
    label: str,
    look: Callable[[Collection[str]], T],
    view_of: Callable[[T], View | None],
    decide: Callable[[Sequence[T]], R],
    *,
    also: Callable[[Sequence[T]], Collection[str]] = lambda _: (),
) -> R:
    """Decide about logs in a control step that sends only the living saves of each. Collective.

    A second step requests saves that may be settled in one log and living in another; without a
    crash there are none.

    Args:
        control: The control plane.
        label: The name of the step.
        look: On every rank, returns the value that the rank sends. If the rank owns a log, it
            passes the ids that it gets to ``state.to_send(ids)``.
        view_of: Returns the log in such a value.
        decide: On the coordinator, decides from the values of all ranks.
        also: Returns further saves to request from every log, if there are several logs.

    Returns:
        The answer of ``decide``, on every rank.
    """
    stage = stage_with_views(label, look, view_of, decide, also=also)
    return finish_with_views(
        control, label, look, decide, control.step(label, stage.local, stage.decide)
    )


def stage_with_views(
    label: str,
    look: Callable[[Collection[str]], T],
    view_of: Callable[[T], View | None],
    decide: Callable[[Sequence[T]], R],
    *,
    also: Callable[[Sequence[T]], Collection[str]] = lambda _: (),
) -> Stage:
    """Return the first of the steps of ``step_with_views``, for a step that it shares with other stages.

    ``finish_with_views`` makes the decision of its answer.
    """

    def first(found: list[T]) -> R | _Ask:
        views = collect_views(map(view_of, found))
        ids = unsent(views, also(found))
        return _Ask(ids) if ids else decide(found)

    return Stage(label, lambda: look(()), first)


def finish_with_views(
    control: Control,
    label: str,
    look: Callable[[Collection[str]], T],
    decide: Callable[[Sequence[T]], R],
    answer: object,
) -> R:
    """Return the decision that the answer of ``stage_with_views`` is, or make it in a second step. Collective."""
    if isinstance(answer, _Ask):
        ids = answer.ids
        return control.step(label, lambda: look(ids), decide)
    return answer  # type: ignore[return-value] # what decide returned


@contextlib.contextmanager
def naming(checkpoint: Uri) -> Iterator[None]:
    """Add the checkpoint to an error of a step, because a step only knows files.

    Files of the run are then named by their path in it.
    """
    try:
        yield
    except CollectiveError as error:
        if error.uri is None:
            error.uri = str(checkpoint)
            error.message = error.message.replace(f" at {checkpoint.parent}/", " at ")
        raise


@dataclass(frozen=True, slots=True)
class Place:
    """How to reach a run: options for its storage, and what the caller knows about who shares it."""

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    scope: Scope = "auto"
    domain: str | None = None


def agree_uri(control: Control, given: object) -> Uri:
    """Return the one URI that all ranks were given, made absolute on the coordinator. Collective.

    The credentials are each rank's own: the ranks do not send theirs to each other.
    """
    stage = uri_stage(given)
    return _own_uri(given, control.step(stage.label, stage.local, stage.decide))


def uri_stage(given: object, check: Callable[[Uri], None] = lambda _: None) -> Stage:
    """Return the decision of ``agree_uri``, for a step that it shares with others. Its answer is the URI's text.

    The stages after it can use each rank's own URI, unless it ``is_relative``: if ranks were given different
    ones, that is the error of the step.

    Args:
        given: The URI, as this rank was given it.
        check: Called on the coordinator with the URI. It raises if all ranks are to get that error.
    """

    def text() -> str | UriError:
        try:
            return _text_of(given)
        except UriError as error:
            # A value, so that the caller's mistake is raised with its own type, also for one rank.
            return error

    def same(answers: Sequence[str | UriError]) -> str:
        wrong = next((t for t in answers if isinstance(t, UriError)), None)
        if wrong is not None:
            raise wrong
        texts = [t for t in answers if isinstance(t, str)]
        if len(set(texts)) > 1:
            odd = next(rank for rank, t in enumerate(texts) if t != texts[0])
            raise UriError(
                f"ranks were given different URIs: {Uri.parse(texts[0])} on rank 0, "
                f"{Uri.parse(texts[odd])} on rank {odd}",
                hint="pass the same path on every node: ckptfs distinguishes node-local disks by "
                "their domains",
            )
        agreed = Uri.parse(texts[0])
        check(agreed)
        return str(agreed)

    return Stage("uri", text, same)


def is_relative(given: object) -> bool:
    """Whether a URI is a path that only the coordinator may make absolute. A URI that cannot be read is not."""
    with contextlib.suppress(UriError):
        return _text_of(given) != str(Uri.parse(given))  # type: ignore[arg-type]  # as below
    return False


def _text_of(given: object) -> str:
    parsed = Uri.parse(given)  # type: ignore[arg-type]  # the parser names what it cannot read
    raw = str(getattr(given, "__fspath__", lambda: given)())
    is_path = parsed.protocol == "file" and "://" not in str(given)
    return raw if is_path and not raw.startswith(("/", "~")) else str(parsed)


def _own_uri(given: object, agreed: str) -> Uri:
    own = Uri.parse(given)  # type: ignore[arg-type]  # it could be read for the stage
    return own if str(own) == agreed else Uri.parse(agreed)


@contextlib.contextmanager
def open_session(
    run_uri: Uri,
    control: Control,
    place: Place,
    *,
    write: bool,
    common: Common | None = None,
) -> Iterator[RunSession]:
    """Open a session at a run. Collective.

    On leaving, its storage is closed and the control is not. common: that of a session that this
    process already has at the run.
    """
    _refuse_private_memory(control, run_uri)
    with contextlib.ExitStack() as stack:
        if not write and place.domain is None:
            reader = _ReadOpening(control, place)
            opening = reader.opening(stack, lambda: run_uri)
            _, *answers = step_of_stages(control, "open", [opening, *reader.stages])
            yield reader.session(answers)
            return

        def open_here() -> tuple[None, Storage]:
            return None, _opened(stack, run_uri, place)

        _, storage = step_keeping(control, "open", open_here, lambda _: None)
        yield start_session(control, storage, place, write=write, common=common)


@contextlib.contextmanager
def open_reading(given: object, control: Control, place: Place) -> Iterator[tuple[RunSession, Uri]]:
    """Open a reader's session at the run of the checkpoint that the ranks were given. Collective.

    Args:
        given: The checkpoint, as this rank was given it.
        control: The control plane of the ranks.
        place: How to reach the run.

    Yields:
        The session, and the checkpoint's URI, which is one for all ranks.

    Raises:
        UriError: The ranks were given different URIs, or one that cannot be read; the same on every rank.
        CollectiveError: Some rank cannot open or read there; the same on every rank.
    """
    if place.domain is not None or is_relative(given):
        target = agree_uri(control, given)
        with open_session(target.parent, control, place, write=False) as session:
            yield session, target
        return
    agreeing = uri_stage(given, lambda uri: _refuse_private_memory(control, uri))
    with contextlib.ExitStack() as stack:
        reader = _ReadOpening(control, place)
        opening = reader.opening(stack, lambda: Uri.parse(given).parent)  # type: ignore[arg-type]
        agreed, _, *answers = step_of_stages(control, "open", [agreeing, opening, *reader.stages])
        yield reader.session(answers), _own_uri(given, agreed)


def _opened(stack: contextlib.ExitStack, run_uri: Uri, place: Place) -> Storage:
    """Open the storage until ``stack`` is left: also if another rank could not open its own."""
    storage = open_storage(run_uri, place.storage_options)
    stack.callback(storage.close)
    return storage


def _refuse_private_memory(control: Control, uri: Uri) -> None:
    """Raise UriError on every rank if several processes use ``memory://``.

    Each process would "save" into its own memory.
    """
    processes = {(world.node, world.pid) for world in control.worlds}
    if len(processes) > 1 and uri.protocol.rpartition("+")[2] == "memory":
        raise UriError(
            f"{uri.protocol}:// belongs to one process, but {len(processes)} take part",
            uri=uri,
            hint="use a directory or a bucket that all processes can reach",
        )


def start_session(
    control: Control,
    storage: Storage,
    place: Place,
    *,
    write: bool,
    common: Common | None = None,
) -> RunSession:
    """Make a session at the run that ``storage`` is rooted at. Collective.

    The caller still owns the storage and closes it. common: as for ``open_session``.
    """
    if not write:
        return _start_reading(control, storage, place)
    placement = probe_domains(control, storage, scope=place.scope, name=place.domain)
    caps = _agreed_caps(control, storage, placement)
    log = with_log(storage, caps, write=True)
    return RunSession(control, log, placement, caps, common=common or Common())


def _start_reading(control: Control, storage: Storage, place: Place) -> RunSession:
    reader = _ReadOpening(control, place, storage)
    if place.domain is None:
        return reader.session(step_of_stages(control, "open", reader.stages))
    placement = probe_domains(control, storage, name=place.domain, write=False)
    kind = reader.kind
    return reader.session_in(placement, control.step(kind.label, kind.local, kind.decide))


class _ReadOpening:
    """One rank's part in opening a session for reading: the stages of one step.

    The requests that a reader of an object store always needs are sent together with the read of the
    domain's id. If one of them fails, the stage that needs its answer repeats it and gets the error.
    """

    def __init__(self, control: Control, place: Place, storage: Storage | None = None) -> None:
        self._control = control
        self._place = place
        self._opened = storage
        self._kind: LogKind | None = None
        self._hint: FoundHint | None = None

    def opening(self, stack: contextlib.ExitStack, run: Callable[[], Uri]) -> Stage:
        """The stage that opens the storage, which ``stack`` closes."""

        def local() -> None:
            self._opened = _opened(stack, run(), self._place)

        return Stage("open", local, lambda _: None)

    @property
    def stages(self) -> list[Stage]:
        """The stages of an open storage: who shares it, and the kind of its log."""
        return [reading_stage(self._control, self._probe, self._place.scope), self.kind]

    @property
    def kind(self) -> Stage:
        """The stage in which one process of each node finds the kind of log that exists.

        A rank that failed alone would leave the others waiting in their next step.
        """
        node, is_lead = self._control.world.node, leads_node(self._control)

        def local() -> str | None:
            if not is_lead:
                return None
            kind = self._kind or kind_of_log(self._storage)
            return node if kind is LogKind.ADVISORY else None

        def decide(nodes: Sequence[str | None]) -> frozenset[str]:
            return frozenset(found for found in nodes if found is not None)

        return Stage("kind of log", local, decide)

    def session(self, answers: Sequence[Any]) -> RunSession:
        """Return the session, from the answers of ``stages``."""
        ruling, advisory = answers
        return self.session_in(placement_in(self._control, ruling), advisory)

    def session_in(self, placement: Placement, advisory: Collection[str]) -> RunSession:
        """Return the session; ``advisory`` has the nodes that see the weaker kind of log."""
        storage = self._storage
        if self._control.world.node in advisory:
            # The other kind of log has no hint.
            log = AdvisoryLog(storage)
            return RunSession(self._control, log, placement, storage.capabilities)
        caps = storage.capabilities
        return RunSession(self._control, storage, placement, caps, hint=self._hint)

    @property
    def _storage(self) -> Storage:
        assert self._opened is not None  # noqa: S101 - the stage before has opened it
        return self._opened

    def _probe(self) -> Probe:
        storage = self._storage
        is_object = storage.capabilities.shape is Shape.OBJECT
        also = (self._look_at_log, self._read_hint) if is_object else ()
        return Probe(storage, write=False, tokens=False, also=also)

    def _look_at_log(self) -> None:
        self._storage.stat(log_key(0))
        self._kind = LogKind.EXCLUSIVE

    def _read_hint(self) -> None:
        try:
            self._hint = FoundHint(read_limited(self._storage, HINT))
        except NotFoundError:
            self._hint = FoundHint(None)


def _agreed_caps(control: Control, storage: Storage, placement: Placement) -> Capabilities:
    """Return what each owner's probe found, on all ranks of its domain. Collective.

    If two ranks saw different capabilities of one place, they would write into different
    directories.
    """

    def local() -> tuple[str, Capabilities, str | None] | None:
        # A run that exists already was opened without a write. The conditions that its log relies
        # on must be probed before the first entry, because the store may ignore them.
        if not placement.is_owner:
            return None
        caps = storage.probe(CONTROL)
        return placement.mine.id, caps, other_kind(storage, caps)

    def decide(answers: Sequence[tuple[str, Capabilities, str | None] | None]) -> _Found:
        found = [a for a in answers if a is not None]
        wrong = next((why for _, _, why in found if why is not None), None)
        if wrong is not None:
            raise StateError(
                wrong,
                uri=storage.root,
                hint="use the client and options that wrote it, or begin another run",
            )
        return _Found({domain: caps for domain, caps, _ in found})

    return control.step("capabilities", local, decide).caps[placement.mine.id]


@dataclass(frozen=True, slots=True)
class _Found:
    caps: Mapping[str, Capabilities]


def step_of(name: str, step: int | None) -> int | None:
    """Return the given step, otherwise the number at the end of the name (``step_100``, ``ckpt-100``)."""
    return step_in(name) if step is None else checked_step(step)


def control_for(process_group: Any, timeout_s: float | None) -> Control:
    """Open the control plane of the ranks for one call."""
    return open_control(process_group=process_group, timeout_s=timeout_s)
