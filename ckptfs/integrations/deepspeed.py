"""DeepSpeed: its checkpoint directories, committed whole at a URI.

    engine, *_ = deepspeed.initialize(...)
    store = CkptfsEngine("/scratch/ckpt", "s3://bucket/run", keep_latest=3, mode="async").attach(engine)
    engine.load_checkpoint("/scratch/ckpt")        the newest committed one, on an empty machine too
    engine.save_checkpoint("/scratch/ckpt")        whole at s3://bucket/run/global_step100, or not at all
    store.close()

    save     DeepSpeed writes below root; a rank's failure is kept until all ranks are in commit
    commit   every rank gets the failure, or the directory is published; then `latest` moves, at both places
    load     fetches to root first; every rank gets the same checkpoint

Files and names are DeepSpeed's own: its engine and zero_to_fp32 read them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import ckptfs
from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.control.control import Control, open_control
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import CkptfsError, CommitConflictError, StateError
from ckptfs.events import SaveSkipped
from ckptfs.integrations._support.local_root import LocalRoot, is_lead
from ckptfs.manager.run_setup import Pointer, Template
from ckptfs.uri import Uri

__all__ = ["CkptfsEngine"]

logger = logging.getLogger("ckptfs.integrations")

_Stock = Callable[..., Any]  # what DeepSpeed's engine would do
_POINTER = Pointer("latest")
_READING = {"process_group", "timeout_s", "storage_options", "scope", "domain"}


@dataclass(slots=True)
class _Save:
    """What DeepSpeed writes on one rank. ``refusal``: why all ranks agreed not to commit it."""

    tag: str
    error: Exception | None = None
    files: int = 0
    refusal: CkptfsError | None = None

    def outcome(self) -> int:
        """Return the number of files, or raise the failure."""
        if self.error is not None:
            raise self.error
        return self.files


class CkptfsEngine(CheckpointEngine):
    """A DeepSpeed checkpoint engine with commits at ``uri`` for checkpoints.

    Every rank makes one, and attaches it after ``deepspeed.initialize``. Errors are the same on all
    ranks: CollectiveError if a rank could not write, StateError for a tag that does not match the
    template, CommitConflictError for one that is committed. The error of an asynchronous save is
    raised by the next save, ``wait`` or ``close``. After a crash at any time exactly the committed
    checkpoints are there, and ``latest`` names one of them.

    Args:
        root: The directory that ``save_checkpoint`` and ``load_checkpoint`` are called with, on
            each node's own disk or shared; it holds the newest checkpoint and those under way.
            Other directories are left to DeepSpeed.
        uri: The run, the same on all ranks.
        name: Template of the tags.
        mode: "sync" commits before ``save_checkpoint`` returns; "async" commits in the background.
        options: As for ``ckptfs.DirectoryManager``.

    Attributes:
        manager: The DirectoryManager, for steps, pins, ``should_save``.
        metrics: Numbers for ``keep_best``: set them before the save that they belong to.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        uri: Any,
        *,
        name: str = "global_step{N}",
        mode: Literal["sync", "async"] = "sync",
        **options: Any,
    ) -> None:
        super().__init__()
        self.name = "CkptfsEngine"
        self.uri = uri
        self.manager = ckptfs.DirectoryManager(
            uri, name=name, mode=mode, pointer=_POINTER, **options
        )
        self.metrics: Mapping[str, float] | None = None
        self._root = LocalRoot(root, _POINTER.file)
        self._names = Template(name)
        self._options = options
        self._files: CheckpointEngine = TorchCheckpointEngine()
        self._is_universal: Callable[[], bool] = bool
        self._control: Control | None = None
        self._save: _Save | None = None
        self._early: Exception | None = None
        self._extra: dict[str, object] = {}
        self._pending: dict[str, PendingSave] = {}

    def attach(self, engine: Any) -> Self:
        """Make an engine save and load through this one. Local.

        Setting only ``engine.checkpoint_engine`` would leave out three things: a load that fetches
        first, an exception of one rank that is raised on all, a local ``latest`` that is never
        empty.

        Args:
            engine: DeepSpeed's.

        Returns:
            This engine.

        Raises:
            StateError: DeepSpeed's own decoupled writer is configured.
        """
        if engine.checkpoint_engine.is_decoupled():
            raise StateError(
                "DeepSpeed's own decoupled writer is configured",
                hint='remove it from the configuration: mode="async" here takes its place',
            )
        self._files = engine.checkpoint_engine
        engine.checkpoint_engine = self
        engine.save_checkpoint = functools.partial(self._save_checkpoint, engine.save_checkpoint)
        engine.load_checkpoint = functools.partial(self._load_checkpoint, engine.load_checkpoint)
        self._is_universal = engine.load_universal_checkpoint
        return self

    def save_object(self, name: str, obj: object) -> None:
        """Add an object to the next checkpoint, by ``torch.save``. Local; one rank calls it.

        It is a file next to DeepSpeed's. ``ckptfs.load_object(checkpoint.uri / name)`` reads it
        from any process.
        """
        self._extra[name] = obj

    # -- DeepSpeed's calls ------------------------------------------------------------------

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint: the same on all ranks, in a directory without old files.

        Collective.
        """
        if not self._root.is_at(info.save_dir):
            self._files.create(info)
            return
        save, self._early = _Save(str(info.tag), self._early), None

        def current_tag() -> str:
            self._land()
            save.outcome()
            return save.tag

        save.refusal = self._ranks.step("begin a checkpoint", current_tag, self._refusal)
        if save.refusal is None:
            self._root.on_nodes(self._ranks, "make room", lambda: self._root.make_room(save.tag))
        self._save = save

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - its own
        """Make a directory; a failure waits for the next step that all ranks take.

        DeepSpeed would log the error and continue, or raise on one rank before a barrier.
        """
        make = functools.partial(self._files.makedirs, path, exist_ok=exist_ok)
        if self._save is not None or not self._root.is_at(path):
            self._write(path, make)
            return
        try:
            make()
        except OSError as error:
            self._early = error

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file. A failure is raised on all ranks, when they commit."""
        self._write(path, lambda: self._files.save(state_dict, path), files=1)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file. It is unpickled: load only what you wrote."""
        return self._files.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Publish the directory, or raise on all ranks if one failed to write. Collective."""
        save, extra = self._save, self._extra
        if save is None:
            return bool(self._files.commit(info))
        for name, obj in extra.items():
            path = os.path.join(self._root.folder(save.tag), name)
            self._write(path, functools.partial(torch.save, obj, path), files=1)
        self._save, self._extra = None, {}
        self._end(save)
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether the engine that writes the files says so."""
        return bool(self._files.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """Whether the engine that writes the files says so."""
        return bool(self._files.preserves_storage_sharing())

    def is_decoupled(self) -> bool:
        """False: DeepSpeed calls ``commit`` when all files are written."""
        return False

    # -- saving -----------------------------------------------------------------------------

    def _save_checkpoint(
        self,
        stock: _Stock,
        save_dir: str,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's signature
        **options: Any,
    ) -> Any:
        if not self._root.is_at(save_dir):
            logger.warning(
                "%s is not %s: DeepSpeed saves it without ckptfs", save_dir, self._root.path
            )
            return stock(save_dir, tag, client_state or {}, save_latest, **options)
        try:
            # DeepSpeed would truncate `latest` to write it, so only this engine moves it.
            return stock(save_dir, tag, client_state or {}, save_latest=False, **options)
        except Exception as error:
            save, self._save = self._save, None
            if save is not None:  # this rank did not reach its commit, where the others wait
                save.error = save.error or error
                self._end(save)
            raise

    def _refusal(self, tags: Sequence[str]) -> CkptfsError | None:
        """Return why this tag cannot be committed.

        It is returned, not raised: save_16bit_model has a tag and writes nothing to it.
        """
        if len(set(tags)) > 1:
            raise StateError(f"ranks save different tags: {', '.join(sorted(set(tags)))}")
        step = self._names.step_of(tags[0])
        if step is None:
            return StateError(
                f"tag {tags[0]!r} is not made by the template {self._names.text!r}",
                hint='leave the tag to DeepSpeed, or make the engine with name="..."',
            )
        if tags[0] in self._pending or step in self.manager.steps:
            return CommitConflictError(
                f"{tags[0]} is already committed, or its save is in progress",
                uri=Uri.parse(self.uri) / tags[0],
                hint="files with fixed names never overwrite: continue in another run, or delete "
                "it",
            )
        return None

    def _write(self, path: str, act: Callable[[], object], *, files: int = 0) -> None:
        save = self._save
        if save is None:
            act()
            return
        below = self._root.holds(save.tag, path)
        save.files += files if below else 0
        if save.error is None and not (below and save.refusal):
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised on all ranks by commit
                save.error = error

    def _end(self, save: _Save) -> None:
        """End a save: do nothing if no rank wrote, otherwise raise a failure or commit.

        Collective.
        """

        def decide(files: Sequence[int]) -> bool:
            if any(files) and save.refusal is not None:
                raise save.refusal
            return any(files)

        wrote = self._ranks.step(f"end of {save.tag}", save.outcome, decide)
        step = self._names.step_of(save.tag)
        if not wrote or step is None:
            return
        metrics, self.metrics = self.metrics, None
        saved = self.manager.save(step, self._root.folder(save.tag), metrics)
        if isinstance(saved, PendingSave):
            self._pending[save.tag] = saved
        elif not isinstance(saved, SaveSkipped):
            self._root.on_nodes(self._ranks, "keep it", lambda: self._root.keep(save.tag))

    def _land(self) -> None:
        """Make the newest checkpoint that this rank knows to be committed the newest at root.

        Local.
        """
        done = [tag for tag, save in self._pending.items() if save.done()]
        committed = [tag for tag in done if self._pending.pop(tag).committed.exception() is None]
        if committed and is_lead(self._ranks):
            self._root.keep(committed[-1], *self._pending)

    # -- loading ----------------------------------------------------------------------------

    def _load_checkpoint(
        self, stock: _Stock, load_dir: str, tag: str | None = None, *args: Any, **options: Any
    ) -> Any:
        if self._root.is_at(load_dir) and not self._is_universal():
            tag = self.fetch(tag) or tag
            if tag is None:  # DeepSpeed reads what `latest` at root names, even of another run
                self._root.on_nodes(self._ranks, "nothing yet", self._root.refuse_leftovers)
        return stock(load_dir, tag, *args, **options)

    def fetch(self, tag: str | None = None) -> str | None:
        """Bring the newest committed checkpoint, or that of ``tag``, to ``root`` on every node.

        Collective, read-only at the URI; digests are verified. A checkpoint that stock DeepSpeed
        wrote is found by its ``latest``.

        Args:
            tag: Exactly this one; None: the newest.

        Returns:
            Its tag; None: nothing was ever saved.

        Raises:
            NotFoundError: There is no such tag.
            IncompleteCheckpointError: It is not whole.
            IntegrityError: A file differs from what was written.
        """
        self.wait()
        step = None if tag is None else self._names.step_of(tag)

        def look() -> tuple[list[int], str | None]:
            if self._ranks.rank != 0:
                return [], None
            with looking_at(self.uri, self._options.get("storage_options")) as run:
                return self.manager.steps, _POINTER.read(run.storage)

        def open_checkpoint(stack: contextlib.ExitStack, into: str) -> str | None:
            steps, pointed = self._ranks.step("look", look)[0]
            stock = (None if steps else pointed) if tag is None else tag
            # If the run lost its disk, its checkpoints are in its copies, and there is no stock tag to read.
            is_lost = not steps and step is not None and bool(self._options.get("copies"))
            if stock is None or step in steps or is_lost:
                opened = stack.enter_context(self.manager.reading(step, into=into))
                return None if opened is None else opened.uri.name
            options = {name: self._options[name] for name in _READING & self._options.keys()}
            target = Uri.parse(self.uri) / stock
            stack.enter_context(ckptfs.checkpoint_dir(target, "read", into=into, **options))
            return stock

        return self._root.bring(self._ranks, open_checkpoint, newest=tag is None)

    # -- the end ----------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save so far is committed; raise the error of one that failed.

        Collective.
        """
        self.manager.wait(timeout_s)
        self._ranks.step("keep the newest", self._land)

    def close(self) -> None:
        """Finish what is under way and release the run; then raise what failed. Collective."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Close as ``close`` does; after an exception in the block, wait for no other rank."""
        try:
            if exc[1] is None and self._control is not None:
                self.wait()
        finally:
            leave: Any = self.manager.__exit__
            leave(*exc)
            if self._control is not None:
                self._control.close()
                self._control = None

    @property
    def _ranks(self) -> Control:
        """The control. Collective at its first use."""
        if self._control is None:
            among, timeout_s = map(self._options.get, ("process_group", "timeout_s"))
            self._control = open_control(None, among, timeout_s)
        return self._control
