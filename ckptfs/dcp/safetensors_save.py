"""An export of a state dict to safetensors files: the agreement of the ranks, and what each writes.

plan_export (a step)   every rank describes its tensors; the coordinator decides files and owners
Export.write           every rank: gather in the agreed order; owners: a thread that writes
Export.finish          the coordinator: what was planned was written
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptfs._torch import is_sharded_tensor
from ckptfs.commit.attempt import Attempt
from ckptfs.commit.layout import MANIFEST
from ckptfs.commit.spec import WrittenPart
from ckptfs.dcp.leaves import check_tensor, fingerprint_of
from ckptfs.dcp.safetensors_files import FileWriter, PlannedExport
from ckptfs.dcp.safetensors_format import (
    INDEX,
    SUFFIX,
    Entry,
    dtype_name,
    encode_index,
)
from ckptfs.dcp.safetensors_plan import Held, order, plan_files
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.events import Counters
from ckptfs.topology.control import Control

__all__ = ["Export", "PlannedExport", "plan_export"]

# Dtypes that gloo or NCCL do not move, and ones of the same width that both do: bits are only copied.
_CARRIERS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.bool: torch.uint8,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex64: torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as one rank has it. tied_to: the first key with the same memory, "" for none, None
    where this rank has no element of it. fingerprint: of a plain tensor's values.
    """

    entry: Entry
    is_sharded: bool
    tied_to: str | None
    fingerprint: int | None


def plan_export(
    state_dict: Mapping[str, Any],
    control: Control,
    *,
    max_bytes: int,
    fqn_to_index_mapping: Mapping[str, int] | None,
    metadata: Mapping[str, str],
    beside: Collection[str] = (),
) -> PlannedExport:
    """Collective. Files and their owners, with every check that needs no file. StateError.

    beside: names of further files.
    """

    def describe() -> list[_Described]:
        for name in beside:
            if name in (INDEX, MANIFEST) or name.endswith(SUFFIX) or not _is_plain(name):
                raise StateError(f"{name!r} is no name for a file beside the tensors")
        return _describe(state_dict)

    def decide(answers: list[list[_Described]]) -> PlannedExport:
        held, aliases = _agreed(answers)
        files = plan_files(
            held,
            max_bytes=max_bytes,
            world=control.size,
            fqn_to_index_mapping=fqn_to_index_mapping,
        )
        return PlannedExport(files, aliases, metadata)

    return control.step("plan the export", describe, decide)


def _describe(state_dict: Mapping[str, Any]) -> list[_Described]:
    first: dict[object, str] = {}
    found = []
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or is_sharded_tensor(value):
            raise StateError(
                f"{key!r} is a {type(value).__name__}, and the format holds tensors only",
                hint="pass model.state_dict(); ShardedTensors of FSDP1 as full tensors",
            )
        local = value.to_local() if isinstance(value, DTensor) else value
        reason = check_tensor(local)
        if reason is None and dtype_name(value.dtype) is None:
            reason = f"safetensors has no {value.dtype}"
        if reason is not None:
            raise StateError(f"{key!r}: {reason}")
        tied: str | None = None
        if local.numel():
            memory = (local.device, local.data_ptr(), value.dtype, value.shape, local.stride())
            tied = first.setdefault(memory, key)
        is_sharded = isinstance(value, DTensor)
        found.append(
            _Described(
                Entry(key, value.dtype, tuple(value.shape)),
                is_sharded,
                "" if tied == key else tied,
                None if is_sharded else fingerprint_of(value),
            )
        )
    return found


