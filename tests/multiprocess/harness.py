"""Rank processes for tests: started with a store of their own, steered, collected, killed.

    def body(rank: Rank) -> object:            # module-level, in a test file; returns JSON-able data
        rank.init_group()                      # gloo, over the harness's store (or rank.store())
        rank.tell("ready")                     # an event for the test
        rank.hold("go")                        # blocks until the test calls ranks.release("go")
        return rank.number

    every_one(rank, {"name": claim}, base)     # in a body: many claims under one group

    with launch(body, 4, args={"uri": "..."}) as ranks:
        ranks.wait("ready")                    # from every rank; no sleeps
        ranks.kill(3)                          # SIGKILL; also freeze (SIGSTOP) and thaw
        ranks.release("go")
        for result in ranks.results(): ...                # value, error (type, message, data), log

Every wait has a deadline and leaving the ``with`` block kills every process that was started.
``store="test"`` hosts the c10d store in the test process, ``"rank0"`` inside rank 0 and ``"apart"``
in a process of its own (``ranks.kill_store()``). Ranks are forked from one process that imported
torch once (30 ms each instead of 2 s); ``warm=False`` and ``prefix=`` start real interpreters. With
``warm=True`` and the prefix of a ``Node`` (tests/lab/nodes.py) one such process lives there.
``torchrun(body, n)`` runs the same bodies under the real launcher and returns the same results; with
``warm=True`` its agents and their workers are forked as well, and no process imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

HOST = "127.0.0.1"
# A c10d store looks up the name of every client, on its only thread; where a name server does not
# answer, everybody waits 5 s for that. One second, once, is enough here.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
os.environ.update(RESOLVER)
START_TIMEOUT_S = 400.0
# Of what takes seconds on an idle machine. An end is seen at once; what a test promises in less it measures.
WAIT_S = 400.0
WARM = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.utils.serialization.config",
    "torch._dynamo",
    "xxhash",
)
StoreHost = Literal["test", "rank0", "apart", "none"]
Body = Callable[["Rank"], object]


# -- inside a rank -----------------------------------------------------------------------------


def every_one(
    rank: Rank, claims: Mapping[str, Callable[[Rank, str], object]], base: str, tail: str = ""
) -> dict[str, Any]:
    """Each claim in order, at ``base/name + tail``; an unexpected error of one is its result.

    With a group all ranks meet after each, so that one which failed early spoils no other claim.
    """
    import torch.distributed as dist

    results: dict[str, Any] = {}
    for name, claim in claims.items():
        try:
            results[name] = claim(rank, f"{base}/{name.replace(' ', '-')}{tail}")
        except BaseException:  # noqa: BLE001 - CheckpointException is no Exception
            results[name] = traceback.format_exc()[-3000:]
        dist.barrier()
    return results


class Rank:
    """One rank process as its body sees it: who it is, its store, and a line to the test."""

    def __init__(self, spec: Mapping[str, Any], line: socket.socket | None) -> None:
        self.number: int = spec["rank"]
        self.size: int = spec["size"]
        self.args: dict[str, Any] = spec["args"]
        self._port: int | None = spec.get("port")
        self._hosts = spec.get("store") == "rank0" and self.number == 0
        self._line = line
        self._reader = line.makefile("r") if line else None
        self._store: Any = None

    def store(self) -> Any:
        """This process's client of the harness's store; made once."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore(
                HOST,
                0 if self._hosts else self.port(),
                is_master=self._hosts,
                wait_for_workers=False,
                timeout=timedelta(seconds=WAIT_S),
            )
            if self._hosts:
                self.tell("port", port=self._store.port)
        return self._store

    def port(self) -> int:
        """The store's port; waits for rank 0 where that one hosts it."""
        if self._port is None:
            self._port = int(self.hold("port")["port"])
        return self._port

    def init_group(self, backend: str = "gloo") -> None:
        """init_process_group over the harness's store."""
        import torch.distributed as dist

        dist.init_process_group(backend, store=self.store(), rank=self.number, world_size=self.size)

    def meet(self) -> None:
        """Return when all ranks have called it, once: before what is bounded by less than a start may take."""
        self.store().set(f"met/{self.number}", b"1")
        self.store().wait([f"met/{number}" for number in range(self.size)])

    def tell(self, event: str, **data: object) -> None:
        """Send the test an event; ``ranks.wait(event)`` returns its data."""
        if self._line:
            text = json.dumps({"event": event, "data": data}, default=str)
            self._line.sendall(text.encode() + b"\n")

    def hold(self, name: str) -> dict[str, Any]:
        """Block until the test calls ``ranks.release(name)``; returns what it sent along."""
        if self._reader is None:
            raise RuntimeError("hold() needs launch(); torchrun() has no line to the test")
        for text in self._reader:
            message: dict[str, Any] = json.loads(text)
            if message["release"] == name:
                return dict(message["data"])
        raise EOFError("the test is gone")


