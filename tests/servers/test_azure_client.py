"""Azure's client against Azurite, request by request."""

from __future__ import annotations

import concurrent.futures.thread
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    IntegrityError,
    NotFoundError,
    StaleError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import IF_ABSENT, IfMatch, ObjectClient
from tests.faults.proxy import LOSE, At, FaultProxy, HttpFault, Nth, Reset
from tests.lab import raw
from tests.lab.azurite import ACCOUNT_KEY
from tests.lab.server import Server
from tests.servers.azure_rig import CLIENTS, connection, opened, sas

PART_BYTES = 1 << 20


@pytest.fixture(params=CLIENTS)
def kind(request: pytest.FixtureRequest) -> str:
    """The library that carries the data."""
    return str(request.param)


@pytest.fixture
def client(azurite: Server, kind: str) -> Iterator[ObjectClient]:
    """The client, on the server's container."""
    with opened(azurite.uri(), azurite.storage_options(client=kind)) as found:
        yield found


@pytest.fixture
def prefix(azurite: Server) -> str:
    """A prefix of this test's own, with its slash."""
    return azurite.fresh().removeprefix(azurite.uri() + "/") + "/"


def _keys(client: ObjectClient, prefix: str) -> list[str]:
    return [found.key for found in client.list_keys(prefix, delimiter=False)]


def _upload(client: ObjectClient, key: str, data: bytes) -> str | None:
    upload = client.begin_upload(key, part_bytes=PART_BYTES)
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        upload.put_part(number, memoryview(data)[start : start + PART_BYTES])
    return upload.complete()


# -- requests --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b/c d", "ü+%20~x", "q=1&y#z", "e=mc^2'(*)"])
@pytest.mark.parametrize("data", [b"", b"some bytes"])
def test_small_objects(client: ObjectClient, prefix: str, name: str, data: bytes) -> None:
    """What is put is got, headed, listed and deleted under exactly its key."""
    key = prefix + name
    etag = client.put(key, memoryview(data))
    assert client.get(key) == (data, etag)
    head = client.head(key)
    assert (head.size_bytes, head.etag) == (len(data), etag)
    assert [(f.key, f.size_bytes) for f in client.list_keys(prefix, delimiter=False)] == [
        (key, len(data))
    ]
    assert client.delete([key, prefix + "absent"]) == []
    for gone in (client.get, client.head):
        with pytest.raises(NotFoundError):
            gone(key)


def test_conditions(client: ObjectClient, prefix: str) -> None:
    """IfAbsent and IfMatch hold or leave what is there untouched; an etag may lack its quotes."""
    key = prefix + "k"
    first = client.put(key, b"1", IF_ABSENT)
    assert first is not None
    for refused in (IF_ABSENT, IfMatch('"0x1234"')):
        with pytest.raises(AlreadyExistsError):
            client.put(key, b"other", refused)
    assert client.get(key) == (b"1", first)
    second = client.put(key, b"2", IfMatch(first.strip('"')))
    assert second not in (None, first)
    with pytest.raises(AlreadyExistsError):
        client.put(key, b"3", IfMatch(first))
    assert client.get(key) == (b"2", second)


def test_ranges(client: ObjectClient, prefix: str) -> None:
    """A range fills the buffer it was given, of the object it was asked for, or says why not."""
    key = prefix + "k"
    data = os.urandom(3 * PART_BYTES + 17)
    etag = client.put(key, data)
    out = bytearray(b"." * (PART_BYTES + 20))
    client.get_range(key, 5, memoryview(out)[10:-10], etag)
    assert out == b"." * 10 + data[5 : 5 + PART_BYTES] + b"." * 10
    client.get_range(key, 0, memoryview(bytearray()), etag)
    for offset in (len(data) - 3, len(data), len(data) + 100):
        with pytest.raises(IntegrityError):
            client.get_range(key, offset, memoryview(bytearray(4)), etag)
    client.put(key, data[::-1])
    with pytest.raises(StaleError):
        client.get_range(key, 0, memoryview(bytearray(4)), etag)
    with pytest.raises(NotFoundError):
        client.get_range(prefix + "absent", 0, memoryview(bytearray(4)), None)


