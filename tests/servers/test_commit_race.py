"""Writers that race for one commit: exactly one wins, and nothing of the others is left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.lab.server import Server
from tests.servers.looking import keys_below
from tests.servers.racers import Job, Outcome, race

WRITERS = 16
# Writers and rounds here. Each writer is a process with clients of its own, half a second of CPU: the crowd
# races on one store, and on all of them in the campaign.
STORES = {"radosgw": (WRITERS, 2), "moto": (5, 1), "azurite": (5, 1), "gcs": (5, 2)}


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
def test_writers_race(store: str, request: pytest.FixtureRequest) -> None:
    """16 processes, or five, seal one name at once, once or twice: one commits, the others get
    CommitConflictError and leave nothing.
    """
    server: Server = request.getfixturevalue(store)
    uri = server.fresh("race")
    writers, rounds = STORES[store]
    found = race(Job(uri, server.storage_options(), writers, rounds=rounds))
    assert [len(outcomes) for outcomes in found] == [writers] * rounds
    judge(server, uri, found)


@pytest.mark.campaign
@pytest.mark.parametrize("store", STORES)
def test_16_writers_race_200_rounds(store: str, request: pytest.FixtureRequest) -> None:
    """The same 200 times, ten runs of twenty rounds."""
    server: Server = request.getfixturevalue(store)
    for _ in range(10):
        uri = server.fresh("race")
        judge(server, uri, race(Job(uri, server.storage_options(), WRITERS, rounds=20)))
