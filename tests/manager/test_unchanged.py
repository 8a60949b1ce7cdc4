"""A manager with saves that reference: retention works as before, and the bytes outlive their writer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckptfs
from tests.dcp.reuse_rig import same
from tests.dcp.test_reuse import FROZEN, FROZEN_BYTES, blank, state, stored_bytes

_numbers = itertools.count()


@pytest.mark.parametrize("shape", ["file", "object"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_writer_of_a_frozen_base_is_retired_like_any_other(
    tmp_path: Path, mode: Literal["sync", "async"], shape: str
) -> None:
    """keep_latest=2 over two jobs: two steps are left and nothing of the others, the frozen bytes are
    there once, the older step is its own; weights among them build on weights.
    """
    run, query = f"{tmp_path}/run", ""
    if shape == "object":
        run, query = f"memory://managed{next(_numbers)}/run", "?shape=object"
    for steps in ((1, 2, 3), (4, 5, 6)):
        with ckptfs.CheckpointManager(
            run + query, keep_latest=2, mode=mode, unchanged="reference"
        ) as manager:
            for step in steps:
                manager.save(step, state(step))
                manager.save(step, {"w": FROZEN["layer0"]}, kind="weights")
            manager.wait()
    assert manager.steps == [5, 6]
    assert stored_bytes(run, query) < FROZEN_BYTES + FROZEN_BYTES // 4 + 300_000
    for step in (5, 6):
        found: dict[str, Any] = blank()
        ckptfs.load(found, f"{run}/step_{step}{query}")
        assert same(found, state(step))
        assert torch.equal(loaded_weights(f"{run}/weights_{step}{query}"), FROZEN["layer0"])


def loaded_weights(uri: str) -> torch.Tensor:
    """The one tensor of a weights-only save."""
    found = {"w": torch.zeros_like(FROZEN["layer0"])}
    ckptfs.load(found, uri)
    return found["w"]
