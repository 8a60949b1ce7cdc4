"""State on an accelerator: saved, staged and loaded there, bit by bit, at no cost in its memory.

Every test runs on the CPU everywhere, so that it cannot rot, and on CUDA where there is one: ``-m gpu``
chooses those. What only a device can show, pinned buffers and its own memory, is asked of a device only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.dcp.staging.buffers import HostBuffers
from ckptfs.dcp.staging.staging import copy_into, pack

HAS_CUDA = torch.cuda.is_available()
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device here"),
]
MIB = 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the state is."""
    return str(request.param)


def made(device: str) -> dict[str, torch.Tensor]:
    """Small and large, of several windows, in any order in memory, some of it shared, some of it empty."""
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(1537, 2049, generator=generator)
    state = {f"of {dtype}": (random[:9, :7] > 0).to(dtype) for dtype in DTYPES}
    state |= {
        "large": random,
        "turned": random.t(),
        "stepped": random[::3, 1::2],
        "empty": random[:0],
    }
    state = {key: value.to(device) for key, value in state.items()}
    state["turned"] = state["large"].t()
    state["tied"] = state["large"]
    state["scalar"] = torch.tensor(3.5, device=device)
    return state


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors without the values, contiguous."""
    return {key: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for key, t in state.items()}


def bits(state: Mapping[Any, torch.Tensor]) -> dict[Any, bytes]:
    """Of every tensor."""
    return {
        key: value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for key, value in state.items()
    }


def loaded(uri: str, state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What a load brings to the same device."""
    target = blank(state)
    ckptfs.load(target, uri)
    assert {t.device.type for t in target.values()} == {t.device.type for t in state.values()}
    return bits(target)


@pytest.mark.parametrize("engine", ["auto", "direct", "buffered"])
def test_every_engine_saves_what_lies_there(device: str, engine: Any, tmp_path: Path) -> None:
    """From the device into a file and back to it."""
    state = made(device)
    ckptfs.save(state, tmp_path / "run" / "step", engine=engine)
    assert loaded(str(tmp_path / "run" / "step"), state) == bits(state)


def test_an_object_store_gets_it_in_order(device: str) -> None:
    """The engine of streams, which copies one tensor while the one before is sent."""
    state = made(device)
    ckptfs.save(state, "memory://device/run/step")
    assert loaded("memory://device/run/step", state) == bits(state)


def test_what_was_queued_before_a_save_is_in_it(device: str, tmp_path: Path) -> None:
    """A device works behind the program: the save waits for what was asked of it, in both ways to save."""
    factor = torch.randn(1024, 1024, device=device) / 32
    value = torch.eye(1024, device=device)
    for _ in range(200 if device == "cuda" else 3):
        value = value @ factor
    state = {"value": value, "more": value + 1}
    ckptfs.save(state, tmp_path / "run" / "now")
    with ckptfs.prepare_run(tmp_path / "later") as run:
        value = value @ factor
        later = {"value": value}
        ckptfs.async_save(later, tmp_path / "later" / "step_1", step=1, run=run).result()
    assert loaded(str(tmp_path / "run" / "now"), state) == bits(state)
    assert loaded(str(tmp_path / "later" / "step_1"), later) == bits(later)


def test_tensors_may_change_once_async_save_is_back(device: str, tmp_path: Path) -> None:
    """What is saved is what was there at the call, whatever is queued right after it."""
    with ckptfs.prepare_run(tmp_path / "run") as run:
        for step in (1, 2):  # the second time in buffers that the first has left
            state = made(device)
            wanted = bits(state)
            uri = tmp_path / "run" / f"step_{step}"
            pending = ckptfs.async_save(state, uri, step=step, run=run)
            for tensor in state.values():
                tensor.copy_(torch.zeros((), dtype=tensor.dtype))
            pending.result()
            assert loaded(str(uri), state) == wanted


def test_state_beyond_the_bound_of_host_memory_is_saved_too(device: str, tmp_path: Path) -> None:
    """Copied in waves, each while the one before is written."""
    state = {f"layer.{n}": torch.randn(MIB // 2, device=device) for n in range(12)}
    wanted = bits(state)
    uri = tmp_path / "run" / "step_1"
    with ckptfs.prepare_run(tmp_path / "run") as run:
        ckptfs.async_save(state, uri, step=1, run=run, host_memory_bytes=8 * MIB).result()
    assert loaded(str(uri), state) == wanted


def test_buffers_for_a_device_are_page_locked(device: str) -> None:
    """Else a copy would go through a buffer of the driver's, at half the speed, and would not be awaited."""
    state = made(device)
    packing = pack(state)
    assert packing.on_device == (device == "cuda")
    lease = HostBuffers(packing.size_bytes).lease(packing.size_bytes, pinned=packing.on_device)
    assert lease.is_pinned == (device == "cuda")
    assert lease.memory.is_pinned() == (device == "cuda")
    copies = copy_into(lease.memory, packing, is_pinned=lease.is_pinned)
    assert bits(copies) == bits(state)
    assert {copy.device.type for copy in copies.values()} == {"cpu"}


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_a_save_takes_no_memory_of_the_device(device: str, way: str, tmp_path: Path) -> None:
    """A job that fills its device with contiguous tensors can save."""
    state = {"large": torch.randn(16 * MIB, device=device), "small": torch.ones(3, device=device)}
    wanted = bits(state)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated() if HAS_CUDA else 0
    with ckptfs.prepare_run(tmp_path / "run") as run:
        uri = tmp_path / "run" / "step_1"
        if way == "save":
            ckptfs.save(state, uri, step=1, run=run)
        else:
            ckptfs.async_save(state, uri, step=1, run=run).result()
    assert (torch.cuda.max_memory_allocated() if HAS_CUDA else 0) == before
    assert loaded(str(uri), state) == wanted
