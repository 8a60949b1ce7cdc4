"""Waiting for other ranks: an alarm is looked at often, and raised once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from ckptfs.control.heartbeat import Alarm, Monitor, Tempo
from ckptfs.control.messages import decode_verdict
from ckptfs.control.tcpstore_client import StepKeys, StoreClient
from ckptfs.control.tcpstore_control import SharedControl, Waits
from ckptfs.control.world import World
from ckptfs.errors import CollectiveError
from tests.measures import warned

WORLDS = tuple(
    replace(World.solo(), rank=rank, size=9, hostname=f"host-{rank}", node=f"n{rank}")
    for rank in range(9)
)
KEYS = StepKeys("test", 0, 9)


class _Alarmed(Monitor):
    """Ranks 2 to 8 are gone; after so many looks the coordinator's answer is there."""

    def __init__(self, client: StoreClient, answer: Future[bytes], looks: int) -> None:
        lives = [None] * 9
        tempo = Tempo.within(60.0)
        super().__init__(client, "test", WORLDS, lives, 1, timeout_s=60.0, tempo=tempo)
        self._answer, self._looks = answer, looks

    def alarm(self, keys: StepKeys, waited_s: float = 0.0) -> Alarm | None:
        self._looks -= 1
        if not self._looks:
            self._answer.set_result(b"the answer")
        why = "its process is gone, " + "as its node says " * 9
        return Alarm(dead=dict.fromkeys(range(2, 9), why))


@pytest.fixture
def pulse() -> Iterator[StoreClient]:
    """A client of a store of its own."""
    with contextlib.closing(StoreClient(HashStore(), "test")) as client:
        yield client


def waits(pulse: StoreClient, answer: Future[bytes], looks: int) -> Waits:
    """Those of rank 1."""
    monitor = _Alarmed(pulse, answer, looks)
    return Waits(SharedControl(None, pulse, monitor, WORLDS, 60.0, 0, closes_at_exit=False), 1)


def test_an_alarm_that_is_not_the_answer_is_told_to_nobody(
    pulse: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    """While the coordinator decides the dead change nothing; they are looked at five times a second."""
    pulse.call_short(lambda store: KEYS.claim(store, "decide"), 10.0)
    answer: Future[bytes] = Future()
    with caplog.at_level("WARNING"):
        assert waits(pulse, answer, 3).result(answer, KEYS, "write") == b"the answer"
    assert not warned(caplog)


def test_an_alarm_that_is_the_answer_is_told_once(
    pulse: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all that wait, the one that ends the step logs what the text of the error leaves out."""
    with caplog.at_level("WARNING"):
        for _ in range(2):
            answer: Future[bytes] = Future()
            waits(pulse, answer, 1).result(answer, KEYS, "write")
    error = decode_verdict(pulse.call(KEYS.read_verdict, 10.0)).error
    assert isinstance(error, CollectiveError)
    assert sorted(error.failures) == [2, 3, 4, 5, 6, 7, 8]
    (record,) = caplog.records
    assert "rank 8 on" in record.getMessage()
