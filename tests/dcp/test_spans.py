"""What is read in addition to what was asked for is bounded by the requests that it saves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.dcp.read.data_file import Cutting, Gatherer, ItemProgress, Request, Want

KIB = 1 << 10
_SIZES = st.integers(1, 300 * KIB)


@given(st.lists(st.tuples(st.one_of(st.integers(0, 70 * KIB), _SIZES), _SIZES), min_size=1))
def test_a_byte_that_nobody_asked_for_saves_a_request(asked: list[tuple[int, int]]) -> None:
    """Of (hole before it, its size): each request less costs at most one gap, and none begins or ends
    with bytes that were not asked for.
    """
    cutting = Cutting(8 << 20, small=256 * KIB, gap=64 * KIB, together=500)
    gatherer, requests = Gatherer(cutting), list[Request]()
    at = wanted = 0
    for hole, size in asked:
        start = at + hole
        at, wanted = start + size, wanted + size
        requests += gatherer.add(Want(start, at, ItemProgress(), "w", memoryview(bytearray(size))))
    requests += gatherer.flush()
    read = sum(request.stop - request.start for request in requests)
    assert sum(len(request.wants) for request in requests) == len(asked)
    assert read - wanted <= cutting.gap * (len(asked) - len(requests))
    for request in requests:
        assert (request.start, request.stop) == (request.wants[0].start, request.wants[-1].stop)