CLONE_NEWNS = 0x20000


def mount_privately() -> None:
    """What this process mounts from here on, no other process sees. To be called before it starts threads.

    OSError where the kernel allows no mount namespace; root is needed.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: dotted class, text, and the public attributes of ckptfs errors."""
    data: dict[str, Any] = {
        key: value
        for key, value in vars(error).items()
        if isinstance(value, str | int | float | tuple | list) or value is None
    }
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping):
        data["failures"] = {
            str(rank): {name: getattr(f, name) for name in ("rank", "node", "type", "message")}
            for rank, f in failures.items()
            if hasattr(f, "message")
        }
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error),
        "data": data,
        "traceback": "".join(traceback.format_exception(error)),
    }


def _load(file: str) -> ModuleType:
    name = f"_rank_bodies_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _rank_main(spec: Mapping[str, Any], line: socket.socket | None) -> int:
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(spec["env"])
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    rank = Rank(spec, line)
    rank.tell("pid", pid=os.getpid())
    try:
        body = _load(spec["file"])
        for part in spec["name"].split("."):
            body = getattr(body, part)
        outcome: dict[str, Any] = {"value": body(rank)}  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is its result
        traceback.print_exc()
        outcome = {"error": describe(error)}
    if line:
        rank.tell("result", **outcome)
    else:
        Path(spec["result"]).write_text(json.dumps(outcome, default=str))
    return 0 if "value" in outcome else 1


def _host_store(rank: Rank) -> None:
    from torch.distributed import TCPStore

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    rank.tell("port", port=store.port)
    with contextlib.suppress(EOFError):
        rank.hold("never")


# -- in the test -------------------------------------------------------------------------------


@dataclass
class Result:
    """How one rank ended. ``value`` and ``error`` are None for a rank that was killed."""

    rank: int
    value: Any = None
    error: dict[str, Any] | None = None
    died: bool = False
    log: str = ""

    @property
    def error_type(self) -> str:
        """The last part of the error's class path, or ""."""
        return str(self.error["type"]).rsplit(".", 1)[-1] if self.error else ""


