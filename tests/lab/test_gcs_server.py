"""The GCS test double against Google's description: what a client may rely on, by plain HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import google_crc32c
import pytest

from tests.lab.gcs_server import GcsServer, Why

JSON = "/storage/v1/b/ckptfs-lab/o"
UPLOAD = "/upload/storage/v1/b/ckptfs-lab/o"
K256 = 256 << 10


@dataclass(frozen=True)
class Answer:
    """One answer. Header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body, parsed."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def reason(self) -> str:
        """The JSON API's reason of an error."""
        return str(json.loads(self.body)["error"]["errors"][0]["reason"])


@pytest.fixture(scope="module", name="gcs")
def server() -> Iterator[GcsServer]:
    """One server for the module."""
    with GcsServer() as gcs:
        gcs.rules.min_part_bytes = 4
        yield gcs


def ask(
    gcs: GcsServer, method: str, path: str, body: bytes | None = None, /, **headers: str
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(gcs.endpoint.removeprefix("http://"), timeout=20)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        said = connection.getresponse()
        found = {name.lower(): value for name, value in said.getheaders()}
        return Answer(said.status, found, said.read())
    finally:
        connection.close()


def insert(gcs: GcsServer, key: str, data: bytes, **query: object) -> Answer:
    """A JSON API media upload."""
    return ask(
        gcs, "POST", f"{UPLOAD}?{urlencode({'uploadType': 'media', 'name': key, **query})}", data
    )


def media(gcs: GcsServer, key: str, **headers: str) -> Answer:
    """The bytes of an object."""
    return ask(gcs, "GET", f"{JSON}/{quote(key, safe='')}?alt=media", **headers)


def test_of_sixteen_writers_one_wins_and_its_bytes_are_there(gcs: GcsServer) -> None:
    """ifGenerationMatch=0 lets one of many win, by either API, and no other writer's bytes appear."""
    for round_ in range(10):
        key, barrier = f"race/{round_}", threading.Barrier(16)

        def one(i: int, key: str = key, barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            if i % 2:
                return insert(gcs, key, b"%d" % i, ifGenerationMatch=0).status
            conditions = {"x-goog-if-generation-match": "0"}
            return ask(gcs, "PUT", f"/ckptfs-lab/{key}", b"%d" % i, **conditions).status

        with ThreadPoolExecutor(16) as pool:
            said = list(pool.map(one, range(16)))
        assert sorted(said) == [200] + [412] * 15
        assert media(gcs, key).body == b"%d" % said.index(200)


def test_generations_grow_and_conditions_look_at_the_live_one(gcs: GcsServer) -> None:
    """Replacing asks for the live generation; a generation never comes back after a delete."""
    first = insert(gcs, "g", b"1").json["generation"]
    assert insert(gcs, "g", b"x", ifGenerationMatch=int(first) - 1).reason == "conditionNotMet"
    second = insert(gcs, "g", b"2", ifGenerationMatch=first).json["generation"]
    assert int(second) > int(first)
    assert insert(gcs, "g", b"x", ifGenerationMatch=first).status == 412
    assert ask(gcs, "DELETE", f"{JSON}/g?ifGenerationMatch={first}").status == 412
    assert ask(gcs, "DELETE", f"{JSON}/g?ifGenerationMatch={second}").status == 204
    assert ask(gcs, "DELETE", f"{JSON}/g").status == 404
    assert insert(gcs, "g", b"x", ifGenerationMatch=second).status == 412
    third = insert(gcs, "g", b"3", ifGenerationMatch=0).json["generation"]
    assert int(third) > int(second)


def test_reads_are_pinned_by_generation(gcs: GcsServer) -> None:
    """A read with a condition on another generation is 412, one of a lost generation 404; 304 for not."""
    old = insert(gcs, "pin", b"old").json["generation"]
    new = insert(gcs, "pin", b"newer").json["generation"]
    assert ask(gcs, "GET", f"{JSON}/pin?alt=media&ifGenerationMatch={old}").status == 412
    assert ask(gcs, "GET", f"{JSON}/pin?alt=media&generation={old}").status == 404
    assert ask(gcs, "GET", f"{JSON}/pin?alt=media&ifGenerationNotMatch={new}").status == 304
    found = ask(gcs, "GET", f"{JSON}/pin?alt=media&ifGenerationMatch={new}", Range="bytes=1-3")
    assert (found.status, found.body) == (206, b"ewe")
    assert found.headers["x-goog-generation"] == new
    assert found.headers["content-range"] == "bytes 1-3/5"
    assert media(gcs, "pin", Range="bytes=9-12").status == 416
    assert ask(gcs, "GET", f"{JSON}/pin?ifMetagenerationMatch=2").status == 412


def test_a_versioned_bucket_keeps_what_was_replaced() -> None:
    """generation= finds noncurrent objects where the bucket keeps them."""
    with GcsServer(bucket="plain") as gcs:
        gcs.store.make_bucket("ckptfs-lab", versioning=True)
        old = insert(gcs, "k", b"old").json["generation"]
        insert(gcs, "k", b"new")
        assert ask(gcs, "GET", f"{JSON}/k?alt=media&generation={old}").body == b"old"


def test_checksums_that_are_told_are_verified(gcs: GcsServer) -> None:
    """A wrong crc32c or MD5 is 400 and stores nothing, on both APIs; a right one is accepted."""
    right = base64.b64encode(google_crc32c.value(b"data").to_bytes(4, "big")).decode()
    wrong = base64.b64encode(b"0000").decode()
    for crc, status in ((wrong, 400), (right, 200)):
        hashes = {"x-goog-hash": f"crc32c={crc}"}
        assert ask(gcs, "PUT", "/ckptfs-lab/sum/xml", b"data", **hashes).status == status
        assert multipart(gcs, {"name": "sum/json", "crc32c": crc}, b"data").status == status
    assert ask(gcs, "PUT", "/ckptfs-lab/sum/5", b"data", Content_MD5=wrong).status == 400
    assert b"BadDigest" in ask(gcs, "PUT", "/ckptfs-lab/sum/5", b"d", Content_MD5=wrong).body
    assert media(gcs, "sum/5").status == 404


def multipart(
    gcs: GcsServer, settings: Mapping[str, object], data: bytes, query: str = ""
) -> Answer:
    """A JSON API multipart upload, with the line ends that HTTP libraries use."""
    body = (
        b"--B\r\nContent-Type: application/json\r\n\r\n"
        + json.dumps(settings).encode()
        + b"\r\n--B\r\nContent-Type: application/octet-stream\r\n\r\n"
        + data
        + b"\r\n--B--"
    )
    kind = "multipart/related; boundary=B"
    return ask(gcs, "POST", f"{UPLOAD}?uploadType=multipart{query}", body, Content_Type=kind)


@pytest.mark.parametrize("data", [b"", b"\r\n", b"\n--", b"x\r\n--B2\r\n", bytes(range(256)) * 5])
def test_multipart_bodies_keep_every_byte(gcs: GcsServer, data: bytes) -> None:
    """Bytes that look like line ends or boundaries come back; settings and parameters are kept."""
    settings = {"name": "m/p", "metadata": {"a": "b"}, "storageClass": "NEARLINE"}
    said = multipart(gcs, settings, data, "&kmsKeyName=k&predefinedAcl=private").json
    assert media(gcs, "m/p").body == data
    assert said["metadata"] == {"a": "b"}
    assert (said["storageClass"], said["kmsKeyName"]) == ("NEARLINE", "k")
    assert said["predefinedAcl"] == "private"


def test_resumable_sessions(gcs: GcsServer) -> None:
    """308 says what arrived; a repeated chunk is taken once; the end may be given afterwards."""
    data = bytes(range(256)) * (2 * K256 // 256) + b"end"
    begun = ask(gcs, "POST", f"{UPLOAD}?uploadType=resumable&name=r", b"{}")
    session = begun.headers["location"].removeprefix(gcs.endpoint)
    status = ask(gcs, "PUT", session, b"", Content_Range="bytes */*")
    assert (status.status, status.headers.get("range")) == (308, None)

    def chunk(start: int, stop: int, total: str = "*") -> Answer:
        span = f"bytes {start}-{stop - 1}/{total}"
        return ask(gcs, "PUT", session, data[start:stop], Content_Range=span)

    assert chunk(0, 1000).status == 400
    assert chunk(0, K256).headers["range"] == f"bytes=0-{K256 - 1}"
    assert chunk(0, K256).headers["range"] == f"bytes=0-{K256 - 1}"
    assert chunk(2 * K256, 2 * K256 + 3).status == 400
    assert chunk(K256, 2 * K256).status == 308
    assert media(gcs, "r").status == 404
    done = chunk(2 * K256, len(data), str(len(data)))
    assert (done.status, media(gcs, "r").body) == (200, data)
    again = ask(gcs, "PUT", session, b"", Content_Range=f"bytes */{len(data)}")
    assert again.json["generation"] == done.json["generation"]


def test_a_resumable_session_ends_by_status_or_by_delete(gcs: GcsServer) -> None:
    """``bytes */N`` ends a session with all bytes there; DELETE answers 499 and forgets it."""
    begun = [ask(gcs, "POST", f"{UPLOAD}?uploadType=resumable&name=r{i}", b"{}") for i in (1, 2)]
    first, second = (said.headers["location"].removeprefix(gcs.endpoint) for said in begun)
    ask(gcs, "PUT", first, bytes(K256), Content_Range=f"bytes 0-{K256 - 1}/*")
    assert ask(gcs, "PUT", first, b"", Content_Range=f"bytes */{K256}").status == 200
    assert ask(gcs, "DELETE", second).status == 499
    assert ask(gcs, "PUT", second, b"", Content_Range="bytes */*").status == 410


def test_a_resumable_condition_is_checked_at_the_end(gcs: GcsServer) -> None:
    """Who comes second to the end of an upload with ifGenerationMatch=0 gets 412."""
    path = f"{UPLOAD}?uploadType=resumable&name=late&ifGenerationMatch=0"
    session = ask(gcs, "POST", path, b"{}").headers["location"].removeprefix(gcs.endpoint)
    insert(gcs, "late", b"first")
    assert ask(gcs, "PUT", session, b"second").status == 412
    assert media(gcs, "late").body == b"first"
    assert ask(gcs, "POST", path, b"{}").status == 412


def upload_id(gcs: GcsServer, key: str, **headers: str) -> str:
    """Begin a multipart upload."""
    said = ask(gcs, "POST", f"/ckptfs-lab/{key}?uploads", **headers)
    found = re.search("<UploadId>(.*)</UploadId>", said.body.decode())
    assert found
    return found[1]


def completion(parts: list[tuple[int, str]]) -> bytes:
    """The body that completes an upload."""
    lines = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{e}</ETag></Part>" for n, e in parts)
    return f"<CompleteMultipartUpload>{lines}</CompleteMultipartUpload>".encode()


def test_xml_multipart_uploads(gcs: GcsServer) -> None:
    """Parts in any order, put again, completed in order; the object has settings and no MD5."""
    key = "x%2Fy"
    id_ = upload_id(gcs, key, **{"x-goog-meta-a": "b", "x-goog-encryption-kms-key-name": "k"})
    put = {
        number: ask(gcs, "PUT", f"/ckptfs-lab/{key}?partNumber={number}&uploadId={id_}", data)
        for number, data in [(2, b"wrong"), (3, b"!"), (1, b"hello "), (2, b"world")]
    }
    etags = {number: said.headers["etag"] for number, said in put.items()}
    assert b"<PartNumber>3" in ask(gcs, "GET", f"/ckptfs-lab/{key}?uploadId={id_}").body
    assert media(gcs, "x/y").status == 404
    end = f"/ckptfs-lab/{key}?uploadId={id_}"
    assert b"InvalidPart<" in ask(gcs, "POST", end, completion([(1, etags[2])])).body
    backwards = completion([(2, etags[2]), (1, etags[1])])
    assert b"InvalidPartOrder" in ask(gcs, "POST", end, backwards).body
    done = ask(gcs, "POST", end, completion(sorted(etags.items())))
    assert (done.status, media(gcs, "x/y").body) == (200, b"hello world!")
    found = ask(gcs, "GET", f"{JSON}/{key}").json
    assert found["generation"] == done.headers["x-goog-generation"]
    assert (found["metadata"], found["kmsKeyName"]) == ({"a": "b"}, "k")
    assert "md5Hash" not in found
    assert b"NoSuchUpload" in ask(gcs, "POST", end, completion(sorted(etags.items()))).body


def test_small_parts_and_conditions_are_refused(gcs: GcsServer) -> None:
    """A part below the minimum that is not the last is refused; so is a condition on an upload."""
    id_ = upload_id(gcs, "small")
    said = [
        ask(gcs, "PUT", f"/ckptfs-lab/small?partNumber={n}&uploadId={id_}", b"abc") for n in (1, 2)
    ]
    parts = completion([(n + 1, one.headers["etag"]) for n, one in enumerate(said)])
    assert b"EntityTooSmall" in ask(gcs, "POST", f"/ckptfs-lab/small?uploadId={id_}", parts).body
    condition = {"x-goog-if-generation-match": "0"}
    assert ask(gcs, "POST", "/ckptfs-lab/small?uploads", **condition).status == 400


def test_uploads_are_listed_by_prefix_in_pages_and_aborted(gcs: GcsServer) -> None:
    """What was not completed is listed with its age until somebody aborts it."""
    ids = [upload_id(gcs, f"pending%2F{i}") for i in range(3)]
    path = "/ckptfs-lab?uploads&prefix=pending/&max-uploads=2"
    page = ask(gcs, "GET", path).body.decode()
    assert re.findall("<UploadId>(.*?)</", page) == ids[:2]
    assert "<Initiated>" in page
    markers = [
        re.findall(f"<{n}>(.*?)</", page)[0] for n in ("NextKeyMarker", "NextUploadIdMarker")
    ]
    more = ask(gcs, "GET", f"{path}&key-marker={markers[0]}&upload-id-marker={markers[1]}").body
    assert re.findall("<UploadId>(.*?)</", more.decode()) == ids[2:]
    for i, id_ in enumerate(ids):
        assert ask(gcs, "DELETE", f"/ckptfs-lab/pending%2F{i}?uploadId={id_}").status == 204
    assert b"<Upload>" not in ask(gcs, "GET", path).body


def test_listings_in_pages(gcs: GcsServer) -> None:
    """Prefix, delimiter and pages agree on both APIs, in the order of names."""
    keys = ["l/a", "l/b/1", "l/b/2", "l/c", "l/d/1"]
    for key in [*keys, "m"]:
        insert(gcs, key, b"x")
    found: list[str] = []
    token = ""
    while True:
        query = urlencode({"prefix": "l/", "delimiter": "/", "maxResults": 2, "pageToken": token})
        page = json.loads(ask(gcs, "GET", f"{JSON}?{query}").body)
        found += page.get("prefixes", []) + [item["name"] for item in page.get("items", [])]
        if not (token := page.get("nextPageToken", "")):
            break
    assert sorted(found) == ["l/a", "l/b/", "l/c", "l/d/"]
    said = ask(gcs, "GET", "/ckptfs-lab?list-type=2&prefix=l/&max-keys=4").body.decode()
    assert re.findall("<Key>(.*?)</Key>", said) == keys[:4]
    token = quote(re.findall("<NextContinuationToken>(.*?)</", said)[0])
    more = ask(gcs, "GET", f"/ckptfs-lab?list-type=2&prefix=l/&continuation-token={token}").body
    assert re.findall("<Key>(.*?)</Key>", more.decode()) == keys[4:]


def test_batches_of_deletes(gcs: GcsServer) -> None:
    """Each inner request has an answer of its own, known by its Content-ID."""
    insert(gcs, "batch/a", b"x")
    inner = "".join(
        f"--X\r\nContent-Type: application/http\r\nContent-ID: <id+{i}>\r\n\r\n"
        f"DELETE {JSON}/batch%2F{name} HTTP/1.1\r\ncontent-length: 0\r\n\r\n\r\n"
        for i, name in enumerate(["a", "nobody"])
    )
    body = f"{inner}--X--".encode()
    said = ask(
        gcs, "POST", "/batch/storage/v1", body, Content_Type="multipart/mixed; boundary=X"
    ).body.decode()
    assert re.findall(r"HTTP/1.1 (\d+)", said) == ["204", "404"]
    assert "<response-id+1>" in said
    assert media(gcs, "batch/a").status == 404


def test_errors_have_the_shape_of_each_api(gcs: GcsServer) -> None:
    """JSON errors name code, reason and message; XML errors Code and Message."""
    said = ask(gcs, "GET", "/storage/v1/b/nobody/o/k")
    assert (said.status, said.reason) == (404, "notFound")
    assert "bucket does not exist" in json.loads(said.body)["error"]["message"]
    assert (
        "No such object: ckptfs-lab/none" in json.loads(media(gcs, "none").body)["error"]["message"]
    )
    assert b"<Code>NoSuchBucket</Code>" in ask(gcs, "PUT", "/nobody/k", b"").body
    assert b"<Code>NoSuchKey</Code>" in ask(gcs, "GET", "/ckptfs-lab/none").body


def test_the_rules_refuse_as_google_does() -> None:
    """A wrong token is 401, a missing permission 403; overwriting needs the permission to delete."""
    with GcsServer() as gcs:
        insert(gcs, "k", b"1")
        gcs.rules.forbidden |= {"storage.objects.delete", "storage.objects.list"}
        assert insert(gcs, "k", b"2").reason == "forbidden"
        assert insert(gcs, "new", b"1").status == 200
        assert ask(gcs, "GET", JSON).status == 403
        assert b"AccessDenied" in ask(gcs, "GET", "/ckptfs-lab?list-type=2").body
        gcs.rules.token = "good"  # noqa: S105 - a made-up one
        assert insert(gcs, "anonymous", b"").reason == "required"
        assert media(gcs, "k", Authorization="Bearer bad").reason == "authError"
        assert media(gcs, "k", Authorization="Bearer good").body == b"1"
        gcs.store.bucket("ckptfs-lab").held.add("k")
        gcs.rules.forbidden.clear()
        held = ask(gcs, "DELETE", f"{JSON}/k", Authorization="Bearer good")
        assert held.reason == "retentionPolicyNotMet"


def test_failures_come_as_planned() -> None:
    """A burst hits what it names, before the work or after it; None breaks the connection."""
    with GcsServer() as gcs:
        gcs.rules.fail(Why.UNAVAILABLE, 2, permission="storage.objects.create")
        gcs.rules.fail(Why.BACKEND, permission="storage.objects.delete", after=True)
        assert media(gcs, "k").status == 404
        assert [insert(gcs, "k", b"1").status for _ in range(3)] == [503, 503, 200]
        assert ask(gcs, "DELETE", f"{JSON}/k").status == 500
        assert media(gcs, "k").status == 404
        gcs.rules.fail(None)
        with pytest.raises(http.client.RemoteDisconnected):
            media(gcs, "k")
        assert [seen.permission for seen in gcs.rules.seen][-2:] == ["storage.objects.get"] * 2
