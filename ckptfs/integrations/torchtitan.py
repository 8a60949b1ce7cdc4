"""torchtitan: its checkpoint manager, with the commit, the retention and the restart of ckptfs.

    --override.imports ckptfs.integrations.torchtitan.checkpoint_manager \
    --checkpoint.enable --checkpoint.folder s3://bucket/run

    CheckpointManager.Config(enable=True, folder="s3://bucket/run", interval=500)     the same in code

    save      torchtitan's own `_save` decides when and what; dcp_save passes it to ckptfs' manager
    retain    after the commit, in commit order, by exact names     (stock: before it, by substrings)
    load      the step is decided once, for all ranks               (stock: by each rank for itself)
    close     waits for what is under way                           (stock: does not)

Checkpoints are in ``step-N``. Stock torchtitan reads them, and this manager reads those of stock.
Written for torchtitan 0.3.0. The class that the next release calls CheckpointStorage is here too,
for any URI.
"""

from __future__ import annotations

import dataclasses
import posixpath
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import AsyncMode
from torchtitan.components.checkpointer import CheckpointManager as StockManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.config.override import derive, override
from torchtitan.tools.utils import GarbageCollection

import ckptfs
from ckptfs.commit.session import control_for
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import StateError
from ckptfs.manager.run_setup import Template
from ckptfs.uri import Uri

__all__ = ["CheckpointManager", "CheckpointStorage", "checkpoint_manager"]

T = TypeVar("T")
_NAMES = Template("step-{N}")


