"""Where tensors are in data files: at multiples of 64, behind zeros that no reader needs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptfs.commit.digests import BlockCheck, FileDigests, decode_digests
from ckptfs.control.control import SoloControl
from ckptfs.dcp.write import file_layout
from ckptfs.dcp.write.rank_files import (
    Cancelled,
    FileTask,
    FileWritten,
    WriteEngine,
    WriteEngineName,
    engine_for,
    split_items,
    stream_engine,
)
from ckptfs.errors import IntegrityError
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri
from tests.dcp.fake_ranks import load, our_save
from tests.dcp.planned import plan_save

ENGINES = {"stream": stream_engine} | {name.value: engine_for(name) for name in WriteEngineName}
DATA = "save-1/__0_0.distcp"
DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def state_of(seed: int = 0) -> dict[str, Any]:
    """Objects of odd sizes, tensors of odd sizes and many kinds, one of several windows."""
    draw = random.Random(seed)
    state: dict[str, Any] = {f"o{n}": "x" * draw.randrange(200) for n in range(3)}
    for n in range(60):
        shape = [draw.randrange(40) for _ in range(draw.randrange(4))]
        state[f"w{n}"] = torch.ones(shape, dtype=draw.choice(DTYPES))
    return state | {"large": torch.arange(3_000_001.0), "last": torch.arange(5000.0)}


def written(engine: WriteEngine, place: Path, state: dict[str, Any]) -> FileWritten:
    """One file of a state on a disk."""
    planned = plan_save(state, SoloControl())
    [items] = split_items(planned.items, 1)
    storage = LocalStorage(Uri.parse(str(place)))
    return engine(storage, FileTask("f", items), planned.resolve, Cancelled())


def gaps(digests: FileDigests) -> list[tuple[int, int]]:
    """Where there is padding: after the first of each pair of items, before the second."""
    pairs = itertools.pairwise(digests.items)
    ends = ((one.offset + one.length, after.offset) for one, after in pairs)
    return [(begin, end) for begin, end in ends if begin < end]


@pytest.mark.parametrize("name", ENGINES)
def test_every_payload_lies_at_a_multiple_of_64(tmp_path: Path, name: str) -> None:
    """Of every tensor that has bytes, by every engine; between items are less than 64 zeros, and none
    before objects or at the end.
    """
    state = state_of()
    done = written(ENGINES[name], tmp_path, state)
    data = (tmp_path / "f").read_bytes()
    payloads = [item for item in done.digests.items if item.payload_length]
    tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
    assert len(payloads) == sum(tensor.numel() > 0 for tensor in tensors)
    assert {(item.offset + item.payload_offset) % 64 for item in payloads} == {0}
    found = gaps(done.digests)
    assert len(found) > len(payloads) // 2
    assert all(end - begin < 64 and not any(data[begin:end]) for begin, end in found)
    objects = done.digests.items[: len(state) - len(tensors)]
    assert sum(item.length for item in objects) == objects[-1].offset + objects[-1].length
    last = done.digests.items[-1]
    assert len(data) == done.size_bytes == last.offset + last.length


def test_what_torch_frames_itself_is_aligned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that cannot be asked for its frames: the stream's file, payloads at multiples of 64."""
    monkeypatch.setattr(file_layout, "frame", lambda dtype, sizes: None)
    done = written(engine_for(WriteEngineName.AUTO), tmp_path, state_of())
    payloads = [item for item in done.digests.items if item.payload_length]
    assert len(payloads) > 30
    assert {(item.offset + item.payload_offset) % 64 for item in payloads} == {0}


def test_the_blocks_of_a_file_leave_nothing_out(tmp_path: Path) -> None:
    """A reader that verifies or copies a whole file continues where it was, padding or not."""
    done = written(stream_engine, tmp_path, state_of())
    at = 0
    for start, stop, _ in done.digests.blocks():
        assert start == at
        at = stop
    assert at == done.size_bytes


@pytest.mark.parametrize("place", range(3))
def test_a_bit_of_padding_hinders_no_load(tmp_path: Path, place: int) -> None:
    """Ours and stock's load all the same; a pass over the whole file reports it."""
    tensors = {"a": torch.arange(7.0), "b": torch.ones(300_001), "c": torch.arange(3)}
    storage = open_storage(tmp_path)
    our_save(storage, 1, lambda _: {"o": "x"} | tensors)
    raw = (tmp_path / DATA).with_suffix(".xxh3").read_bytes()
    digests = decode_digests(raw, "x")
    begin, end = gaps(digests)[place]
    data = bytearray((tmp_path / DATA).read_bytes())

    def check() -> None:
        whole = BlockCheck(digests, IntegrityError)
        whole.update(memoryview(bytes(data)))
        whole.finish()

    check()
    data[(begin + end) // 2] ^= 1
    (tmp_path / DATA).write_bytes(data)

    def blank(_: int = 0) -> dict[str, Any]:
        return {"o": ""} | {key: torch.zeros_like(value) for key, value in tensors.items()}

    stock = blank()
    dcp.load(stock, checkpoint_id=tmp_path, no_dist=True)
    [ours] = load(storage, 1, blank)
    for found in (ours, stock):
        assert found["o"] == "x"
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    with pytest.raises(IntegrityError, match=f"bytes {begin} to {end} differ"):
        check()
