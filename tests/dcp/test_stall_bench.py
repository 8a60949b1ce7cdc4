"""The row ``stall`` still runs, and reckons as its page says."""

from __future__ import annotations

from pathlib import Path

from benchmarks import stall
from benchmarks.floors.claims import Verdict, findings_of
from tests.bench.made import made_result

ABOUT = ("date", "command", "machine", "versions", "settings", "targets")


def test_the_benchmark_runs_and_tells_every_measurement(tmp_path: Path) -> None:
    """A tiny state, without DCP's process: a row for each peer, the ratio of each round's pair."""
    peers = ("memcpy", "ckptfs", "ckptfs reserved")
    result = stall.measured(1 << 20, 2, within=tmp_path, peers=peers, steps=True)
    counted = [one.engine for one in result.samples]
    assert {name: counted.count(name) for name in counted} == dict.fromkeys(peers, 2)
    assert {(one.phase, one.size_bytes) for one in result.samples} == {("stall", 1 << 20)}
    assert [note.partition(":")[0] for note in result.notes] == [*peers]
    assert "a step meanwhile takes" not in result.notes[0]  # it is over when the copy is
    assert "a step meanwhile takes" in result.notes[1]
    copied, stock = findings_of("stall", result)
    assert copied.found is not None
    assert copied.found.beside == "memcpy"
    assert stock.verdict is Verdict.UNKNOWN
    assert list(tmp_path.iterdir()) == []


def test_the_floors_are_about_the_copy_and_the_better_of_the_others() -> None:
    """Ratios of one round: twice the copy is missed; a quarter of the faster of DCP's two ways is met.
    The faster is one way for all rounds, the one with the smaller median.
    """
    stalls = {
        "memcpy": [1.0, 10.0, 2.0],
        "ckptfs": [1.0, 30.0, 4.0],
        "dcp thread": [4.0, 300.0, 8.0],
        "dcp process": [2.0, 600.0, 100.0],
    }
    turns = {n: [{"stall_s": s, "done_s": s} for s in all_] for n, all_ in stalls.items()}
    first = {name: {"stall_s": 9.0, "done_s": 9.0} for name in stalls}
    made = made_result()
    about = {name: getattr(made, name) for name in ABOUT}
    result = stall.result_of(
        {"first": first, "rounds": turns}, size_bytes=1 << 30, tensors=1, about=about
    )
    found = [(one.found and one.found.value, one.verdict) for one in findings_of("stall", result)]
    assert found == [(2.0, Verdict.MISSED), (4.0, Verdict.FLOOR)]
    assert (
        result.notes[1]
        == "ckptfs: the first call 9.00 s, 2.2 times a later one, until it is durable 4.00 s"
    )
