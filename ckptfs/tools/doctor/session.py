"""One examination: its settings, scratch directory, facts about the place, and how checks are made.

    run/.ckptfs-doctor-20261122T101130-0123456789ab/
        about.txt                      says what the directory is; leftovers without it are never removed

The run itself is only listed, never written. If directories above the scratch directory had to be made,
including the run's own, they are removed again if they are still empty.

A check looks on every rank, and judges on the coordinator what all ranks saw, so that every rank returns
the same findings:

    @check(Need.WRITE)
    def names(session: Session) -> Findings:
        return session.step("names", Theme.MOUNT, lambda: _look(session.storage), _judge)

A look that fails is a finding by itself. A ``FailedOperation`` describes an operation that was refused or failed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any, TypeVar

from ckptfs.control.control import Control
from ckptfs.control.world import World
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    CkptfsError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.base import SMALL_BYTES, Capabilities, Shape, Storage
from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.text import counted
from ckptfs.tools.doctor.report import Finding, Theme, Verdict, on_ranks
from ckptfs.topology.storage_domains import Placement, probe_domains
from ckptfs.uri import Uri, mask_credentials

if TYPE_CHECKING:
    from ckptfs.tools.doctor.access import Access
    from ckptfs.tools.doctor.mount import FreeSpace, Mount

__all__ = [
    "ABOUT",
    "PREFIX",
    "Clock",
    "DoctorCheck",
    "Expect",
    "FailedOperation",
    "Findings",
    "Need",
    "Opener",
    "ReadFailedError",
    "ScratchDirectory",
    "Session",
    "Settings",
    "Why",
    "begun_s",
    "check",
    "cleaning",
    "failure",
    "leftovers",
    "new_id",
]

log = logging.getLogger("ckptfs.tools")

T = TypeVar("T")
Findings = Sequence[Finding]
Judge = Callable[[Sequence[World], Sequence[T]], Findings]
Failed = Callable[[Sequence[World], Mapping[int, "FailedOperation"]], Finding]


# -- what the caller asks --------------------------------------------------------------------


class Expect(Enum):
    """What the caller expects of the storage.

    Attributes:
        SHARED: All ranks see the same bytes.
        NODE: Each node sees bytes of its own.
    """

    SHARED = "shared"
    NODE = "node"


class Clock:
    """The clock of the doctor. Tests replace it."""

    def wall_s(self) -> float:
        """Return seconds since the epoch by this machine's clock."""
        return time.time()

    def now_s(self) -> float:
        """Return seconds that only increase."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait for this many ``seconds``."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the doctor measures.

    Attributes:
        size_bytes: Bytes of the file that each rank writes to measure bandwidth; 0 measures none.
        needs_bytes: Bytes that the job will store; None if not known.
        expect: What the caller expects of the storage; None: nothing.
        patience_s: How many seconds to wait for a write of another rank.
        rounds: Number of races for a name.
        replaces: How often, at least, a file is replaced while it is being read.
        replace_s: How many seconds, at least, it is replaced.
        clock: The clock that measures time.
    """

    size_bytes: int = 64 << 20
    needs_bytes: int | None = None
    expect: Expect | None = None
    patience_s: float = 20.0
    rounds: int = 5
    replaces: int = 20
    replace_s: float = 1.0
    clock: Clock = field(default_factory=Clock)


# -- what failed -----------------------------------------------------------------------------


class Why(Enum):
    """Why an operation failed, as far as a verdict depends on it."""

    READ_ONLY = "read-only"
    ACCESS = "not permitted"
    NO_SPACE = "no space"
    UNSUPPORTED = "cannot do that"
    NOT_FOUND = "not found"
    EXISTS = "exists already"
    OTHER = "failed"


_WHYS: tuple[tuple[type[CkptfsError], Why], ...] = (
    (AccessError, Why.ACCESS),
    (NoSpaceError, Why.NO_SPACE),
    (UnsupportedError, Why.UNSUPPORTED),
    (NotFoundError, Why.NOT_FOUND),
    (StaleError, Why.NOT_FOUND),
    (AlreadyExistsError, Why.EXISTS),
)


