"""The messages of ranks in a step, and the one answer that all obey. Pure; no store, no thread.

    every rank       local() -> Message(label, value | failure)          attempt
    coordinator      all messages -> decide -> Verdict(value | error)    settle
    every rank       Verdict -> return the value, or raise the error     Verdict.unwrap

``decide`` may answer ``apart(common, pieces)``: every rank reads ``common``, and each only its piece.

A ``Stage`` is what would be a step of its own, if it did not share one with other stages. Its errors are those of
such a step, and an error of an earlier stage counts before those of all later ones.

Values are sent pickled, because the processes of one job trust each other. Errors are not, see ``rank_errors``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from ckptfs.control.rank_errors import (
    collective_error,
    error_fields,
    error_from,
    failure_of,
    log_left_out,
)
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, CollectiveError, Failure

__all__ = [
    "Message",
    "Stage",
    "StepVerdict",
    "apart",
    "attempt",
    "decide_stages",
    "decode_message",
    "decode_verdict",
    "encode_message",
    "encode_verdict",
    "for_rank",
    "joined",
    "message_by",
    "run_stages",
    "settle",
    "split",
    "stage_answers",
]

T = TypeVar("T")
C = TypeVar("C")
P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends in a step: its value, or how it failed. label "": it has left."""

    label: str
    value: Any = None
    failure: Failure | None = None

    @property
    def has_left(self) -> bool:
        """Whether this is the last message of a rank that will not call again."""
        return not self.label


@dataclass(frozen=True, slots=True)
class _Apart:
    """A value for all ranks, and a piece for each of them."""

    common: Any
    pieces: Sequence[Any]


def apart(common: C, pieces: Sequence[P] = ()) -> tuple[C, P]:
    """Make an answer for ``decide`` with a piece for each rank.

    On rank r the step returns ``(common, pieces[r])``. The type is that of the result; only a step
    can use the value. In one common value, thousands of ranks would read thousands of pieces each.

    pieces: One for each rank, in order. Empty: the step returns (common, None).
    """
    return _Apart(common, pieces)  # type: ignore[return-value] # what the step makes of it


@dataclass(frozen=True, slots=True)
class StepVerdict(Generic[R]):
    """The answer of a step: a value, or the error that every rank raises.

    final: A rank is gone for good, so every later step immediately ends with this error too. apart:
    There is a piece for each rank next to it.
    """

    value: R | None = None
    error: CkptfsError | None = None
    final: bool = False
    apart: bool = False

    def unwrap(self, cause: BaseException | None = None) -> R:
        """Return the value or raise the error. ``cause``: this rank's own failure, if any."""
        if self.error is None:
            return self.value  # type: ignore[return-value] # None is a value too
        if cause is not None and cause is not self.error:
            raise self.error from cause
        raise self.error


def attempt(
    label: str, local: Callable[[], T], world: World
) -> tuple[Message, BaseException | None]:
    """Run one rank's part. All exceptions, Ctrl-C too, are caught, because the others must know."""
    try:
        return Message(label, value=local()), None
    except BaseException as error:  # noqa: BLE001 - returned to the caller, who raises it
        return Message(label, failure=failure_of(error, world)), error


def settle(
    messages: Sequence[Message], decide: Callable[[list[T]], R] | None, worlds: Sequence[World]
) -> tuple[StepVerdict[R], BaseException | None]:
    """Make the one answer, on the coordinator. Also returns the error that ``decide`` raised.

    It logs what the text of an error leaves out, because each answer is made only once.
    """
    verdict, raised = _settled(messages, decide, worlds)
    if verdict.error is not None:
        log_left_out(verdict.error, worlds)
    return verdict, raised


