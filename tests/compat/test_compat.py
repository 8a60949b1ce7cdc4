"""Each torch that is supported reads what ckptfs writes, and ckptfs reads what each writes."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptfs
from tests.compat.overlay import VERSIONS, Wheel, overlay_for
from tests.compat.stock import run_stock
from tests.formats.state import RANKS, blank, differences, state

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.compat

each_version = pytest.mark.parametrize("wheel", VERSIONS, ids=lambda wheel: wheel.version)


@each_version
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_stock_torch_reads_what_ckptfs_wrote(wheel: Wheel, ranks: int, tmp_path: Path) -> None:
    """With .ckptfs and ckptfs.json deleted, that version's own loader opens it on 1 and 2 ranks."""
    ckptfs.save(state(sharded=False), tmp_path / "run" / "step_1")
    step = tmp_path / "run" / "step_1"
    shutil.rmtree(step.parent / ".ckptfs")
    for manifest in step.rglob("ckptfs.json"):
        manifest.unlink()
    run_stock("load", step, ranks=ranks, overlay=overlay_for(wheel))


@each_version
def test_ckptfs_reads_what_stock_torch_wrote(wheel: Wheel, tmp_path: Path) -> None:
    """A checkpoint that two ranks of that version wrote just now loads bit for bit."""
    run_stock("save", tmp_path / "step_1", ranks=RANKS, overlay=overlay_for(wheel))
    wanted = state(sharded=False)
    loaded = blank(copy.deepcopy(wanted))
    ckptfs.load(loaded, tmp_path / "step_1")
    assert differences(loaded, wanted) == []


@each_version
def test_ckptfs_runs_on_that_torch(wheel: Wheel, tmp_path: Path) -> None:
    """API, writer and reader work on its DCP; the oldest and the installed torch read the result."""
    subprocess.run(
        [sys.executable, "-m", "tests.compat.ours", str(overlay_for(wheel)), str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=400,
    )
    for name in ("api", "dcp"):
        run_stock("load", tmp_path / name)
        run_stock("load", tmp_path / name, overlay=overlay_for(VERSIONS[0]))


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    """The pin is checked: with a wrong hash nothing is unpacked."""
    wrong = Wheel("2.6.0", "0" * 64, VERSIONS[0].platform)
    with pytest.raises(subprocess.CalledProcessError):
        overlay_for(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == []
