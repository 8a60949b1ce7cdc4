"""The load planner: every check that needs no data comes before the first byte.

    keys      missing from the checkpoint, or there and not asked for     (strict)
    kinds     a tensor asked for where an object was saved, or the reverse
    tensors   global shape, and dtype (strict; otherwise torch converts)

Objects load with ``weights_only=True``: a checkpoint is data, never a program.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ckptfs.dcp.leaves import load_leaf
from ckptfs.dcp.per_rank import listed, unmarked_key
from ckptfs.dcp.planner import gc_paused
from ckptfs.errors import StateError

__all__ = ["LoadPlanner", "unexpected_keys"]


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load into a state dict, in place, with any sharding.

    strict: keys missing from the checkpoint and dtypes that differ are StateErrors; otherwise such
    keys keep their values (``missing``) and torch converts. weights_only: False executes what the
    objects' pickles say; only for checkpoints that you trust as you trust code.
    """

    def __init__(self, *, strict: bool = True, weights_only: bool = True) -> None:
        super().__init__(allow_partial_load=True)
        self.strict = strict
        self.weights_only = weights_only
        self.missing: tuple[str, ...] = ()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Flatten the state dict; tensors on the meta device get memory. All ranks."""
        with gc_paused():
            # Where torch gives meta tensors memory, it makes None of every object it does not know.
            kept = [*_objects((), state_dict)]
            try:
                super().set_up_planner(state_dict, metadata, is_coordinator)
            except ValueError as error:
                raise StateError(f"the state dict cannot be flattened: {error}") from error
            for path, value in kept:
                _put(state_dict, path, value)

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads. All ranks. StateError names every key that does not fit."""
        with gc_paused(), self._as_flattened():
            try:
                plan = super().create_local_plan()
            except (ValueError, RuntimeError) as error:
                self._check()
                raise StateError(f"the state dict does not fit: {error}") from error
            self._check()
            return plan

    @contextlib.contextmanager
    def _as_flattened(self) -> Iterator[None]:
        """Keep torch from flattening anew, as before 2.4, where nothing that is asked for is missing.

        It does where anything is not asked for, such as a sharded tensor of which this rank has no
        part, and then asks for lists of dicts whole.
        """
        flatten, saved = self.flatten_state_dict, self.metadata
        known = saved is not None and all(
            key in saved.state_dict_metadata for key in self.state_dict
        )
        self.flatten_state_dict = flatten and not known
        try:
            yield
        finally:
            self.flatten_state_dict = flatten

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one object into the state dict. StateError when it would execute code."""
        key = read_item.dest_index.fqn
        try:
            leaf = load_leaf(value, weights_only=self.weights_only)
        except Exception as error:
            # The unpickler names what it refuses in a dozen ways; all mean the same here.
            raise StateError(
                f"the object under {key!r} does not load without executing code: {error}",
                hint="allow its class with torch.serialization.add_safe_globals if you trust it",
            ) from error
        if self.flatten_state_dict:
            _put(self.original_state_dict, self.mappings[key], leaf)
        else:
            self.state_dict[key] = leaf

    def _check(self) -> None:
        assert self.metadata is not None  # noqa: S101 - torch's own base class has checked it
        saved = self.metadata.state_dict_metadata
        problems = []
        self.missing = tuple(key for key in self.state_dict if key not in saved)
        if self.missing and self.strict:
            problems.append(f"not in the checkpoint: {listed(self.missing)}")
        for key, value in self.state_dict.items():
            if key in saved and (problem := _mismatch(value, saved[key], strict=self.strict)):
                problems.append(f"{key!r}: {problem}")
        if problems:
            shown = "; ".join(problems[:10])
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""  # noqa: PLR2004
            raise StateError(
                f"the state dict does not fit the checkpoint: {shown}{more}",
                hint="strict=False skips missing keys and converts dtypes; shapes must be equal",
            )


def unexpected_keys(metadata: Metadata, asked: set[str]) -> tuple[str, ...]:
    """Keys of the checkpoint that no rank asks for; ``asked`` is the union over all ranks.

    What other ranks kept for themselves (per_rank=) is expected.
    """
    return tuple(
        key
        for key in metadata.state_dict_metadata
        if key not in asked and ((own := unmarked_key(key)) is None or own[0] not in asked)
    )


def _mismatch(value: object, saved: object, *, strict: bool) -> str | None:
    """Why the saved value cannot go into ``value``; None when it can."""
    wants_tensor = isinstance(value, torch.Tensor)
    if isinstance(saved, TensorStorageMetadata) != wants_tensor:
        if wants_tensor and not strict:
            return None  # stock's behaviour: the object replaces the tensor
        has, asks = ("an object", "a tensor") if wants_tensor else ("a tensor", "an object")
        return f"the checkpoint has {has}, the state dict {asks}"
    if not isinstance(value, torch.Tensor) or not isinstance(saved, TensorStorageMetadata):
        return None
    if tuple(saved.size) != tuple(value.size()):
        return f"shape {tuple(saved.size)} saved, {tuple(value.size())} asked for"
    if strict and saved.properties.dtype != value.dtype:
        return f"{saved.properties.dtype} saved, {value.dtype} asked for"
    return None


def _objects(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves that are neither tensors nor plain values, and where they lie."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _objects((*path, key), inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _objects((*path, place), inner)
    elif value is not None and not isinstance(value, (torch.Tensor, int, float, str, bytes)):
        yield path, value


def _put(root: Any, path: tuple[str | int, ...], leaf: object) -> None:
    """Replace the value at a flattened path.

    Flattening wrote every dict key as text; an int key is found again by its text, where stock
    DCP would add a second one beside it.
    """
    container = root
    for part in path[:-1]:
        container = container[_key_of(container, part)]
    if not isinstance(container, (MutableMapping, MutableSequence)):
        raise StateError(f"{'.'.join(map(str, path))} lies in a {type(container).__name__}")
    container[_key_of(container, path[-1])] = leaf


def _key_of(container: Any, part: str | int) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)
