"""What a change through fsspec may have done, by what the server answered; and its probe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    StorageError,
    TransientError,
)
from ckptfs.integrations.fsspec import FileCheckpoints
from ckptfs.storage.fsspec_client import FsspecClient
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.uri import Uri
from tests.storage.s3_scripted import KEY, SECRET, Answer, Request, Scripted, error, usual
from tests.storage.test_forks import child_ends

s3fs = pytest.importorskip("s3fs")


@pytest.fixture
def server() -> Iterator[Scripted]:
    """A server for s3fs."""
    with Scripted() as server:
        yield server


def storage(server: Scripted, tries: int = 1) -> FsspecStorage:
    """Through s3fs itself, which tries so often."""
    options = {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": server.endpoint,
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    found = FsspecStorage(Uri.parse("fsspec+s3://bucket/run"), options)
    found._client.fs.retries = tries
    return found


class Keeping:
    """A server that keeps objects and honours If-None-Match; faults: what it does with the n-th PUT."""

    def __init__(self, faults: dict[int, Callable[[Answer], Answer]] | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self.faults = faults or {}
        self.may_delete = True

    def __call__(self, request: Request) -> Answer:
        """The answer."""
        match request.kind:
            case "PUT":
                self.puts += 1
                answer, fault = self._put(request), self.faults.get(self.puts)
                return answer if fault is None else fault(answer)
            case "GET" if request.path in self.objects:
                return Answer(200, self.objects[request.path], {"ETag": '"e"'})
            case "HEAD" if request.path in self.objects:
                return usual(request)
            case "DELETE":
                if not self.may_delete:
                    return Answer(403, error("AccessDenied"))
                self.objects.pop(request.path, None)
                return Answer(204)
            case _:
                return Answer(404, error("NoSuchKey"))

    def _put(self, request: Request) -> Answer:
        if "if-none-match" in request.headers and request.path in self.objects:
            return Answer(
                412, error("PreconditionFailed", more="<Condition>If-None-Match</Condition>")
            )
        self.objects[request.path] = request.body
        return Answer(200, b"", {"ETag": '"e"'})


def lost(_: Answer) -> Answer:
    """It was done, and no client hears of it."""
    return Answer(then="drop")


ANSWERS: list[tuple[Answer, type[CkptfsError]]] = [
    (Answer(500, error("InternalError")), AnswerLostError),
    (Answer(502, b"<html>"), AnswerLostError),
    (Answer(503, error("ServiceUnavailable")), AnswerLostError),
    (Answer(200, b"", {}, "drop"), AnswerLostError),
    (Answer(503, error("SlowDown")), TransientError),
    (Answer(409, error("ConditionalRequestConflict")), TransientError),
    (Answer(400, error("RequestTimeout")), TransientError),
]


@pytest.mark.parametrize(("answer", "kind"), ANSWERS)
def test_what_a_change_may_have_done(
    server: Scripted, answer: Answer, kind: type[CkptfsError]
) -> None:
    """A server's error and a lost answer leave a create and a replace open; throttling and
    conflicts say that nothing was done, so that they may be repeated.
    """
    server.answer = Keeping()
    place = storage(server)
    place.create("first", b"x", staging="")  # the probe is behind it
    server.answer = lambda request: usual(request) if request.kind == "GET ?list" else answer
    changes: list[Callable[[], object]] = [
        lambda: place.create("log/1", b"x", staging=""),
        lambda: place.replace("f", b"x"),
    ]
    for change in changes:
        with pytest.raises(CkptfsError) as caught:
            change()
        assert type(caught.value) is kind, caught.value


def test_the_probe_knows_its_own_object(server: Scripted) -> None:
    """The library repeats a probe's first PUT after a lost answer, and meets its own object: another
    key is tried, the create succeeds, and no probe is left.
    """
    keeping = server.answer = Keeping({1: lost})
    storage(server, tries=3).create("log/1", b"x", staging="")
    assert list(keeping.objects) == ["/bucket/run/log/1"]


def test_the_probe_that_hears_nothing(server: Scripted) -> None:
    """Where every first PUT is met again, the probe is an error that says so, and never a verdict."""
    server.answer = Keeping(dict.fromkeys(range(1, 99), lost))
    with pytest.raises(StorageError, match="cannot be probed") as caught:
        storage(server, tries=1).probe("")
    assert not isinstance(caught.value, AlreadyExistsError)


def test_the_probe_of_a_server_that_knows_no_conditions(server: Scripted) -> None:
    """OpenStack Swift answers 501 to If-None-Match: no writer is excluded there, and saves continue."""
    keeping = Keeping()

    def answer(request: Request) -> Answer:
        refused = request.kind == "PUT" and "if-none-match" in request.headers
        return Answer(501, error("NotImplemented")) if refused else keeping(request)

    server.answer = answer
    found = storage(server)
    assert not found.probe("").exclusive_create
    found.replace("log/1", b"x")
    assert list(keeping.objects) == ["/bucket/run/log/1"]


def test_the_probe_without_permission_to_delete(
    server: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """What the probe saw counts although its key cannot be removed: writing is possible, and a warning
    names what stays.
    """
    keeping = server.answer = Keeping()
    keeping.may_delete = False
    with caplog.at_level(logging.WARNING):
        storage(server).create("log/1", b"x", staging="")
    assert "/bucket/run/log/1" in keeping.objects
    assert ".partial-probe-" in caplog.text


# -- locks over opening --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_opens_while_a_thread_of_the_parent_opened() -> None:
    """A child that is forked while another thread opens a client, or a storage behind an fsspec
    protocol, has locks of its own.
    """
    client = FsspecClient(Uri.parse("fsspec+memory:///x"), {})
    assert child_ends(client._lock, lambda: client.fs)
    from ckptfs.integrations.fsspec import MemoryCheckpoints

    fs = MemoryCheckpoints(skip_instance_cache=True)
    assert child_ends(fs._lock, lambda: fs.pipe("store/f", b"x"))


# -- exclusive creation --------------------------------------------------------------------------


def test_one_of_many_creators_wins(tmp_path: Path) -> None:
    """Writers that open one name with "xb" before any of them closes: one publishes, the others get
    AlreadyExistsError, and the file is the winner's, whole.
    """
    fs, path = FileCheckpoints(), f"{tmp_path}/dir/lock"
    files = [fs.open(path, "xb") for _ in range(8)]
    for number, file in enumerate(files):
        file.write(b"%d" % number * 1000)
    start = threading.Barrier(8)
    ends: list[Any] = [None] * 8

    def close(number: int) -> None:
        start.wait(120)
        try:
            files[number].close()
        except AlreadyExistsError as error:
            ends[number] = error

    threads = [threading.Thread(target=close, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    winners = [number for number, end in enumerate(ends) if end is None]
    assert len(winners) == 1
    assert Path(path).read_bytes() == b"%d" % winners[0] * 1000
    assert [p.name for p in Path(path).parent.iterdir()] == ["lock"]
    with pytest.raises(FileExistsError):
        fs.open(path, "xb")


def test_put_and_pipe_only_create(tmp_path: Path) -> None:
    """put_file and pipe_file with mode="create" make a new file and leave one that is there."""
    fs, source = FileCheckpoints(), tmp_path / "source"
    source.write_bytes(b"new")
    fs.put_file(str(source), f"{tmp_path}/a/put", mode="create")
    fs.pipe_file(f"{tmp_path}/a/pipe", b"new", mode="create")
    source.write_bytes(b"newer")
    with pytest.raises(FileExistsError):
        fs.put_file(str(source), f"{tmp_path}/a/put", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{tmp_path}/a/pipe", b"newer", mode="create")
    assert fs.cat(f"{tmp_path}/a/put") == fs.cat(f"{tmp_path}/a/pipe") == b"new"


def test_a_stat_says_that_the_credentials_have_expired(server: Scripted) -> None:
    """The answer to a HEAD has a status and no body: that to a GET names the reason."""
    server.answer = lambda _: Answer(400, error("ExpiredToken"))
    with pytest.raises(CredentialsError, match="have expired"):
        storage(server).stat("f")
    assert [request.kind for request in server.requests][-1] == "GET"
