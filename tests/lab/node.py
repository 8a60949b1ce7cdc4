"""One machine of ``Nodes``: how something is run on it, and what may happen to it.

    Ground    what all machines of one laboratory stand on: their disks, the bridge between them
    Node      the namespaces of one machine, life after life; its first process is node_init.py

A disk is a tmpfs that the ground holds and the node only binds: it outlives the node's processes, as a
disk does. ``kill`` pulls the cable first: a machine that loses its power says no goodbye to anybody.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.process import Crew, LabError, run

NETWORK = "10.78.0"
_INIT = Path(__file__).with_name("node_init.py")
START_S = 240.0  # of what takes a tenth of a second on an idle machine


@dataclass(frozen=True)
class Private:
    """A disk of one node's own: empty at first, kept by ``boot``, gone with ``replace``."""


@dataclass(frozen=True)
class Shared:
    """A directory for every node that has this name in its table."""

    name: str = "shared"


Mount = Private | Shared


@dataclass(frozen=True)
class Ground:
    """What the nodes stand on: the process that holds their disks and the bridge, and a directory."""

    pid: int
    home: Path

    @property
    def prefix(self) -> list[str]:
        """Command words that run something there."""
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "--"]

    def run(self, *command: str) -> None:
        """Run a command there; LabError where it failed."""
        run([*self.prefix, *command], timeout_s=START_S)