def _settled(
    messages: Sequence[Message], decide: Callable[[list[T]], R] | None, worlds: Sequence[World]
) -> tuple[StepVerdict[R], BaseException | None]:
    here = [s for s in messages if not s.has_left]
    if len({s.label for s in here}) > 1:
        return StepVerdict(error=_out_of_step(messages)), None
    failures = {rank: s.failure for rank, s in enumerate(messages) if s.failure}
    if failures:
        error = collective_error(messages[0].label, failures, worlds)
        return StepVerdict(error=error, final=len(here) < len(messages)), None
    values = [s.value for s in messages]
    if decide is None:
        return StepVerdict(value=values), None  # type: ignore[arg-type] # without decide R is list[T]
    try:
        return StepVerdict(value=decide(values)), None
    except CkptfsError as error:
        return StepVerdict(error=error), error
    except BaseException as error:  # noqa: BLE001 - returned to the caller, who raises it
        failure = failure_of(error, worlds[0])
        return StepVerdict(error=collective_error(messages[0].label, {0: failure}, worlds)), error


def _out_of_step(messages: Sequence[Message]) -> CollectiveError:
    ranks: dict[str, list[int]] = {}
    for rank, s in enumerate(messages):
        ranks.setdefault(s.label or "(left)", []).append(rank)
    calls = ", ".join(f"{label!r} on ranks {who}" for label, who in ranks.items())
    return CollectiveError(
        f"ranks made different calls at the same time: {calls}",
        hint="make the same collective calls in the same order on every rank; give a second "
        "thread its own control",
    )


# -- stages: several decisions in one step ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several decisions that ranks take in one step, because none needs the answer of another.

    Attributes:
        label: What is being done, for messages; as the label of a step.
        local: As of a step, but another rank may have failed in an earlier stage: it changes nothing that has to
            be undone then.
        decide: As of a step. It does not run if a stage before it failed.
        always: Whether ``local`` runs even if an earlier stage failed on this rank. It is needed if it talks to
            the other ranks, which would otherwise wait for this one.
    """

    label: str
    local: Callable[[], Any]
    decide: Callable[[list[Any]], Any]
    always: bool = False


@dataclass(frozen=True, slots=True)
class _Failed:
    """How a stage failed on one rank."""

    failure: Failure


def run_stages(
    stages: Sequence[Stage], world: World
) -> tuple[list[Any], list[tuple[str, Exception]]]:
    """Run one rank's part of all stages.

    Returns:
        What the rank sends: the value of each stage, or its failure. And this rank's errors, with their stages.
    """
    values: list[Any] = []
    errors: list[tuple[str, Exception]] = []
    for stage in stages:
        if errors and not stage.always:
            values.append(None)  # it is never read: the answer is the error of the earlier stage
            continue
        try:
            values.append(stage.local())
        except Exception as error:  # noqa: BLE001 - returned to the caller, who raises it
            values.append(_Failed(failure_of(error, world)))
            errors.append((stage.label, error))
    return values, errors


def decide_stages(
    stages: Sequence[Stage], received: Sequence[Sequence[Any]], worlds: Sequence[World]
) -> tuple[list[tuple[bool, Any]], Mapping[int, Any] | None]:
    """Decide all stages in order, on the coordinator. The first error is that of the step.

    Returns:
        The answer for ``stage_answers``, with a piece for each rank if some stage has pieces.
    """
    answers: list[Any] = []
    for number, stage in enumerate(stages):
        values = [sent[number] for sent in received]
        failures = {r: v.failure for r, v in enumerate(values) if isinstance(v, _Failed)}
        if failures:
            raise collective_error(stage.label, failures, worlds)
        try:
            answers.append(stage.decide(values))
        except CkptfsError:
            raise
        except Exception as error:
            failure = failure_of(error, worlds[0])
            raise collective_error(stage.label, {0: failure}, worlds) from error
    common = [(True, a.common) if isinstance(a, _Apart) else (False, a) for a in answers]
    with_pieces = {n: a.pieces for n, a in enumerate(answers) if isinstance(a, _Apart) and a.pieces}
    pieces: list[Mapping[int, Any] | None] = [
        {n: p[r] for n, p in with_pieces.items()} for r in range(len(received))
    ]
    return apart(common, pieces if with_pieces else ())


def stage_answers(common: Sequence[tuple[bool, Any]], own: Mapping[int, Any] | None) -> list[Any]:
    """Return the answer of each stage, as a step of its own would return it on this rank."""
    pieces = own or {}
    return [
        (value, pieces.get(number)) if is_apart else value
        for number, (is_apart, value) in enumerate(common)
    ]


# -- on the wire: one line of JSON, then a pickle ---------------------------------------------


def encode_message(message: Message) -> bytes:
    """Encode the message of a rank. An unpicklable value raises the error of pickle."""
    head = {"label": message.label, "failure": asdict(message.failure) if message.failure else None}
    return _pack(head, message.value)


def message_by(world: World, message: Message) -> bytes:
    """Encode the message of a rank; if its value cannot be pickled, that is the rank's failure."""
    try:
        return encode_message(message)
    except Exception as error:  # noqa: BLE001 - pickle raises anything
        return encode_message(Message(message.label, failure=failure_of(error, world)))


