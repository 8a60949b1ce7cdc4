"""What goes wrong with GCS is reported in one clear sentence, with its type, and without credentials."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptfs.storage.clients.base import IF_ABSENT, ObjectClient
from ckptfs.storage.options import Times
from tests.lab.gcs_server import GcsServer, Why
from tests.servers.gcs_lab import CLIENTS, Place, open_on, place_of

SECRET = "ya29.s3cr3t-t0k3n"  # noqa: S105 - made up, to be looked for in messages
Doing = Callable[[ObjectClient], object]


def _uploaded(client: ObjectClient) -> None:
    upload = client.begin_upload("run/up", part_bytes=5 << 20)
    upload.put_part(0, b"x")
    upload.complete()


READS: dict[str, Doing] = {
    "get": lambda client: client.get("run/k"),
    "head": lambda client: client.head("run/k"),
    "get range": lambda client: client.get_range("run/k", 0, memoryview(bytearray(1)), None),
    "list": lambda client: list(client.list_keys("run/", delimiter=True)),
}
CHANGES: dict[str, Doing] = {
    "put": lambda client: client.put("run/k", b"x"),
    "create": lambda client: client.put("run/new", b"x", IF_ABSENT),
    "delete": lambda client: _raised(client.delete(["run/k"])),
    "deletes": lambda client: _raised(client.delete(["run/k", "run/l"])),
    "upload": _uploaded,
}
ALL = READS | CHANGES


def _raised(refused: list[Any]) -> None:
    for one in refused:
        raise one.error


def error_of(doing: Doing, client: ObjectClient) -> StorageError:
    """The error that it raises; its text is one line and holds no secret, and no exception of a
    library hangs on it.
    """
    with pytest.raises(StorageError) as caught:
        doing(client)
    text = str(caught.value)
    assert "\n" not in text
    assert SECRET not in text
    link: BaseException | None = caught.value
    while link is not None:
        assert isinstance(link, CkptfsError), link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return caught.value


@pytest.fixture(scope="module", params=CLIENTS)
def shared(request: pytest.FixtureRequest) -> Iterator[Place]:
    """One server for the module, per client."""
    with place_of(request.param) as found:
        yield found


@pytest.fixture
def place(shared: Place) -> Place:
    """The server as new: each test bends its rules."""
    shared.gcs.reset()
    shared.client.put("run/k", b"x")
    return shared


@pytest.mark.parametrize("doing", ALL)
def test_a_bucket_that_does_not_exist(place: Place, doing: str) -> None:
    """It is named, with the endpoint, and it is not made."""
    client = open_on(place.gcs, place.name, {}, bucket="nobody")
    error = error_of(ALL[doing], client)
    assert "nobody" not in place.gcs.store.buckets
    if (doing, place.name) == ("upload", "obstore"):
        return  # it cannot tell a bucket that is missing from an upload that is over
    assert isinstance(error, NotFoundError)
    if (doing, place.name) != ("head", "obstore"):  # the answer to its HEAD has no body
        assert f"there is no bucket 'nobody' at {place.gcs.endpoint}" in str(error)


@pytest.mark.parametrize("doing", ALL)
def test_a_token_that_is_not_accepted(place: Place, doing: str) -> None:
    """A wrong or expired token that cannot be renewed is CredentialsError."""
    place.gcs.rules.token = "another"  # noqa: S105 - made up
    error = error_of(ALL[doing], place.another(token=SECRET))
    assert isinstance(error, CredentialsError)
    assert f"{place.gcs.endpoint} does not accept these credentials" in str(error)
    assert "renew it" in str(error)


@pytest.mark.parametrize("doing", ALL)
def test_no_credentials_where_some_are_needed(place: Place, doing: str) -> None:
    """An anonymous caller gets the message that credentials were expected, and how to give them."""
    place.gcs.rules.token = "another"  # noqa: S105 - made up
    error = error_of(ALL[doing], place.client)
    assert isinstance(error, AccessError)
    if doing != "head":  # the answer to a HEAD has no body
        assert isinstance(error, CredentialsError)
        assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error)


NEEDS = {
    "get": "storage.objects.get",
    "head": "storage.objects.get",
    "get range": "storage.objects.get",
    "list": "storage.objects.list",
    "put": "storage.objects.create",
    "create": "storage.objects.create",
    "delete": "storage.objects.delete",
    "deletes": "storage.objects.delete",
    "upload": "storage.multipartUploads.create",
}


@pytest.mark.parametrize("doing", ALL)
def test_a_permission_that_is_missing(place: Place, doing: str) -> None:
    """AccessError names the permission to ask for; each action needs one, and only that one."""
    others = set(NEEDS.values()) | {"storage.buckets.get"}
    if doing == "put":
        others.discard("storage.objects.delete")  # replacing is deleting, for IAM
    place.gcs.rules.forbidden = others - {NEEDS[doing]}
    ALL[doing](place.client)
    place.gcs.rules.forbidden = {NEEDS[doing]}
    error = error_of(ALL[doing], place.client)
    assert isinstance(error, AccessError)
    assert not isinstance(error, CredentialsError)
    assert f"allow {NEEDS[doing]}" in str(error)


@pytest.mark.parametrize("doing", ALL)
def test_throttling_is_one_try_and_did_nothing(place: Place, doing: str) -> None:
    """429 is TransientError, raised after one request: retrying is not the client's."""
    if (doing, place.name) == ("upload", "obstore"):
        pytest.skip("obstore retries the parts of an upload by itself")
    place.gcs.rules.seen.clear()
    place.gcs.rules.fail(Why.SLOW_DOWN, 50, permission=NEEDS[doing])
    error = error_of(ALL[doing], place.client)
    assert isinstance(error, TransientError)
    assert "asks to slow down" in str(error)
    assert place.wants(NEEDS[doing]) <= (2 if doing == "deletes" else 1)


