"""Signals: noted, passed on, put back, and left alone in children. Real ones, to this process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from ckptfs.errors import StateError
from ckptfs.manager.preemption import PreemptSignals, WorkerShield, signals_of

USR1 = signal.SIGUSR1


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test leaves installed is an error of the test, and put right."""
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = [signal.getsignal(s) for s in watched]
    yield
    after = [signal.getsignal(s) for s in watched]
    for one, handler in zip(watched, before, strict=True):
        signal.signal(one, handler)
    assert after == before


def send(number: int, pid: int | None = None) -> None:
    """A signal; to this process it is delivered before the call returns."""
    os.kill(pid or os.getpid(), number)


def test_a_signal_is_noted_and_the_first_one_stays() -> None:
    """received is None, then the first name, whatever comes later; nothing else happens."""
    signals = PreemptSignals((signal.SIGTERM, "SIGUSR1"))
    assert signals.received is None
    send(USR1)
    assert signals.received == "SIGUSR1"
    send(signal.SIGTERM)
    assert signals.received == "SIGUSR1"
    signals.close()


def test_the_handler_that_was_there_is_called_too_and_comes_back() -> None:
    """A Python handler installed before ours runs at each signal, and is installed afterwards."""
    calls: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    before = signal.signal(USR1, mine)
    signals = PreemptSignals((USR1,))
    send(USR1)
    send(USR1)
    assert calls == [USR1, USR1]
    assert signals.received == "SIGUSR1"
    signals.close()
    signals.close()
    assert signal.getsignal(USR1) is mine
    signal.signal(USR1, before)


def test_a_handler_that_raises_still_raises() -> None:
    """What the user's handler does is the user's: the note is taken first."""

    def leaves(number: int, frame: FrameType | None) -> None:
        raise SystemExit(5)

    before = signal.signal(USR1, leaves)
    signals = PreemptSignals((USR1,))
    with pytest.raises(SystemExit):
        send(USR1)
    assert signals.received == "SIGUSR1"
    signals.close()
    signal.signal(USR1, before)


def test_an_ignored_signal_stays_ignored_afterwards() -> None:
    """nohup's SIG_IGN is a handler as well: noted while we are there, ignored again after."""
    before = signal.signal(USR1, signal.SIG_IGN)
    signals = PreemptSignals((USR1,))
    send(USR1)
    assert signals.received == "SIGUSR1"
    signals.close()
    assert signal.getsignal(USR1) is signal.SIG_IGN
    send(USR1)
    signal.signal(USR1, before)


def test_two_in_sequence_leave_what_was_there() -> None:
    """A second manager after a first one finds, and leaves, the same handlers; each notes its own."""
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        signals = PreemptSignals((signal.SIGTERM,))
        assert signals.received is None
        send(signal.SIGTERM)
        assert signals.received == "SIGTERM"
        signals.close()
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("first_closed", ["older", "newer"])
def test_two_at_once_are_closed_in_any_order(first_closed: str) -> None:
    """Both note; after the older, the newer still does; after both, what was there is back."""
    before = signal.getsignal(USR1)
    older, newer = PreemptSignals((USR1,)), PreemptSignals((USR1,))
    send(USR1)
    assert (older.received, newer.received) == ("SIGUSR1", "SIGUSR1")
    order = [older, newer] if first_closed == "older" else [newer, older]
    order[0].close()
    third = PreemptSignals((USR1,))
    send(USR1)
    assert third.received == "SIGUSR1"
    third.close()
    order[1].close()
    assert signal.getsignal(USR1) is before


def test_a_handler_put_over_ours_stays_and_ours_only_passes_on() -> None:
    """Closing does not tear out somebody else's handler; the chain below it still works."""
    calls: list[str] = []
    before = signal.signal(USR1, lambda n, f: calls.append("below"))
    signals = PreemptSignals((USR1,))
    ours: Any = signal.getsignal(USR1)

    def above(number: int, frame: FrameType | None) -> None:
        calls.append("above")
        ours(number, frame)

    signal.signal(USR1, above)
    signals.close()
    assert signal.getsignal(USR1) is above
    send(USR1)
    assert calls == ["above", "below"]
    assert signals.received is None
    signal.signal(USR1, before)


