"""When a request is tried again, and when no more."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptfs.storage.retry import NOT_DONE, Retrier, RetryPolicy, wait_s
from tests.measures import warned
from tests.storage.objects import FakeTime, busy, lost


def failing(*errors: StorageError) -> Callable[[], str]:
    """A request that raises these in turn, then answers."""
    left = list(errors)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return request


def test_waits_double_up_to_the_cap() -> None:
    """0.1 s, 0.2 s, ... 5 s, 5 s: the longest wait after each failure."""
    waits = [wait_s(RetryPolicy(1e9), n, 1.0, 0.0) for n in range(1, 9)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@given(
    failures=st.integers(1, 10_000),
    share=st.floats(0, 1),
    since=st.floats(0, 100),
    retry=st.floats(0, 100),
)
def test_a_wait_is_within_its_range_and_the_deadline(
    failures: int, share: float, since: float, retry: float
) -> None:
    """Never above the cap, never past the deadline, None exactly when the time is over."""
    found = wait_s(RetryPolicy(retry), failures, share, since)
    if since >= retry:
        assert found is None
    else:
        assert found is not None
        assert 0 <= found <= min(5.0, retry - since)


def test_the_whole_range_is_drawn() -> None:
    """Full jitter: with a draw of 0 there is no wait at all, so ranks spread over the whole range."""
    assert wait_s(RetryPolicy(), 5, 0.0, 0.0) == 0.0
    assert wait_s(RetryPolicy(), 5, 0.5, 0.0) == pytest.approx(0.8)


def test_it_goes_on_until_the_time_is_over() -> None:
    """The deadline counts from the first failure; the last try is at its end, then the error comes
    with endpoint, tries and time.
    """
    time = FakeTime()
    tries = []

    def dead() -> None:
        tries.append(time.now_s)
        time.now_s += 0.5  # the first failure comes half a second after the first try
        raise busy()

    retrier = time.retrier(Retrier("http://host:1", RetryPolicy(10.0)))
    with pytest.raises(TransientError) as caught:
        retrier.run(dead)
    assert tries[0] == 0.0
    assert tries[-1] == 10.5
    assert f"http://host:1, {len(tries)} tries in 10.5 s" in str(caught.value)


def test_no_retry_for_zero_seconds() -> None:
    """retry_s=0 is one try, and says so."""
    retrier = FakeTime().retrier(Retrier("http://host", RetryPolicy(0.0)))
    with pytest.raises(TransientError, match="1 try"):
        retrier.run(failing(busy()))


def test_what_may_have_happened_is_repeated_only_where_twice_is_once() -> None:
    """A lost answer of a conditional put goes up at once, untouched; of anything else it is tried
    again.
    """
    retrier = FakeTime().retrier(Retrier("http://host"))
    assert retrier.run(failing(lost(), busy())) == "answer"
    error = lost()
    with pytest.raises(AnswerLostError) as caught:
        retrier.run(failing(error), after=NOT_DONE)
    assert caught.value is error
    assert error.message == "connection reset"
    assert retrier.run(failing(busy(), busy()), after=NOT_DONE) == "answer"


@pytest.mark.parametrize("error", [NotFoundError("x"), AccessError("x"), StorageError("x")])
def test_what_no_retry_cures_is_raised_at_once(error: StorageError) -> None:
    """One try, no wait, the error as it was."""
    time = FakeTime()
    with pytest.raises(type(error)) as caught:
        time.retrier(Retrier("http://host")).run(failing(error))
    assert caught.value is error
    assert error.message == "x"
    assert time.slept_s == []


def test_an_answer_after_failures_tells_of_them() -> None:
    """Busy twice, then a refusal: the refusal names the endpoint and the third try."""
    with pytest.raises(AccessError, match="http://host, 3 tries"):
        FakeTime().retrier(Retrier("http://host")).run(failing(busy(), busy(), AccessError("no")))


def test_whoever_stops_is_not_kept_waiting() -> None:
    """With ``stop`` set there is no further try, and a real wait ends at once."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(TransientError):
        Retrier("http://host", RetryPolicy(1e6, first_s=1e6, cap_s=1e6)).run(
            failing(busy()), stop=stop
        )
    done = threading.Event()

    def wait() -> None:
        stopped = threading.Event()
        threading.Timer(0.01, stopped.set).start()
        with pytest.raises(TransientError):
            Retrier("http://host", RetryPolicy(1e6, first_s=1e5, cap_s=1e5), draw=lambda: 1.0).run(
                failing(busy(), busy()), stop=stopped
            )
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(120)


def test_it_pickles() -> None:
    """A storage takes its retries into another process."""
    retrier = Retrier("http://host", RetryPolicy(7.0))
    assert pickle.loads(pickle.dumps(retrier)) == retrier


def test_a_silent_endpoint_is_told_once_after_three_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which host, which error, how long it continues: one line, whatever number of requests wait."""
    time = FakeTime()
    retrier = time.retrier(Retrier("http://host:1", RetryPolicy(60.0)))

    def dead() -> None:
        if time.now_s < 3.0:
            assert not warned(caplog)
        raise busy()

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(TransientError):
                replace(retrier, policy=RetryPolicy(20.0)).run(dead)
    (line,) = caplog.messages
    assert line.startswith("a request to http://host:1 has failed for 3 s: ")
    assert line.endswith("; ckptfs retries it for another 17 s")


def test_the_line_does_not_wait_for_the_end_of_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    """The pause that begins before the third second ends after it: the line comes at three."""
    time = FakeTime()
    retrier = time.retrier(Retrier("http://host:1", RetryPolicy(60.0)))
    told: list[float] = []
    sleep = retrier.sleep

    def watched(pause_s: float, stop: threading.Event | None) -> None:
        if caplog.messages and not told:
            told.append(time.now_s)
        sleep(pause_s, stop)

    with caplog.at_level(logging.WARNING), pytest.raises(TransientError):
        replace(retrier, sleep=watched).run(failing(*[busy() for _ in range(999)]))
    assert told == [pytest.approx(3.0)]


def test_a_short_trouble_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Two busy answers within three seconds cause no message, nor does a shorter deadline."""
    with caplog.at_level(logging.WARNING):
        assert FakeTime().retrier(Retrier("http://host")).run(failing(busy(), busy())) == "answer"
        with pytest.raises(TransientError):
            FakeTime().retrier(Retrier("http://host", RetryPolicy(3.0))).run(
                failing(*[busy() for _ in range(99)])
            )
    assert not warned(caplog)


def test_an_endpoint_that_the_error_names_is_not_named_twice() -> None:
    """The cause names its host already: only the tries are added."""
    with pytest.raises(TransientError) as caught:
        FakeTime().retrier(Retrier("http://host:1", RetryPolicy(1.0))).run(
            failing(*[TransientError("nothing listens at http://host:1") for _ in range(99)])
        )
    assert caught.value.message.count("http://host:1") == 1
