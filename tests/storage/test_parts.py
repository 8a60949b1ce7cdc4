"""How an object is cut: within every store's limits, up to what they say an object may have."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptfs.errors import UnsupportedError
from ckptfs.storage.clients.base import Limits
from ckptfs.storage.multipart import PartSizes, plan_parts

S3 = Limits()
AZURE = Limits(
    min_part_bytes=1,
    max_part_bytes=4000 << 20,
    max_parts=50_000,
    max_object_bytes=50_000 * (4000 << 20),
    max_single_put_bytes=5000 << 20,
    part_multiple_bytes=1,
    delete_batch=256,
)
GCS = Limits(part_multiple_bytes=256 << 10, delete_batch=100)
EQUAL = Limits(equal_parts=True)
ALL = {"s3": S3, "azure": AZURE, "gcs": GCS, "equal": EQUAL}
ROOM = 128 << 20
TIB = 1 << 40

limits_of_all = st.sampled_from(sorted(ALL))


def cut_whole(plan: PartSizes, size_bytes: int) -> list[int]:
    """The parts of an object that turns out to have ``size_bytes``."""
    parts: list[int] = []
    offset = 0
    while offset < size_bytes:
        part = min(plan.part_bytes(len(parts), offset), size_bytes - offset)
        parts.append(part)
        offset += part
    return parts


def check(limits: Limits, parts: list[int]) -> None:
    """Whether a store of these limits takes these parts."""
    assert len(parts) <= limits.max_parts
    assert all(p <= limits.max_part_bytes for p in parts)
    for part in parts[:-1]:
        assert part >= limits.min_part_bytes
        assert part % limits.part_multiple_bytes == 0


@given(name=limits_of_all, size=st.integers(0, 5 * TIB), asked=st.none() | st.integers(1, 1 << 31))
def test_a_told_size_fits_up_to_5_tib(name: str, size: int, asked: int | None) -> None:
    """Any size up to the most, any part size asked for: equal parts that the store takes."""
    limits = ALL[name]
    plan = plan_parts(limits, size_hint_bytes=size, configured_bytes=asked, memory_bytes=ROOM)
    count = -(-size // plan.first_bytes)
    assert count <= limits.max_parts
    assert limits.min_part_bytes <= plan.first_bytes <= limits.max_part_bytes
    assert plan.first_bytes % limits.part_multiple_bytes == 0
    for number in {0, count // 2, max(0, count - 1)}:
        assert plan.part_bytes(number, min(number * plan.first_bytes, max(0, size - 1))) == (
            plan.first_bytes
        )


@given(name=limits_of_all, size=st.integers(0, 5 * TIB))
def test_a_part_is_held_where_that_is_possible(name: str, size: int) -> None:
    """Above the room only where fewer, larger parts are the only way; then no larger than needed."""
    limits = ALL[name]
    first = plan_parts(
        limits, size_hint_bytes=size, configured_bytes=None, memory_bytes=ROOM
    ).first_bytes
    if first > max(ROOM, 16 << 20):
        assert size > (first - limits.part_multiple_bytes) * (limits.max_parts * 9 // 10)


@pytest.mark.parametrize("name", ["s3", "gcs", "azure"])
def test_an_untold_size_reaches_5_tib(name: str) -> None:
    """Parts grow with the object, and all of them are legal, to the last byte of 5 TiB."""
    limits = ALL[name]
    plan = plan_parts(limits, size_hint_bytes=None, configured_bytes=None, memory_bytes=ROOM)
    parts = cut_whole(plan, 5 * TIB)
    check(limits, parts)
    assert parts[:1500] == [16 << 20] * 1500  # most files never see a larger part


@example(told=TIB, real=TIB + TIB // 2)
@given(told=st.integers(1, TIB), real=st.integers(1, 2 * TIB))
def test_a_wrong_hint_does_no_harm(told: int, real: int) -> None:
    """A file that is smaller or up to half as large again than announced goes through."""
    plan = plan_parts(S3, size_hint_bytes=told, configured_bytes=None, memory_bytes=ROOM)
    real = min(real, told + told // 2)
    check(S3, cut_whole(plan, real))


@given(size=st.integers(1, 100 << 30))
def test_usual_parts_are_16_mib(size: int) -> None:
    """Up to 100 GiB a part is 16 MiB: eight of them at once fit a hundredth of any node's memory."""
    plan = plan_parts(S3, size_hint_bytes=size, configured_bytes=None, memory_bytes=ROOM)
    assert plan.first_bytes == 16 << 20


def test_equal_parts_never_grow() -> None:
    """Where the store wants one size, it is one size, and the end of the parts is an error."""
    plan = plan_parts(EQUAL, size_hint_bytes=None, configured_bytes=None, memory_bytes=ROOM)
    assert plan.part_bytes(9_999, 9_999 * (16 << 20)) == 16 << 20
    with pytest.raises(UnsupportedError, match="10000 parts"):
        plan.part_bytes(10_000, 10_000 * (16 << 20))


def test_what_no_object_may_have_is_refused_at_once() -> None:
    """A size above the store's most is an error before the first byte is sent."""
    with pytest.raises(UnsupportedError, match="at most"):
        plan_parts(S3, size_hint_bytes=5 * TIB + 1, configured_bytes=None, memory_bytes=ROOM)
    plan = plan_parts(S3, size_hint_bytes=5 * TIB, configured_bytes=None, memory_bytes=ROOM)
    with pytest.raises(UnsupportedError):
        plan.part_bytes(9_500, 5 * TIB)
