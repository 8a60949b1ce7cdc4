"""The bytes around a tensor's memory: the same that torch.save writes, and torch reads them."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.dcp.write import file_layout
from ckptfs.dcp.write.file_layout import Frame, frame, matches
from ckptfs.dcp.write.host_memory import memory_of

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def tensor_of(dtype: torch.dtype, sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of arbitrary bits, which for bool are 0 and 1."""
    length = math.prod(sizes) * dtype.itemsize
    made = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    flat = torch.randint(0, high, (length,), generator=made, dtype=torch.uint8)
    return flat.view(dtype).reshape(sizes)


def saved(tensor: torch.Tensor) -> bytes:
    """What torch.save writes of it."""
    sink = io.BytesIO()
    torch.save(tensor, sink)
    return sink.getvalue()


def made(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """The frame; of these dtypes there is one."""
    found = frame(dtype, sizes)
    assert found is not None
    return found


@given(dtype=st.sampled_from(DTYPES), sizes=SHAPES, seed=st.integers(0, 99))
def test_head_payload_and_tail_are_what_torch_load_reads(
    dtype: torch.dtype, sizes: tuple[int, ...], seed: int
) -> None:
    """torch.load(weights_only=True) gives the tensor back bit for bit, with its dtype and shape."""
    tensor = tensor_of(dtype, sizes, seed)
    around = made(dtype, sizes)
    blob = around.head + bytes(memory_of(tensor)) + around.tail
    read = torch.load(io.BytesIO(blob), weights_only=True)
    assert read.dtype is dtype
    assert read.shape == tensor.shape
    assert read.stride() == tensor.stride()
    assert bytes(memory_of(read)) == bytes(memory_of(tensor))
    assert len(blob) == around.length == len(saved(tensor))


@given(dtype=st.sampled_from(DTYPES), sizes=SHAPES)
def test_a_frame_is_torch_saves_own_with_crc_fields_of_zero(
    dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """With torch's CRCs switched off torch.save writes these very bytes."""
    tensor = tensor_of(dtype, sizes, 1)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        expected = saved(tensor)
    finally:
        torch.serialization.set_crc32_options(before)
    around = made(dtype, sizes)
    assert around.head + bytes(memory_of(tensor)) + around.tail == expected


@given(dtype=st.sampled_from(DTYPES), sizes=SHAPES.filter(math.prod))
def test_a_stock_blob_matches_and_its_payload_is_found(
    dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """In what torch.save writes by default, CRCs and all, the payload is where ``matches`` says."""
    tensor = tensor_of(dtype, sizes, 2)
    blob = saved(tensor)
    start = matches(blob, dtype, sizes)
    assert start is not None
    payload = bytes(memory_of(tensor))
    assert blob[start : start + len(payload)] == payload


@given(
    dtype=st.sampled_from(DTYPES),
    sizes=SHAPES.filter(math.prod),
    place=st.integers(0, 10_000),
    flip=st.integers(1, 255),
)
def test_any_other_head_does_not_match(
    dtype: torch.dtype, sizes: tuple[int, ...], place: int, flip: int
) -> None:
    """One changed byte of a stock head, outside the CRC fields, and it is not recognised."""
    around = made(dtype, sizes)
    blob = bytearray(saved(tensor_of(dtype, sizes, 3)))
    at = place % len(around.head)
    blob[at] ^= flip
    in_crc = any(start <= at < start + 4 for start in around.crc_offsets)
    assert matches(memoryview(blob), dtype, sizes) == (len(around.head) if in_crc else None)


def test_another_shape_and_a_short_head_do_not_match() -> None:
    """A blob of another shape or dtype, or the beginning of the right one, is not recognised."""
    blob = saved(torch.zeros(4, 5))
    assert matches(blob, torch.float32, (5, 4)) is None
    assert matches(blob, torch.int32, (4, 5)) is None
    assert matches(blob[:300], torch.float32, (4, 5)) is None


def test_a_frame_of_a_huge_tensor_touches_no_memory() -> None:
    """The frame of 32 GiB is made on a machine that has less, and its payload is counted right."""
    around = made(torch.float32, (1 << 33,))
    assert around.payload_length == 32 << 30
    assert around.length == len(around.head) + (32 << 30) + len(around.tail)


def test_the_alignment_that_the_user_set_is_the_frames() -> None:
    """torch's setting for the alignment of storages changes what torch.save writes, and frames with it."""
    config = pytest.importorskip("torch.utils.serialization.config")
    tensor = tensor_of(torch.int16, (3, 7), 4)
    with config.patch("save.storage_alignment", 4096):
        around = made(torch.int16, (3, 7))
        blob = saved(tensor)
        assert len(around.head) % 4096 == 0
        assert matches(blob, torch.int16, (3, 7)) == len(around.head)
    assert made(torch.int16, (3, 7)) != around


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"])
@pytest.mark.filterwarnings(
    "ignore"
)  # torch warns of these: here that is an error, and no frame either
def test_there_is_no_frame_where_the_memory_is_not_all(name: str) -> None:
    """Quantised tensors have more to them than their memory: no frame, torch.save writes them."""
    assert frame(getattr(torch, name), (3,)) is None


def test_frames_from_many_threads_are_the_same_and_leave_settings_alone() -> None:
    """Threads that ask at once get equal frames; who saves at the same time gets its CRCs."""
    found: list[Frame | None] = []
    blobs: list[bytes] = []
    expected = saved(torch.ones(3))

    def ask(number: int) -> None:
        found.extend(frame(torch.float32, (number % 7, 11)) for _ in range(20))
        blobs.append(saved(torch.ones(3)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {made(torch.float32, (n, 11)) for n in range(7)}
    assert set(blobs) == {expected}


SIDES = st.sampled_from([0, 1, 2, 3, 5, 16, 17, 255, 256, 257, 300, 65_535, 65_536])


@given(
    dtype=st.sampled_from(DTYPES),
    shapes=st.lists(st.lists(SIDES, max_size=5).map(tuple), min_size=1, max_size=8),
)
def test_frames_that_are_filled_in_are_torchs_own(
    dtype: torch.dtype, shapes: list[tuple[int, ...]]
) -> None:
    """Whatever came before it, the frame of a shape is the one that torch makes, byte for byte."""
    for sizes in shapes:
        if math.prod(sizes) * dtype.itemsize < 1 << 40:
            assert frame(dtype, sizes) == file_layout._from_torch(dtype, sizes)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """No frame and no template is remembered from another test, or for one."""
    remembered = (file_layout._made, file_layout._layout)
    for cache in remembered:
        cache.cache_clear()
    yield
    for cache in remembered:
        cache.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_torch_is_not_asked_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand shapes of small matrices take a question or two for each layout, and no more."""
    made(torch.float32, (1,))  # the dtype is tried by now
    asked = []

    def count(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame | None:
        asked.append(sizes)
        return from_torch(dtype, sizes)

    from_torch = file_layout._from_torch
    monkeypatch.setattr(file_layout, "_from_torch", count)
    for rows in range(1, 101):
        for columns in range(1, 11):
            made(torch.float32, (rows, columns))
    layouts = file_layout._layout.cache_info().currsize
    assert layouts < len(asked) < 4 * layouts < 300, (layouts, len(asked))


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("blind", "found"),
    [
        ("_byte_counts", lambda *_: []),
        ("_pickled_ints", lambda _, numbers: [(200, "<B")] * len(numbers)),
    ],
    ids=["no-lengths", "wrong-ints"],
)
def test_a_torch_that_lays_out_otherwise_is_asked_each_time(
    blind: str, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a field of the template was not found, the second frame shows it, and no template is used."""
    monkeypatch.setattr(file_layout, blind, found)
    monkeypatch.setattr(file_layout, "_is_right", lambda *_: True)
    for columns in range(1, 200):
        for sizes in ((3, 16 * columns), (16 * columns, 3)):  # as many bytes, other numbers
            assert made(torch.float32, sizes) == file_layout._from_torch(torch.float32, sizes)
