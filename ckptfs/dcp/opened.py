"""A checkpoint that was found, as the readers need it: its metadata, and where its files lie."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog import Found
from ckptfs.commit.layout import METADATA
from ckptfs.commit.manifest import digest_of
from ckptfs.commit.ops import read_limited
from ckptfs.dcp.datafile import Source, Verify
from ckptfs.dcp.decoding import decode_metadata, read_inventory
from ckptfs.dcp.inventory import Inventory
from ckptfs.errors import IncompleteCheckpointError, IntegrityError, NotFoundError
from ckptfs.storage.base import Storage

__all__ = ["inventory_of", "read_metadata", "source_of", "who_holds"]


def read_metadata(storage: Storage, found: Found) -> Metadata:
    """The checkpoint's ``.metadata``, as sealed where it was sealed, with the manifest's own paths.
    Executes nothing.

    IntegrityError: it was changed after the commit. IncompleteCheckpointError: it is missing where a
    manifest speaks for it. ManifestError: it is no DCP metadata.
    """
    return decode_metadata(_sealed(storage, found), storage.uri(found.metadata), _shared(found))


def inventory_of(storage: Storage, found: Found) -> Inventory:
    """The same for a load: what is not asked for is not made. Errors are ``read_metadata``'s."""
    return read_inventory(_sealed(storage, found), storage.uri(found.metadata), _shared(found))


def _sealed(storage: Storage, found: Found) -> bytes:
    manifest, where = found.manifest, storage.uri(found.metadata)
    try:
        raw = read_limited(storage, found.metadata)
    except NotFoundError as error:
        if manifest is None:
            raise
        raise IncompleteCheckpointError(
            "the metadata is missing",
            uri=where,
            hint="ckptfs verify tells what else is; restore the file, or load another checkpoint",
        ) from error
    if manifest is not None:
        path = f"{manifest.save_id}/{METADATA}"
        # Several where domains have copies of their own; a copied directory may have come from any.
        sealed = {f.digest for f in manifest.files if f.path == path}
        if sealed and digest_of(raw) not in sealed:
            raise IntegrityError(
                "the metadata is not what was saved",
                uri=where,
                hint="the file was changed after the commit; load another checkpoint",
            )
    return raw


def _shared(found: Found) -> frozenset[str]:
    files = () if found.manifest is None else found.manifest.files
    return frozenset(f.path for f in files if f.is_shared)


def source_of(storage: Storage, found: Found, verify: Verify, rank: int, ranks: int = 1) -> Source:
    """Where this rank reads data files and their digests."""
    files = () if found.manifest is None else found.manifest.files
    sidecars = {f.path: f.digests for f in files if f.digests is not None}
    return Source(storage, found.home, sidecars, verify, rank, _shared(found), ranks=ranks)


def who_holds(uri: str, found: Found) -> str | None:
    """Which ranks and nodes hold a file that this one does not see; None on shared storage."""
    if found.manifest is None or len(found.manifest.domains) < 2:  # noqa: PLR2004
        return None
    # The digests of a data file lie beside it, and which of the two is missed first is chance.
    record = next(
        (f for f in found.manifest.files if uri.endswith((f.path, f.digests or f.path))), None
    )
    domain = next((d for d in found.manifest.domains if record and d.id == record.domain), None)
    if domain is None:
        return None
    ranks = ", ".join(str(rank) for rank in domain.ranks)
    return (
        f"domain {domain.id} holds it, written by ranks {ranks} on {', '.join(domain.hosts)}: "
        "start these ranks there again, or copy the shards together first"
    )
