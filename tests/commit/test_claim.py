"""Claiming a run over several ranks and domains: what counts as held."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfs.commit.claim import Takeover, claim
from ckptfs.commit.lease import LeaseTimes
from ckptfs.commit.seat import Seat
from ckptfs.errors import CollectiveError, RunBusyError
from ckptfs.testing.faults import Fail, Fault, Plan
from tests.crash import rig

LIVELY = LeaseTimes(rewrite_s=0.1, still_s=3600.0)  # whoever waits for it fails the test


def test_a_run_that_one_of_two_domains_released_is_not_free(tmp_path: Path) -> None:
    """Its owner released it here and died before it did so there: it may go on there, and whoever
    would not wait is refused.
    """
    base = str(tmp_path)
    denied = Fault("create", "*/log/*", 2, Fail(PermissionError(13, "denied")))

    def own(seat: Seat) -> None:
        claim(seat).release()

    def take(seat: Seat) -> None:
        claim(seat, takeover=Takeover.NEVER).release()

    rig.values(rig.seats(rig.TWO_DOMAINS, base, own, job="one", plans={1: Plan([denied])}))
    for end in rig.seats(rig.TWO_DOMAINS, base, take, job="two"):
        with pytest.raises(RunBusyError, match="is held by"):
            end.get()
    rig.values(rig.seats(rig.TWO_DOMAINS, base, take, job="one"))  # the same job needs no release
    rig.values(rig.seats(rig.TWO_DOMAINS, base, take, job="two"))


def test_one_lease_that_moves_keeps_the_run(tmp_path: Path) -> None:
    """Only owners watch a lease, and of two domains one may have been left: the run is busy as soon
    as one of them moves, for every rank of the newcomer.
    """
    base = str(tmp_path)
    runs = rig.values(
        rig.seats(rig.ONE_DOMAIN, base, lambda seat: claim(seat, times=LIVELY), job="one")
    )

    def take(seat: Seat) -> None:
        claim(seat, times=LIVELY).release()

    try:
        for end in rig.seats(rig.ONE_DOMAIN, base, take, job="two"):
            with pytest.raises(RunBusyError, match="is held by"):
                end.get()
    finally:
        for run in runs:
            run.release()


def test_a_claim_that_failed_is_nobody_s(tmp_path: Path) -> None:
    """An error behind the fence releases it on every owner: whoever tries again, of another job too, need
    not wait for a lease that nobody writes.
    """
    base = str(tmp_path)
    denied = Fault("list", "*/attempts", 2, Fail(PermissionError(13, "denied")))

    def take(seat: Seat) -> None:
        claim(seat, takeover=Takeover.NEVER).release()

    for end in rig.seats(rig.TWO_DOMAINS, base, take, job="one", plans={1: Plan([denied])}):
        with pytest.raises(CollectiveError, match=r"^report failed .* denied"):
            end.get()
    rig.values(rig.seats(rig.TWO_DOMAINS, base, take, job="two"))
