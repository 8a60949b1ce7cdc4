"""Everything but tensors: objects, directories, runs, and what is there.

    save_object  load_object       local: any process, inside or outside a group, no collective
    latest  list_checkpoints       local, read-only
    ensure_dir  checkpoint_dir     collective
    prepare_run                    collective

``save`` and ``load`` of state dicts are in ``ckptfs.dcp.api``. Collective calls are made by every
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

from ckptfs.commit.catalog.catalog import (
    Checkpoint,
    check_run_uri,
    logged,
    looking_at,
    refuse_no_run,
    refuse_partial_log,
)
from ckptfs.commit.catalog.locate import locate_directory, reading_session
from ckptfs.commit.catalog.unlogged import Unlogged, check_unlogged, list_unlogged, newest_unlogged
from ckptfs.commit.directory_checkpoints.read import fetched
from ckptfs.commit.directory_checkpoints.write import writing_directory
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.operations import Program, drive, settled, side_by_side
from ckptfs.commit.ownership.claim import Mode, Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, agree_uri, control_for, open_session, step_of
from ckptfs.errors import CkptfsError, IntegrityError, NotFoundError, StateError
from ckptfs.storage.base import Shape
from ckptfs.storage.inflight import log_fields
from ckptfs.storage.registry import open_storage
from ckptfs.topology.ensure_dir import ensure_dir as ensure_dir_at
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

logger = logging.getLogger("ckptfs")

Scope = Literal["auto", "shared", "node"]


class _DirMode(Enum):
    WRITE = "write"
    READ = "read"


_TRIES = 8  # a directory that another process renames in between is found at the next try


def save_object(obj: object, uri: Any, *, storage_options: Mapping[str, Any] | None = None) -> Uri:
    """Save one object with ``torch.save``, whole or not at all; durable on return.

    Local: any process may call it, outside any process group too, also into a step directory that
    other processes are creating or have not created yet; its parents are made as needed. Files that
    are saved into a step directory this way stay there when the step is committed, replaced or
    deleted. An existing object is replaced atomically. After a crash the old object or the new one
    is there.

    Args:
        obj: Anything that ``torch.save`` takes.
        uri: The file, ``s3://bucket/run/step_100/driver.pt``.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.

    Returns:
        The absolute URI of the file.

    Raises:
        UriError: The URI cannot be read, or its driver is not installed.
        NoSpaceError: The storage is full. The old object is untouched.
        AccessError: The file may not be written. The old object is untouched.
        StorageError: Any other failure of the storage; after an AnswerLostError the new object may
            be there.
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
                    writer.write(memoryview(buffer.getvalue()))
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
    """Load what ``save_object`` saved. Local: any process may call it.

    Args:
        uri: The file.
        trusted: False loads tensors, numbers, strings and containers only. Unpickling anything else
            can run code, so an object of your own class needs True.
        map_location: As for ``torch.load``: where tensors go.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.

    Returns:
        The object.

    Raises:
        UriError: The URI cannot be read, or its driver is not installed.
        NotFoundError: There is no such file.
        IntegrityError: The file is damaged, or holds an object that needs ``trusted=True``.
        StorageError: Any other failure of the storage.
    """
    import torch

    from ckptfs.dcp.metadata.pickle_scan import advise_on_torch, check_archive

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

    Checkpoints without a log (copied, or written by stock torch) come first, in the order that
    ``latest`` uses. On node-local storage this node's log answers; a save is left out if that log
    does not record its outcome.

    Args:
        run_uri: The run, the parent of its checkpoints.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of
            ``run_uri``, if it has any.

    Returns:
        The checkpoints; an empty list for an empty or missing run.

    Raises:
        StateError: It is a checkpoint or a file.
        StorageError: The storage cannot be read, or there is no such bucket.
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
    """The last committed checkpoint, by commit order and never by the largest step.

    Local, read-only. Saves of a failing run are left out. Without a log, checkpoints with a
    manifest or `.metadata` count. Of these it is the one with the largest step, which for stock
    torch is the number that ends the name, if all names are alike; otherwise it is the one that was
    written last.

    Args:
        run_uri: The run, the parent of its checkpoints.
        kind: "checkpoint"; "weights", which a manager saves next to full checkpoints; or
            "directory", which a framework wrote as files. Each has its own latest.
        unlogged: "error" raises AmbiguousCheckpointError if stock torch saved a checkpoint into the
            run after its newest commit; "ignore" takes that commit all the same.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of
            ``run_uri``, if it has any.

    Returns:
        The checkpoint; None when there is none, or no run.

    Raises:
        AmbiguousCheckpointError: Stock torch saved a checkpoint into the run after its newest
            commit, so that the newest commit is not the newest there is.
        ManifestError: Entries of the log are missing and later ones are there, so that what can be
            read may be an old state.
        IncompleteCheckpointError: The last one was removed by hand. The log does not show that
            before ``ckptfs rm``, or a save of its name, records it.
        StateError: It is a checkpoint or a file.
        NotFoundError: There is no such bucket.
        StorageError: The storage cannot be read.
    """
    wanted, policy = Kind(kind), Unlogged(unlogged)
    with looking_at(run_uri, storage_options) as look:
        views, root, shape = look.views, look.root, look.storage.capabilities.shape
        # Without a log, or its domain, each checkpoint speaks for itself.
        checks: list[Program[Any]] = [refuse_partial_log(look)] if views else []
        if wanted is not Kind.WEIGHTS and policy is Unlogged.ERROR:
            checks.append(check_unlogged(views, root, shape))
        if not views:
            checks.append(refuse_no_run(root, shape))
        checks.append(newest_unlogged(views, root, wanted, shape))
        found = drive(side_by_side(*map(settled, checks)), look.storage)
        for one in found:
            if isinstance(one, CkptfsError):
                raise one  # the first in this order, not the first that happened
        newest: Checkpoint | None = found[-1]
        return newest


