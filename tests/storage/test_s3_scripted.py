"""Both S3 clients against a server that answers as the test says: errors, one try, every header."""

from __future__ import annotations

import base64
import errno
import hashlib
import multiprocessing
import os
import pickle
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
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
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import IF_ABSENT, IfMatch, ObjectClient
from ckptfs.storage.options import Times
from tests.lab.moto import make_certificates
from tests.storage.s3_scripted import (
    BUCKET,
    KEY,
    SECRET,
    TOKEN,
    Answer,
    Request,
    Scripted,
    deleted,
    error,
    open_s3,
    usual,
)

Call = Callable[[ObjectClient], object]

GET: Call = lambda client: client.get("run/k")  # noqa: E731
PUT: Call = lambda client: client.put("run/k", b"data")  # noqa: E731
CREATE: Call = lambda client: client.put("run/k", b"data", IF_ABSENT)  # noqa: E731
LIST: Call = lambda client: list(client.list_keys("run/", delimiter=True))  # noqa: E731
HEAD: Call = lambda client: client.head("run/k")  # noqa: E731


@pytest.fixture
def server() -> Iterator[Scripted]:
    """A server of this test's own."""
    with Scripted() as found:
        yield found


def always(answer: Answer) -> Callable[[Request], Answer]:
    """A server that answers so to everything."""
    return lambda _: answer


def failing(client: ObjectClient, call: Call) -> CkptfsError:
    """The error of a call, after a look that nothing secret hangs on it."""
    with pytest.raises(CkptfsError) as caught:
        call(client)
    told = "".join(traceback.format_exception(caught.value))
    link: BaseException | None = caught.value
    while link is not None:
        told += repr(link) + repr(link.__dict__)
        link = link.__cause__ or link.__context__
    for secret in (SECRET, TOKEN, KEY, "SECRETSIGNATURE"):
        assert secret not in told
    return caught.value


SIGNATURE = (
    f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>AWS4</StringToSign>"
    "<SignatureProvided>SECRETSIGNATURE</SignatureProvided>"
)
AT = " [uri s3://bucket/run/k] -- "
SENTENCES: list[tuple[str, Answer, Call, type[CkptfsError], str]] = [
    (
        "bucket",
        Answer(404, error("NoSuchBucket")),
        PUT,
        NotFoundError,
        "put failed: there is no bucket 'bucket' at {endpoint}" + AT + "check its name and the "
        "endpoint; ckptfs never creates one",
    ),
    (
        "key",
        Answer(403, error("InvalidAccessKeyId", "unknown", SIGNATURE)),
        PUT,
        CredentialsError,
        "put failed: {endpoint} does not accept these credentials (InvalidAccessKeyId)"
        + AT
        + "check key and secret (or the profile), and that they belong to this endpoint",
    ),
    (
        "secret",
        Answer(403, error("SignatureDoesNotMatch", "X-Amz-Signature=SECRETSIGNATURE", SIGNATURE)),
        GET,
        CredentialsError,
        "get failed: {endpoint} does not accept these credentials (SignatureDoesNotMatch)"
        + AT
        + "check key and secret (or the profile), and that they belong to this endpoint",
    ),
    (
        "region",
        Answer(400, error("AuthorizationHeaderMalformed", "x", "<Region>eu-west-1</Region>")),
        PUT,
        StorageError,
        "put failed: the bucket 'bucket' is not in this region: {endpoint} refers to region "
        "'eu-west-1'" + AT + "set client_kwargs={{'region_name': ...}} or AWS_DEFAULT_REGION, or "
        "the endpoint_url of that region",
    ),
    (
        "redirect",
        Answer(301, error("PermanentRedirect"), {"x-amz-bucket-region": "eu-west-1"}),
        GET,
        StorageError,
        "get failed: the bucket 'bucket' is not in this region: {endpoint} refers to {where}"
        + AT
        + "set client_kwargs={{'region_name': ...}} or AWS_DEFAULT_REGION, or the endpoint_url of "
        "that region",
    ),
    (
        "list",
        Answer(403, error("AccessDenied")),
        LIST,
        AccessError,
        "list failed: these credentials may not list here (AccessDenied)"
        + AT.replace("/run/k", "/run")
        + "allow s3:ListBucket for this prefix",
    ),
    (
        "put",
        Answer(403, error("AccessDenied")),
        PUT,
        AccessError,
        "put failed: these credentials may not write here (AccessDenied)"
        + AT
        + "allow s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey)",
    ),
    (
        "clock",
        Answer(403, error("RequestTimeTooSkewed")),
        PUT,
        CredentialsError,
        "put failed: this machine's clock and that of {endpoint} differ by too much"
        + AT
        + "set the clock (ntp, chrony): requests are signed with the time",
    ),
    (
        "expired",
        Answer(400, error("ExpiredToken", f"The provided token {TOKEN} has expired")),
        GET,
        CredentialsError,
        "get failed: the credentials have expired (ExpiredToken)"
        + AT
        + "renew them; a profile or a role is renewed automatically, a pasted token is not",
    ),
    (
        "lock",
        Answer(
            403, error("AccessDenied", "Access Denied because object protected by object lock.")
        ),
        lambda client: client.delete(["run/k"]),
        AccessError,
        "delete failed: the object is protected by a lock, a retention time or a legal hold"
        + AT
        + "delete it after the retention has ended",
    ),
]


