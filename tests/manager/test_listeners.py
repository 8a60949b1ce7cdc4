"""EventDispatcher, LogListener and MetricsListener."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from ckptfs.events import (
    CopyCommitted,
    CopyFailed,
    Counters,
    Deleted,
    DeleteFailed,
    Event,
    Restored,
    Retained,
    SaveBegan,
    SaveCommitted,
    SaveFailed,
    SaveResult,
    SaveSkipped,
    Staged,
    Written,
)
from ckptfs.manager.listeners import (
    EventDispatcher,
    EveryRank,
    LogListener,
    MetricsListener,
    TimedListener,
    rank_rates,
)
from ckptfs.manager.manager import CheckpointManager
from ckptfs.uri import Uri
from tests.measures import own_threads

SLOW = Counters(size_bytes=10 << 20, payload_bytes=10 << 20, files=1, items=3, write_s=2.0)
FAST = Counters(size_bytes=30 << 20, payload_bytes=30 << 20, files=1, items=3, write_s=1.0)
IDLE = Counters()


def committed(step: int = 100, kind: str = "checkpoint") -> SaveCommitted:
    """A commit of three ranks; one of them had nothing to write."""
    ranks = (SLOW, FAST, IDLE)
    total = Counters.together(ranks)
    result = SaveResult(f"/run/step_{step}", step, "id", SLOW, total, ranks, wall_s=2.5)
    return SaveCommitted(result, kind, stall_s=0.25)


ALL_EVENTS: list[Event] = [
    SaveBegan("/run/step_1", 1, "checkpoint", "async"),
    Staged("/run/step_1", 1, 10, 0.1),
    Written("/run/step_1", 1, SLOW),
    committed(1),
    SaveFailed("/run/step_2", 2, "NoSpaceError: full", "failed"),
    SaveSkipped("/run/step_3", 3, 1),
    Retained(2, ("/run/step_0",)),
    Deleted("/run/step_0", "id0", "keep_latest=2"),
    DeleteFailed("/run/step_0", "id0", "busy"),
    Restored("/run/step_1", 1, ("/run/step_2: damaged",), 0.5),
    CopyCommitted("/run/step_1", "s3://b/step_1", 1 << 20, 0.5),
    CopyFailed("/run/step_1", "s3://b/step_1", "no route"),
]


def test_every_listener_hears_every_event_in_order_whoever_tells() -> None:
    """Events sent one after another, from whatever threads, reach each listener in that order."""
    heard: list[list[Event]] = [[], []]
    dispatcher = EventDispatcher([heard[0].append, heard[1].append])
    for event in ALL_EVENTS:
        teller = threading.Thread(target=dispatcher.tell, args=(event,))
        teller.start()
        teller.join()
    assert dispatcher.close(10)
    assert heard == [ALL_EVENTS, ALL_EVENTS]


def test_telling_does_not_wait_for_a_listener() -> None:
    """With a listener that is stuck, tell returns, and what was sent arrives afterwards."""
    go, heard = threading.Event(), []

    def slow(event: Event) -> None:
        assert go.wait(120)
        heard.append(event)

    dispatcher = EventDispatcher([slow])
    for event in ALL_EVENTS:
        dispatcher.tell(event)  # on this thread: it would never come to go.set()
    assert heard == []
    assert not dispatcher.drain(0.0)
    go.set()
    assert dispatcher.drain(10)
    assert heard == ALL_EVENTS
    assert dispatcher.close(10)


def test_listeners_are_called_one_at_a_time() -> None:
    """Many threads tell; no listener is ever entered while another call is inside."""
    inside, most, lock = 0, 0, threading.Lock()

    def listener(event: Event) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        with lock:
            inside -= 1

    dispatcher = EventDispatcher([listener, listener])

    def tell() -> None:
        for number in range(50):
            dispatcher.tell(committed(number))

    tellers = [threading.Thread(target=tell) for _ in range(4)]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join()
    assert dispatcher.close(10)
    assert most == 1


def test_a_failing_listener_is_logged_once_and_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Exceptions and sys.exit of one listener: one line, the others hear all, and close returns."""
    heard: list[Event] = []

    def raises(event: Event) -> None:
        raise RuntimeError("the dashboard is down")

    def leaves(event: Event) -> None:
        sys.exit(3)

    dispatcher = EventDispatcher([raises, leaves, heard.append])
    with caplog.at_level(logging.INFO, "ckptfs"):
        for event in ALL_EVENTS:
            dispatcher.tell(event)
        assert dispatcher.close(10)
    assert heard == ALL_EVENTS
    errors = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(errors) == 2
    assert "raises" in errors[0].getMessage()
    assert "SaveBegan" in errors[0].getMessage()
    assert errors[0].exc_info is not None