class Node:
    """One machine. ``name``, ``hostname``, ``address`` and ``interface`` stay over its lives."""

    def __init__(
        self,
        ground: Ground,
        number: int,
        hostname: str,
        table: Mapping[str, Mount],
        options: Mapping[str, bool],
    ) -> None:
        self.name = f"node{number}"
        self.hostname = hostname
        self.address = f"{NETWORK}.{number + 1}" if options["network"] else "127.0.0.1"
        self.interface = "eth0" if options["network"] else "lo"
        self.hosts = ground.home / f"hosts-{number}"
        self._ground = ground
        self._port = f"port{number}"
        self._table = table
        self._options = options
        self._life = 0
        self._disk = 0
        self._crew: Crew | None = None
        self._pid = 0

    # -- using it

    @property
    def prefix(self) -> list[str]:
        """Command words that run something on the node; it ends when the caller's end of it does.

        TMPDIR: /tmp is the host's, where programs and their environments may be.
        """
        self._check_up()
        return [
            *("nsenter", "-t", str(self._pid), "-m", "-u", "-i", "-n", "-p", "--"),
            *("setpriv", "--pdeathsig", "KILL"),
            *("env", "TMPDIR=/var/tmp", f"GLOO_SOCKET_IFNAME={self.interface}"),
        ]

    def popen(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program there; env: on top of this process's. options: those of Popen."""
        words = [*self.prefix, *(str(word) for word in command)]
        return subprocess.Popen(words, env={**os.environ, **(env or {})}, **options)

    def start(
        self, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program there; its output goes to a file of the host."""
        with log.open("ab") as output:
            return self.popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """Run a program to its end; what it printed. LabError where it failed."""
        shown = shlex.join(str(word) for word in command)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.popen(command, env=env, text=True, **pipes) as process:
            try:
                told, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise LabError(f"{self.name}: {shown}: not done in {timeout_s:.0f} s") from error
        if process.returncode:
            raise LabError(f"{self.name}: {shown} exited {process.returncode}: {told}")
        return str(told)

    def path(self, inside: str) -> Path:
        """A path of the node as the host can open it, while the node is up."""
        self._check_up()
        return Path(f"/proc/{self._pid}/root{inside}")

    # -- what happens to it

    def kill(self) -> None:
        """The power goes: no process runs on, no packet leaves any more. Returns when all are gone."""
        self.unplug()
        self._end()

    def boot(self) -> None:
        """Come back after ``kill``, with the disks as they were. Returns when it is up."""
        self.begin()
        self.await_ready()

    def replace(self) -> None:
        """An empty machine of that name and address takes its place; killed first where it lives."""
        if self._crew is not None:
            self.kill()
        self._disk += 1
        self.boot()

    def clear(self) -> None:
        """SIGKILL to every process of the node; the node stays up."""
        with self.popen(["kill", "-KILL", "-1"], stderr=subprocess.DEVNULL) as process:
            process.wait(START_S)

    def next_pid(self, pid: int) -> None:
        """Let the next process that is made there have this number, or the first free one after it."""
        self.run(["sh", "-c", f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid"])

    def unplug(self) -> None:
        """No packet goes in or out until ``plug``."""
        self._check_up()
        if self._options["network"]:
            self._ground.run("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        """Undo ``unplug``."""
        self._ground.run("ip", "link", "set", self._port, "up")

    # -- its lives

    def begin(self) -> None:
        """Start its first process; ``await_ready`` is next."""
        if self._crew is not None:
            raise LabError(f"{self.name} is up")
        self._life += 1
        mounts = {at: self._source(at, mount) for at, mount in self._table.items()}
        self._crew = Crew(self.name)
        root = self._crew.run_dir / "root"
        root.mkdir()
        spec = self._crew.run_dir / "spec.json"
        told = {
            "hostname": self.hostname,
            "root": str(root),
            "hosts": str(self.hosts),
            "mounts": mounts,
            "hide": str(self._ground.home / "disks"),
            "fresh_proc": self._options["fresh_proc"],
        }
        spec.write_text(json.dumps(told))
        kinds = ["--mount", "--uts", "--ipc", "--pid", *(["--net"] if self._network else [])]
        words = ["unshare", *kinds, "--propagation", "private", "--fork", "--kill-child"]
        python = [sys.executable, "-I", "-S", str(_INIT), str(spec)]
        self._crew.start("init", [*self._ground.prefix, *words, *python], grace_s=0)

    def await_ready(self) -> None:
        """Return when programs can be started there."""
        assert self._crew is not None
        wait_ready(self._crew, "init")
        with open(f"/proc/{self._crew.pids()[0]}/task/{self._crew.pids()[0]}/children") as listing:
            self._pid = int(listing.read())
        if self._network:
            self._connect()

    def close(self) -> None:
        """End it, for good; harmless twice."""
        self._end()

    @property
    def _network(self) -> bool:
        return self._options["network"]

    def _connect(self) -> None:
        """A cable to the bridge. The one of an earlier life is gone with that one's namespace, soon."""
        old = f"ip link del {self._port} 2>/dev/null || true; "
        pair = f"ip link add {self._port} type veth peer name eth0 netns {self._pid}"
        attach = f"ip link set {self._port} master br0 up"
        self._ground.run("sh", "-ec", f"{old}{pair}; {attach}")
        address = f"ip addr add {self.address}/24 dev eth0; ip link set eth0 up; ip link set lo up"
        inside = ["nsenter", "-t", str(self._pid), "-n", "--", "sh", "-ec", address]
        run(inside, timeout_s=START_S)

    def _source(self, at: str, mount: Mount) -> str:
        """The directory that is mounted there; made where it is the first time."""
        home = self._ground.home
        if isinstance(mount, Shared):
            share = home / "shares" / mount.name
            share.mkdir(parents=True, exist_ok=True)
            return str(share)
        disk = str(home / "disks" / f"{self.name}-{self._disk}{at.replace('/', '-')}")
        make = f"mountpoint -q {disk} || {{ mkdir {disk}; mount -t tmpfs tmpfs {disk}; }}"
        self._ground.run("sh", "-ec", make)
        return disk

    def _check_up(self) -> None:
        if self._crew is None:
            raise LabError(f"{self.name} is down")

    def _end(self) -> None:
        if self._crew is None:
            return
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        crew, self._crew, self._pid = self._crew, None, 0
        crew.stop()


def wait_ready(crew: Crew, name: str) -> None:
    """Return when a program of the crew has printed "ready"."""
    log = crew.run_dir / f"{name}.log"
    crew.wait_for(lambda: "ready\n" in log.read_text(), f"{crew.name} is up", timeout_s=START_S)
