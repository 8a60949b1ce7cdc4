"""Deleting a checkpoint by name: somebody else's retention, carried out as our own is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckptfs.commit.session import RunSession
from ckptfs.errors import CollectiveError, NotFoundError, StateError
from ckptfs.events import Deleted, Event
from ckptfs.testing.faults import Fail, Fault, Plan, When
from tests.crash import rig
from tests.crash.rig import ONE_DOMAIN, TWO_DOMAINS
from tests.manager.test_retiring import debris, disks, entries, holding, world


def test_a_save_is_deleted_by_name_in_every_domain(tmp_path: Path) -> None:
    """Its entry is in every log when the call returns, its bytes follow, the others stay; the newest
    goes too, what is gone or never was is NotFoundError, and what is pinned stays.
    """
    told: list[Event] = []

    def body(session: RunSession) -> None:
        tell = told.append if session.control.rank == 0 else lambda _: None
        with holding(session, None, tell=tell) as (run, retirer):
            ids = [rig.save(run.session, f"step_{n}", str(n), run) for n in (1, 2, 3)]
            retirer.pin(run.session, ids[0])
            with pytest.raises(StateError, match="step_1 is not deleted: it is pinned"):
                retirer.delete(run.session, ids[0])
            for gone in (ids[1], ids[2]):
                retirer.delete(run.session, gone)
                deletes = [
                    [e["save_id"] for e in log if e["kind"] == "delete"]
                    for log in entries(tmp_path, TWO_DOMAINS).values()
                ]
                assert all(gone in found for found in deletes)
                with pytest.raises(NotFoundError, match="not a live checkpoint"):
                    retirer.delete(run.session, gone)
            retirer.make_room()

    world(tmp_path, body, TWO_DOMAINS)
    assert disks(tmp_path, TWO_DOMAINS) == {"a": ["step_1"], "b": ["step_1"]}
    assert debris(tmp_path, TWO_DOMAINS) == []
    assert sorted(e.uri[-1] for e in told if isinstance(e, Deleted)) == ["2", "3"]


def test_a_delete_that_fails_in_one_domain_is_raised_and_completed_later(tmp_path: Path) -> None:
    """Every rank gets the answer, which is that it may be deleted; where one log has it the save is deleted,
    and the next commit enters the rest.
    """
    plan = Plan()

    def body(session: RunSession) -> None:
        with holding(session, None) as (run, retirer):
            old = rig.save(run.session, "step_1", "1", run)
            if session.control.rank == 1:
                plan.add(Fault("create", "*/log/*", 1, Fail(OSError(errno.EIO, "no"))))
            with pytest.raises(CollectiveError, match="rank 1") as caught:
                retirer.delete(run.session, old)
            assert caught.value.outcome == "unknown"
            rig.save(run.session, "step_2", "2", run)
            retirer.after_commit(run.session)
            retirer.make_room()

    world(tmp_path, body, TWO_DOMAINS, plans={1: plan})
    assert disks(tmp_path, TWO_DOMAINS) == {"a": ["step_2"], "b": ["step_2"]}


@pytest.mark.parametrize("pinned", [True, False], ids=["pin", "delete"])
def test_an_entry_whose_answer_is_lost_is_in_doubt_on_every_rank(
    tmp_path: Path, pinned: bool
) -> None:
    """It is in the log, and the owner cannot know that: no rank learns that nothing happened."""
    plan = Plan()
    outcomes: list[str] = []

    def body(session: RunSession) -> None:
        with holding(session, None) as (run, retirer):
            save_id = rig.save(run.session, "step_1", "1", run)
            if session.control.rank == 0:
                lost = Fault("create", "*/log/*", 1, Fail(OSError(errno.EIO, "no"), When.AFTER))
                plan.add(lost)
            with pytest.raises(CollectiveError) as caught:
                (retirer.pin if pinned else retirer.delete)(run.session, save_id)
            outcomes.append(caught.value.outcome)

    world(tmp_path, body, ONE_DOMAIN, plans={0: plan})
    assert outcomes == ["unknown"] * 3
    [log] = entries(tmp_path, ONE_DOMAIN).values()
    assert [e["kind"] for e in log].count("pin" if pinned else "delete") == 1
