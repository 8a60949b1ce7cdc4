"""Signals that announce the end of a job: they are noted and passed on, and start nothing here.

    PreemptSignals((SIGTERM,))     handlers installed; ``received`` is None
    SIGTERM arrives                received = "SIGTERM"; the handler that was there before runs too
    .close()                       the handlers that were there before are back

A handler here stores a name and calls the Python handler that it replaced, and does no more; the
next ``should_save`` does the rest. The handler takes no lock and logs nothing, because it may run
between any two instructions of the main thread.

In the child of a fork (a worker of a data loader) a signal does what it would do without ckptfs:
children inherit handlers, and ``Process.terminate()`` on a worker must end it. torchrun and Slurm
send the signal to data loader workers too, which would die of it before the last save. With
``WorkerShield`` as ``worker_init_fn`` they survive it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ckptfs.errors import StateError

__all__ = ["PreemptSignals", "SignalName", "WorkerShield", "signals_of"]

logger = logging.getLogger("ckptfs.manager")

SignalName = int | str
_Handler = Callable[[int, FrameType | None], Any]


def signals_of(names: Iterable[SignalName]) -> tuple[signal.Signals, ...]:
    """Return signals by number or name ("SIGTERM"), each once.

    Raises StateError if there is no such signal, or if no process can catch it.
    """
    found = []
    for name in [names] if isinstance(names, int | str) else names:
        try:
            one = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
        except (KeyError, ValueError):
            raise StateError(
                f"{name!r} is not a signal", hint="for example preempt_signals=(signal.SIGTERM,)"
            ) from None
        if one in (signal.SIGKILL, signal.SIGSTOP):
            raise StateError(f"{one.name} cannot be caught by any process")
        if one not in found:
            found.append(one)
    return tuple(found)


class PreemptSignals:
    """Handlers for these signals, from now until ``close``. Only the main thread may make one.

    Raises StateError on another thread, and for a signal with a handler that was not set from
    Python and so could not be restored. No handler is left installed then.
    """

    def __init__(self, signals: Iterable[SignalName]) -> None:
        wanted = signals_of(signals)
        if wanted and threading.current_thread() is not threading.main_thread():
            raise StateError(
                "only the main thread can install signal handlers",
                hint="make the manager on the main thread, or without preempt_signals=",
            )
        foreign = [s.name for s in wanted if signal.getsignal(s) is None]
        if foreign:
            raise StateError(f"{foreign[0]} has a handler that was not set from Python")
        self._received: str | None = None
        self._hooks = [_Hook(weakref.ref(self), s, signal.getsignal(s)) for s in wanted]
        for hook in self._hooks:
            signal.signal(hook.watched, hook)

    @property
    def received(self) -> str | None:
        """The name of the first signal that arrived, None before. It never changes back."""
        return self._received

    def note(self, name: str) -> None:
        """Note that a signal arrived. Called by the handler."""
        self._received = self._received or name

    def close(self) -> None:
        """Restore the handlers that were there before. A second call does nothing.

        A handler that was installed over ours stays; ours then only passes signals on.
        """
        for hook in self._hooks:
            hook.closed = True
        if threading.current_thread() is not threading.main_thread():
            if any(hook.is_installed for hook in self._hooks):
                logger.warning(
                    "closed from another thread: the signal handlers stay installed and do nothing"
                )
            return
        for hook in self._hooks:
            if hook.is_installed:
                signal.signal(hook.watched, hook.beneath())


@dataclass(eq=False, slots=True)
class _Hook:
    """The handler of one signal.

    Attributes:
        previous: The handler that it replaced.
        pid: The process that it is for.
    """

    owner: weakref.ref[PreemptSignals]
    watched: signal.Signals
    previous: Any
    pid: int = field(default_factory=os.getpid)
    closed: bool = False
    noted: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it is the current handler: False if another one was installed over it."""
        return signal.getsignal(self.watched) is self

    @property
    def is_inert(self) -> bool:
        """Whether it only passes signals on: closed, collected, or in the child of a fork."""
        return self.closed or self.owner() is None or os.getpid() != self.pid

    def beneath(self) -> Any:
        """Return the handler before ours, skipping those of ours that are inert."""
        previous = self.previous
        while isinstance(previous, _Hook) and previous.is_inert:
            previous = previous.previous
        return previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        previous = self.beneath()
        if self.is_inert:
            self._as_before(previous, number, frame)
            return
        again, self.noted = self.noted, True
        owner = self.owner()
        if owner is not None:
            owner.note(self.watched.name)
        if previous is signal.default_int_handler and not again:
            return  # the first SIGINT asks for a save; a second one raises KeyboardInterrupt
        if callable(previous):
            previous(number, frame)

    def _as_before(self, previous: Any, number: int, frame: FrameType | None) -> None:
        """Do what would have happened without this handler."""
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL and self.is_installed:
            # Not if a handler above ours called us: that handler deals with the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True, slots=True)
class WorkerShield:
    """``DataLoader(..., worker_init_fn=WorkerShield((SIGTERM,)))``: workers outlive the signal.

    Launchers stop a job by a signal to every process of it, including workers; a worker that dies
    of it raises RuntimeError in the training loop, before the last save. With the shield, only a
    signal from the worker's parent still ends the worker: that is how a loader ends its workers,
    and ignoring it would hang the end of the program. Picklable if ``then`` is. Linux; does nothing
    elsewhere.

    Attributes:
        signals: Names or numbers of the signals.
        then: Your own worker_init_fn; None: none.
    """

    signals: tuple[SignalName, ...]
    then: Callable[[int], Any] | None = None

    def __call__(self, worker: int) -> None:
        """Block the signals in the worker, and let a thread check who sent them.

        Called in the worker before it has other threads.
        """
        watched = signals_of(self.signals)
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, watched)
            threading.Thread(
                target=_watch_parent,
                args=(watched, os.getppid()),
                name="ckptfs-shield",
                daemon=True,
            ).start()
        if self.then is not None:
            self.then(worker)


def _watch_parent(watched: tuple[signal.Signals, ...], parent: int) -> None:
    while signal.sigwaitinfo(watched).si_pid != parent:
        pass
    os._exit(0)
