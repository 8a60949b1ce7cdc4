"""S3 through s3fs, for what obstore cannot say: what is asked of the server, and what its answers become."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptfs.storage.conditional_writes import EtagSpelling, HonouredConditions
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.registry import open_storage
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
    open_s3fs,
    options_for,
    usual,
)

pytest.importorskip("s3fs")

BLOCK_BYTES = 16 << 20  # a part of FsspecStorage's streams


@pytest.fixture
def server() -> Any:
    """A server of this test's own."""
    with Scripted() as found:
        yield found


def large(storage: FsspecStorage, key: str = "large") -> None:
    """An object of two parts."""
    with storage.open_write(key) as writer:
        writer.write(bytes(BLOCK_BYTES))
        writer.write(b"tail")


def everything(storage: FsspecStorage) -> None:
    """Every kind of request that changes or reads an object."""
    storage.replace("k", b"data")
    with storage.open_write("small") as writer:
        writer.write(b"data")
    large(storage)
    storage.read("k")
    storage.stat("k")
    with storage.open_read("k") as reader:
        reader.read_into(2, memoryview(bytearray(3)))
    storage.list("")
    storage.remove("k")
    storage.remove_many(["a", "b"])
    assert storage.unfinished_uploads() == ()


def of_kind(server: Scripted, *kinds: str) -> list[Request]:
    """The requests of some kinds."""
    return [request for request in server.requests if request.kind in kinds]


def carrying(server: Scripted, header: str) -> set[str]:
    """The kinds of requests that carried a header."""
    return {request.kind for request in server.requests if header in request.headers}


def failing(call: Callable[[], object]) -> CkptfsError:
    """The error of a call, which holds nothing secret."""
    with pytest.raises(CkptfsError) as caught:
        call()
    for secret in (KEY, SECRET, TOKEN):
        assert secret not in f"{caught.value} {caught.value.hint}"
    return caught.value


def test_acl_and_owner_are_the_reason_and_reach_every_object(server: Scripted) -> None:
    """obstore has no word for them: "auto" takes s3fs and says so. The ACL goes with each new object, the
    expected owner with each request.
    """
    more = {"ACL": "bucket-owner-full-control", "ExpectedBucketOwner": "123456789012"}
    options = options_for(server, s3_additional_kwargs=more)
    storage = open_storage(f"s3://{BUCKET}/run", options)
    assert isinstance(storage, FsspecStorage)
    assert storage.data_path == "s3fs, because obstore cannot be used: s3_additional_kwargs ACL"
    everything(storage)
    assert carrying(server, "x-amz-acl") == {"PUT", "POST ?uploads"}
    assert carrying(server, "x-amz-expected-bucket-owner") == set(server.kinds)
    assert server.kinds.count("PUT") == 2


def test_nothing_but_what_is_needed_is_asked(server: Scripted) -> None:
    """No HeadBucket, no copy, no list above the run; a small file is one PUT, a large one a part for each
    16 MiB.
    """
    storage = open_s3fs(server)
    everything(storage)
    assert server.kinds == [
        "PUT", "PUT", "POST ?uploads", "PUT ?partNumber", "PUT ?partNumber", "POST ?uploadId",
        "GET", "HEAD", "HEAD", "GET", "GET ?list", "DELETE", "POST ?delete", "GET ?uploads",
    ]  # fmt: skip
    assert {one.query["prefix"] for one in server.requests if "prefix" in one.query} == {"run/"}


def test_customer_keys_go_with_parts_and_reads(server: Scripted) -> None:
    """SSE-C: the key goes with every PUT, part, GET and HEAD, as base64."""
    secret = b"k" * 32
    more = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": secret}
    everything(open_s3fs(server, s3_additional_kwargs=more))
    header = "x-amz-server-side-encryption-customer-key"
    assert carrying(server, header) >= {"PUT", "GET", "HEAD", "POST ?uploads", "PUT ?partNumber"}
    sent = {one.headers[header] for one in server.requests if header in one.headers}
    assert sent == {base64.b64encode(secret).decode()}


def test_bodies_are_signed(tmp_path: Path) -> None:
    """The SHA-256 of each body is signed, over https too, so that a store refuses what was damaged. Nothing
    is framed in chunks, which not every server knows.
    """
    pytest.importorskip("cryptography")
    ca_file, certificate, key = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    for context in (None, tls):
        with Scripted(context) as server:
            trusting = {"region_name": "us-east-1", "verify": ca_file}
            storage = open_s3fs(server, client_kwargs=trusting)
            large(storage)
            storage.replace("k", b"1")
            bodies = of_kind(server, "PUT", "PUT ?partNumber")
            assert len(bodies) == 3
            for one in bodies:
                assert one.headers["x-amz-content-sha256"] == hashlib.sha256(one.body).hexdigest()
                assert "content-encoding" not in one.headers


