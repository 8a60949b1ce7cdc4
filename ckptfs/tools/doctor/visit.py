"""One visit: its corner, its settings, what is known of the place, and how a check is made of a look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptfs.control.control import Control
from ckptfs.control.world import World
from ckptfs.errors import StorageError
from ckptfs.storage.base import Capabilities
from ckptfs.tools.doctor.corner import Corner
from ckptfs.tools.doctor.judge.ranks import many, on_ranks
from ckptfs.tools.doctor.look.space import look_at_mount
from ckptfs.tools.doctor.seen import Mounted, Refusal
from ckptfs.tools.doctor.settings import Settings
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict
from ckptfs.uri import Uri

__all__ = ["Visit"]

T = TypeVar("T")
Judge = Callable[[Sequence[World], Sequence[T]], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A look that failed where it does not know how to say so."""

    refusal: Refusal


@dataclass(slots=True)
class Visit:
    """caps and mounts: by rank, alike on every rank once ``learn`` was called."""

    control: Control
    corner: Corner
    settings: Settings
    uri: Uri
    caps: list[Capabilities] = field(default_factory=list)
    mounts: list[Mounted | None] = field(default_factory=list)

    @property
    def is_mounted(self) -> bool:
        """Whether plain ``open`` leads there. Alike on all ranks: it follows from the URI."""
        return self.corner.storage.local_path("") is not None

    def learn(self) -> None:
        """Collective. What each rank's own probe finds in the corner."""
        self.caps = self.control.step("doctor.probe", lambda: self.corner.storage.probe("access"))

    def check(
        self,
        name: str,
        theme: Theme,
        look: Callable[[], T],
        judge: Judge[T],
        *,
        meaning: str = "a save would fail here the same way",
    ) -> tuple[Finding, ...]:
        """Collective. Look on every rank, judge on the coordinator; a look that fails is a finding.

        meaning: what it means that the look failed.
        """

        def local() -> T | _Trouble:
            try:
                return look()
            except StorageError as error:
                return _Trouble(Refusal.of(error))

        def decide(told: list[T | _Trouble]) -> tuple[Finding, ...]:
            worlds = self.control.worlds
            wrong = {rank: t.refusal for rank, t in enumerate(told) if isinstance(t, _Trouble)}
            if not wrong:
                return judge(worlds, [t for t in told if not isinstance(t, _Trouble)])
            first = next(iter(wrong.values()))
            text = f"{on_ranks(worlds, wrong)}{first.text}"
            return (Finding(name, theme, Verdict.FAIL, text, meaning, first.hint),)

        return self.control.step(f"doctor.{name}", local, decide)

    def look_at_mounts(self) -> None:
        """Collective. The mount below each rank's path."""
        self.mounts = self.control.step("doctor.mount", lambda: look_at_mount(self.corner.run))

    def clean(self) -> tuple[Finding, ...]:
        """Collective. Leftovers of dead doctors, then our own corner; what stays is a finding."""
        corner, wall_s = self.corner, self.settings.clock.wall_s()
        is_lead = self.control.worlds[self.control.rank].node not in {
            w.node for w in self.control.worlds[: self.control.rank]
        }

        def look() -> dict[str, Refusal | None]:
            return _without_leftovers(corner, wall_s) if is_lead else {}

        found = self.check("leftovers", Theme.ACCESS, look, _judge_leftovers)
        return found + self.check(
            "cleaning", Theme.ACCESS, lambda: corner.clean() if is_lead else None, _judge_cleaning
        )


def _without_leftovers(corner: Corner, wall_s: float) -> dict[str, Refusal | None]:
    gone: dict[str, Refusal | None] = {}
    for name in corner.leftovers(wall_s):
        try:
            corner.remove_leftover(name)
            gone[name] = None
        except StorageError as error:
            gone[name] = Refusal.of(error)
    return gone


def _judge_leftovers(
    _: Sequence[World], seen: Sequence[dict[str, Refusal | None]]
) -> tuple[Finding, ...]:
    found = {name: refusal for told in seen for name, refusal in told.items()}
    stay = sorted(name for name, refusal in found.items() if refusal is not None)
    if stay:
        return (
            Finding(
                "leftovers",
                Theme.ACCESS,
                Verdict.WARN,
                f"left by killed doctors, and not removed: {', '.join(stay)}",
                "they take space, and nothing else",
                "look into them, and remove them by hand",
                {"stay": stay},
            ),
        )
    if not found:
        return ()
    told = f"removed what {many(len(found), 'killed doctor')} left: {', '.join(sorted(found))}"
    return (Finding("leftovers", Theme.ACCESS, Verdict.OK, told, data={"removed": sorted(found)}),)


def _judge_cleaning(_: Sequence[World], __: Sequence[None]) -> tuple[Finding, ...]:
    return ()
