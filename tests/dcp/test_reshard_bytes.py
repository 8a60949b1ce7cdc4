"""A load into another layout: what each rank reads of the files, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptfs.dcp.read.data_file import Verify
from ckptfs.storage.base import Reach
from tests.dcp.fake_ranks import load, our_save
from tests.dcp.test_fetch import MIB, Wide, _read_twice, values

ROWS, COLUMNS = 1530, 1280  # 7 MiB of float32: several digest blocks in each rank's file
LAYOUTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def _sharded(tensor: torch.Tensor, size: int, layout: str) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    return distribute_tensor(tensor, mesh, [LAYOUTS[layout]], src_data_rank=None)


@pytest.mark.parametrize("saved", ["rows", "columns", "whole"])
@pytest.mark.parametrize(
    ("size", "layout"), [(1, "whole"), (2, "rows"), (3, "rows"), (5, "columns")]
)
def test_a_rank_reads_no_byte_twice_and_unverified_only_its_own(
    saved: str, size: int, layout: str
) -> None:
    """Saved by four ranks, loaded by others: each byte of a file at most once per rank; rows that a rank
    asks for cost their own bytes, to the block of a digest where they are verified.
    """
    storage = Wide()
    storage.reach, storage.concurrency = Reach.LOCAL, 3
    matrix, bias = values((ROWS, COLUMNS), torch.float32, 1), values((3 * MIB,), torch.int8, 2)
    whole = {"w": matrix, "b": bias}
    our_save(storage, 4, lambda _: {"w": _sharded(matrix, 4, saved), "b": bias})
    read: list[dict[str, list[tuple[int, int]]]] = []

    def fresh(_: int) -> dict[str, Any]:
        storage.spans = {}
        read.append(storage.spans)
        return {"w": _sharded(torch.zeros_like(matrix), size, layout), "b": torch.zeros_like(bias)}

    for verify in Verify:
        read.clear()
        for rank, state in enumerate(load(storage, size, fresh, verify=verify)):
            part = matrix
            if layout != "whole":
                part = matrix.chunk(size, 0 if layout == "rows" else 1)[rank]
            assert torch.equal(state["w"].to_local(), part)
            assert torch.equal(state["b"], whole["b"])
            spans = read[rank]
            assert not sum(map(_read_twice, spans.values()))
            total = sum(length for file in spans.values() for _, length in file)
            if saved != "columns" and layout != "columns":
                # At each end of a file's piece a digest block; else the heads of torch's records.
                slack = len(spans) * (2 * MIB if verify is Verify.READ else 16_384)
                assert total <= part.nbytes + bias.nbytes + slack
