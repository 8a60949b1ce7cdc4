"""verl: its own files, saved to any URI, one decision over actor, critic and driver.

    every rank    CkptfsFSDPCheckpointManager   in place of verl's: the same files, sealed as a part
    the driver    CkptfsTrainer                 class Trainer(CkptfsTrainer, RayPPOTrainer): ...
                  CkptfsDriver                  the same for a driver of your own

    run/latest_checkpointed_iteration.txt       written whole, after the commit
    run/global_step_20/data.pt                  the driver's, in the same commit
    run/global_step_20/actor/model_world_size_2_rank_0.pt ...        what verl writes and reads

``plug()`` puts the manager into verl's FSDP engines of a process. With
VERL_USE_EXTERNAL_MODULES=ckptfs.integrations.verl, verl imports this module in every process, and
the import calls ``plug()``.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from ckptfs.commit.parts.tickets import SealedPart, Ticket, TicketPart
from ckptfs.commit.session import Place
from ckptfs.errors import StateError
from ckptfs.integrations._support.step_driver import PartSaver, Saving, StepDriver, reading_part
from ckptfs.manager.directory_manager import DirectoryManager
from ckptfs.manager.run_setup import Pointer
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["CkptfsDriver", "CkptfsFSDPCheckpointManager", "CkptfsTrainer", "Saving", "plug"]

NAME = "global_step_{N}"
STEP = re.compile(r"global_step_(\d+)(?:/([^/]+))?/*$")
RANK = re.compile(r"_world_size_(\d+)_rank_(\d+)\.pt$")
TRACKER = "latest_checkpointed_iteration.txt"
GROUPS = {"actor": "actor_rollout_wg", "critic": "critic_wg"}


def plug() -> None:
    """Make verl's FSDP engines of this process save and load through ckptfs. Local."""
    import verl.workers.engine.fsdp.transformer_impl as engine

    engine.FSDPCheckpointManager = CkptfsFSDPCheckpointManager


class CkptfsFSDPCheckpointManager(FSDPCheckpointManager):
    """verl's manager, with its files at a URI. Calls are collective over the default process group.

    A failure on any rank, between verl's barriers too, is raised on all; nothing is visible then.

    Args:
        args: verl's own.
        remote_dir: The run, for groups without a ticket from their driver; None: ``remote_dir`` of
            checkpoint_config, else the variable CKPTFS_URI.
        mode: "sync" commits before the call returns; "async" returns when this rank's files are in
            ``scratch``, and uploads them in the background. None: by checkpoint_config.async_save.
        scratch: Where files are kept until they are uploaded; None: the temporary directory.
        storage_options: For ``remote_dir``, and for loads; None: no options.
        kwargs: verl's own.
    """

    def __init__(
        self,
        *args: Any,
        remote_dir: str | os.PathLike[str] | None = None,
        mode: Literal["sync", "async"] | None = None,
        scratch: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        config = self.checkpoint_config or {}
        remote = remote_dir or config.get("remote_dir", None) or os.environ.get("CKPTFS_URI")
        self._remote = None if remote is None else os.fspath(remote)
        is_async = bool(config.get("async_save", False)) if mode is None else mode == "async"
        self._saver = PartSaver(is_async=is_async, scratch=scratch)
        self._options = dict(storage_options or {})
        self._own: DirectoryManager | None = None
        self._loaded: int | None = None  # the step of the run that this group resumed from

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: Any = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> SealedPart | None:
        """Save what verl saves.

        If the save before failed, this first raises its error, on all ranks.

        Args:
            local_path: ``.../global_step_N/actor``; only its end counts. None saves nothing: it
                waits.
            hdfs_path: The driver's ``part("actor")``; it is sealed when this returns (in async mode
                later), and the driver commits it. None: this group is alone in its step: it
                commits.
            global_step: The step.
            max_ckpt_to_keep: How many steps a group that is alone keeps; None: all.

        Raises:
            CommitConflictError: The step is committed already.
            CkptfsError: As for ``DirectoryManager.save``.
        """
        self.wait()
        if local_path is None:
            return None

        def write(path: str) -> None:
            # verl's save deletes nothing here: what stays is decided after the commit.
            FSDPCheckpointManager.save_checkpoint(self, path, global_step=global_step)
            self.previous_saved_paths: list[str] = []

        if isinstance(hdfs_path, TicketPart):
            return self._saver.save(hdfs_path, write)
        ticket = self._begin(local_path, global_step, max_ckpt_to_keep)
        return self._saver.save(
            ticket.part(ticket.parts[0]),
            write,
            lambda sealed: ticket.commit([sealed]),
            ticket.abandon,
        )

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: Any = None,
        del_local_after_load: bool = False,  # noqa: FBT001, FBT002 - verl's
    ) -> None:
        """Load what verl loads, on as many ranks as saved it; nothing is deleted.

        Args:
            local_path: Names the step below ``remote_dir``; if that has no such step, what stock
                verl wrote at this path is loaded. None loads nothing.
            hdfs_path: Where the driver says that it is; None: see ``local_path``.
            del_local_after_load: verl's word; nothing is deleted.

        Raises:
            NotFoundError: There is no such step.
            IncompleteCheckpointError: It is not whole.
            StateError: Another number of ranks saved it.
        """
        self.wait()
        if local_path is None:
            return
        where, found = hdfs_path, STEP.search(local_path)
        place = Place(self._options)
        if where is None and self._remote is not None and found is not None:
            where = f"{self._remote.rstrip('/')}/{found[0]}"

        def stock() -> bool:
            return hdfs_path is None and os.path.isdir(local_path)

        with reading_part(where or local_path, place, _is_of, otherwise=stock) as (path, _):
            _check_world(path or local_path, self.world_size)
            super().load_checkpoint(path or local_path)
        if path is not None and found is not None:
            self._loaded = int(found[1])
            if self._own is not None:
                self._own.resumed_at(self._loaded)

    def wait(self) -> None:
        """Wait for the save under way, and raise its error on all ranks. Collective."""
        self._saver.wait()

    def close(self) -> None:
        """Wait as ``wait`` does; then leave the run, if this group held it. Collective."""
        with self._own or contextlib.nullcontext():
            self._saver.close()

    def _begin(self, local_path: str, step: int, keep: int | None) -> Ticket:
        """Begin a step with this group as its own driver."""
        found = STEP.search(local_path)
        if self._remote is None:
            raise StateError(
                f"the place to save {local_path} to is not configured",
                hint="set CKPTFS_URI or remote_dir=, or use CkptfsTrainer or CkptfsDriver, which "
                "set it",
            )
        if found is None or found[2] in (None, "critic"):
            raise StateError(
                f"{local_path} is not a part that a group commits by itself",
                hint="several groups save one step: let CkptfsTrainer or CkptfsDriver begin it",
            )
        if self._own is None:
            self._own = DirectoryManager(
                self._remote, name=NAME, keep_latest=keep, storage_options=self._options
            )
            if self._loaded is not None:
                self._own.resumed_at(self._loaded)
        return self._own.begin(step, [found[2]])


