"""One save over all ranks, where something goes wrong between its first byte and its last."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.paths import ATTEMPTS
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec, WrittenPart
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.commit.state import Standing, standing
from ckptfs.control.control import SoloControl
from ckptfs.errors import (
    CollectiveError,
    CommitConflictError,
    CommitInDoubtError,
    FencedError,
)
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.disk import PowerCut, SimulatedDisk
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Lose, Plan, When
from ckptfs.testing.world import End, SimulatedDeath
from ckptfs.uri import Uri
from tests.crash import rig

ONLY_A = rig.Layout(("a",), shared=False)  # the first of the two domains, alone


def _save(name: str, label: str) -> rig.Body:
    return lambda session: rig.save(session, name, label)


def _claimed(session: RunSession) -> None:
    claim(session).release()


def _two_saves(layout: rig.Layout, base: str, plan: Plan) -> list[End[Any]]:
    """step_1 is saved, then step_2 by ranks; the first of them meets the plan."""
    rig.values(rig.sessions(layout, base, _save("step_1", "one"), job="j"))
    return rig.sessions(layout, base, _save("step_2", "two"), job="j", plans={0: plan})


def _attempts(layout: rig.Layout, base: str) -> list[str]:
    homes = layout.directories(base).values()
    return [name for home in homes for name in os.listdir(f"{home}/{ATTEMPTS}")]


@pytest.mark.parametrize("layout", [rig.SOLO, rig.TWO_DOMAINS], ids=["one", "two"])
def test_nothing_of_a_save_in_doubt_is_aborted_or_removed(
    layout: rig.Layout, tmp_path: Path
) -> None:
    """Its seal was lost on the way and may arrive yet: the error says that nothing was deleted, every
    byte is there, and where the seal does arrive the save is committed and whole.
    """
    base = str(tmp_path)
    plan = Plan(
        [
            Fault("create", "*/log/*", 1, Lose(done=False, later=True)),
            Fault("create", "*/log/*", 2, Fail(PermissionError(13, "read-only by now"))),
        ]
    )
    for end in _two_saves(layout, base, plan):
        with pytest.raises(CommitInDoubtError, match="nothing was deleted"):
            end.get()
    assert len(_attempts(layout, base)) == len(layout.directories(base))
    plan.deliver()
    seen = rig.look(layout, base, ["step_1", "step_2"]).state
    assert seen == {"step_1": "one", "step_2": "two"}


def test_a_sure_failure_in_one_domain_is_undone_in_the_other(tmp_path: Path) -> None:
    """The second owner may not write its seal: every rank gets that error, what was never sealed goes
    there, and the name is free in both for another try, without a claim.
    """
    base = str(tmp_path)
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, _save("step_1", "one"), job="j"))
    denied = Plan([Fault("create", "*/log/*", 1, Fail(PermissionError(13, "denied")))])
    ends = rig.sessions(rig.TWO_DOMAINS, base, _save("step_2", "two"), job="j", plans={1: denied})
    for end in ends:
        with pytest.raises(CollectiveError, match="could not seal step_2"):
            end.get()
    assert len(_attempts(rig.TWO_DOMAINS, base)) == 1
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, _save("step_2", "again"), job="j"))
    seen = rig.look(rig.TWO_DOMAINS, base, ["step_1", "step_2"]).state
    assert seen == {"step_1": "one", "step_2": "again"}


def test_what_is_projected_is_recorded_as_committed_first(tmp_path: Path) -> None:
    """An owner dies when its domain shows a save of two: this domain alone knows that it is committed,
    also where the other never comes back.
    """
    base = str(tmp_path)
    plan = Plan([Fault("rename", f"{ATTEMPTS}/*", 1, Fail(SimulatedDeath(), When.AFTER))])
    ends = _two_saves(rig.TWO_DOMAINS, base, plan)
    assert ends[0].died
    home = rig.TWO_DOMAINS.directory(base, "a")
    (save_id,) = [n for n in os.listdir(f"{home}/step_2") if "." not in n and n != "ckptfs"]

    def alone(session: RunSession) -> Standing:
        view = drive(read_view(), session.storage)
        assert view is not None
        return standing(save_id, dict([view]))

    (end,) = rig.sessions(ONLY_A, base, alone, job="reader", write=False, read_only=True)
    assert end.get() is Standing.COMMITTED


class _Watched(FaultyStorage):
    """Notes whether the session's turn is taken whenever a name is moved."""

    turn: threading.Lock
    taken: list[bool]

    def rename(self, source: str, target: str) -> None:
        self.taken.append(self.turn.locked())
        super().rename(source, target)


