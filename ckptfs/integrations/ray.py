"""Ray Train (2.60, V2): checkpoints that are committed before they are reported to Ray.

    def train(config):                                             # on every worker
        with RayCheckpoints(mode="async") as checkpoints:
            restored = checkpoints.restore(state)                  # the newest that was committed
            for step in range(0 if restored is None else restored.step, steps):
                ...
                checkpoints.report({"loss": loss}, state, step + 1)

    TorchTrainer(train, run_config=RunConfig(**storage("s3://bucket/runs"), name="run"))

    RayCheckpoints     a state: tensors, sharded or not, and anything that has a state_dict
    RayDirectories     a directory that a framework wrote
    storage            where Ray writes: each of its files is whole or not there at all

    Ray          restarts workers, names the experiment, decides what stays (``CheckpointConfig``)
    ckptfs       writes from all workers into the experiment's directory, commits, deletes, restores

A run is Ray's experiment directory. mode="sync" commits and then reports with NO_UPLOAD; with
"async" training continues, and the report (ASYNC, by ``checkpoint_upload_fn``) follows the commit
in the background.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import fsspec
import ray
import ray.train
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero

from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.log.entries import GENESIS
from ckptfs.commit.paths import MANIFEST
from ckptfs.commit.state import catalog
from ckptfs.control.framework_collectives import from_rank_zero
from ckptfs.dcp.api import load
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import CollectiveError, NotFoundError, StateError
from ckptfs.events import Restored, SaveResult, SaveSkipped
from ckptfs.manager.directory_manager import DirectoryManager, OpenedDirectory
from ckptfs.manager.manager import CheckpointManager
from ckptfs.manager.run_setup import Template
from ckptfs.uri import Uri

__all__ = ["RayCheckpoints", "RayDirectories", "experiment_uri", "storage"]

logger = logging.getLogger("ckptfs.integrations")

# What pyarrow calls its own filesystems, and their URIs.
_SCHEMES = {"local": "file://", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}
_KEEPS = ("keep_latest", "keep_every", "keep_best")
_HEARD_S = 30.0  # how long the end of a job waits until Ray lists its last checkpoint

T = TypeVar("T")
ManagerT = TypeVar("ManagerT", CheckpointManager, DirectoryManager)


def storage(uri: Any, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``RunConfig(**storage("s3://bucket/runs"))``: ckptfs writes Ray's own files too.

    It is like ``storage_path="fsspec+ckptfs+s3://bucket/runs"``, with options for the client. Ray
    does not delete checkpoints itself: the workers hold the run and delete them by its log.

    Args:
        uri: Ray's storage path.
        storage_options: Options for fsspec's filesystem of that protocol; None: no options.

    Returns:
        Arguments for ``RunConfig``.
    """
    text = f"ckptfs+{Uri.parse(uri).full}"
    files, path = fsspec.core.url_to_fs(text, **(storage_options or {}))
    return {"storage_path": path, "storage_filesystem": PyFileSystem(_LogFirst(files))}


class _LogFirst(FSSpecHandler):
    """Deletes by Ray's controller.

    In a run that workers hold, only the workers remove checkpoints.
    """

    def delete_dir(self, path: str) -> None:
        if self.fs.exists(f"{path}/{MANIFEST}") and self._is_held(os.path.dirname(path)):
            logger.debug("%s goes when its workers save again", path)
            return
        super().delete_dir(path)

    def _is_held(self, run: str) -> bool:
        with looking_at(self.fs.unstrip_protocol(run), self.fs.storage_options) as look:
            return any(not (v.generation == GENESIS or v.released) for v in look.views.values())


def experiment_uri() -> tuple[str, dict[str, Any]]:
    """Return the URI and storage options of Ray's experiment directory, on a worker of Ray Train.

    Raises StateError if Ray writes to a filesystem with an unknown URI.
    """
    place = ray.train.get_context().get_storage()
    files, path = place.storage_filesystem, place.experiment_fs_path
    inner = getattr(getattr(files, "handler", None), "fs", None)
    if inner is not None:  # an fsspec filesystem, handed to pyarrow
        return inner.unstrip_protocol(path), dict(inner.storage_options)
    if files.type_name not in _SCHEMES:
        raise StateError(
            f"which URI Ray's {files.type_name!r} filesystem has is not known",
            hint="RunConfig(**ckptfs.integrations.ray.storage(uri)), or pass uri= here too",
        )
    return f"{_SCHEMES[files.type_name]}{path}", {}


