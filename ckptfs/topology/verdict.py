"""What ranks say in a step, and the one answer that all of them obey. Pure; no store, no thread.

    every rank       local() -> Said(label, value | failure)            attempt
    coordinator      all Said -> decide -> Verdict(value | error)        settle
    every rank       Verdict -> return the value, or raise the error     Verdict.unwrap

``decide`` may answer ``apart(common, pieces)``: every rank reads ``common``, and each only its piece.

Values travel pickled: they go between processes of one job, which trust each other. Errors never
do: an exception class with an ``__init__`` of its own kills whoever unpickles it (needs.md row 16),
so they travel as class path, message, errno and traceback text, and arrive as a class of
``ckptfs.errors``.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from ckptfs import errors
from ckptfs.errors import CkptfsError, CollectiveError, Failure, StorageError
from ckptfs.topology.world import World
from ckptfs.uri import mask_credentials

__all__ = [
    "Said",
    "Verdict",
    "apart",
    "attempt",
    "collective_error",
    "decode_said",
    "decode_verdict",
    "encode_said",
    "encode_verdict",
    "failure_of",
    "for_rank",
    "joined",
    "log_left_out",
    "said_by",
    "settle",
    "split",
]

T = TypeVar("T")
C = TypeVar("C")
P = TypeVar("P")
R = TypeVar("R")

_TRACEBACK_CHARS = 8000  # the end of a traceback says what failed; the store is no log
# What is spelled out in a message; ``failures`` holds all of it.
_SHOWN = 4  # kinds of failure
_SHOWN_RANKS = 8
_SHOWN_HOSTS = 3
_NUMBERS = re.compile(r"\d+(\.\d+)?")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank brings to a step: its value, or how it failed. label "": it has left."""

    label: str
    value: Any = None
    failure: Failure | None = None

    @property
    def has_left(self) -> bool:
        """True for the last word of a rank that will not call again."""
        return not self.label


@dataclass(frozen=True, slots=True)
class _Apart:
    """What all ranks are told, and what each of them alone."""

    common: Any
    pieces: Sequence[Any]


def apart(common: C, pieces: Sequence[P] = ()) -> tuple[C, P]:
    """What ``decide`` returns where each rank needs a piece of its own: on rank r the step returns
    ``(common, pieces[r])``. Typed as that; only a step can use it.

    pieces: one for each rank, in order; empty: (common, None). In one value for all, thousands of
    ranks would read thousands of pieces each.
    """
    return _Apart(common, pieces)  # type: ignore[return-value] # what the step makes of it


@dataclass(frozen=True, slots=True)
class Verdict(Generic[R]):
    """The answer of a step: a value, or the error that every rank raises.

    final: a rank is gone for good, so every later step ends with this error too, at once. apart: a
    piece for each rank lies beside it.
    """

    value: R | None = None
    error: CkptfsError | None = None
    final: bool = False
    apart: bool = False

    def unwrap(self, cause: BaseException | None = None) -> R:
        """Return the value or raise the error; ``cause`` is this rank's own failure, if it had."""
        if self.error is None:
            return self.value  # type: ignore[return-value] # None is a value too
        if cause is not None and cause is not self.error:
            raise self.error from cause
        raise self.error


def failure_of(error: BaseException, world: World) -> Failure:
    """Describe an exception of this process as text; credentials masked."""
    cls = type(error)
    kind = _known_class(cls) if isinstance(error, CkptfsError) else cls
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
    number = getattr(error, "errno", None)
    return Failure(
        rank=world.rank,
        node=world.node,
        type=f"{kind.__module__}.{kind.__qualname__}",
        message=mask_credentials(str(error)),
        errno=number if isinstance(number, int) else None,
        traceback=mask_credentials(text),
        summary=mask_credentials(error.message) if isinstance(error, CkptfsError) else "",
        uri=getattr(error, "uri", None) if isinstance(error, CkptfsError) else None,
        hint=mask_credentials(error.hint)
        if isinstance(error, CkptfsError) and error.hint
        else None,
    )


def attempt(label: str, local: Callable[[], T], world: World) -> tuple[Said, BaseException | None]:
    """Run one rank's part. Whatever it raises is caught, Ctrl-C too: the others must be told."""
    try:
        return Said(label, value=local()), None
    except BaseException as error:  # noqa: BLE001 - returned to the caller, who raises it
        return Said(label, failure=failure_of(error, world)), error


def settle(
    said: Sequence[Said], decide: Callable[[list[T]], R] | None, worlds: Sequence[World]
) -> tuple[Verdict[R], BaseException | None]:
    """Make the one answer, on the coordinator. Also returns what ``decide`` raised, if it did.

    Logs what the text of an error leaves out: ranks learn from this answer, once.
    """
    verdict, raised = _settled(said, decide, worlds)
    if verdict.error is not None:
        log_left_out(verdict.error, worlds)
    return verdict, raised


