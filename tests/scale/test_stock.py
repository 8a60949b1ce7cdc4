"""What stock torch does for the same save: the formulas that docs/scale.md compares ours with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.scale.formulas import STOCK
from tests.scale.simulation import Sizes
from tests.scale.stock import run_stock

RANK = Path(__file__).with_name("stock_rank.py")
_CALL = re.compile(r"(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)")


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_stock_asks_as_often_as_its_formula_says(ranks: int, tmp_path: Path) -> None:
    """Every rank makes the directory, asks whether it is one, and looks for a checkpoint in it."""
    cost = run_stock(Sizes(ranks), tmp_path)
    assert cost.calls == {op: line.at(Sizes(ranks)) for op, line in STOCK.items()}


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_real_ranks_of_stock_make_these_system_calls(ranks: int, tmp_path: Path) -> None:
    """The same counts from strace, over real processes with gloo."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    target = tmp_path / "step_1"
    started = [
        subprocess.Popen(
            [
                *[
                    "strace",
                    "-f",
                    "-y",
                    "-e",
                    "trace=%file,fsync",
                    "-o",
                    f"{tmp_path}/trace.{rank}",
                ],
                *[
                    sys.executable,
                    str(RANK),
                    str(rank),
                    str(ranks),
                    f"{tmp_path}/store",
                    str(target),
                ],
            ]
        )
        for rank in range(ranks)
    ]
    assert [process.wait(300) for process in started] == [0] * ranks
    counts: Counter[str] = Counter()
    for rank in range(ranks):
        counts += _counted((tmp_path / f"trace.{rank}").read_text(), str(target))
    assert dict(counts) == {op: line.at(Sizes(ranks)) for op, line in STOCK.items()}


def _counted(trace: str, target: str) -> Counter[str]:
    """System calls on names below ``target``; a look at a file through its own descriptor is none."""
    counts: Counter[str] = Counter()
    for line in trace.splitlines():
        found = _CALL.match(line)
        if found is None or target not in line or found[1] == "execve" or "AT_EMPTY_PATH" in line:
            continue
        call = found[1]
        if call == "openat":
            counts["create" if "O_CREAT" in line else "open"] += 1
        else:
            counts[{"newfstatat": "stat", "fsync": "sync"}.get(call, call)] += 1
    return counts