class CheckpointManager(StockManager):
    """torchtitan's CheckpointManager over ``ckptfs.CheckpointManager``.

    It is made and called as torchtitan's trainer does it: save, load and close on every rank. The
    folder in its configuration is a path or any URI of ckptfs, with or without ``ckptfs+``.

    Errors are typed and the same on all ranks: RunBusyError at the first save while another owner
    lives, CollectiveError for a failure of a rank. Errors of an asynchronous save are raised at the
    next save or at close, and the save before stays. After a crash exactly the committed
    checkpoints are there.

    Args:
        config: torchtitan's configuration.
        parts: What torchtitan's trainer passes: model_parts, optimizers, ..., base_folder.

    Attributes:
        async_mode: torchtitan's word; both asynchronous modes are one here, staged into pinned host
            memory and written by a thread.
        keep_latest_k: How many committed checkpoints stay; 0 keeps all.
        storage_options: Options for fsspec's filesystem of that protocol.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(StockManager.Config):
        """torchtitan's own fields, and two more."""

        storage_options: dict[str, Any] = field(default_factory=dict)
        """What the client of the store is given, as in fsspec."""

        per_rank: list[str] = field(default_factory=list)
        """Patterns of keys that every rank keeps for itself, such as train_state.ntokens_seen where
        ranks count different numbers of tokens. Stock torchtitan does not find such keys."""

    def __init__(self, config: Config, **parts: Any) -> None:
        """Make the manager.

        ``parts`` are those of torchtitan's trainer: model_parts, ..., base_folder.
        """
        # Without the group that torchtitan makes to save asynchronously, and without its purging thread.
        given: Any = config
        super().__init__(
            dataclasses.replace(given, async_mode="disabled", keep_latest_k=0), **parts
        )
        if not self.enable:
            return
        is_async = AsyncMode(config.async_mode) is not AsyncMode.DISABLED
        self.async_mode = AsyncMode.ASYNC if is_async else AsyncMode.DISABLED
        self.keep_latest_k = config.keep_latest_k
        self.storage_options = dict(config.storage_options)
        self._run = ckptfs.CheckpointManager(
            self.folder,
            name=_NAMES.text,
            keep_latest=config.keep_latest_k or None,
            mode="async" if is_async else "sync",
            per_rank=config.per_rank,
            storage_options=self.storage_options,
        )

    # -- saving ----------------------------------------------------------------------------

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,  # noqa: FBT001, FBT002 - torchtitan's signature
        to_hf: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Save one state. Collective.

        Args:
            state_dict: What torchtitan saves, by key.
            checkpoint_id: Where, ``.../step-N``.
            async_mode: torchtitan's; if it is not disabled, the save is committed in the
                background.
            enable_garbage_collection: torchtitan's: collect garbage afterwards.
            to_hf: torchtitan writes safetensors into a directory that is committed as a whole.

        Returns:
            A future of the commit in the background; else None.

        Raises:
            StateError: The name is not ``step-N``.
            CkptfsError: As for ``ckptfs.CheckpointManager.save``.
        """
        if to_hf:
            options = self.storage_options
            with ckptfs.checkpoint_dir(checkpoint_id, storage_options=options) as path:
                super().dcp_save(state_dict, path, AsyncMode.DISABLED, to_hf=True)
            return None
        step = _NAMES.step_of(posixpath.basename(checkpoint_id))
        if step is None:
            raise StateError(f"{checkpoint_id} does not have the form step-N", uri=checkpoint_id)
        saved = self._run.save(step, {key: _state_of(value) for key, value in state_dict.items()})
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        if not isinstance(saved, PendingSave):
            return None
        if async_mode is AsyncMode.DISABLED:
            self._run.wait()
            return None
        return saved.committed

    def _wait_for_saving(self) -> None:
        # A failure is raised here once, on all ranks; after that the next save may follow.
        self.save_future = None
        self._run.wait()

    def _purge_stale_checkpoints(self, *_: Any, **__: Any) -> None:
        """Do nothing: the manager deletes after the commit, and only what it wrote."""

    # -- loading ---------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        found = self._decide(None if step == -1 else step)
        if found == -1:
            return self._load_initial()
        self._take(self._create_checkpoint_id(found), model_only=found == 0)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """Return the step to resume from, the same on all ranks; -1 if nothing was saved.

        Collective.
        """
        if folder not in ("", self.folder):
            raise StateError(f"this manager's folder is {self.folder}, not {folder}")
        return self._decide(None)

    def _decide(self, step: int | None) -> int:
        # On the coordinator only: ranks that look for themselves may see different things.
        stock: list[int] = _agree("look for checkpoints", None, lambda _: self._stock_steps())
        if stock and step is None:
            return max(stock)
        if step is not None and step in stock:
            return step
        # Loads nothing yet: finds the save, checks that it is whole, and marks it as needed.
        restored = self._run.restore({}, step, strict=False)
        return -1 if restored is None else restored.step or 0

    def _stock_steps(self) -> list[int]:
        """Return the steps of torchtitan's own manager, in a folder where this one never saved."""
        found = ckptfs.list_checkpoints(self.folder, storage_options=self.storage_options)
        if any(one.save_id is not None for one in found):
            return []
        return [step for one in found if (step := _NAMES.step_of(one.uri.name)) is not None]

    def _load_initial(self) -> bool:
        source = self.initial_load_path
        if not source and self.initial_load_in_hf and self.sd_adapter is not None:
            source = self.sd_adapter.hf_assets_path
        if not source:
            return False
        self._take(source, model_only=self.initial_load_model_only, is_initial=True)
        return True

    def _take(self, checkpoint_id: str, *, model_only: bool, is_initial: bool = False) -> None:
        self.dcp_load(
            self._states_to_load(model_only),
            checkpoint_id,
            from_hf=is_initial and self.initial_load_in_hf,
            from_quantized=is_initial and self.initial_load_in_hf_quantized,
        )
        GarbageCollection.collect("GC collection for checkpoint loading.")

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,  # noqa: FBT001 - torchtitan's signature
        from_quantized: bool,  # noqa: FBT001
    ) -> None:
        """Load into the live state; every key of it must be in the checkpoint. Collective."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        options = self.storage_options
        loaded = ckptfs.load(state_dict, checkpoint_id, strict=False, storage_options=options)
        # strict=False because the checkpoint may have more keys than are requested; the requested ones
        # must be there. Ranks request different keys (pipeline stages), so one rank alone may miss some.
        _agree(
            "compare keys", loaded.missing_keys, lambda missing: _need_all(missing, checkpoint_id)
        )
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    # -- the end ---------------------------------------------------------------------------

    def _close(self) -> None:
        # torchtitan closes in its `except` too, which other ranks may not reach: then this does not wait
        # for them. Otherwise a save under way is finished, and its failure is raised.
        if (run := getattr(self, "_run", None)) is not None:
            run.__exit__(*sys.exc_info())

    def __del__(self) -> None:
        """Do nothing: a garbage collector runs on one rank, but every rank has to close."""


@override(target=StockManager.Config, exact=True, description="checkpoints through ckptfs")
def checkpoint_manager(
    config: StockManager.Config,
    storage_options: dict[str, Any] | None = None,
    per_rank: list[str] | None = None,
) -> CheckpointManager.Config:
    """torchtitan's ``--override.imports ckptfs.integrations.torchtitan.checkpoint_manager``.

    Args:
        config: torchtitan's configuration of its own manager.
        storage_options: Options for fsspec's filesystem of that protocol; None: no options.
        per_rank: fnmatch patterns of keys that every rank keeps for itself; None: none.

    Returns:
        The same configuration for this manager.
    """
    more = {"storage_options": dict(storage_options or {}), "per_rank": list(per_rank or ())}
    made: CheckpointManager.Config = derive(config, CheckpointManager.Config, **more)
    return made


class CheckpointStorage:
    """torchtitan's CheckpointStorage (its next release): what its managers do with paths, by URI.

    A checkpoint that is removed is deleted in ckptfs's way: first an entry in the run's log, then
    its bytes.

    Args:
        storage_options: As in fsspec; None: no options.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(storage_options or {})

    def isdir(self, path: str) -> bool:
        """Whether ``path`` is a directory: on object stores, whether anything is below it."""
        files, key = self._at(path)
        return bool(files.isdir(key))

    def isfile(self, path: str) -> bool:
        """Whether ``path`` exists and is not a directory."""
        files, key = self._at(path)
        return bool(files.isfile(key))

    def listdir(self, path: str) -> list[str]:
        """The names directly below the directory ``path``.

        Raises:
            FileNotFoundError: There is no such directory.
        """
        files, key = self._at(path)
        entries = (entry.rstrip("/") for entry in files.ls(key, detail=False))
        return sorted(posixpath.basename(one) for one in entries if one != key.rstrip("/"))

    def remove(self, path: str) -> None:
        """Delete a directory ``path`` and what is in it; if it is absent, that is success."""
        files, key = self._at(path)
        try:
            files.rm(key, recursive=True)
        except FileNotFoundError:
            return  # another process was faster

    def _at(self, path: str) -> tuple[Any, str]:
        files, key = url_to_fs(f"ckptfs+{Uri.parse(path).full}", **self._options)
        return files, str(key)


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _agree(what: str, value: T, decide: Callable[[list[T]], Any]) -> Any:
    with control_for(None, None) as control:
        return control.step(what, lambda: value, decide)


def _need_all(missing: list[tuple[str, ...]], uri: str) -> None:
    keys = sorted({key for rank in missing for key in rank})
    if keys:
        raise StateError(
            f"the checkpoint lacks {len(keys)} keys of the state: {', '.join(keys[:5])}",
            uri=Uri.parse(uri),
            hint="checkpoint.exclude_from_loading leaves parts of the state as they are; a last save "
            "has the model only unless checkpoint.last_save_model_only is False",
        )
