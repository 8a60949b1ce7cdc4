"""Lightning: checkpoints at any URI, written whole or not at all.

One way in, with the name of a strategy:

    Trainer(strategy=checkpoint_strategy("ddp", mode="async"), callbacks=[ModelCheckpoint("s3://bucket/run")])
    Fabric(strategy=checkpoint_strategy("fsdp", fabric=True))

    last_checkpoint("s3://bucket/run") -> ckpt_path, or None if nothing was ever saved

    "single_device"      one file                       CkptfsIO
    "ddp"                one file                       CkptfsIO, CkptfsDDPStrategy: errors on every rank
    "fsdp"               sharded, or one file (full)    CkptfsFSDPStrategy
    "model_parallel"     sharded, or one file           CkptfsModelParallelStrategy

A strategy that shards the model takes the arguments of Lightning's own, ``mode`` and ``storage_options``:

    what Lightning calls                       what happens
    save_checkpoint  sharded                   one save of ``NamedCheckpointRuns``: tensors and meta.pt together
                     full                      one file, assembled and written on rank 0
    load_checkpoint  a directory, ours, stock  ``NamedCheckpointRuns.load``
                     a single file             Lightning's own code, over a local copy of it
    remove_checkpoint                          after the commit of what replaces it, on every node

``ckptfs.integrations._support.object_files`` decides which files may be removed, and when. Where a
strategy is made by somebody else, ``Trainer(plugins=[CkptfsIO()])`` does for one file.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from ckptfs.api import latest
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.session import control_for
from ckptfs.control.framework_collectives import from_rank_zero
from ckptfs.dcp.metadata.pickle_scan import advise_on_torch, check_archive
from ckptfs.dcp.object_file import copy_file, freeze, read_object
from ckptfs.errors import NotFoundError, StateError
from ckptfs.integrations._support.listings import forget_listing
from ckptfs.integrations._support.named_checkpoints import NamedCheckpointRuns
from ckptfs.integrations._support.object_files import ObjectFiles, written_before
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, options_of

__all__ = [
    "CkptfsDDPStrategy",
    "CkptfsFSDPStrategy",
    "CkptfsFabricFSDPStrategy",
    "CkptfsFabricModelParallelStrategy",
    "CkptfsIO",
    "CkptfsModelParallelStrategy",
    "checkpoint_strategy",
    "last_checkpoint",
]

SaveMode = Literal["sync", "async"]
StrategyName = Literal["single_device", "ddp", "fsdp", "model_parallel"]
Options = Mapping[str, Any] | None
Filters = Mapping[str, Callable[[str, Any], bool]] | None
_META_FILE = "meta.pt"  # a directory with it is a sharded checkpoint to Lightning


class CkptfsIO(CheckpointIO):
    """Single-file checkpoints at any URI, each whole or not at all.

    Use it as ``Trainer(plugins=[CkptfsIO()])``. The error of an asynchronous save is raised by the
    next save, or at the end of ``fit``. A checkpoint is removed when the one that replaces it is
    committed, and only if this run wrote it; the checkpoint that the run resumed from stays. Fabric
    does not end plugins: call ``teardown`` when the training is done.

    Args:
        mode: "sync" returns when the checkpoint is written; "async" returns when it is pickled in
            host memory, and writes it in the background.
        storage_options: As in fsspec; None: no options.
        max_in_flight: How many checkpoints are written in the background at once.
    """

    def __init__(
        self, mode: SaveMode = "sync", *, storage_options: Options = None, max_in_flight: int = 2
    ) -> None:
        self._files = ObjectFiles(
            mode=mode,
            max_in_flight=max_in_flight,
            storage_options=storage_options,
            changed=forget_listing,  # Lightning asks fsspec which names are free
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Options = None
    ) -> None:
        """Save one checkpoint. Called on rank 0.

        Errors are the storage's; the old file stays then.
        """
        self._files.save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        """Read one checkpoint. Called on every rank.

        Raises:
            NotFoundError: There is no such file; it is a FileNotFoundError.
            IntegrityError: The file is damaged.
        """
        where = "cpu" if map_location is None else map_location
        loaded: dict[str, Any] = self._files.load(
            path, map_location=where, weights_only=weights_only
        )
        self._files.adopt(written_before(loaded))
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once the save that replaces it is committed. Called on rank 0."""
        self._files.remove(path)

    def wait(self) -> None:
        """Wait until every save is whole at its URI; raise the error of one that failed.

        Called on rank 0.
        """
        self._files.wait()

    def teardown(self) -> None:
        """Wait for the saves under way; raise what failed."""
        self._files.close()


