"""Everything but tensors: objects, directories, runs, and what is there.

    save_object  load_object       local: any process, inside or outside a group, no collective
    latest  list_checkpoints       local, read-only
    ensure_dir  checkpoint_dir     collective
    prepare_run                    collective

``save`` and ``load`` of state dicts live in ``ckptfs.dcp.api``. Collective calls are made by every
rank of ``process_group`` (default: all) and end on each with the same value or the same error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal

from ckptfs.commit.artifact import writing_directory
from ckptfs.commit.beside import list_unlogged, newest_there
from ckptfs.commit.catalog import Checkpoint, logged
from ckptfs.commit.claim import Mode, Takeover, claim
from ckptfs.commit.entries import Kind
from ckptfs.commit.fetching import fetched
from ckptfs.commit.locate import locate_directory, reading_seat
from ckptfs.commit.looking import looking_at, refuse_gap
from ckptfs.commit.misplaced import check_run_uri, refuse_no_run
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat, step_of
from ckptfs.commit.ops import drive
from ckptfs.commit.run import Caller, Run
from ckptfs.commit.spec import SaveSpec
from ckptfs.commit.unlogged import Unlogged, check_unlogged
from ckptfs.errors import IntegrityError, NotFoundError, StateError
from ckptfs.storage.base import Shape
from ckptfs.storage.registry import open_storage
from ckptfs.topology.directory import ensure_dir as ensure_dir_at
from ckptfs.uri import Uri, options_of

__all__ = [
    "checkpoint_dir",
    "ensure_dir",
    "latest",
    "list_checkpoints",
    "load_object",
    "prepare_run",
    "save_object",
]

logger = logging.getLogger(__name__)

Scope = Literal["auto", "shared", "node"]


class _DirMode(Enum):
    WRITE = "write"
    READ = "read"


_TRIES = 8  # a directory that another process renames under us is found at the next look


def save_object(obj: object, uri: Any, *, storage_options: Mapping[str, Any] | None = None) -> Uri:
    """Save one object with ``torch.save``, whole or not at all; durable on return.

    Local: any process may call it, outside any process group too, also into a step directory that
    other processes are creating or have not created yet; its parents are made as needed. Files that
    lie in a step directory this way stay there when the step is committed, replaced or deleted.
    An existing object is replaced atomically. After a crash the old object or the new one is there.
    NoSpaceError, AccessError, ...: the old object is untouched.
    """
    import torch

    target = Uri.parse(uri)
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    options = {**options_of(uri), **(storage_options or {})}
    storage = open_storage(target.parent, options)
    try:
        for left in reversed(range(_TRIES)):
            try:
                storage.make_dir("")
                with storage.open_write(target.name, size_hint_bytes=buffer.tell()) as writer:
                    writer.write(buffer.getbuffer())
                storage.sync("")
            except NotFoundError:
                # The step directory was replaced by its committed one between two calls.
                if not left:
                    raise
            else:
                return target
        raise AssertionError("unreachable")
    finally:
        storage.close()


def load_object(
    uri: Any,
    *,
    trusted: bool = False,
    map_location: Any = "cpu",
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load what ``save_object`` saved. Local.

    trusted=False loads tensors, numbers, strings and containers only: unpickling anything else can
    run code, so an object of your own class needs trusted=True. NotFoundError; IntegrityError.
    """
    import torch

    from ckptfs.dcp.pickle_scan import advise_on_torch, check_archive

    target = Uri.parse(uri)
    options = {**options_of(uri), **(storage_options or {})}
    storage = open_storage(target.parent, options)
    try:
        storage.refresh("")
        with storage.open_read(target.name) as reader:  # as large as it is: it may hold a model
            raw = bytearray(reader.size_bytes)
            reader.read_into(0, memoryview(raw))
        data = io.BytesIO(raw)
    finally:
        storage.close()
    try:
        if not trusted:
            advise_on_torch(torch.__version__)
            check_archive(data)
        return torch.load(data, map_location=map_location, weights_only=not trusted)
    except Exception as error:
        raise IntegrityError(
            f"not loadable: {type(error).__name__}: {error}",
            uri=target,
            hint="trusted=True loads objects of any class; do that only with files you wrote",
        ) from error


def list_checkpoints(
    run_uri: Any, *, storage_options: Mapping[str, Any] | None = None
) -> list[Checkpoint]:
    """The committed checkpoints of a run, oldest commit first. Local, read-only.

    Checkpoints that lie there without a log (copied, or written by stock torch) come first, in the
    order that ``latest`` goes by. On
    node-local storage this node's log answers; a save whose outcome it does not record is left out.
    An empty or missing run gives an empty list. StateError: it is a checkpoint or a file. StorageError: the
    place cannot be read, or there is no such bucket.
    """
    with looking_at(run_uri, storage_options) as look:
        if not look.views:
            drive(refuse_no_run(look.root, look.storage.capabilities.shape), look.storage)
        loose = drive(list_unlogged(look.views, look.root), look.storage)
        return [*loose, *logged(look.views, look.root)]


