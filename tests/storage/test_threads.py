"""The threads of an object storage."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from concurrent.futures import wait

import pytest

from ckptfs.storage import threads
from ckptfs.storage.threads import Threads


def test_work_runs_in_order_and_no_more_at_once_than_told() -> None:
    """Three threads: three at once, never a fourth; results and errors reach the one that waits."""
    pool = Threads(3, "t")
    gate = threading.Barrier(3)
    names: set[str] = set()
    most = []
    lock = threading.Lock()
    now = [0]

    def work(number: int) -> int:
        with lock:
            now[0] += 1
            most.append(now[0])
        gate.wait(120)
        names.add(str(threading.get_ident()))
        with lock:
            now[0] -= 1
        return number

    futures = [pool.submit(work, n) for n in range(9)]
    assert [f.result(120) for f in futures] == list(range(9))
    assert max(most) == 3
    assert len(names) == 3
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(120)
    assert pool.submit(int).result(120) == 0  # and the thread lives on
    pool.shutdown()


def test_a_single_thread_keeps_the_order() -> None:
    """First in, first out: the lowest part of an upload is always the one under way."""
    pool = Threads(1, "t")
    seen: list[int] = []
    for future in [pool.submit(seen.append, n) for n in range(100)]:
        future.result(120)
    assert seen == list(range(100))
    pool.shutdown()


def test_shutdown_takes_no_more_and_lets_the_rest_end() -> None:
    """What runs ends; what waits is done, or cancelled where that was asked for."""
    for cancel in (False, True):
        pool = Threads(1, "t")
        hold, held = threading.Event(), threading.Event()

        def work(held: threading.Event = held, hold: threading.Event = hold) -> bool:
            held.set()
            return hold.wait(120)

        first, second = pool.submit(work), pool.submit(int)
        assert held.wait(120)
        pool.shutdown(wait=False, cancel_futures=cancel)
        with pytest.raises(RuntimeError):
            pool.submit(int)
        assert second.cancelled() is cancel
        assert wait([second], 0).done == ({second} if cancel else set())  # the waiter gets it
        hold.set()
        assert first.result(120)
        if not cancel:
            assert second.result(120) == 0


def test_shutdown_waits_for_what_runs() -> None:
    """Who leaves a with block may free what the threads were writing into."""
    hold, seen = threading.Event(), list[bool]()
    threading.Timer(0.2, hold.set).start()
    with Threads(2, "t") as pool:
        pool.submit(lambda: seen.append(hold.wait(120)))
    assert seen == [True]


def test_idle_threads_end_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that was not closed keeps no thread forever, and works on when it is used again."""
    monkeypatch.setattr(threads, "_IDLE_S", 0.01)
    pool = Threads(2, "ends")
    for _ in range(3):
        assert pool.submit(int).result(120) == 0
        for thread in threading.enumerate():
            if thread.name == "ends":
                thread.join(120)
                assert not thread.is_alive()


def test_two_tasks_for_one_idle_thread_start_another() -> None:
    """Given both before it wakes up: they run at once, or two parts would go one after the other."""
    pool = Threads(2, "t")
    pool.submit(int).result(120)
    while not pool._idle:
        pass
    gate = threading.Barrier(2)
    with pool._changed:
        both = [pool.submit(gate.wait, 20) for _ in range(2)]
    assert {future.result(120) for future in both} == {0, 1}
    pool.shutdown()


def test_nothing_is_held_while_idle() -> None:
    """What was lent for a request is free when it is done: a gigabyte tensor does not stay behind."""

    class Lent:
        def __call__(self) -> None:
            return

    pool = Threads(1, "t")
    lent = Lent()
    gone = weakref.ref(lent)
    pool.submit(lent).result(120)
    del lent
    while not pool._idle:
        pass
    with pool._changed:
        assert gone() is None
    pool.shutdown()


SAVE_AT_THE_END = """
import threading
from ckptfs.storage.registry import open_storage

storage = open_storage("objects+memory://end/run", {"part_size_bytes": 65536})

def save():
    threading.main_thread().join()
    with storage.open_write("f") as writer:
        writer.write(b"x" * (1 << 20))
    buffer = bytearray(1 << 20)
    with storage.open_read("f") as reader:
        reader.read_into(0, memoryview(buffer))
    print("saved", buffer == b"x" * (1 << 20), flush=True)

threading.Thread(target=save).start()
"""


def test_a_save_goes_on_when_the_main_thread_has_ended() -> None:
    """A script that ends with an asynchronous save: its parts are still sent, and the process ends."""
    done = subprocess.run(
        [sys.executable, "-c", SAVE_AT_THE_END],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert done.stdout == "saved True\n"
    assert done.stderr == ""


def test_one_of_the_threads_does_not_wait_for_itself() -> None:
    """The last reference to a storage may go away on a thread of its own."""
    pool = Threads(1, "t")
    pool.submit(pool.shutdown).result(120)


def test_a_child_of_a_fork_does_not_wait_for_the_threads_of_its_parent() -> None:
    """They are not in it, however many ran when it was made; nor is the thread that held their lock."""
    script = """
import os, threading, warnings
warnings.simplefilter("ignore")
from ckptfs.storage.threads import Threads
pool, held, hold = Threads(1, "t"), threading.Event(), threading.Event()
pool.submit(lambda: (held.set(), hold.wait(60)))
assert held.wait(60)
pid = os.fork()
if not pid:
    pool.shutdown()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
hold.set()
pool.shutdown()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=400)