@pytest.mark.parametrize("why", [Why.UNAVAILABLE, Why.BACKEND, None])
@pytest.mark.parametrize("doing", READS)
def test_a_failing_server_is_worth_a_retry_of_a_read(
    place: Place, doing: str, why: Why | None
) -> None:
    """5xx and broken connections of reads are TransientError. One request; a kept connection that
    turns out to be dead is replaced once, below the client, as HTTP has it.
    """
    place.gcs.rules.seen.clear()
    tries = 2 if why is None and place.name == "gcsfs" else 1
    place.gcs.rules.fail(why, tries, permission=NEEDS[doing])
    assert isinstance(error_of(READS[doing], place.client), TransientError)
    assert place.wants(NEEDS[doing]) == tries


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("why", [Why.UNAVAILABLE, Why.BACKEND, None])
@pytest.mark.parametrize("doing", ["put", "create"])
def test_a_change_without_an_answer_may_have_happened(
    place: Place, doing: str, why: Why | None, after: bool
) -> None:
    """5xx and broken connections of a put are AnswerLostError, whether or not it happened; one try."""
    place.gcs.rules.seen.clear()
    place.gcs.rules.fail(why, 1, permission="storage.objects.create", after=after)
    error = error_of(CHANGES[doing], place.client)
    assert isinstance(error, AnswerLostError)
    assert error.outcome == "unknown"
    assert place.wants("storage.objects.create") == 1
    if doing == "create":
        assert ("run/new" in place.gcs.store.bucket(place.gcs.bucket).live) == after


@pytest.mark.parametrize("doing", ["get", "list", "put"])
def test_silence_is_bounded(place: Place, doing: str) -> None:
    """A server that says nothing for request_timeout_s is given up; a put may have happened."""
    quick = Times(connect_s=1.0, request_s=0.2)
    client = open_on(place.gcs, place.name, {}, times=quick)
    place.gcs.rules.gate.clear()
    try:
        error = error_of(ALL[doing], client)
    finally:
        place.gcs.rules.gate.set()
    assert isinstance(error, AnswerLostError if doing == "put" else TransientError)
    assert "was silent for too long" in str(error)


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("doing", ALL)
def test_nothing_listens(name: str, doing: str) -> None:
    """A dead endpoint is TransientError that names it, also for changes: nothing was sent."""
    if (doing, name) == ("upload", "obstore"):
        pytest.skip("obstore retries the parts of an upload by itself")
    with GcsServer() as gone:
        client = open_on(gone, name, {})
        endpoint = gone.endpoint
    error = error_of(ALL[doing], client)
    assert isinstance(error, TransientError)
    assert f"nothing listens at {endpoint}" in str(error)


@pytest.mark.parametrize("name", CLIENTS)
def test_no_such_host(name: str) -> None:
    """A host without an address is named."""
    with GcsServer() as gcs:
        client = open_on(gcs, name, {"endpoint_url": "http://nobody.invalid:1"})
        error = error_of(ALL["get"], client)
    assert isinstance(error, TransientError)
    assert "nobody.invalid" in str(error)


@pytest.mark.parametrize("name", CLIENTS)
def test_no_tls_there(name: str) -> None:
    """https to a server that speaks http is reported as such."""
    with GcsServer() as gcs:
        https = gcs.endpoint.replace("http:", "https:")
        error = error_of(ALL["get"], open_on(gcs, name, {"endpoint_url": https}))
    assert "TLS" in str(error)


def test_requester_pays(place: Place) -> None:
    """A bucket with paying readers says so; with the project, every kind of request names it."""
    place.gcs.rules.requester_pays = True
    error = error_of(ALL["get"], place.client)
    assert "requester pays" in str(error)
    assert "pass requester_pays=True" in str(error)
    client = place.another(requester_pays="payer-1")
    for doing in ALL.values():
        doing(client)
    place.gcs.rules.seen.clear()
    upload = client.begin_upload("run/u", part_bytes=4)
    upload.put_part(0, b"x")
    upload.complete()
    assert place.gcs.rules.seen


def test_a_bad_key_file(tmp_path: Any) -> None:
    """A key file that is missing or is none is CredentialsError at the first request, not before."""
    (tmp_path / "key.json").write_text(json.dumps({"type": "nonsense", "private_key": SECRET}))
    with GcsServer() as gcs:
        for file in ("none.json", "key.json"):
            client = open_on(gcs, "obstore", {"token": str(tmp_path / file)})
            error = error_of(ALL["get"], client)
            assert isinstance(error, CredentialsError)
            assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error)
