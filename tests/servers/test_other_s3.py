"""A small job on servers that speak S3 and lack something: what the table of docs/stores/README.md says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

import ckptfs
from ckptfs.storage.registry import open_storage
from ckptfs.tools.doctor import Report, Settings, Verdict, examine
from tests import lab
from tests.lab.server import Server
from tests.servers.conftest import session_of, shared
from tests.servers.looking import keys_below
from tests.servers.racers import Job, race
from tests.servers.test_commit_race import judge

PART_BYTES = 5 << 20
# Which of them let one of many writers win.
EXCLUSIVE = {
    "swift": False,
    "rclone": False,
    "s3rver": False,
    "seaweedfs": True,
    "localstack": True,
}
# LocalStack takes long to start and answers with moto, which the other tests start anyway.
SERVERS = [
    pytest.param(kind, marks=pytest.mark.campaign if kind == "localstack" else ())
    for kind in EXCLUSIVE
]


@pytest.fixture(scope="session")
def swift() -> Iterator[Server]:
    """OpenStack Swift."""
    yield from shared("swift", lab.swift)


@pytest.fixture(scope="session")
def rclone() -> Iterator[Server]:
    """rclone serve s3."""
    yield from shared("rclone", lab.rclone)


@pytest.fixture(scope="session")
def s3rver() -> Iterator[Server]:
    """s3rver."""
    yield from shared("s3rver", lab.s3rver)


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[Server]:
    """SeaweedFS."""
    yield from shared("seaweedfs", lab.seaweedfs)


@pytest.fixture(scope="session")
def localstack() -> Iterator[Server]:
    """LocalStack."""
    yield from shared("localstack", lab.localstack)


def state(step: int) -> dict[str, torch.Tensor]:
    """A file of three parts, the last one small."""
    return {"w": torch.arange(3 << 20, dtype=torch.float32) + step, "b": torch.full((7,), step)}


@pytest.mark.parametrize("kind", SERVERS)
def test_a_run_on_it(kind: str, request: pytest.FixtureRequest) -> None:
    """Saves in parts with retention, a list, a load; what it lacks is found out and reported."""
    server: Server = request.getfixturevalue(kind)
    run, options = server.fresh("run"), server.storage_options(part_size_bytes=PART_BYTES)
    with ckptfs.CheckpointManager(run, keep_latest=1, storage_options=options) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    assert [one.step for one in ckptfs.list_checkpoints(run, storage_options=options)] == [2]
    got = state(0)
    ckptfs.load(got, f"{run}/step_2", storage_options=options)
    assert all(torch.equal(got[name], wanted) for name, wanted in state(2).items())
    assert not [key for key in keys_below(server, run) if key.startswith("step_1/")]
    with closing(open_storage(run, options)) as storage:
        assert storage.probe("probe").exclusive_create is EXCLUSIVE[kind]


@pytest.mark.parametrize("writers", [4, pytest.param(16, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", [server for server in SERVERS if EXCLUSIVE[str(server.values[0])]])
def test_writers_race_on_it(kind: str, writers: int, request: pytest.FixtureRequest) -> None:
    """Where conditions are honoured, one of 4 or 16 processes commits, the others conflict and leave nothing."""
    server: Server = request.getfixturevalue(kind)
    uri = server.fresh("race")
    judge(server, uri, race(Job(uri, server.storage_options(), writers, rounds=1)))


@pytest.mark.parametrize(
    ("kind", "name", "verdict", "words"),
    [
        ("rclone", "requests", Verdict.WARN, "a range is answered with 200"),
        ("rclone", "multipart-list", Verdict.OK, "an upload under way is listed"),
        ("s3rver", "multipart-list", Verdict.WARN, "does not know this request"),
        ("s3rver", "object-lock", Verdict.UNKNOWN, "the server does not report them"),
        ("swift", "conditional-create", Verdict.WARN, "no exclusive create"),
        ("swift", "multipart-list", Verdict.OK, "an upload under way is listed"),
        ("swift", "requests", Verdict.OK, "batches deleted as ckptfs asks"),
    ],
)
def test_doctor_says_what_it_saw(
    kind: str, name: str, verdict: Verdict, words: str, request: pytest.FixtureRequest
) -> None:
    """Each lack is a finding of its own, seen and not guessed; none of them alone keeps a job from starting."""
    report = _examined(request.getfixturevalue(kind))
    found = report.finding(name)
    assert (found.verdict, words in found.seen) == (verdict, True), found
    failed = {one.name for one in report.findings if one.verdict is Verdict.FAIL}
    # A visit may catch a reader, or may not: s3rver writes an object in place; Swift lists the files of an
    # object before it opens one, and answers 404 where a PUT removes it between the two.
    assert failed <= ({"atomic-replace"} if kind in ("s3rver", "swift") else set()), report.document


_reports: dict[str, Report] = {}


def _examined(server: Server) -> Report:
    """One visit for all findings of a server."""
    if server.name not in _reports:
        settings = Settings(size_bytes=1 << 20, rounds=1)
        where, options = server.fresh("doctor"), server.storage_options()
        _reports[server.name] = examine(where, options, settings)
    return _reports[server.name]


def test_swift_takes_batches_of_obstore(swift: Server, caplog: pytest.LogCaptureFixture) -> None:
    """obstore sends the Content-MD5 that Swift wants of a batch of deletes: one request, no warning."""
    with closing(open_storage(swift.fresh("batch"), swift.storage_options())) as storage:
        for name in "abc":
            storage.replace(f"d/{name}", b"x")
        storage.remove_many([f"d/{name}" for name in "abc"])
        assert storage.list("") == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def tidy_swift() -> Iterator[Server]:
    """Swift as s3fs can use it."""
    yield from session_of(lab.swift(tidy=True))


def test_swift_deletes_one_by_one_for_s3fs(
    tidy_swift: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """botocore sends none: the batch is refused, one warning says so, the keys go all the same; a run
    with retention goes through.
    """
    run, options = tidy_swift.fresh("single"), tidy_swift.storage_options(client="s3fs")
    with closing(open_storage(run, options)) as storage:
        for _ in range(2):
            for name in "abc":
                storage.replace(f"d/{name}", b"x")
            storage.remove_many([f"d/{name}" for name in "abc"])
    assert keys_below(tidy_swift, run) == {}
    told = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert len(told) == 1, told
    assert "Content-MD5" in told[0]
    with ckptfs.CheckpointManager(run, keep_latest=1, storage_options=options) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((7,), step)})
    assert [one.step for one in ckptfs.list_checkpoints(run, storage_options=options)] == [2]
    assert not [key for key in keys_below(tidy_swift, run) if key.startswith("step_1/")]


def test_swift_deletes_a_tree_for_an_fsspec_stream(
    tidy_swift: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """fsspec+s3:// sends batches as s3fs does: refused, said once, and the keys go one by one."""
    run, options = tidy_swift.fresh("tree"), tidy_swift.storage_options(client="s3fs")
    del options["client"]
    with closing(open_storage(f"fsspec+{run}", options)) as storage:
        for _ in range(2):
            for name in "abc":
                storage.replace(f"d/{name}", b"x")
            storage.remove_tree("d")
    assert keys_below(tidy_swift, run) == {}
    told = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert len(told) == 1, told
    assert "Content-MD5" in told[0]
