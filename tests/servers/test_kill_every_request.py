"""SIGKILL at every request of a save: the old or the new checkpoint, bit-exact, and nothing left over."""

from __future__ import annotations

import dataclasses

import pytest

from tests.lab.server import Server
from tests.servers.deaths import Job, Verdict, deaths

FAST = {"part_size_bytes": 5 << 20, "concurrency": 2}  # a file of 12 MiB goes in three parts


def check(verdicts: list[Verdict]) -> None:
    """No trouble anywhere, and deaths on both sides of the commit."""
    bad = [v for v in verdicts if v.trouble]
    told = "\n".join(f"{v.point}\n{v.trouble[-1500:]}" for v in bad[:3])
    assert not bad, f"{len(bad)} of {len(verdicts)}:\n{told}"
    assert {v.end for v in verdicts} == {"old", "new"}


@pytest.mark.parametrize(
    ("scenario", "stride", "client"),
    [("fresh", 37, "auto"), ("replace", 97, "auto"), ("fresh", 37, "s3fs")],
)
def test_killed_at_some_requests(radosgw: Server, scenario: str, stride: int, client: str) -> None:
    """A sample of the deaths: before, within and after a request."""
    options = {**FAST, "client": client}
    job = Job(scenario, dataclasses.asdict(radosgw), options, stride=stride)
    check(deaths(job))


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("store", "client"),
    [
        ("radosgw", "obstore"),
        ("radosgw", "s3fs"),
        ("moto", "obstore"),
        ("moto", "s3fs"),
        ("gcs", "obstore"),
        ("gcs", "gcsfs"),
        ("azurite", "obstore"),
        ("azurite", "adlfs"),
    ],
)
@pytest.mark.parametrize("scenario", ["fresh", "replace"])
def test_killed_at_every_request(
    scenario: str, store: str, client: str, request: pytest.FixtureRequest
) -> None:
    """Every death there is."""
    server: Server = request.getfixturevalue(store)
    check(deaths(Job(scenario, dataclasses.asdict(server), {**FAST, "client": client})))


@pytest.mark.parametrize(
    ("mistake", "scenario"),
    [
        ("projects before it commits", "fresh"),
        ("writes in place", "fresh"),
        ("deletes before it commits", "replace"),
        ("leaves attempts", "fresh"),
        ("leaves uploads", "fresh"),
    ],
)
@pytest.mark.campaign
def test_the_judge_sees_mistakes(radosgw: Server, mistake: str, scenario: str) -> None:
    """Each claim broken on purpose: some death shows it."""
    job = Job(scenario, dataclasses.asdict(radosgw), FAST, spoil=mistake, first=True)
    assert any(v.trouble for v in deaths(job))
