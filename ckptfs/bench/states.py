"""A workload as tensors on the CPU: made, emptied, compared. Never inside a measured time.

    make_state   reproducible noise: the same workload, rank and number of ranks are the same bytes
    make_blank   the same shapes, zeros: what a load fills
    clear        zeros again, so that no load passes by what an earlier one left
    differences  names whose bytes are not those that were saved

With several ranks tensors are DTensors over all of them, ``Shard(0)``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ckptfs.bench.workloads import TensorSpec, WorkloadSpec, rows_of

__all__ = ["State", "clear", "differences", "local_of", "locals_of", "make_blank", "make_state"]

State = dict[str, Tensor]


def make_state(workload: WorkloadSpec, rank: int = 0, ranks: int = 1) -> State:
    """Return uniform noise: nothing that a disk or a network could compress to nearly nothing.

    Args:
        workload: The tensors.
        rank: This rank.
        ranks: How many ranks.
    """

    def noise(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"{spec.name}/{rank if shape else 0}/{ranks}".encode())
        made = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=_dtype(spec)).uniform_(-1.0, 1.0, generator=made)

    return _made(workload, rank, ranks, noise)


def make_blank(workload: WorkloadSpec, rank: int = 0, ranks: int = 1) -> State:
    """Return zeros, in memory that was touched. The arguments are as for ``make_state``."""

    def zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=_dtype(spec)).zero_()

    return _made(workload, rank, ranks, zeros)


def clear(state: Mapping[str, Tensor]) -> None:
    """Set all tensors of ``state`` to zero, in place."""
    for tensor in state.values():
        local_of(tensor).zero_()


def differences(saved: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ between ``saved`` and ``loaded`` in any bit, dtype or shape on
    this rank.
    """
    return [
        name
        for name, tensor in saved.items()
        if name not in loaded or not _same(local_of(tensor), local_of(loaded[name]))
    ]


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``; a plain tensor as it is."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def locals_of(state: Mapping[str, Tensor]) -> State:
    """Return this rank's shards of ``state``: what writers that know no sharding get."""
    return {name: local_of(tensor) for name, tensor in state.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As integers: NaN is equal to itself then, and 0.0 is not -0.0.
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(whole), b.view(whole))


def _made(
    workload: WorkloadSpec,
    rank: int,
    ranks: int,
    make: Callable[[TensorSpec, tuple[int, ...]], Tensor],
) -> State:
    mesh = _mesh(ranks) if ranks > 1 else None
    return {spec.name: _placed(spec, rank, ranks, mesh, make) for spec in workload.tensors}


def _placed(
    spec: TensorSpec,
    rank: int,
    ranks: int,
    mesh: Any,
    make: Callable[[TensorSpec, tuple[int, ...]], Tensor],
) -> Tensor:
    if mesh is None or not spec.shape:
        return make(spec, spec.shape)
    from torch.distributed.tensor import DTensor, Shard

    first, after = rows_of(spec, rank, ranks)
    local = make(spec, (after - first, *spec.shape[1:]))
    shape = torch.Size(spec.shape)
    placed: Tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=_stride(spec.shape)
    )
    return placed


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _mesh(ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks,))


def _dtype(spec: TensorSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype.value)
    return found
