"""What GCS's client decides without a server: batches, answers, checksums, credentials' kinds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.storage.clients.gcs_batch import Inner, batch_body, batch_replies
from ckptfs.storage.clients.gcs_errors import said_of
from ckptfs.storage.clients.gcs_hash import crc32c_of, crc32c_told
from ckptfs.storage.clients.gcs_login import is_raw


def answer(number: int, status: int, body: str = "") -> str:
    """One part of a batch's answer, as Google writes it."""
    return (
        f"--batch_x\r\nContent-Type: application/http\r\nContent-ID: <response-ckptfs+{number}>\r\n\r\n"
        f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\n\r\n{body}\r\n"
    )


@given(st.lists(st.sampled_from([204, 404, 403, 503]), min_size=1, max_size=20), st.randoms())
def test_answers_of_a_batch_find_their_question(statuses: list[int], rand: random.Random) -> None:
    """In whatever order they come, each answer is told for the key that it is about."""
    lines = [answer(i, status, f'{{"n": {i}}}') for i, status in enumerate(statuses)]
    rand.shuffle(lines)
    body = ("".join(lines) + "--batch_x--\r\n").encode()
    found = batch_replies("multipart/mixed; boundary=batch_x", body, len(statuses))
    assert [one.status for one in found] == statuses
    assert all(f'"n": {i}' in one.body.decode() for i, one in enumerate(found))


def test_what_a_batch_left_out_is_no_success() -> None:
    """A key without an answer, or an answer that is none, has the status 0."""
    body = (answer(1, 204) + "--batch_x--\r\n").encode()
    found = batch_replies("multipart/mixed; boundary=batch_x", body, 3)
    assert [one.status for one in found] == [0, 204, 0]
    assert batch_replies("text/html", b"<html>", 2) == [Inner(0)] * 2


def test_a_batch_asks_for_each_path() -> None:
    """Paths and the project that pays stand in each inner request, with numbers to know them by."""
    content_type, body = batch_body(["/a%2Fb", "/c"], {"userProject": "p q"})
    assert content_type.startswith("multipart/mixed; boundary=")
    text = body.decode()
    assert "DELETE /a%2Fb?userProject=p+q HTTP/1.1" in text
    assert "<ckptfs+0>" in text
    assert "<ckptfs+1>" in text


JSON = '{"error": {"code": 404, "message": "%s", "errors": [{"reason": "%s"}]}}'


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, JSON % ("No such object: b/k", "notFound"), "NoSuchKey"),
        (404, JSON % ("The specified bucket does not exist.", "notFound"), "NoSuchBucket"),
        (404, "<Error><Code>NoSuchUpload</Code></Error>", "NoSuchUpload"),
        (404, "No such object: b/k", "NoSuchKey"),
        (401, JSON % ("Anonymous caller does not have x", "required"), "required"),
        (
            403,
            "<Error><Code>AccessDenied</Code><Details>Anonymous caller</Details></Error>",
            "required",
        ),
        (401, "<Error><Code>AuthenticationRequired</Code></Error>", "authError"),
        (400, JSON % ("Provided CRC32C doesn't match calculated CRC32C", "invalid"), "BadDigest"),
        (412, JSON % ("did not hold", "conditionNotMet"), "conditionNotMet"),
        (502, "<html>Bad Gateway</html>", ""),
        (500, '{"error": "text"}', ""),
        (500, '{"error": {"errors": []}}', ""),
        (500, "{broken", ""),
        (500, "[]", ""),
    ],
)
def test_answers_are_read(status: int, body: str, code: str) -> None:
    """Both APIs' errors, and what a proxy says instead, become one code each."""
    found = said_of(status, body.encode())
    assert (found.status, found.code) == (status, code)


def test_checksums_of_any_buffer() -> None:
    """crc32c of bytes, views and writable buffers alike (RFC 3720: 32 zeros give 8a9136aa)."""
    zeros = bytearray(32)
    for data in (bytes(zeros), zeros, memoryview(zeros), memoryview(bytearray(34))[1:33]):
        assert crc32c_of(data) == "ipE2qg=="
    assert crc32c_of(b"") == "AAAAAA=="
    told = {"X-Goog-Hash": "crc32c=ipE2qg==,md5=cAAA=="}
    assert crc32c_told(told) == "ipE2qg=="
    assert crc32c_told({}) is None


def test_a_token_is_told_from_a_file(tmp_path: Path) -> None:
    """Names, files, and what looks like one are no tokens."""
    (tmp_path / "key").write_text("{}")
    for token in (
        "anon",
        "cache",
        "cloud",
        "google_default",
        str(tmp_path / "key"),
        "~/k",
        "x.json",
    ):
        assert not is_raw(token)
    assert not is_raw(None)
    assert not is_raw({})
    assert is_raw("ya29.token")
