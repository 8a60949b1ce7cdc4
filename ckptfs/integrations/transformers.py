"""Transformers: the Trainer's own checkpoints, committed whole at a URI.

    saves = CkptfsCallback("s3://bucket/run", keep_latest=3, mode="async")
    trainer = Trainer(model, args, callbacks=[saves], ...)
    trainer.train(resume_from_checkpoint=saves.resume(args))    the newest committed one, or None

    save     the Trainer writes output_dir/checkpoint-N as always, every node its own files; then all
             ranks publish it together, and the local directory is removed
    resume   a local path, the same checkpoint on all ranks, on a machine with an empty output_dir too
    end      waits for what is under way, and raises what failed

Single calls of ``save_pretrained`` and ``from_pretrained`` need no callback, but a path:

    with ckptfs.checkpoint_dir(uri) as path:
        model.save_pretrained(path)

``DirectoryManager`` decides what to keep and how to commit, ``LocalRoot`` decides what is in
output_dir.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ckptfs.control.control import Control, open_control
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import CollectiveError, NotFoundError, StateError
from ckptfs.events import SaveSkipped
from ckptfs.integrations._support.local_root import LocalRoot, is_lead
from ckptfs.manager.directory_manager import DirectoryManager
from ckptfs.retention.policy import Best
from ckptfs.uri import Uri

__all__ = ["CkptfsCallback"]

logger = logging.getLogger("ckptfs.integrations")


class CkptfsCallback(TrainerCallback):
    """Saves, retains and resumes a Trainer's checkpoints at ``uri``. Every rank makes one.

    The Trainer decides when to save: save_strategy, save_steps. ``keep_best`` uses what the Trainer
    logs at the step of the save: ``Best("eval_loss")``; with load_best_model_at_end it is the
    Trainer's own criterion by default. save_total_limit must be None, save_on_each_node False, and
    output_dir a local path; otherwise it is a StateError. Errors are the same on all ranks. The
    error of an asynchronous save is raised by the next one, or at the end of training. After a
    crash at any time exactly the committed checkpoints are there.

    Use it in a ``with`` block if an exception of the training must not cut off a save under way.

    Args:
        uri: The run, the same on all ranks.
        mode: "sync" commits before the training continues; "async" publishes in the background:
            local disks then hold max_in_flight + 1 checkpoints.
        final_save: Save once more at the end of a training if its last step was not saved.
        options: As for ``ckptfs.DirectoryManager``: keep_latest, keep_every, keep_best,
            max_in_flight, if_slow, preempt_signals, every_s, storage_options and all others.

    Attributes:
        step: The step that was saved last, or resumed from; None before.
    """

    def __init__(
        self,
        uri: Any,
        *,
        mode: Literal["sync", "async"] = "sync",
        final_save: bool = True,
        **options: Any,
    ) -> None:
        self.uri = uri
        self._final_save = final_save
        self._options = {"mode": mode, "name": PREFIX_CHECKPOINT_DIR + "-{N}", **options}
        self._manager: DirectoryManager | None = None
        self._control: Control | None = None
        self._reading = contextlib.ExitStack()
        self._pending: dict[str, PendingSave] = {}
        self.step: int | None = None

    # -- resuming ---------------------------------------------------------------------------

    def resume(self, args: TrainingArguments) -> str | None:
        """Path of the newest checkpoint, for ``trainer.train(resume_from_checkpoint=...)``.

        Collective, read-only. It is the newest committed one. output_dir is not read. The path is
        valid until training has read it.

        Args:
            args: The Trainer's arguments.

        Returns:
            The path; None only if nothing was ever saved.

        Raises:
            IncompleteCheckpointError: The newest is not whole; an older one is not used in its
                place.
            IntegrityError: The newest is damaged; an older one is not used in its place.
        """
        manager = self._open(args)
        opened = self._reading.enter_context(manager.reading())
        if opened is None:
            return None
        self.step = opened.step
        return opened.path

    # -- what the Trainer calls, on every rank ------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Refuse arguments that would not work, before anything is computed."""
        self._check(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check that the training was resumed. Collective.

        Raises:
            StateError: The run is further than this training, which was not resumed.
        """
        if state.is_hyper_param_search:
            raise StateError(
                "a hyperparameter search consists of many runs",
                hint="give each trial a URI of its own",
            )
        manager, root = self._open(args), LocalRoot(args.output_dir)
        best = _name(state.best_global_step)
        root.on_nodes(self._ranks, "forget", lambda: root.forget(best))

        def decide(_: object) -> None:
            if self._options.get("begin_again"):
                return
            newest = manager.latest
            if newest is not None and (newest.step or 0) > state.global_step:
                raise StateError(
                    f"training begins at step {state.global_step}, but step {newest.step} of "
                    "its run is already committed",
                    uri=newest.uri,
                    hint="train(resume_from_checkpoint=callback.resume(args)), take another URI, or pass "
                    "begin_again=True to CkptfsCallback",
                )

        self._ranks.step("begin to train", lambda: None, decide)
        self.step = state.global_step or None
        if args.load_best_model_at_end and state.best_global_step:
            self._fetch_best(manager, root, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask for a save if signals or seconds require one; before a save, clear its directory."""
        # Only after a whole step: auto_find_batch_size starts again from what it resumed from.
        self._reading.close()
        if any(self._options.get(key) for key in ("preempt_signals", "every_s", "every_steps")):
            manager = self._open(args)
            control.should_save |= manager.should_save(state.global_step)
            control.should_training_stop |= manager.preempted
        self._expect(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask for the final save: every training passes here at its end, whatever ended it."""
        control.should_save |= self._final_save and control.should_training_stop
        self._expect(args, state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save the directory that the Trainer wrote. Collective.

        The Trainer calls this on each rank when that rank has written; the manager looks at the
        directory when all ranks have.
        """
        step, root = state.global_step, LocalRoot(args.output_dir)
        if step == self.step:
            return  # another callback asked for the same save again
        name, best = _name(step), _best(args, state)
        saved = self._open(args).save(
            step, root.folder(name), _metrics(state), consume=name not in best
        )
        if isinstance(saved, SaveSkipped):
            return
        self.step = step
        self._pending = {k: v for k, v in self._pending.items() if not v.committed.done()}
        if isinstance(saved, PendingSave):
            self._pending[name] = saved
        if is_lead(self._ranks):
            root.forget(*best, *self._pending)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Finish what is under way, release the run, raise what failed. Collective."""
        lead = is_lead(self._ranks)
        self.close()
        if lead:
            LocalRoot(args.output_dir).forget(*_best(args, state))

    # -- the best model ---------------------------------------------------------------------

    def _fetch_best(self, manager: DirectoryManager, root: LocalRoot, state: TrainerState) -> None:
        """Fetch the best model so far to output_dir. Collective.

        At its end the Trainer loads the best model from output_dir. If that is another machine's,
        it skips the model without an error.
        """
        name = _name(state.best_global_step)

        def fetch(stack: contextlib.ExitStack, into: str) -> str:
            stack.enter_context(manager.reading(state.best_global_step, into=into))
            return name

        if not self._ranks.step("best", lambda: os.path.isdir(root.folder(name)), all):
            try:
                root.bring(self._ranks, fetch, newest=False)
            except CollectiveError:
                raise  # a rank's own failure, which may be a NotFoundError too
            except NotFoundError:
                logger.warning(
                    "%s, the best so far, is gone: load_best_model_at_end starts again without it",
                    name,
                )
                return
        state.best_model_checkpoint = root.folder(name)

    # -- small things -----------------------------------------------------------------------

    def _expect(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        # A finished training that is resumed makes one more step.
        is_extra = 0 < state.max_steps < state.global_step
        if state.global_step == self.step or is_extra:
            control.should_save = False  # committed or under way: do not write there now
            return
        may_save = args.save_strategy == SaveStrategy.BEST and control.should_evaluate
        if control.should_save or may_save:
            root, name = LocalRoot(args.output_dir), _name(state.global_step)
            root.on_nodes(self._ranks, "make room", lambda: root.make_room(name))

    def _open(self, args: TrainingArguments) -> DirectoryManager:
        self._check(args)
        _ = args.device  # makes the process group, if there is none yet
        if self._manager is None:
            options = dict(self._options)
            metric = args.metric_for_best_model
            if args.load_best_model_at_end and options.get("keep_latest") and metric:
                name = metric if metric.startswith("eval_") else f"eval_{metric}"
                mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
                options.setdefault("keep_best", Best(name, mode=mode))
            self._manager = DirectoryManager(self.uri, **options)
        return self._manager

    def _check(self, args: TrainingArguments) -> None:
        if args.save_total_limit is not None:
            raise StateError(
                f"save_total_limit is {args.save_total_limit}: the Trainer would delete local "
                "checkpoints by their age, without knowing which are committed",
                hint="leave it out, and pass keep_latest to CkptfsCallback",
            )
        if args.save_on_each_node:
            raise StateError(
                "save_on_each_node writes files that differ from node to node under one name",
                hint="leave it out: every node publishes what it writes, and fetches all to resume",
            )
        if "://" in args.output_dir:
            raise StateError(
                f"output_dir is {args.output_dir!r}, which the Trainer takes for a local directory",
                hint="CkptfsCallback takes the URI; output_dir is scratch, on each node",
            )
        target = Uri.parse(self.uri)
        if target.is_local and LocalRoot(args.output_dir).is_at(target.local_path):
            raise StateError(
                "output_dir is the run itself; it must be a scratch directory outside the run",
                uri=target,
                hint="give one of them another directory",
            )

    @property
    def _ranks(self) -> Control:
        """The control. Collective at its first use."""
        if self._control is None:
            self._control = open_control(
                process_group=self._options.get("process_group"),
                timeout_s=self._options.get("timeout_s"),
            )
        return self._control

    def close(self) -> None:
        """Finish what is under way and release the run; another training claims it again.

        Collective.
        """
        self._leave(lambda manager: manager.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close as ``close`` does; after an exception in the block, wait for no other rank."""
        self._leave(lambda manager: manager.__exit__(exc_type, exc, tb))

    def _leave(self, close: Callable[[DirectoryManager], None]) -> None:
        manager, self._manager = self._manager, None
        ranks, self._control = self._control, None
        self._pending = {}
        with contextlib.ExitStack() as stack:
            if ranks is not None:
                stack.callback(ranks.close)
            if manager is not None:
                stack.callback(close, manager)
            stack.callback(self._reading.close)


def _name(step: int | None) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{step or 0}"


def _best(args: TrainingArguments, state: TrainerState) -> tuple[str, ...]:
    """Return the directory that the Trainer itself will read at its end."""
    return (_name(state.best_global_step),) if args.load_best_model_at_end else ()


def _metrics(state: TrainerState) -> dict[str, float]:
    """Return what was logged at this step: the loss, an evaluation."""
    found: dict[str, float] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            found |= {k: v for k, v in entry.items() if k != "step" and isinstance(v, int | float)}
    return found
