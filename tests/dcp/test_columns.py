"""The rank that made too much for a save plan reports it: what, by how much, and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from ckptfs.dcp.planning.columns import (
    MOST,
    Interned,
    Packer,
    Unpacker,
    decode_structure,
    structure_of,
)
from ckptfs.dcp.planning.save_planner import SavePlanner
from ckptfs.errors import StateError


def plan(key: str, tensor: torch.Tensor) -> SavePlan:
    """The plan of a state of one tensor."""
    planner = SavePlanner(compare_ranks=False)
    planner.set_up_planner({key: tensor})
    return planner.create_local_plan()


def test_the_most_dimensions_travel() -> None:
    """64 dimensions are sent as they are."""
    found = decode_structure(structure_of(plan("w", torch.zeros([1] * 64))), Interned())
    assert found.shapes.sizes == (torch.Size([1] * 64),)


def test_too_many_dimensions_are_told_by_key() -> None:
    """65 dimensions, which torch makes: the key, both numbers and a way out, on the rank that has it."""
    with pytest.raises(
        StateError, match=r"'layer\.w' has 65 dimensions, but at most 64 .* reshape it"
    ):
        structure_of(plan("layer.w", torch.zeros([1] * 65)))


def test_a_key_that_is_too_long_is_told() -> None:
    """A key of 16 Mi characters: how it begins, its length and the most."""
    with pytest.raises(StateError, match=rf"'kkkk.* {MOST} characters; .* {MOST - 1} .* shorter"):
        structure_of(plan("k" * MOST, torch.zeros(1)))


def test_too_many_numbers_are_told_by_what_they_are() -> None:
    """One more than a column holds: how many, of what, and by how many too many."""
    column = np.broadcast_to(np.int64(0), MOST + 1)
    with pytest.raises(StateError, match=rf"{MOST + 1} items, 1 more .* fewer and larger"):
        Packer().ints(column, "items")
    Packer().ints(column[:MOST], "items")


def test_a_part_that_is_too_long_is_told() -> None:
    """Four GiB of names, which a length cannot hold: no struct.error."""

    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 32

    with pytest.raises(StateError, match=rf"{1 << 32} bytes, 1 more"):
        Packer().part(Long())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x00\xff\xff\xff\xff", f"a column has {(1 << 32) - 1} numbers, but at most {MOST}"),
        (
            b"\x01\x02\x00\x00\x00\x05\x09",
            "a column has numbers from 5 to 9, but 0 to 3 are allowed",
        ),
    ],
)
def test_columns_that_nobody_made_say_what_is_wrong(data: bytes, told: str) -> None:
    """A length without end, a number that is too large: what it is and what it may be."""
    with pytest.raises(ValueError, match=told):
        Unpacker(data).ints(below=4)