class ReadFailedError(Exception):
    """A check failed in a read: a load would fail the same way, a save would not."""

    def __init__(self, error: CkptfsError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class FailedOperation:
    """An operation that failed. It is pickled and sent to the coordinator."""

    why: Why
    text: str  # the error's message, credentials masked
    hint: str = ""  # the error's hint, credentials masked
    is_read: bool = False  # it was a read, so only a load would fail

    @staticmethod
    def of(error: CkptfsError, *, is_read: bool = False) -> FailedOperation:
        """Return the refusal for an error."""
        if getattr(error, "errno", None) == errno.EROFS:
            why = Why.READ_ONLY
        else:
            why = next((w for kind, w in _WHYS if isinstance(error, kind)), Why.OTHER)
        text, hint = mask_credentials(error.message), mask_credentials(error.hint or "")
        return FailedOperation(why, text, hint, is_read)


def failure(
    name: str,
    theme: Theme,
    worlds: Sequence[World],
    refused: Mapping[int, FailedOperation],
    meaning: str = "",
) -> Finding:
    """Return the finding for an operation that failed on some ranks.

    refused: the failures, by rank. meaning: what follows from them; "": a save, or a load, would fail the
    same way.
    """
    first = next(iter(refused.values()))
    reads = all(refusal.is_read for refusal in refused.values())
    follows = meaning or f"a {'load' if reads else 'save'} would fail here the same way"
    text = f"{on_ranks(worlds, refused)}{first.text}"
    return Finding(name, theme, Verdict.FAIL, text, follows, first.hint)


# -- the scratch directory -------------------------------------------------------------------

PREFIX = ".ckptfs-doctor-"
OLD_S = 86400.0
_NOTE = "about.txt"
ABOUT = b"`ckptfs doctor` tests this storage here. Older than a day: it was killed, remove all of this.\n"
_NAME = re.compile(r"\.ckptfs-doctor-(\d{8}T\d{6})-[0-9a-f]{12}")

Opener = Callable[[Uri, Mapping[str, Any]], Storage]


def new_id(wall_s: float) -> str:
    """Return an id for one examination, which contains its time in UTC."""
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"


def begun_s(name: str) -> float | None:
    """Return when an examination began, in epoch seconds, by its scratch directory's name.

    None if a scratch directory cannot have this name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        begun = datetime.strptime(match[1], "%Y%m%dT%H%M%S")  # noqa: DTZ007 - UTC by our own naming
    except ValueError:
        return None
    return begun.replace(tzinfo=UTC).timestamp()


class ScratchDirectory:
    """One rank's access to the scratch directory.

    ``run`` is the storage of the run, ``storage`` that of the scratch directory. Several ranks share one
    directory, so many ranks may call ``clean`` at once, also if ``make`` failed halfway.
    """

    def __init__(
        self, uri: Uri, doctor_id: str, options: Mapping[str, Any], opener: Opener
    ) -> None:
        self.name = f"{PREFIX}{doctor_id}"
        self.run = opener(uri, options)
        self.storage = opener(uri / self.name, options)
        self._missing = _missing_above(self.run)
        self._is_made = False

    def make(self) -> None:
        """Make the directory, and the note in it that says what it is for.

        Raises:
            StorageError: It cannot be made.
        """
        self.storage.make_dir("")
        self._is_made = True
        self.storage.replace(_NOTE, ABOUT)

    def leftovers(self, wall_s: float) -> tuple[str, ...]:
        """Return the scratch directories of examinations that began more than a day ago."""
        self.run.refresh("")
        try:
            names = [entry.name for entry in self.run.list("")]
        except NotFoundError:
            return ()
        return tuple(n for n in names if (at := begun_s(n)) is not None and wall_s - at > OLD_S)

    def remove_leftover(self, name: str) -> None:
        """Remove a leftover, if it has the note of a scratch directory.

        Raises:
            StorageError: It has no such note, or it cannot be removed.
        """
        if self.run.read_small(f"{name}/{_NOTE}", SMALL_BYTES) != ABOUT:
            raise StorageError("this is no corner of a doctor", uri=self.run.uri(name))
        if self.storage.capabilities.shape is Shape.FILESYSTEM:
            # Move it into our own directory in one step: we remove a name that only we use.
            self.run.rename(name, f"{self.name}/{name}")
            return
        self.run.remove_tree(name)

    def clean(self) -> None:
        """Remove the directory, and those that were made for it. Succeeds if it does not exist.

        Raises:
            StorageError: Something stays behind.
        """
        try:
            self.storage.sweep_uploads(0.0)
        except (AccessError, UnsupportedError) as error:
            log.info("uploads of the doctor may stay: %s", error)
        self.run.remove_tree(self.name)
        for path in self._missing:
            try:
                os.rmdir(path)
            except OSError:
                return  # it is in use now, or another rank has removed it

    def clean_quietly(self) -> None:
        """Clean up after an error or Ctrl-C; log what stays, and raise nothing for it."""
        try:
            self.clean()
        except (CkptfsError, OSError) as error:
            level = logging.WARNING if self._is_made else logging.DEBUG
            log.log(level, "left behind: %s (%s)", self.storage.root, error)

    def close(self) -> None:
        """Close both storages."""
        self.storage.close()
        self.run.close()


def _missing_above(run: Storage) -> tuple[str, ...]:
    """Return those of the run's directory and its parents that do not exist yet, deepest first."""
    path, missing = run.local_path(""), []
    while path is not None and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return tuple(missing)


# -- checks ----------------------------------------------------------------------------------


class Need(Flag):
    """What a check needs from a place."""

    NOTHING = 0
    WRITE = auto()  # every rank can write
    MOUNT = auto()  # plain ``open`` works there
    CLIENT = auto()  # an object store with a client of ckptfs
    BUCKET = auto()  # an object store, with any client


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """A check of the doctor: a collective function, and what it needs from the place."""

    run: Callable[[Session], Findings]
    needs: Need


def check(needs: Need = Need.NOTHING) -> Callable[[Callable[[Session], Findings]], DoctorCheck]:
    """Return a decorator that makes a check of a function."""
    return lambda run: DoctorCheck(run, needs)


@dataclass(slots=True)
class Session:
    """The state that the checks share. Lists are by rank, and the same on every rank."""

    control: Control
    scratch: ScratchDirectory
    settings: Settings
    uri: Uri
    is_writable: bool = False
    access: list[Access] = field(default_factory=list)
    mounts: list[Mount | None] = field(default_factory=list)
    caps: list[Capabilities] = field(default_factory=list)
    rooms: list[FreeSpace] = field(default_factory=list)
    placement: Placement | FailedOperation | None = None  # None if nothing can be written

    @property
    def storage(self) -> Storage:
        """The storage of the scratch directory."""
        return self.scratch.storage

    @property
    def run(self) -> Storage:
        """The storage of the run."""
        return self.scratch.run

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.control.rank

    @property
    def worlds(self) -> Sequence[World]:
        """The worlds of all ranks."""
        return self.control.worlds

    @property
    def is_mounted(self) -> bool:
        """Whether plain ``open`` works there. The same on all ranks: it follows from the URI."""
        return self.storage.local_path("") is not None

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Groups of ranks that see the same bytes; if the probe failed, the ranks of each node."""
        if self.placement is None:
            return [tuple(range(self.control.size))]
        if not isinstance(self.placement, FailedOperation):
            return [domain.ranks for domain in self.placement.domains]
        nodes: dict[str, list[int]] = {}
        for rank, world in enumerate(self.worlds):
            nodes.setdefault(world.node, []).append(rank)
        return [tuple(ranks) for ranks in nodes.values()]

    @property
    def client(self) -> ObjectClient | None:
        """The client of the scratch directory's storage; None if it has none."""
        return _client_of(self.storage)

    def offers(self, needs: Need) -> bool:
        """Whether the place has what a check needs. The same on all ranks."""
        bucket = self.uri.protocol.rpartition("+")[2] in PROTOCOLS
        offered = (
            (Need.WRITE, self.is_writable),
            (Need.MOUNT, self.is_mounted),
            (Need.CLIENT, self.client is not None and not self.is_mounted),
            (Need.BUCKET, bucket or _client_of(self.run) is not None),
        )
        return all(is_offered or need not in needs for need, is_offered in offered)

    def learn(self) -> None:
        """Probe, on each rank, what the storage can do, and who shares it. Collective.

        This uses ckptfs's own probes, in the scratch directory.
        """
        self.caps = self.control.step("doctor.probe", lambda: self.storage.probe("access"))
        try:
            self.placement = probe_domains(self.control, self.storage)
        except CkptfsError as error:  # the same on every rank
            self.placement = FailedOperation.of(error)

    def step(
        self,
        name: str,
        theme: Theme,
        look: Callable[[], T | FailedOperation],
        judge: Judge[T],
        failed: Failed | None = None,
    ) -> Findings:
        """Look on every rank and judge on the coordinator; a failed look is a finding. Collective.

        failed: makes the finding for a failed look; None: ``failure`` makes it.
        """

        def local() -> T | FailedOperation:
            try:
                return look()
            except ReadFailedError as reading:
                return FailedOperation.of(reading.error, is_read=True)
            except StorageError as error:
                return FailedOperation.of(error)

        def decide(answers: Sequence[T | FailedOperation]) -> Findings:
            refused = {rank: a for rank, a in enumerate(answers) if isinstance(a, FailedOperation)}
            if not refused:
                return judge(
                    self.worlds, [a for a in answers if not isinstance(a, FailedOperation)]
                )
            if failed is not None:
                return (failed(self.worlds, refused),)
            return (failure(name, theme, self.worlds, refused),)

        return self.control.step(f"doctor.{name}", local, decide)

    @property
    def is_lead(self) -> bool:
        """Whether this is the first rank of its node."""
        first = self.worlds[: self.rank]
        return self.worlds[self.rank].node not in {world.node for world in first}


def _client_of(storage: Storage) -> ObjectClient | None:
    found = getattr(storage, "client", None)
    return found if isinstance(found, ObjectClient) else None


# -- the end ---------------------------------------------------------------------------------


@check(Need.WRITE)
def leftovers(session: Session) -> Findings:
    """Remove the scratch directories of examinations that were killed more than a day ago."""
    scratch, wall_s = session.scratch, session.settings.clock.wall_s()

    def look() -> dict[str, FailedOperation | None]:
        return _without_leftovers(scratch, wall_s) if session.is_lead else {}

    return session.step("leftovers", Theme.ACCESS, look, _judge_leftovers)


def _without_leftovers(
    scratch: ScratchDirectory, wall_s: float
) -> dict[str, FailedOperation | None]:
    gone: dict[str, FailedOperation | None] = {}
    for name in scratch.leftovers(wall_s):
        try:
            scratch.remove_leftover(name)
            gone[name] = None
        except StorageError as error:
            gone[name] = FailedOperation.of(error)
    return gone


def _judge_leftovers(
    _: Sequence[World], answers: Sequence[dict[str, FailedOperation | None]]
) -> tuple[Finding, ...]:
    found = {name: refusal for removals in answers for name, refusal in removals.items()}
    stay = sorted(name for name, refusal in found.items() if refusal is not None)
    if stay:
        return (
            Finding(
                "leftovers",
                Theme.ACCESS,
                Verdict.WARN,
                f"left by killed doctors, and not removed: {', '.join(stay)}",
                "they take space, and nothing else",
                "look into them, and remove them by hand",
                {"stay": stay},
            ),
        )
    if not found:
        return ()
    text = f"removed what {counted(len(found), 'killed doctor')} left: {', '.join(sorted(found))}"
    return (Finding("leftovers", Theme.ACCESS, Verdict.OK, text, data={"removed": sorted(found)}),)


@check(Need.WRITE)
def cleaning(session: Session) -> Findings:
    """Remove our own scratch directory; if something stays, that is a finding."""
    return session.step(
        "cleaning",
        Theme.ACCESS,
        lambda: session.scratch.clean() if session.is_lead else None,
        lambda _worlds, _answers: (),
    )
