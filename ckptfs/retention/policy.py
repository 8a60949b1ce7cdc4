"""What a run keeps: a pure policy over the catalog. Nothing here deletes.

    Keep(latest=3, every=1000, best=Best("loss"))

    commit order    ... 900   1000   1100   1200   1300   1400
    latest=3                                ^^^^   ^^^^   ^^^^     the last three commits
    every=1000           ^^^^                                      multiples of 1000 stay always
    best                 the one with the least loss, at any place in the order
    going           900         1100

The order is that of the commits, never that of the steps. A run that was restored at 50 and trained
to 70 keeps 60 and 70 as the last two, not the rejected 100. That one is deleted once training has
passed it: a job that went back, or that lost its place in the run, deletes nothing that is further
than itself. Each kind (checkpoints, weights) counts by itself, and saves of a failing run count
apart from the healthy ones. Saves under names that are not the manager's are ignored, pinned saves
stay, and so does everything that a kept save refers to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from ckptfs.commit.decisions import Deletable, needed
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.state import Views, catalog
from ckptfs.errors import StateError
from ckptfs.text import size_text

__all__ = [
    "Best",
    "Keep",
    "Plan",
    "needs_text",
    "plan_retention",
    "short_of",
]


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``count`` saves with the best value of a metric that was passed to ``save``.

    A save without the metric is never among the best, nor is one with NaN; of two equal ones the
    older stays. Saves of a failing run do not compete. An empty metric, a count below 1 or another
    mode is a StateError.

    Attributes:
        metric: Its name in ``metrics``.
        count: How many.
        mode: "min" if less is better, "max" if more is.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not self.metric:
            raise StateError("keep_best needs the name of a metric", hint='Best("loss")')
        _refuse_less_than_one("Best.count", self.count)
        if self.mode not in ("min", "max"):
            raise StateError(f'Best.mode is {self.mode!r}; it is "min" or "max"')


@dataclass(frozen=True, slots=True)
class Keep:
    """Which saves stay.

    A number below 1, or ``every`` or ``best`` without ``latest``, is a StateError.

    Attributes:
        latest: How many of the last commits stay; None deletes nothing.
        every: Saves with a step that is a multiple of it always stay, step 0 too; None: no such
            saves.
        best: The best saves by a metric; None: no such saves.
    """

    latest: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.best is not None and not isinstance(self.best, Best):
            raise StateError(
                f"keep_best is {self.best!r}; it must be a ckptfs.Best",
                hint='keep_best=ckptfs.Best("loss"), or ckptfs.Best("accuracy", mode="max")',
            )
        if self.latest is not None:
            _refuse_less_than_one("keep_latest", self.latest)
        elif self.every is not None or self.best is not None:
            raise StateError(
                "keep_every and keep_best add to keep_latest, and without keep_latest "
                "everything is kept",
                hint="pass keep_latest=N too: it allows ckptfs to delete the others",
            )
        if self.every is not None:
            _refuse_less_than_one("keep_every", self.every)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which of the manager's own live saves stay and which may be deleted, each in commit order."""

    kept: tuple[Seal, ...] = ()
    going: tuple[Deletable, ...] = ()


def plan_retention(
    views: Views,
    keep: Keep,
    is_ours: Callable[[Seal], bool],
    roots: Collection[str] = (),
    *,
    at: int | None = None,
) -> Plan:
    """Return what stays and what may be deleted, by the folded logs of the reached domains.

    ``is_ours`` says whether a seal's name and kind are the manager's; all other saves stay and do not
    count. ``roots`` are save_ids that are still needed: the save that the run was restored from,
    bases of unfinished saves, saves that wait to be copied. ``at`` is the step that the run has
    reached: later steps stay, no matter which job saved them; None: they count like any others. The
    newest commit of a kind always stays.
    """
    lives = [live.seal for live in catalog(views)]
    ours = [seal for seal in lives if is_ours(seal)]
    if keep.latest is None:
        return Plan(tuple(ours))
    chosen = {seal.save_id for group in _groups(ours) for seal in _chosen(group, keep)}
    candidates = {seal.save_id: seal for seal in ours if seal.save_id not in chosen}
    further = {s.save_id for s in ours if at is not None and s.step is not None and s.step > at}
    for save_id in needed(views, candidates, {*roots, *further}):
        candidates.pop(save_id, None)
    reason = f"keep_latest={keep.latest}"
    return Plan(
        tuple(seal for seal in ours if seal.save_id not in candidates),
        tuple(Deletable(seal, reason) for seal in candidates.values()),
    )


def _groups(ours: list[Seal]) -> Iterator[list[Seal]]:
    """Yield each kind by itself, healthy saves and those of a failing run apart.

    Saves of a failing run must not push out healthy ones.
    """
    for kind in Kind:
        for failure in (False, True):
            yield [s for s in ours if s.artifact is kind and s.failure is failure]


def _chosen(group: list[Seal], keep: Keep) -> Iterator[Seal]:
    """Yield the saves of one group that the policy itself keeps."""
    yield from group[-(keep.latest or len(group)) :]
    if keep.every is not None:
        every = keep.every
        yield from (s for s in group if s.step is not None and s.step % every == 0)
    if keep.best is not None:
        yield from _best(group, keep.best)


def _best(group: list[Seal], best: Best) -> list[Seal]:
    sign = 1.0 if best.mode == "min" else -1.0
    ranked = [
        (sign * value, at)
        for at, seal in enumerate(group)
        if not seal.failure
        and (value := dict(seal.metrics).get(best.metric)) is not None
        and not math.isnan(value)
    ]
    # Equal values: the lower place in commit order, so that a new equal never pushes out an old.
    return [group[at] for _, at in sorted(ranked)[: best.count]]


def needs_text(size_bytes: int, keep: Keep) -> str:
    """Return the text about the space that the policy needs, for the log after the first save."""
    one = f"one checkpoint takes {size_text(size_bytes)}"
    if keep.latest is None:
        return f"{one}; keep_latest is not set, so nothing is deleted"
    need = size_text(_slots(keep) * size_bytes)
    text = f"{one}; keep_latest={keep.latest} needs {need}, including the one that is being written"
    if keep.best is not None:
        text += f" and {keep.best.count} kept as the best"
    if keep.every is not None:
        text += f"; in addition, every step that {keep.every} divides is kept"
    return text


def short_of(size_bytes: int, keep: Keep, free_bytes: int, held: int = 1) -> int:
    """Return how many bytes of free space the policy lacks, 0 if it fits.

    ``held`` is how many saves are written already.
    """
    more = max(0, _slots(keep) - held)
    return max(0, more * size_bytes - free_bytes)


def _slots(keep: Keep) -> int:
    best = 0 if keep.best is None else keep.best.count
    return 1 if keep.latest is None else keep.latest + 1 + best


def _refuse_less_than_one(what: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise StateError(
            f"{what} is {number!r}; it counts checkpoints, from 1",
            hint="leave it out to keep everything",
        )