def decode_message(data: bytes) -> Message:
    """Decode a message. Only for bytes of this job's own ranks, because it unpickles."""
    head, body = _unpack(data)
    failure = Failure(**head["failure"]) if head["failure"] else None
    return Message(head["label"], None if failure else pickle.loads(body), failure)  # noqa: S301 - peers of one job


def encode_verdict(verdict: StepVerdict[Any]) -> bytes:
    """Encode the answer. An unpicklable value raises the error of pickle."""
    error = error_fields(verdict.error) if verdict.error else None
    head: dict[str, Any] = {"error": error, "final": verdict.final}
    if verdict.apart:
        head["apart"] = True
    value = verdict.value
    if isinstance(value, list) and value and all(v is None for v in value):
        # If a step was only a barrier, every rank reads this instead of thousands of Nones.
        head["nothings"], value = len(value), None
    return _pack(head, value)


def decode_verdict(data: bytes) -> StepVerdict[Any]:
    """Decode an answer. Only for bytes of this job's own ranks, because it unpickles."""
    head, body = _unpack(data)
    if head["error"]:
        return StepVerdict(error=error_from(head["error"]), final=head["final"])
    if "nothings" in head:
        return StepVerdict(value=[None] * head["nothings"], apart=bool(head.get("apart")))
    return StepVerdict(value=pickle.loads(body), apart=bool(head.get("apart")))  # noqa: S301 - as above


def for_rank(verdict: StepVerdict[Any], rank: int) -> StepVerdict[Any]:
    """Return the verdict of one rank if nothing has to be sent."""
    value = verdict.value
    if not isinstance(value, _Apart):
        return verdict
    return replace(verdict, value=(value.common, value.pieces[rank] if value.pieces else None))


def split(verdict: StepVerdict[Any]) -> tuple[StepVerdict[Any], Iterator[bytes]]:
    """Return the verdict for all ranks, and the encoded piece of each rank in order.

    There are no pieces if the answer is one for all. A piece is encoded when it is used, because
    each of hundreds of nodes may get a whole manifest.
    """
    value = verdict.value
    if not isinstance(value, _Apart) or not value.pieces:
        return for_rank(verdict, 0), iter(())
    common = replace(verdict, value=value.common, apart=True)
    return common, (pickle.dumps(piece, protocol=5) for piece in value.pieces)


def joined(verdict: StepVerdict[Any], piece: bytes) -> StepVerdict[Any]:
    """Add the piece of one rank to the verdict.

    Only for bytes of this job's own ranks, because it unpickles.
    """
    value = (verdict.value, pickle.loads(piece))  # noqa: S301 - peers of one job
    return replace(verdict, value=value, apart=False)


def _pack(head: Mapping[str, Any], value: object) -> bytes:
    return json.dumps(head).encode() + b"\n" + pickle.dumps(value, protocol=5)


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, body = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    return head, body
