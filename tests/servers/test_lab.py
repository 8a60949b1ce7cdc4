"""The servers of the lab: each starts, serves, keeps what lab says of it, stops and leaves nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from tests import lab
from tests.lab import Server, raw
from tests.lab.process import REPOSITORY, UnavailableError, need
from tests.lab.sink import sink_stats
from tests.servers.conftest import session_of
from tests.servers.hdfs_raw import RawHdfs

WRITERS = 16


@pytest.mark.parametrize(
    "name", ["radosgw", "moto", "moto_tls", "azurite", "gcs", "gcs_emulator", "sink"]
)
def test_each_server_gives_back_what_was_put(name: str, request: pytest.FixtureRequest) -> None:
    """Every server of the lab is up when its fixture returns, and keeps small objects."""
    server: Server = request.getfixturevalue(name)
    with raw.bucket(server) as bucket:
        bucket.put("lab/round trip", b"here")
        assert bucket.get("lab/round trip") == b"here"
        assert bucket.keys("lab/round") == ["lab/round trip"]


@pytest.mark.hdfs
def test_hdfs_gives_back_what_was_put(hdfs: Server) -> None:
    """The HDFS takes a file through its DataNode and returns it."""
    authority, _, directory = hdfs.bucket.partition("/")
    files = RawHdfs(authority, hdfs.options["user"])
    files.write(f"/{directory}/lab/a", b"here")
    assert files.read(f"/{directory}/lab/a") == b"here"
    assert files.files(f"/{directory}/lab") == ["a"]


@pytest.mark.hdfs
def test_of_many_writers_one_wins_on_hdfs(hdfs: Server) -> None:
    """CREATE without overwrite lets one of 16 writers at once through."""
    authority, _, directory = hdfs.bucket.partition("/")
    files = RawHdfs(authority, hdfs.options["user"])
    barrier = threading.Barrier(WRITERS)

    def one(writer: int) -> int:
        barrier.wait()
        path = f"/{directory}/lab/race"
        status, _ = files.ask("PUT", "CREATE", path, b"%d" % writer, overwrite="false")
        return int(status)

    with ThreadPoolExecutor(WRITERS) as pool:
        answers = list(pool.map(one, range(WRITERS)))
    assert answers.count(http.client.CREATED) == 1
    assert files.read(f"/{directory}/lab/race") == b"%d" % answers.index(http.client.CREATED)


@pytest.mark.hdfs
def test_a_stopped_hdfs_leaves_nothing() -> None:
    """After its block neither NameNode nor DataNode runs, and their directory is gone."""
    leaves_nothing(lab.hdfs())


@pytest.mark.parametrize("name", ["radosgw", "moto", "azurite", "gcs", "sink"])
def test_of_many_writers_one_wins(name: str, request: pytest.FixtureRequest) -> None:
    """Where the lab says that creation is conditional, one of 16 writers at once wins and is read."""
    server: Server = request.getfixturevalue(name)
    barrier = threading.Barrier(WRITERS)
    with raw.bucket(server) as bucket, ThreadPoolExecutor(WRITERS) as pool:

        def one(writer: int) -> bool:
            barrier.wait()
            return bucket.create("lab/race", b"%d" % writer)

        won = list(pool.map(one, range(WRITERS)))
        assert won.count(True) == 1
        assert bucket.get("lab/race") == b"%d" % won.index(True)


def test_the_emulator_ignores_conditions(gcs_emulator: Server) -> None:
    """gcp-storage-emulator overwrites against a condition: the reason why `gcs` exists."""
    with raw.bucket(gcs_emulator) as bucket:
        assert [bucket.create("lab/twice", data) for data in (b"1", b"2")] == [True, True]
        assert bucket.get("lab/twice") == b"2"


def test_the_sink_forgets_parts_and_remembers_sizes(sink: Server) -> None:
    """An object in parts costs the sink no memory, has its size, and reads as zeros."""
    before = sink_stats(sink)
    part = b"x" * (5 << 20)
    with contextlib.closing(raw.s3(sink)) as client:
        place = {"Bucket": sink.bucket, "Key": "lab/parts"}
        upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
        tags = [
            client.upload_part(**upload, PartNumber=number, Body=part)["ETag"] for number in (1, 2)
        ]
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        assert client.head_object(**place)["ContentLength"] == 10 << 20
        middle = client.get_object(**place, Range="bytes=5242870-5242889")["Body"].read()
        assert middle == bytes(20)
    after = sink_stats(sink)
    assert after["part"] - before.get("part", 0) == 2
    assert after["body_bytes"] - before.get("body_bytes", 0) >= 10 << 20


def test_the_sink_that_keeps_all_gives_all_back() -> None:
    """With keep="all" an object in parts is bit-exact, framed bodies (aws-chunked) too."""
    data = os.urandom(11 << 20)
    with lab.sink(keep="all") as server, contextlib.closing(raw.s3(server)) as client:
        place = {"Bucket": server.bucket, "Key": "lab/all"}
        upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
        parts = [
            {
                "PartNumber": number,
                "ETag": client.upload_part(
                    **upload,
                    PartNumber=number,
                    Body=data[(number - 1) * (6 << 20) : number * (6 << 20)],
                    ChecksumAlgorithm="CRC32",
                )["ETag"],
            }
            for number in (1, 2)
        ]
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        assert client.get_object(**place)["Body"].read() == data


def test_the_sink_says_what_is_missing_and_goes_on(sink: Server) -> None:
    """HEAD and GET of nothing are 404s in one connection, the first without a body."""
    host, _, port = sink.endpoint.rpartition("/")[2].partition(":")
    key = f"/{sink.bucket}/lab/absent"
    with socket.create_connection((host, int(port)), timeout=120) as line:
        line.sendall(f"HEAD {key} HTTP/1.1\r\n\r\nGET {key} HTTP/1.1\r\n\r\n".encode())
        said = b""
        while not said.endswith(b"</Error>"):
            said += line.recv(4096)
    assert said.startswith(b"HTTP/1.1 404")
    assert said.partition(b"\r\n\r\n")[2].startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("name", ["radosgw", "moto", "azurite", "gcs", "gcs_emulator", "sink"])
def test_a_stopped_server_leaves_nothing(name: str) -> None:
    """After its block no process of a server runs and its directory is gone."""
    leaves_nothing(getattr(lab, name)())


def leaves_nothing(starting: AbstractContextManager[Server]) -> None:
    """Start a server of our own, stop it, look for remains."""
    with contextlib.contextmanager(session_of)(starting) as server:
        assert server.pids
        assert all(_runs(pid) for pid in server.pids)
    assert not any(_runs(pid) for pid in server.pids)
    assert not os.path.exists(server.run_dir)


@pytest.mark.parametrize("in_ci", [True, False])
def test_missing_servers_skip_on_a_laptop_and_fail_in_ci(
    in_ci: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The fixtures' rule: a skip with its reason, except where CI=true."""

    @contextlib.contextmanager
    def absent() -> Iterator[Server]:
        need("no-such-program-1")
        raise AssertionError
        yield

    monkeypatch.setenv("CI", "true" if in_ci else "")
    expected = UnavailableError if in_ci else pytest.skip.Exception
    with pytest.raises(expected, match="no-such-program-1"):
        next(session_of(absent()))


@pytest.mark.parametrize("name", ["sink", "gcs-emulator"])
def test_the_command_line_serves_until_interrupted(name: str) -> None:
    """`make lab-...` prints what to use, stops at Ctrl-C, and leaves no process."""
    serving = subprocess.Popen(
        [sys.executable, "-m", "tests.lab", name],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    with serving:
        assert serving.stdout is not None
        shown = [serving.stdout.readline()]
        while not shown[-1].startswith("# Ctrl-C"):
            assert shown[-1], "it ended before it was up"
            shown.append(serving.stdout.readline())
        assert any(line.startswith("storage_options = ") for line in shown)
        address = shown[0].rpartition("/")[2].strip()
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=120) == 0
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(address, timeout=60).connect()


def _runs(pid: int) -> bool:
    """Whether a process is there and is no corpse."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
