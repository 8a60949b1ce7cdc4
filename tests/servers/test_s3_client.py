"""Every method of the S3 client, against radosgw and moto."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest

from ckptfs.errors import (
    AlreadyExistsError,
    CredentialsError,
    IntegrityError,
    NotFoundError,
    StaleError,
    StorageError,
)
from ckptfs.storage.clients.base import (
    ALWAYS,
    IF_ABSENT,
    IfMatch,
    ListedKey,
    ObjectClient,
    PendingUpload,
)
from ckptfs.storage.clients.s3 import open_client
from ckptfs.storage.options import Times
from ckptfs.uri import Uri
from tests.lab import raw
from tests.lab.server import Server

PART_BYTES = 5 << 20
TIMES = Times(60, 120)


def open_s3(server: Server, **more: Any) -> ObjectClient:
    """The client of a server's bucket; None leaves an option out."""
    options = {k: v for k, v in server.storage_options(**more).items() if v is not None}
    return open_client(Uri.parse(server.uri("run")), options, TIMES)


@pytest.fixture(scope="module", params=["radosgw", "moto"])
def server(request: pytest.FixtureRequest) -> Server:
    """Both servers in turn."""
    return cast("Server", request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ObjectClient]:
    """The client, kept for the module."""
    with closing(open_s3(server)) as found:
        yield found


@pytest.fixture
def prefix(client: ObjectClient) -> Iterator[str]:
    """A prefix of this test's own, emptied after it."""
    found = f"t-{uuid.uuid4().hex[:12]}/"
    yield found
    if keys := [line.key for line in client.list_keys(found, delimiter=False)]:
        client.delete(keys)


@pytest.mark.parametrize("name", ["plain", "a b+c=d&e#f", "ü%20'\"(x)", ".hidden/x"])
def test_small_objects(client: ObjectClient, prefix: str, name: str) -> None:
    """What was put is got, under any key, from any kind of buffer, with one etag everywhere."""
    key = prefix + name
    for data in (b"", b"first", bytearray(b"second"), memoryview(bytearray(b"third"))):
        etag = client.put(key, data)
        assert client.get(key) == (bytes(data), etag)
        head = client.head(key)
        assert (head.size_bytes, head.etag) == (len(data), etag)
    assert list(client.list_keys(prefix, delimiter=False)) == [ListedKey(key, 5)]
    assert client.delete([key]) == []
    assert client.delete([key]) == []
    for missing in (client.get, client.head):
        with pytest.raises(NotFoundError) as caught:
            missing(key)
        assert caught.value.uri is not None
        assert caught.value.uri.endswith(name)


def test_conditions(client: ObjectClient, prefix: str) -> None:
    """Only if absent, only if it is still this one; else AlreadyExistsError, and nothing changed."""
    key = prefix + "k"
    first = client.put(key, b"1", IF_ABSENT)
    assert first is not None
    for condition in (IF_ABSENT, IfMatch('"00000000000000000000000000000000"')):
        with pytest.raises(AlreadyExistsError):
            client.put(key, b"wrong", condition)
    with pytest.raises(AlreadyExistsError):
        client.put(prefix + "none", b"wrong", IfMatch(first))
    assert client.get(key) == (b"1", first)
    second = client.put(key, b"2", IfMatch(first))
    assert client.get(key) == (b"2", second)
    with pytest.raises(AlreadyExistsError):
        client.put(key, b"wrong", IfMatch(first))
    client.put(key, b"3", ALWAYS)
    assert client.get(key)[0] == b"3"


