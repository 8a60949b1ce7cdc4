"""The error of another rank: how it is sent, and how one text names all ranks that failed.

Unpickling an exception can fail if its class has an ``__init__`` of its own, and that would end the receiving rank.
So an error is never sent pickled. It is sent as class path, message, errno and traceback text, and becomes an error
of ``ckptfs.errors``.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckptfs import errors
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, CollectiveError, Failure, StorageError
from ckptfs.uri import mask_credentials

__all__ = ["collective_error", "error_fields", "error_from", "failure_of", "log_left_out"]

_TRACEBACK_CHARS = 8000  # the end of a traceback shows the error; the store is no log
# How much is shown in a message; ``failures`` holds all of it.
_SHOWN = 4  # kinds of failure
_SHOWN_RANKS = 8
_SHOWN_HOSTS = 3
_NUMBERS = re.compile(r"\d+(\.\d+)?")

logger = logging.getLogger("ckptfs.control")


def failure_of(error: BaseException, world: World) -> Failure:
    """Describe an exception of this process as text, with credentials masked."""
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


def collective_error(
    label: str, failures: Mapping[int, Failure], worlds: Sequence[World]
) -> CollectiveError:
    """Return the error of a step that failed on these ranks: ranks, places, nodes and messages.

    Pure: a waiting rank may make it many times before one becomes the answer of the step.
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
            # The hint of the rank with the file that the text names: it says who holds the missing file.
            hint=failures[min(failures)].hint if failures else None,
        )

    # The hint is worth more than the error of a third rank, so that rank's sentence is left out first.
    longest = min(len(sentences), _SHOWN)
    choices = [showing(count) for count in range(longest, min(longest, 1) - 1, -1)]
    error = next((e for e in choices if e.hint and e.hint in str(e)), choices[0])
    _note(error)
    return error


def _what_failed(failure: Failure) -> str:
    """Return a text that is equal for ranks with the same error.

    For an answer of a storage, the type is enough. In other messages, ranks differ only in their
    numbers.
    """
    kind = getattr(errors, failure.type.removeprefix(f"{errors.__name__}."), None)
    if isinstance(kind, type) and issubclass(kind, StorageError) and kind is not StorageError:
        return ""
    return _NUMBERS.sub("#", failure.summary or failure.message)


def _sentence_of(
    ranks: Sequence[int], failures: Mapping[int, Failure], worlds: Sequence[World]
) -> str:
    """Return a sentence about ranks with the same error: their places, and the first one's message.

    The message contains its file only once.
    """
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
    """Log all failures in full, if the text of the error does not contain them all.

    For the process that makes the error the answer of a step.
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


def _note(error: CkptfsError, origin: str = "") -> None:
    """Add the first remote traceback: without it, it is unknown where a remote rank failed."""
    failures = getattr(error, "failures", {})
    first = next((f for f in failures.values() if f.traceback), None)
    text = origin or (f"rank {first.rank}:\n{first.traceback}" if first else "")
    if text:
        error.add_note(text)


def _known_class(cls: type[BaseException]) -> type[BaseException]:
    """Return the nearest class that every rank has: the first ancestor in ``ckptfs.errors``."""
    # Not by the name of its module: a class that is derived from two types has the name of the known one.
    known: type[BaseException] = next(
        c for c in cls.__mro__ if getattr(errors, c.__name__, None) is c
    )
    return known


def error_fields(error: CkptfsError) -> dict[str, Any]:
    """Return the parts of an error that are sent, as JSON values."""
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


def error_from(described: Mapping[str, Any]) -> CkptfsError:
    """Decode an error to a class of ``ckptfs.errors``, with a remote traceback."""
    cls = getattr(errors, str(described["class"]))
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in described["fields"].items()}
    error: CkptfsError
    if issubclass(cls, CollectiveError):
        failures = {f["rank"]: Failure(**f) for f in described["failures"]}
        error = cls.__new__(cls, fields["message"], failures=failures)
        error.__dict__["failures"] = failures
    else:
        error = cls.__new__(cls)
    Exception.__init__(error, fields["message"])
    error.__dict__.update(fields)
    if isinstance(error, StorageError):
        error.errno = described["errno"]
    _note(error, "" if described["failures"] else f"coordinator:\n{described['traceback']}")
    return error
