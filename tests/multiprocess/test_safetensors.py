"""save_safetensors and load_safetensors by two processes: what one sends the other is the same there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptfs.integrations.safetensors import load_safetensors, save_safetensors
from tests.multiprocess.harness import Rank, torchrun

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


def state_of(dtypes: tuple[torch.dtype, ...]) -> dict[str, torch.Tensor]:
    """A tensor of each dtype, equal on all ranks."""
    return {str(dtype): torch.tensor([0.0, 1.0, 2.0]).to(dtype) for dtype in dtypes}


def export_and_import(rank: Rank) -> list[bool]:
    """Equal tensors of both ranks become one file; every rank reads all of them."""
    dist.init_process_group("gloo")
    state, where = state_of(DTYPES), f"{rank.args['run']}/hf_1"
    save_safetensors(state, where)
    found: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state.items()}
    load_safetensors(found, where)
    dist.destroy_process_group()
    return [
        torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
        for name, value in state.items()
    ]


def test_two_ranks_export_equal_tensors_of_every_kind(tmp_path: Path) -> None:
    """A dtype that was pickled on its way from another rank is the same one; safetensors reads the file."""
    from safetensors.torch import load_file

    results = torchrun(export_and_import, 2, args={"run": str(tmp_path)}, warm=True)
    assert [result.value for result in results] == [[True] * len(DTYPES)] * 2, results[0].log
    (path,) = (tmp_path / "hf_1").glob("*.safetensors")
    written = load_file(path)
    assert {name: value.dtype for name, value in written.items()} == {str(d): d for d in DTYPES}