def _agreed(answers: Sequence[Sequence[_Described]]) -> tuple[list[Held], dict[str, str]]:
    """Every key once with its holders, and what is tied on all of them."""
    ranks: dict[str, list[int]] = defaultdict(list)
    said: dict[str, list[_Described]] = defaultdict(list)
    for rank, described in enumerate(answers):
        for one in described:
            ranks[one.entry.key].append(rank)
            said[one.entry.key].append(one)
    if not said:
        raise StateError("there is no tensor to export", hint="pass model.state_dict()")
    for key, each in said.items():
        for rank, one in zip(ranks[key], each, strict=True):
            if (one.entry, one.is_sharded) != (each[0].entry, each[0].is_sharded):
                raise StateError(
                    f"{key!r} is {_text(each[0])} on rank {ranks[key][0]} and {_text(one)} on {rank}"
                )
            if one.fingerprint != each[0].fingerprint:
                raise StateError(
                    f"{key!r} has other values on rank {rank} than on rank {ranks[key][0]}",
                    hint="one of them would be lost; make them equal, or DTensors of one tensor",
                )
    aliases: dict[str, str] = {}
    for key, each in said.items():
        to = {one.tied_to for one in each} - {None}
        kept = next(iter(to)) if len(to) == 1 else None
        if kept and ranks[kept] == ranks[key] and kept not in aliases:
            aliases[key] = kept
    held = [
        Held(each[0].entry, tuple(ranks[key])) for key, each in said.items() if key not in aliases
    ]
    return held, aliases


def _is_plain(name: str) -> bool:
    """A relative path that stays in its directory, on every storage."""
    parts = name.split("/")
    return not ({"", ".", ".."} & set(parts)) and not any(c in name for c in "\\\0:")


def _text(one: _Described) -> str:
    kind = "sharded " if one.is_sharded else ""
    return f"{kind}{one.entry.dtype} {list(one.entry.shape)}"


class Export:
    """What one rank does of it: ``write`` and ``finish`` for ``Attempt.commit``."""

    def __init__(
        self,
        attempt: Attempt,
        planned: PlannedExport,
        state_dict: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        self._attempt = attempt
        self._planned = planned
        self._state = state_dict
        self._extra = dict(files)

    def write(self) -> WrittenPart:
        """Gather every tensor in the agreed order and write this rank's files; durable on return.

        A rank whose files cannot be written goes on gathering: the others need it for theirs.
        """
        started = time.perf_counter()
        rank = self._attempt.seat.control.rank
        files = self._planned.files
        self._attempt.storage.make_dir(self._attempt.directory)
        with FileWriter(self._attempt, self._planned) as mine, torch.no_grad():
            for number, entry in order(files):
                value = self._state.get(entry.key)
                if value is None:
                    continue  # of another pipeline stage
                whole = _gathered(value) if isinstance(value, DTensor) else value
                if files[number].owner == rank:
                    mine.put(number, entry, whole)
                del whole  # or two of them would lie in memory while the next one is gathered
            records = mine.finish()
        if rank == 0:
            records += [mine.small(name, data) for name, data in self._small_files().items()]
        self._sync()
        size = sum(record.size_bytes for record in records)
        counters = Counters(
            size_bytes=size,
            payload_bytes=sum(f.size_bytes for f in files if f.owner == rank),
            files=len(records),
            items=sum(len(f.entries) for f in files if f.owner == rank),
            write_s=time.perf_counter() - started,
        )
        return WrittenPart(tuple(records), counters)

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """On the coordinator: every planned file is there, once."""
        found = Counter(record.path for part in parts for record in part.files)
        wrong = [file.name for file in self._planned.files if found[file.name] != 1]
        if wrong:
            raise IncompleteCheckpointError(
                f"{wrong[0]} was planned, and {found[wrong[0]]} written"
            )
        return {}

    def _small_files(self) -> dict[str, bytes]:
        found = dict(self._extra)
        if len(self._planned.files) > 1:
            names = {e.key: file.name for file in self._planned.files for e in file.entries}
            total = sum(file.size_bytes for file in self._planned.files)
            found[INDEX] = encode_index(names, total)
        return found

    def _sync(self) -> None:
        directory = self._attempt.directory
        for folder in (directory, f"{directory}/{self._attempt.save_id}"):
            self._attempt.storage.sync(folder)


def _gathered(value: DTensor) -> torch.Tensor:
    """The whole tensor, on every rank of its mesh. Collective on that."""
    carrier = _CARRIERS.get(value.dtype)
    if carrier is None or any(placement.is_partial() for placement in value.placements):
        return value.full_tensor()
    moved = DTensor.from_local(
        value.to_local().view(carrier),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return moved.full_tensor().view(value.dtype)