def test_a_listener_that_never_returns_holds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Telling continues, bounded, and close comes back after its deadline and says so."""
    hang = threading.Event()

    def hangs(event: Event) -> None:
        hang.wait()

    dispatcher = EventDispatcher([hangs])
    for _ in range(5000):
        dispatcher.tell(ALL_EVENTS[0])
    assert not dispatcher.close(0.05)
    assert not dispatcher.close(0.0)
    assert "dropped" in caplog.text
    assert "not returned" in caplog.text
    hang.set()


def test_after_close_nothing_is_told() -> None:
    """An event that comes after close is dropped, without a thread and without an error."""
    heard: list[Event] = []
    dispatcher = EventDispatcher([heard.append])
    assert dispatcher.close()
    dispatcher.tell(ALL_EVENTS[0])
    assert dispatcher.drain(0.0)
    assert heard == []


def test_a_listener_may_close_the_bell_that_calls_it() -> None:
    """Neither close nor drain waits for the listener that calls it."""
    ended = threading.Event()

    def closes(event: Event) -> None:
        assert dispatcher.drain(30)
        assert dispatcher.close(30)
        ended.set()

    dispatcher = EventDispatcher([closes])
    dispatcher.tell(ALL_EVENTS[0])
    assert ended.wait(120)


def test_without_listeners_there_is_no_thread() -> None:
    """A bell without a listener costs nothing."""
    before = own_threads()
    dispatcher = EventDispatcher()
    dispatcher.tell(ALL_EVENTS[0])
    assert own_threads() <= before
    assert dispatcher.close()


def test_other_ranks_tell_only_those_who_asked() -> None:
    """On ranks other than the coordinator, listeners and on_commit are silent, but for EveryRank."""
    heard: dict[str, list[Any]] = {"plain": [], "every": [], "uri": []}
    for rank in (0, 1):
        dispatcher = EventDispatcher(
            [heard["plain"].append, EveryRank(heard["every"].append)],
            on_commit=heard["uri"].append,
            rank=rank,
        )
        dispatcher.tell(committed())
        assert dispatcher.close(10)
    assert [len(v) for v in heard.values()] == [1, 2, 1]


def test_on_commit_sees_committed_uris_only() -> None:
    """Of all events, the hook is called for the one commit, with its URI."""
    uris: list[str] = []
    dispatcher = EventDispatcher(on_commit=uris.append)
    for event in ALL_EVENTS:
        dispatcher.tell(event)
    assert dispatcher.close(10)
    assert uris == ["/run/step_1"]


def test_a_timed_listener_learns_when_it_happened() -> None:
    """Times are those of telling: a listener that was held up still gets them, in order."""
    times: list[int] = []
    go = threading.Event()

    class Timed(TimedListener):
        def hear(self, event: Event, at_ns: int) -> None:
            assert go.wait(120)
            times.append(at_ns)

    dispatcher = EventDispatcher([Timed()])
    told = [_now_ns()]
    for event in ALL_EVENTS[:3]:
        dispatcher.tell(event)
        told.append(_now_ns())
    go.set()
    assert dispatcher.close(10)
    assert len(times) == 3
    assert all(told[n] <= times[n] <= told[n + 1] for n in range(3))


def test_the_child_of_a_fork_tells_nobody() -> None:
    """A forked worker has no thread to serve the queue: telling and closing there are harmless."""
    heard: list[Event] = []
    dispatcher = EventDispatcher([heard.append])
    dispatcher.tell(ALL_EVENTS[0])
    assert dispatcher.drain(10)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang of the child is a failure, not a hang of the test
        dispatcher.tell(ALL_EVENTS[1])
        os._exit(
            0 if dispatcher.drain(5) and dispatcher.close(5) and dispatcher._events.empty() else 1
        )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dispatcher.close(10)
    assert heard == ALL_EVENTS[:1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_manager_tells_its_listeners_what_happens(
    mode: Literal["sync", "async"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Per save: it began, it is durable, it is committed; on_commit only then, and a listener that
    fails every time costs neither the saves nor the end.
    """
    heard: list[str] = []
    numbers: list[dict[str, float]] = []
    whole: list[bool] = []
    told_by: list[threading.Thread] = []

    def raises(event: Event) -> None:
        raise RuntimeError("the dashboard is down")

    def committed_at(uri: str) -> None:
        told_by.append(threading.current_thread())
        place = Path(Uri.parse(uri).local_path)
        heard.append(f"on_commit {place.name}")
        whole.append((place / ".metadata").exists())

    with CheckpointManager(
        tmp_path,
        mode=mode,
        keep_latest=1,
        listeners=[
            raises,
            lambda event: heard.append(type(event).__name__),
            MetricsListener(lambda metrics, step: numbers.append(metrics)),
        ],
        on_commit=committed_at,
    ) as manager:
        for step in (1, 2):
            manager.save(step, {"values": list(range(1000))})
            manager.wait()
    in_order = [h for h in heard if h not in ("Staged", "Retained", "Deleted")]
    assert in_order == [
        *("SaveBegan", "Written", "SaveCommitted", "on_commit step_1"),
        *("SaveBegan", "Written", "SaveCommitted", "on_commit step_2"),
    ]
    assert whole[-1]
    assert not told_by[-1].is_alive()
    assert "Deleted" in heard
    assert numbers[0]["ckptfs/checkpoint/size_bytes"] > 1000
    assert caplog.text.count("RuntimeError: the dashboard is down") == 1


