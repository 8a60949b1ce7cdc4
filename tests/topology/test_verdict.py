"""The wire format of steps: errors arrive as what they were, or as text that names them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs import errors
from ckptfs.control.control import SoloControl
from ckptfs.control.messages import (
    Message,
    StepVerdict,
    decode_message,
    decode_verdict,
    encode_message,
    encode_verdict,
    settle,
)
from ckptfs.control.rank_errors import collective_error, failure_of
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, CollectiveError, DeadlineError, Failure, NoSpaceError
from tests.measures import warned

EVERY_CLASS = [
    cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, CkptfsError)
]


@pytest.mark.parametrize("cls", EVERY_CLASS, ids=lambda c: str(c.__name__))
def test_every_ckptfs_error_arrives_as_itself(cls: type[CkptfsError]) -> None:
    """Class, text, uri, rank, node, hint and outcome are equal on the other side."""
    sent = cls("it failed", uri="file:///run", rank=3, node="n", hint="do", outcome="unknown")
    got = decode_verdict(encode_verdict(StepVerdict(error=sent))).error
    assert type(got) is cls
    assert str(got) == str(sent)
    assert vars(got).items() >= {k: v for k, v in vars(sent).items() if k != "__notes__"}.items()
    assert getattr(got, "errno", None) == getattr(sent, "errno", None)


@pytest.mark.parametrize("value", [[None, None], [], ["a"], None])
def test_what_is_common_stays_apart_from_the_pieces(value: object) -> None:
    """Also where it is the short form of a barrier's answer."""
    got = decode_verdict(encode_verdict(StepVerdict(value=value, apart=True)))
    assert (got.value, got.apart) == (value, True)


def test_extra_attributes_survive() -> None:
    """The failures of a CollectiveError and the silent ranks of a DeadlineError travel."""
    failure = Failure(1, "n", "ckptfs.errors.NoSpaceError", "full", 28, "Traceback ...")
    sent = CollectiveError("failed", failures={1: failure})
    got = decode_verdict(encode_verdict(StepVerdict(error=sent, final=True)))
    assert isinstance(got.error, CollectiveError)
    assert got.error.failures == {1: failure}
    assert got.error.all_are(NoSpaceError)
    assert got.final
    late = decode_verdict(
        encode_verdict(StepVerdict(error=DeadlineError("late", silent=(2, 5))))
    ).error
    assert isinstance(late, DeadlineError)
    assert late.silent == (2, 5)


def _world(rank: int, host: str) -> World:
    return replace(World.solo(), rank=rank, size=9, hostname=host, node=f"boot-{host}/mnt:[7]")


def test_ranks_that_met_the_same_are_told_together(caplog: pytest.LogCaptureFixture) -> None:
    """One sentence: ranks and hosts, what the first met and where, what to do; no ids of nodes. What is
    left out is in ``failures`` and in one record of the log, where it is the answer of a step and not
    each time that it is made; the error is both types on every rank.
    """
    worlds = [_world(rank, f"host-{rank // 3}") for rank in range(9)]
    failures = {}
    for rank in range(1, 9):
        error = NoSpaceError(
            f"write failed: {rank} MB missing", uri=f"file:///r/__{rank}_0.distcp", hint="free it"
        )
        failures[rank] = failure_of(error, worlds[rank])
    said = [Message("write", failure=failures.get(rank)) for rank in range(9)]
    with caplog.at_level("WARNING"):
        for _ in range(3):
            made = collective_error("write", failures, worlds)
        assert not warned(caplog)
        assert str(settle(said, None, worlds)[0].error) == str(made)
    got = decode_verdict(encode_verdict(StepVerdict(error=made))).error
    assert isinstance(got, CollectiveError)
    assert isinstance(got, NoSpaceError)
    assert str(got) == str(made)
    assert str(got) == (
        "write failed on 8 of 9 ranks: ranks 1, 2, 3, 4, 5, 6, 7, 8 on host-0, host-1, host-2: "
        "NoSpaceError: write failed: 1 MB missing at file:///r/__1_0.distcp -- free it"
    )
    assert got.failures == failures
    (record,) = caplog.records
    assert all(failure.message in record.getMessage() for failure in failures.values())