class _Reported(Generic[ManagerT]):
    """Reports commits to Ray, and deletes what Ray no longer keeps: what both classes share."""

    def __init__(
        self,
        make: type[ManagerT],
        uri: str | None,
        storage_options: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> None:
        for name in _KEEPS:
            if options.get(name) is not None:
                raise StateError(
                    f"{name} belongs to Ray, which cannot restart when a checkpoint that it "
                    "lists is gone",
                    hint="CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...)",
                )
        where, known = experiment_uri() if uri is None else (uri, {})
        self._uri, self._options = where, {**known, **(storage_options or {})}
        _name_the_job()
        self._template = Template(options.setdefault("name", "step_{N}"))
        self.manager: ManagerT = make(where, storage_options=self._options, **options)

    def _report(
        self,
        saved: SaveResult | PendingSave | SaveSkipped,
        metrics: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Report to Ray, now or when the save is committed."""
        if isinstance(saved, SaveSkipped):
            ray.train.report(dict(metrics))
            return
        checkpoint = _checkpoint(Uri.parse(saved.uri).name)
        if isinstance(saved, SaveResult):
            mode = CheckpointUploadMode.NO_UPLOAD
            ray.train.report(dict(metrics), checkpoint, checkpoint_upload_mode=mode, **options)
            return

        def committed(given: Any, _name: str) -> Any:
            saved.result()
            return given

        ray.train.report(
            dict(metrics),
            checkpoint,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=committed,
            # Ray assumes that the directory is a scratch copy, but it is the checkpoint itself.
            delete_local_checkpoint_after_upload=False,
            **options,
        )

    def _report_unheard(self, name: str) -> None:
        """Report a checkpoint that was committed but not reported, because a worker died.

        Collective. All workers agree: the list is the controller's, and no worker has reported yet.
        """
        if name not in _listed(None):
            logger.info("%s was committed but never reported: it is reported to Ray now", name)
            with looking_at(self._uri, self._options) as look:
                seals = [live.seal for live in catalog(look.views)]
            metrics = next((dict(seal.metrics) for seal in seals if seal.name == name), {})
            mode = CheckpointUploadMode.NO_UPLOAD
            ray.train.report(metrics, _checkpoint(name), checkpoint_upload_mode=mode)

    def _is_here(self, uri: Uri) -> bool:
        """Whether it can be reported to Ray: a copy is outside of Ray's experiment."""
        return uri.parent == Uri.parse(self._uri)

    def _follow(self, timeout_s: float) -> None:
        """Delete the checkpoints that Ray no longer keeps, entry first. Collective."""

        def steps_to_delete() -> list[int]:
            steps = {self._template.step_of(name) for name in _listed(timeout_s)}
            return let_go(self.manager.steps, steps)

        for step in _from_rank_zero(steps_to_delete):
            try:
                self.manager.delete(step)
            except CollectiveError:
                raise  # a rank's own failure, which may be a NotFoundError too
            except (NotFoundError, StateError) as error:
                # Gone already, or pinned by the user: no reason to stop training. The same on all ranks.
                logger.info("step %d is not deleted: %s", step, error)

    def close(self) -> None:
        """Finish what is under way, delete what Ray no longer keeps, release the run.

        Collective.
        """
        try:
            self.manager.wait()
            self._follow(_HEARD_S)
        finally:
            self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
            return
        self.manager.__exit__(exc_type, exc, tb)


class RayCheckpoints(_Reported[CheckpointManager]):
    """Saves, reports and restores the state of one experiment. Every worker makes one.

    ``manager`` is the CheckpointManager, for ``should_save``, listeners, weights and all else that
    it offers.

    Args:
        mode: "sync" commits before ``report`` returns; "async" returns from ``report`` when the
            state is staged.
        uri: How ckptfs reaches the experiment's directory; None: by Ray's filesystem.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of Ray's
            filesystem.
        options: As for ``ckptfs.CheckpointManager``, except those that decide what stays: that is
            decided by Ray's ``CheckpointConfig``.
    """

    def __init__(
        self,
        *,
        mode: Literal["sync", "async"] = "sync",
        uri: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(CheckpointManager, uri, storage_options, {**options, "mode": mode})

    def report(self, metrics: Mapping[str, Any], state: Any, step: int, **options: Any) -> None:
        """Save ``state`` as the checkpoint of ``step``, then ``ray.train.report`` it. Collective.

        It is reported once it is committed, so what ``get_checkpoint`` names is whole. In async
        mode an error also ends the training function, in Ray's way, before the next save.

        Args:
            metrics: Ray's; its numbers are written to ckptfs's log.
            state: As for ``CheckpointManager.save``.
            step: Completed optimizer steps.
            options: For ``ray.train.report``, such as validation.

        Raises:
            CkptfsError: As for ``CheckpointManager.save``, on all workers; nothing is reported
                then.
        """
        self._follow(0.0)
        self._report(self.manager.save(step, state, _numbers(metrics)), metrics, options)

    def restore(self, state: Any, step: int | None = None, **options: Any) -> Restored | None:
        """Restore the newest committed checkpoint, in place. Collective, read-only.

        A checkpoint that was committed but not reported, because its worker died in between, can be
        the newest too, and is reported now. If there is none with a name of this manager, the one
        that Ray names is loaded, if DCP wrote it.

        Args:
            state: As for ``CheckpointManager.restore``.
            step: Exactly this one; None: the newest.
            options: As for ``CheckpointManager.restore``.

        Returns:
            What was restored; None if there is nothing.

        Raises:
            CkptfsError: As for ``CheckpointManager.restore``.
        """
        named = None if step is not None else ray.train.get_checkpoint()
        if named is not None and not self._has_steps():
            uri = Uri.parse(self._uri) / os.path.basename(named.path)
            result = load(state, uri, storage_options=self._options)
            return Restored(str(uri), None, (), result.wall_s)  # a foreign name has no step
        restored = self.manager.restore(state, step, **options)
        if restored is not None and step is None and self._is_here(Uri.parse(restored.uri)):
            self._report_unheard(Uri.parse(restored.uri).name)
        return restored

    def _has_steps(self) -> bool:
        """Whether anything was committed here that this manager would find. Collective."""
        return _from_rank_zero(lambda: bool(self.manager.steps))


class RayDirectories(_Reported[DirectoryManager]):
    """The same for directories that a framework wrote. Every worker makes one.

    options: as for ``DirectoryManager``, and as for ``RayCheckpoints``.
    """

    def __init__(
        self,
        *,
        mode: Literal["sync", "async"] = "sync",
        uri: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(DirectoryManager, uri, storage_options, {**options, "mode": mode})

    def report(
        self,
        metrics: Mapping[str, Any],
        path: str | os.PathLike[str],
        step: int,
        *,
        consume: bool = True,
        **options: Any,
    ) -> None:
        """Commit what all workers wrote below ``path``, then ``ray.train.report`` it. Collective.

        ``path`` is local, and passed on every worker, also if that worker wrote nothing into it.
        With ``consume`` it is removed after the commit; until then it must not change. Otherwise as
        ``RayCheckpoints.report``.
        """
        self._follow(0.0)
        saved = self.manager.save(step, path, _numbers(metrics), consume=consume)
        self._report(saved, metrics, options)

    @contextlib.contextmanager
    def restore(self, step: int | None = None) -> Iterator[OpenedDirectory | None]:
        """A local path with the newest committed directory; None if there is none. Collective."""
        with self.manager.reading(step) as opened:
            if opened is not None and step is None and self._is_here(opened.uri):
                self._report_unheard(opened.uri.name)
            yield opened


def let_go(committed: Sequence[int], listed: Collection[int | None]) -> list[int]:
    """Return the steps that Ray no longer keeps: not listed, and committed before its newest.

    ``committed`` are steps in commit order. Steps after the newest that Ray lists are not reported
    yet.
    """
    indices = [at for at, step in enumerate(committed) if step in listed]
    older = committed[: indices[-1]] if indices else ()
    return [step for step in older if step not in listed]


def _from_rank_zero(act: Callable[[], T]) -> T:
    """Return the result of rank 0 on all ranks; its failure is raised on all of them.

    Collective.
    """
    rank = ray.train.get_context().get_world_rank()
    return from_rank_zero(rank, broadcast_from_rank_zero, act)


def _listed(timeout_s: float | None) -> list[str]:
    """Return the names of the checkpoints that Ray keeps now.

    Within the timeout, waits until all reports so far are included.
    """
    mode = CheckpointConsistencyMode.COMMITTED
    found = ray.train.get_all_reported_checkpoints(mode, timeout_s)
    return [os.path.basename(one.checkpoint.path) for one in found]


def _checkpoint(name: str) -> Any:
    """Return Ray's value for a checkpoint of its experiment.

    It is on Ray's own filesystem: Ray refuses any other.
    """
    place = ray.train.get_context().get_storage()
    path = f"{place.experiment_fs_path}/{name}"
    return ray.train.Checkpoint(path, filesystem=place.storage_filesystem)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {n: v for n, v in metrics.items() if isinstance(v, int | float)}


def _name_the_job() -> None:
    """Mark workers that Ray starts again as the same job.

    They need not wait for the lease of the dead worker then.
    """
    context = ray.get_runtime_context()
    name = f"ray-{context.get_session_name()}-{context.get_job_id()}"
    os.environ.setdefault("CKPTFS_JOB_ID", name)
