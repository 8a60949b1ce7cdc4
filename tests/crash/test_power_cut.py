"""The power goes at every system call: what was acknowledged is there, whole, on the disk that the
machine finds again; and every fsync in the code is there because a test needs it.

``SIGKILL`` keeps the page cache, so these runs go through ``SimulatedDisk``: what was not synced is
gone (luck 0), or some of it is (luck 1, 2, ...), a rename being one step.
"""

from __future__ import annotations

import collections
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import SoloControl
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.testing.disk import SimulatedDisk
from ckptfs.testing.faults import Fault, FaultyStorage, Hold, Plan
from ckptfs.testing.world import SimulatedDeath
from ckptfs.uri import Uri
from tests.crash.forks import Job, deaths, fsync_sites
from tests.crash.rig import ONE_DOMAIN, SCENARIOS, SOLO, Layout, look, prepare, sessions
from tests.crash.test_commit_crash import assert_all_well

# Scenarios with data files that pass the disk by are not for here: people write them with open().
CUT = [name for name in SCENARIOS if name != "directory"]
# For a missing fsync the birth of a run is searched first, which shows most; the others last.
SEARCHED = sorted(CUT, key=lambda name: (name != "birth", name in ("claim", "abandoned")))
ENDS = {"claim": {"new"}, "abandoned": {"new"}}  # old and new are one there