def test_what_to_do_is_told_before_what_a_second_group_met() -> None:
    """The text has 400 characters: the hint of the first rank stays, the last groups go."""
    worlds = [_world(rank, f"host-{rank}") for rank in range(3)]
    what = ["the digests are missing", "a data file is missing", "it is cut short"]
    failures = {
        rank: Failure(
            rank,
            "n",
            "ckptfs.errors.IncompleteCheckpointError",
            f"{text}, {'and so on ' * 8}",
            hint="start the ranks on the hosts again that hold it, " + "or copy them " * 8,
        )
        for rank, text in enumerate(what)
    }
    error = collective_error("read", failures, worlds)
    assert f"-- {failures[0].hint}" in str(error)
    assert what[0] in str(error)
    assert "; and 2 more" in str(error)
    assert error.failures == failures


@given(
    st.dictionaries(
        st.integers(0, 63),
        st.builds(Failure, st.just(0), st.just("n"), st.text(), st.text(), summary=st.text()),
        min_size=1,
    )
)
def test_the_text_of_many_failures_is_short(failures: dict[int, Failure]) -> None:
    """Whatever 64 ranks met."""
    worlds = [_world(rank, f"host-{rank}" * 9) for rank in range(64)]
    assert len(str(collective_error("write", failures, worlds))) <= 400


class _OursError(NoSpaceError):
    """A subclass that the other side may not have."""


def test_unknown_subclass_arrives_as_the_nearest_known_class() -> None:
    """A plug-in's own error is at least caught by what it derives from."""
    got = decode_verdict(encode_verdict(StepVerdict(error=_OursError("full")))).error
    assert type(got) is NoSpaceError
    assert failure_of(_OursError("full"), World.solo()).type == "ckptfs.errors.NoSpaceError"


@given(st.one_of(st.none(), st.binary(), st.text(), st.lists(st.integers())), st.text(min_size=1))
def test_values_round_trip(value: object, label: str) -> None:
    """What a rank says is what the coordinator hears, newlines and all."""
    assert decode_message(encode_message(Message(label, value=value))) == Message(
        label, value=value
    )
    assert decode_verdict(encode_verdict(StepVerdict(value=value))) == StepVerdict(value=value)


def test_failure_masks_credentials_everywhere() -> None:
    """Neither the message nor the traceback of a failure carries a secret to the other logs."""
    try:
        raise OSError(5, "GET https://user:hunter2@host/x failed")
    except OSError as error:
        failure = failure_of(error, World.solo())
    assert failure.errno == 5
    assert "hunter2" not in failure.message + failure.traceback
    assert "OSError" in failure.type


def test_solo_has_the_semantics_of_many() -> None:
    """One process: a local failure is a CollectiveError, a typed error of decide is itself."""
    control = SoloControl()
    assert control.step("x", lambda: 2) == [2]
    assert control.step("x", lambda: 2, len) == 1

    def full() -> None:
        raise NoSpaceError("full")

    with pytest.raises(CollectiveError, match="x failed on 1 of 1 ranks") as caught:
        control.step("x", full)
    assert caught.value.all_are(NoSpaceError)
    assert isinstance(caught.value.__cause__, NoSpaceError)
    with pytest.raises(NoSpaceError):
        control.step("x", lambda: None, lambda _: full())
    with pytest.raises(CollectiveError, match="KeyError"):
        control.step("x", lambda: "", lambda _: {"here": 1}["missing"])
    with pytest.raises(KeyboardInterrupt):
        control.step("x", _interrupt)


def _interrupt() -> None:
    raise KeyboardInterrupt
