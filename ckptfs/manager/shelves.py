"""Modules, optimizers and whatever else a trainer holds, as named checkpoints of any number of runs.

    shelves = Shelves(mode="async", meta_file="meta.pt")
    shelves.save("s3://bucket/run/epoch=1.ckpt", {"model": ...}, meta_bytes, step=20)
    meta = shelves.load("s3://bucket/run/epoch=1.ckpt", "model", module, {"optimizer": optimizer})

A trainer's meta data is part of the state, so that one commit holds tensors and progress; the same
bytes lie beside as ``meta_file``, which is where stock readers look for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from ckptfs.commit.entries import Kind
from ckptfs.dcp.api import load
from ckptfs.errors import NotFoundError, StateError
from ckptfs.manager.named import NamedCheckpoints
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["META", "Shelves"]

META = "ckptfs.meta"


class Shelves:
    """Every rank makes one; all calls but ``is_file`` are collective. Arguments and errors are those of
    ``NamedCheckpoints``, of which it makes one for each run that it saves into.
    """

    def __init__(
        self, *, mode: str, meta_file: str, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._mode, self._meta_file = mode, meta_file
        self.storage_options = dict(storage_options or {})
        self._shelves: dict[Uri, NamedCheckpoints] = {}
        self._held: set[Uri] = set()

    def _shelf(self, run: Uri) -> NamedCheckpoints:
        if run not in self._shelves:
            shelf = NamedCheckpoints(
                run,
                mode=self._mode,
                beside=(self._meta_file,),
                storage_options=self.storage_options,
            )
            self._shelves[run] = shelf
            for held in self._held:
                if held.parent == run:
                    shelf.hold(held.name)
        return self._shelves[run]

    def save(
        self,
        target: Uri,
        state: Mapping[str, Any],
        meta: bytes,
        *,
        step: int | None,
        kind: Kind = Kind.CHECKPOINT,
    ) -> None:
        """Collective. meta: equal on all ranks. kind: as for ``NamedCheckpoints.save``."""
        whole = {**state, META: meta}
        beside = {self._meta_file: meta}
        shelf = self._shelf(target.parent)
        shelf.save(target.name, whole, step=step, beside=beside, kind=kind)

    def load(
        self,
        target: Uri,
        key: str,
        module: Module,
        optimizers: Mapping[str, Optimizer],
        *,
        strict: bool = True,
    ) -> bytes | None:
        """Collective. Fill the module, saved under ``key``, and optimizers under theirs. The meta data;
        None where a stock writer left it in a file. It is not removed before ``close``.

        StateError: strict, and keys are missing. NotFoundError, IntegrityError, ...: as ``ckptfs.load``.
        """
        self.wait()
        state: dict[str, Any] = {key: get_model_state_dict(module), META: b""}
        for name, optimizer in optimizers.items():
            state[name] = get_optimizer_state_dict(module, optimizer)
        loaded = load(state, target, strict=False, storage_options=self.storage_options)
        missing = [name for name in loaded.missing_keys if name != META]
        if missing and strict:
            raise StateError(
                f"the checkpoint lacks {len(missing)} keys, {missing[0]} is the first",
                uri=target,
                hint=self._hint(missing, optimizers),
            )
        set_model_state_dict(module, state[key], options=StateDictOptions(strict=strict))
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state[name])
        self._held.add(target)
        if target.parent in self._shelves:
            self._shelves[target.parent].hold(target.name)
        return None if META in loaded.missing_keys else state[META]

    def _hint(self, missing: list[str], optimizers: Mapping[str, Optimizer]) -> str:
        if not any(key.split(".")[0] in optimizers for key in missing):
            return "strict=False leaves them as they are"
        # Going on with a fresh optimizer is not resuming, and looks like it.
        return (
            "it has no optimizer: weights, such as an export. Resume from a whole checkpoint, which "
            "ckptfs.latest() of its run names, or load these weights into the model and begin anew; "
            "strict=False would leave the optimizer as it is"
        )

    def is_file(self, target: Uri) -> bool:
        """Local. Whether it is a single file; False also where nothing is: loading tells."""
        storage = open_storage(target.parent, self.storage_options)
        try:
            return not storage.stat(target.name).is_dir
        except NotFoundError:
            return False
        finally:
            storage.close()

    def knows(self, run: Uri) -> bool:
        """Local. Whether something was saved into that run: only there anything is removed."""
        return run in self._shelves

    def remove(self, target: Uri) -> None:
        """Collective. As ``NamedCheckpoints.remove``, in a run that something was saved into."""
        self._shelf(target.parent).remove(target.name)

    def wait(self) -> None:
        """Collective."""
        self._each(NamedCheckpoints.wait)

    def close(self) -> None:
        """Collective. It may be used again."""
        try:
            self._each(NamedCheckpoints.close)
        finally:
            self._shelves.clear()
            self._held.clear()

    def leave(self) -> None:
        """Local, after an exception."""
        try:
            self._each(NamedCheckpoints.leave)
        finally:
            self._shelves.clear()

    def _each(self, act: Callable[[NamedCheckpoints], None]) -> None:
        """All of them, on all ranks in one order; the first failure is raised after the last."""
        with contextlib.ExitStack() as stack:
            for shelf in self._in_order():
                stack.callback(act, shelf)

    def _in_order(self) -> Iterator[NamedCheckpoints]:
        yield from reversed(self._shelves.values())