def test_each_refusal_is_one_clear_sentence(server: Scripted) -> None:
    """What went wrong and what to do stand in one sentence, typed, asked for once, nothing secret."""
    client = open_s3(server)
    # The region of a redirection is in a header, which obstore does not show.
    where = "another one"
    for name, answer, call, kind, sentence in SENTENCES:
        server.requests.clear()
        server.answer = always(answer)
        found = failing(client, call)
        assert type(found) is kind, name
        assert str(found) == sentence.format(endpoint=server.endpoint, where=where)
        assert len(server.requests) == 1, name


def test_head_asks_for_the_words_that_its_answer_cannot_have(server: Scripted) -> None:
    """A refused HEAD has no body: one GET of a byte distinguishes an expired token from a missing right."""
    server.answer = lambda request: Answer(
        400, b"" if request.method == "HEAD" else error("ExpiredToken")
    )
    found = failing(open_s3(server), HEAD)
    assert type(found) is CredentialsError
    assert server.kinds == ["HEAD", "GET"]


def test_a_missing_object_costs_one_head(server: Scripted) -> None:
    """404 needs no words: NotFoundError after one request."""
    server.answer = lambda _: Answer(404)
    assert type(failing(open_s3(server), HEAD)) is NotFoundError
    assert server.kinds == ["HEAD"]


ONE_TRY: list[tuple[Answer, type[CkptfsError], type[CkptfsError]]] = [
    (Answer(503, error("SlowDown")), TransientError, TransientError),
    (Answer(429, error("TooManyRequests")), TransientError, TransientError),
    (Answer(500, error("InternalError")), TransientError, AnswerLostError),
    (Answer(502, b"<html>"), TransientError, AnswerLostError),
    (Answer(503, error("ServiceUnavailable")), TransientError, AnswerLostError),
    (Answer(200, b"", {}, "drop"), TransientError, AnswerLostError),
    (Answer(409, error("ConditionalRequestConflict")), TransientError, TransientError),
    (Answer(400, error("RequestTimeout")), TransientError, TransientError),
    (Answer(400, error("XAmzContentSHA256Mismatch")), TransientError, TransientError),
    (Answer(501, error("NotImplemented")), UnsupportedError, UnsupportedError),
]


def test_one_try_and_what_it_may_have_done(server: Scripted) -> None:
    """A read that fails did nothing; a change is in doubt unless the answer says it was not done.
    Only the caller tries again.
    """
    client = open_s3(server)
    for answer, reading, changing in ONE_TRY:
        server.answer = usual
        PUT(client)  # a connection to reuse, which some libraries would repeat a request on
        server.requests.clear()
        server.answer = always(answer)
        assert type(failing(client, GET)) is reading, answer
        # aiohttp itself sends a GET again when a kept connection closes under it.
        assert len(server.requests) <= (2 if answer.then == "drop" else 1), answer
        server.requests.clear()
        assert type(failing(client, CREATE)) is changing, answer
        assert len(server.requests) == 1, answer


def test_conditions_on_the_wire(server: Scripted) -> None:
    """If-None-Match: * and If-Match go as headers of the PUT; 412 is AlreadyExistsError, and on a
    read StaleError.
    """
    client = open_s3(server)
    client.put("run/k", b"1", IF_ABSENT)
    client.put("run/k", b"1", IfMatch('"abc"'))
    client.get_range("run/k", 2, memoryview(bytearray(3)), '"e1"')
    absent, match, reading = server.requests
    assert absent.headers["if-none-match"] == "*"
    assert match.headers["if-match"] == "abc"
    assert reading.headers["if-match"] == '"e1"'
    server.answer = lambda _: Answer(412, error("PreconditionFailed"))
    assert type(failing(client, lambda c: c.put("run/k", b"1", IF_ABSENT))) is AlreadyExistsError
    stale = failing(client, lambda c: c.get_range("run/k", 0, memoryview(bytearray(1)), '"e0"'))
    assert type(stale) is StaleError


def test_if_match_on_nothing_is_a_condition_that_does_not_hold(server: Scripted) -> None:
    """AWS answers 404 where radosgw answers 412: the caller sees AlreadyExistsError from both."""
    server.answer = lambda _: Answer(404, error("NoSuchKey"))
    found = failing(open_s3(server), lambda c: c.put("run/k", b"1", IfMatch('"abc"')))
    assert type(found) is AlreadyExistsError


