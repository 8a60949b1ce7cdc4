"""Control: collective steps that end on every rank with the same value or the same typed error.

    step("save.begin", local, decide)

    rank 0  local() --.                    .--> return R
    rank 1  local() --+--> decide([T, ..]) +--> return R        or, if anything failed anywhere:
    rank 2  local() --'    (rank 0 only)   '--> return R        the same error raised everywhere

    SoloControl    one process, no store, the same semantics
    StoreControl   many processes over a c10d store (ckptfs.control.tcpstore_control)
    ThreadControl  many ranks as threads of one process, for tests (ckptfs.testing.world)

No collective ever runs on the user's group. So a step works the same with gloo and nccl, from a background
thread, and under torchrun without any group. The store is, in this order: the given one (``store=``), the
group's own, torchrun's agent store. ckptfs opens no port of its own.

Silence is limited, work is not. A rank that computes for an hour keeps its heartbeat, and the others wait for it.
These end a step on every rank:

    a rank without a heartbeat for ``timeout_s``            DeadlineError
    a rank in one system call of its storage for that long  CollectiveError
    a process that is gone                                  CollectiveError, within seconds
    a store that is gone                                    ControlPlaneLostError
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, overload

from ckptfs import _torch
from ckptfs.control.messages import (
    Stage,
    attempt,
    decide_stages,
    for_rank,
    run_stages,
    settle,
    stage_answers,
)
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, CollectiveError, StateError

__all__ = [
    "Control",
    "SoloControl",
    "control_opener",
    "default_timeout_s",
    "hearing",
    "open_control",
    "step_keeping",
    "step_of_stages",
    "timeout_of",
]

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")


class Control(Protocol):
    """One rank's end of a control plane. One thread at a time; ``clone()`` for another thread.

    world: This process. worlds: All processes, in order of rank. The coordinator is rank 0.
    """

    @property
    def world(self) -> World:
        """This process."""

    @property
    def worlds(self) -> tuple[World, ...]:
        """Every rank's World, in order of rank, as they were when the control was opened."""

    @property
    def rank(self) -> int:
        """0 ... size - 1; the coordinator is 0."""

    @property
    def size(self) -> int:
        """How many ranks take part."""

    @overload
    def step(self, label: str, local: Callable[[], T]) -> list[T]: ...

    @overload
    def step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], R] | None
    ) -> R: ...

    def step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], Any] | None = None
    ) -> Any:
        """Run ``local`` on every rank and ``decide`` on the coordinator. Collective.

        No rank returns before all have called, so this is a barrier too. Every rank raises the same
        error, except as noted. If ``local`` or ``decide`` changed something before an error, that
        change stays.

        Args:
            label: What is being done, for messages; must be equal on all ranks.
            local: Returns any picklable value; many MiB are fine.
            decide: Gets the values in order of rank, on the coordinator only, and returns the
                picklable answer. With ``apart()`` (``ckptfs.control.messages``) each rank gets a
                common value and its own piece. None: the list of values is the answer.

        Returns:
            The answer.

        Raises:
            CollectiveError: ``local`` failed on a rank, a rank's process is gone, or ``decide``
                raised an error that is not ckptfs's own.
            CkptfsError: ``decide`` raised it.
            DeadlineError: A rank was silent for too long.
            ControlPlaneLostError: The store is gone. The answer is unknown: some ranks may have it.
            KeyboardInterrupt: Raised only on the rank where it happens; so is SystemExit.
        """

    def clone(self) -> Control:
        """Return a control for another thread, with steps and a store client of its own.

        Every rank must make its clones in the same order, but no rank waits for another here. Close
        the clones first.
        """

    def close(self) -> None:
        """Leave. Calling it twice is harmless.

        Ranks that still call a step get a CollectiveError that names this rank. The coordinator
        waits (10 s at most) until all ranks have read the last answer, because its process may host
        the store. A control that was not closed is closed at exit.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


class SoloControl:
    """One process: the same steps and errors, and no other rank to wait for."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World.solo()

    @property
    def worlds(self) -> tuple[World, ...]:
        """This process alone."""
        return (self.world,)

    @property
    def rank(self) -> int:
        """0: this is the coordinator."""
        return 0

    @property
    def size(self) -> int:
        """1."""
        return 1

    def step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], Any] | None = None
    ) -> Any:
        """See ``Control.step``. Values are not pickled."""
        message, problem = attempt(label, local, self.world)
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        verdict, raised = settle([message], decide, self.worlds)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        return for_rank(verdict, 0).unwrap(problem or raised)

    def clone(self) -> SoloControl:
        """Return another one for another thread; there is nothing to share."""
        return SoloControl(self.world)

    def close(self) -> None:
        """Do nothing: there is nothing to leave."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def step_keeping(
    control: Control, label: str, local: Callable[[], tuple[T, K]], decide: Callable[[list[T]], R]
) -> tuple[R, K]:
    """Take a step, and return what ``local`` made on this rank with the answer. Collective.

    Args:
        control: The control plane.
        label: What is being done; equal on all ranks.
        local: Returns the value to send, and a value of any type that stays on this rank.
        decide: As for ``Control.step``.

    Returns:
        The answer of the step, and the value that stays.

    Raises:
        CkptfsError: As ``Control.step``. The value that stays is lost then.
    """
    kept: K

    def send() -> T:
        nonlocal kept
        sent, kept = local()
        return sent

    answer = control.step(label, send, decide)
    return answer, kept


def step_of_stages(control: Control, label: str, stages: Sequence[Stage]) -> list[Any]:
    """Take several decisions in one step. Collective.

    A step costs a round of all ranks, whatever it sends. Every error is the one that the stages would raise as
    steps of their own, one after the other.

    Args:
        control: The control plane.
        label: What is being done, for messages about ranks that hang or make other calls; equal on all ranks.
        stages: The decisions, in order.

    Returns:
        The answer of each stage.

    Raises:
        CollectiveError: As ``Control.step``, with the label of the first stage that failed anywhere.
        CkptfsError: The ``decide`` of a stage raised it, and no rank failed in that stage or an earlier one.
    """
    errors: list[tuple[str, Exception]] = []

    def local() -> list[Any]:
        values, found = run_stages(stages, control.world)
        errors.extend(found)
        return values

    try:
        common, own = control.step(
            label, local, lambda received: decide_stages(stages, received, control.worlds)
        )
    except CollectiveError as error:
        cause = next((e for name, e in errors if error.message.startswith(f"{name} failed")), None)
        if cause is not None and control.rank in error.failures:
            raise error from cause
        raise
    return stage_answers(common, own)


@contextlib.contextmanager
def hearing(control: Control, hears: Callable[[CkptfsError], None]) -> Iterator[None]:
    """Inside the block, call ``hears`` if this rank's part of a step hangs in its storage.

    The step then ends on all other ranks with an error, which ``hears`` receives on another thread.
    The hanging thread itself cannot be woken.
    """
    if not hasattr(control, "hears"):  # a single process: no other rank could end the step
        yield
        return
    control.hears = hears
    try:
        yield
    finally:
        control.hears = None


def default_timeout_s() -> float:
    """Return ``CKPTFS_TIMEOUT_S``, else 600 s. StateError if the variable is no positive number."""
    text = os.environ.get("CKPTFS_TIMEOUT_S", "600")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise StateError(f"CKPTFS_TIMEOUT_S={text!r} is not a positive number of seconds")
    return value


def timeout_of(timeout_s: float | None) -> float:
    """Return the given timeout, or the default."""
    return default_timeout_s() if timeout_s is None else timeout_s


def open_control(
    world: World | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
    *,
    store: Any = None,
    name: str = "",
) -> Control:
    """Open a control plane over any store that connects these processes. Collective.

    Args:
        world: The world of this process; None detects it (``World.detect(process_group)``).
        process_group: The ranks that take part; None is the default group, or all processes that
            torchrun started.
        timeout_s: The longest silence of a rank that is waited out, in seconds; None is
            ``CKPTFS_TIMEOUT_S``, else 600.
        store: A c10d store to use instead of the group's.
        name: Distinguishes two controls that threads open at the same time. Otherwise ranks open
            their controls in the same order.

    Returns:
        The control.

    Raises:
        StateError: There are several processes and nothing that connects them.
        CollectiveError: The ranks run different versions of ckptfs.
        DeadlineError: Some ranks did not come within timeout_s.
    """
    return control_opener(world, process_group, timeout_s, store=store, name=name)()


def control_opener(
    world: World | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
    *,
    store: Any = None,
    name: str = "",
    closes_at_exit: bool = True,
) -> Callable[[], Control]:
    """Do the local part of ``open_control`` now; the returned function does the collective part.

    It is for another thread that opens the control later: the group may be gone by then, but its
    store is kept.

    closes_at_exit: False if the caller closes the control when the interpreter ends.
    """
    world = world or World.detect(process_group)
    wait_s = timeout_of(timeout_s)
    if world.size == 1:
        return partial(SoloControl, world)
    ranks: tuple[int, ...] = tuple(range(world.size))
    if process_group is not None or _torch.has_default_group():
        ranks = _torch.group_ranks(process_group)
    if len(ranks) != world.size:
        raise StateError(f"world has {world.size} ranks, but its process group has {len(ranks)}")
    found, apart = _find_store(world, process_group, wait_s) if store is None else (store, "")

    def open_now() -> Control:
        from ckptfs.control.tcpstore_control import StoreControl

        return StoreControl(
            world,
            found,
            ranks=ranks,
            timeout_s=wait_s,
            name=apart + name,
            closes_at_exit=closes_at_exit,
        )

    return open_now


def _find_store(world: World, process_group: Any, timeout_s: float) -> tuple[Any, str]:
    """Return a store that connects these processes, and a name for them if others use it too."""
    if process_group is not None or _torch.has_default_group():
        return _torch.group_channel(process_group)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (agent and address and port.isdigit()):
        raise StateError(
            f"WORLD_SIZE is {world.size}, but these processes are not connected",
            rank=world.rank,
            hint="call torch.distributed.init_process_group() first, or start with torchrun",
        )
    from ckptfs.control.tcpstore_client import connect

    return connect(address, int(port), timeout_s), ""
