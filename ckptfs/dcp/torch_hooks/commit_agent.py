"""The agent: a thread on every rank that makes the collective calls under torch's dcp.save.

    torch's hooks                             agent threads, on a control of their own
    set_up_storage_writer   every rank   ->   announce (store), wait for orders
    prepare_global_plan     coordinator  ->   order: size, name  ->  open, probe, begin
    write_data              every rank   ->   commit: step "write" takes what was written
    finish                  coordinator  ->     ... decides with the metadata, seals, projects

torch calls two hooks on the coordinator alone. A hook of all ranks that waited for other ranks would hang if
one of them had raised before it. So hooks never wait for ranks, only for their own agent; agents wait for
each other in ``control.step``, which ends on all of them. The participants are the ranks with plans that
torch gathered, never the world: so dcp.save(no_dist=True) and subgroups need no special treatment.

If torch gives up a save between two hooks, it does not report that. The save's agents learn it from
``Handover.cancel``. This is called at the writer's next reset or when the writer is dropped; when the thread
that called the hooks begins another save into the same run; and, if that thread has ended, when any save of
the process begins. At the latest the agents give up after ``timeout_s``. The next save into the same run
waits until the agent has ended, because then the agent's claims have ended too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ckptfs.commit.ownership.run import Caller
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import Committed, SaveSpec, SmallFile, WrittenPart
from ckptfs.commit.session import Common, Place, agree_uri, open_session, step_of
from ckptfs.control.control import Control, SoloControl
from ckptfs.control.tcpstore_client import StoreClient, wait_for
from ckptfs.control.tcpstore_control import StoreControl
from ckptfs.control.world import World
from ckptfs.errors import DeadlineError, StateError
from ckptfs.uri import Uri

__all__ = ["Begun", "Handover", "SaveOrder", "Task", "send_orders", "start_agent"]

logger = logging.getLogger("ckptfs.dcp")

T = TypeVar("T")

_HELLO_S = 30.0  # a hello is written before torch gathers the plans: it is there by now, or never
_TELLING_S = 30.0  # time left to report who has the run; a lease moves every 5 s


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """The coordinator's order: how many ranks take part, and the name of their control."""

    size: int
    name: str


@dataclass(frozen=True, slots=True)
class Begun:
    """What write_data needs: an attempt that has begun, and the domain that holds its files."""

    attempt: SaveAttempt
    domain: str


@dataclass(frozen=True, slots=True)
class Task:
    """What the user asked for.

    It is equal on all ranks, except for ``common``, which all sessions of this process at a held run share.
    """

    uri: str | os.PathLike[str] | Uri
    place: Place
    spec: SaveSpec  # its name and step are filled in from the agreed URI
    timeout_s: float
    common: Common | None = None
    channel: str = ""  # distinguishes these ranks from other groups that use the same store


