"""A small file beside the steps of a run that names the newest one, for readers that are not ours.

    run/global_step100/
    run/latest                 "global_step100"

It moves after the commit and before retention has its turn, replaced whole: whoever reads it, at any
time and after any crash, finds the name of a committed checkpoint. It is for them alone: what is the
newest, the log decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptfs.commit.catalog import list_live, read_view
from ckptfs.commit.entries import Seal
from ckptfs.commit.ops import drive, read_limited
from ckptfs.commit.seat import Seat
from ckptfs.errors import NotFoundError, StateError
from ckptfs.storage.base import Storage

__all__ = ["Pointer"]


@dataclass(frozen=True, slots=True)
class Pointer:
    """file: its name, directly in the run. text: what it says, from a checkpoint's name."""

    file: str = "latest"
    text: Callable[[str], str] = str

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or self.file.startswith("."):
            raise StateError(f"pointer {self.file!r} is not the name of a file in the run")

    def read(self, storage: Storage) -> str | None:
        """Local. What it says, by whoever wrote it; None where there is none."""
        try:
            return read_limited(storage, self.file).decode().strip()
        except NotFoundError:
            return None

    def move(self, seat: Seat, name: str) -> None:
        """Collective, after a commit. Durable when it returns; the errors are the storage's."""
        data = self.text(name).encode()

        def replace() -> None:
            if seat.placement.is_owner:
                seat.storage.replace(self.file, data)

        seat.control.step(f"move {self.file}", replace)

    def follow(self, seat: Seat, is_ours: Callable[[Seal], bool]) -> None:
        """Collective, after a claim: what a job that died between a commit and the move left undone."""

        def replace() -> None:
            view = drive(read_view(), seat.storage) if seat.placement.is_owner else None
            lives = [] if view is None else list_live(dict([view]))
            names = [seal.name for seal in lives if is_ours(seal) and not seal.failure]
            if not names and view is not None and view[1].saves:
                seat.storage.remove(self.file)  # of ours nothing is left that it could name
            if names:
                seat.storage.replace(self.file, self.text(names[-1]).encode())

        seat.control.step(f"follow with {self.file}", replace)
