"""What is in torch's store has bounds: a value that ckptfs did not write takes neither memory nor time."""

from __future__ import annotations

import zlib
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore

from ckptfs.control import tcpstore_client
from ckptfs.control.handshake import decode_table, encode_table
from ckptfs.control.tcpstore_client import CHUNK_BYTES, drop, offer, put, take, take_many
from ckptfs.control.world import World
from ckptfs.errors import StateError

FORGED = {
    "chunks": b"99999 key\nx",
    "more chunks than digits": b"1" * 5000 + b" key\nx",
    "none": b"0 key\nx",
    "negative": b"-1 key\nx",
    "other keys": b"3 other/place\nx",
    "no header": b"x" * 100,
    "no text": b"\xff\xfe\n",
    "long first chunk": b"1 key\n" + b"x" * (CHUNK_BYTES + 1),
}


@pytest.mark.parametrize("head", FORGED.values(), ids=FORGED)
def test_a_forged_value_is_an_error_before_its_chunks_are_asked_for(head: bytes) -> None:
    """Each chunk that does not exist would be waited for; a drop would delete somebody else's keys."""
    store: Any = HashStore()
    store.set("key", head)
    store.set("other/place/1", b"somebody's")
    for read in (lambda: take(store, "key"), lambda: take_many(store, ["key"])):
        with pytest.raises(StateError, match="ckptfs did not write it"):
            read()
    with pytest.raises(StateError, match="ckptfs did not write it"):
        drop(store, "key")
    assert store.get("other/place/1") == b"somebody's"


def test_a_chunk_that_is_too_long_is_an_error() -> None:
    """The others of a value have the same bound."""
    store: Any = HashStore()
    put(store, "key", b"x" * (CHUNK_BYTES + 1))
    store.set("key/1", b"x" * (CHUNK_BYTES + 1))
    with pytest.raises(StateError, match="ckptfs did not write it"):
        take(store, "key")


@pytest.mark.parametrize("write", [put, offer])
def test_a_value_that_nobody_would_read_is_not_written(write: Any, monkeypatch: Any) -> None:
    """The writer hears of it, with what to do, and no key is left."""
    monkeypatch.setattr(tcpstore_client, "_MOST_CHUNKS", 2)
    store: Any = HashStore()
    write(store, "fits", b"x" * (2 * CHUNK_BYTES))
    assert len(take(store, "fits")[0]) == 2 * CHUNK_BYTES
    with pytest.raises(StateError, match="to the others"):
        write(store, "key", b"x" * (2 * CHUNK_BYTES + 1))
    assert store.num_keys() == 2


def test_the_table_of_ranks_is_inflated_up_to_a_bound() -> None:
    """A bomb of a megabyte would be a gigabyte on every rank."""
    worlds = [asdict(World.solo()) for _ in range(3)]
    table = encode_table([{"world": world, "life": None} for world in worlds])
    assert [row["world"] for row in decode_table(table, 3)] == worlds
    for data in (zlib.compress(b" " * (64 << 20)), table[:-8], b"x", zlib.compress(b"[" * 9999)):
        with pytest.raises(StateError, match="table of the ranks"):
            decode_table(data, 3)