def test_ctrl_c_is_a_preemption_once_and_an_interrupt_the_second_time() -> None:
    """A job that names SIGINT gets a save instead of KeyboardInterrupt, and can still insist."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = PreemptSignals((signal.SIGINT,))
    send(signal.SIGINT)
    assert signals.received == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    signals.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_forked_child_dies_of_it_as_if_we_were_not_there(number: signal.Signals) -> None:
    """The inherited handlers note nothing in a child: Process.terminate() on a worker ends it."""
    below, signals = PreemptSignals((number,)), PreemptSignals((number,))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"up")
        signal.alarm(20)
        while True:
            signal.pause()
    assert os.read(reading, 2) == b"up"
    send(number, child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    assert signals.received is None
    signals.close()
    below.close()


def test_in_a_forked_child_the_users_handler_runs_and_nothing_is_noted() -> None:
    """Chaining works in children too; the parent's flag is the parent's."""
    before = signal.signal(USR1, lambda n, f: os._exit(0 if signals.received is None else 1))
    signals = PreemptSignals((USR1,))
    child = os.fork()
    if child == 0:
        send(USR1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    signals.close()
    signal.signal(USR1, before)


def test_only_the_main_thread_may_install() -> None:
    """Elsewhere it is an error that says so, instead of Python's ValueError; no signal, no matter."""
    found: list[BaseException | None] = []

    def make(names: tuple[signal.Signals, ...]) -> None:
        try:
            PreemptSignals(names).close()
        except StateError as error:
            found.append(error)
        else:
            found.append(None)

    for names in ((USR1,), ()):
        thread = threading.Thread(target=make, args=(names,))
        thread.start()
        thread.join()
    assert "main thread" in str(found[0])
    assert found[1] is None


def test_closed_from_another_thread_it_notes_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """Handlers cannot be put back there: a warning, and from then on they only pass signals on."""
    calls: list[int] = []
    before = signal.signal(USR1, lambda n, f: calls.append(n))
    signals = PreemptSignals((USR1,))
    thread = threading.Thread(target=signals.close)
    thread.start()
    thread.join()
    assert "another thread" in caplog.text
    send(USR1)
    assert (calls, signals.received) == ([USR1], None)
    signals.close()
    signal.signal(USR1, before)


@pytest.mark.parametrize("bad", ["TERM", "SIGNOPE", 999, signal.SIGKILL, "SIGSTOP"])
def test_what_is_no_signal_is_refused(bad: int | str) -> None:
    """Unknown names and numbers, and those that cannot be caught, before anything is installed."""
    before = signal.getsignal(USR1)
    with pytest.raises(StateError):
        PreemptSignals((USR1, bad))
    assert signal.getsignal(USR1) is before


def test_names_and_numbers_mean_the_same_once() -> None:
    """SIGTERM by enum, number and name is one signal; a single one needs no tuple."""
    assert signals_of((signal.SIGTERM, 15, "SIGTERM")) == (signal.SIGTERM,)
    assert signals_of("SIGUSR1") == (USR1,)
    assert signals_of(()) == ()


# -- data loader workers ---------------------------------------------------------------------------

SHIELDED = """
import os, signal, subprocess, sys, time
from torch.utils.data import DataLoader
from ckptfs.manager.preemption import PreemptSignals, WorkerShield

class Numbers:
    def __len__(self): return 8
    def __getitem__(self, n): return os.getpid()

signals = PreemptSignals(("SIGTERM",))
shield = WorkerShield(("SIGTERM",)) if sys.argv[1] == "shielded" else None
loader = iter(DataLoader(Numbers(), batch_size=1, num_workers=1, prefetch_factor=1,
                         multiprocessing_context=sys.argv[2], worker_init_fn=shield))
worker = int(next(loader)[0])
subprocess.run(["kill", "-TERM", str(worker), str(os.getpid())], check=True)
deadline = time.monotonic() + 30  # another thread than this one may have been given the signal
while signals.received is None and time.monotonic() < deadline:
    time.sleep(0.001)
assert signals.received == "SIGTERM"
print("batches", 1 + sum(int(batch[0]) == worker for batch in loader), flush=True)
signals.close()
held = iter(DataLoader(Numbers(), batch_size=1, num_workers=1, multiprocessing_context=sys.argv[2],
                       worker_init_fn=shield))
next(held)  # still there when the interpreter ends
"""


def run_loader(shield: str, method: str) -> subprocess.CompletedProcess[str]:
    """Train on eight batches; a third process sends SIGTERM to trainer and worker after the first."""
    return subprocess.run(
        [sys.executable, "-c", SHIELDED, shield, method],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_a_shielded_data_loader_outlives_the_signal_and_still_ends() -> None:
    """All eight batches come, and the interpreter ends though a worker is still there."""
    ran = run_loader("shielded", "fork")
    assert (ran.returncode, ran.stdout.split()) == (0, ["batches", "8"]), ran.stderr


def test_without_a_shield_the_worker_dies_and_takes_training_with_it() -> None:
    """Why WorkerShield is there: the loader raises before any last save could be made."""
    ran = run_loader("bare", "fork")
    assert ran.returncode != 0
    assert "batches" not in ran.stdout


def test_a_shield_calls_your_worker_init_fn_and_pickles() -> None:
    """Spawned workers get it by pickle; what you had as worker_init_fn still runs."""
    shield = WorkerShield(("SIGUSR2",), then=print)
    assert pickle.loads(pickle.dumps(shield)) == shield
    child = os.fork()
    if child == 0:
        WorkerShield(("SIGUSR2",), then=os._exit)(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