def _now_ns() -> int:
    import time

    return time.time_ns()


# -- into logging ----------------------------------------------------------------------------------


def test_one_line_per_commit_with_everything_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """Step, bytes, seconds, rates of all and of the slowest and fastest rank, and the stall."""
    with caplog.at_level(logging.INFO):
        LogListener(logging.getLogger("mine"))(committed())
    (line,) = caplog.messages
    assert line == (
        "checkpoint of step 100 committed: /run/step_100 (41.9 MB in 2.50 s, 21.0 MB/s, "
        "per rank 5.24 MB/s to 31.5 MB/s, training stopped for 0.250 s)"
    )


def test_a_restore_from_a_copy_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A job that trains on does so from elsewhere: which copy, and of what."""
    event = Restored("s3://b/run/step_1", 1, (), 0.5, copy_of="/run")
    with caplog.at_level(logging.INFO):
        LogListener(logging.getLogger("mine"))(event)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "restored step 1 from s3://b/run/step_1, a copy of /run"


@pytest.mark.parametrize("event", ALL_EVENTS, ids=lambda e: type(e).__name__)
def test_bad_news_are_warnings_and_every_event_has_a_line(
    event: Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures, skips and retries are seen at the default level; nothing is lost."""
    bad = (SaveFailed, SaveSkipped, DeleteFailed, CopyFailed, Restored)
    with caplog.at_level(logging.DEBUG):
        LogListener()(event)
    assert caplog.records
    warned = any(r.levelno == logging.WARNING for r in caplog.records)
    assert warned == isinstance(event, bad)


def test_ranks_that_wrote_nothing_are_no_slow_ranks() -> None:
    """The slowest rank is one that wrote; none at all is 0.0, not an error."""
    assert rank_rates((SLOW, FAST, IDLE)) == (5.0, 30.0)
    assert rank_rates((IDLE,)) == (0.0, 0.0)


# -- flat numbers ----------------------------------------------------------------------------------


def test_a_commit_becomes_flat_numbers() -> None:
    """Names under the kind, units last, floats only, with the step of the save."""
    got: list[tuple[dict[str, float], int]] = []
    listener = MetricsListener(lambda metrics, step: got.append((metrics, step)))
    listener(committed(100))
    listener(committed(100, "weights"))
    (metrics, step), (weights, _) = got
    assert step == 100
    assert metrics["ckptfs/checkpoint/stall_s"] == 0.25
    assert metrics["ckptfs/checkpoint/size_bytes"] == float(40 << 20)
    assert metrics["ckptfs/checkpoint/mib_per_s"] == 20.0
    assert metrics["ckptfs/checkpoint/rank_min_mib_per_s"] == 5.0
    assert metrics["ckptfs/checkpoint/rank_max_mib_per_s"] == 30.0
    assert metrics["ckptfs/checkpoint/write_s"] == 2.0
    assert metrics["ckptfs/checkpoint/wall_s"] == 2.5
    assert all(isinstance(v, float) for v in metrics.values())
    assert set(weights) == {k.replace("checkpoint", "weights") for k in metrics}


def test_counts_go_up_and_carry_the_step_they_belong_to() -> None:
    """Failures, skips, deletes and copies count since the start; kept is a level."""
    got: list[tuple[dict[str, float], int]] = []
    listener = MetricsListener(lambda metrics, step: got.append((metrics, step)))
    for event in [*ALL_EVENTS, *ALL_EVENTS[4:]]:
        listener(event)
    last: dict[str, float] = {}
    for metrics, _ in got:
        last |= metrics
    for name in (
        "failures",
        "skipped",
        "deleted",
        "delete_failures",
        "copies",
        "copy_failures",
        "kept",
    ):
        assert last[f"ckptfs/{name}"] == 2.0
    assert ({"ckptfs/failures": 1.0}, 2) in got


def _callback_fails(metrics: dict[str, float], step: int) -> None:
    raise OSError("wandb is offline")


@pytest.mark.parametrize("callback", [_callback_fails])
def test_a_failing_callback_is_named_by_the_log(
    callback: Callable[[dict[str, float], int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The user's own exception is in the log, with its traceback."""
    dispatcher = EventDispatcher([MetricsListener(callback)])
    dispatcher.tell(committed())
    assert dispatcher.close(10)
    assert "MetricsListener" in caplog.text
    assert "wandb is offline" in caplog.text
