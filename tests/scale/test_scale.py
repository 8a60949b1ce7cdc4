"""The cost of a world, counted: it is what the formulas of docs/scale.md say, to the last operation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.formulas import FORMULAS, formula
from tests.scale.simulation import Cost, Kind, Sizes, run_world

# Of the answer to "write", per rank: its counters, which every rank gets. Nothing else of what all
# ranks read may grow with their number, or what goes through the store grows with its square.
COUNTERS_BYTES = 110
ANSWER_BYTES = 2000

SMALL = [Sizes(8, 4), Sizes(27, 3), Sizes(64, 8)]
LARGE = [Sizes(512, 8), Sizes(4096, 8)]


def _compare(kind: Kind, sizes: Sizes, costs: dict[str, Cost]) -> None:
    told = {phase: costs[phase].calls for phase in FORMULAS[kind]}
    assert told == {
        phase: {op: line.at(sizes) for op, line in formula(kind, phase).items()}
        for phase in FORMULAS[kind]
    }


@pytest.mark.parametrize("sizes", SMALL, ids=lambda s: f"{s.ranks}on{s.nodes}")
@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name.lower())
def test_storage_is_asked_as_often_as_the_formulas_say(
    kind: Kind, sizes: Sizes, tmp_path: Path
) -> None:
    """Every phase of a run, every kind of storage: counts equal the formulas exactly."""
    _compare(kind, sizes, run_world(sizes, kind, tmp_path))


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", LARGE, ids=lambda s: f"{s.ranks}on{s.nodes}")
@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name.lower())
def test_thousands_of_ranks_ask_as_often_as_the_formulas_say(
    kind: Kind, sizes: Sizes, tmp_path: Path
) -> None:
    """The same at 512 and 4096 ranks."""
    _compare(kind, sizes, run_world(sizes, kind, tmp_path))


def test_more_tensors_cost_no_operation_more(tmp_path: Path) -> None:
    """What a state consists of changes bytes, not the number of operations."""
    sizes = Sizes(16, 4, tensors=20)
    _compare(Kind.SHARED, sizes, run_world(sizes, Kind.SHARED, tmp_path))


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.OBJECTS], ids=lambda k: k.name.lower())
def test_what_every_rank_reads_does_not_grow_with_their_number(kind: Kind, tmp_path: Path) -> None:
    """No answer of a step grows with the world, but the write counters of each rank in a save and the
    domain's list of ranks and nodes when a run is opened.
    """
    few = run_world(Sizes(16, 4), kind, tmp_path / "few")
    many = run_world(Sizes(128, 4), kind, tmp_path / "many")
    for phase in few.keys() - {"open"}:
        for small, large in zip(few[phase].steps, many[phase].steps, strict=True):
            assert small.label == large.label
            if small.label == "write":
                assert large.verdict_bytes - small.verdict_bytes < (128 - 16) * COUNTERS_BYTES
            else:
                assert abs(large.verdict_bytes - small.verdict_bytes) < 16  # digits of numbers
                assert large.verdict_bytes < ANSWER_BYTES


def test_on_local_disks_metadata_goes_to_the_owners_alone(tmp_path: Path) -> None:
    """Each domain has a .metadata of its own, as large as the checkpoint has items: its owner is sent
    it, and no owner reads those of the others.
    """
    costs = run_world(Sizes(32, 4, tensors=50), Kind.LOCAL, tmp_path)
    write = next(step for step in costs["save"].steps if step.label == "write")
    metadata = max(path.stat().st_size for path in tmp_path.rglob("step_2/.metadata"))
    assert write.verdict_bytes < 32 * COUNTERS_BYTES + ANSWER_BYTES < metadata
    owners = 8 - 1  # rank 0 has its own at hand
    assert owners * metadata < write.pieces_bytes < 2 * owners * metadata


def test_of_many_logs_a_plan_has_each_seal_once(tmp_path: Path) -> None:
    """What owners are sent when a run is claimed again grows with the number of logs, not its square."""
    reports = {}
    for nodes in (4, 16):
        costs = run_world(Sizes(nodes, 1), Kind.LOCAL, tmp_path / str(nodes))
        report = next(step for step in costs["resume"].steps if step.label == "report")
        reports[nodes] = report.pieces_bytes / (nodes - 1)
    assert reports[16] < 4 * reports[4]
