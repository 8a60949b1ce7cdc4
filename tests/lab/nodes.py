"""Machines that do not see each other's disks, on this one: ``with Nodes(2) as nodes:``.

    nodes[0].run(["hostname"])              "node0": a name of its own, and an address, 10.78.0.1
    /scratch                                a disk of its own, at the same path everywhere
    /shared                                 one directory that all of them see
    nodes.torchrun(script, args, ...)       the real torchrun over all of them: a ``Job`` (tests/lab/job.py)

    nodes[1].kill()        every process of it, at once; no goodbye is sent
    nodes[1].boot()        the same machine again, with what its disk had
    nodes[1].replace()     an empty one takes its place
    nodes[1].unplug()      its network; plug() heals it

A node is a set of namespaces: mount, uts, ipc, pid, and net with a veth to a bridge that lives in a
namespace too, so that labs run side by side and nothing of them is ever seen from outside. What is
mounted where is a table; the default is the one above::

    Nodes(2, mounts={"/data": (Shared("a"), Shared("b"))})       two directories behind one path
    Nodes(3, mounts={"/data": (Shared(), Shared(), Private())})  shared for some, private for others
    Nodes(2, hostnames=("trainer", "trainer"))                   containers
    Nodes(2, network=False)                                      all on the host's loopback

All of it ends with the process that started it, however that ends (tests/lab/keeper.py).
``UnavailableError``: not root, or the kernel lacks a part. ``make lab-nodes`` is for a person.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.lab.job import Job
from tests.lab.node import Ground, Mount, Node, Private, Shared, wait_ready
from tests.lab.process import Crew, LabError, UnavailableError, need

__all__ = ["Node", "Nodes", "Private", "Shared"]

SCRATCH, SHARED = "/scratch", "/shared"
Mounts = Mapping[str, Mount | Sequence[Mount]]
DEFAULT: Final[Mapping[str, Mount]] = {SCRATCH: Private(), SHARED: Shared()}


class Nodes:
    """``count`` machines; a sequence of ``Node``, and a context manager. One thread."""

    def __init__(
        self,
        count: int,
        *,
        hostnames: Sequence[str] | None = None,
        mounts: Mounts | None = None,
        network: bool = True,
        fresh_proc: bool = True,
    ) -> None:
        """mounts: on top of /scratch and /shared, a ``Mount`` for all nodes or one for each.
        hostnames: one for each; node0, node1, ... by default. network=False: the host's. fresh_proc:
        False leaves the host's /proc there, as ``unshare --pid`` alone does.
        """
        self._names = list(hostnames or (f"node{number}" for number in range(count)))
        self._table = {**DEFAULT, **(mounts or {})}
        self._network = network
        self._fresh_proc = fresh_proc
        self._stack = ExitStack()
        self._nodes: list[Node] = []

    def shared_dir(self, name: str = "shared") -> Path:
        """A shared directory as the host sees it."""
        return self._home / "shares" / name

    def torchrun(self, script: str | Path, *args: str, **options: Any) -> Job:
        """Start the script on every node; options are those of ``Job``. End it, or ``with`` it."""
        return Job(self._nodes, [str(script), *args], **options)

    def describe(self) -> str:
        """What a person pastes into a shell."""
        lines = [f"# {len(self)} nodes; {SCRATCH} is each one's own, {SHARED} is one for all"]
        for node in self:
            enter = shlex.join(node.prefix)
            lines.append(f"{node.name}() {{ {enter} ${{@:-bash}}; }}  # {node.address}")
        lines.append(f"# {SHARED} is {self.shared_dir()} here. Ctrl-C ends all of it.")
        return "\n".join(lines)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise UnavailableError("nodes are namespaces, and these need root")
        need("unshare", "nsenter", "setpriv", "ip", "mount")
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        crew = self._stack.enter_context(Crew("nodes"))
        self._home = crew.run_dir
        (self._home / "disks").mkdir()
        kinds = ["--mount", *(["--net"] if self._network else [])]
        # Holds the disks and the bridge: both outlive a node, and end with this process.
        script = "echo ready; trap '' CHLD; exec sleep infinity"
        held = ["unshare", *kinds, "--propagation", "private", "sh", "-c", script]
        crew.start("ground", held, grace_s=0)
        try:
            wait_ready(crew, "ground")
        except LabError as error:
            raise UnavailableError(f"no namespaces here: {error}") from error
        ground = Ground(crew.pids()[0], self._home)
        if self._network:
            try:
                ground.run("ip", "link", "add", "br0", "type", "bridge")
                ground.run("ip", "link", "set", "br0", "up")
            except LabError as error:
                raise UnavailableError(f"no bridge in this kernel: {error}") from error
        for number, hostname in enumerate(self._names):
            table = {at: _of(mount, number) for at, mount in self._table.items()}
            node = Node(ground, number, hostname, table, self._options())
            self._nodes.append(node)
            self._stack.callback(node.close)
        self._write_hosts()
        for node in self._nodes:
            node.begin()
        for node in self._nodes:
            node.await_ready()

    def _options(self) -> dict[str, bool]:
        return {"network": self._network, "fresh_proc": self._fresh_proc}

    def _write_hosts(self) -> None:
        """Each node resolves every hostname; its own to its own address, others may have it too."""
        for node in self._nodes:
            others = [n for n in self._nodes if n is not node]
            lines = ["127.0.0.1 localhost", f"{node.address} {node.hostname}"]
            lines += [f"{other.address} {other.hostname}" for other in others]
            node.hosts.write_text("\n".join(lines) + "\n")


def _of(mount: Mount | Sequence[Mount], number: int) -> Mount:
    return mount if isinstance(mount, Private | Shared) else mount[number]