def latest(
    run_uri: Any,
    kind: Literal["checkpoint", "weights", "directory"] = "checkpoint",
    *,
    unlogged: Literal["error", "ignore"] = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """The last committed checkpoint, by commit order and never by the largest step. Local.

    None when there is none. kind: "directory" are those that a framework wrote as files. Saves of a
    failing run are left out. Where no log tells, of those that have a manifest or `.metadata`: the one
    with the largest step, which stock torch tells by the number that ends the name, where all are named
    alike; else the one that was written last. StorageError: the place cannot be read (a run that is not
    there is None, a bucket that is not there is NotFoundError). StateError: it is a checkpoint or a file.

    AmbiguousCheckpointError: stock torch saved a checkpoint into the run after its newest commit, so that
    the newest commit is not the newest there is. unlogged="ignore" takes that commit all the same.
    ManifestError: entries of the log are missing and later ones are there, so that what can be read may
    be an old state. IncompleteCheckpointError: the last one was removed by hand, of which the log says
    nothing before ``ckptfs rm``, or a save of its name, records it.
    """
    wanted, policy = Kind(kind), Unlogged(unlogged)
    with looking_at(run_uri, storage_options) as look:
        refuse_gap(look)
        shape = look.storage.capabilities.shape
        if wanted is not Kind.WEIGHTS and policy is Unlogged.ERROR:
            drive(check_unlogged(look.views, look.root, shape), look.storage)
        if not look.views:
            drive(refuse_no_run(look.root, shape), look.storage)
        return drive(newest_there(look.views, look.root, wanted, shape), look.storage)


def ensure_dir(
    uri: Any,
    *,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> Uri:
    """Collective. Make a directory once per domain; every rank can use it when this returns.

    Returns its absolute URI, equal on all ranks. Existing is success. The owner of each domain makes
    it, then one process per node confirms through its own path that it is the same one. Needs no
    process group under torchrun. Errors reach all ranks. On object stores nothing is done: there is
    no directory to make, and no request is sent.
    """
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with control_for(process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        if control.step("kind", lambda: _has_directories(target, place), any):
            with open_seat(target.parent, control, place, write=True) as seat:
                ensure_dir_at(control, seat.storage, seat.placement, target.name)
    return target


def _has_directories(uri: Uri, place: Place) -> bool:
    """False on object stores: there nothing is made, and above a run nothing may be permitted."""
    storage = open_storage(uri, place.storage_options)
    try:
        mounted = storage.local_path("") is not None
        return mounted or storage.capabilities.shape is Shape.FILESYSTEM
    finally:
        storage.close()


def prepare_run(
    run_uri: Any,
    mode: Literal["resume", "overwrite", "fail"] = "resume",
    takeover: Literal["auto", "never", "force"] = "auto",
    *,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> Run:
    """Collective. Claim a run: older writers are fenced, interrupted saves recovered.

    mode: "resume" goes on with what is there; "overwrite" takes it out of the catalog now and
    deletes it after the first commit, moving nothing before; "fail" is CommitConflictError if there
    is anything. takeover: "auto" takes a run from the same job, from a dead process of this node, or
    from an owner whose lease stood still for 20 s; "never" does not wait; "force" does not ask.
    RunBusyError names the living owner. Leave the returned Run with ``with`` or ``release()``; one that
    nobody refers to any more is released too, once Python has collected it.

    What fails is the same error on all ranks. After a crash in it, or without a release, every
    committed checkpoint is there, and the next owner goes on with what was left undone.
    """
    place = Place({**options_of(run_uri), **(storage_options or {})}, scope, domain)
    modes, takeovers = Mode(mode), Takeover(takeover)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(control_for(process_group, timeout_s))
        root = agree_uri(control, run_uri)
        check_run_uri(control, root, place.storage_options)
        seat = stack.enter_context(open_seat(root, control, place, write=True))
        run = claim(seat, modes, takeovers, caller=Caller("prepare_run()"))
        run.closing.push(stack.pop_all())
        return run


@contextlib.contextmanager
def checkpoint_dir(
    uri: Any,
    mode: Literal["write", "read"] = "write",
    *,
    step: int | None = None,
    run: Run | None = None,
    into: str | os.PathLike[str] | None = None,
    follow_links: bool = False,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> Iterator[str]:
    """Collective. A local directory for tools that know nothing but ``open``.

    mode="write": a path to write any files into, committed as one when all ranks leave. On a mounted
    filesystem the attempt's own directory, shared by the ranks of a domain; elsewhere a directory of
    this rank whose files are uploaded on leaving. An exception inside, on any rank, commits nothing
    and is raised on all ranks. A name that is committed already is CommitConflictError: files with
    fixed names never overwrite a step. Nothing may go on writing there after the block.

    mode="read": a path with the files of a committed checkpoint, of any kind, stock ones too; nobody
    may write into it. On a mounted filesystem the checkpoint itself; elsewhere one directory for all
    ranks of a node, downloaded by them together, each file compared with its digest, and removed when
    the last of them has left. into: download there instead, whole or not at all, and keep it.
    follow_links: download what symbolic links that lead out of the checkpoint lead to; a SymlinkError otherwise.
    NotFoundError, IncompleteCheckpointError: there is no such checkpoint, or not all of it.
    AlreadyExistsError: into has files. Damaged files are IntegrityErrors in a CollectiveError.
    """
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    if _DirMode(mode) is _DirMode.READ:
        with (
            control_for(process_group, timeout_s) as control,
            contextlib.ExitStack() as stack,
        ):
            target = agree_uri(control, uri)
            seat, name = stack.enter_context(reading_seat(target, control, place))
            found = locate_directory(seat, name)
            kept = None if into is None else os.fspath(into)
            yield stack.enter_context(fetched(seat, found, into=kept, follow_links=follow_links))
        return
    if into is not None:
        raise StateError(f"into is {into!r} and nothing is read", hint='it goes with mode="read"')
    with contextlib.ExitStack() as stack:
        if run is None:
            control = stack.enter_context(control_for(process_group, timeout_s))
            target = agree_uri(control, uri)
            seat = stack.enter_context(open_seat(target.parent, control, place, write=True))
        else:
            seat = run.seat
            target = agree_uri(seat.control, uri)
            run.check(target)
        spec = SaveSpec(
            target.name,
            step_of(target.name, step),
            artifact=Kind.DIRECTORY,
            run=None if run is None else run.generation,
        )
        yield stack.enter_context(writing_directory(seat, spec, []))