def test_a_range_that_is_another_objects_or_is_cut_short(server: Scripted) -> None:
    """An etag that changed, a body that ends early, and an object that ends early are three errors."""
    client = open_s3(server)
    out = memoryview(bytearray(6))
    assert type(failing(client, lambda c: c.get_range("run/k", 2, out, '"e0"'))) is StaleError
    assert type(failing(client, lambda c: c.get_range("run/k", 8, out, None))) is IntegrityError
    server.answer = lambda request: Answer(
        usual(request).status, usual(request).body, usual(request).headers, "cut"
    )
    assert type(failing(client, lambda c: c.get_range("run/k", 2, out, None))) is TransientError
    server.answer = usual
    client.get_range("run/k", 2, out, '"e1"')
    assert bytes(out) == b"234567"


DATE = "Fri, 20 Nov 2026 10:00:00 GMT"
# What takes a second on an idle machine, and a minute or more where its time is not bounded.
SOON_S = 30.0


def test_silence_ends(server: Scripted) -> None:
    """A server that says nothing for request_s ends a read as TransientError, a change in doubt."""
    server.answer = lambda _: Answer(then="hold")
    client = open_s3(server, Times(30, 0.2))
    began = time.monotonic()
    assert type(failing(client, GET)) is TransientError
    assert type(failing(client, PUT)) is AnswerLostError
    assert time.monotonic() - began < SOON_S


def test_nobody_reads_the_body_of_a_put() -> None:
    """A server that accepts a connection and never reads ends a large PUT too."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with Scripted() as server:
            server.endpoint = endpoint
            client = open_s3(server, Times(30, 0.3))
            began = time.monotonic()
            found = failing(client, lambda c: c.put("run/k", bytes(16 << 20)))
    assert type(found) is AnswerLostError
    assert "was silent for too long" in str(found)
    assert time.monotonic() - began < SOON_S


def test_a_trickle_ends(server: Scripted) -> None:
    """A server that is never silent, and never done, is given up too."""
    client = open_s3(server, Times(1, 1))
    data = bytes(1 << 20)
    ranged = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}", "Last-Modified": DATE}
    server.answer = lambda _: Answer(206, data, {"ETag": '"e1"', **ranged}, "trickle")
    began = time.monotonic()
    out = memoryview(bytearray(len(data)))
    found = failing(client, lambda c: c.get_range("run/k", 0, out, None))
    assert type(found) is TransientError
    assert time.monotonic() - began < SOON_S


def test_nobody_is_there(server: Scripted) -> None:
    """A port where nothing listens, a host without an address and http behind https each have their
    sentence; nothing was sent, so a change is not in doubt.
    """
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    cases = {
        f"http://127.0.0.1:{port}": (TransientError, f"nothing listens at http://127.0.0.1:{port}"),
        "http://no.such.host.invalid": (
            TransientError,
            "the host of http://no.such.host.invalid has no address",
        ),
        server.endpoint.replace("http:", "https:"): (
            StorageError,
            f"no TLS connection to {server.endpoint.replace('http:', 'https:')}",
        ),
    }
    for endpoint, (kind, sentence) in cases.items():
        found = failing(open_s3(server, endpoint_url=endpoint), PUT)
        assert type(found) is kind
        assert f"put failed: {sentence}" in str(found)


def test_a_completion_that_fails_with_200(server: Scripted) -> None:
    """S3 may answer 200 to a completion, and tell in the body that it failed: then it is in doubt,
    and obstore asks again.
    """
    asked = 0

    def answer(request: Request) -> Answer:
        nonlocal asked
        if request.kind == "POST ?uploadId":
            asked += 1
            return Answer(200, error("InternalError")) if asked == 1 else usual(request)
        return usual(request)

    server.answer = answer
    upload = open_s3(server).begin_upload("run/k", part_bytes=5 << 20)
    upload.put_part(0, bytes(5 << 20))
    assert upload.complete() == '"e2"'
    assert asked == 2


def test_batch_deletes(server: Scripted) -> None:
    """One POST deletes many; keys that are refused are reported one by one, missing ones are success."""

    def answer(request: Request) -> Answer:
        if request.kind == "POST ?delete":
            refused = (
                "<Error><Key>run/b</Key><Code>AccessDenied</Code><Message>m</Message></Error>"
                "<Error><Key>run/c</Key><Code>NoSuchKey</Code><Message>m</Message></Error>"
            )
            return Answer(200, deleted(refused))
        if request.path.endswith("/run/b"):
            return Answer(403, error("AccessDenied"))
        return Answer(204)

    server.answer = answer
    refused = open_s3(server).delete(["run/a", "run/b", "run/c"])
    assert [(one.key, type(one.error)) for one in refused] == [("run/b", AccessError)]
    assert server.kinds[0] == "POST ?delete"


def test_a_store_that_lists_no_uploads(server: Scripted) -> None:
    """501 to the listing of uploads: the client says so, and the storage, which sweeps, lists none."""
    server.answer = lambda _: Answer(501, error("NotImplemented"))
    with pytest.raises(UnsupportedError, match="does not know this request"):
        list(open_s3(server).list_uploads("run/"))
    assert server.kinds == ["GET ?uploads"]


def test_a_store_that_says_no_such_upload_of_an_empty_list(server: Scripted) -> None:
    """rclone's answer while no upload is under way; that of a missing bucket is an error all the same."""
    server.answer = lambda _: Answer(404, error("NoSuchUpload"))
    assert list(open_s3(server).list_uploads("run/")) == []
    server.answer = lambda _: Answer(404, error("NoSuchBucket"))
    with pytest.raises(NotFoundError, match="no bucket"):
        list(open_s3(server).list_uploads("run/"))


