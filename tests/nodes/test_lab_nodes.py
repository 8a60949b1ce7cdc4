"""The machines of the lab: each has its own, all see what is shared, and none outlives its caller."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.nodes import Nodes
from tests.lab.process import REPOSITORY, Crew, LabError
from tests.nodes.conftest import MakeNodes

SLEEP = ["sh", "-c", "echo $$; exec sleep infinity"]


def test_nodes_share_what_they_should_and_nothing_else(make_nodes: MakeNodes) -> None:
    """Names, addresses, processes, disks, shared memory and temporary files are each node's own."""
    nodes = make_nodes(2)
    for number, node in enumerate(nodes):
        assert node.run(["hostname"]).split() == [f"node{number}"]
        for place in ("/scratch", "/dev/shm", "/var/tmp", "/shared"):
            node.run(["touch", f"{place}/by-{number}"])
        assert node.run(["getent", "hosts", nodes[1 - number].hostname]).split()[0] == (
            nodes[1 - number].address
        )
        assert set(node.run(["sh", "-c", "echo /proc/[0-9]*"]).split()) <= {
            f"/proc/{pid}" for pid in range(1, 60)
        }, "it sees processes of the host"
    for number, node in enumerate(nodes):
        for place in ("/scratch", "/dev/shm", "/var/tmp"):
            assert node.run(["ls", place]).split() == [f"by-{number}"]
        assert node.run(["ls", "/shared"]).split() == ["by-0", "by-1"]
        assert node.run(["sh", "-c", f"ls {nodes.shared_dir().parents[1]}/disks"]) == ""
    assert not Path("/scratch/by-0").exists(), "the host sees a node's disk"
    with pytest.raises(LabError, match=r"(?s)node1.*exited 3: no such thing"):
        nodes[1].run(["sh", "-c", "echo no such thing; exit 3"])


def test_a_killed_node_comes_back_with_its_disk_and_a_replaced_one_without(
    make_nodes: MakeNodes,
) -> None:
    """``kill`` ends every process, also daemons; ``boot`` keeps the disk, ``replace`` does not; the
    other node and the network are as before.
    """
    nodes = make_nodes(2)
    nodes[0].run(["touch", "/scratch/zero"])
    nodes[1].run(["sh", "-c", "touch /scratch/one; setsid sleep infinity >/dev/null 2>&1 &"])
    with nodes[1].popen(SLEEP, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        nodes[1].kill()
        assert process.wait(20) != 0
    with pytest.raises(LabError, match="node1 is down"):
        nodes[1].run(["true"])
    for revive, disk in ((nodes[1].boot, ["one"]), (nodes[1].replace, [])):
        revive()
        assert nodes[1].run(["ls", "/scratch"]).split() == disk
        assert nodes[1].run(["hostname"]).split() == ["node1"]
        assert _reaches(nodes, 1, 0)
        assert _reaches(nodes, 0, 1)
    assert nodes[0].run(["ls", "/scratch"]).split() == ["zero"]


def test_an_unplugged_node_reaches_nobody(make_nodes: MakeNodes) -> None:
    """``unplug`` cuts a node off while it runs on, ``plug`` heals it."""
    nodes = make_nodes(2)
    nodes[1].unplug()
    assert not _reaches(nodes, 0, 1)
    assert nodes[1].run(["hostname"]).split() == ["node1"]
    nodes[1].plug()
    # A busy machine may take longer to answer than a try waits.
    assert any(_reaches(nodes, 0, 1) for _ in range(30))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_node_outlives_its_caller(make_nodes: MakeNodes, number: signal.Signals) -> None:
    """``python -m tests.lab nodes`` says how to enter a node; killed or interrupted, all of it goes:
    every process of the nodes, their directories, and no interface is left behind.
    """
    make_nodes(1)  # skips where there can be none
    before = _interfaces()
    caller = subprocess.Popen(
        [sys.executable, "-m", "tests.lab", "nodes"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    with caller:
        assert caller.stdout is not None
        told = [caller.stdout.readline() for _ in range(4)]
        enter = told[2].split("{ ")[1].split("$")[0].split()
        assert told[2].startswith("node1() ")
        home = next(word for word in told[3].split() if "ckptfs-lab" in word)
        inside = subprocess.Popen([*enter, *SLEEP], stdout=subprocess.PIPE)
        with inside:
            assert inside.stdout is not None
            inside.stdout.readline()
            caller.send_signal(number)
            caller.wait(20)
            assert select.select([inside.stdout], [], [], 240)[0], "a process of a node runs on"
            inside.wait(20)
    with Crew("watch") as crew:
        gone = Path(home).parents[1]
        crew.wait_for(lambda: not gone.exists(), f"{gone} is gone", timeout_s=240)
    assert _interfaces() == before


def _interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def _reaches(nodes: Nodes, one: int, other: int) -> bool:
    """Whether a connection from one node gets an answer of the other, be it a refusal."""
    script = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), timeout=1.0)\n"
        "except ConnectionRefusedError: print('answers')\n"
        "except OSError: print('silence')\n"
    )
    words = [sys.executable, "-I", "-S", "-c", script, nodes[other].address]
    return nodes[one].run(words).strip() == "answers"
