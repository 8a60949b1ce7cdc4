"""What a manager is given, checked once, and the run that it opens and claims with it.

The managers take plain keywords, as people type them. They become closed types here, and all other
code sees these:

    Where(uri, place, ...)   the run, how to reach it, and who takes part
    Settings(...)            how it saves and what it keeps
    Names(...), Template     how its checkpoints are named
    Pointer(...)             the file that names the newest checkpoint

Step directories are named by one template, which is matched exactly, never by substring:

    Template("step_{N}").name(100)              -> "step_100"
    Template("step_{N}").step_of("step_100")    -> 100
    Template("step_{N}").step_of("step_100_mine") -> None: not a directory of this manager

Retention that looks for a substring deletes the user's backups too (torchtitan #4292).

``RunHandle`` holds what a manager works with, and opens it when it is first needed:

    RunHandle(where).control   the control plane, opened at the first collective call
          .reading()           a session that appends nothing: for restore, steps, latest
          .claim()             the claimed run, from the first save until close

A manager that only restores never claims the run, so an evaluation job does not disturb the job
that trains.

``Pointer`` is a small file in the run, next to its step directories. It names the newest
checkpoint, for readers that do not know ckptfs:

    run/global_step100/
    run/latest                 "global_step100"

The pointer moves after the commit and before retention, and is replaced as a whole. A reader finds
the name of a committed checkpoint in it at any time and after any crash. ckptfs itself never relies
on it: the log decides which checkpoint is the newest.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.catalog.catalog import check_run_uri, list_live
from ckptfs.commit.catalog.locate import owner_view
from ckptfs.commit.catalog.unlogged import Unlogged
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.operations import read_limited
from ckptfs.commit.ownership.claim import Mode, Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.paths import CONTROL
from ckptfs.commit.save.spec import checked_step
from ckptfs.commit.session import (
    Place,
    RunSession,
    agree_uri,
    control_for,
    open_session,
    start_session,
)
from ckptfs.control.control import Control
from ckptfs.dcp.saving import WriteOptions
from ckptfs.errors import ArgumentChoice, NotFoundError, StateError
from ckptfs.manager.listeners import Listener
from ckptfs.manager.schedule import Rendezvous
from ckptfs.replication.tiers import Copy
from ckptfs.retention.policy import Keep
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri

__all__ = [
    "IfSlow",
    "Names",
    "Pointer",
    "RunHandle",
    "SaveMode",
    "Settings",
    "Template",
    "Where",
    "metrics_of",
]

_PLACE = re.compile(r"\{N(?::0(?P<width>[1-9]\d?))?\}")


@dataclass(frozen=True, slots=True)
class Template:
    """How steps are named: text with one ``{N}``, or ``{N:08}`` for at least eight digits.

    Raises StateError if a name could not be read back: no placeholder, two of them, a slash, or a
    digit next to the placeholder.

    Attributes:
        text: ``step-{N}``, ``checkpoint-{N}``, ``global_step_{N}``, ...
    """

    text: str

    def __post_init__(self) -> None:
        places = list(_PLACE.finditer(self.text))
        if len(places) != 1:
            raise StateError(
                f"name template {self.text!r} needs one {{N}} for the step",
                hint='for example name="step_{N}" or name="checkpoint-{N:08}"',
            )
        before, after = self.text[: places[0].start()], self.text[places[0].end() :]
        fixed_text = before + after
        if set(fixed_text) & set("/\\\0{}") or self.text.startswith(".") or fixed_text == CONTROL:
            raise StateError(
                f"name template {self.text!r} is not the name of a directory",
                hint="use letters, digits, - and _ around {N}; the directory is made directly in "
                "the run",
            )
        if before[-1:].isdigit() or after[:1].isdigit():
            raise StateError(
                f"name template {self.text!r} has a digit next to the step",
                hint="step 1 and step 11 could get one name: put a letter, - or _ between them",
            )

    def name(self, step: int) -> str:
        """Return the name of a step. Raises StateError for a negative step."""
        step = checked_step(step)
        return _PLACE.sub(lambda place: f"{step:0{int(place['width'] or 1)}d}", self.text)

    def step_of(self, name: str) -> int | None:
        """Return the step that has this name, None if the template did not make the name."""
        place = next(_PLACE.finditer(self.text))
        before, after = self.text[: place.start()], self.text[place.end() :]
        found = re.fullmatch(re.escape(before) + r"([0-9]+)" + re.escape(after), name)
        if found is None:
            return None
        step = int(found[1])
        # "step_007" is not the name of step 7 here: another program made it.
        return step if self.name(step) == name else None


@dataclass(frozen=True, slots=True)
class Names:
    """The template of each kind of save.

    ``main`` is the kind of full checkpoints: only their steps count.
    """

    templates: Mapping[Kind, Template]
    main: Kind

    @classmethod
    def of_states(cls, checkpoint: Template, weights: Template) -> Names:
        """Names for full checkpoints, and for weights next to them.

        Raises StateError if both templates could make the same name.
        """
        if any(checkpoint.name(n) == weights.name(n) for n in (1, 10**9)):
            raise StateError(
                f"checkpoints and weights have the same name template {checkpoint.text!r}",
                hint="pass another template as weights_name=",
            )
        return cls({Kind.CHECKPOINT: checkpoint, Kind.WEIGHTS: weights}, Kind.CHECKPOINT)

    @classmethod
    def of_directories(cls, template: Template) -> Names:
        """Names for directories that a framework wrote."""
        return cls({Kind.DIRECTORY: template}, Kind.DIRECTORY)

    def of(self, kind: Kind) -> Template:
        """Return the template of a kind.

        Raises StateError for one that this manager does not save.
        """
        if kind not in self.templates:
            kinds = " and ".join(f"{known.value} saves" for known in self.templates)
            raise StateError(f"this manager saves {kinds}, not {kind.value}")
        return self.templates[kind]

    def is_ours(self, seal: Seal) -> bool:
        """Whether a manager with these names made the save. Other saves are never deleted."""
        template = self.templates.get(seal.artifact)
        return template is not None and template.step_of(seal.name) is not None


# -- the pointer file ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pointer:
    """A small file in the run that names its newest checkpoint.

    Attributes:
        file: Its name, directly in the run.
        text: Makes the content of the file from the name of a checkpoint.
    """

    file: str = "latest"
    text: Callable[[str], str] = str

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or self.file.startswith("."):
            raise StateError(f"pointer {self.file!r} is not the name of a file in the run")

    def read(self, storage: Storage) -> str | None:
        """Return the content of the file, or None if there is none. Local.

        Another program may have written the file.
        """
        try:
            return read_limited(storage, self.file).decode().strip()
        except NotFoundError:
            return None

    def move(self, session: RunSession, name: str) -> None:
        """Let the file name the checkpoint ``name``. Collective, after a commit.

        The change is durable when this returns. Errors of the storage are raised.
        """
        data = self.text(name).encode()

        def replace() -> None:
            if session.placement.is_owner:
                session.storage.replace(self.file, data)

        session.control.step(f"move {self.file}", replace)

    def follow(self, session: RunSession, is_ours: Callable[[Seal], bool]) -> None:
        """Let the file name the newest checkpoint of the log. Collective, after a claim.

        An earlier job may have died after its commit and before it moved the pointer. The pointer
        may name only saves for which ``is_ours`` is true.
        """

        def replace() -> None:
            view = owner_view(session)
            lives = [] if view is None else list_live(dict([view]))
            names = [seal.name for seal in lives if is_ours(seal) and not seal.failure]
            if not names and view is not None and view[1].saves:
                # no checkpoint of ours is left that it could name
                session.storage.remove(self.file)
            if names:
                session.storage.replace(self.file, self.text(names[-1]).encode())

        session.control.step(f"follow with {self.file}", replace)


# -- the options -----------------------------------------------------------------------------------


class SaveMode(ArgumentChoice, parameter="mode"):
    """Whether ``save`` returns when the checkpoint is committed, or when the state is staged."""

    SYNC = "sync"
    ASYNC = "async"


class IfSlow(ArgumentChoice, parameter="if_slow"):
    """What an asynchronous save does when as many saves as allowed are under way."""

    DELAY = "delay"  # wait for the oldest
    SKIP = "skip"  # save nothing this time, and report that


@dataclass(frozen=True, slots=True)
class Settings:
    """How a manager saves and what it keeps. Raises StateError for a number that makes no sense."""

    names: Names
    keep: Keep
    mode: SaveMode = SaveMode.SYNC
    if_slow: IfSlow = IfSlow.DELAY
    max_in_flight: int = 1
    host_memory_bytes: int | None = None
    delete_grace_s: float = 0.0
    write: WriteOptions = field(default_factory=WriteOptions)
    per_rank: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] = ()
    on_commit: Callable[[str], None] | None = None
    copies: tuple[Copy, ...] = ()
    takeover: Takeover = Takeover.AUTO
    pointer: Pointer | None = None
    begin_again: bool = False
    unlogged: Unlogged = Unlogged.ERROR  # for restores without an argument of their own

    def unlogged_of(self, policy: str | None) -> Unlogged:
        """Return the policy of one restore: its own, or else the manager's."""
        return self.unlogged if policy is None else Unlogged(policy)

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise StateError(f"max_in_flight is {self.max_in_flight}; it is at least 1")
        if not (self.delete_grace_s >= 0 and math.isfinite(self.delete_grace_s)):
            raise StateError(f"delete_grace_s is {self.delete_grace_s}; it is a number of seconds")
        if self.host_memory_bytes is not None and self.host_memory_bytes < 0:
            raise StateError(f"host_memory_bytes is {self.host_memory_bytes}; it is not negative")


