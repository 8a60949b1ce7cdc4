"""The step that a save says: Python's own int on storage, whatever a caller's number is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfs
from ckptfs.commit.log.entries import Entry, Generation, Kind, Seal, decode_entry, encode_entry
from ckptfs.errors import StateError


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3), 3], ids=["numpy", "torch", "int"])
def test_a_whole_number_of_a_library_is_taken(tmp_path: Path, step: Any) -> None:
    """A counter is often one: by URI and by a manager."""
    state = {"w": torch.ones(2)}
    assert ckptfs.save(state, str(tmp_path / "one/x"), step=step).step == 3
    with ckptfs.CheckpointManager(str(tmp_path / "run")) as manager:
        manager.save(step, state)
    found = ckptfs.latest(str(tmp_path / "run"))
    assert found is not None
    assert (found.uri.name, found.step) == ("step_3", 3)


@pytest.mark.parametrize("step", [1.5, 2.0, "3", -1])
def test_anything_else_is_an_error_before_a_byte_is_written(tmp_path: Path, step: Any) -> None:
    """1.5 was written once, and numpy's numbers failed after all data had been written."""
    state = {"w": torch.ones(2)}
    with pytest.raises(StateError, match="optimizer steps"):
        ckptfs.save(state, str(tmp_path / "one/x"), step=step)
    assert not (tmp_path / "one").exists() or not list((tmp_path / "one").glob("x*"))
    with (
        ckptfs.CheckpointManager(str(tmp_path / "run")) as manager,
        pytest.raises(StateError, match="optimizer steps"),
    ):
        manager.save(step, state)


@pytest.mark.parametrize("step", [1.5, True])
def test_what_older_versions_wrote_is_read(step: Any) -> None:
    """They took any number: its run must not be lost."""
    seal = Seal("a", Generation(1, "n"), 0, True, "x", step, Kind.CHECKPOINT, ("d",), "0")  # noqa: FBT003
    assert decode_entry(encode_entry(Entry("w", seal)), "log/0").body == seal
