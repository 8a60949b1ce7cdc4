"""Signals that say "this job will be stopped": noted, never acted upon, and passed on.

    PreemptSignals((SIGTERM,))     handlers installed; ``received`` is None
    SIGTERM arrives                received = "SIGTERM"; the handler that was there before runs too
    .close()                       the handlers that were there before are back

A handler here does three things and no more: it stores a name, it leaves everything else to the next
``should_save``, and it calls the Python handler that it replaced. It takes no lock and logs nothing:
it may run between any two instructions of the main thread.

In the child of a fork (a data loader's worker) the signal does what it would do without us: children
inherit handlers, and ``Process.terminate()`` on a worker must end it. torchrun and Slurm send the
signal to data loader workers too, which die of it before the last save: ``WorkerShield`` as
``worker_init_fn`` lets them live.
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
    """Signals by number or name ("SIGTERM"), each once. StateError: no such signal."""
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
    """Handlers for these signals, from now until ``close``. The main thread only.

    StateError: not the main thread, or a signal whose handler was not set from Python and so could
    not be put back. No handler is left installed then.
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
        """The name of the first signal that came, None before; it stays."""
        return self._received

    def note(self, name: str) -> None:
        """A signal came; called by the handler."""
        self._received = self._received or name

    def close(self) -> None:
        """Put back what was there before; harmless twice.

        A handler that somebody has put over ours stays, and ours then only passes signals on.
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
    """The handler of one signal; previous: what it replaced. pid: the process it is for."""

    owner: weakref.ref[PreemptSignals]
    watched: signal.Signals
    previous: Any
    pid: int = field(default_factory=os.getpid)
    closed: bool = False
    noted: bool = False

    @property
    def is_installed(self) -> bool:
        """False where somebody has put another handler over this one."""
        return signal.getsignal(self.watched) is self

    @property
    def is_inert(self) -> bool:
        """True once closed or collected, and in the child of a fork."""
        return self.closed or self.owner() is None or os.getpid() != self.pid

    def beneath(self) -> Any:
        """The handler before ours, without those of ours that are inert."""
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
            return  # whoever names SIGINT wants a save, no KeyboardInterrupt; twice is meant
        if callable(previous):
            previous(number, frame)

    def _as_before(self, previous: Any, number: int, frame: FrameType | None) -> None:
        """What would have happened without us."""
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL and self.is_installed:
            # Not when a handler above ours called us: then this signal has somebody who answers it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True, slots=True)
class WorkerShield:
    """``DataLoader(..., worker_init_fn=WorkerShield((SIGTERM,)))``: workers outlive the signal.

    Launchers stop a job by a signal to every process of it, workers too; a worker that dies of it raises
    RuntimeError in the training loop, before the last save. Only what the worker's parent sends still ends
    it: that is how a loader ends its workers, and ignoring it would hang the end of the program. Picklable if
    ``then`` is. Linux; does nothing elsewhere.

    Attributes:
        signals: Names or numbers of the signals.
        then: Your own worker_init_fn; None: none.
    """

    signals: tuple[SignalName, ...]
    then: Callable[[int], Any] | None = None

    def __call__(self, worker: int) -> None:
        """In the worker, before it has threads: hold the signals back and look who sent them."""
        watched = signals_of(self.signals)
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, watched)
            threading.Thread(
                target=_heed_parent, args=(watched, os.getppid()), name="ckptfs-shield", daemon=True
            ).start()
        if self.then is not None:
            self.then(worker)


def _heed_parent(watched: tuple[signal.Signals, ...], parent: int) -> None:
    while signal.sigwaitinfo(watched).si_pid != parent:
        pass
    os._exit(0)
