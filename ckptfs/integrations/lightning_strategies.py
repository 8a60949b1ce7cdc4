"""Lightning strategies that shard the model: their checkpoints at any URI, committed as one.

    Trainer(strategy=CkptfsModelParallelStrategy(mode="async"))
    Trainer(strategy=CkptfsFSDPStrategy())
    Fabric(strategy=CkptfsFabricModelParallelStrategy(parallelize, data_parallel_size=8))
    Fabric(strategy=CkptfsFabricFSDPStrategy())

    what Lightning calls                       what happens
    save_checkpoint  sharded                   one save of ``NamedCheckpointRuns``: tensors and meta.pt together
                     full                      one file, assembled and written on rank 0
    load_checkpoint  a directory, ours, stock  ``NamedCheckpointRuns.load``
                     a single file             Lightning's own code, over a local copy of it
    remove_checkpoint                          after the commit of what replaces it, on every node

Each takes the arguments of the strategy that it derives from, and ``mode`` and ``storage_options``.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from ckptfs.commit.log.entries import Kind
from ckptfs.commit.session import control_for
from ckptfs.control.framework_collectives import from_rank_zero
from ckptfs.dcp.metadata.pickle_scan import advise_on_torch, check_archive
from ckptfs.dcp.object_file import copy_file, freeze, read_object
from ckptfs.errors import StateError
from ckptfs.integrations._support.listings import forget_listing
from ckptfs.integrations._support.named_checkpoints import NamedCheckpointRuns
from ckptfs.integrations._support.object_files import ObjectFiles, written_before
from ckptfs.uri import Uri

__all__ = [
    "CkptfsFSDPStrategy",
    "CkptfsFabricFSDPStrategy",
    "CkptfsFabricModelParallelStrategy",
    "CkptfsModelParallelStrategy",
]

SaveMode = Literal["sync", "async"]
Filters = Mapping[str, Callable[[str, Any], bool]] | None

_META_FILE = "meta.pt"  # a directory with it is a sharded checkpoint to Lightning


class _Saving:
    """What all four strategies share."""

    def __init__(
        self,
        *args: Any,
        mode: SaveMode = "sync",
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._named_runs = NamedCheckpointRuns(
            mode=mode, meta_file=_META_FILE, storage_options=storage_options
        )
        self._files = ObjectFiles(storage_options=storage_options, changed=forget_listing)

    @property
    def _is_full(self) -> bool:
        """Whether checkpoints are one file."""
        this: Any = self
        kind = getattr(this, "_state_dict_type", None)  # FSDP's setting
        return kind == "full" if kind else not getattr(this, "_save_distributed_checkpoint", True)

    def _on_zero(self, act: Callable[[], Any]) -> Any:
        this: Any = self
        return from_rank_zero(this.global_rank, this.broadcast, act)

    def _agreed(self, path: Any) -> Uri:
        """Return rank 0's path as a URI, because a ``Path`` would damage one.

        Lightning uses rank 0's path everywhere.
        """
        target: Uri = self._on_zero(lambda: Uri.parse(path))
        return target

    def _save(
        self,
        path: Any,
        state: dict[str, Any],
        meta: Any,
        step: int | None,
        kind: Kind = Kind.CHECKPOINT,
    ) -> None:
        target = self._agreed(path)

        def pickled() -> bytes:
            if self._named_runs.is_file(target):
                raise StateError(
                    "a single-file checkpoint has that name",
                    uri=target,
                    hint="save sharded checkpoints into another directory, or under other names",
                )
            return freeze(meta).data()

        self._named_runs.save(target, state, self._on_zero(pickled), step=step, kind=kind)
        forget_listing(str(path))  # ModelCheckpoint asks fsspec which names are free

    def _save_full(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        target = self._agreed(path)
        self._on_zero(lambda: self._files.save(checkpoint, target))

    def _load(
        self,
        target: Uri,
        module: tuple[str, Module],
        optimizers: Mapping[str, Optimizer],
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Load the tensors; return the content of meta.pt."""
        data = self._named_runs.load(target, *module, optimizers, strict=strict)
        if data is None:
            options = self._named_runs.storage_options
            meta = read_object(target / _META_FILE, options, weights_only=weights_only)
        else:
            if weights_only is not False:
                advise_on_torch(torch.__version__)
                check_archive(io.BytesIO(data))
            meta = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        return dict(meta)

    def wait(self) -> None:
        """Wait until all saves are committed; raise the error of one that failed. Collective."""
        self._named_runs.wait()
        self._on_zero(self._files.wait)

    def _is_file(self, target: Uri) -> bool:
        return bool(self._on_zero(lambda: self._named_runs.is_file(target)))

    @contextlib.contextmanager
    def _local_copy(self, target: Uri) -> Iterator[str]:
        """Yield the path of a copy of the file on each node.

        Lightning's own code reads local files only.
        """
        if target.is_local:
            yield target.local_path
            return
        this: Any = self
        directory = self._on_zero(lambda: tempfile.mkdtemp(prefix="ckptfs-lightning-"))

        def fetch() -> None:
            if this.local_rank == 0:
                os.makedirs(directory, exist_ok=True)
                options = self._named_runs.storage_options
                copy_file(target, os.path.join(directory, target.name), options)

        try:
            with control_for(None, None) as control:  # a barrier would hang if one rank fails
                control.step("copy the file to each node", fetch)
            yield os.path.join(directory, target.name)
            this.barrier()
        finally:
            if this.local_rank == 0:
                shutil.rmtree(directory, ignore_errors=True)


# -- Trainer -----------------------------------------------------------------------------------


