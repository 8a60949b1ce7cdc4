"""Engines that take part only where they are named: other ways of a kind, and other libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptfs.bench.engine_raw import BareFile, Way, bytes_of, takes_direct
from ckptfs.bench.engines import ON_REQUEST, Attempt, Cached, Chosen, Setting, choose
from ckptfs.bench.workloads import differences, make_blank, make_state
from ckptfs.errors import StateError
from ckptfs.uri import Uri
from tests.bench.test_engines import WORKLOAD, Solo, local_home, round_trip
from tests.lab.process import REPOSITORY


@pytest.mark.parametrize(
    ("name", "variant"),
    [("dcp", "t2"), ("dcp", "t4"), ("dcp", "fsspec"), ("raw", "direct"), ("raw", "buffered")],
)
def test_a_variant_brings_back_what_it_saved_under_its_own_name(
    name: str, variant: str, tmp_path: Path
) -> None:
    """What comes after a colon is another engine of the same kind, and called so in the result."""
    home = local_home(tmp_path)
    if variant == "direct" and not takes_direct(str(tmp_path)):
        pytest.skip("this filesystem takes no O_DIRECT")
    driver = round_trip(home, Chosen(name, variant))
    assert driver.about().name == f"{name}:{variant}"
    assert "fsynced" in driver.about().durable


@pytest.mark.parametrize("way", list(Way))
def test_a_bare_limit_moves_the_bytes_of_the_state(way: Way, tmp_path: Path) -> None:
    """Its file holds every tensor's bytes in order, and a warm load brings them into the tensors."""
    home = local_home(tmp_path)
    if way is Way.DIRECT and not takes_direct(str(tmp_path)):
        pytest.skip("this filesystem takes no O_DIRECT")
    driver = BareFile(Setting(home, Solo(), durable=True), way)
    state, target = make_state(WORKLOAD), make_blank(WORKLOAD)
    at = Attempt(home, "attempt")
    driver.save(state, at)
    expected = b"".join(bytes(bytes_of(tensor)) for tensor in state.values())
    assert (Path(at.path) / "rank_0").read_bytes() == expected
    driver.load(target, at, Cached.WARM)
    assert differences(state, target) == []


def test_many_windows_of_large_and_small_tensors_are_read_where_they_belong(
    tmp_path: Path,
) -> None:
    """Tensors that are cut, ones that share a read, more of them than one system call takes."""
    home = local_home(tmp_path)
    driver = BareFile(Setting(home, Solo(), durable=False), Way.BUFFERED)
    sizes = [9 << 20, *([3] * 1500), 5 << 20, 1, *([7] * 600)]
    state = {f"t{n}": torch.rand(size) for n, size in enumerate(sizes)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    at = Attempt(home, "attempt")
    driver.save(state, at)
    driver.load(target, at, Cached.WARM)
    assert differences(state, target) == []


def test_memory_from_the_start_holds_what_earlier_calls_left() -> None:
    """From the call, a buffer that stays is free the second time; from the start it never is.

    In a process of its own: what other tests left is given back at times of its own.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system tells no high-water mark")
    code = """
from ckptfs.bench.clock import Clock
from tests.bench.test_engines import Solo
held = []
clock = Clock(Solo(), memory_from="start")
clock.time(lambda: held.append(bytearray(b"x") * (64 << 20)))
print(clock.time(lambda: None).peak_memory_bytes)
print(Clock(Solo()).time(lambda: None).peak_memory_bytes)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    from_start, from_call = map(int, told.stdout.split())
    assert from_start > 48 << 20
    assert from_call < 16 << 20


def test_only_variants_that_there_are_can_be_asked_for(tmp_path: Path) -> None:
    """The error for a wrong word lists those that are right; on a bucket a variant takes no part."""
    place = Uri.parse(str(tmp_path))
    chosen, notes = choose(["dcp:t2", "raw:direct"], place)
    assert [one.label for one in chosen] == ["dcp:t2", "raw:direct"]
    assert notes == []
    with pytest.raises(StateError, match="dcp:t3") as raised:
        choose(["dcp:t3"], place)
    assert "dcp:t2" in str(raised.value.hint)
    chosen, notes = choose(["dcp:t2"], Uri.parse("s3://bucket/run"))
    assert chosen == []
    assert "not made for it" in notes[0]


@pytest.mark.parametrize("name", sorted(ON_REQUEST))
def test_a_peer_that_is_installed_brings_back_what_it_saved(name: str, tmp_path: Path) -> None:
    """Those that take part only where they are named; bit-exact as all others."""
    pytest.importorskip(ON_REQUEST[name].needs[0])
    assert round_trip(local_home(tmp_path), Chosen(name)).about().name == name