def _settled(
    said: Sequence[Said], decide: Callable[[list[T]], R] | None, worlds: Sequence[World]
) -> tuple[Verdict[R], BaseException | None]:
    here = [s for s in said if not s.has_left]
    if len({s.label for s in here}) > 1:
        return Verdict(error=_out_of_step(said)), None
    failures = {rank: s.failure for rank, s in enumerate(said) if s.failure}
    if failures:
        error = collective_error(said[0].label, failures, worlds)
        return Verdict(error=error, final=len(here) < len(said)), None
    values = [s.value for s in said]
    if decide is None:
        return Verdict(value=values), None  # type: ignore[arg-type] # without decide R is list[T]
    try:
        return Verdict(value=decide(values)), None
    except CkptfsError as error:
        return Verdict(error=error), error
    except BaseException as error:  # noqa: BLE001 - returned to the caller, who raises it
        failure = failure_of(error, worlds[0])
        return Verdict(error=collective_error(said[0].label, {0: failure}, worlds)), error


def collective_error(
    label: str, failures: Mapping[int, Failure], worlds: Sequence[World]
) -> CollectiveError:
    """The error of a step that failed on these ranks: names ranks, places, nodes and messages.

    Pure: whoever waits may make it many times before it is anybody's answer.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in sorted(failures.items()):
        groups.setdefault((failure.type, _what_failed(failure)), []).append(rank)
    sentences = [_sentence_of(ranks, failures, worlds) for ranks in groups.values()]
    begin = f"{label} failed on {len(failures)} of {len(worlds)} ranks: "
    nodes = {f.node for f in failures.values()}

    def showing(count: int) -> CollectiveError:
        more = f"; and {len(sentences) - count} more" if len(sentences) > count else ""
        return CollectiveError(
            begin + "; ".join(sentences[:count]) + more,
            failures=dict(sorted(failures.items())),
            rank=next(iter(failures)) if len(failures) == 1 else None,
            node=next(iter(nodes)) if len(nodes) == 1 else None,
            # Of the rank whose file the text names: who holds what is missing there.
            hint=failures[min(failures)].hint if failures else None,
        )

    # What to do is worth more than what a third rank met: its line goes before the hint does.
    longest = min(len(sentences), _SHOWN)
    choices = [showing(count) for count in range(longest, min(longest, 1) - 1, -1)]
    error = next((e for e in choices if e.hint and e.hint in str(e)), choices[0])
    _note(error)
    return error


def _what_failed(failure: Failure) -> str:
    """Equal for ranks that met the same: what a storage answered is told by the type, and elsewhere
    ranks differ in their numbers.
    """
    kind = getattr(errors, failure.type.removeprefix(f"{errors.__name__}."), None)
    if isinstance(kind, type) and issubclass(kind, StorageError) and kind is not StorageError:
        return ""
    return _NUMBERS.sub("#", failure.summary or failure.message)


def _sentence_of(
    ranks: Sequence[int], failures: Mapping[int, Failure], worlds: Sequence[World]
) -> str:
    """Ranks that met the same: who and where, and what the first of them met, its file named once."""
    first = failures[ranks[0]]
    if len(ranks) == 1:
        who = f"rank {ranks[0]} on {worlds[ranks[0]].place}"
    else:
        hosts = list(dict.fromkeys(worlds[rank].site for rank in ranks))
        who = f"ranks {_few(ranks, _SHOWN_RANKS)} on {_few(hosts, _SHOWN_HOSTS)}"
    what = first.summary or first.message
    where = f" at {first.uri}" if first.summary and first.uri else ""
    return f"{who}: {first.type.rsplit('.', 1)[-1]}: {what}{where}"


def _few(things: Sequence[object], shown: int) -> str:
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return ", ".join(str(thing) for thing in things[:shown]) + more


def log_left_out(error: CkptfsError, worlds: Sequence[World]) -> None:
    """One record with every failure in full, where the text of the error does not have them all.

    For whoever makes it the answer of a step.
    """
    failures = getattr(error, "failures", {})
    text = str(error)
    left_out = any(
        f"rank {rank} on" not in text or (f.summary or f.message) not in text
        for rank, f in failures.items()
    )
    if left_out:
        lines = [f"rank {r} on {worlds[r].place}: {f.message}" for r, f in failures.items()]
        what = error.message.partition(" failed on ")[0]
        logger.warning("%s failed:\n%s", what, "\n".join(lines))


def _out_of_step(said: Sequence[Said]) -> CollectiveError:
    ranks: dict[str, list[int]] = {}
    for rank, s in enumerate(said):
        ranks.setdefault(s.label or "(left)", []).append(rank)
    calls = ", ".join(f"{label!r} on ranks {who}" for label, who in ranks.items())
    return CollectiveError(
        f"ranks called different things at the same time: {calls}",
        hint="every rank must make the same collective calls in the same order; a second thread "
        "needs a control of its own",
    )


def _note(error: CkptfsError, origin: str = "") -> None:
    """Add the first remote traceback: without it nobody learns where a far rank failed."""
    failures = getattr(error, "failures", {})
    first = next((f for f in failures.values() if f.traceback), None)
    text = origin or (f"rank {first.rank}:\n{first.traceback}" if first else "")
    if text:
        error.add_note(text)


# -- on the wire: one line of JSON, then a pickle ---------------------------------------------


def encode_said(said: Said) -> bytes:
    """Bytes of what a rank says. An unpicklable value raises whatever pickle raises."""
    head = {"label": said.label, "failure": asdict(said.failure) if said.failure else None}
    return _pack(head, said.value)


def said_by(world: World, said: Said) -> bytes:
    """``encode_said``; a value that cannot be pickled is that rank's failure, and travels as one."""
    try:
        return encode_said(said)
    except Exception as error:  # noqa: BLE001 - pickle raises anything
        return encode_said(Said(said.label, failure=failure_of(error, world)))


