"""An S3 upload that was left: its parts are found again, compared, and not sent twice."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from ckptfs.storage.object_store import ObjectStorage, open_object_store
from ckptfs.uri import Uri
from tests.lab.server import Server

PART_BYTES = 5 << 20
DATA = bytes(range(256)) * (11 << 12)  # 11 MiB: two parts and the rest


def opened(server: Server, root: str, **more: Any) -> ObjectStorage:
    """A storage of one process's."""
    options = {"client": "s3fs", "part_size_bytes": PART_BYTES, "retry_s": 5, **more}
    storage = open_object_store(Uri.parse(root), server.storage_options(**options))
    assert isinstance(storage, ObjectStorage)
    return storage


def left(storage: ObjectStorage, data: bytes) -> None:
    """What a process that dies after two parts leaves."""
    writer = storage.open_kept("a", size_bytes=len(data))
    writer.write(data[: 2 * PART_BYTES + 1])
    writer._room.drain()  # type: ignore[attr-defined]
    writer.abort()


@pytest.mark.parametrize("kind", ["radosgw", "moto_tls"])
def test_parts_that_the_store_holds_are_not_sent_again(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """By their MD5; over https their CRC32 is told to the store once more. Nothing stays behind."""
    server: Server = request.getfixturevalue(kind)
    root = server.fresh()
    with contextlib.closing(opened(server, root)) as storage:
        left(storage, DATA)
    with contextlib.closing(opened(server, root)) as storage:
        with storage.open_kept("a", size_bytes=len(DATA)) as writer:
            writer.write(DATA)
        assert writer.spared_bytes == 2 * PART_BYTES
        assert storage.read("a") == DATA
        assert not [*storage.client.list_uploads(f"{root.rpartition('/')[2]}/")]


def test_parts_with_other_bytes_are_sent(radosgw: Server) -> None:
    """Of the same size, in an upload of the same key: what counts is what is written now."""
    root = radosgw.fresh()
    other = DATA[:PART_BYTES] + bytes(PART_BYTES) + DATA[2 * PART_BYTES :]
    with contextlib.closing(opened(radosgw, root)) as storage:
        left(storage, other)
        with storage.open_kept("a", size_bytes=len(DATA)) as writer:
            writer.write(DATA)
        assert writer.spared_bytes == PART_BYTES
        assert storage.read("a") == DATA
