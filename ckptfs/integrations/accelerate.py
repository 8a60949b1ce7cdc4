"""Accelerate: ``save_state`` and ``load_state`` at a URI, committed whole.

    saves = CkptfsState(accelerator, "s3://bucket/run", keep_latest=3)
    done = saves.load()                  the newest committed one, the same on all ranks; None: nothing
    for step in range(done or 0, steps):
        ...
        saves.save(step + 1)             accelerator.save_state, then one commit, then retention
    saves.close()

    sync     save_state writes into what will be committed: the attempt itself on a mounted
             filesystem, otherwise this node's scratch, which is uploaded
    async    it writes to scratch; the upload and the commit happen in the background

Files and names are Accelerate's own: its ``load_state`` reads them. FSDP's functions take a
directory; all that they write is in one commit:

    with saves.manager.writing(step) as path:
        save_fsdp_model(..., path)

``DirectoryManager`` decides what to keep and how to commit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME
from accelerate.utils import load as load_file

from ckptfs.commit.directory_checkpoints.read import NodeScratch
from ckptfs.commit.directory_checkpoints.write import leaving_together
from ckptfs.control.control import Control, open_control
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import StateError
from ckptfs.events import SaveResult, SaveSkipped
from ckptfs.manager.directory_manager import DirectoryManager

__all__ = ["CkptfsState"]

_PREFIX = "ckptfs-accelerate-"


class CkptfsState:
    """An Accelerator's state, saved and retained at ``uri``. Every rank makes one.

    Accelerate's own naming and total_limit delete before they write. Therefore total_limit must be
    None, otherwise it is a StateError, and automatic_checkpoint_naming only numbers the saves
    without a ``step``. Errors are the same on all ranks. After a crash exactly the committed
    checkpoints are there.

    Args:
        accelerator: The Accelerator, with everything prepared and registered.
        uri: The run, the same on all ranks.
        mode: "sync" commits before ``save`` returns; "async" returns from ``save`` when the state
            is written to scratch (option ``scratch``, by default the temporary directory), and
            commits in the background.
        name: Template of the names, matched exactly.
        options: As for ``ckptfs.DirectoryManager``: keep_latest, keep_every, keep_best,
            max_in_flight, storage_options and all others.

    Attributes:
        manager: The DirectoryManager, for steps, pins, ``should_save``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        uri: Any,
        *,
        mode: Literal["sync", "async"] = "sync",
        name: str = "checkpoint_{N}",
        **options: Any,
    ) -> None:
        if accelerator.project_configuration.total_limit is not None:
            raise StateError(
                f"total_limit is {accelerator.project_configuration.total_limit}: save_state would delete "
                "the old checkpoint before it writes the new one",
                hint="leave it out, and pass keep_latest to CkptfsState",
            )
        self.manager = DirectoryManager(uri, name=name, mode=mode, **options)
        self._accelerator = accelerator
        self._mode = mode
        self._options = options
        self._control: Control | None = None
        self._scratch: NodeScratch | None = None

    # -- saving -----------------------------------------------------------------------------

    def save(
        self,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        **options: Any,
    ) -> SaveResult | PendingSave | SaveSkipped | None:
        """``accelerator.save_state`` as the checkpoint of ``step``. Collective.

        It is committed on return, or under way in async mode: then the next save, ``manager.wait``
        or ``close`` raises its error. A failure of one rank is raised on all ranks and nothing is
        committed; what was committed before stays.

        Args:
            step: Completed optimizer steps; None: ``accelerator.save_iteration``, which counts
                saves.
            metrics: Numbers for ``keep_best``; None: none.
            options: As for ``save_state``.

        Returns:
            None in sync mode: it is committed. In async mode a PendingSave, or a SaveSkipped
            (``if_slow="skip"``).

        Raises:
            CommitConflictError: The step is committed already.
            CkptfsError: As for ``DirectoryManager.save``.
        """
        step = int(self._accelerator.save_iteration) if step is None else step
        if self._mode == "sync":
            with self.manager.writing(step, metrics) as path:
                self._write(path, options)
            return None
        path = os.path.join(self._scratched().path, str(step))
        with leaving_together(self._ranks):
            self._write(path, options)
        saved = self.manager.save(step, path, metrics, consume=True)
        if isinstance(saved, SaveSkipped):
            shutil.rmtree(path, ignore_errors=True)  # all ranks do this at once, which is harmless
        return saved

    def _write(self, path: str, options: Mapping[str, Any]) -> None:
        with self._plain_names():
            self._accelerator.save_state(path, **options)

    @contextlib.contextmanager
    def _plain_names(self) -> Iterator[None]:
        """Switch off Accelerate's own naming for the block.

        With it, Accelerate ignores the path, and raises on one rank before a barrier.
        """
        configuration = self._accelerator.project_configuration
        naming = configuration.automatic_checkpoint_naming
        configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            configuration.automatic_checkpoint_naming = naming

    def _scratched(self) -> NodeScratch:
        """Return a directory that this node's ranks share until ``close``.

        Collective at its first use.
        """
        if self._scratch is None:
            ranks = self._ranks
            place = NodeScratch(ranks, _PREFIX, self._options.get("scratch"))
            answers = ranks.step(
                "make scratch", lambda: (place.node, place.make()) if place.is_lead else None
            )
            place.target = next(
                one[1] for one in answers if one is not None and one[0] == place.node
            )
            self._scratch = place
        return self._scratch

    # -- loading ----------------------------------------------------------------------------

    def load(
        self,
        step: int | None = None,
        *,
        per_rank: Literal["error", "drop"] = "error",
        **options: Any,
    ) -> int | None:
        """``accelerator.load_state`` of the newest committed checkpoint, or of ``step``.

        Collective, read-only. The next save is numbered after this one.

        Args:
            step: Exactly this one; None: the newest.
            per_rank: What happens if the random states of this rank are missing (another number of
                ranks) or unreadable: "drop" lets Accelerate continue with other random numbers,
                which it does without a warning; "error" does not.
            options: As for ``load_state``.

        Returns:
            The step; None only if nothing was ever saved.

        Raises:
            NotFoundError: There is no such step.
            IncompleteCheckpointError: It is not whole.
            IntegrityError: A file differs from what was written.
            CollectiveError: Some ranks failed; every rank raises this same error.
        """
        with self.manager.reading(step) as opened:
            if opened is None:
                return None
            path = opened.path
            if per_rank == "error":
                self._ranks.step("random states", lambda: self._check_rng(path))
            with leaving_together(self._ranks):
                self._accelerator.load_state(path, **options)
            self._accelerator.project_configuration.iteration = opened.step + 1
            return opened.step

    def _check_rng(self, path: str) -> None:
        name = f"{RNG_STATE_NAME}_{self._accelerator.process_index}.pkl"
        try:
            load_file(os.path.join(path, name))
        except Exception as error:
            raise StateError(
                f"{name} cannot be read: {type(error).__name__}: {error}",
                uri=path,
                hint='resume on as many ranks as saved, or pass per_rank="drop" to continue with '
                "other random numbers",
            ) from error

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is under way and release the run; then raise what failed. Collective."""
        with self._leaving():
            self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close as ``close`` does; after an exception in the block, wait for no other rank."""
        with self._leaving():
            self.manager.__exit__(exc_type, exc, tb)

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._scratch is not None:
                self._scratch.leave()
                self._scratch = None
            if self._control is not None:
                self._control.close()
                self._control = None

    @property
    def _ranks(self) -> Control:
        """The control. Collective at its first use."""
        if self._control is None:
            self._control = open_control(
                process_group=self._options.get("process_group"),
                timeout_s=self._options.get("timeout_s"),
            )
        return self._control