def test_conditions_on_the_wire(server: Scripted) -> None:
    """If-None-Match: * and If-Match, without the quotes that radosgw refuses, go with the PUT. 412 is
    AlreadyExistsError, and so is 404 where the object of that etag has gone.
    """
    storage = open_s3fs(server)
    storage._probed[storage._bucket_id()] = HonouredConditions(
        if_absent=True, if_match=EtagSpelling.AS_GIVEN
    )
    storage.create("k", b"1", staging="s")
    storage.replace("k", b"1", if_match='"abc"')
    storage.replace("k", b"1", if_match="")
    assert [one.headers.get("if-none-match") for one in server.requests] == ["*", None, "*"]
    assert server.requests[1].headers["if-match"] == "abc"
    for status, code in ((412, "PreconditionFailed"), (404, "NoSuchKey")):
        server.answer = lambda _, s=status, c=code: Answer(s, error(c))  # type: ignore[misc]
        found = failing(lambda: storage.replace("k", b"1", if_match='"abc"'))
        assert type(found) is AlreadyExistsError
    server.answer = lambda _: Answer(412, error("PreconditionFailed"))
    assert type(failing(lambda: storage.create("k", b"1", staging="s"))) is AlreadyExistsError


SENTENCES: list[tuple[Answer, type[CkptfsError], str, str]] = [
    (Answer(404, error("NoSuchBucket")), NotFoundError, "there is no bucket 'bucket'", "check its"),
    (
        Answer(403, error("RequestTimeTooSkewed")),
        CredentialsError,
        "this machine's clock and that of",
        "set the clock",
    ),
    (
        Answer(403, error("InvalidAccessKeyId")),
        CredentialsError,
        "does not accept these credentials",
        "check key and secret",
    ),
    (Answer(400, error("ExpiredToken", TOKEN)), CredentialsError, "have expired", "renew them"),
    (
        Answer(403, error("AccessDenied")),
        AccessError,
        "these credentials may not write here",
        "allow s3:PutObject",
    ),
    (
        Answer(301, error("PermanentRedirect"), {"x-amz-bucket-region": "eu-west-1"}),
        StorageError,
        "refers to region 'eu-west-1'",
        "region_name",
    ),
    (Answer(409, error("ConditionalRequestConflict")), TransientError, "another request", ""),
]


def test_each_refusal_has_the_sentence_that_it_has_through_obstore(server: Scripted) -> None:
    """Typed, with what to do next."""
    storage = open_s3fs(server)
    for answer, kind, sentence, hint in SENTENCES:
        server.answer = lambda _, a=answer: a  # type: ignore[misc]
        found = failing(lambda: storage.replace("k", b"1"))
        assert type(found) is kind, sentence
        assert sentence in str(found)
        assert hint in (found.hint or "")
        assert f"s3://{BUCKET}/run/k" in str(found.uri)
    server.answer = lambda _: Answer(404, error("NoSuchBucket"))
    missing = failing(lambda: storage.read("k"))
    assert isinstance(missing, NotFoundError)
    assert missing.of_bucket


def test_a_server_that_fails_leaves_a_change_in_doubt(server: Scripted) -> None:
    """500 to a PUT, after the library's own tries: it may have happened; a read did nothing."""
    storage = open_s3fs(server, config_kwargs={"retries": {"max_attempts": 0}})
    server.answer = lambda _: Answer(500, error("InternalError"))
    assert type(failing(lambda: storage.replace("k", b"1"))) is AnswerLostError
    assert type(failing(lambda: storage.read("k"))) is TransientError