def decode_said(data: bytes) -> Said:
    """The inverse of ``encode_said``. Only for bytes of this job's own ranks: it unpickles."""
    head, body = _unpack(data)
    failure = Failure(**head["failure"]) if head["failure"] else None
    return Said(head["label"], None if failure else pickle.loads(body), failure)  # noqa: S301 - peers of one job


def encode_verdict(verdict: Verdict[Any]) -> bytes:
    """Bytes of the answer. An unpicklable value raises whatever pickle raises."""
    error = _describe(verdict.error) if verdict.error else None
    head: dict[str, Any] = {"error": error, "final": verdict.final}
    if verdict.apart:
        head["apart"] = True
    value = verdict.value
    if isinstance(value, list) and value and all(v is None for v in value):
        # Of a step that was a barrier every rank reads this: spelled out, thousands of ranks would
        # read thousands of Nones each.
        head["nothings"], value = len(value), None
    return _pack(head, value)


def decode_verdict(data: bytes) -> Verdict[Any]:
    """The inverse of ``encode_verdict``. Only for bytes of this job's own ranks: it unpickles."""
    head, body = _unpack(data)
    if head["error"]:
        return Verdict(error=_rebuild(head["error"]), final=head["final"])
    if "nothings" in head:
        return Verdict(value=[None] * head["nothings"], apart=bool(head.get("apart")))
    return Verdict(value=pickle.loads(body), apart=bool(head.get("apart")))  # noqa: S301 - as above


def for_rank(verdict: Verdict[Any], rank: int) -> Verdict[Any]:
    """What a rank is told, where nothing has to travel."""
    told = verdict.value
    if not isinstance(told, _Apart):
        return verdict
    return replace(verdict, value=(told.common, told.pieces[rank] if told.pieces else None))


def split(verdict: Verdict[Any]) -> tuple[Verdict[Any], Iterator[bytes]]:
    """What all ranks read, and each one's piece in order of rank; none where the answer is one for all.

    A piece is encoded when it is asked for: of hundreds of nodes each may get a whole manifest.
    """
    told = verdict.value
    if not isinstance(told, _Apart) or not told.pieces:
        return for_rank(verdict, 0), iter(())
    common = replace(verdict, value=told.common, apart=True)
    return common, (pickle.dumps(piece, protocol=5) for piece in told.pieces)


def joined(verdict: Verdict[Any], piece: bytes) -> Verdict[Any]:
    """The inverse of ``split`` on one rank. Only for bytes of this job's own ranks: it unpickles."""
    value = (verdict.value, pickle.loads(piece))  # noqa: S301 - peers of one job
    return replace(verdict, value=value, apart=False)


def _pack(head: Mapping[str, Any], value: object) -> bytes:
    return json.dumps(head).encode() + b"\n" + pickle.dumps(value, protocol=5)


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, body = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    return head, body


def _known_class(cls: type[BaseException]) -> type[BaseException]:
    """The nearest class that every rank has: the first of ``ckptfs.errors`` in the ancestry."""
    # Not by the name of its module: what is also another type is called as the class that it is of.
    known: type[BaseException] = next(
        c for c in cls.__mro__ if getattr(errors, c.__name__, None) is c
    )
    return known


def _describe(error: CkptfsError) -> dict[str, Any]:
    fields = {k: v for k, v in vars(error).items() if not k.startswith("__") and k != "failures"}
    failures = getattr(error, "failures", {})
    return {
        "class": _known_class(type(error)).__name__,
        "errno": error.errno if isinstance(error, StorageError) else None,
        "fields": {k: v for k, v in fields.items() if _is_plain(v)},
        "failures": [asdict(f) for f in failures.values()],
        "traceback": mask_credentials(
            "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
        ),
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, str | int | float | bool)


def _rebuild(told: Mapping[str, Any]) -> CkptfsError:
    cls = getattr(errors, str(told["class"]))
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in told["fields"].items()}
    error: CkptfsError
    if issubclass(cls, CollectiveError):
        failures = {f["rank"]: Failure(**f) for f in told["failures"]}
        error = cls.__new__(cls, fields["message"], failures=failures)
        error.__dict__["failures"] = failures
    else:
        error = cls.__new__(cls)
    Exception.__init__(error, fields["message"])
    error.__dict__.update(fields)
    if isinstance(error, StorageError):
        error.errno = told["errno"]
    _note(error, "" if told["failures"] else f"coordinator:\n{told['traceback']}")
    return error
