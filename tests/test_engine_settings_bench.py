"""The benchmarks of single settings and of profiles still run, and set what they say. Most of it is for
make campaign-bench.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import profiled, windows
from benchmarks.telling import HERE

SMALLEST = 20_000_000  # three windows of 8 MiB


@pytest.mark.campaign
def test_every_setting_has_its_turn(tmp_path: Path) -> None:
    """A process of its own for each, a sample of each in every round, nothing left on the disk."""
    names = [windows.OURS, "1 MiB", "small pages"]
    result = windows.measured(SMALLEST, 2, names, tmp_path)
    assert sorted((one.engine, one.round) for one in result.samples) == sorted(
        (name, number) for name in names for number in (0, 1)
    )
    assert all(one.wall_s > 0 and one.cpu_s > 0 for one in result.samples)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "1 MiB",
        *(pytest.param(name, marks=pytest.mark.campaign) for name in ("1 thread", "buffered")),
    ],
)
def test_a_setting_is_what_its_name_says(name: str, tmp_path: Path) -> None:
    """Windows, threads and engine reach the file that is written."""
    code = (
        "import json; from benchmarks import windows; from ckptfs.storage.local.writers import WindowedFile\n"
        f"setting = windows.SETTINGS[{name!r}]\n"
        f"save = windows.saving(setting, {SMALLEST})\n"
        "found = []\n"
        "close = WindowedFile.close\n"
        "def seen(file):\n"
        "    found.append((file.window_bytes, file.concurrency, file.engine.value))\n"
        "    close(file)\n"
        "WindowedFile.close = seen\n"
        f"save({str(tmp_path / 'run' / 'step')!r})\n"
        "print(json.dumps(*found))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    window_bytes, threads, engine = json.loads(ended.stdout)
    wanted = windows.SETTINGS[name]
    assert wanted.window_bytes in (None, window_bytes)
    assert wanted.threads in (None, threads)
    assert (engine == "buffered") == (wanted.engine == "buffered")


@pytest.mark.campaign
@pytest.mark.parametrize("case", ["save", "s3-unsigned"])
def test_a_profile_is_a_page(case: str, tmp_path: Path) -> None:
    """What it costs, and where: at least the digests are found by name."""
    if (why := profiled.unavailable()) is not None:
        pytest.skip(why)
    page = tmp_path / "page.txt"
    command = [sys.executable, "-m", "benchmarks.profiled", case, "--size", "50MB", "--rounds", "1"]
    command += ["--dir", str(tmp_path), "--out", str(page)]
    subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, timeout=400)
    assert "CPU seconds per GB" in page.read_text()
    assert "_xxhash" in page.read_text()


def test_without_perf_nothing_is_profiled_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not installed, or it may not sample."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in str(profiled.unavailable())
    perf = tmp_path / "perf"
    perf.write_text("#!/bin/sh\necho no permission >&2\nexit 255\n")
    perf.chmod(0o755)
    assert "no permission" in str(profiled.unavailable())
    with pytest.raises(RuntimeError, match="it ended with 255"), profiled.Perf(tmp_path).sampling():
        pass
