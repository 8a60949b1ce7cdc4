"""A directory that eight ranks on two NFS clients make and write into, in rounds, absence cached before.

``ckptfs.ensure_dir`` never lets a rank meet "no such directory"; the usual pattern (rank 0 makes it, a
barrier, all write) does in the same rounds, on the node with a client that had cached its absence.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.crowd import Crowd
from tests.nfs.rounds import make_and_write

PER_NODE = 4


@pytest.fixture
def lab(either: NfsLab) -> NfsLab:
    """Ranks of a job cost seconds: over NFS 3 they are for the campaign."""
    return either


def rounds(lab: NfsLab, count: int, *, timeout_s: float) -> list[dict[str, Any]]:
    """What each rank saw."""
    args = {"run": lab.fresh("rounds"), "rounds": count}
    with Crowd(lab, make_and_write, args, per_node=PER_NODE) as crowd:
        values: list[dict[str, Any]] = crowd.values(timeout_s=timeout_s)
    return values


def assert_seen(values: list[dict[str, Any]]) -> None:
    """No failure of ours, and a race that was there to be met."""
    for way in ("held", "call"):
        assert [value["failed"][way] for value in values] == [0] * len(values), way
    naive = [value["failed"]["naive"] for value in values]
    assert sum(naive[PER_NODE:]) > 0, "the control: the usual pattern met nothing"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_directory_is_there_for_every_rank_at_once(lab: NfsLab) -> None:
    """25 rounds, absence cached on both clients before each."""
    assert_seen(rounds(lab, 25, timeout_s=400))


@pytest.mark.campaign
def test_campaign_a_thousand_directories(lab: NfsLab) -> None:
    """1000 rounds, and what they cost."""
    values = rounds(lab, 1000, timeout_s=4 * 3600)
    print(f"\n{told(values, lab.version)}")
    assert_seen(values)


def told(values: list[dict[str, Any]], version: str) -> str:
    """Failures, and the median seconds of each way on the slowest rank of each round."""
    seconds = {
        way: statistics.median(map(max, zip(*(v["took"][way] for v in values), strict=True)))
        for way in values[0]["took"]
    }
    failed = {way: sum(v["failed"][way] for v in values) for way in values[0]["failed"]}
    tried = {way: len(values) * len(took) for way, took in values[0]["took"].items()}
    medians = ", ".join(f"{way} {1000 * s:.0f} ms" for way, s in seconds.items())
    return f"v{version}: creates {tried}, of them failed {failed}; median of making one: {medians}"
