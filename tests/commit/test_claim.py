"""Claiming a run over several ranks and domains: what counts as held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.commit.paths import ATTEMPTS
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import RunSession
from ckptfs.errors import CollectiveError, RunBusyError
from ckptfs.testing.faults import Fail, Fault, Plan
from tests.crash import rig

LIVELY = LeaseTimes(rewrite_s=0.1, still_s=3600.0)  # a claim that waits for it fails the test


def test_a_run_that_one_of_two_domains_released_is_not_free(tmp_path: Path) -> None:
    """Its owner released it here and died before it did so there: the owner may continue there, and a
    claim that would not wait is refused.
    """
    base = str(tmp_path)
    denied = Fault("create", "*/log/*", 2, Fail(PermissionError(13, "denied")))

    def own(session: RunSession) -> None:
        claim(session).release()

    def take(session: RunSession) -> None:
        claim(session, takeover=Takeover.NEVER).release()

    rig.values(rig.sessions(rig.TWO_DOMAINS, base, own, job="one", plans={1: Plan([denied])}))
    for end in rig.sessions(rig.TWO_DOMAINS, base, take, job="two"):
        with pytest.raises(RunBusyError, match="is held by"):
            end.get()
    rig.values(
        rig.sessions(rig.TWO_DOMAINS, base, take, job="one")
    )  # the same job needs no release
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, take, job="two"))


def test_one_lease_that_moves_keeps_the_run(tmp_path: Path) -> None:
    """Only owners watch a lease, and of two domains one may have been left: the run is busy as soon
    as one of them moves, for every rank of the newcomer.
    """
    base = str(tmp_path)
    runs = rig.values(
        rig.sessions(rig.ONE_DOMAIN, base, lambda session: claim(session, times=LIVELY), job="one")
    )

    def take(session: RunSession) -> None:
        claim(session, times=LIVELY).release()

    try:
        for end in rig.sessions(rig.ONE_DOMAIN, base, take, job="two"):
            with pytest.raises(RunBusyError, match="is held by"):
                end.get()
    finally:
        for run in runs:
            run.release()


def test_a_claim_that_failed_is_nobody_s(tmp_path: Path) -> None:
    """An error behind the fence releases it on every owner: the next claim, of another job too, need
    not wait for a lease without a writer.
    """
    base = str(tmp_path)
    denied = Fault("list", "*/attempts", 2, Fail(PermissionError(13, "denied")))

    def take(session: RunSession) -> None:
        claim(session, takeover=Takeover.NEVER).release()

    for end in rig.sessions(rig.TWO_DOMAINS, base, take, job="one", plans={1: Plan([denied])}):
        with pytest.raises(CollectiveError, match=r"^report failed .* denied"):
            end.get()
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, take, job="two"))


@pytest.mark.parametrize("layout", [rig.SOLO, rig.TWO_DOMAINS], ids=["one", "two"])
def test_an_attempt_that_lost_its_data_directory_is_cleared(
    tmp_path: Path, layout: rig.Layout
) -> None:
    """A power cut took it. A living process makes it before any other file, so this one has died. The log says
    that it is aborted, before its bytes go. A directory of another name is not ours, and stays.
    """
    base, save_id = str(tmp_path), "20260101T000000-abcdefabcdef"
    rig.values(rig.sessions(layout, base, lambda session: claim(session).release(), job="one"))
    for path in layout.directories(base).values():
        for name in (save_id, "foreign"):
            os.makedirs(f"{path}/{ATTEMPTS}/{name}")
            Path(f"{path}/{ATTEMPTS}/{name}/.metadata").write_bytes(b"data")

    def take(session: RunSession) -> bool:
        claim(session).release()
        return drive(catch_up(), session.storage).save(save_id).aborted

    assert all(rig.values(rig.sessions(layout, base, take, job="two")))
    for path in layout.directories(base).values():
        assert os.listdir(f"{path}/{ATTEMPTS}") == ["foreign"]


@pytest.mark.parametrize("file", [None, "__0_0.distcp"], ids=["empty", "data"])
@pytest.mark.parametrize("layout", [rig.SOLO, rig.TWO_DOMAINS], ids=["one", "two"])
def test_an_aborted_attempt_without_its_record_is_cleared(
    tmp_path: Path, layout: rig.Layout, file: str | None
) -> None:
    """The power went while an aborted attempt was removed: its directory is there again, attempt.json is
    not. The log names its owner, and the next owner removes it. What is not in the log stays.
    """
    base = str(tmp_path)

    def abort(session: RunSession) -> str:
        attempt = SaveAttempt(session, SaveSpec("step_1", None))
        attempt.begin()
        attempt.abandon()
        assert drive(catch_up(), session.storage).save(attempt.save_id).aborted
        return attempt.save_id

    save_id = rig.values(rig.sessions(layout, base, abort, job="one"))[0]
    for path in layout.directories(base).values():
        assert os.listdir(f"{path}/{ATTEMPTS}") == []
        for name in (save_id, "foreign"):
            os.makedirs(f"{path}/{ATTEMPTS}/{name}/{name}")
            Path(f"{path}/{ATTEMPTS}/{name}/{name}/{file or '__1_0.distcp'}").write_bytes(b"data")
        if file is None:
            os.unlink(f"{path}/{ATTEMPTS}/{save_id}/{save_id}/__1_0.distcp")
    rig.values(rig.sessions(layout, base, lambda session: claim(session).release(), job="two"))
    for path in layout.directories(base).values():
        assert os.listdir(f"{path}/{ATTEMPTS}") == ["foreign"]
