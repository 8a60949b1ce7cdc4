"""Readers over NFSv3: after its last entry every program of an owner has the log touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import SoloControl
from ckptfs.errors import CollectiveError
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.uri import Uri
from tests.crash import rig


def _claim_and_release(run: Path) -> None:
    claim(_session(run)).release()


def _give_up(run: Path) -> None:
    """A save that fails before its seal: an abort."""
    with pytest.raises(CollectiveError):
        rig.save(
            _session(run, Fault("write", "*/__0_0.distcp", 1, Fail(OSError(5, "disk")))), "s", "s"
        )


def _recover(run: Path) -> Run:
    """What a dead save left is aborted, and what was replaced is deleted."""
    with claim(_session(run)) as held:
        rig.save(_session(run), "step_1", "one", held)
        rig.save(_session(run), "step_1", "uno", held, replace=True)
    dead = SaveAttempt(_session(run), SaveSpec("step_9", None))
    dead.begin()
    return claim(_session(run))


def _fail_behind_the_fence(run: Path) -> None:
    with pytest.raises(CollectiveError):
        claim(_session(run, Fault("list", "*/attempts", 2, Fail(PermissionError(13, "denied")))))


def _seal_in_vain(run: Path) -> None:
    """The seal is refused for certain: undone, and recorded where it was sealed."""
    with pytest.raises(CollectiveError):
        rig.save(_session(run, Fault("create", "*/log/*", 1, Fail(OSError(28, "full")))), "s", "s")


def _session(run: Path, *faults: Fault) -> RunSession:
    storage = LocalStorage(Uri.parse(run))
    return start_session(
        SoloControl(), FaultyStorage(storage, Plan([*faults])), Place(), write=True
    )


@pytest.mark.parametrize(
    "act", [_claim_and_release, _give_up, _recover, _fail_behind_the_fence, _seal_in_vain]
)
def test_the_last_entry_is_followed_by_a_touch(
    tmp_path: Path, act: Callable[[Path], Run | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was appended: of two entries within one tick a reader may never see the second."""
    run = tmp_path / "run"
    seen: list[int] = []
    real = RunSession.touch_log_later

    def entries() -> int:
        log = run / ".ckptfs/log"
        return len(list(log.iterdir())) if log.exists() else 0

    def noted(self: RunSession, *, last: bool = False) -> None:
        seen.append(entries())
        real(self, last=last)

    monkeypatch.setattr(RunSession, "touch_log_later", noted)
    # Held until all is counted: a run without a reference is released by a thread, which appends one more.
    held = act(run)
    assert entries() > 0
    assert max(seen, default=0) == entries()
    if held is not None:
        held.release()