def test_listings(client: ObjectClient, prefix: str) -> None:
    """Keys in order; up to the next slash with a delimiter; nothing is success."""
    names = ["a", "b/1", "b/2", "c/d/e", "f", "g"]
    for name in names:
        client.put(prefix + name, b"x")
    assert _keys(client, prefix) == [prefix + name for name in names]
    found = list(client.list_keys(prefix, delimiter=True))
    assert {(f.key, f.is_prefix) for f in found} == {
        (prefix + "a", False),
        (prefix + "b/", True),
        (prefix + "c/", True),
        (prefix + "f", False),
        (prefix + "g", False),
    }
    assert _keys(client, prefix + "nothing/") == []


def test_many_deletes(client: ObjectClient, prefix: str) -> None:
    """A batch goes at once, absent keys too, and leaves the others."""
    keys = [f"{prefix}{number:02d}" for number in range(40)]
    for key in keys:
        client.put(key, b"x")
    assert client.delete([*keys[:30], prefix + "absent"]) == []
    assert _keys(client, prefix) == keys[30:]


def test_an_upload(client: ObjectClient, prefix: str) -> None:
    """Parts put at once become one object, in order, and nothing is visible before."""
    key = prefix + "k"
    data = os.urandom(4 * PART_BYTES + 1)
    upload = client.begin_upload(key, part_bytes=PART_BYTES)

    def put(number: int) -> None:
        upload.put_part(number, memoryview(data)[number * PART_BYTES : (number + 1) * PART_BYTES])

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(put, range(5)))
    assert _keys(client, prefix) == []
    with pytest.raises(NotFoundError):
        client.head(key)
    etag = upload.complete()
    assert client.get(key)[0] == data
    assert etag in (None, client.head(key).etag)
    upload.abort()
    assert client.head(key).size_bytes == len(data)


def test_an_aborted_upload(client: ObjectClient, prefix: str) -> None:
    """Nothing of it is to be seen, twice is harmless, and the key can be written."""
    key = prefix + "k"
    upload = client.begin_upload(key, part_bytes=PART_BYTES)
    upload.put_part(0, b"x" * PART_BYTES)
    upload.abort()
    upload.abort()
    assert _keys(client, prefix) == []
    client.put(key, b"new")
    assert client.get(key)[0] == b"new"


def test_one_of_many_writers_wins(client: ObjectClient, prefix: str) -> None:
    """16 writers create one key: exactly one succeeds, and its bytes are there."""
    for round_ in range(10):
        start = threading.Barrier(16)

        def write(number: int, key: str, start: threading.Barrier) -> bool:
            start.wait()
            try:
                client.put(key, b"%d" % number, IF_ABSENT)
            except AlreadyExistsError:
                return False
            return True

        key = f"{prefix}{round_}"
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(write, range(16), [key] * 16, [start] * 16))
        assert won.count(True) == 1
        assert client.get(key)[0] == b"%d" % won.index(True)


# -- answers that do not come ----------------------------------------------------------


def _through(azurite: Server, faults: list[HttpFault]) -> tuple[FaultProxy, str]:
    base, _, account = azurite.endpoint.rpartition("/")
    proxy = FaultProxy(base, faults)
    return proxy, f"{proxy.url}/{account}"


@pytest.mark.parametrize("fault", [LOSE, Reset(At.REQUEST, 100)])
def test_a_lost_answer_of_a_change(azurite: Server, kind: str, prefix: str, fault: Reset) -> None:
    """A put that may have happened is AnswerLostError, once and not tried again behind our back."""
    key = prefix + "k"
    proxy, endpoint = _through(azurite, [HttpFault("PUT", "*/k", Nth(2), fault)])
    options = azurite.storage_options(client=kind, connection_string=connection(endpoint))
    with proxy, opened(azurite.uri(), options) as client:
        client.put(
            prefix + "warm/k", b"x"
        )  # the connection that breaks is one that was used before
        with pytest.raises(AnswerLostError):
            client.put(key, b"x" * 1000, IF_ABSENT)
        assert len(proxy.requests("PUT", f"*/{key}")) == 1
        if fault is LOSE:
            with pytest.raises(AlreadyExistsError):
                client.put(key, b"x" * 1000, IF_ABSENT)
        else:
            client.put(key, b"x" * 1000, IF_ABSENT)
        assert client.get(key)[0] == b"x" * 1000


