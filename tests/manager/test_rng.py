"""RngState: every generator of the process, key by key, whatever is missing or different here."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptfs.dcp.planning.leaves import check_leaf
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
    assert torch_line.startswith("torch: StateError")
    assert numpy_line == "numpy: not in the checkpoint"
    assert other == "tpu: saved, and there is none here"
    assert all(line in caplog.text for line in bundle.skipped)


def test_a_checkpoint_without_any_is_no_failure(tmp_path: Path) -> None:
    """A state saved before it had an RngState: everything else is restored, and skipped names it."""
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
    """The current device's state comes to what is current now, others by number; the rest is reported."""
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


# -- states that were not saved -----------------------------------------------------------------------


def _numpy_with(**changed: Any) -> dict[str, Any]:
    state = RngState().state_dict()["numpy"]
    inner = {**state["state"], **{k: v for k, v in changed.items() if k in state["state"]}}
    outer = {k: v for k, v in changed.items() if k not in inner}
    return {**state, "state": inner, **outer}


WRONG: dict[str, tuple[str, Any]] = {
    "a position behind the buffer": ("numpy", {"pos": 625}),
    "a position far away": ("numpy", {"pos": 10**9}),
    "a position before it": ("numpy", {"pos": -1}),
    "a position that is a tensor": ("numpy", {"pos": torch.tensor(3)}),
    "a position that is a number": ("numpy", {"pos": 3.0}),
    "a short key": ("numpy", {"key": torch.zeros(623, dtype=torch.int64)}),
    "a key in a plane": ("numpy", {"key": torch.zeros(1, 624, dtype=torch.int64)}),
    "a key of other numbers": ("numpy", {"key": torch.zeros(624)}),
    "a key of larger numbers": ("numpy", {"key": torch.full((624,), 2**32)}),
    "a key that is a list": ("numpy", {"key": [0] * 624}),
    "two normal numbers": ("numpy", {"has_gauss": 2}),
    "a normal number that is none": ("numpy", {"gauss": "1"}),
    "another generator": ("numpy", {"bit_generator": "PCG64"}),
    "something more": ("numpy", {"more": 1}),
    "a state that is none": ("numpy", {"state": 1}),
    "python without a state": ("python", ()),
    "python as a number": ("python", 1),
    "python with a word for gauss": ("python", (*random.getstate()[:2], "1")),
    "python with a position behind": ("python", (3, (*range(624), 625), None)),
    "torch of other numbers": ("torch", torch.zeros(5056)),
    "torch too short": ("torch", torch.zeros(16, dtype=torch.uint8)),
    "torch of zeros": ("torch", torch.zeros(5056, dtype=torch.uint8)),
    "torch as a list": ("torch", [0] * 5056),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_state_that_no_generator_saved_is_skipped(name: str) -> None:
    """It is named in skipped, and that generator draws on as it would have; the others are restored. A
    position out of range was believed, and numbers were drawn from the memory of the process.
    """
    which, wrong = WRONG[name]
    saved = RngState().state_dict()
    bad = {**saved, which: _numpy_with(**wrong) if which == "numpy" else wrong}
    expected = draw()
    RngState().load_state_dict(saved)
    state = RngState()
    state.load_state_dict(bad)
    assert [line.split(":")[0] for line in state.skipped] == [which]
    assert draw() == expected


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64", "PCG64DXSM", "MT19937"])
def test_numpy_draws_on_whichever_generator_it_has(kind: str) -> None:
    """The global functions may draw from any generator: what was saved of it is restored, half a number
    that it kept too; in a process that has another one it is skipped.
    """
    was = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(7))  # type: ignore[attr-defined]
        np.random.randint(9, dtype=np.int32)  # noqa: NPY002 - half of a number of 64 bits
        np.random.randn()  # noqa: NPY002
        saved = RngState().state_dict()
        assert check_leaf(saved) is None
        expected = [*draw(), *np.random.randint(99, size=4, dtype=np.int32)]  # noqa: NPY002
        state = RngState()
        state.load_state_dict(saved)
        assert state.skipped == ()
        assert [*draw(), *np.random.randint(99, size=4, dtype=np.int32)] == expected  # noqa: NPY002
        for field in ("buffer_pos", "has_uint32"):
            if field in saved["numpy"]:
                state.load_state_dict({**saved, "numpy": {**saved["numpy"], field: 5}})
                assert len(state.skipped) == 1
    finally:
        np.random.set_bit_generator(was)  # type: ignore[attr-defined]
    if kind != "MT19937":
        elsewhere = RngState()
        elsewhere.load_state_dict(saved)
        assert elsewhere.skipped[0].split(":")[0] == "numpy"