def ensure_dir(
    uri: Any,
    *,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> Uri:
    """Make a directory once per domain; every rank can use it when this returns. Collective.

    The owner of each domain makes the directory, then one process per node confirms through its own
    path that it is the same one. An existing directory is success. Under torchrun no process group
    is needed. On object stores nothing is done: there is no directory to make, and no request is
    sent. After a crash the directory is there or not, and the call can be repeated.

    Args:
        uri: The directory, the same on all ranks.
        process_group: The ranks that take part; None: the default group, or torchrun's ranks if
            there is none.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.
        scope: Which ranks see the same storage: "auto" finds out by a probe, with "shared" all of
            them do, with "node" those of a node.
        domain: A name in place of ``scope``: ranks with the same name see the same storage; None:
            by ``scope``.

    Returns:
        Its absolute URI, equal on all ranks.

    Raises:
        UriError: The URI cannot be read, or ranks were given different ones.
        StateError: ``scope`` or ``domain`` contradicts what the storage shows.
        CollectiveError: Some ranks failed, such as with an AccessError; every rank raises this same
            error.
        DeadlineError: A rank was silent for longer than ``timeout_s``.
    """
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with control_for(process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        if control.step("kind", lambda: _has_directories(target, place), any):
            with open_session(target.parent, control, place, write=True) as session:
                ensure_dir_at(control, session.storage, session.placement, target.name)
    return target


def _has_directories(uri: Uri, place: Place) -> bool:
    """False on object stores: no directory is made there, and access above a run may be denied."""
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
    """Claim a run: older writers are fenced, interrupted saves recovered. Collective.

    Leave the returned Run with ``with`` or ``release()``. A Run without references is released too,
    once Python has collected it. A failure is the same error on all ranks. After a crash during the
    call, or without a release, every committed checkpoint is there, and the next owner continues
    with what was left undone.

    Args:
        run_uri: The run, the parent of its checkpoints; the same on all ranks.
        mode: "resume" continues with what is there; "overwrite" takes it out of the catalog now and
            deletes it after the first commit, moving nothing before; "fail" refuses a run that has
            anything.
        takeover: "auto" takes a run from the same job, from a dead process of this node, or from an
            owner that has not renewed its lease for 20 s; "never" does not wait for that; "force"
            takes it in any case.
        process_group: The ranks that take part; None: the default group, or torchrun's ranks if
            there is none.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of
            ``run_uri``, if it has any.
        scope: Which ranks see the same storage: "auto" finds out by a probe, with "shared" all of
            them do, with "node" those of a node.
        domain: A name in place of ``scope``: ranks with the same name see the same storage; None:
            by ``scope``.

    Returns:
        The held run, for ``save(..., run=run)``.

    Raises:
        CommitConflictError: ``mode="fail"``, and the run has something.
        RunBusyError: A living owner holds the run; the message names it.
        StateError: ``run_uri`` is a checkpoint or a file, or ``scope`` or ``domain`` contradicts
            what the storage shows.
        UriError: The URI cannot be read, or ranks were given different ones.
        CollectiveError: Some ranks failed; every rank raises this same error.
        DeadlineError: A rank was silent for longer than ``timeout_s``.
    """
    place = Place({**options_of(run_uri), **(storage_options or {})}, scope, domain)
    modes, takeovers = Mode(mode), Takeover(takeover)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(control_for(process_group, timeout_s))
        root = agree_uri(control, run_uri)
        check_run_uri(control, root, place.storage_options)
        session = stack.enter_context(open_session(root, control, place, write=True))
        with log_fields(run=str(root), rank=control.rank):
            run = claim(session, modes, takeovers, caller=Caller("prepare_run()"))
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
    """A local directory for tools that only use ``open``. Collective.

    To write, the path takes any files, which are committed as one when all ranks leave. On a
    mounted filesystem it is the attempt's own directory, shared by the ranks of a domain; elsewhere
    it is a directory of this rank, and its files are uploaded on leaving. An exception inside, on
    any rank, commits nothing and is raised on all ranks. Files with fixed names never overwrite a
    step. Nothing may write there after the block.

    To read, the path has the files of a committed checkpoint, of any kind, stock ones too; no
    process may write into it. On a mounted filesystem it is the checkpoint itself. Elsewhere it is
    one directory for all ranks of a node, which download it together and compare each file with its
    digest; it is removed when the last of them has left.

    Args:
        uri: Run and name, the same on all ranks.
        mode: "write" or "read".
        step: To write: completed optimizer steps; None takes the number that ends the name.
        run: To write: a held run, which fences the save; None: the save is exclusive by name only.
        into: To read: a directory to download to, whole or not at all, and to keep; None: as above.
        follow_links: To read: download the targets of symbolic links that lead out of the
            checkpoint.
        process_group: The ranks that take part; None: the default group, or torchrun's ranks if
            there is none.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.
        scope: Which ranks see the same storage: "auto" finds out by a probe, with "shared" all of
            them do, with "node" those of a node.
        domain: A name in place of ``scope``: ranks with the same name see the same storage; None:
            by ``scope``.

    Yields:
        The path.

    Raises:
        CommitConflictError: To write: the name is committed already, or another save of it is under
            way.
        CommitInDoubtError: To write: whether it is committed is not known; the next save settles
            it.
        FencedError: To write: ``run`` has a newer owner; nothing was committed.
        NotFoundError: To read: there is no such checkpoint.
        IncompleteCheckpointError: To read: not all of it is there.
        AlreadyExistsError: ``into`` has files.
        SymlinkError: A symbolic link leads out of the checkpoint, and ``follow_links`` is False.
        StateError: ``into`` without ``mode="read"``, or ``uri`` is not in ``run``.
        CollectiveError: Some ranks failed; every rank raises this same error. A damaged file is an
            IntegrityError in it.
        IntegrityError: A CollectiveError of nothing but damaged files is of this type too.
    """
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    if _DirMode(mode) is _DirMode.READ:
        with (
            control_for(process_group, timeout_s) as control,
            contextlib.ExitStack() as stack,
        ):
            session, target, name = stack.enter_context(reading_session(uri, control, place))
            found = locate_directory(session, name)
            path = None if into is None else os.fspath(into)
            yield stack.enter_context(fetched(session, found, into=path, follow_links=follow_links))
        return
    if into is not None:
        raise StateError(f"into is {into!r} and nothing is read", hint='it goes with mode="read"')
    with contextlib.ExitStack() as stack:
        if run is None:
            control = stack.enter_context(control_for(process_group, timeout_s))
            target = agree_uri(control, uri)
            session = stack.enter_context(open_session(target.parent, control, place, write=True))
        else:
            session = run.session
            target = agree_uri(session.control, uri)
            run.check(target)
        spec = SaveSpec(
            target.name,
            step_of(target.name, step),
            artifact=Kind.DIRECTORY,
            run=None if run is None else run.generation,
        )
        yield stack.enter_context(writing_directory(session, spec, []))
