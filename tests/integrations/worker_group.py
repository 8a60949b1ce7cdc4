"""A group of forked processes with methods that are called all together, as drivers of RL frameworks do.

    class Actor:
        def __init__(self, size): ...         torch.distributed is initialised: gloo, these ranks alone
        def train(self, tokens): ...

    group = WorkerGroup(Actor, 2, 16)         two processes, each Actor(16)
    group.train(tokens)                       on every rank; a list of what they return, by rank
    group.close()

In place of Ray's workers where Ray would cost seconds. What one rank raises is raised here when all
have answered, and names the rank; a rank that died is EOFError. Everything is forked from the caller:
what it has imported costs nothing again, and what it holds (threads, clients) must not be used there.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, cast

__all__ = ["Digested", "WorkerGroup"]


class Digested:
    """A worker that can be compared with another.

    Attributes:
        model: Its model.
        optimizer: Its optimizer.
    """

    model: Any
    optimizer: Any

    def digest(self) -> str:
        """Return a digest of this rank's tensors of both, and of torch's generator."""
        import torch

        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for tensor in [*self.model.state_dict().values(), *moments]:
            found.update(getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes())
        return found.hexdigest()


class WorkerGroup:
    """Processes with a process group of their own, for a driver.

    Args:
        make: Called on every rank with ``arguments``.
        size: How many ranks.
        arguments: For ``make``.
        env: Variables of each worker, by rank.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        size: int,
        *arguments: Any,
        env: Callable[[int], dict[str, str]] = lambda _: {},
    ) -> None:
        from torch.distributed import TCPStore

        self._store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            told = {"RANK": str(rank), "WORLD_SIZE": str(size), **env(rank)}
            work = (make, arguments, theirs, rank, size, self._store.port, told)
            process = context.Process(target=_serve, args=work, daemon=True)
            process.start()
            theirs.close()  # or a death here would never be the end of the pipe
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*given: Any, **named: Any) -> list[Any]:
            for pipe in self._pipes:
                pipe.send((name, given, named))
            return self._answers()

        return call

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid or 0 for process in self._processes]

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            # The one that is there first: the others may wait for one that died.
            waiting = {p.fileno(): r for r, p in enumerate(self._pipes) if r not in answers}
            for ready in wait(waiting):
                rank = waiting[cast("int", ready)]
                answers[rank] = self._pipes[rank].recv()
        for rank, (_, problem) in sorted(answers.items()):
            if problem is not None:
                problem.add_note(f"on rank {rank} of the group")
                raise problem
        return [answers[rank][0] for rank in sorted(answers)]

    def close(self) -> None:
        """End the processes. Harmless twice."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._store = None


def _serve(
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    pipe: Any,
    rank: int,
    size: int,
    port: int,
    env: dict[str, str],
) -> None:
    import ctypes

    import torch
    import torch.distributed as dist

    # What was left over before the fork is never collected here: a server with a thread that stayed in the
    # caller hangs on it when it is destroyed.
    gc.freeze()
    # A handler that the caller's imports left would not run while this waits for a rank that died.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # no worker outlives its driver
    os.environ.update(env)
    torch.set_num_threads(1)
    worker: Any = None
    problem: Exception | None = None
    try:
        store = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        worker = make(*arguments)
    except Exception as error:  # noqa: BLE001 - it is raised where the group is made
        problem = error
    pipe.send((None, problem))
    with contextlib.suppress(EOFError):
        while (call := pipe.recv()) is not None:
            name, given, named = call
            value, problem = None, None
            try:
                value = getattr(worker, name)(*given, **named)
            except Exception as error:  # noqa: BLE001 - it is raised where the call was made
                problem = error
            pipe.send((value, problem))