def test_no_credentials_are_a_sentence(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    found = failing(lambda: open_s3fs(server, key=None, secret=None, token=None).read("k"))
    assert type(found) is CredentialsError
    assert "no credentials were found" in str(found)
    assert server.requests == []


def test_after_a_refusal_credentials_are_looked_up_again(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pasted token is renewed in the AWS files, the storage that is open continues to work."""
    path = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
    lines = "[profile p]\naws_access_key_id={0}\naws_secret_access_key={0}\naws_session_token={0}\n"
    path.write_text(lines.format("old"))
    server.answer = lambda request: (
        Answer(400, error("ExpiredToken"))
        if request.headers["x-amz-security-token"] == "old"
        else usual(request)
    )
    storage = open_s3fs(server, key=None, secret=None, token=None, profile="p")
    assert type(failing(lambda: storage.replace("k", b"1"))) is CredentialsError
    path.write_text(lines.format("new"))
    storage.replace("k", b"1")


def test_a_key_pair_in_the_uri_is_no_bucket(server: Scripted) -> None:
    """What is before the @ of s3:// is a key and its secret, unlike with abfs://."""
    options = options_for(server, key=None, secret=None, token=None, client="s3fs")
    storage = open_storage(f"s3://{KEY}:{SECRET}@{BUCKET}/run", options)
    storage.replace("k", b"1")
    assert server.requests[-1].path == f"/{BUCKET}/run/k"
    assert KEY in server.requests[-1].headers["authorization"]


def test_keys_that_a_batch_refuses_are_told(server: Scripted) -> None:
    """The batch answers 200 all the same; the others of it are gone, and an absent key is success."""

    def answer(request: Request) -> Answer:
        if request.kind == "POST ?delete":
            return Answer(
                200,
                deleted(
                    "<Error><Key>run/c</Key><Code>NoSuchKey</Code><Message>m</Message></Error>"
                    "<Error><Key>run/b</Key><Code>AccessDenied</Code><Message>m</Message></Error>"
                ),
            )
        return Answer(403, error("AccessDenied")) if request.path.endswith("/b") else usual(request)

    server.answer = answer
    found = failing(lambda: open_s3fs(server).remove_many(["a", "b", "c"]))
    assert type(found) is AccessError
    assert "may not delete" in str(found)
    assert "s3:DeleteObject" in str(found.hint)


def test_a_store_that_wants_an_md5_of_a_batch(
    server: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenStack Swift takes no batch without Content-MD5: keys go one by one, and one warning says so."""
    server.answer = lambda request: (
        Answer(400, error("InvalidRequest", "Missing required header: Content-MD5"))
        if request.kind == "POST ?delete"
        else usual(request)
    )
    open_s3fs(server).remove_many(["a", "b"])
    open_s3fs(server).remove_many(["c", "d"])
    gone = {request.path for request in of_kind(server, "DELETE")}
    assert gone == {f"/{BUCKET}/run/{name}" for name in "abcd"}
    assert caplog.text.count("keys are deleted one by one") == 1


def test_a_part_that_fails_leaves_no_upload(server: Scripted) -> None:
    """The error is raised, and abort throws the parts away; nothing is completed."""
    server.answer = lambda request: (
        Answer(403, error("AccessDenied")) if "?part" in request.kind else usual(request)
    )
    assert type(failing(lambda: large(open_s3fs(server)))) is AccessError
    assert server.kinds[-1] == "DELETE ?uploadId"
    assert "POST ?uploadId" not in server.kinds


@pytest.mark.parametrize("size", [BLOCK_BYTES + 4, 1])
def test_a_completion_whose_answer_was_lost(server: Scripted, size: int) -> None:
    """s3fs repeats it and hears that there is no such upload: done, if the object has our size."""
    completed = 0

    def answer(request: Request) -> Answer:
        nonlocal completed
        if request.kind == "POST ?uploadId":
            completed += 1
            return Answer(then="drop") if completed == 1 else Answer(404, error("NoSuchUpload"))
        if request.kind == "HEAD":
            more = {"Content-Length": str(size), "Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT"}
            return Answer(200, b"", {"ETag": '"e1"', **more})
        return usual(request)

    server.answer = answer
    storage = open_s3fs(server)
    if size == 1:
        assert isinstance(failing(lambda: large(storage)), NotFoundError)
    else:
        large(storage)
    assert completed == 2


UPLOADS = (
    "<ListMultipartUploadsResult><IsTruncated>{more}</IsTruncated>"
    "<NextKeyMarker>run/{name}</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
    "<Upload><Key>run/{name}</Key><UploadId>u-{name}</UploadId>"
    "<Initiated>2026-11-20T09:00:00.000Z</Initiated></Upload></ListMultipartUploadsResult>"
)


def test_uploads_that_nobody_completed(server: Scripted) -> None:
    """They are listed page by page with their age on the server's clock, and swept by age and key."""

    def answer(request: Request) -> Answer:
        if request.kind != "GET ?uploads":
            return usual(request)
        second = "key-marker" in request.query
        text = UPLOADS.format(more=str(not second).lower(), name="b" if second else "a")
        return Answer(200, text.encode(), {"x-now": "1"})

    server.answer = answer
    storage = open_s3fs(server)
    assert [upload.key for upload in storage.unfinished_uploads()] == ["a", "b"]
    assert all(upload.age_s > 0 for upload in storage.unfinished_uploads())
    assert storage.sweep_uploads(1e12) == 0
    assert storage.sweep_uploads(0, keys={"b"}) == 1
    [gone] = of_kind(server, "DELETE ?uploadId")
    assert (gone.path, gone.query["uploadId"]) == (f"/{BUCKET}/run/b", "u-b")


def save_in_a_child(options: dict[str, Any]) -> None:
    """Runs in a forked process."""
    open_storage(f"s3://{BUCKET}/run", options).replace("child", b"1")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_goes_through_s3fs(server: Scripted) -> None:
    """obstore does not survive a fork: what a child opens goes through s3fs."""
    pytest.importorskip("obstore")
    options = options_for(server)
    open_storage(f"s3://{BUCKET}/run", options).replace("parent", b"1")
    child = multiprocessing.get_context("fork").Process(target=save_in_a_child, args=(options,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [one.path for one in server.requests] == [
        f"/{BUCKET}/run/parent",
        f"/{BUCKET}/run/child",
    ]
