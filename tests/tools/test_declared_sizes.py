"""What .metadata says of sizes is held against the files before memory or files are made of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptfs.errors import CkptfsError, IntegrityError, ManifestError
from ckptfs.tools.exporting import export
from ckptfs.tools.inspecting import inspect


def _rows(*sizes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = tuple(sizes)

    return change


def _length(length: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.length = length

    return change


def _no_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40])
    metadata.state_dict_metadata["w"].chunks = []


CLAIMS: dict[str, Callable[[Any], None]] = {
    "4 GiB": _rows(1 << 30),
    "4 PiB": _rows(1 << 50),
    "8 of 9 items": _rows(9),
    "item of 3 GiB": _length(3 << 30),
    "no chunks": _no_chunks,
}


def _claiming(place: Path, change: Callable[[Any], None]) -> Path:
    step = place / "step_1"
    dcp.save({"w": torch.arange(8.0)}, checkpoint_id=step, no_dist=True)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    return step


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_an_export_refuses_a_size_that_the_file_does_not_have(
    tmp_path: Path, to: str, claim: str
) -> None:
    """IntegrityError before a byte is written. What memory it takes is measured in tests/hostile."""
    step = _claiming(tmp_path, CLAIMS[claim])
    with pytest.raises(IntegrityError):
        export(step, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("told", ["8", 8.5, float("nan"), None, -8, 1 << 70])
def test_a_size_that_is_none_is_refused_by_name(tmp_path: Path, told: Any) -> None:
    """A typed error for what torch never writes, and no TypeError from inside."""
    step = _claiming(tmp_path, _rows(told))
    with pytest.raises(CkptfsError):
        inspect(step)
    with pytest.raises((ManifestError, IntegrityError)):
        export(step, tmp_path / "out", "safetensors")
