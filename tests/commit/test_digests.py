"""Block digests: computed while writing, decoded without trust, verified by ranges."""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.commit.digests import (
    BLOCK_SIZE_BYTES,
    BlockDigester,
    FileDigests,
    ItemDigests,
    decode_digests,
    encode_digests,
    first_bad_block,
)
from ckptfs.errors import ManifestError

MIB = BLOCK_SIZE_BYTES


def digest_item(data: bytes, offset: int, cuts: tuple[int, int], step: int) -> ItemDigests:
    """The item as a writer would digest it, fed in pieces of ``step`` bytes."""
    digester = BlockDigester()
    begin, end = cuts
    for low, high in ((0, begin), (begin, end), (end, len(data))):
        for at in range(low, high, step):
            digester.update(memoryview(data)[at : min(at + step, high)])
        digester.cut()
    return ItemDigests(offset, len(data), begin, end - begin, digester.finish())


def sample(size: int = 3 * MIB + 77, step: int = 1 << 19) -> tuple[bytes, ItemDigests]:
    """Some bytes and their item, fed in pieces of ``step``."""
    data = bytes(range(256)) * (size // 256 + 1)
    return data[:size], digest_item(data[:size], 5, (704, size - 900), step)


def test_pieces_of_any_size_give_the_same_digests() -> None:
    """However the writer cuts its writes, the digests are those of the blocks."""
    data, whole = sample(step=10 * MIB)
    for step in (1000, MIB - 1, MIB, MIB + 1):
        assert list(sample(step=step)[1].blocks) == list(whole.blocks)
    payload = data[704 : len(data) - 900]
    first = xxhash.xxh3_64_intdigest(payload[:MIB])
    assert whole.blocks[1] == first, "the payload's blocks begin with the payload"


def test_blocks_of_covers_exactly_the_range() -> None:
    """A range of the payload asks for its own blocks and nothing of head or tail."""
    _, item = sample()
    blocks = list(item.blocks_of(704 + MIB, 704 + 2 * MIB))
    assert [(b.start, b.stop) for b in blocks] == [(704 + MIB, 704 + 2 * MIB)]
    every = list(item.blocks_of(0, item.length))
    assert every[0].start == 0
    assert every[-1].stop == item.length
    assert [b.stop for b in every[:-1]] == [b.start for b in every[1:]]
    assert [b.digest for b in every] == list(item.blocks)


@pytest.mark.parametrize("at", [0, 703, 704, MIB + 704, 3 * MIB - 900, 3 * MIB + 76])
def test_a_flipped_bit_is_found_in_its_block(at: int) -> None:
    """One bit anywhere is seen, and the block that holds it is named."""
    data, item = sample()
    assert first_bad_block(item, 0, memoryview(data)) is None
    broken = bytearray(data)
    broken[at] ^= 1
    bad = first_bad_block(item, 0, memoryview(broken))
    assert bad is not None
    assert bad.start <= at < bad.stop


items = st.lists(
    st.tuples(st.integers(0, 3 * MIB), st.integers(0, 2000), st.integers(0, 2000)), max_size=6
)


@given(items)
def test_a_sidecar_comes_back_as_it_was(sizes: list[tuple[int, int, int]]) -> None:
    """decode(encode(x)) == x for any items, with gaps and empty ones."""
    offset, made = 0, []
    for payload, head, tail in sizes:
        length = payload + head + tail
        count = sum(-(-n // MIB) for n in (head, payload, tail))
        made.append(ItemDigests(offset, length, head, payload, tuple(range(count))))
        offset += length + head
    found = decode_digests(encode_digests(FileDigests(tuple(made))), "here")
    assert [(i.offset, i.length, i.payload_offset, i.payload_length) for i in found.items] == [
        (i.offset, i.length, i.payload_offset, i.payload_length) for i in made
    ]
    assert [list(i.blocks) for i in found.items] == [list(i.blocks) for i in made]


@given(st.data())
def test_a_damaged_sidecar_is_refused(data: st.DataObject) -> None:
    """Any truncation and any changed byte is a ManifestError that names the place."""
    whole = encode_digests(FileDigests((sample()[1],)))
    cut = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[cut] ^= data.draw(st.integers(1, 255))
    for broken in (whole[:cut], bytes(changed), whole + b"x"):
        with pytest.raises(ManifestError, match="file:///run/x"):
            decode_digests(broken, "file:///run/x")


def _sealed(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_foreign_and_future_sidecars_are_told_apart() -> None:
    """A newer format says so; overlapping items and lacking digests are damage, not trust."""
    whole = encode_digests(FileDigests((sample()[1],)))
    future = bytearray(whole[:-8])
    struct.pack_into("<H", future, 8, 2)
    with pytest.raises(ManifestError, match="format 2"):
        decode_digests(_sealed(bytes(future)), "x")
    two = FileDigests((ItemDigests(0, 10, 0, 0, (1,)), ItemDigests(5, 10, 0, 0, (1,))))
    with pytest.raises(ManifestError, match="overlaps"):
        decode_digests(encode_digests(two), "x")
    outside = FileDigests((ItemDigests(0, 10, 8, 8, (1,)),))
    with pytest.raises(ManifestError, match="overlaps"):
        decode_digests(encode_digests(outside), "x")
    with pytest.raises(ManifestError, match="lacks digests"):
        decode_digests(encode_digests(FileDigests((ItemDigests(0, 10, 0, 0, ()),))), "x")
    with pytest.raises(ManifestError, match="belong to no item"):
        decode_digests(encode_digests(FileDigests((ItemDigests(0, 0, 0, 0, (1,)),))), "x")


def test_items_are_made_when_they_are_asked_for() -> None:
    """A sidecar of 2000 items is decoded, checked and indexed without a Python call for each."""
    items = tuple(ItemDigests(n * 100, 90, 10, 70, (n, n + 1, n + 2)) for n in range(2000))
    data = encode_digests(FileDigests(items))
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = decode_digests(data, "here").by_offset()
        length = len(found)
    finally:
        sys.setprofile(None)
    assert length == 2000
    assert calls < 50
    assert [tuple(found[item.offset].blocks) for item in items] == [item.blocks for item in items]
    assert found.get(17) is None
    assert 17 not in found


def test_decoded_digests_are_equal_to_what_was_encoded() -> None:
    """However they came about: items, equality, and items of no bytes next to their successors."""
    blocks = array("Q", [1])
    items = (
        ItemDigests(0, 0, 0, 0, array("Q")),
        ItemDigests(0, 10, 0, 0, blocks),
        ItemDigests(10, 0, 0, 0, array("Q")),
    )
    made = FileDigests(items)
    found = decode_digests(encode_digests(made), "here")
    assert found == made
    assert found.items == items
    assert dict(found.by_offset()) == dict(made.by_offset()) == {0: items[1]}


def test_numbers_that_no_file_has_are_refused() -> None:
    """Sums of them would not fit: an error and no overflow."""
    data = encode_digests(FileDigests((ItemDigests(1 << 63, 1 << 63, 0, 0, ()),)))
    with pytest.raises(ManifestError, match="more bytes than a file"):
        decode_digests(data, "x")
