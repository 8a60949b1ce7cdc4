"""Who a process is, according to a group, a launcher or nothing."""

from __future__ import annotations

import os
import sys

import pytest

from ckptfs.control.control import default_timeout_s, open_control
from ckptfs.control.world import Life, World, job_id_from, node_id
from ckptfs.errors import StateError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CKPTFS_NODE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE", "CKPTFS_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)


def test_alone_is_rank_zero_of_one() -> None:
    """Without group and launcher a process is a world of its own."""
    world = World.detect()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.pid == os.getpid()
    assert not world.has_group


def test_launchers_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables make a world before any group exists."""
    for name, value in zip(LAUNCHER, ("5", "8", "1", "4", "left"), strict=True):
        monkeypatch.setenv(name, value)
    world = World.detect()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert world.node.endswith("/left")
    assert world.place.startswith("left/")


@pytest.mark.parametrize(("rank", "size"), [("8", "8"), ("-1", "8"), ("x", "8")])
def test_nonsense_of_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    """A rank outside the world is an error, not a guess."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(StateError, match="contradict each other"):
        World.detect()


def test_several_processes_that_nothing_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE > 1 with neither a group nor an agent's store: the error names the fix."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StateError, match="init_process_group"):
        open_control()


def test_node_is_boot_and_mount_namespace_and_never_the_hostname(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 22: two containers with one hostname are two nodes, renaming a host makes no new one."""
    before = node_id()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert node_id() == before
    assert os.readlink("/proc/self/ns/mnt") in before
    monkeypatch.setenv("CKPTFS_NODE", "b")
    assert node_id() == f"{before}/b"


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": ""}, None),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "torchrun:abc"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "abc"}, "slurm:7"),
        ({"SLURM_JOB_ID": "7", "CKPTFS_JOB_ID": "mine"}, "job:mine"),
    ],
)
def test_job_is_what_names_one_submission(environment: dict[str, str], job: str | None) -> None:
    """torchrun's default run id names no job: every job has it."""
    assert job_id_from(environment) == job


def test_the_child_of_a_fork_is_not_taken_for_its_parent() -> None:
    """What a process knows of itself is looked up once, and by each process for itself."""
    import subprocess

    code = (
        "import os; from ckptfs.control.world import Life\n"
        "before = Life.of_this_process()\n"
        "assert before is Life.of_this_process()\n"
        "child = os.fork()\n"
        "if not child: os._exit(Life.of_this_process().pid == before.pid)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0"
    )
    if Life.of_this_process() is None:
        pytest.skip("there is no /proc")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_detecting_imports_no_torch() -> None:
    """A tool that looks at checkpoints pays nothing for torch."""
    import subprocess

    code = (
        "import sys; from ckptfs.control.control import open_control; open_control(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("text", ["0", "-3", "soon"])
def test_timeout_from_the_environment_is_checked(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """CKPTFS_TIMEOUT_S that is no positive number is an error at once, not a hang later."""
    assert default_timeout_s() == 600.0
    monkeypatch.setenv("CKPTFS_TIMEOUT_S", text)
    with pytest.raises(StateError, match="CKPTFS_TIMEOUT_S"):
        default_timeout_s()
