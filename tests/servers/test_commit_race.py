"""Writers that race for one commit: exactly one wins, and nothing of the others is left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.lab.server import Server
from tests.servers.looking import keys_below
from tests.servers.racers import Job, Outcome, race

WRITERS = 16
# Rounds here; moto and azurite take many times as long for one.
STORES = {"radosgw": 2, "moto": 1, "azurite": 1, "gcs": 2}


def judge(server: Server, uri: str, rounds: Sequence[Sequence[Outcome]]) -> None:
    """One winner per round; CommitConflictError for the rest; only the winner's bytes."""
    keys = keys_below(server, uri)
    for number, outcomes in enumerate(rounds):
        name = f"step_{number}"
        winners = [o.save_id for o in outcomes if not o.error]
        assert len(winners) == 1, f"{name}: {outcomes}"
        assert {o.error for o in outcomes if o.error} == {"CommitConflictError"}, outcomes
        here = {key.split("/")[1] for key in keys if key.startswith(f"{name}/")}
        assert here == {winners[0], ".metadata", "ckptfs.json"}, f"of the losers: {here}"
    left = [key for key in keys if key.startswith((".ckptfs/attempts/", ".ckptfs/tmp/"))]
    assert not left, f"records of attempts that are over: {left}"


@pytest.mark.parametrize("store", STORES)
def test_16_writers_race(store: str, request: pytest.FixtureRequest) -> None:
    """16 processes seal one name at once, once or twice: one commits, 15 get CommitConflictError and
    leave nothing.
    """
    server: Server = request.getfixturevalue(store)
    uri = server.fresh("race")
    rounds = race(Job(uri, server.storage_options(), WRITERS, rounds=STORES[store]))
    assert len(rounds) == STORES[store]
    judge(server, uri, rounds)


@pytest.mark.campaign
@pytest.mark.parametrize("store", STORES)
def test_16_writers_race_200_rounds(store: str, request: pytest.FixtureRequest) -> None:
    """The same 200 times, ten runs of twenty rounds."""
    server: Server = request.getfixturevalue(store)
    for _ in range(10):
        uri = server.fresh("race")
        judge(server, uri, race(Job(uri, server.storage_options(), WRITERS, rounds=20)))
