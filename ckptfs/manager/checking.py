"""Whether one save is whole, found out by all ranks of a place together. Collective, read-only.

check the checkpoint    every rank finds the save, reads `.metadata`, looks at its share of the files
name what is missing    only when something is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog import Found, find
from ckptfs.commit.entries import Seal
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import drive
from ckptfs.commit.seat import Seat
from ckptfs.dcp.opened import read_metadata
from ckptfs.errors import (
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleError,
    StorageError,
)
from ckptfs.manager.damage import Contents, Damage, Flaw, Report, contents_of, describe, judge
from ckptfs.manager.survey import missing, share_of
from ckptfs.storage.base import Shape, Storage

__all__ = ["Opened", "check"]

# A save that this rank found, and its metadata.
Opened = tuple[Found, Metadata]
ReadMetadata = Callable[[Storage, Found], Metadata]


def check(
    seat: Seat, seal: Seal, held: list[Opened], read: ReadMetadata = read_metadata
) -> Damage | None:
    """Collective. None when every rank finds the save and every file is there with its size.

    held: gets what this rank found, for the load that follows. read: directories have no metadata.
    """
    reports: list[Report] = []

    def decide(answers: list[Report]) -> Flaw | None:
        reports.extend(answers)
        return judge(seal, answers)

    flaw = seat.control.step(
        "check the checkpoint", lambda: _report(seat, seal, held, read), decide
    )
    if flaw is None:
        return None

    def contents() -> Contents | None:
        manifest = held[0][0].manifest if held else None
        return None if manifest is None else contents_of(manifest)

    def tell(answers: Sequence[Contents | None]) -> str:
        known = next((a for a in answers if a is not None), None)
        return describe(seal, reports, seat.control.worlds, known)

    return Damage(flaw, seat.control.step("name what is missing", contents, tell))


def _report(seat: Seat, seal: Seal, held: list[Opened], read: ReadMetadata) -> Report:
    """Local. What this rank finds of a save."""
    mine, storage, shape = seat.placement.mine, seat.storage, seat.caps.shape
    try:
        found = drive(find(seal, shape, storage.uri(seal.name)), storage)
        held.append((found, read(storage, found)))
        files = () if found.manifest is None else found.manifest.files
        # One listing on an object store; elsewhere the ranks of a domain share the looking.
        ranks = mine.ranks[:1] if shape is Shape.OBJECT else mine.ranks
        share: list[FileRecord] = []
        if seat.control.rank in ranks:
            share = share_of(files, mine.id, ranks.index(seat.control.rank), len(ranks))
        return Report(mine.id, missing=drive(missing(share, found.home, shape), storage))
    except (NotFoundError, StaleError, IncompleteCheckpointError) as error:
        return Report(mine.id, Flaw.INCOMPLETE, error.message)
    except IntegrityError as error:
        return Report(mine.id, Flaw.CHANGED, f"{error.message} ({error.uri})")
    except ManifestError as error:
        return Report(mine.id, Flaw.UNREADABLE, f"{error.message} ({error.uri})")
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # no permission, no network: an older checkpoint would fare no better
        return Report(mine.id, Flaw.CHANGED, f"{error.message} ({error.uri})")
