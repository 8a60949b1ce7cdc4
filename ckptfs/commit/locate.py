"""Finding a checkpoint from all ranks: one answer, decided once, the same on every rank.

    look    one process per node folds its domain's log        -> coordinator: which save is it
    find    every rank finds its files where they lie now       -> found, or all look again

A save may be superseded, deleted or projected while we look. Then some rank finds nothing, and all
ranks start over together: two ranks must never load two different saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.commit.catalog import Found, find, live_of, missing_files, read_view, unlogged
from ckptfs.commit.entries import Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.ops import drive
from ckptfs.commit.seat import Seat
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StaleError
from ckptfs.uri import Uri

__all__ = ["locate"]

TRIES = 5  # a save that moves is found at the second look; only a damaged one is missed by all

View = tuple[str, LogState]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The save that all ranks look for; seal is None where no log knows the name."""

    seal: Seal | None
    views: dict[str, LogState]


@dataclass(frozen=True, slots=True)
class _Miss:
    """This rank found nothing."""

    message: str


def locate(seat: Seat, name: str) -> Found:
    """Collective, read-only. Where the files of checkpoint ``name`` lie for this rank.

    NotFoundError: there is none. IncompleteCheckpointError: it is live but its files are missing,
    or a domain of it is out of reach. IntegrityError, ManifestError: it was changed.
    """
    where = seat.storage.uri(name)

    def look() -> View | None:
        return drive(read_view(), seat.storage) if seat.placement.is_node_lead else None

    def choose(answers: Sequence[View | None]) -> _Choice:
        views = dict(a for a in answers if a is not None)
        seal = live_of(name, views, where)
        # What is sent to every rank: only saves of this name, the log may be long.
        return _Choice(seal, {} if seal is not None else views)

    def look_for(choice: _Choice) -> Found | _Miss:
        try:
            if choice.seal is None:
                return drive(unlogged(name, choice.views, where), seat.storage)
            return drive(find(choice.seal, seat.caps.shape, where), seat.storage)
        except (NotFoundError, StaleError) as error:
            return _Miss(error.message)

    misses: list[tuple[int, str]] = []
    for _ in range(TRIES):
        choice = seat.control.step("look", look, choose)
        found = look_for(choice)
        verdict = seat.control.step(
            "find",
            lambda found=found: found.message if isinstance(found, _Miss) else None,  # type: ignore[misc]
        )
        misses = [(rank, text) for rank, text in enumerate(verdict) if text is not None]
        if not misses and isinstance(found, Found):
            if choice.seal is None and found.manifest is not None:
                _check_copy(seat, found, found.manifest, where)
            return found
        if choice.seal is None and len(misses) == seat.control.size:
            raise NotFoundError(
                misses[0][1], uri=where, hint="see list_checkpoints() of its parent"
            )
    ranks = ", ".join(str(rank) for rank, _ in misses)
    raise IncompleteCheckpointError(
        f"{name} is not to be found from rank {ranks}: {misses[0][1]}",
        uri=where,
        hint="it was removed by hand, or these nodes do not see the disk that holds it",
    )


def _check_copy(seat: Seat, found: Found, manifest: Manifest, where: Uri) -> None:
    """Collective. A checkpoint without a log is valid if every listed file is there, on some node."""

    def look() -> frozenset[str] | None:
        if not seat.placement.is_node_lead:
            return None
        return frozenset(drive(missing_files(manifest, found.home), seat.storage))

    def judge(answers: Sequence[frozenset[str] | None]) -> None:
        nowhere = frozenset.intersection(*(a for a in answers if a is not None))
        if nowhere:
            first = min(nowhere)
            raise IncompleteCheckpointError(
                f"{len(nowhere)} files are missing or have another size, {first} is the first",
                uri=f"{where}/{first}",
                hint="the copy was interrupted: copy it again",
            )

    seat.control.step("look at the copy", look, judge)