def metrics_of(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """Return metrics as a seal holds them, by name. Raises StateError for what is no number."""
    found = []
    for name, value in sorted((metrics or {}).items()):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise StateError(
                f"metric {name!r} is a {type(value).__name__}, not a number",
                hint="pass floats: loss.item() for a tensor",
            ) from None
        # JSON has no NaN; such a metric has no information, so it is left out.
        if math.isfinite(number):
            found.append((str(name), number))
    return tuple(found)


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """What the user passed about the place: the run, how to reach it, and who takes part."""

    uri: Any
    place: Place
    process_group: Any = None
    timeout_s: float | None = None
    takeover: Takeover = Takeover.AUTO


class RunHandle:
    """What a manager works with. Opened piece by piece, closed as a whole.

    Only the thread that makes the manager's calls may use it.
    """

    def __init__(
        self, where: Where, *, control: Control | None = None, storage: Storage | None = None
    ) -> None:
        """Use the caller's ``control`` and ``storage`` where given, instead of opening them.

        The caller stays responsible for closing both.
        """
        self.where = where
        self.owner = "a manager"  # the name in messages of the object that claims the run
        self._storage = storage
        self._stack = contextlib.ExitStack()
        self._controls = contextlib.ExitStack()  # closed last; nothing in it refers to the run
        self._guests = contextlib.ExitStack()  # users of control and run: closed first
        self._control: Control | None = control
        self._root: Uri | None = None
        self._rendezvous: Rendezvous | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def control(self) -> Control:
        """The control plane. Collective at its first use.

        Raises StateError if there are several ranks and no process group, or if the manager is
        closed.
        """
        self.check_open()
        if self._control is None:
            control = self._controls.enter_context(
                control_for(self.where.process_group, self.where.timeout_s)
            )
            if control.size > 1 and not control.world.has_group:
                raise StateError(
                    f"WORLD_SIZE is {control.size}, but torch.distributed is not initialized",
                    rank=control.rank,
                    hint="call torch.distributed.init_process_group() before using the manager",
                )
            self._control = control
        if self._rendezvous is None and self._control.size > 1:
            # Made now, while all ranks are present: when a run fails, some of them are missing.
            self._rendezvous = Rendezvous(self._control)
            self._guests.callback(self._rendezvous.close)
        return self._control

    @property
    def root(self) -> Uri:
        """The run's absolute URI, the same on all ranks. Collective at its first use."""
        if self._root is None:
            self._root = agree_uri(self.control, self.where.uri)
        return self._root

    @contextlib.contextmanager
    def reading(self) -> Iterator[RunSession]:
        """Yield a session that needs read permission only. Collective."""
        with self._open_session(write=False) as session:
            yield session

    def claim(self, *, defer_deletes: bool = False) -> Run:
        """Claim the run. Collective, and called once.

        Raises RunBusyError if a living owner holds the run.
        """
        self.check_open()
        options = self.where.place.storage_options
        check_run_uri(self.control, self.root, options, self._storage)
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(self._open_session(write=True))
            run = claim(
                session,
                Mode.RESUME,
                self.where.takeover,
                defer_deletes=defer_deletes,
                caller=Caller(self.owner, behind=self._controls),
            )
            run.closing.push(stack.pop_all())
        self._stack.callback(run.release)
        return run

    def reach_all(self, what: str, timeout_s: float) -> None:
        """Return when every rank has called this, or fail on every rank. Collective.

        It is for a run that fails. Raises DeadlineError or CollectiveError if not all ranks called
        within ``timeout_s`` seconds.
        """
        if self.control.size > 1 and self._rendezvous is not None:
            self._rendezvous.reach(what, timeout_s)

    def before_release(self, close: Callable[[], object]) -> None:
        """Register a function to call when the manager closes, before the run is released."""
        self._guests.callback(close)

    def _open_session(self, *, write: bool) -> contextlib.AbstractContextManager[RunSession]:
        # Not a generator: the run keeps the context until its end, and a generator's frame would keep
        # the manager alive.
        if self._storage is not None:
            session = start_session(self.control, self._storage, self.where.place, write=write)
            return contextlib.nullcontext(session)
        return open_session(self.root, self.control, self.where.place, write=write)

    @property
    def is_closed(self) -> bool:
        """Whether close() was called, or this is the child of a fork: the run is its parent's."""
        return self._closed or os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise StateError if it is closed."""
        if self.is_closed:
            raise StateError("the manager is closed", uri=self._root, hint="make another one")

    def close(self) -> None:
        """Release the run and leave the control plane. Local. A second call does nothing."""
        if not self.is_closed:
            self._closed = True
            with self._controls, self._stack:
                self._guests.close()
