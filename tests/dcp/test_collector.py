"""The collector is held off for our own computing alone, and what others do with it during a pause is kept."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.dcp.python_gc import gc_paused


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Whatever a test does, the next one finds the collector as it is usually."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()


def collections_of(work: Callable[[], Any]) -> int:
    """How often the collector ran by itself."""
    seen = []

    def note(phase: str, _: object) -> None:
        seen.append(phase)

    gc.collect()  # nothing is due when the work begins
    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return seen.count("start")


def many() -> list[list[int]]:
    """Objects enough for many collections."""
    return [[n] for n in range(50_000)]


def test_the_collector_rests_and_comes_back() -> None:
    """None runs inside, however deep; afterwards they run again, after an error too."""

    def nested() -> None:
        with gc_paused():
            many()
            with gc_paused():
                many()
            many()

    assert collections_of(nested) == 0
    assert collections_of(many) > 0
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert collections_of(many) > 0


def overlapping(first_leaves: Callable[[], None], both_left: Callable[[], None]) -> None:
    """Two threads pause; ``first_leaves`` runs when one has left, ``both_left`` when both have."""
    inside, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=other)
    try:
        with gc_paused():
            thread.start()
            assert inside.wait(60)
        first_leaves()
    finally:
        may_leave.set()
        thread.join()
    both_left()


def test_the_last_thread_to_leave_brings_it_back() -> None:
    """It was on before both: off while one is inside, on when none is."""

    def off() -> None:
        assert collections_of(many) == 0

    def on() -> None:
        assert collections_of(many) > 0

    overlapping(off, on)


def test_who_turns_it_off_meanwhile_finds_it_off() -> None:
    """A training loop that collects by hand from now on, while another thread plans."""

    def still_off() -> None:
        assert not gc.isenabled()

    overlapping(gc.disable, still_off)


def test_who_puts_it_back_meanwhile_finds_it_on() -> None:
    """Other code's own pause, begun and ended inside ours, does not leave it off forever."""
    with gc_paused():
        was_enabled = gc.isenabled()  # as timeit and training loops do
        gc.disable()
    if was_enabled:
        gc.enable()
    assert collections_of(many) > 0


@pytest.mark.parametrize("threshold", [0, 123])
def test_a_threshold_that_somebody_sets_stands(threshold: int) -> None:
    """Set before or during the pause, the last one's is there afterwards; 0 before means off for good."""
    with gc_paused():  # another one before, with a threshold that is over
        pass
    gc.set_threshold(threshold, 11, 12)
    with gc_paused():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == (threshold, 11, 12)
    with gc_paused():
        gc.set_threshold(55)
    assert gc.get_threshold()[0] == 55
    with gc_paused():
        gc.set_threshold(77)
        with gc_paused():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 77


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    """A worker of a data loader inherits no pause of a thread that it does not have."""
    program = (
        "import gc, os, warnings; warnings.simplefilter('ignore')\n"
        "from ckptfs.dcp.python_gc import gc_paused\n"
        "with gc_paused():\n"
        "    child = os.fork()\n"
        "    if not child: os._exit(0 if gc.get_threshold()[0] else 7)\n"
        "    _, status = os.waitpid(child, 0)\n"
        "    assert gc.get_threshold()[0] == 0\n"
        "raise SystemExit(os.waitstatus_to_exitcode(status))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Owner:
    """Stateful: notes whether the collector is on when it is asked."""

    def __init__(self) -> None:
        self.was_on: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        self.was_on.append(gc.get_threshold()[0] > 0)
        return {"w": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.was_on.append(gc.get_threshold()[0] > 0)


def test_the_users_code_runs_with_the_collector(tmp_path: Path) -> None:
    """state_dict() and load_state_dict() in a save, an asynchronous one and a load: never in a pause."""
    owner = Owner()
    ckptfs.save({"o": owner}, tmp_path / "step_1")
    ckptfs.async_save({"o": owner}, tmp_path / "step_2").result()
    ckptfs.load({"o": owner}, tmp_path / "step_1")
    assert owner.was_on == [True] * 4