@dataclass
class _Process:
    """One started process, its line, and everything it has said so far."""

    line: socket.socket
    log: Path
    news: threading.Condition
    popen: subprocess.Popen[bytes] | None = None
    prefix: tuple[str, ...] = ()
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: bool = False

    def listen(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self.line.makefile("r") as lines:
            for text in lines:
                message = json.loads(text)
                with self.news:
                    self.events.append((message["event"], message["data"]))
                    self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def find(self, event: str) -> dict[str, Any] | None:
        return next((data for name, data in self.events if name == event), None)

    def signal(self, number: int) -> None:
        told = self.find("pid")
        if told and not self.ended and self.prefix:
            # It gave its number in its own pid namespace; here that is somebody else's.
            words = [*self.prefix, "kill", f"-{int(number)}", str(told["pid"])]
            subprocess.run(words, check=False, stderr=subprocess.DEVNULL)
        elif told and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(told["pid"], number)


def _stop(process: _Process) -> None:
    """SIGSTOP. A thread that runs on another core runs until the kernel comes to it: wait for all."""
    process.signal(signal.SIGSTOP)
    told = process.find("pid")
    if told is None or process.prefix or not Path("/proc/self/task").exists():
        return
    end = time.monotonic() + 60
    while time.monotonic() < end and not process.ended:
        states = []
        for stat in Path(f"/proc/{told['pid']}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(stat.read_text().rpartition(")")[2].split()[0])
        if all(state in "Tt" for state in states):
            return


class Ranks:
    """The rank processes of one ``launch``, seen from the test."""

    def __init__(self, processes: list[_Process], news: threading.Condition) -> None:
        self._processes = processes
        self._news = news
        self._store_host: _Process | None = None
        self.store: Any = None  # the c10d store itself, with store="test"

    def _until(self, what: str, timeout_s: float, done: Callable[[], bool]) -> None:
        with self._news:
            if not self._news.wait_for(done, timeout_s):
                self._dump_stacks()
                raise AssertionError(f"{what}: not within {timeout_s:g} s\n{self.logs()}")

    def _dump_stacks(self) -> None:
        """Every rank's threads into its log: what a hang is made of. It may crash them: the end."""
        for process in self._processes:
            process.signal(signal.SIGUSR1)
        time.sleep(0.5)

    def wait(
        self, event: str, *, rank: int | None = None, timeout_s: float = WAIT_S
    ) -> dict[str, Any]:
        """Wait for an event of one rank (None: of all); returns its data (of the last rank)."""
        chosen = self._processes if rank is None else [self._processes[rank]]
        self._until(
            f"event {event!r} of rank {rank}",
            timeout_s,
            lambda: all(p.find(event) is not None or p.ended for p in chosen),
        )
        found = [p.find(event) for p in chosen]
        assert all(f is not None for f in found), f"a rank ended first\n{self.logs()}"
        return found[-1] or {}

    def stay_without(self, event: str, *, rank: int | None = None, for_s: float) -> None:
        """Assert that one rank (None: every rank) neither says ``event`` nor ends for so long.

        No stacks are dumped, as an expected ``wait`` that fails would: the dump reads the
        frames of threads that run, and a rank that is to live on may crash of it.
        """
        chosen = self._processes if rank is None else [self._processes[rank]]
        with self._news:
            came = self._news.wait_for(
                lambda: any(p.find(event) is not None or p.ended for p in chosen), for_s
            )
        assert not came, f"event {event!r} of rank {rank}, or its end, came\n{self.logs()}"

    def told(self, event: str, rank: int) -> list[dict[str, Any]]:
        """The data of every such event of one rank so far, also of one that is dead."""
        with self._news:
            return [data for name, data in self._processes[rank].events if name == event]

    def release(self, name: str, *, rank: int | None = None, **data: object) -> None:
        """Let one rank (None: all) out of ``rank.hold(name)``."""
        text = json.dumps({"release": name, "data": data}).encode() + b"\n"
        for process in self._processes if rank is None else [self._processes[rank]]:
            with contextlib.suppress(OSError):  # a dead rank needs no release
                process.line.sendall(text)

    def pid(self, rank: int) -> int:
        """The process id of a rank, as the rank itself sees it."""
        return int(self.wait("pid", rank=rank)["pid"])

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        self._processes[rank].signal(signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """SIGSTOP; returns when it is stopped."""
        _stop(self._processes[rank])

    def thaw(self, rank: int) -> None:
        """SIGCONT."""
        self._processes[rank].signal(signal.SIGCONT)

    def kill_store(self) -> None:
        """SIGKILL the process that hosts the store (``store="apart"``)."""
        assert self._store_host
        self._store_host.signal(signal.SIGKILL)

    def freeze_store(self) -> None:
        """SIGSTOP the process that hosts the store (``store="apart"``); returns when it is stopped."""
        assert self._store_host
        _stop(self._store_host)

    def results(
        self, *, timeout_s: float = WAIT_S, ranks: Sequence[int] | None = None
    ) -> list[Result]:
        """Wait until these ranks (None: all) have ended or given a result."""
        wanted = range(len(self._processes)) if ranks is None else ranks
        chosen = [(n, self._processes[n]) for n in wanted]
        self._until(
            "results",
            timeout_s,
            lambda: all(p.ended or p.find("result") is not None for _, p in chosen),
        )
        return [self._result(n, p) for n, p in chosen]

    def values(self, *, timeout_s: float = WAIT_S) -> list[Any]:
        """The values of all ranks; AssertionError with the errors and logs when a rank failed or died."""
        results = self.results(timeout_s=timeout_s)
        # The logs are cut, and need not have what ended a rank.
        errors = "\n".join(f"rank {n}: {r.error}" for n, r in enumerate(results) if r.error)
        assert all(r.error is None and not r.died for r in results), f"{errors}\n{self.logs()}"
        return [r.value for r in results]

    @staticmethod
    def _result(number: int, process: _Process) -> Result:
        told = process.find("result")
        log = process.log.read_text(errors="replace") if process.log.exists() else ""
        if told is None:
            return Result(number, died=True, log=log)
        return Result(number, value=told.get("value"), error=told.get("error"), log=log)

    def logs(self) -> str:
        """What every rank wrote to stdout and stderr, last 3000 characters each."""
        parts = []
        for number, process in enumerate(self._processes):
            text = process.log.read_text(errors="replace") if process.log.exists() else ""
            parts.append(f"--- rank {number} (ended: {process.ended})\n{text[-3000:]}")
        return "\n".join(parts)

    def close(self) -> None:
        """Kill every process that is left."""
        for process in [*self._processes, *([self._store_host] if self._store_host else [])]:
            process.signal(signal.SIGKILL)
            if process.popen:
                process.popen.kill()
                process.popen.wait(60)
            process.line.close()


class _Zygote:
    """One process that has imported torch and forks ranks on request; dies with the test."""

    def __init__(self, prefix: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, __file__, "--zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment({}),
            )
        self.line = ours

    def start(self, spec_file: Path, line: socket.socket) -> None:
        socket.send_fds(self.line, [str(spec_file).encode()], [line.fileno()])


# One per prefix and test session, started by the first test that needs it.
_zygotes: dict[tuple[str, ...], _Zygote] = {}
_zygote_lock = threading.Lock()


def _warm(prefix: tuple[str, ...]) -> _Zygote:
    with _zygote_lock:
        for key, zygote in list(_zygotes.items()):
            if zygote.popen.poll() is not None:  # killed, or its node was
                zygote.line.close()
                del _zygotes[key]
        if prefix not in _zygotes:
            _zygotes[prefix] = _Zygote(prefix)
        return _zygotes[prefix]


def warm_up() -> None:
    """Import what ranks need, and what torch imports at its first use: a second of each rank."""
    import torch

    import ckptfs

    for name in WARM:
        importlib.import_module(name)
    for name in ckptfs.__all__:
        getattr(ckptfs, name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the forks share what is warm: collecting it would copy it


def _zygote_main(fd: int) -> None:
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are reaped at once: no zombies
    line = socket.socket(fileno=fd)
    while True:
        message, fds, _, _ = socket.recv_fds(line, 4096, 1)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line.close()
            _die_with_parent()
            spec = json.loads(Path(message.decode()).read_text())
            code = _rank_main(spec, socket.socket(fileno=fds[0]))
            _leave(code)
        os.close(fds[0])


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the test


def _leave(code: int) -> None:
    """End a forked rank as an interpreter would: atexit hooks and flushed streams, no more."""
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    base = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    return {**os.environ, **base, **RESOLVER, **extra}


@contextlib.contextmanager
def launch(
    body: Body,
    size: int,
    *,
    args: Mapping[str, object] | None = None,
    store: StoreHost = "test",
    nodes: Sequence[str] | None = None,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    launcher_env: bool = False,
    warm: bool | None = None,
    prefix: Callable[[int], Sequence[str]] | None = None,
) -> Iterator[Ranks]:
    """Start ``size`` rank processes that run ``body``; see the module's docstring.

    nodes: simulated node name of each rank (CKPTFS_NODE). launcher_env: set what torchrun sets
    (RANK, WORLD_SIZE, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE=True) over the harness's store.
    prefix: command words put before the interpreter of each rank, such as nsenter. warm: fork ranks
    from a process that has imported torch; the default where there is no prefix.
    """
    news = threading.Condition()
    forked = prefix is None if warm is None else warm
    held, port = None, None
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as scratch:
        ranks = Ranks([], news)
        try:
            if store == "test":
                from torch.distributed import TCPStore

                held = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
                port = held.port
            elif store == "apart":
                spec = _spec(_host_store, -1, size, {}, scratch=Path(scratch), env={})
                ranks._store_host = _start(spec, Path(scratch), news, warm=True, prefix=())
                apart = Ranks([ranks._store_host], news)
                port = apart.wait("port", timeout_s=START_TIMEOUT_S)["port"]
            for number in range(size):
                extra = dict(env(number) if callable(env) else env or {})
                if nodes:
                    extra["CKPTFS_NODE"] = nodes[number]
                if launcher_env:
                    extra |= _launcher_environment(number, size, port)
                spec = _spec(body, number, size, dict(args or {}), scratch=Path(scratch), env=extra)
                spec |= {"port": port, "store": store}
                words = prefix(number) if prefix else ()
                ranks._processes.append(
                    _start(spec, Path(scratch), news, warm=forked, prefix=words)
                )
            if store == "rank0":
                _forward_port(ranks)
            ranks.wait("pid", timeout_s=START_TIMEOUT_S)
            ranks.store = held
            yield ranks
        finally:
            ranks.close()


def _launcher_environment(number: int, size: int, port: int | None) -> dict[str, str]:
    assert port is not None, "launcher_env needs a store outside the ranks"
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
    }


def _forward_port(ranks: Ranks) -> None:
    """Tell the others where rank 0 listens, as soon as its body has opened the store."""

    def forward() -> None:
        with contextlib.suppress(AssertionError):
            port = ranks.wait("port", rank=0, timeout_s=START_TIMEOUT_S)["port"]
            for number in range(1, len(ranks._processes)):
                ranks.release("port", rank=number, port=port)

    threading.Thread(target=forward, daemon=True).start()


def _spec(
    body: Body,
    number: int,
    size: int,
    args: dict[str, object],
    *,
    scratch: Path,
    env: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "file": inspect.getfile(body),
        "name": body.__qualname__,
        "rank": number,
        "size": size,
        "args": args,
        "log": str(scratch / f"log-{number}"),
        "result": str(scratch / f"result-{number}"),
        "env": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env},
    }


def _start(
    spec: dict[str, Any],
    scratch: Path,
    news: threading.Condition,
    *,
    warm: bool,
    prefix: Sequence[str],
) -> _Process:
    file = scratch / f"spec-{spec['rank']}.json"
    file.write_text(json.dumps(spec, default=str))
    ours, theirs = socket.socketpair()
    process = _Process(ours, Path(spec["log"]), news, prefix=tuple(prefix))
    with theirs:
        if warm:
            _warm(tuple(prefix)).start(file, theirs)
        else:
            process.popen = subprocess.Popen(
                [*prefix, sys.executable, __file__, "--rank", str(file), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(spec["env"]),
            )
    process.listen()
    return process


def torchrun(
    body: Body,
    nproc_per_node: int,
    *,
    nnodes: int = 1,
    args: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    warm: bool = False,
    timeout_s: float = START_TIMEOUT_S,
) -> list[Result]:
    """Run ``body`` under the real torchrun; one agent per node, each with its own CKPTFS_NODE.

    Results in order of rank; a rank without a result is ``died``; the agents' output is the log.

    warm: fork the agents from a process that has imported torch, and let them fork the workers: 3 s of
    CPU less for each. A worker is then no interpreter of its own: ``atexit`` calls nothing, and it is in
    the process group of its agent.
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-", ignore_cleanup_errors=True) as scratch:
        size = nproc_per_node * nnodes
        spec = _spec(body, 0, size, dict(args or {}), scratch=Path(scratch), env={})
        (Path(scratch) / "spec.json").write_text(json.dumps(spec, default=str))
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        words = _torchrun_words(nproc_per_node, nnodes, port, max_restarts)
        if warm:
            _run_warm_agents(words, nnodes, Path(scratch), env or {}, timeout_s)
            return [_torchrun_result(Path(scratch), number) for number in range(size)]
        agents = []
        deadline = time.monotonic() + timeout_s
        try:
            for node in range(nnodes):
                with Path(scratch, f"agent-{node}").open("wb") as log:
                    agents.append(
                        subprocess.Popen(
                            [
                                *(sys.executable, "-m", "torch.distributed.run", *words),
                                *("--node-rank", str(node), __file__, "--torchrun", scratch),
                            ],
                            env=_environment({"CKPTFS_NODE": f"node{node}", **(env or {})}),
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            for agent in agents:
                agent.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"torchrun: not within {timeout_s:g} s\n{_agents_log(Path(scratch))}"
            ) from None
        finally:
            for agent in agents:
                _end_agent(agent)
        return [_torchrun_result(Path(scratch), number) for number in range(size)]


def _torchrun_words(nproc_per_node: int, nnodes: int, port: int, max_restarts: int) -> list[str]:
    return [
        *("--nnodes", str(nnodes), "--nproc-per-node", str(nproc_per_node)),
        *("--max-restarts", str(max_restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:{port}", "--rdzv-id", "test"),
        *("--local-addr", HOST),
    ]


def _agent(rank: Rank) -> None:
    """torchrun, in a process that has imported torch; it forks its workers, which run this file again."""
    from torch.distributed.run import main

    main(rank.args["words"])


def _run_warm_agents(
    words: list[str], nnodes: int, scratch: Path, env: Mapping[str, str], timeout_s: float
) -> None:
    """Until all agents have ended; how they ended, their workers' results say."""
    news = threading.Condition()
    agents = Ranks([], news)
    try:
        for node in range(nnodes):
            script = ["--node-rank", str(node), __file__, "--torchrun", str(scratch)]
            args: dict[str, object] = {}
            args["words"] = [*words, "--run-path", "--start-method", "fork", *script]
            extra = {"CKPTFS_NODE": f"node{node}", **env}
            spec = _spec(_agent, node, nnodes, args, scratch=scratch, env=extra)
            spec["log"] = str(scratch / f"agent-{node}")
            agents._processes.append(_start(spec, scratch, news, warm=True, prefix=()))
        agents.results(timeout_s=timeout_s)
    finally:
        agents.close()


def _end_agent(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.terminate()  # torchrun ends its workers on SIGTERM
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(15)
        agent.kill()
        agent.wait(60)


def _agents_log(scratch: Path) -> str:
    return "".join(p.read_text(errors="replace") for p in sorted(scratch.glob("agent-*")))


def _torchrun_result(scratch: Path, number: int) -> Result:
    log = _agents_log(scratch)
    file = scratch / f"result-{number}"
    if not file.exists():
        return Result(number, died=True, log=log)
    outcome = json.loads(file.read_text())
    return Result(number, value=outcome.get("value"), error=outcome.get("error"), log=log)


def _torchrun_main(scratch: str) -> int:
    # What the agent does at a signal, a worker that it forked would do as well.
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = json.loads(Path(scratch, "spec.json").read_text())
    number = int(os.environ["RANK"])
    spec |= {
        "rank": number,
        "log": f"{scratch}/log-{number}",
        "result": f"{scratch}/result-{number}",
    }
    return _rank_main(spec, None)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--zygote", fd]:
            _zygote_main(int(fd))
        case ["--rank", file, fd]:
            _die_with_parent()
            content = json.loads(Path(file).read_text())
            sys.exit(_rank_main(content, socket.socket(fileno=int(fd))))
        case ["--torchrun", scratch]:
            # A forked worker that leaves by SystemExit, with whatever code, gives its agent no result.
            if code := _torchrun_main(scratch):
                sys.exit(code)
