"""A multipart upload as one stream: how its end is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ckptfs.errors import AnswerLostError, CkptfsError, NotFoundError
from ckptfs.storage.clients.http_errors import ErrorResponse, RequestContext, response_error
from ckptfs.storage.clients.s3 import S3
from ckptfs.storage.multipart import StreamUpload
from ckptfs.uri import Uri

ASKED = RequestContext(S3, "upload", Uri.parse("s3://bucket/run/f"), "http://host", changes=True)


def ended_by(failure: CkptfsError) -> StreamUpload:
    """An upload that failed after all its parts were taken."""

    def send(parts: Iterator[Any]) -> str | None:
        for part in parts:
            del part
        raise failure

    upload = StreamUpload(ASKED, 4, send)
    upload.put_part(0, b"1234")
    upload.put_part(1, b"56")
    return upload


@pytest.mark.parametrize("said", [ErrorResponse(404, "NoSuchUpload"), ErrorResponse(404)])
def test_no_such_upload_may_be_our_own_success(said: ErrorResponse) -> None:
    """obstore asked again after a lost answer: AnswerLostError, then NotFoundError, as of a client that
    makes one try each; the caller looks at the key.
    """
    upload = ended_by(response_error(ASKED, said))
    with pytest.raises(AnswerLostError):
        upload.complete()
    with pytest.raises(NotFoundError):
        upload.complete()


def test_a_missing_bucket_is_told() -> None:
    """It has nothing of ours, and no try will find it there."""
    upload = ended_by(response_error(ASKED, ErrorResponse(404, "NoSuchBucket")))
    with pytest.raises(NotFoundError, match="bucket"):
        upload.complete()


def test_parts_that_come_before_their_turn_are_not_copied() -> None:
    """From several threads, the last first: the stream reads each from where its caller has it."""
    seen: list[int] = []

    def send(parts: Iterator[Any]) -> str | None:
        for part in parts:
            seen.append(np.frombuffer(part, np.uint8).__array_interface__["data"][0])
            del part
        return "etag"

    upload = StreamUpload(ASKED, 1000, send)
    data = [np.full(1000, n, np.uint8) for n in range(4)]
    threads = [
        threading.Thread(target=upload.put_part, args=(n, data[n].data)) for n in (3, 2, 1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert upload.complete() == "etag"
    assert seen == [part.__array_interface__["data"][0] for part in data]


def test_a_part_in_pieces_is_the_callers_again_when_the_last_is_let_go_of() -> None:
    """Each piece is read from where it is; one that is still being sent keeps the whole part."""
    held: list[Any] = []
    all_there, go = threading.Event(), threading.Event()

    def send(parts: Iterator[Any]) -> str | None:
        for part in parts:
            held.append(part)
            del part
            if len(held) == 3:
                all_there.set()
                go.wait(120)
        return "etag"

    upload = StreamUpload(ASKED, 10, send)
    data = [bytearray(b"abc"), bytearray(b"d"), bytearray(b"efghij")]
    put = threading.Thread(target=upload.put_pieces, args=(0, data))
    put.start()
    assert all_there.wait(120)
    lent = [np.frombuffer(piece, np.uint8) for piece in data]
    assert all(map(np.shares_memory, held, lent))
    assert [bytes(piece) for piece in held] == data
    del held[:2]
    put.join(0.1)
    assert put.is_alive()
    held.clear()
    put.join(120)
    assert not put.is_alive()
    go.set()
    assert upload.complete() == "etag"


def test_a_last_part_in_pieces_is_sent_from_where_it_lies() -> None:
    """It waits for no one, and its memory stays as it is; what ``put_part`` was given is copied."""
    held: list[Any] = []

    def send(parts: Iterator[Any]) -> str | None:
        held.extend(parts)
        return "etag"

    lent, copied = bytearray(b"abc"), bytearray(b"def")
    pieces, part = StreamUpload(ASKED, 10, send), StreamUpload(ASKED, 10, send)
    pieces.put_pieces(0, [lent[:0], memoryview(lent)])
    part.put_part(0, copied)
    for upload in (pieces, part):
        assert upload.complete() == "etag"
    copied[:] = b"!!!"
    assert sorted(bytes(piece) for piece in held) == [b"", b"abc", b"def"]
    views = [piece for piece in held if bytes(piece) == b"abc"]
    assert np.shares_memory(views[0], np.frombuffer(lent, np.uint8))


def test_one_thread_may_bring_parts_in_any_order() -> None:
    """No other thread brings what is before them: they wait as copies."""
    seen: list[bytes] = []

    def send(parts: Iterator[Any]) -> str | None:
        for part in parts:
            seen.append(bytes(part))
            del part  # as obstore drops it
        return "etag"

    upload = StreamUpload(ASKED, 2, send)
    for number in (1, 0, 2):
        upload.put_part(number, bytes([number] * 2))
    assert upload.complete() == "etag"
    assert b"".join(seen) == b"\0\0\1\1\2\2"
