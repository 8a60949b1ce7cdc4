"""What each rank alone reads of a step's answer: made one by one, and nothing of it stays in the store."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from ckptfs.control import tcpstore_client
from ckptfs.control.control import open_control
from ckptfs.control.messages import apart
from ckptfs.control.tcpstore_client import StepKeys
from tests.multiprocess.harness import Rank, launch

SIZE_BYTES = 3 << 20  # several chunks
END_S = 400.0


class Bulky:
    """A rank's piece. It knows when it is encoded, and refuses on request."""

    def __init__(self, rank: int, log: list[str], *, refuses: bool = False) -> None:
        self.rank, self.log, self.refuses = rank, log, refuses

    def __reduce__(self) -> tuple[Any, ...]:
        self.log.append(f"encoded {self.rank}")
        if self.refuses:
            raise RuntimeError(f"the piece of rank {self.rank} cannot be pickled")
        return bytes, (SIZE_BYTES,)


def takes_pieces(rank: Rank) -> Any:
    """A step with a piece for each rank, on its way to which something happens; then another step."""
    rank.init_group()
    at, who, log = rank.args["at"], rank.args.get("who"), list[str]()
    if rank.number == who and at == "killed":
        follow(StepKeys, "take_piece", lambda: os.kill(os.getpid(), signal.SIGKILL))
    if rank.number == who and at == "interrupted":
        follow(StepKeys, "read_verdict", lambda: os.kill(os.getpid(), signal.SIGINT))
    if rank.number == 0:
        notes_puts(log)

    def decide(values: list[None]) -> Any:
        refused = at == "refused"
        return apart(
            "all", [Bulky(r, log, refuses=refused and r == who) for r in range(len(values))]
        )

    with open_control(timeout_s=END_S) as control:
        try:
            common, piece = control.step("first", lambda: None, decide)
            end = common if rank.number == 0 else len(piece)
        except (KeyboardInterrupt, RuntimeError) as error:
            end = f"{type(error).__name__}: {error}"
        second: Any = None
        try:
            second = control.step("second", lambda: rank.number)
        except RuntimeError as error:
            second = type(error).__name__
    return end, second, log


def follow(owner: Any, name: str, first: Any) -> None:
    """From now on ``first`` happens before that method, once."""
    method, left = getattr(owner, name), [first]

    def now(*args: Any) -> Any:
        if left:
            left.pop()()
        return method(*args)

    setattr(owner, name, now)


def notes_puts(log: list[str]) -> None:
    """From now on a piece that goes into the store is noted."""
    put = tcpstore_client.put

    def noted(store: Any, key: str, data: bytes) -> None:
        if "/for/" in key:
            log.append(f"put {key.rpartition('/')[2]}")
        put(store, key, data)

    vars(tcpstore_client)["put"] = noted


def left_in(store: Any) -> list[str]:
    """Keys of pieces that are there still."""
    if not hasattr(store, "list_keys"):
        pytest.skip("this torch cannot list the keys of a store")
    return [key for key in store.list_keys() if "/for/" in key]


def test_pieces_are_encoded_one_at_a_time() -> None:
    """Each goes into the store before the next is made: of 512 nodes' manifests one is in memory."""
    with launch(takes_pieces, 4, args={"at": "none"}) as ranks:
        (end, second, log), *others = ranks.values()
        assert (end, second) == ("all", [0, 1, 2, 3])
        assert [other[0] for other in others] == [SIZE_BYTES] * 3
        assert left_in(ranks.store) == []
    made = [word for r in (1, 2, 3) for word in (f"encoded {r}", f"put {r}")]
    assert log == ["encoded 0", *made]


def test_a_piece_that_cannot_be_pickled_fails_the_step_on_all_ranks() -> None:
    """Also the last one, when others are in the store; these go, and the next step works."""
    with launch(takes_pieces, 3, args={"at": "refused", "who": 2}) as ranks:
        for end, second, _ in ranks.values():
            assert end.startswith("CollectiveError: first failed on 1 of 3 ranks")
            assert "the piece of rank 2 cannot be pickled" in end
            assert second == [0, 1, 2]
        assert left_in(ranks.store) == []


def test_the_piece_of_a_rank_that_dies_before_it_reads_it_goes() -> None:
    """The coordinator deletes it where it leaves."""
    with launch(takes_pieces, 3, args={"at": "killed", "who": 2}) as ranks:
        for result in ranks.results(ranks=[0, 1], timeout_s=END_S):
            assert result.value is not None, result.log
            assert result.value[1] == "CollectiveError"
        assert left_in(ranks.store) == []


def test_the_piece_of_a_rank_that_was_interrupted_goes() -> None:
    """Ctrl-C while it waits for the answer; it lives, and takes part in the next step."""
    with launch(takes_pieces, 3, args={"at": "interrupted", "who": 1}) as ranks:
        values = ranks.values()
        assert values[1][0].startswith("KeyboardInterrupt")
        assert [second for _, second, _ in values] == [[0, 1, 2]] * 3
        assert left_in(ranks.store) == []