def test_a_projection_is_alone_in_its_domain(tmp_path: Path) -> None:
    """Retention removes at the same time, in a thread of the same process: never in the middle of a move."""
    storage = _Watched(LocalStorage(Uri.parse(str(tmp_path / "run"))), Plan([]))
    session = start_session(SoloControl(), storage, Place(), write=True)
    storage.turn, storage.taken = session.turn, []
    rig.save(session, "step_1", "one")
    assert storage.taken == [True]
    assert not session.turn.locked()


def test_an_attempt_has_its_record_before_any_data(tmp_path: Path) -> None:
    """The power goes while data is written, and of all names without a sync the disk keeps just
    the data's: the next owner still finds who wrote it, and removes it.
    """
    base = tmp_path / "disk"
    rig.prepare(rig.SCENARIOS["fresh"], rig.SOLO, str(base))
    disk = SimulatedDisk(str(base))
    root = Uri.parse("/simulated/run")
    home = rig.SOLO.directory(str(base), "a")
    session = start_session(
        SoloControl(), LocalStorage(root, posix=disk, directory=home), Place(), write=True
    )
    attempt = SaveAttempt(session, SaveSpec("step_2", None))

    def write() -> WrittenPart:
        with session.storage.open_write(f"{attempt.prefix}__0_0.distcp") as writer:
            writer.write(b"data")
        disk.cut()
        return WrittenPart((FileRecord("x", 4, session.placement.mine.id),))

    attempt.begin()
    with pytest.raises(PowerCut):
        attempt.commit(write, lambda _: {})
    after = tmp_path / "after"
    disk.materialise(str(after), lucky=lambda path: path.endswith(".distcp"))
    rig.values(rig.sessions(rig.SOLO, str(after), _claimed, job="next"))
    assert _attempts(rig.SOLO, str(after)) == []


def test_several_domains_are_as_old_as_the_oldest(tmp_path: Path) -> None:
    """A plain save over two domains, only one of them claimed, carries the generation of the other, so
    the claim fences it.
    """
    base = str(tmp_path)
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, _save("step_1", "one"), job="one"))
    rig.values(rig.sessions(ONLY_A, base, _claimed, job="two"))
    for end in rig.sessions(rig.TWO_DOMAINS, base, _save("step_2", "two"), job="one"):
        with pytest.raises(FencedError, match="claimed at different times"):
            end.get()
    assert rig.look(rig.TWO_DOMAINS, base, ["step_1", "step_2"]).state == {"step_1": "one"}


def test_the_log_is_touched_for_a_seal_whose_projection_fails(tmp_path: Path) -> None:
    """The save is committed: a reader over NFSv3 has to see its seal, whatever became of the rest."""
    touched = threading.Event()

    class Noticed(LocalStorage):
        def touch(self, key: str) -> None:
            super().touch(key)
            touched.set()

    storage = Noticed(Uri.parse(tmp_path / "run"))
    plan = Plan([Fault("rename", f"{ATTEMPTS}/*", 1, Fail(PermissionError(13, "not here")))])
    session = start_session(SoloControl(), FaultyStorage(storage, plan), Place(), write=True)
    rig.save(session, "step_1", "one")
    assert not (tmp_path / "run" / "step_1").exists(), "its projection failed"
    assert touched.wait(60)


def test_what_was_removed_by_hand_in_some_domains_keeps_its_name(tmp_path: Path) -> None:
    """Of two domains: as long as one has it, or is out of reach, it is committed already; once it is gone
    from both and both are reached, both logs record that, and the save continues.
    """
    base = str(tmp_path)
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, _save("step_1", "one"), job="j"))
    homes = rig.TWO_DOMAINS.directories(base)
    shutil.rmtree(f"{homes['a']}/step_1")

    def refused(layout: rig.Layout, kind: type[Exception]) -> None:
        for end in rig.sessions(layout, base, _save("step_1", "uno"), job="j"):
            with pytest.raises(kind, match="step_1"):
                end.get()

    refused(rig.TWO_DOMAINS, CommitConflictError)  # b has it
    shutil.rmtree(f"{homes['b']}/step_1")
    refused(ONLY_A, CommitConflictError)  # whether b has it is unknown
    fences = {name: read_log(home).generation.number for name, home in homes.items()}
    assert fences == {"a": 0, "b": 0}  # no claim was made for that
    rig.values(rig.sessions(rig.TWO_DOMAINS, base, _save("step_1", "uno"), job="j"))
    for home in homes.values():
        state = read_log(home)
        assert state.released
        assert sorted((s.deleted, s.gone) for s in state.saves.values()) == [
            (False, False),
            (True, True),
        ]


def read_log(home: str) -> LogState:
    """The fold of the log in one domain."""
    return drive(catch_up(), LocalStorage(Uri.parse(home)))