def test_sixteen_writers_one_winner(client: ObjectClient, prefix: str) -> None:
    """Of 16 creates at once exactly one succeeds, and its bytes stand there."""
    for race in range(5):
        key, start = f"{prefix}race-{race}", threading.Barrier(16)
        won: list[bytes] = []
        threads = [
            threading.Thread(target=create, args=(client, key, b"%d" % n, start, won))
            for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert client.get(key)[0] == won[0]


def create(
    client: ObjectClient, key: str, mine: bytes, start: threading.Barrier, won: list[bytes]
) -> None:
    """One of the writers: says when it won."""
    start.wait()
    try:
        client.put(key, mine, IF_ABSENT)
    except AlreadyExistsError:
        return
    won.append(mine)


def test_ranges(client: ObjectClient, prefix: str) -> None:
    """A range fills the buffer from its offset, only of that object, and only if it is long enough."""
    key, data = prefix + "k", os.urandom(3 << 20)
    etag = client.put(key, data)
    out = bytearray(1 << 20)
    client.get_range(key, 1 << 20, memoryview(out), etag)
    assert out == data[1 << 20 : 2 << 20]
    client.get_range(key, len(data) - 1, memoryview(out)[:1], None)
    assert out[:1] == data[-1:]
    client.get_range(key, 0, memoryview(b"")[:0], etag)
    for offset in (len(data) - 1, len(data), len(data) + 10):
        with pytest.raises(IntegrityError):
            client.get_range(key, offset, memoryview(out)[:2], etag)
    client.put(key, data[::-1])
    with pytest.raises(StaleError):
        client.get_range(key, 0, memoryview(out), etag)
    with pytest.raises(NotFoundError):
        client.get_range(prefix + "none", 0, memoryview(out), None)


def test_listing(client: ObjectClient, prefix: str) -> None:
    """Keys in order, and with a delimiter names and prefixes of one level; nothing of neighbours."""
    names = ["a", "b/1", "b/2", "b/c/3", "d"]
    for name in names:
        client.put(prefix + name, b"x")
    client.put(prefix.rstrip("/") + "-neighbour", b"x")
    assert [line.key for line in client.list_keys(prefix, delimiter=False)] == [
        prefix + name for name in names
    ]
    assert list(client.list_keys(prefix, delimiter=True)) == [
        ListedKey(prefix + "a", 1),
        ListedKey(prefix + "b/", is_prefix=True),
        ListedKey(prefix + "d", 1),
    ]
    assert list(client.list_keys(prefix + "none/", delimiter=True)) == []
    assert client.delete([prefix + name for name in names]) == []
    assert list(client.list_keys(prefix, delimiter=False)) == []
    client.delete([prefix.rstrip("/") + "-neighbour"])


def test_listing_over_pages(server: Server) -> None:
    """More keys than one page holds are all listed, in order."""
    keys = [f"pages/{number:04d}" for number in range(1005)]
    with closing(open_s3(server)) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: client.put(key, b""), keys))
    with closing(open_s3(server)) as client:
        assert [line.key for line in client.list_keys("pages/", delimiter=False)] == keys
        assert [line.key for line in client.list_keys("pages/", delimiter=True)] == keys
        assert client.delete(keys[:1000]) == []
        assert client.delete(keys[1000:]) == []


