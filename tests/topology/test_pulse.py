"""Silence is counted by the observer, deaths are distinguished from reused pids."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.control.heartbeat import LEFT, Pulses
from ckptfs.control.world import Life, is_gone


def test_silence_grows_until_the_beat_moves() -> None:
    """Only the rank with a stopped beat is silent."""
    pulses = Pulses([1, 2], longest_tick_s=4.0)
    for beat in range(6):
        pulses.tick(2.0, {1: str(beat), 2: "7"})
    assert pulses.silent(10.0) == {2: 10.0}
    pulses.tick(2.0, {1: "6", 2: "8"})
    assert pulses.silent(2.0) == {}


def test_rank_that_left_is_not_silent() -> None:
    """A goodbye is no silence, however long ago."""
    pulses = Pulses([1], longest_tick_s=4.0)
    for _ in range(10):
        pulses.tick(2.0, {1: LEFT})
    assert pulses.silent(1.0) == {}


def test_frozen_observer_accuses_nobody() -> None:
    """An hour in which the observer itself stood still is one tick."""
    pulses = Pulses([1], longest_tick_s=4.0)
    pulses.tick(2.0, {1: "1"})
    pulses.tick(3600.0, {1: "1"})
    assert pulses.silent(10.0) == {}


@given(st.lists(st.tuples(st.floats(0.01, 100), st.booleans()), max_size=50))
def test_silence_is_the_counted_time_since_the_last_beat(
    ticks: list[tuple[float, bool]],
) -> None:
    """For any history: the sum of the ticks after the last move, each at most the longest."""
    pulses, beat, expected = Pulses([1], longest_tick_s=4.0), 0, 0.0
    for elapsed_s, moved in ticks:
        beat += moved
        expected = 0.0 if moved else expected + min(elapsed_s, 4.0)
        pulses.tick(elapsed_s, {1: str(beat)} if beat else {})
    assert abs(pulses.silent(0.0)[1] - expected) < 1e-6


def test_life_ends_with_the_process_also_as_a_zombie() -> None:
    """Alive, then a zombie that was not waited for, then no pid at all."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    life = Life(child.pid, int(stat.rpartition(")")[2].split()[19]))
    assert not is_gone(life)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and left as a zombie
    assert is_gone(life)
    child.wait()
    assert is_gone(life)
    assert child.stdin
    child.stdin.close()


def test_reused_pid_is_another_life() -> None:
    """The same number with another start time is not the process that we knew."""
    life = Life.of_this_process()
    assert life is not None
    assert life.pid == os.getpid()
    assert not is_gone(life)
    assert is_gone(replace(life, start_ticks=life.start_ticks - 1))