def test_a_store_without_batch_deletes(server: Scripted) -> None:
    """501 to the batch: each key is deleted by itself."""
    server.answer = lambda request: (
        Answer(501, error("NotImplemented")) if request.kind == "POST ?delete" else usual(request)
    )
    assert open_s3(server).delete(["run/a", "run/b"]) == []
    assert server.kinds[0] == "POST ?delete"
    assert len(server.requests) > 1


@pytest.mark.parametrize(
    "refusal",
    [
        error("MissingContentMD5"),
        error("InvalidRequest", "Missing required header for this request: Content-MD5"),
    ],
    ids=["by code", "Swift's"],
)
def test_a_store_that_wants_an_md5_of_a_batch(
    server: Scripted, refusal: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenStack Swift takes no batch without Content-MD5: keys go one by one, and it is said once."""
    server.answer = lambda request: (
        Answer(400, refusal) if request.kind == "POST ?delete" else usual(request)
    )
    client = open_s3(server)
    assert client.delete(["run/a", "run/b"]) == []
    assert client.delete(["run/c", "run/d"]) == []
    gone = {request.path for request in server.requests if request.method == "DELETE"}
    assert gone == {f"/{BUCKET}/run/{name}" for name in "abcd"}
    assert server.kinds.count("POST ?delete") == 1
    [line] = [one for one in caplog.messages if "one by one" in one]
    assert server.endpoint in line


def test_another_400_to_a_batch_is_told(server: Scripted) -> None:
    """Only a missing MD5 means that the store has no batches."""
    server.answer = lambda _: Answer(400, error("InvalidRequest", "something else"))
    with pytest.raises(StorageError, match="something else"):
        open_s3(server).delete(["run/a", "run/b"])
    assert server.kinds == ["POST ?delete"]


@pytest.mark.parametrize("honoured", [False, True], ids=["ignored", "rclone's"])
def test_a_store_that_answers_ranges_with_200(
    server: Scripted, honoured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """obstore refuses such an answer. The object is read from its beginning instead, and said once."""

    def answer(request: Request) -> Answer:
        usually = usual(request)
        if request.method != "GET" or "range" not in request.headers:
            return usually
        if honoured:
            return Answer(200, usually.body, usually.headers)
        return Answer(200, b"0123456789", {"ETag": '"e1"', "Last-Modified": DATE})

    server.answer = answer
    client = open_s3(server)
    for offset, size in ((3, 4), (0, 10), (9, 1)):
        into = bytearray(size)
        client.get_range("run/k", offset, memoryview(into), None)
        assert into == b"0123456789"[offset : offset + size]
    assert len([one for one in caplog.messages if "200 instead of 206" in one]) == 1
    assert len([one for one in server.requests if "range" in one.headers]) == 1
    with pytest.raises(IntegrityError):
        client.get_range("run/k", 8, memoryview(bytearray(5)), None)


def test_a_store_that_answers_one_range_with_another(server: Scripted) -> None:
    """s3rver takes the range of the first byte for none: that object is read whole, other ranges as before."""

    def answer(request: Request) -> Answer:
        usually = usual(request)
        if request.headers.get("range") != "bytes=0-0":
            return usually
        headers = {"ETag": '"e1"', "Last-Modified": DATE, "Content-Range": "bytes 0-9/10"}
        return Answer(206, b"0123456789", headers)

    server.answer = answer
    client = open_s3(server)
    for offset, size in ((0, 1), (3, 4), (0, 1)):
        into = bytearray(size)
        client.get_range("run/k", offset, memoryview(into), None)
        assert into == b"0123456789"[offset : offset + size]
    asked = [request.headers.get("range") for request in server.requests]
    assert asked == ["bytes=0-0", None, "bytes=3-6", "bytes=0-0", None]


def everything(client: ObjectClient) -> None:
    """Every kind of request that changes or reads an object."""
    client.put("run/k", b"data", IF_ABSENT)
    client.get("run/k")
    client.get_range("run/k", 2, memoryview(bytearray(3)), None)
    client.head("run/k")
    list(client.list_keys("run/", delimiter=False))
    upload = client.begin_upload("run/u", part_bytes=5 << 20)
    upload.put_part(0, bytes(5 << 20))
    upload.complete()
    client.delete(["run/a", "run/b"])


def seen(server: Scripted, header: str) -> set[str]:
    """The kinds of requests that carried a header."""
    return {request.kind for request in server.requests if header in request.headers}


def test_nothing_but_what_is_needed_is_asked(server: Scripted) -> None:
    """No HeadBucket, no GetBucketLocation, no copy, no bucket creation, no Expect; keys below run/."""
    everything(open_s3(server))
    assert set(server.kinds) == {
        "PUT", "GET", "HEAD", "GET ?list", "POST ?uploads", "PUT ?partNumber", "POST ?uploadId",
        "POST ?delete",
    }  # fmt: skip
    for request in server.requests:
        assert "expect" not in request.headers
        assert "x-amz-copy-source" not in request.headers
        aimed = request.path.removeprefix(f"/{BUCKET}").strip("/")
        assert aimed.startswith("run/") or request.kind in ("GET ?list", "POST ?delete")
        assert request.query.get("prefix", "run/").startswith("run/")


def test_encryption_class_and_tags_reach_every_object(server: Scripted) -> None:
    """SSE-KMS, storage class, tags, metadata and requester pays are on PUT and on multipart create."""
    more = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "arn:aws:kms:k",
        "StorageClass": "STANDARD_IA",
        "Tagging": "team=a",
        "Metadata": {"owner": "me"},
        "ContentType": "application/x-ckpt",
    }
    everything(open_s3(server, s3_additional_kwargs=more, requester_pays=True))
    for header, value in {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:k",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-tagging": "team=a",
        "x-amz-meta-owner": "me",
        "content-type": "application/x-ckpt",
    }.items():
        born = [one for one in server.requests if one.kind in ("PUT", "POST ?uploads")]
        assert [one.headers.get(header) for one in born] == [value, value]
    assert seen(server, "x-amz-request-payer") >= {
        "PUT", "GET", "HEAD", "GET ?list", "POST ?uploads", "PUT ?partNumber",
    }  # fmt: skip


def test_customer_keys_go_with_parts_and_reads(server: Scripted) -> None:
    """SSE-C: the key goes with every PUT, part, GET and HEAD, as base64, and in no error."""
    secret = b"k" * 32
    more = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": secret}
    everything(open_s3(server, s3_additional_kwargs=more))
    sent = base64.b64encode(secret).decode()
    header = "x-amz-server-side-encryption-customer-key"
    assert seen(server, header) >= {"PUT", "GET", "HEAD", "POST ?uploads", "PUT ?partNumber"}
    assert {one.headers[header] for one in server.requests if header in one.headers} == {sent}


def test_bodies_are_signed_over_http(server: Scripted) -> None:
    """Over http the SHA-256 of each body is signed, so that a store refuses what was damaged."""
    client = open_s3(server)
    part = os.urandom(5 << 20)
    client.put("run/k", memoryview(bytearray(b"data")))
    upload = client.begin_upload("run/u", part_bytes=len(part))
    upload.put_part(0, memoryview(part))
    upload.complete()
    bodies = [one for one in server.requests if one.kind in ("PUT", "PUT ?partNumber")]
    assert [one.body for one in bodies] == [b"data", part]
    for one in bodies:
        assert one.headers["x-amz-content-sha256"] == hashlib.sha256(one.body).hexdigest()


def test_a_user_may_leave_bodies_unsigned(server: Scripted) -> None:
    """payload_signing_enabled=False of config_kwargs is honoured."""
    config = {"s3": {"addressing_style": "path", "payload_signing_enabled": False}}
    PUT(open_s3(server, config_kwargs=config))
    assert server.requests[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_bodies_over_tls(tmp_path: Path) -> None:
    """Over https to another than AWS TLS alone protects a body; the SHA-256 is signed where the user says
    that no more is required.
    """
    pytest.importorskip("cryptography")
    ca_file, certificate, key = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    trusting = {"region_name": "us-east-1", "verify": ca_file}
    part = os.urandom(5 << 20)
    with Scripted(tls) as server:
        client = open_s3(server, client_kwargs=trusting)
        client.put("run/k", b"data", IF_ABSENT)
        upload = client.begin_upload("run/u", part_bytes=len(part))
        upload.put_part(0, part)
        upload.complete()
        required: dict[str, Any] = {"s3": {"addressing_style": "path"}}
        required |= {"request_checksum_calculation": "when_required"}
        PUT(open_s3(server, client_kwargs=trusting, config_kwargs=required))
    small, _, large, _, plain = server.requests
    for one in (small, large, plain):
        wanted = hashlib.sha256(one.body).hexdigest() if one is plain else "UNSIGNED-PAYLOAD"
        assert one.headers["x-amz-content-sha256"] == wanted
        assert "x-amz-checksum-crc32" not in one.headers


def test_anonymous(server: Scripted) -> None:
    """anon=True signs nothing and looks for no credentials."""
    PUT(open_s3(server, anon=True, key=None, secret=None, token=None))
    assert "authorization" not in server.requests[0].headers


def test_the_environment_is_enough(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_ENDPOINT_URL_S3."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    PUT(open_s3(server, key=None, secret=None, token=None, endpoint_url=None))
    assert KEY in server.requests[0].headers["authorization"]
    assert server.requests[0].headers["x-amz-security-token"] == TOKEN


def test_fsspecs_own_variables(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What FSSPEC_S3_* set in fsspec's configuration ranks below the options."""
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": KEY, "secret": SECRET, "token": "no"})
    PUT(open_s3(server, key=None, secret=None))
    assert KEY in server.requests[0].headers["authorization"]
    assert server.requests[0].headers["x-amz-security-token"] == TOKEN


def test_obstore_alone(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without s3fs and botocore obstore reads the options and the variables itself; uncompleted
    uploads are then not listed.
    """
    for name in ("s3_options", "s3"):
        monkeypatch.setattr(f"ckptfs.storage.clients.{name}.find_spec", lambda _: None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    nothing: dict[str, Any] = dict.fromkeys(
        ("key", "secret", "token", "endpoint_url", "client_kwargs")
    )
    more = {"StorageClass": "STANDARD_IA"}
    client = open_s3(server, s3_additional_kwargs=more, **nothing)
    PUT(client)
    assert f"{KEY}/" in server.requests[0].headers["authorization"]
    assert "/eu-west-3/s3/" in server.requests[0].headers["authorization"]
    assert server.requests[0].headers["x-amz-storage-class"] == "STANDARD_IA"
    with pytest.raises(UnsupportedError, match="s3fs is missing"):
        list(client.list_uploads("run/"))
    assert len(server.requests) == 1


def profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, name: str = "checkpoints"
) -> None:
    """An AWS configuration of this test's own."""
    path = folder / "config"
    path.write_text(f"[profile {name}]\n{lines}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))


def test_a_profile(server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """profile= takes key, secret, region and endpoint from the user's AWS configuration."""
    keys = f"aws_access_key_id={KEY}\naws_secret_access_key={SECRET}\nregion=eu-west-3\n"
    profile(tmp_path, monkeypatch, f"{keys}endpoint_url={server.endpoint}")
    nothing: dict[str, Any] = dict.fromkeys(
        ("key", "secret", "token", "endpoint_url", "client_kwargs")
    )
    PUT(open_s3(server, profile="checkpoints", **nothing))
    assert f"{KEY}/" in server.requests[0].headers["authorization"]
    assert "/eu-west-3/s3/" in server.requests[0].headers["authorization"]


def test_a_profile_that_is_not_there(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong profile is a CredentialsError that names it."""
    profile(tmp_path, monkeypatch, "region=eu-west-3")
    nothing: dict[str, Any] = dict.fromkeys(("key", "secret", "token"))
    found = failing(open_s3(server, profile="elsewhere", **nothing), PUT)
    assert type(found) is CredentialsError
    assert "elsewhere" in str(found)


def credential_process(tmp_path: Path, *, ends_in_s: int | None = None) -> str:
    """A command that counts in a file how often it was asked, and gives other keys each time."""
    script = tmp_path / "keys.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "n = len(count.read_text()) if count.exists() else 0\n"
        "count.write_text('x' * (n + 1))\n"
        f"keys = dict(Version=1, AccessKeyId=f'AKIA{{n}}', SecretAccessKey={SECRET!r},\n"
        "    SessionToken=f'token-{n}')\n"
        f"if (ends := {ends_in_s}) is not None:\n"
        "    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ends)\n"
        "    keys['Expiration'] = end.isoformat()\n"
        "print(json.dumps(keys))\n"
    )
    return f"{sys.executable} {script}"


def test_credentials_are_renewed_in_the_middle_of_an_upload(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credential process with keys that end soon is asked again while parts go out."""
    process = credential_process(tmp_path, ends_in_s=30)
    profile(tmp_path, monkeypatch, f"credential_process={process}")
    nothing: dict[str, Any] = dict.fromkeys(("key", "secret", "token"))
    client = open_s3(server, profile="checkpoints", **nothing)
    upload = client.begin_upload("run/u", part_bytes=5 << 20)
    upload.put_part(0, bytes(5 << 20))
    tokens: set[str] = set()
    end = time.monotonic() + 60
    while len(tokens) < 2 and time.monotonic() < end:  # 30 s are less than botocore's margin
        client.put("run/k", b"x")
        tokens.add(server.requests[-1].headers["x-amz-security-token"])
    upload.put_part(1, bytes(5 << 20))
    upload.complete()
    assert len(tokens) == 2
    assert all(token.startswith("token-") for token in tokens)


def test_after_a_refusal_credentials_are_looked_up_again(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pasted token is renewed in the AWS files, the storage that is open continues to work."""
    lines = "aws_access_key_id={0}\naws_secret_access_key={0}\naws_session_token={0}"
    profile(tmp_path, monkeypatch, lines.format("old"))
    nothing: dict[str, Any] = dict.fromkeys(("key", "secret", "token"))
    client = open_s3(server, profile="checkpoints", **nothing)
    server.answer = lambda request: (
        Answer(400, error("ExpiredToken"))
        if request.headers["x-amz-security-token"] == "old"
        else usual(request)
    )
    assert type(failing(client, PUT)) is CredentialsError
    profile(tmp_path, monkeypatch, lines.format("new"))
    PUT(client)


def test_after_a_refusal_a_credential_process_is_asked_again(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys without an end are kept for as long as they are taken, whatever files say."""
    process = credential_process(tmp_path)
    profile(tmp_path, monkeypatch, f"credential_process={process}")
    nothing: dict[str, Any] = dict.fromkeys(("key", "secret", "token"))
    client = open_s3(server, profile="checkpoints", **nothing)
    PUT(client)
    refused = server.requests[-1].headers["x-amz-security-token"]
    server.answer = lambda request: (
        Answer(400, error("ExpiredToken"))
        if request.headers["x-amz-security-token"] == refused
        else usual(request)
    )
    assert type(failing(client, PUT)) is CredentialsError
    PUT(client)
    assert server.requests[-1].headers["x-amz-security-token"] != refused


def test_a_host_without_instance_metadata(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No credentials and a metadata address that swallows everything: a typed error, in seconds."""
    profile(tmp_path, monkeypatch, "region=us-east-1", "default")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        nothing: dict[str, Any] = dict.fromkeys(("key", "secret", "token"))
        client = open_s3(server, **nothing)
        began = time.monotonic()
        found = failing(client, PUT)
    assert type(found) is CredentialsError
    assert "no credentials were found" in str(found)
    assert "AWS_ACCESS_KEY_ID" in str(found)
    assert time.monotonic() - began < SOON_S
    assert server.requests == []


def test_a_proxy_of_the_environment(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP_PROXY is used: the request arrives there with the whole address in its first line."""
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, server.endpoint)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    PUT(open_s3(server, endpoint_url="http://store.invalid:8000"))
    assert server.requests[0].headers["host"] == "store.invalid:8000"


def put_in_child(pickled: bytes, key: str) -> None:
    """What a spawned process does with a client that it was sent."""
    client: ObjectClient = pickle.loads(pickled)
    client.put(key, b"from a child")


def test_options_survive_pickling_and_a_spawned_process(server: Scripted) -> None:
    """A client that was pickled, also into another process, asks with the same options."""
    more = {"StorageClass": "STANDARD_IA"}
    client = open_s3(server, s3_additional_kwargs=more)
    PUT(client)
    pickled = pickle.dumps(client)
    put_in_child(pickled, "run/pickled")
    child = multiprocessing.get_context("spawn").Process(
        target=put_in_child, args=(pickled, "run/spawned")
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [one.path for one in server.requests] == [
        f"/{BUCKET}/run/k",
        f"/{BUCKET}/run/pickled",
        f"/{BUCKET}/run/spawned",
    ]
    assert {one.headers["x-amz-storage-class"] for one in server.requests} == {"STANDARD_IA"}


def test_after_a_fork(server: Scripted) -> None:
    """obstore says that it cannot continue in a forked child, instead of a hang."""
    client = open_s3(server)
    PUT(client)
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            client.put("run/child", b"x")
            code = 0
        except UnsupportedError:
            code = 1
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    PUT(client)
    assert not [one for one in server.requests if one.path.endswith("/child")]


def test_a_buffer_is_the_callers_again(server: Scripted) -> None:
    """A part that is reused at once for the next does not change what went out."""
    upload = open_s3(server).begin_upload("run/u", part_bytes=5 << 20)
    buffer = bytearray(5 << 20)
    for number in range(4):
        buffer[:] = bytes([65 + number]) * len(buffer)
        upload.put_part(number, memoryview(buffer))
    upload.complete()
    parts = {one.query["partNumber"]: one.body for one in server.requests if "?part" in one.kind}
    assert {number: set(body) for number, body in parts.items()} == {
        str(n + 1): {65 + n} for n in range(4)
    }


def test_parts_in_any_order(server: Scripted) -> None:
    """One thread or many, in any order: the completion lists all parts, in theirs."""
    for threads in (False, True):
        server.requests.clear()
        upload = open_s3(server).begin_upload("run/u", part_bytes=5 << 20)
        order = [3, 1, 0, 2]
        work = [
            threading.Thread(target=upload.put_part, args=(n, bytes([n]) * (5 << 20)))
            for n in order
        ]
        for one in work:
            one.start() if threads else one.run()
        if threads:
            for one in work:
                one.join()
        upload.complete()
        parts = {
            one.query["partNumber"]: one.body[0] for one in server.requests if "?part" in one.kind
        }
        assert parts == {"1": 0, "2": 1, "3": 2, "4": 3}
        text = server.requests[-1].body.decode()
        places = [text.index(f"<PartNumber>{n}</PartNumber>") for n in (1, 2, 3, 4)]
        assert places == sorted(places)


def test_a_part_that_fails_is_told(server: Scripted) -> None:
    """A refused part is an error of put_part or of complete; the upload can be aborted after it."""
    server.answer = lambda request: (
        Answer(403, error("AccessDenied")) if "?part" in request.kind else usual(request)
    )
    upload = open_s3(server).begin_upload("run/u", part_bytes=5 << 20)

    def whole() -> None:
        upload.put_part(0, bytes(5 << 20))
        upload.complete()

    with pytest.raises(AccessError):
        whole()
    upload.abort()
    assert server.kinds[-1] == "DELETE ?uploadId"
    assert "POST ?uploadId" not in server.kinds


def test_an_answer_to_the_completion_that_is_lost(server: Scripted) -> None:
    """Done on the server and not acknowledged: in doubt first, then "no such upload", so that the caller
    looks at the key; never a refusal at once, also where the library itself asked again.
    """
    asked = 0

    def answer(request: Request) -> Answer:
        nonlocal asked
        if request.kind == "POST ?uploadId":
            asked += 1
            return Answer(then="drop") if asked == 1 else Answer(404, error("NoSuchUpload"))
        return usual(request)

    server.answer = answer
    upload = open_s3(server).begin_upload("run/u", part_bytes=5 << 20)
    upload.put_part(0, bytes(5 << 20))
    with pytest.raises(AnswerLostError):
        upload.complete()
    with pytest.raises(NotFoundError):
        upload.complete()


def test_clients_of_one_place_share_a_store_of_obstore(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made, and is connected, is used by who comes next with the same options, variables and
    certificates; by no one after a refusal.
    """
    from obstore import store

    made: list[object] = []

    def make(*args: Any, **options: Any) -> object:
        made.append(kept(*args, **options))
        return made[-1]

    kept = store.S3Store
    monkeypatch.setattr(store, "S3Store", make)

    def stores(**options: Any) -> int:
        client = open_s3(server, **options)
        PUT(client)
        client.close()
        return len(made)

    assert stores() == 1
    assert stores() == 1
    assert stores(secret="another") == 2  # noqa: S106
    monkeypatch.setenv("NO_PROXY", "elsewhere.example.com,127.0.0.1")
    assert stores() == 3
    trusted = Path(make_certificates(tmp_path)[0])
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    assert stores() == 4
    assert stores() == 4
    trusted.write_bytes(trusted.read_bytes() + b"\n")
    assert stores() == 5
    server.answer = lambda _: Answer(400, error("ExpiredToken"))
    with pytest.raises(CredentialsError):
        stores()
    server.answer = usual
    assert stores() == 6


def test_an_object_that_is_too_large_is_refused_by_its_headers(server: Scripted) -> None:
    """Before its bytes come, which may be as many as the store takes; one of just the limit is read."""
    client = open_s3(server)
    assert client.get("run/k", 10)[0] == b"0123456789"
    modified = {"Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT", "ETag": '"e1"'}
    # It would take a minute to come.
    server.answer = lambda _: Answer(200, b"x" * 3000, modified, then="trickle")
    with pytest.raises(StorageError, match="a file of this kind has at most 99") as caught:
        client.get("run/k", 99)
    assert caught.value.errno == errno.EFBIG
    assert not isinstance(caught.value, TransientError)


def test_a_server_without_if_match_on_reads(server: Scripted) -> None:
    """local_expiry_check keeps the header off, for servers that do not know it; the etag is compared here."""
    client = open_s3(server, local_expiry_check=True)
    out = memoryview(bytearray(3))
    client.get_range("run/k", 2, out, '"e1"')
    assert bytes(out) == b"234"
    assert type(failing(client, lambda c: c.get_range("run/k", 2, out, '"e0"'))) is StaleError
    assert [one for one in server.requests if "if-match" in one.headers] == []