@dataclass(slots=True, eq=False, weakref_slot=True)
class Handover:
    """The values that a rank's hooks and its agent pass to each other. One save."""

    task: Task
    rank: int
    order: Future[SaveOrder] = field(default_factory=Future)
    begun: Future[Begun] = field(default_factory=Future)
    part: Future[WrittenPart] = field(default_factory=Future)
    files: Future[Mapping[str, SmallFile]] = field(default_factory=Future)
    done: Future[Committed] = field(default_factory=Future)
    ended: threading.Event = field(default_factory=threading.Event)
    hooks: threading.Thread = field(default_factory=threading.current_thread)
    given_up: bool = False

    def cancel(self, why: str) -> None:
        """End an agent's wait for a hook that will not come. Any time, any thread."""
        self.given_up = True
        for future in (self.order, self.part, self.files):
            _fail(future, StateError(f"the save was abandoned: {why}", rank=self.rank))

    def deliver(self, future: Future[T], value: T) -> None:
        """Pass a value from a hook to the agent. StateError if the save was given up before that."""
        _fulfil(future, value)
        error = future.exception()
        if error is not None:
            raise error

    def fail(self, future: Future[Any], error: BaseException) -> None:
        """Pass a hook's error to its agent, unless the agent has an answer already."""
        _fail(future, error)

    def why_given_up(self) -> BaseException | None:
        """Return why this save was given up, if that was before its part was passed or had failed."""
        return self.part.exception(0) if self.given_up and self.part.done() else None

    def is_given_up(self) -> bool:
        """Return whether torch has given this save up; if so, let its agent know.

        It has if the thread that called the save's hooks now begins another save into its run, or has ended:
        then that thread is not between two hooks.
        """
        if not self.given_up and (
            self.hooks is threading.current_thread() or not self.hooks.is_alive()
        ):
            self.cancel("a new save began")
        return self.given_up

    def wait(self, future: Future[T], what: str) -> T:
        """Return the result; DeadlineError if the other side does not set it within timeout_s."""
        try:
            return future.result(self.task.timeout_s)
        except FutureTimeoutError:
            if future.done():
                raise  # it is the result that is a TimeoutError
            raise DeadlineError(
                f"waited {self.task.timeout_s:g} s for {what}", rank=self.rank
            ) from None


_HANDOVERS: weakref.WeakSet[Handover] = weakref.WeakSet()  # this process's; agents hold references
_LOCK = threading.Lock()


def start_agent(task: Task, rank: int, store: Any, *, coordinator: bool) -> Handover:
    """Start this rank's agent. Local; all ranks but the coordinator write one key of the store.

    ``store`` is a c10d store that the ranks share; None if this process is alone.
    """
    handover = Handover(task, rank)
    with _LOCK:
        before = list(_HANDOVERS)
        _HANDOVERS.add(handover)
    run = _run_of(task)
    # Saves of this thread into other runs may continue: a mirror, for example, calls two writers' hooks.
    earlier = [
        other
        for other in before
        if (_run_of(other.task) == run or not other.hooks.is_alive())
        and other.is_given_up()
        and not other.ended.is_set()
    ]
    if not coordinator:
        _announce(handover, store)
    threading.Thread(
        target=_work, args=(handover, store, earlier), name=f"ckptfs-dcp-{rank}", daemon=True
    ).start()
    return handover


def send_orders(handover: Handover, size: int, store: Any) -> None:
    """Send every rank's agent the order of this save, our own agent last. Coordinator only.

    DeadlineError names the ranks that have not announced themselves for this URI.
    """
    order = SaveOrder(size, f"dcp-{uuid.uuid4().hex}")
    if size > 1:
        client = StoreClient(store, "ckptfs-orders")
        try:
            for rank in range(1, size):
                _send(client, handover.task, rank, order)
        finally:
            client.close()
    _fulfil(handover.order, order)


def _send(client: StoreClient, task: Task, rank: int, order: SaveOrder) -> None:
    hello = _hello_key(task, rank)

    def send(store: Any) -> None:
        wait_for(store, hello)
        key = store.get(hello).decode()
        store.delete_key(hello)
        store.set(key, pickle.dumps(order))

    try:
        client.submit(send).result(_HELLO_S)
    except FutureTimeoutError:
        raise DeadlineError(
            f"rank {rank} has not announced itself for {Uri.parse(task.uri)}",
            silent=(rank,),
            hint="every rank needs a ckptfs.StorageWriter with the same URI",
        ) from None


