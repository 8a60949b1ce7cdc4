"""Lightning: checkpoints of one file at any URI, written whole or not at all.

    Trainer(plugins=[CkptfsIO()], callbacks=[ModelCheckpoint("s3://bucket/run")])
    Trainer(strategy=CkptfsDDPStrategy(checkpoint_io=CkptfsIO("async")))      errors on every rank

    last_checkpoint("s3://bucket/run") -> ckpt_path, or None if nothing was ever saved

``ckptfs.integrations._support.object_files`` decides which files may be removed, and when.
Strategies that shard the model (FSDP, ModelParallel) are in
``ckptfs.integrations.lightning_strategies``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from ckptfs.api import latest
from ckptfs.control.framework_collectives import from_rank_zero
from ckptfs.errors import NotFoundError, StateError
from ckptfs.integrations._support.listings import forget_listing
from ckptfs.integrations._support.object_files import ObjectFiles, written_before
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, options_of

__all__ = ["CkptfsDDPStrategy", "CkptfsIO", "last_checkpoint"]

SaveMode = Literal["sync", "async"]
Options = Mapping[str, Any] | None


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


class CkptfsDDPStrategy(DDPStrategy):
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
