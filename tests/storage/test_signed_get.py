"""Ranges over sockets of our own: what they ask, what they leave to obstore, what breaks them."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfs.errors import NotFoundError, TransientError
from ckptfs.storage.clients.signed_get import can_read
from tests.lab.moto import make_certificates
from tests.storage.s3_scripted import Answer, Request, Scripted, error, open_s3, usual

pytest.importorskip("obstore")


@pytest.fixture
def server() -> Any:
    """A server on which everything works."""
    with Scripted() as started:
        yield started


def get(client: Any, offset: int = 2, size: int = 5, etag: str | None = '"e1"') -> bytes:
    """One range of an object that holds the ten digits."""
    out = bytearray(size)
    client.get_range("run/a b+c", offset, memoryview(out), etag)
    return bytes(out)


def is_signed_url(request: Request) -> bool:
    """Whether a request came by this way: obstore's own is signed in a header."""
    return "X-Amz-Signature" in request.query and "authorization" not in request.headers


def test_a_range_is_one_request_by_a_signed_url(server: Scripted) -> None:
    """The bytes, the key with its odd characters, the condition; ranges share one signature."""
    client = open_s3("obstore_s3", server)
    assert get(client) == b"23456"
    assert get(client, 0, 1) == b"0"
    first, second = server.requests
    assert is_signed_url(first)
    assert first.path == "/bucket/run/a b+c"
    assert (first.headers["range"], first.headers["if-match"]) == ("bytes=2-6", '"e1"')
    assert first.query["X-Amz-Signature"] == second.query["X-Amz-Signature"]
    client.close()


def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it(
    server: Scripted,
) -> None:
    """A server that drops a kept connection costs one more connection and no error."""
    client = open_s3("obstore_s3", server)
    dropped: list[Request] = []

    def answer(request: Request) -> Answer:
        if len(server.requests) == 2 and not dropped:
            dropped.append(request)
            return Answer(then="drop")
        return usual(request)

    server.answer = answer
    assert get(client) == b"23456"
    assert get(client) == b"23456"
    assert [is_signed_url(one) for one in server.requests] == [True] * 3
    assert dropped
    client.close()


def test_a_large_range_wakes_its_reader_a_few_times_and_the_next_answer_at_once(
    server: Scripted,
) -> None:
    """A MiB at a time, whatever the packets were; then the line of an answer is enough again."""
    client = open_s3("obstore_s3", server)
    size = 4 << 20
    whole = {"Content-Range": f"bytes 0-{size - 1}/{size}", "ETag": '"e1"'}
    body = bytes(range(256)) * (size // 256)
    server.answer = lambda _: Answer(206, body, whole, "pieces")
    woken = 0

    def count(_frame: object, event: str, what: Any) -> None:
        nonlocal woken
        woken += event == "c_call" and what.__name__ == "readinto1"

    sys.setprofile(count)
    try:
        found = get(client, 0, size)
    finally:
        sys.setprofile(None)
    assert found == body
    assert 0 < woken <= size // (1 << 20) + 2
    server.answer = usual
    assert get(client) == b"23456"
    assert server.connections == 1
    client.close()


@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 42_244, 1_100_000])
def test_bytes_that_come_with_the_headers_are_not_waited_for_again(
    server: Scripted, size: int
) -> None:
    """Headers and body in one packet: what Python read ahead is missing in the kernel's queue."""
    client = open_s3("obstore_s3", server)
    body = bytes(n % 251 for n in range(size))
    whole = {"Content-Range": f"bytes 0-{size - 1}/{size}", "ETag": '"e1"'}
    server.answer = lambda _: Answer(206, body, whole, "together")
    assert get(client, 0, size) == body
    assert len(server.requests) == 1
    client.close()


def test_what_does_not_take_signed_urls_is_read_by_obstore(server: Scripted) -> None:
    """Refused once: obstore reads it, and is asked at once from then on."""
    client = open_s3("obstore_s3", server)

    def answer(request: Request) -> Answer:
        return Answer(403, error("AccessDenied")) if is_signed_url(request) else usual(request)

    server.answer = answer
    assert get(client) == get(client) == b"23456"
    assert [is_signed_url(one) for one in server.requests] == [True, False, False]


def test_an_object_that_is_missing_does_not_turn_it_off(server: Scripted) -> None:
    """obstore tells what is wrong; nothing was wrong with this way."""
    client = open_s3("obstore_s3", server)
    server.answer = lambda _: Answer(404, error("NoSuchKey"))
    with pytest.raises(NotFoundError):
        get(client)
    server.answer = usual
    assert get(client) == b"23456"
    assert is_signed_url(server.requests[-1])
    client.close()


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_server_is_told_at_once(server: Scripted, status: int) -> None:
    """One request, a TransientError: the retrier waits before the next."""
    client = open_s3("obstore_s3", server)
    server.answer = lambda _: Answer(status, error("SlowDown"))
    with pytest.raises(TransientError, match="SlowDown") as caught:
        get(client)
    assert len(server.requests) == 1
    assert "X-Amz" not in str(caught.value)


def test_an_answer_that_is_cut_is_transient_and_ends_its_connection(server: Scripted) -> None:
    """Half a body is no range; the next request begins on another connection."""
    client = open_s3("obstore_s3", server)
    whole = {"Content-Range": "bytes 2-6/10", "ETag": '"e1"'}
    server.answer = lambda _: Answer(206, b"23456", whole, "cut")
    with pytest.raises(TransientError) as caught:
        get(client)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None  # its text may have the URL
    server.answer = usual
    assert get(client) == b"23456"
    client.close()


def test_over_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    """The certificates that s3fs is told count here too."""
    pytest.importorskip("cryptography")
    ca_file, certificate, key = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    trusting = {"region_name": "us-east-1", "verify": ca_file}
    with Scripted(tls) as server:
        client = open_s3("obstore_s3", server, client_kwargs=trusting)
        assert get(client) == b"23456"
        assert is_signed_url(server.requests[0])
        client.close()


@pytest.mark.parametrize(
    ("config", "client_options", "expected"),
    [
        ({}, {}, True),
        ({"endpoint": "https://minio:9000"}, {}, True),
        ({"skip_signature": True}, {}, False),
        ({"request_payer": True}, {}, False),
        ({"server_side_encryption": "sse-c"}, {}, False),
        ({"server_side_encryption": "aws:kms"}, {}, True),
        ({}, {"proxy_url": "http://proxy:3128"}, False),
    ],
)
def test_what_needs_more_than_a_signature_is_obstores(
    config: dict[str, Any],
    client_options: dict[str, Any],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Customer keys, requester pays, anonymous access and proxies."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert can_read(config, client_options) is expected
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert not can_read({"endpoint": "https://minio:9000"}, client_options)
