"""A real NFS server and real NFS clients on one machine: three Linux kernels in user mode.

    with NfsLab("4.2") as lab:                       or "3"; root, no KVM; 10 s until both are mounted
        lab.a.call(os.listdir, "/nfs")               a function there, its value or exception here
        program = lab.b.start([...]); program.wait(30)
        lab.warm(); lab.b.fork(f, *args).result()    f in a process of its own that has torch already
        run = lab.fresh()                            "/nfs/t-1f2e...", made on the server's disk
        lab.server.call(os.listdir, lab.behind(run)) the same directory as the server's ext4 has it

    server  knfsd over ext4: /export, and /export/small of 48 MB to fill; its disk outlives it
    a, b    clients with default caching: the export at /nfs, a disk of their own at /scratch

Faults: ``lab.cut("b")`` and ``lab.heal("b")`` (the network), ``lab.without_server(b)``, ``machine.kill()`` (its kernel, at once) and
``machine.boot()``, ``lab.export(...)`` (read-only, root squash), ``node.mount(..., options="soft,...")``.
The host's files are read-only under all three, the interpreter that runs this and this repository too.
Functions are found by name there: keep them in a module that imports little.

The limits: one CPU per machine, clocks of 10 ms, no time that is worth a measurement.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from tests.lab.nfs_agent import Ended
from tests.lab.nfs_machine import Forked, Machine, Network, Program
from tests.lab.process import (
    HOME,
    REPOSITORY,
    Crew,
    LabError,
    UnavailableError,
    UnsuitableError,
    run,
)

__all__ = ["MOUNT", "Ended", "Forked", "Machine", "NfsLab", "Program", "Version"]

Version = Literal["4.2", "3"]

MOUNT = "/nfs"
_PARTS = HOME / "uml"  # unpacked by make lab-install
_WIDE_REGISTERS = "put_fp_registers"  # where a kernel of 6.1 dies on a CPU with AMX, before its first program runs
_ADDRESSES = {"server": "10.77.0.1", "a": "10.77.0.2", "b": "10.77.0.3"}
_CLIENT_MIB = 2500  # an upper bound: untouched pages cost nothing
_SERVER_MIB = 512
_DISK_BYTES, _SMALL_BYTES = 3 << 30, 48 << 20


class NfsLab:
    """One server and two clients; a context manager. Several may run at once.

    UnavailableError: this machine lacks root, a device or a package. UnsuitableError: its CPU has registers that user-mode
    Linux does not know. LabError: it did not come up.
    """

    def __init__(self, version: Version = "4.2") -> None:
        self.version = version
        _check_parts()
        self._crew = Crew(f"nfs{version}", in_memory=True)
        self._network: Network | None = None
        self._machines: dict[str, Machine] = {}

    @property
    def server(self) -> Machine:
        """The machine with the disk."""
        return self._machines["server"]

    @property
    def a(self) -> Machine:
        """The first client."""
        return self._machines["a"]

    @property
    def b(self) -> Machine:
        """The second client."""
        return self._machines["b"]

    @property
    def nodes(self) -> tuple[Machine, Machine]:
        """Both clients."""
        return self.a, self.b

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._crew.stop()
            if isinstance(error, LabError) and _WIDE_REGISTERS in str(error):
                raise UnsuitableError(
                    "user-mode Linux cannot run on this CPU: it has more registers (AMX) than its kernel saves"
                ) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines.values():
            machine.hang_up()
        self._crew.stop()

    # -- files ---------------------------------------------------------------------------

    def fresh(self, label: str = "t") -> str:
        """A directory that was not looked at yet, made on the server's own disk; its path on clients."""
        name = f"{label}-{uuid.uuid4().hex[:12]}"
        self.server.call(os.mkdir, f"/export/{name}")
        self.server.call(os.chmod, f"/export/{name}", 0o777)
        return f"{MOUNT}/{name}"

    @staticmethod
    def behind(path: str) -> str:
        """What a client's path below /nfs is on the server's own disk."""
        if not path.startswith(f"{MOUNT}/"):
            raise ValueError(f"not below {MOUNT}: {path}")
        return f"/export/{path.removeprefix(f'{MOUNT}/')}"

    def describe(self) -> str:
        """What a person pastes into a shell."""
        lines = [
            f"# NFS {self.version}: the export is {MOUNT} on both clients, /export on the server"
        ]
        lines += [f"{name}='{machine.shell()}'" for name, machine in self._machines.items()]
        lines += [
            "$a ls -la /nfs      # any program on a; $b, $server. In this repository's directory"
        ]
        return "\n".join([*lines, "# Ctrl-C stops it"])

    # -- faults --------------------------------------------------------------------------

    def cut(self, name: str) -> None:
        """No packet reaches this machine or leaves it, until ``heal``; its card stays up."""
        self._net.plug(name, inside=False)

    def heal(self, name: str) -> None:
        """The end of ``cut``."""
        self._net.plug(name, inside=True)

    @contextlib.contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """``cut``, and ``heal`` whatever happens."""
        self.cut(name)
        try:
            yield
        finally:
            self.heal(name)

    @contextlib.contextmanager
    def without_server(self, node: Machine) -> Iterator[None]:
        """The server alone is out of this client's reach; the other client, and we, are not."""
        route = ["blackhole", f"{_ADDRESSES['server']}/32"]
        node.run(["ip", "route", "add", *route])
        try:
            yield
        finally:
            node.run(["ip", "route", "del", *route])

    def restart_server(self) -> None:
        """Its kernel is killed at once and boots on the same disk; clients keep their mounts."""
        self.server.kill()
        self.server.boot()

    def export(self, *options: str) -> None:
        """Replace the options of /export: "ro" for "rw", "root_squash" for "no_root_squash", ..."""
        text = ",".join([*(options or ("rw", "no_root_squash")), "sync", "no_subtree_check"])
        ended = self.server.run(
            ["exportfs", "-i", "-o", f"{text},fsid=0,insecure", "*:/export"], libraries=True
        )
        if ended.status:
            raise LabError(f"exportfs: {ended.output}")

    # -- programs ------------------------------------------------------------------------

    def warm(self, *modules: str) -> None:
        """Prepare ``node.fork`` on both clients: torch, ckptfs and ``modules`` are imported once."""
        for node in self.nodes:
            node.warm(*modules)

    def torchrun(
        self,
        arguments: Sequence[str],
        *,
        ranks_per_node: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[Program, Program]:
        """``torchrun --nnodes 2 ... arguments`` on both clients, started and not waited for."""
        port = str(20_000 + int(uuid.uuid4().hex[:6], 16) % 10_000)
        everywhere = {"OMP_NUM_THREADS": "1", **(environment or {})}
        programs = []
        for rank, node in enumerate(self.nodes):
            argv = [sys.executable, "-B", "-m", "torch.distributed.run", "--nnodes", "2"]
            argv += ["--nproc-per-node", str(ranks_per_node), "--node-rank", str(rank)]
            argv += ["--master-addr", _ADDRESSES["a"], "--master-port", port, "--max-restarts", "0"]
            own = {"GLOO_SOCKET_IFNAME": node.interface, **everywhere}
            programs.append(node.start([*argv, *arguments], environment=own))
        return programs[0], programs[1]

    # -- start ---------------------------------------------------------------------------

    @property
    def _net(self) -> Network:
        if self._network is None:
            raise LabError("the lab is not up")
        return self._network

    def _start(self) -> None:
        directory = self._crew.run_dir
        for name, size_bytes in (("disk", _DISK_BYTES), ("small", _SMALL_BYTES)):
            with (directory / name).open("wb") as image:
                image.truncate(size_bytes)
            run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=1", directory / name])
        self._network = Network(self._crew, tuple(_ADDRESSES))
        for name, address in _ADDRESSES.items():
            self._machines[name] = self._machine(name, address, directory)
        for machine in self._machines.values():
            machine.begin()
        for machine in self._machines.values():
            machine.answer()
        for node in self.nodes:
            self.mount(node)

    def mount(
        self,
        node: Machine,
        *,
        export: str = "",
        at: str = MOUNT,
        options: str = "",
        version: str = "",
    ) -> None:
        """Mount ``export`` (below the server's /export) at a path of ``node``; made where missing.

        options: of mount, in addition to the version, "soft,timeo=10,retrans=2" for one. Otherwise a client's
        default caching, and hard. version: another than the lab's; mounts of one version share what the
        client has of the server, its connection for one, whatever their options say.
        """
        version = version or self.version
        node.call(os.makedirs, at, exist_ok=True)
        source = f"server:/export/{export}" if version == "3" else f"server:/{export}"
        wanted = ",".join(filter(None, [f"vers={version}", options]))
        ended = node.run(["mount.nfs", source.rstrip("/"), at, "-o", wanted], libraries=True)
        if ended.status:
            raise LabError(f"mount of {source} on {node.name}: {ended.output}")

    def _machine(self, name: str, address: str, directory: Path) -> Machine:
        is_server = name == "server"
        size_mib = _SERVER_MIB if is_server else _CLIENT_MIB
        disks = [f"ubda={directory}/disk", f"ubdb={directory}/small"] if is_server else []
        binds = ":".join(_binds())
        words = [
            *(f"mem={size_mib}M", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"),
            *(f"init={REPOSITORY}/tests/lab/nfs_init.sh", "con=null", "con0=fd:0,fd:1"),
            *(f"umid={name}", f"uml_dir={directory}/uml", *disks),
            *(f"lab_role={'server' if is_server else 'client'}", f"lab_name={name}"),
            *(f"lab_ip={address}", f"lab_root={_PARTS}", f"lab_binds={binds}"),
            *(f"lab_python={sys.executable}", f"lab_repository={REPOSITORY}"),
        ]
        return Machine(
            name, address, self._crew, self._net, [str(_PARTS / "usr/bin/linux.uml"), *words]
        )


def _binds() -> list[str]:
    """Directories that a machine must see, wherever they are: a clone may be in /tmp."""
    wanted = {str(REPOSITORY), sys.prefix, sys.base_prefix, str(_PARTS)}
    return sorted({str(Path(path).resolve()) for path in wanted} | wanted)


def _check_parts() -> None:
    """UnavailableError with what this machine lacks."""
    if os.geteuid() != 0:
        raise UnavailableError("NFS needs root: mounts and network namespaces")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise UnavailableError("NFS needs /dev/net/tun")
    if not (_PARTS / "usr/bin/linux.uml").exists():
        raise UnavailableError("user-mode Linux is not installed; run `make lab-install`")
    if re.search(r"[\s:]", f"{REPOSITORY}{sys.prefix}"):
        raise UnavailableError(
            "NFS needs paths without spaces and colons: they pass a kernel's command line"
        )