class _TrainerSaving(_Saving):
    _model_key = "state_dict"

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save one checkpoint. Collective. Errors are those of ``ckptfs.save``, on every rank."""
        _refuse(self, storage_options)
        if self._is_full:
            self._save_full(filepath, checkpoint)
            return
        # save_checkpoint(weights_only=True) leaves this key out: no job can resume from an export.
        kind = Kind.CHECKPOINT if "optimizer_states" in checkpoint else Kind.WEIGHTS
        state = {self._model_key: checkpoint.pop("state_dict")}
        for number, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer_state
        self._save(filepath, state, checkpoint, checkpoint.get("global_step"), kind)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load one of our checkpoints, a directory that stock wrote, or a single file. Collective.

        Raises:
            NotFoundError: There is no such checkpoint.
            CkptfsError: As for ``ckptfs.load``.
        """
        this: Any = self
        target = self._agreed(checkpoint_path)
        if self._is_file(target):
            with self._local_copy(target) as path:
                loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            self._files.loaded(target)
            self._files.adopt(written_before(loaded))
            return loaded
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(this.optimizers)}
        return self._load(
            target,
            (self._model_key, this.model),
            optimizers,
            strict=this.lightning_module.strict_loading,
            weights_only=weights_only,
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint that this run wrote and did not resume from. Collective.

        ModelCheckpoint calls it.
        """
        target = self._agreed(filepath)
        if self._named_runs.knows(target.parent):
            self._named_runs.remove(target)
        else:
            self._on_zero(lambda: self._files.remove(target))

    def on_exception(self, exception: BaseException) -> None:
        """Finish the saves under way without waiting for other ranks."""
        super().on_exception(exception)  # type: ignore[misc]
        self._named_runs.leave()

    def teardown(self) -> None:
        """Close at the end of ``fit``; raise the error of an asynchronous save that failed.

        Collective.
        """
        try:
            self._named_runs.close()
            self._files.close()
        finally:
            super().teardown()  # type: ignore[misc]


class CkptfsModelParallelStrategy(_TrainerSaving, ModelParallelStrategy):
    """ModelParallelStrategy of the Trainer; see the module's docstring."""


class CkptfsFSDPStrategy(_TrainerSaving, FSDPStrategy):
    """FSDPStrategy of the Trainer; see the module's docstring."""

    _model_key = "model"


# -- Fabric ------------------------------------------------------------------------------------


class _FabricSaving(_Saving):
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filters = None,  # noqa: A002 - Lightning's name
    ) -> None:
        """Save modules and optimizers sharded, and everything else in rank 0's meta.pt.

        Collective.
        """
        _refuse(self, storage_options)
        if filter is not None and not self._is_full:
            raise NotImplementedError(
                "a sharded checkpoint is always saved completely: filter= needs a full checkpoint"
            )
        _, module = _one_module(state)
        options = StateDictOptions(full_state_dict=self._is_full, cpu_offload=True)
        tensors: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Module):
                tensors[name] = get_model_state_dict(value, options=options)
            elif isinstance(value, Optimizer):
                tensors[name] = get_optimizer_state_dict(module, value, options=options)
            else:
                meta[name] = value.state_dict() if hasattr(value, "state_dict") else value
        if self._is_full:
            self._save_full(path, _filtered({**tensors, **meta}, filter or {}))
        else:
            self._save(path, tensors, meta, None)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: Any = True,  # noqa: FBT002 - Lightning's signature
        weights_only: Any = None,
    ) -> dict[str, Any]:
        """Fill ``state``; return the content of meta.pt that ``state`` does not name. Collective.

        Raises:
            KeyError: The checkpoint lacks a key of ``state``, and ``strict`` is True.
            CkptfsError: As for ``ckptfs.load``.
        """
        target = self._agreed(path)
        if not isinstance(state, dict) or not state or self._is_file(target):
            with self._local_copy(target) as local:
                loaded: dict[str, Any] = super().load_checkpoint(  # type: ignore[misc]
                    local, state, strict=strict, weights_only=weights_only
                )
            return loaded
        optimizers = {name: each for name, each in state.items() if isinstance(each, Optimizer)}
        module = _one_module(state)
        meta = self._load(target, module, optimizers, strict=strict, weights_only=weights_only)
        names = [name for name in state if name != module[0] and name not in optimizers]
        lacking = [name for name in names if name not in meta]
        if strict and lacking:
            raise KeyError(f"the checkpoint has no {lacking[0]!r}; strict=False skips it")
        for name in names:
            if name in meta:
                state[name] = meta.pop(name)
        return meta

    def teardown(self) -> None:
        """Wait as ``wait`` does, and release the runs. Collective.

        Fabric never calls it: call it at the end.
        """
        try:
            self._named_runs.close()
            self._files.close()
        finally:
            # The stock teardown asks for its checkpoint_io last, and raises because it has none.
            with contextlib.suppress(NotImplementedError):
                super().teardown()  # type: ignore[misc]


class CkptfsFabricModelParallelStrategy(_FabricSaving, FabricModelParallel):
    """ModelParallelStrategy of Fabric; see the module's docstring."""


class CkptfsFabricFSDPStrategy(_FabricSaving, FabricFSDP):
    """FSDPStrategy of Fabric; see the module's docstring."""


def _one_module(state: Mapping[str, Any]) -> tuple[str, Module]:
    modules = [(name, each) for name, each in state.items() if isinstance(each, Module)]
    if len(modules) != 1:
        raise ValueError(f"a checkpoint holds one model, but the state has {len(modules)}")
    return modules[0]


def _filtered(state: dict[str, Any], filters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {k: v for k, v in value.items() if filters[name](k, v)}
        if name in filters and isinstance(value, dict)
        else value
        for name, value in state.items()
    }


def _refuse(strategy: object, storage_options: object) -> None:
    if storage_options is not None:
        raise TypeError(
            f"storage_options belong to the strategy: {type(strategy).__name__}(storage_options=...)"
        )
