"""What a manager's run holds, seen from one process: read-only, any time, no other rank asked."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.commit.catalog import Checkpoint, logged
from ckptfs.commit.entries import Kind
from ckptfs.commit.looking import looking_at
from ckptfs.commit.protocol import catalog
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

    def save_id_of(self, step: int) -> str:
        """The checkpoint of a step. NotFoundError: there is none."""
        name = self.names.checkpoint.name(step)
        for found in self.live(Kind.CHECKPOINT, failures=True):
            if found.uri.name == name and found.save_id is not None:
                return found.save_id
        raise NotFoundError(
            f"there is no checkpoint of step {step}",
            uri=self.where.uri,
            hint=f"there are steps {self.steps(Kind.CHECKPOINT)}",
        )
