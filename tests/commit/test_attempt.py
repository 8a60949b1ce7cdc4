"""One save over all ranks, where something goes wrong between its first byte and its last."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfs.commit.claim import claim
from ckptfs.commit.seat import Seat
from ckptfs.errors import FencedError
from tests.crash import rig

ONLY_A = rig.Layout(("a",), shared=False)  # the first of the two domains, alone


def _claimed(seat: Seat) -> None:
    claim(seat).release()


def test_several_domains_are_as_old_as_the_oldest(tmp_path: Path) -> None:
    """A plain save over domains of which only one was claimed carries the generation of the other, so
    the claim fences it.
    """
    base = str(tmp_path)
    rig.values(rig.seats(rig.TWO_DOMAINS, base, lambda s: rig.save(s, "step_1", "one"), job="one"))
    rig.values(rig.seats(ONLY_A, base, _claimed, job="two"))
    ends = rig.seats(rig.TWO_DOMAINS, base, lambda s: rig.save(s, "step_2", "two"), job="one")
    for end in ends:
        with pytest.raises(FencedError, match="claimed at different times"):
            end.get()
    assert rig.look(rig.TWO_DOMAINS, base, ["step_1", "step_2"]).state == {"step_1": "one"}
