"""Hundreds of saves with everything going wrong on the way: the short one here, the long by hand.

    make soak      300 asynchronous saves of 200 MB over 4 ranks, on a disk and behind a bad network

CKPTFS_SOAK_SAVES, CKPTFS_SOAK_MB, CKPTFS_SOAK_RANKS and CKPTFS_SOAK_MODE ("sync") say otherwise;
CKPTFS_SOAK_SEED repeats one by the seed that it printed.
"""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import lab
from tests.faults.proxy import LOSE, At, Chance, FaultProxy, HttpFault, Reset
from tests.servers.aftermath import through
from tests.soak.driver import Place, Soak
from tests.soak.schedule import Life, brief, schedule

MB = 1_000_000
BAD_NETWORK = [
    HttpFault("*", "*", Chance(0.003), Reset(At.REQUEST)),
    HttpFault("*", "*", Chance(0.003), LOSE),
]


def _number(name: str, default: int) -> int:
    return int(os.environ.get(f"CKPTFS_SOAK_{name}", default))


def _on_disk(run: Path) -> Place:
    return Place(f"faults+file://{run}", str(run), run)


def _suffer(soak: Soak, lives: Iterable[Life], saves: int) -> None:
    faulthandler.cancel_dump_traceback_later()  # it takes long, and each job has a deadline
    for number, life in enumerate(lives):
        soak.live(life)
        print(f"life {number}: {life.saves} saves, {life.ending.value}; {dict(soak.report)}")
        if soak.report["saves"] >= saves:
            break
    soak.finish()


def test_a_short_soak(tmp_path: Path) -> None:
    """A full disk, the death of one rank while it writes, of all while they seal: each restart
    finds a committed step, whole, and nothing leaks.
    """
    soak = Soak(_on_disk(tmp_path / "run"), 4, 2 * MB, {"mode": "async"})
    _suffer(soak, brief(4), saves=100)
    assert soak.report["failed saves"] >= 1
    assert soak.report["killed"] >= 5


@pytest.mark.campaign
def test_soak_on_a_disk(tmp_path: Path) -> None:
    """300 saves of 200 MB over 4 ranks with random faults, deaths and restarts."""
    seed = _number("SEED", random.SystemRandom().randrange(1 << 32))
    print(f"CKPTFS_SOAK_SEED={seed}")
    ranks = _number("RANKS", 4)
    mode = os.environ.get("CKPTFS_SOAK_MODE", "async")
    soak = Soak(_on_disk(tmp_path / "run"), ranks, _number("MB", 200) * MB, {"mode": mode})
    _suffer(soak, schedule(seed, ranks=ranks), _number("SAVES", 300))


@pytest.mark.campaign
def test_soak_behind_a_bad_network() -> None:
    """The same on Ceph's S3, with resets and lost answers on the way, a tenth as often."""
    seed = _number("SEED", random.SystemRandom().randrange(1 << 32))
    print(f"CKPTFS_SOAK_SEED={seed}")
    ranks = _number("RANKS", 4)
    mode = os.environ.get("CKPTFS_SOAK_MODE", "async")
    with lab.radosgw() as server, FaultProxy(server.endpoint, BAD_NETWORK, seed=seed) as proxy:
        uri = server.fresh("soak")
        place = Place(
            f"faults+{uri}",
            uri,
            storage_options=through(server, proxy.url),
            plain_options=server.storage_options(),
        )
        soak = Soak(place, ranks, _number("MB", 200) * MB, {"mode": mode})
        _suffer(soak, schedule(seed, ranks=ranks), _number("SAVES", 300) // 10)
        assert [e for e in proxy.log if e.done], "the network was not that bad"
