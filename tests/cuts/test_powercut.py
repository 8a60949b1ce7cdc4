"""The laboratory's disk: what it loses at a cut, what it never loses, and that nothing of it stays."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cuts.conftest import MakeDisk
from tests.cuts.test_cuts import FILESYSTEMS
from tests.lab.cut import main
from tests.lab.powercut import Filesystem, Lose, sweep
from tests.lab.process import REPOSITORY, run

_HOLDER = """
import sys
from tests.lab import PowerCut
with PowerCut("ext4") as disk:
    print(disk.run_dir, flush=True)
    sys.stdin.read()
"""


def write(path: Path, data: bytes, *, sync: bool) -> None:
    """A new file, and its name, flushed to the disk or not."""
    with path.open("xb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if sync:
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


@pytest.mark.parametrize("fs", FILESYSTEMS)
def test_a_cut_leaves_what_was_flushed_alone(fs: Filesystem, make_disk: MakeDisk) -> None:
    """Whatever the disk loses, a file that was fsynced is there, and one that was not is not; the disk
    itself works on, and is cut again.
    """
    disk = make_disk(fs)
    for number, lose in enumerate(Lose):
        flushed, not_flushed = f"flushed-{number}", f"not-{number}"
        write(disk.directory / flushed, b"x" * 100_000, sync=True)
        write(disk.directory / not_flushed, b"y" * 100_000, sync=False)
        with disk.after(disk.cut(lose=lose)) as found:
            assert (found / flushed).read_bytes() == b"x" * 100_000
            assert not (found / not_flushed).exists()
        assert (disk.directory / not_flushed).read_bytes() == b"y" * 100_000


def write_back(fd: int) -> None:
    """sync_file_range(2), and wait: the device has the bytes, and was not asked to flush them."""
    wait_before_write_wait_after = 7
    call = ctypes.CDLL(None, use_errno=True).sync_file_range
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    assert call(fd, 0, 0, wait_before_write_wait_after) == 0, os.strerror(ctypes.get_errno())


def test_the_disk_has_a_cache_that_a_cut_empties(make_disk: MakeDisk) -> None:
    """What the device got and got no order to flush survives where nothing of it is lost, and does not
    where everything is; in between it depends on the seed.
    """
    disk, size = make_disk("ext4"), 1 << 20
    write(disk.directory / "file", b"a" * size, sync=True)
    with (disk.directory / "file").open("r+b", buffering=0) as file:
        for start in range(0, size, 1 << 16):
            file.seek(start)
            file.write(b"b" * (1 << 16))
            write_back(file.fileno())
        cuts = [disk.cut(lose=Lose.NOTHING), disk.cut(lose=Lose.EVERYTHING)]
        cuts += [disk.cut(lose=Lose.SOMETHING, seed=seed) for seed in (1, 1, 2)]
    found = []
    for cut in cuts:
        with disk.after(cut) as directory:
            found.append((directory / "file").read_bytes())
    kept, lost, some, same, others = found
    assert kept == b"b" * size
    assert lost == b"a" * size
    assert {*some} == {*b"ab"}
    assert some == same != others


def test_a_cut_comes_before_the_operation_that_was_asked_for(make_disk: MakeDisk) -> None:
    """Armed before a file is fsynced, the cut is made in the middle of that fsync: the disk has not
    seen the end of it, and the file is not there.
    """
    disk = make_disk("ext4")
    armed = disk.arm(after=1, lose=Lose.EVERYTHING)
    write(disk.directory / "file", b"x", sync=True)
    after_ns = time.monotonic_ns()
    cut = armed.made()
    assert cut.at_ns < after_ns
    with disk.after(cut) as found:
        assert not (found / "file").exists()


def test_a_person_cuts_from_a_shell(
    make_disk: MakeDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``make lab-powercut`` says works: the command mounts what is left next to the disk."""
    disk = make_disk("xfs")
    write(disk.directory / "file", b"x", sync=True)
    assert f"tests.lab.cut {disk.run_dir}" in disk.describe()
    assert main([str(disk.run_dir), "everything"]) == 0
    found = Path(capsys.readouterr().out.strip().rpartition(" ")[2])
    assert found.parent == disk.run_dir
    assert (found / "file").read_bytes() == b"x"


def held() -> tuple[subprocess.Popen[str], Path]:
    """A process with a disk, and where that is."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def stays(run_dir: Path) -> bool:
    """Whether anything of a disk is still there."""
    mounts = Path("/proc/self/mountinfo").read_text()
    return run_dir.exists() or f"{run_dir}/" in mounts


def wait_until_gone(run_dir: Path) -> None:
    """Return when nothing of a disk is there; fail after a minute."""
    deadline = time.monotonic() + 240
    while stays(run_dir):
        assert time.monotonic() < deadline, f"{run_dir} stays"
        time.sleep(0.05)  # between two looks


def test_kill_9_of_whoever_held_a_disk_leaves_nothing(make_disk: MakeDisk) -> None:
    """No mount, no loop device, no file."""
    make_disk("ext4")  # skips where there can be none
    process, run_dir = held()
    assert stays(run_dir)
    process.kill()
    process.communicate()
    wait_until_gone(run_dir)
    assert str(run_dir) not in run(["losetup", "--list"])


def test_what_was_killed_with_its_keeper_is_swept_away(make_disk: MakeDisk) -> None:
    """The next disk unmounts and removes what no process was left to remove; not what lives."""
    living = make_disk("ext4")
    process, run_dir = held()
    keepers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for keeper in keepers:
        os.kill(int(keeper), signal.SIGSTOP)  # it will not clean up
    process.kill()
    process.communicate()
    for keeper in keepers:
        os.kill(int(keeper), signal.SIGKILL)
    deadline = time.monotonic() + 240
    while stays(run_dir):
        assert time.monotonic() < deadline, f"{run_dir} stays"
        sweep()
    assert living.operations() > 0
    assert os.path.ismount(living.directory)