def test_a_read_that_breaks(azurite: Server, kind: str, prefix: str) -> None:
    """A body that ends too early is a TransientError: reading changes nothing."""
    key = prefix + "k"
    data = os.urandom(PART_BYTES)
    fault = HttpFault("GET", "*/k", Nth(1), Reset(At.ANSWER, PART_BYTES // 2))
    proxy, endpoint = _through(azurite, [fault])
    options = azurite.storage_options(client=kind, connection_string=connection(endpoint))
    with proxy, opened(azurite.uri(), options) as client:
        client.put(key, data)
        out = bytearray(len(data))
        with pytest.raises(TransientError):
            client.get_range(key, 0, memoryview(out), None)
        client.get_range(key, 0, memoryview(out), None)
        assert out == data


# -- one clear sentence ----------------------------------------------------------------


def _refusal(call: Callable[[], object], *secrets: str) -> CkptfsError:
    """The error of a call; no secret is in it, in what caused it or in its pickled copy."""
    with pytest.raises(CkptfsError) as caught:
        call()
    error = caught.value
    shown = [str(error), repr(error), "".join(traceback.format_exception(error))]
    shown.append(str(pickle.loads(pickle.dumps(error))))
    for secret in secrets:
        assert not [text for text in shown if secret in text]
    assert "\n" not in str(error)
    # A library's exception may hold the URL that was asked for, with its signature.
    assert error.__context__ is None
    return error


def test_a_wrong_container(azurite: Server, kind: str) -> None:
    """Every request names the container and the endpoint, and none makes it."""
    options = azurite.storage_options(client=kind)
    with opened("az://no-such-container/run", options) as client:
        calls: list[Callable[[], object]] = [
            lambda: client.get("run/k"),
            lambda: client.put("run/k", b"x", IF_ABSENT),
            lambda: list(client.list_keys("run/", delimiter=True)),
        ]
        for call in calls:
            error = _refusal(call, ACCOUNT_KEY)
            assert isinstance(error, NotFoundError)
            assert "there is no container 'no-such-container' at http://127.0.0.1" in str(error)


def test_a_wrong_key(azurite: Server, kind: str, prefix: str) -> None:
    """A key that the account does not have is refused, and not repeated in the message."""
    wrong = "A" * 8 + ACCOUNT_KEY[8:]
    options = {"client": kind, "connection_string": connection(azurite.endpoint, key=wrong)}
    with opened(azurite.uri(), options) as client:
        for call in (lambda: client.get(prefix + "k"), lambda: client.put(prefix + "k", b"x")):
            error = _refusal(call, wrong, wrong[8:40])
            assert isinstance(error, AccessError)


def test_a_wrong_endpoint(azurite: Server, kind: str, prefix: str) -> None:
    """Without a listener: an error with the endpoint, worth a retry, and nothing happened. The URL that was
    asked for holds the signature, and is not in the error.
    """
    token = sas(azurite, "rw")
    text = connection("http://127.0.0.1:1/devstoreaccount1", sas=token)
    options = {"client": kind, "connection_string": text, "connect_timeout_s": 2}
    with opened(azurite.uri(), options) as client:
        error = _refusal(lambda: client.put(prefix + "k", b"x"), token.partition("sig=")[2])
    assert type(error) is TransientError
    assert "127.0.0.1:1" in str(error)


def test_a_signature_that_has_ended(azurite: Server, kind: str, prefix: str) -> None:
    """Typed as credentials, said to have expired, with what to do; the signature stays inside."""
    token = sas(azurite, "racwdl", ends_in_s=-120)
    options = {"client": kind, "connection_string": connection(azurite.endpoint, sas=token)}
    signature = token.partition("sig=")[2]
    with opened(azurite.uri(), options) as client:
        for call in (
            lambda: client.get(prefix + "k"),
            lambda: client.put(prefix + "k", b"x", IF_ABSENT),
            lambda: _upload(client, prefix + "k", b"x"),
        ):
            error = _refusal(call, signature)
            assert isinstance(error, CredentialsError)
            assert "expired" in str(error)
            assert "SAS" in str(error)


def test_a_signature_for_reading_only(azurite: Server, kind: str, prefix: str) -> None:
    """What it may not do is AccessError and says what to allow; what it may do, works."""
    raw.azure(azurite).upload_blob(prefix + "k", b"here")
    token = sas(azurite, "r")
    options = {"client": kind, "connection_string": connection(azurite.endpoint, sas=token)}
    signature = token.partition("sig=")[2]
    with opened(azurite.uri(), options) as client:
        assert client.get(prefix + "k")[0] == b"here"
        for call, needed in (
            (lambda: client.put(prefix + "k", b"x"), "write"),
            (lambda: list(client.list_keys(prefix, delimiter=False)), "list"),
        ):
            error = _refusal(call, signature)
            assert type(error) is AccessError
            assert needed in str(error)
        [refused] = client.delete([prefix + "k"])
        assert isinstance(refused.error, AccessError)


def test_a_blob_under_a_lease(azurite: Server, kind: str, prefix: str) -> None:
    """Somebody's lease refuses writing and deleting: reported once, and no reason to retry."""
    blob = raw.azure(azurite).get_blob_client(prefix + "k")
    blob.upload_blob(b"here")
    lease = blob.acquire_lease()
    options = azurite.storage_options(client=kind)
    with opened(azurite.uri(), options) as client:
        error = _refusal(lambda: client.put(prefix + "k", b"x"), ACCOUNT_KEY)
        assert type(error) is AccessError
        [refused] = client.delete([prefix + "k"])
        assert type(refused.error) is AccessError
        lease.release()
        assert client.delete([prefix + "k"]) == []


def test_a_batch_with_refused_and_absent_keys(azurite: Server, kind: str, prefix: str) -> None:
    """What may be deleted is deleted, what may not is reported by its key, what is absent is success."""
    keys = [f"{prefix}{number}" for number in range(4)]
    container = raw.azure(azurite)
    for key in (keys[0], keys[1], keys[3]):
        container.upload_blob(key, b"here")
    lease = container.get_blob_client(keys[1]).acquire_lease()
    token = sas(azurite, "racwdl")
    options = {"client": kind, "connection_string": connection(azurite.endpoint, sas=token)}
    with opened(azurite.uri(), options) as client:
        [refused] = client.delete(keys)
        assert refused.key == keys[1]
        assert type(refused.error) is AccessError
        assert _keys(client, prefix) == [keys[1]]
    lease.release()


def test_deletes_one_by_one_after_the_main_thread_returned(
    client: ObjectClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """concurrent.futures takes no more work then, and a save at the end of a script still cleans up."""
    keys = [prefix + name for name in "abc"]
    for key in keys[:2]:
        client.put(key, b"x")
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    assert client._delete_each(keys) == []  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert _keys(client, prefix) == []


# -- what is stored --------------------------------------------------------------------


def test_tags_metadata_and_content_type_reach_every_object(
    azurite: Server, kind: str, prefix: str
) -> None:
    """Small puts and committed uploads carry the same."""
    options = azurite.storage_options(
        client=kind,
        tags={"team": "a b"},
        metadata={"owner": "me"},
        content_settings={"content_type": "x/y", "cache_control": "no-store"},
        standard_blob_tier="Cool",
    )
    with opened(azurite.uri(), options) as client:
        client.put(prefix + "small", b"x")
        _upload(client, prefix + "large", os.urandom(2 * PART_BYTES + 5))
    for name in ("small", "large"):
        blob = raw.azure(azurite).get_blob_client(prefix + name)
        found = blob.get_blob_properties()
        assert found.metadata == {"owner": "me"}
        assert found.content_settings.content_type == "x/y"
        assert found.content_settings.cache_control == "no-store"
        assert found.blob_tier == "Cool"
        assert blob.get_blob_tags() == {"team": "a b"}


# -- other processes -------------------------------------------------------------------


def _write(client: ObjectClient, key: str) -> Any:
    return client.put(key, key.encode(), IF_ABSENT)


def _write_there(client: ObjectClient, key: str, answers: Any) -> None:
    try:
        etag = _write(client, key)
    except UnsupportedError as error:
        answers.put(error)
        return
    answers.put(etag)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_another_process(client: ObjectClient, kind: str, prefix: str, method: str) -> None:
    """A client that was used here works in a forked and in a spawned process, and here after, over
    connections of its own.
    """
    _write(client, prefix + "before")
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    there = context.Process(target=_write_there, args=(client, prefix + "there", answers))
    there.start()
    there.join(60)
    assert there.exitcode == 0
    answer = answers.get()
    if (kind, method) == ("obstore", "fork"):
        # Its threads are the parent's: said at once, where it would hang.
        assert isinstance(answer, UnsupportedError)
        return
    assert client.head(prefix + "there").etag == answer
    _write(client, prefix + "after")
    assert len(_keys(client, prefix)) == 3
