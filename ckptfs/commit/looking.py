"""Looking at a run from one process, read-only: its storage, and its log where there is one.

    with looking_at(run_uri, options) as look:
        look.root  look.storage  look.views      {} where nobody ever wrote a run

Appends nothing, probes nothing, needs read permission only, talks to no other rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.advisory import with_log
from ckptfs.commit.catalog import find, live_of, read_view
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import LOG, MANIFEST, METADATA
from ckptfs.commit.log import Gap, check_whole
from ckptfs.commit.ops import drive
from ckptfs.errors import ManifestError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, options_of

__all__ = ["Look", "gap_of", "looking_at", "refuse_gap", "unprojected"]


@dataclass(frozen=True, slots=True)
class Look:
    """What one process sees. views: the log of the domain that it reaches."""

    root: Uri
    storage: Storage
    views: Mapping[str, LogState]


@contextlib.contextmanager
def looking_at(run_uri: Any, storage_options: Mapping[str, Any] | None) -> Iterator[Look]:
    """The run as it is now; its storage is closed on leaving. Errors are the storage's."""
    root = Uri.parse(run_uri)
    plain = open_storage(root, {**options_of(run_uri), **(storage_options or {})})
    try:
        storage = with_log(plain, plain.capabilities, write=False)
        try:
            view = drive(read_view(), storage)
        except ManifestError as error:
            error.uri = str(storage.uri(error.uri or ""))  # an entry is read by its key
            raise
        yield Look(root, storage, {} if view is None else dict([view]))
    finally:
        plain.close()


def gap_of(look: Look) -> Gap | None:
    """An entry of the log that is missing while later ones are there; one listing. What lies behind it is
    read by nobody, so that what was found may be old.
    """
    gaps = (drive(check_whole(state), look.storage).gap for state in look.views.values())
    return next((gap for gap in gaps if gap is not None), None)


def refuse_gap(look: Look) -> None:
    """ManifestError where the log has a gap. Read-only."""
    gap = gap_of(look)
    if gap is not None:
        raise ManifestError(
            f"the run log has a gap: entry {gap.missing} is missing, {gap.there} is there",
            uri=look.root / LOG,
            hint="entries are never removed: restore it; until then nobody sees what was said after it",
        )


def unprojected(
    checkpoint: Uri, path: str, storage_options: Mapping[str, Any] | None
) -> Uri | None:
    """Local. Where a file of a committed checkpoint lies whose committer died before the projection.

    path: as in the step directory: ``.metadata``, ``ckptfs.json`` or a data path of the manifest. None:
    the log knows no such checkpoint.
    """
    with looking_at(checkpoint.parent, storage_options) as look:
        seal = live_of(checkpoint.name, look.views, checkpoint)
        if seal is None or seal.parts:
            return None
        try:
            found = drive(find(seal, look.storage.capabilities.shape, checkpoint), look.storage)
        except NotFoundError:
            return None
    home = look.root / found.home
    return home / (f"{seal.save_id}/{path}" if path in (METADATA, MANIFEST) else path)