def test_parts_in_any_order(client: ObjectClient, prefix: str) -> None:
    """Parts from many threads in any order, one of them twice, make the object, bit by bit."""
    key = prefix + "big"
    parts = [os.urandom(PART_BYTES) for _ in range(3)] + [b"tail"]
    upload = client.begin_upload(key, part_bytes=PART_BYTES)
    threads = [
        threading.Thread(target=upload.put_part, args=(number, memoryview(parts[number])))
        for number in (2, 0, 3, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    upload.put_part(1, parts[1])
    with pytest.raises(NotFoundError):
        client.head(key)
    upload.complete()
    upload.abort()
    assert client.get(key)[0] == b"".join(parts)
    assert pending(client, prefix) == []


def pending(client: ObjectClient, prefix: str) -> list[str]:
    """Keys of the uncompleted uploads."""
    return [upload.key for upload in client.list_uploads(prefix)]


def test_abort_leaves_nothing(client: ObjectClient, prefix: str) -> None:
    """After an abort, before any part or between them, neither object nor upload is left."""
    client.begin_upload(prefix + "none", part_bytes=PART_BYTES).abort()
    upload = client.begin_upload(prefix + "some", part_bytes=PART_BYTES)
    for number in range(3):
        upload.put_part(number, bytes(PART_BYTES))
    upload.abort()
    upload.abort()
    assert pending(client, prefix) == []
    assert list(client.list_keys(prefix, delimiter=False)) == []
    with pytest.raises(StorageError):
        upload.put_part(3, b"x")


def test_uploads_that_nobody_completed(server: Server) -> None:
    """They are listed with their age by the server's clock, and aborted one by one."""
    with closing(open_s3(server)) as client, closing(raw.s3(server)) as behind:
        behind.create_multipart_upload(Bucket=server.bucket, Key="orphans/x")
        found = list(client.list_uploads("orphans/"))
        assert [one.key for one in found] == ["orphans/x"]
        # moto says that every upload began in 2010.
        assert found[0].age_s >= 0 if server.name == "moto" else found[0].age_s < 60
        client.abort_pending(found[0])
        client.abort_pending(found[0])
        assert pending(client, "orphans/") == []
        client.abort_pending(PendingUpload("orphans/x", "no-such-upload", 0.0))


def test_options_arrive_with_small_and_large_objects(moto: Server) -> None:
    """Encryption, storage class, tags and metadata stand on objects of one request and of many."""
    more = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "arn:aws:kms:us-east-1:1:key/k",
        "StorageClass": "STANDARD_IA",
        "Tagging": "team=a%20b&run=1",
        "Metadata": {"owner": "me"},
    }
    with closing(open_s3(moto, s3_additional_kwargs=more)) as client:
        client.put("born/small", b"x", IF_ABSENT)
        upload = client.begin_upload("born/large", part_bytes=PART_BYTES)
        upload.put_part(0, bytes(PART_BYTES))
        upload.put_part(1, b"tail")
        upload.complete()
    with closing(raw.s3(moto)) as behind:
        for name in ("small", "large"):
            where = {"Bucket": moto.bucket, "Key": f"born/{name}"}
            head = behind.head_object(**where)
            assert head["ServerSideEncryption"] == "aws:kms"
            assert head["SSEKMSKeyId"] == "arn:aws:kms:us-east-1:1:key/k"
            assert head["StorageClass"] == "STANDARD_IA"
            assert head["Metadata"] == {"owner": "me"}
            tags = behind.get_object_tagging(**where)["TagSet"]
            assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "a b", "run": "1"}
            behind.delete_object(**where)


def test_wrong_credentials(radosgw: Server) -> None:
    """A wrong key and a wrong secret are CredentialsError on a server that looks at them."""
    for wrong in ({"key": "AKNOBODY"}, {"secret": "not-this-one"}):
        with closing(open_s3(radosgw, **wrong)) as client:
            for call in (client.get, client.head, lambda key, c=client: c.put(key, b"x")):
                with pytest.raises(CredentialsError) as caught:
                    call("some/key")
                assert "not-this-one" not in str(caught.value)


def test_tls_with_a_bundle_of_the_environment(
    moto_tls: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS_CA_BUNDLE is believed; without it the sentence says what to set; bodies carry checksums."""
    bare: dict[str, Any] = {"client_kwargs": {"verify": None}}
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with (
        closing(open_s3(moto_tls, **bare)) as client,
        pytest.raises(StorageError) as caught,
    ):
        client.put("tls/k", b"x")
    assert type(caught.value) is StorageError
    assert f"the TLS certificate of {moto_tls.endpoint} is not trusted" in str(caught.value)
    assert "AWS_CA_BUNDLE" in str(caught.value)
    monkeypatch.setenv("AWS_CA_BUNDLE", moto_tls.ca_file or "")
    with closing(open_s3(moto_tls, **bare)) as client:
        client.put("tls/k", b"data", IF_ABSENT)
        assert client.get("tls/k")[0] == b"data"
        upload = client.begin_upload("tls/u", part_bytes=PART_BYTES)
        upload.put_part(1, b"tail")
        upload.put_part(0, bytes(PART_BYTES))
        upload.complete()
        assert client.get("tls/u")[0] == bytes(PART_BYTES) + b"tail"
        assert client.delete(["tls/k", "tls/u"]) == []
