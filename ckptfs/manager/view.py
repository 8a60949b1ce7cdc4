"""What a manager's run holds: read-only, any time; but for ``save_id_of`` no other rank is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.commit.catalog import Checkpoint, list_live, logged, read_view
from ckptfs.commit.entries import Kind
from ckptfs.commit.fold import LogState
from ckptfs.commit.looking import looking_at
from ckptfs.commit.ops import drive
from ckptfs.commit.protocol import catalog
from ckptfs.commit.seat import Seat
from ckptfs.errors import NotFoundError
from ckptfs.manager.ground import Where
from ckptfs.manager.options import Names

__all__ = ["View"]


@dataclass(frozen=True, slots=True)
class View:
    """Looks anew at each call. On node-local disks it is this node's log that answers."""

    where: Where
    names: Names

    def live(self, kind: Kind, *, failures: bool) -> list[Checkpoint]:
        """Committed saves of a kind that the template made, oldest commit first.

        failures: those of a failing run too.
        """
        with looking_at(self.where.uri, self.where.place.storage_options) as look:
            failed = {live.seal.save_id for live in catalog(look.views) if live.seal.failure}
            known = logged(look.views, look.root)
        template = self.names.of(kind)
        return [
            c
            for c in known
            if c.kind is kind
            and template.step_of(c.uri.name) is not None
            and (failures or c.save_id not in failed)
        ]

    def steps(self, kind: Kind) -> list[int]:
        """The steps of these saves, oldest commit first."""
        template = self.names.of(kind)
        found = (template.step_of(c.uri.name) for c in self.live(kind, failures=True))
        return [step for step in found if step is not None]

    def save_id_of(self, step: int, seat: Seat) -> str:
        """Collective: the checkpoint of a step, by the logs of all domains; one alone may not know yet
        what became of it. NotFoundError: there is none.
        """
        main = self.names.main
        name = self.names.of(main).name(step)

        def look() -> tuple[str, LogState] | None:
            return drive(read_view(), seat.storage) if seat.placement.is_node_lead else None

        def decide(found: Sequence[tuple[str, LogState] | None]) -> str:
            lives = list_live(dict(one for one in found if one is not None))
            seals = [s for s in lives if s.artifact is main]
            for seal in seals:
                if seal.name == name:
                    return seal.save_id
            raise NotFoundError(
                f"there is no checkpoint of step {step}",
                uri=seat.storage.root,
                hint=f"there are {', '.join(seal.name for seal in seals) or 'none'}",
            )

        return seat.control.step("find the step", look, decide)
