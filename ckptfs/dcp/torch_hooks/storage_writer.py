"""StorageWriter: torch's own ``dcp.save`` and ``async_save`` through ckptfs' commit.

    dcp.save(state, storage_writer=ckptfs.StorageWriter("s3://bucket/run/step_100"))
    dcp.save(state, storage_writer=writer, checkpoint_id="s3://bucket/run/step_200")

It derives from torch's abstract class, not from FileSystemWriter: that one loses the errors of its threads,
and for a moment of its rename there is no checkpoint. The hooks do little: the agent (``commit_agent``) makes
the collective calls, ``dcp.write`` writes the files, and torch's planner makes the metadata. This works with
``no_dist``, with subgroups, from async_save's thread, and pickled into async_save's process.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptfs import _torch
from ckptfs.commit.delete.shared_data import stock_path
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import IfExists, SaveSpec, SmallFile, WrittenPart
from ckptfs.commit.session import Place
from ckptfs.control.control import timeout_of
from ckptfs.dcp.incremental.reuse import Memory, RankItems, Site, Unchanged, need_run, write_changed
from ckptfs.dcp.planning.global_plan import copies_for
from ckptfs.dcp.planning.leaves import WAYS_OUT, check_leaf, check_leaf_bytes
from ckptfs.dcp.planning.save_planner import SavePlanner as CheckedPlanner
from ckptfs.dcp.planning.state_dicts import listed, original_item, rename_plan
from ckptfs.dcp.torch_hooks.boundary import Given, StockPlace, crossing, one_place
from ckptfs.dcp.torch_hooks.commit_agent import Handover, Task, send_orders, start_agent
from ckptfs.dcp.write.pipeline import decode_placed, metadata_files, written_part
from ckptfs.dcp.write.rank_files import WriteEngineName, engine_for, write_files
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.uri import Uri, options_of

__all__ = ["StorageWriter"]

logger = logging.getLogger("ckptfs.dcp")

_COPY_AHEAD_BYTES = 10_000_000  # stock's default

# Arguments of stock's writer that change nothing here, and why.
_WITHOUT_EFFECT = {
    "sync_files": "files are synced all the same, because a commit names only what is durable",
    "per_thread_copy_ahead": "what is copied ahead of a write is bounded by the windows that it fills",
    "cache_staged_state_dict": "this writer is no stager: give dcp.async_save "
    "async_stager=BlockingAsyncStager(cache_staged_state_dict=True)",
}


class StorageWriter(StockPlace, TorchStorageWriter):
    """Saves one checkpoint at ``uri``; ``reset`` (torch calls it) prepares it for the next.

    Errors arrive as torch's CheckpointException with ckptfs's errors in ``failures[rank]``. After a crash
    there is exactly the old or the new checkpoint, as with ``ckptfs.save``. Pass
    ``planner=ckptfs.dcp.planning.save_planner.SavePlanner()`` too, for the checks that need the state dict.

    Args:
        uri: Run and name; the run is the parent. None if every call has a checkpoint_id.
        path: Stock's name for ``uri``; None: see ``uri``.
        storage_options: What fsspec's filesystem of that protocol takes; None: those of ``uri``, if it has
            some.
        per_rank: fnmatch patterns of flattened keys that differ by rank and are kept for each.
        threads: Data files that each rank writes at once; None: as for ``ckptfs.save``.
        engine: "auto", "direct" or "buffered", as for ``ckptfs.save``.
        unchanged: "write" or "reference", as for ``ckptfs.save``.
        if_exists: "replace", as with stock, keeps the old checkpoint until the new one is committed. If the
            name is taken, it claims the run for the save, and waits for other calls that hold the run for
            30 s less than ``timeout_s``. If the name is new, it claims nothing. "error" refuses a name that
            is committed.
        run: A held run, which fences the save; None: as for ``ckptfs.save``.
        step: Completed optimizer steps; None takes the number that ends the name.
        scope: "auto", "shared" or "node", as for ``ckptfs.save``.
        domain: A name in place of ``scope``, as for ``ckptfs.save``; None: by ``scope``.
        process_group: The group given to ``dcp.save``. Needed if that is not the default one and torch is
            older than 2.10, or if several groups save at once under the same URI, each on disks of its own.
            None: the default group.
        timeout_s: How long to wait, in seconds, for a silent rank and for torch to call the next hook; None:
            600, or CKPTFS_TIMEOUT_S.
        single_file_per_rank: An argument of stock's; False makes a file for each item.
        sync_files: An argument of stock's; changes nothing, and the log says why.
        thread_count: Stock's name for ``threads``; None: see ``threads``.
        per_thread_copy_ahead: An argument of stock's; changes nothing, and the log says why. None: not given.
        cache_staged_state_dict: An argument of stock's; changes nothing, and the log says why.
        overwrite: An argument of stock's: False is ``if_exists="error"``, True is "replace"; None: see
            ``if_exists``.
        serialization_format: An argument of stock's; any other than TORCH_SAVE is a StateError. None:
            TORCH_SAVE.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Uri | None = None,
        *,
        path: str | os.PathLike[str] | Uri | None = None,
        storage_options: Mapping[str, Any] | None = None,
        per_rank: Sequence[str] = (),
        threads: int | None = None,
        engine: Literal["auto", "direct", "buffered"] = "auto",
        unchanged: Literal["write", "reference"] = "write",
        if_exists: Literal["error", "replace"] = "replace",
        run: Run | None = None,
        step: int | None = None,
        scope: Literal["auto", "shared", "node"] = "auto",
        domain: str | None = None,
        process_group: Any = None,
        timeout_s: float | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int | None = None,
        cache_staged_state_dict: bool = False,
        overwrite: bool | None = None,
        serialization_format: Any = None,
        _extensions: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        uri = one_place(uri, path)
        if overwrite is not None:
            if overwrite and if_exists == "error":
                raise StateError('overwrite=True and if_exists="error" contradict each other')
            if_exists = "replace" if overwrite else "error"
        if threads is not None and thread_count not in (None, threads):
            raise StateError("threads and thread_count name the same argument")
        _refuse_words(serialization_format, _extensions)
        _tell_words(
            {
                "sync_files": not sync_files,
                "per_thread_copy_ahead": per_thread_copy_ahead not in (None, _COPY_AHEAD_BYTES),
                "cache_staged_state_dict": cache_staged_state_dict,
            }
        )
        if not single_file_per_rank and unchanged == "reference":
            raise StateError(
                "single_file_per_rank=False would write tensors again that "
                'unchanged="reference" should keep'
            )
        self._single_file = single_file_per_rank
        self._uri: Given = uri
        self._place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
        # The generation is all that fences a save, and unlike the Run it can be pickled.
        self._spec = SaveSpec(
            name="",
            step=step,
            if_exists=IfExists(if_exists),
            run=None if run is None else run.generation,
            per_rank=tuple(per_rank),
        )
        self._threads = thread_count if threads is None else threads
        self._engine = WriteEngineName(engine)
        self._unchanged, self._memory = Unchanged(unchanged), Memory()
        self._group = process_group
        self._timeout_s = timeout_of(timeout_s)
        self._warned: set[str] = set()  # keys of objects that no load takes by default
        self._checked: set[tuple[str, type]] = set()  # keys and classes of objects that load
        self._handover: Handover | None = None
        self._plan: SavePlan | None = None  # this rank's, before deduplication
        self._domains: dict[str, tuple[int, ...]] = {}
        self._rank = 0
        self._run_uri = None if run is None else run.uri
        self._common = None if run is None else run.session.common
        if self._unchanged is Unchanged.REFERENCE:
            need_run(self._spec, self._shown)
        if run is not None:
            run.check(run.uri / "any" if uri is None else Uri.parse(uri))

    # -- torch's hooks, in their order ---------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, at ``checkpoint_id`` if given. All ranks.

        This does no I/O, because an error here would reach this rank alone.
        """
        self._give_up("a new save began on the same writer")
        if checkpoint_id is not None:
            self._uri = checkpoint_id
            self._spec_step_from_name()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Start this rank's agent. All ranks.

        Raises:
            StateError: ``use_collectives=False``, or there is no URI.
        """
        self._give_up("a new save began on the same writer")
        self._rank = self._rank_in_group(kwargs.get("rank"), is_coordinator=is_coordinator)
        with crossing(self._rank):
            if not kwargs.get("use_collectives", True):
                raise StateError(
                    "use_collectives=False is not supported",
                    uri=self._shown,
                    hint="without them DCP cannot tell the ranks that one of them failed",
                )
            store, channel = self._channel()
            task = Task(
                *(self._checked_uri(), self._place, self._spec, self._timeout_s),
                common=self._common,
                channel=channel,
            )
            self._handover = start_agent(task, self._rank, store, coordinator=is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Give keys of ``per_rank`` their own names. All ranks. Writes nothing."""
        with crossing(self._rank):
            plan = rename_plan(plan, self._spec.per_rank, self._rank)
            if (
                plan.items or self._plan is None
            ):  # stock's plan cache sends an empty plan if it has not changed
                self._plan = plan
            # What this rank could write, before DCP assigns it to another one: see copies_for.
            return dataclasses.replace(plan, storage_data=[(i.index, _size(i)) for i in plan.items])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt on all ranks: its directory exists when this returns. Coordinator."""
        with crossing(self._rank):
            handover = self._opened_handover
            send_orders(handover, len(plans), self._channel()[0])
            begun = handover.wait(handover.begun, "the attempt's begin")
            self._domains = {d.id: d.ranks for d in begun.attempt.session.placement.domains}
            held = [plan.storage_data or [] for plan in plans]
            planned = [{item.index for item in plan.items} for plan in plans]
            extra = copies_for(tuple(self._domains.values()), held, planned)
            return [
                dataclasses.replace(plan, storage_data=more)
                for plan, more in zip(plans, extra, strict=True)
            ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; durable on return. All ranks; local."""
        handover = self._opened_handover
        with crossing(self._rank):
            begun = handover.wait(handover.begun, "the attempt's begin")
            attempt = begun.attempt
            plan = self._with_copies(plan)
            try:
                part = self._write(plan, planner, attempt, begun.domain)
                handover.deliver(handover.part, part)
            except BaseException as error:
                # The agents receive the error at once, and clean up while torch sends it to the other
                # ranks.
                handover.fail(handover.part, error)
                why = handover.why_given_up() if isinstance(error, OSError) else None
                if why is not None and why is not error:
                    raise why from error  # the agent removes the files while they are being written
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(_results(plan, part, attempt.storage.root))
        return future

    def _write(
        self, plan: SavePlan, planner: SavePlanner, attempt: SaveAttempt, domain: str
    ) -> WrittenPart:
        refused: dict[str, str] = {}

        def resolve(item: WriteItem) -> Any:
            own = original_item(item, self._rank)
            data = planner.resolve_data(own)
            if item.type is WriteItemType.BYTE_IO and (
                why := self._why_refused(planner, own, data)
            ):
                refused[own.index.fqn] = why
            return data

        if self._unchanged is Unchanged.REFERENCE:
            site = Site(attempt.storage, attempt.session.caps, attempt.keys, domain)
            items_here = RankItems(self._rank, plan.items, resolve)
            previous = attempt.previous
            part = write_changed(
                items_here,
                site,
                previous,
                self._memory,
                threads=self._threads,
                engine=engine_for(self._engine),
            )
            self._warn_of(refused)
            return part
        wrote = write_files(
            attempt.storage,
            attempt.prefix,
            self._rank,
            plan.items,
            resolve,
            engine=engine_for(self._engine),
            threads=self._threads,
            buckets=None if self._single_file else [[one] for one in enumerate(plan.items)],
        )
        self._warn_of(refused)
        return written_part(wrote, attempt.save_id, domain)

    def _why_refused(self, planner: Any, item: WriteItem, data: Any) -> str | None:
        """Return why a load would refuse the object that the planner saves for this item, or None.

        ``data`` has the object's bytes. An object of a class outside of builtins is checked once for each
        key.
        """
        if isinstance(planner, CheckedPlanner) or not isinstance(data, io.BytesIO):
            return None  # the planner refuses such objects itself; or this is not an object
        is_stock = getattr(type(planner), "transform_object", None) is (
            DefaultSavePlanner.transform_object
        )
        if not is_stock or not hasattr(planner, "lookup_object"):
            return check_leaf_bytes(data)
        leaf = planner.lookup_object(item.index)
        checked = (item.index.fqn, type(leaf))
        if checked in self._checked:
            return None
        why = check_leaf(leaf, data)
        if why is None and type(leaf).__module__ != "builtins":  # a dict may hold others next time
            self._checked.add(checked)
        return why

    def _warn_of(self, refused: Mapping[str, str]) -> None:
        """Warn, once for each, of objects that no load takes by default; they are saved anyway."""
        new = {key: why for key, why in sorted(refused.items()) if key not in self._warned}
        self._warned |= new.keys()
        if new:
            shown = "; ".join(f"{key!r}: {why}" for key, why in [*new.items()][:10])
            more = f"; and {len(new) - 10} more" if len(new) > 10 else ""  # noqa: PLR2004
            logger.warning(
                "%s: saved, but no load takes it by default: %s%s -- %s",
                self._shown,
                shown,
                more,
                WAYS_OUT,
            )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seal and project on all ranks; the save is committed when this returns. Coordinator."""
        handover = self._opened_handover
        with crossing(self._rank):
            try:
                save_id = handover.wait(handover.begun, "the attempt's begin").attempt.save_id
                handover.deliver(handover.files, self._describe(metadata, results, save_id))
            except BaseException as error:
                handover.fail(handover.files, error)
                raise
            handover.wait(handover.done, "the commit")

    def storage_meta(self) -> StorageMeta | None:
        """What planners may know before the save: the place that the user gave."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # -- for async_save in a process -----------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without group and agent, which do not exist in the other process."""
        return self.__dict__ | {
            "_group": None,
            "_handover": None,
            "_plan": None,
            "_checked": set(),  # a class may be one that cannot be pickled
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state. Never raises: an error in the child's unpickling would hang other ranks."""
        self.__dict__.update(state)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter, modules may be gone already, and the agent's thread has ended.
        if getattr(self, "_handover", None) is not None and not is_ending():
            self._give_up("its writer was garbage-collected")

    # -- the rest ------------------------------------------------------------------------

    @property
    def _opened_handover(self) -> Handover:
        if self._handover is None:
            raise StateError("torch did not call set_up_storage_writer", uri=self._shown)
        return self._handover

    def _give_up(self, why: str) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.cancel(why)

    def _rank_in_group(self, given_rank: int | None, *, is_coordinator: bool) -> int:
        """Return this rank among the participants; torch passes it since 2.10."""
        if given_rank is not None:
            return given_rank
        if is_coordinator or not _torch.has_default_group():
            return 0
        return _torch.rank_and_size(self._group)[0]

    def _checked_uri(self) -> str | os.PathLike[str] | Uri:
        if self._uri is None:
            raise StateError(
                "the writer has no URI",
                hint="StorageWriter(uri), or dcp.save(..., checkpoint_id=uri, storage_writer=writer)",
            )
        target = Uri.parse(self._uri)
        if self._run_uri is not None and target.parent != self._run_uri:
            # A generation has no meaning in another run's log: such a save would not be fenced.
            raise StateError(
                "the checkpoint is not directly in the run that was passed",
                uri=target,
                hint=f"the run is {self._run_uri}",
            )
        return self._uri

    def _channel(self) -> tuple[Any, str]:
        """Return the store that the ranks use, and a name that separates this group from others."""
        # With no_dist, or without a group, there is one participant, who needs no store.
        return _torch.group_channel(self._group) if _torch.has_default_group() else (None, "")

    def _spec_step_from_name(self) -> None:
        # A step that was passed belongs to the URI that was passed with it.
        self._spec = SaveSpec(
            name="",
            step=None,
            if_exists=self._spec.if_exists,
            run=self._spec.run,
            per_rank=self._spec.per_rank,
        )

    def _with_copies(self, plan: SavePlan) -> SavePlan:
        """Return the plan with what this rank writes for its domain in addition (``storage_data``)."""
        if not plan.storage_data or self._plan is None:
            return plan
        more = [item for item in self._plan.items if item.index in plan.storage_data]
        return dataclasses.replace(plan, items=[*plan.items, *more])

    def _describe(
        self, metadata: Metadata, results: list[list[WriteResult]], save_id: str
    ) -> dict[str, SmallFile]:
        written = [
            {
                r.index: (
                    r.storage_data.relative_path,
                    r.storage_data.offset,
                    r.storage_data.length,
                )
                for r in rank
            }
            for rank in results
        ]
        _refuse_unwritten(metadata, {index for rank in written for index in rank})
        return metadata_files(
            metadata, written, self._domains, checkpoint_id=self._shown, save_id=save_id
        )


def _refuse_words(serialization_format: Any, extensions: Sequence[Any] | None) -> None:
    """Raise StateError for what stock can write and this writer cannot."""
    if getattr(serialization_format, "name", "TORCH_SAVE") != "TORCH_SAVE":
        raise StateError(
            f"serialization_format={serialization_format} is not what this writer makes",
            hint="ckptfs.integrations.safetensors.save_safetensors writes safetensors",
        )
    if extensions:
        raise StateError(
            "_extensions have no effect: readers find tensors by the places of their bytes",
            hint="encrypt where the storage does, with its storage_options",
        )


def _tell_words(words: Mapping[str, bool]) -> None:
    """Log why an argument that was given has no effect."""
    for word in (word for word, is_given in words.items() if is_given):
        logger.warning("StorageWriter(%s=...) has no effect: %s", word, _WITHOUT_EFFECT[word])


def _results(plan: SavePlan, part: WrittenPart, root: Uri) -> list[WriteResult]:
    paths = [stock_path(f, root) for f in part.files if f.digests is not None]
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=length,
            storage_data=_torch.storage_info(paths[number], offset, length),
        )
        for item, (number, offset, length) in zip(
            plan.items, decode_placed(part.payload), strict=True
        )
    ]


def _size(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0


def _refuse_unwritten(metadata: Metadata, places: set[MetadataIndex]) -> None:
    """Raise IncompleteCheckpointError unless everything in the metadata was written."""
    missing = []
    for key, value in metadata.state_dict_metadata.items():
        wanted = (
            [MetadataIndex(key)]
            if isinstance(value, BytesStorageMetadata)
            else [MetadataIndex(key, chunk.offsets) for chunk in value.chunks]
        )
        missing += [key for index in wanted if index not in places]
    if missing:
        raise IncompleteCheckpointError(
            f"planned but not written: {listed(sorted(set(missing)))}",
            hint="nothing was committed",
        )