def _announce(handover: Handover, store: Any) -> None:
    """Publish the key on which this rank listens, and set the handover's order when it arrives."""
    client = StoreClient(store, f"ckptfs-agent-{handover.rank}")
    key = f"ckptfs/dcp/order/{uuid.uuid4().hex}"
    hello = _hello_key(handover.task, handover.rank)
    client.call_short(lambda s: s.set(hello, key.encode()), handover.task.timeout_s)

    def receive(s: Any) -> SaveOrder | None:
        wait_for(s, key)
        order: SaveOrder | None = pickle.loads(s.get(key))  # noqa: S301 - our coordinator's
        s.delete_key(key)
        return order

    def deliver(arrived: Future[SaveOrder | None]) -> None:
        error = arrived.exception()
        order = None if error is not None else arrived.result()
        if error is not None:
            _fail(handover.order, error)
        elif order is not None:
            _fulfil(handover.order, order)
        client.close()

    def release(ended: Future[SaveOrder]) -> None:
        # The save was given up: the listener's client is blocked in its wait, so another client writes
        # the key.
        if ended.exception() is not None and not waiting.done():
            other = StoreClient(store, "ckptfs-agent-release")
            other.submit_short(lambda s: s.set(key, pickle.dumps(None)))
            other.close()

    waiting = client.submit(receive)
    waiting.add_done_callback(deliver)
    handover.order.add_done_callback(release)


def _work(handover: Handover, store: Any, earlier: Sequence[Handover]) -> None:
    """Run one save, from order to commit, on the agent's thread; never raise.

    ``earlier`` are saves of this process that were given up; those into the same run have to end first.
    """
    try:
        order = handover.wait(handover.order, "the coordinator's order")
        run = _run_of(handover.task)
        for other in earlier:
            if _run_of(other.task) == run:
                other.ended.wait(handover.task.timeout_s)
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(_open_control(handover, order, store))
            handover.done.set_result(_save(handover, control, stack))
    except BaseException as error:  # noqa: BLE001 - handed to the hooks, which raise it
        logger.debug("agent of rank %d ended: %r", handover.rank, error)
        _fail(handover.begun, error)
        _fail(handover.done, error)
    finally:
        handover.ended.set()


def _open_control(handover: Handover, order: SaveOrder, store: Any) -> Control:
    here = World.detect()
    if order.size == 1:
        return SoloControl(replace(here, rank=0, size=1))
    world = replace(here, rank=handover.rank, size=order.size, has_group=True)
    return StoreControl(world, store, timeout_s=handover.task.timeout_s, name=order.name)


def _save(handover: Handover, control: Control, stack: contextlib.ExitStack) -> Committed:
    task = handover.task
    target = agree_uri(control, task.uri)
    session = stack.enter_context(
        open_session(target.parent, control, task.place, write=True, common=task.common)
    )
    spec = replace(task.spec, name=target.name, step=step_of(target.name, task.spec.step))
    # torch's hooks wait for the attempt's begin, for up to timeout_s. This ends before, so that their
    # error says who has the run.
    wait_s = max(task.timeout_s - _TELLING_S, task.timeout_s / 2)
    caller = Caller("a StorageWriter", handover.is_given_up, for_call=True, wait_s=wait_s)
    attempt = SaveAttempt(session, spec, caller)
    try:
        attempt.begin()
        handover.begun.set_result(Begun(attempt, session.placement.mine.id))
        return attempt.commit(
            lambda: handover.wait(handover.part, "write_data"),
            lambda _: handover.wait(handover.files, "the coordinator's finish"),
        )
    except BaseException:
        attempt.abandon()
        raise


def _run_of(task: Task) -> Uri:
    return Uri.parse(task.uri).parent


def _hello_key(task: Task, rank: int) -> str:
    # The URI as the user typed it, not the absolute path: ranks may have different working directories.
    # It is hashed because it may contain credentials. Two groups may save under one typed URI at once,
    # each to its own node's disk: without the channel one would take the other's hello.
    typed = hashlib.sha256(f"{task.channel}\n{task.uri}".encode()).hexdigest()[:16]
    return f"ckptfs/dcp/hello/{typed}/{rank}"


def _fulfil(future: Future[T], value: T) -> None:
    with contextlib.suppress(InvalidStateError):  # given up in this very instant
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # it has its answer already
        future.set_exception(error)