def last_checkpoint(
    dirpath: Any, name: str = "last", *, storage_options: Options = None
) -> str | None:
    """The last checkpoint in a ModelCheckpoint's directory, to resume from. Local, any rank.

    Use it as ``fit(ckpt_path=last_checkpoint(uri))``. It is the last committed sharded checkpoint,
    else ``last.ckpt`` or its highest version. Lightning's own ``ckpt_path="last"`` starts from the
    beginning if the directory is remote.

    Args:
        dirpath: ModelCheckpoint's directory.
        name: The name of its last checkpoint, without a suffix.
        storage_options: As in fsspec; None: no options.

    Returns:
        The URI; None only if nothing was ever saved.

    Raises:
        NotFoundError: There are checkpoints, and none has that name.
        StateError: There are both sharded ones and files.
    """
    root, options = Uri.parse(dirpath), {**options_of(dirpath), **(storage_options or {})}
    sharded = latest(root, storage_options=options)
    storage = open_storage(root, options)
    try:
        names = [entry.name for entry in storage.list("") if not entry.is_dir]
    except NotFoundError:
        return None
    finally:
        storage.close()
    files = [file for file in names if file.endswith(".ckpt")]
    if sharded is not None and files:
        raise StateError(
            f"there are sharded checkpoints and {len(files)} single-file checkpoints, so the "
            "last one is ambiguous",
            uri=root,
            hint="pass one of them as ckpt_path",
        )
    if sharded is not None:
        return _as_path(sharded.uri)
    versions = {
        int(found[1] or 0): file
        for file in files
        if (found := re.fullmatch(rf"{re.escape(name)}(?:-v(\d+))?\.ckpt", file))
    }
    if versions:
        return _as_path(root / versions[max(versions)])
    if files:
        raise NotFoundError(
            f"there are {len(files)} checkpoints but no {name}.ckpt",
            uri=root,
            hint="ModelCheckpoint(save_last=True) writes one; or pass a file as ckpt_path",
        )
    return None


def _as_path(uri: Uri) -> str:
    """Return a path or a URI for Lightning, which compares paths as ``Path``.

    That would damage ``file://``, so a local URI becomes a path.
    """
    return uri.local_path if uri.is_local else uri.full


class _SavingFiles:
    """What strategies share if rank 0 writes their checkpoints as files."""

    def wait(self) -> None:
        """Wait until every save is whole at its URI; raise the error of one that failed. Collective.

        Raises:
            CollectiveError: Rank 0 failed: its own error is raised there, this one on the others.
        """
        this: Any = self
        from_rank_zero(this.global_rank, this.broadcast, this.checkpoint_io.wait)


class CkptfsDDPStrategy(_SavingFiles, DDPStrategy):
    """DDP in which every rank raises what rank 0 could not save, instead of waiting for rank 0.

    Arguments are DDPStrategy's; pass ``checkpoint_io=CkptfsIO(...)``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save one checkpoint. Collective.

        Raises:
            CollectiveError: Rank 0 failed: its own error is raised there, this one on the others.
        """

        def act() -> None:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

        from_rank_zero(self.global_rank, self.broadcast, act)


class _SingleDevice(_SavingFiles, SingleDeviceStrategy):
    pass


class _FabricSavingFiles(_SavingFiles):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as Lightning does; what rank 0 could not save is raised on every rank. Collective."""
        this: Any = self
        save = super().save_checkpoint  # type: ignore[misc]
        from_rank_zero(this.global_rank, this.broadcast, lambda: save(*args, **kwargs))


class _FabricDDP(_FabricSavingFiles, FabricDDP):
    pass


class _FabricSingleDevice(_FabricSavingFiles, FabricSingleDevice):
    pass


# -- strategies that shard the model --------------------------------------------------------------


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


# -- the way in --------------------------------------------------------------------------------


def checkpoint_strategy(
    name: StrategyName,
    *,
    mode: SaveMode = "sync",
    storage_options: Options = None,
    fabric: bool = False,
    **options: Any,
) -> Any:
    """Return the strategy of Lightning that has this name, with its checkpoints at any URI. Local.

    Use it as ``Trainer(strategy=checkpoint_strategy("ddp", mode="async"))``. Wait for a save that you
    called yourself with its ``wait()``. Fabric does not end its strategies: call ``teardown`` when the
    training is done.

    Args:
        name: "single_device", "ddp", "fsdp" or "model_parallel".
        mode: "sync" returns when the checkpoint is committed; "async" when its state is copied.
        storage_options: As in fsspec; None: no options.
        fabric: Return a strategy for Fabric, not for the Trainer.
        options: Arguments of Lightning's strategy. The ``device`` of "single_device" is by default
            the first accelerator, or the CPU where there is none.

    Raises:
        StateError: There is no such name.
    """
    sharding: dict[str, tuple[Any, Any]] = {
        "fsdp": (CkptfsFSDPStrategy, CkptfsFabricFSDPStrategy),
        "model_parallel": (CkptfsModelParallelStrategy, CkptfsFabricModelParallelStrategy),
    }
    plain: dict[str, tuple[Any, Any]] = {
        "single_device": (_SingleDevice, _FabricSingleDevice),
        "ddp": (CkptfsDDPStrategy, _FabricDDP),
    }
    if name in sharding:
        return sharding[name][fabric](mode=mode, storage_options=storage_options, **options)
    if name not in plain:
        raise StateError(
            f"there is no strategy {name!r}",
            hint=f"pass one of {', '.join([*plain, *sharding])}; CkptfsIO is for strategies of "
            "other kinds that save one file",
        )
    if name == "single_device":
        options.setdefault("device", _first_device())
    files = CkptfsIO(mode, storage_options=storage_options)
    return plain[name][fabric](checkpoint_io=files, **options)


def _first_device() -> torch.device:
    """Return the device that Lightning takes for one process by itself."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, 0)