@pytest.mark.parametrize(
    ("scenario", "layout", "stride", "luck"),
    [
        ("birth", SOLO, 9, (0,)),
        ("fresh", SOLO, 3, (0,)),
        ("fresh", ONE_DOMAIN, 23, (0, 1)),
        ("fenced", SOLO, 19, (0, 1)),
        ("twice", SOLO, 29, (0, 1)),
        ("withdrawn", SOLO, 23, (0, 1)),
        ("withdrawn", ONE_DOMAIN, 23, (0,)),
        ("replace", SOLO, 19, (0,)),
        ("overwrite", SOLO, 37, (0, 1)),
        ("abandoned", SOLO, 29, (0, 1)),
        ("claim", SOLO, 13, (0,)),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_power_cut_loses_nothing_acknowledged(
    scenario: str, layout: Layout, stride: int, luck: tuple[int, ...]
) -> None:
    """Old or new, bit by bit, new if any rank got that answer; a fence that was reported counts."""
    verdicts = deaths(Job(scenario, layout, "cut", stride=stride, lucky=luck))
    assert_all_well(verdicts, ENDS.get(scenario, {"old", "new"}))


@pytest.mark.campaign
@pytest.mark.parametrize("luck", range(5))
@pytest.mark.parametrize("layout", [SOLO, ONE_DOMAIN], ids=["solo", "one"])
@pytest.mark.parametrize("scenario", CUT)
def test_campaign_every_power_cut(scenario: str, layout: Layout, luck: int) -> None:
    """All system calls, all scenarios, with five kinds of luck."""
    verdicts = deaths(Job(scenario, layout, "cut", lucky=(luck,)))
    assert_all_well(verdicts, ENDS.get(scenario, {"old", "new"}))


# Sites that show nothing here when they are left out, and why they stay.
STAY = {
    "make_dir>_probe_once>probe_posix>sync_dir": "asks whether directories can be synced",
    "replace>_write_in_directory>_replace>write_file": "the lease; tests/storage proves replace()",
    "replace>_sync_directory>sync_dir": "the lease; tests/storage proves replace()",
    "sync>sync_dir /deep/run/.ckptfs/log #1": "test_a_newcomer_makes_durable_what_it_folded",
    # Of a second delete in one run; the first one proves the line.
    "sync>sync_dir /deep/run/.ckptfs/attempts #2": "one line",
    # Further keys of the line in make_dirs that the first and the last of these prove.
    "make_dir>make_dirs>sync_dir /deep/run/.ckptfs/attempts": "one line",
    "make_dir>make_dirs>sync_dir /deep/run/.ckptfs/trash": "one line",
}
# Where to look first; any other scenario and luck is searched after it.
BEST = {
    "sync>sync_dir /deep/run/.ckptfs/attempts #1": ("withdrawn", 0),
    "make_dir>make_dirs>sync_dir /deep/run": ("claim", 0),
    "sync>sync_dir /deep/run/.ckptfs/attempts/<save>/<save> #1": ("birth", 2),
    "sync>sync_dir /deep/run/step_2 #1": ("overwrite", 1),
    "sync>sync_dir /deep/run/step_1 #1": ("overwrite", 2),
    "sync>sync_dir /deep/run/step_2 #2": ("fenced", 3),
    "sync>sync_dir /deep/run #1": ("twice", 0),
    "sync>sync_dir /deep/run #2": ("withdrawn", 0),
    "sync>sync_dir /deep/run/.ckptfs/attempts/<save>/<save> #3": ("twice", 2),
}


def test_removing_any_fsync_fails_a_test() -> None:
    """A disk that is deaf to one call site, found by recording, loses or leaves something."""
    scenes: dict[str, list[str]] = collections.defaultdict(list)
    for scenario in SEARCHED:
        for site in fsync_sites(scenario, SOLO):
            scenes[site].append(scenario)
    assert set(STAY) <= set(scenes), f"no such fsync any more: {set(STAY) - set(scenes)}"
    assert len(scenes) > 20
    unseen = [site for site in scenes if site not in STAY and not _is_missed(site, scenes[site])]
    assert not unseen, f"nothing shows that these are needed: {unseen}"


def _is_missed(site: str, scenarios: list[str]) -> bool:
    tries = [(scenario, luck) for luck in range(4) for scenario in scenarios]
    for scenario, luck in [BEST[site], *tries] if site in BEST else tries:
        job = Job(scenario, SOLO, "cut", deaf=site, lucky=(luck,), first=True)
        if any(verdict.trouble for verdict in deaths(job)):
            return True
    return False


class DiesAfterLink:
    """The system calls of a process that ends when a certain name is linked."""

    def __init__(self, inner: Posix, name: str) -> None:
        self._inner, self._name, self._dead = inner, name, False

    def __getattr__(self, call: str) -> Any:
        if self._dead:
            raise SimulatedDeath
        return getattr(self._inner, call)

    def link(self, source: str, target: str) -> None:
        """link(2), the last thing it does if that is the name."""
        self._inner.link(source, target)
        if target.endswith(self._name):
            self._dead = True
            raise SimulatedDeath


def test_a_newcomer_makes_durable_what_it_folded(memory_path: Path) -> None:
    """A save's entry was linked and its writer died before the fsync. The next owner acts on
    that entry, so its own sync of the log comes first: the power may go right after.
    """
    base = memory_path / "disk"
    prepare(SCENARIOS["fresh"], SOLO, str(base))
    disk = SimulatedDisk(str(base))
    run_uri = Uri.parse("/simulated/run")
    before_sync = Hold()

    def newcomer() -> Run:
        inner = LocalStorage(run_uri, posix=disk, directory=SOLO.directory(str(base), "a"))
        plan = Plan([Fault("sync", ".ckptfs/log", 1, before_sync)])
        storage = FaultyStorage(inner, plan)
        return claim(start_session(SoloControl(), storage, Place(), write=True))

    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(newcomer)
        assert before_sync.reached.wait(120)
        # Its fence is there. A plain save comes, and dies when its seal is linked.
        number = len(os.listdir(f"{SOLO.directory(str(base), 'a')}/.ckptfs/log"))
        dying: Any = DiesAfterLink(disk, f"{number:08d}")
        (end,) = sessions(SOLO, str(base), SCENARIOS["fresh"].victim, job="plain", posix=dying)
        assert end.died
        before_sync.release.set()
        run = claiming.result(120)
    disk.cut()
    assert run._keeper is not None
    run._keeper.stop()
    disk.materialise(str(memory_path / "after"))
    state = look(SOLO, str(memory_path / "after"), ["step_1", "step_2"]).state
    assert state == {"step_1": "one", "step_2": "two"}
