"""The tables of docs/scale.md, measured again: ``make scale``, or ``python -m tests.scale 8 64 512``.

For each kind of storage and number of ranks, 8 on a node: operations counted against their formulas,
bytes through the control plane, and how long the coordinator takes for the longest step. Local disks of
512 nodes take minutes: every node's .metadata is made by the coordinator.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.scale.formulas import FORMULAS, STOCK, formula
from tests.scale.simulation import Cost, Kind, Sizes, run_world
from tests.scale.stock import run_stock

SIZES = (8, 64, 512, 4096)


def main(ranks: list[int]) -> int:
    """Print everything; the number of counts that are not what their formula says."""
    wrong = 0
    for kind in Kind:
        for size in ranks:
            # On one node local disks and a shared one are the same, and the formulas begin at two.
            sizes = Sizes(size, min(8, size // 2))
            with tempfile.TemporaryDirectory() as directory:
                began = time.process_time()
                costs = run_world(sizes, kind, Path(directory))
                cpu_s = time.process_time() - began
            print(f"\n{kind.value}: {sizes.ranks} ranks on {sizes.nodes} nodes, {cpu_s:.0f} s CPU")
            for phase in FORMULAS[kind]:
                wrong += _print_phase(kind, phase, sizes, costs[phase])
    for size in ranks:
        with tempfile.TemporaryDirectory() as directory:
            stock = run_stock(Sizes(size), Path(directory))
        told = {op: line.at(Sizes(size)) for op, line in STOCK.items()}
        wrong += told != stock.calls
        print(f"\nstock DCP: {size} ranks {stock.calls}")
        print(f"  {'as told' if told == stock.calls else f'TOLD {told}'}; sends {stock.sent_bytes}")
    return wrong


def _print_phase(kind: Kind, phase: str, sizes: Sizes, cost: Cost) -> int:
    told = {op: line.at(sizes) for op, line in formula(kind, phase).items()}
    print(f"  {phase}: {cost.calls}{'' if told == cost.calls else f' TOLD {told}'}")
    if cost.steps:
        largest = max(cost.steps, key=lambda step: step.read_bytes(sizes.ranks))
        slowest = max(cost.steps, key=lambda step: step.decide_s)
        print(
            f"    {len(cost.steps)} steps, {cost.read_bytes(sizes.ranks):,} bytes read; of them"
            f" {largest.label!r} {largest.read_bytes(sizes.ranks):,} (said {largest.said_bytes:,},"
            f" answer {largest.verdict_bytes:,}, pieces {largest.pieces_bytes:,});"
            f" coordinator {sum(step.decide_s for step in cost.steps):.2f} s,"
            f" of them {slowest.label!r} {slowest.decide_s:.2f}"
        )
    return told != cost.calls


if __name__ == "__main__":
    sys.exit(main([int(arg) for arg in sys.argv[1:]] or list(SIZES)))