def _is_of(path: str, ranks: Sequence[int]) -> bool:
    found = RANK.search(path)
    return found is not None and int(found[2]) in ranks


def _check_world(path: str, size: int) -> None:
    """Raise StateError if another number of ranks saved.

    verl has a file for each rank, and cannot reshard them.
    """
    saved = {int(m[1]) for name in os.listdir(path) if (m := RANK.search(name))}
    if saved and size not in saved:
        raise StateError(
            f"saved by {min(saved)} ranks, loaded by {size}",
            uri=path,
            hint="start as many ranks, or merge with verl.model_merger and begin from the weights",
        )


class CkptfsDriver(StepDriver):
    """The process outside of every group.

    Args:
        remote_dir: The run.
        local_dir: verl's default_local_dir, where ``resume`` puts what the driver reads; None: a
            temporary one.
        options: Of ``StepDriver``, such as keep_latest.

    Attributes:
        uri: The run's URI.
    """

    def __init__(
        self,
        remote_dir: str | os.PathLike[str],
        local_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        tracker = Pointer(TRACKER, lambda name: name.rpartition("_")[2])
        super().__init__(remote_dir, name=NAME, pointer=tracker, **options)
        self.uri = Uri.parse(remote_dir)
        local = local_dir or tempfile.mkdtemp(prefix="ckptfs-verl-")
        self._local = Uri.parse(os.path.abspath(local))

    def resume(self, step: int | None = None) -> str | None:
        """The newest committed step as a folder of ``local_dir``, for verl's own resume.

        The folder has the driver's files, and the tracker is next to it. The run's log decides
        which step is the newest, whatever a tracker says.

        Args:
            step: Exactly this one; None: the newest.

        Returns:
            The folder; None if nothing was ever saved.
        """
        found = self.fetch(self._folder, step)
        if found is None:
            return None
        with contextlib.closing(open_storage(self._local)) as storage:
            storage.replace(TRACKER, str(found).encode())
        return self._folder(found)

    def remote(self, step: int, group: str) -> str:
        """Return what a group passes as ``hdfs_path`` to load its part of a step.

        If ``resume`` took the step from a copy, it is in that copy.

        Args:
            step: The step.
            group: The name of the group's part.
        """
        checkpoint = self.fetched_from(step) or self.uri / NAME.format(N=step)
        return (checkpoint / group).full

    def _folder(self, step: int) -> str:
        return (self._local / NAME.format(N=step)).local_path


class CkptfsTrainer:
    """Mixed in before a trainer of verl's: ``class Trainer(CkptfsTrainer, RayPPOTrainer)``.

    verl's ``_save_checkpoint`` and ``_load_checkpoint`` run unchanged. While they do, worker groups
    get a part of the driver's ticket, and default_local_dir is a place from which the commit takes
    the driver's files: data.pt, and everything else that a version of verl puts there.

    Attributes:
        ckptfs_driver: The driver, made with the options in the class attribute ``ckptfs``: those of
            ``CkptfsDriver``. By default remote_dir is the variable CKPTFS_URI, keep_latest is
            max_actor_ckpt_to_keep, and mode follows async_save.
    """

    ckptfs: ClassVar[Mapping[str, Any]] = {}
    ckptfs_driver: CkptfsDriver | None = None

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, then check that everything is committed; raises the error of what is not.

        Args:
            args: verl's own.
            kwargs: verl's own.

        Returns:
            What verl's ``fit`` returns.
        """
        with self._driver():
            result = super().fit(*args, **kwargs)  # type: ignore[misc]
            self._flush()
        return result

    def _save_checkpoint(self: Any) -> None:
        driver, calls = self._driver(), []
        self._flush()
        groups = self._groups()
        with driver.saving(self.global_steps, list(groups)) as step:
            attributes: dict[str, Any] = {
                GROUPS[name]: _Group(groups[name], step.part(name)) for name in groups
            }
            if hasattr(self, "checkpoint_callback"):
                # The callback is called after the commit.
                later = SimpleNamespace(on_save=lambda **call: calls.append(call))
                attributes["checkpoint_callback"] = later
            place = {"default_local_dir": os.path.dirname(step.path)}
            with _with(self, attributes), _with(self.config.trainer, place):
                super()._save_checkpoint()  # type: ignore[misc]
            if not driver.is_async:
                self._flush()
        for call in calls:
            self.checkpoint_callback.on_save(**{**call, "checkpoint_dir": str(step.ticket.uri)})

    def _load_checkpoint(self: Any) -> Any:
        config, driver = self.config.trainer, self._driver()
        wanted, attributes, place = None, {}, {}
        if config.resume_mode == "resume_path":
            wanted = _step_in(str(config.resume_from_path), config.default_local_dir, driver.uri)
        if config.resume_mode != "disable" and wanted in (None, *driver.steps):
            folder = driver.resume(wanted)
            if folder is not None:
                place = {"resume_from_path": folder}  # data.pt of the same commit
                step = int(STEP.search(folder)[1])  # type: ignore[index]
                for name, group in self._groups().items():
                    attributes[GROUPS[name]] = _Group(group, driver.remote(step, name))
        with _with(self, attributes), _with(config, place):
            return super()._load_checkpoint()  # type: ignore[misc]

    def _flush(self: Any) -> None:
        """Let every group finish its uploads, and raise their errors."""
        try:
            for group in self._groups().values():
                group.save_checkpoint(None)
        except BaseException:
            self._driver().give_up()
            raise

    def _groups(self: Any) -> dict[str, Any]:
        return {n: getattr(self, GROUPS[n]) for n in GROUPS if n == "actor" or self.use_critic}

    def _driver(self: Any) -> CkptfsDriver:
        if self.ckptfs_driver is None:
            config = self.config.trainer
            saved = self.config.actor_rollout_ref.actor.get("checkpoint", None) or {}
            options = {
                "remote_dir": os.environ.get("CKPTFS_URI"),
                "local_dir": config.default_local_dir,
                "keep_latest": config.get("max_actor_ckpt_to_keep", None),
                "mode": "async" if saved.get("async_save", False) else "sync",
                **self.ckptfs,
            }
            if not options["remote_dir"]:
                raise StateError(
                    "the place to save to is not configured", hint="set CKPTFS_URI, or ckptfs="
                )
            self.ckptfs_driver = CkptfsDriver(**options)
        driver: CkptfsDriver = self.ckptfs_driver
        return driver


class _Group:
    """A worker group that receives the place to save to or load from.

    The driver retains whole steps; the group removes none.
    """

    def __init__(self, group: Any, where: Any) -> None:
        self._group, self._where = group, where

    def save_checkpoint(self, path: str, _: Any = None, step: int = 0, **options: Any) -> Any:
        return self._group.save_checkpoint(path, self._where, step, **options)

    def load_checkpoint(self, local_path: str, *_: Any, **options: Any) -> Any:
        return self._group.load_checkpoint(local_path, self._where, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _step_in(path: str, *runs: Any) -> int:
    found = STEP.search(path)
    if found is None or Uri.parse(path).parent not in [Uri.parse(run) for run in runs]:
        raise StateError(
            f"resume_from_path {Uri.parse(path)} is not a global_step_N of this run",
            hint="for a step of another run, set CKPTFS_URI or default_local_dir to that run",
        )
    return int(found[1])


@contextlib.contextmanager
def _with(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    plug()
