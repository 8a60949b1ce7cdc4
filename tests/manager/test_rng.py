"""RngState: every generator of the process, key by key, whatever is missing or different here."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptfs.dcp.leaves import check_leaf
from ckptfs.manager import rng
from ckptfs.manager.rng import RngState
from tests.manager.runs import Site


def draw() -> list[float]:
    """The next numbers of every generator; a second normal number comes out of numpy's store."""
    return [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()]  # noqa: NPY002


class Devices:
    """The module of an accelerator that is not there: what torch.cuda has, without the hardware."""

    def __init__(self, count: int, current: int, *, started: bool = True) -> None:
        self.states = {n: torch.tensor([n], dtype=torch.uint8) for n in range(count)}
        self.current = current
        self.started = started

    def device_count(self) -> int:
        """How many there are."""
        return len(self.states)

    def current_device(self) -> int:
        """The one in use; starts the accelerator."""
        self.started = True
        return self.current

    def is_initialized(self) -> bool:
        """Whether this process used one."""
        return self.started

    def get_rng_state(self, number: int) -> torch.Tensor:
        """The generator's state; starts the accelerator."""
        self.started = True
        return self.states[number]

    def set_rng_state(self, state: torch.Tensor, number: int) -> None:
        """Set it, now or when the accelerator starts."""
        self.states[number] = state


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> dict[str, Devices]:
    """The accelerators of this process; empty until a test puts one there."""
    found: dict[str, Devices] = {}
    monkeypatch.setattr(rng, "_accelerators", lambda: [*found.items()])
    return found


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    """python, numpy and torch, through a checkpoint, loaded without executing code."""
    site = Site(tmp_path)
    np.random.randn()  # noqa: NPY002 - leaves half of a pair behind
    site.save(1, lambda _: {"rng": RngState()})
    expected = draw()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert site.restore(lambda _: {"rng": RngState()}) is not None
    assert site.states[0]["rng"].skipped == ()
    assert draw() == expected
    assert check_leaf(RngState().state_dict()) is None


def test_objects_that_draw_while_they_load_do_not_matter(tmp_path: Path) -> None:
    """The generators are restored after everything else."""

    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _: dict[str, Any]) -> None:
            draw()

    site = Site(tmp_path)
    site.save(1, lambda _: {"a": RngState(), "b": Drawing()})
    expected = draw()
    site.restore(lambda _: {"a": RngState(), "b": Drawing()})
    assert draw() == expected


def test_missing_keys_are_skipped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """An old checkpoint without numpy's or an accelerator's state: the rest is restored, no KeyError."""
    state = RngState().state_dict()
    expected = random.random()
    bundle = RngState()
    with caplog.at_level(logging.WARNING):
        bundle.load_state_dict({"python": state["python"], "torch": b"broken", "tpu": 1})
    assert random.random() == expected
    torch_line, numpy_line, other = bundle.skipped
    assert torch_line.startswith("torch: TypeError")
    assert numpy_line == "numpy: not in the checkpoint"
    assert other == "tpu: saved, and there is none here"
    assert all(line in caplog.text for line in bundle.skipped)


def test_a_checkpoint_without_any_is_no_failure(tmp_path: Path) -> None:
    """A state saved before it had an RngState: everything else is restored, and skipped tells."""
    site = Site(tmp_path)
    site.save(1, lambda _: {"n": 5})
    assert site.restore(lambda _: {"n": 0, "deep": [{"rng": RngState()}]}) is not None
    assert site.states[0]["n"] == 5
    assert site.states[0]["deep"][0]["rng"].skipped == ("all: not in the checkpoint",)


@pytest.mark.parametrize(
    ("saved", "here", "restored", "told"),
    [
        ((2, 0), (2, 0), {0: 0, 1: 1}, []),
        ((4, 3), (4, 1), {0: 0, 1: 3, 2: 2, 3: 1}, []),
        ((1, 0), (2, 1), {0: 10, 1: 0}, ["gpu:0: not among the 1 devices that were saved"]),
        ((4, 2), (2, 0), {0: 2, 1: 1}, ["gpu:0, gpu:3: saved, and there are 2 devices here"]),
    ],
)
def test_devices_change_in_number_and_place(
    accelerators: dict[str, Devices],
    saved: tuple[int, int],
    here: tuple[int, int],
    restored: dict[int, int],
    told: list[str],
) -> None:
    """The current device's state comes to what is current now, others by number; the rest is told."""
    accelerators["gpu"] = Devices(*saved)
    state = RngState().state_dict()
    accelerators["gpu"] = now = Devices(*here)
    for n in now.states:
        now.states[n] = torch.tensor([10 + n], dtype=torch.uint8)
    bundle = RngState()
    bundle.load_state_dict(state)
    assert {n: s.item() for n, s in now.states.items()} == restored
    assert [*bundle.skipped] == told


def test_an_accelerator_is_never_started(accelerators: dict[str, Devices]) -> None:
    """A process that did not use its devices gets no context on them: not by saving, not by restoring."""
    accelerators["gpu"] = Devices(2, 1)
    state = RngState().state_dict()
    accelerators["gpu"] = idle = Devices(2, 1, started=False)
    assert "gpu" not in RngState().state_dict()
    idle.states = {0: torch.zeros(1), 1: torch.zeros(1)}
    RngState().load_state_dict(state)
    assert not idle.started
    assert {n: s.item() for n, s in idle.states.items()} == {0: 0, 1: 1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_goes_on_where_it_was() -> None:
    """The same numbers come out of a CUDA generator again."""
    torch.rand(3, device="cuda")
    state = RngState().state_dict()
    expected = torch.rand(5, device="cuda").cpu()
    torch.rand(7, device="cuda")
    bundle = RngState()
    bundle.load_state_dict(state)
    assert torch.equal(torch.rand(5, device="cuda").cpu(), expected)
    assert bundle.skipped == ()
