"""What a manifest tells of a line: sizes, ranks, times, or that it is damaged. Read-only, no torch."""

from __future__ import annotations

from dataclasses import replace

from ckptfs.commit.catalog.catalog import Look, Origin, find
from ckptfs.commit.catalog.unlogged import Beside, is_overwritten, missing_data
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import ATTEMPTS, MANIFEST, METADATA
from ckptfs.commit.save.foreign_metadata import names_save
from ckptfs.commit.state import piece
from ckptfs.errors import IntegrityError, ManifestError, NotFoundError, StaleError
from ckptfs.tools.lines import Checkpoint, State, time_text

__all__ = ["as_foreign", "as_overwritten", "from_beside", "from_seal"]

_UNPROJECTED = "stock torch does not see it; the next owner of the run puts that right"


def from_beside(line: Checkpoint, beside: Beside) -> Checkpoint:
    """Return ``line`` with what is next to the log, ``beside``, believed or not."""
    checkpoint, manifest = beside.checkpoint, beside.manifest
    if checkpoint is None:
        line = replace(line, state=State.DAMAGED, note=beside.why)
        if manifest is not None:
            line = replace(line, step=manifest.step, kind=manifest.artifact)
        return _told(line, manifest)
    line = replace(
        line,
        origin=checkpoint.origin,
        step=checkpoint.step,
        kind=checkpoint.kind,
        save_id=checkpoint.save_id,
        parts=checkpoint.parts,
        domains=checkpoint.domains,
        created_at=None if beside.modified_s is None else time_text(beside.modified_s),
    )
    return _told(line, manifest)


def as_foreign(line: Checkpoint, look: Look) -> Checkpoint:
    """Return the ``line`` of what another program saved next to the log, with whether it is whole, read with
    ``look``.
    """
    if line.origin is not Origin.STOCK:
        return line
    try:
        metadata = look.storage.read(f"{line.name}/{METADATA}")
        missing = drive(missing_data(line.name, metadata), look.storage)
    except NotFoundError:
        return line  # it goes while we look
    if not missing:
        return replace(
            line, state=State.FOREIGN, note="ckptfs did not write it; load it by its name"
        )
    lost = f"{missing[0]} is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
    why = f"{lost} that its {METADATA} names"
    if missing == (METADATA,):
        why = f"its {METADATA} is not one, or not all of one"
    return replace(line, state=State.DAMAGED, note=f"not whole, and not written by ckptfs: {why}")


def as_overwritten(line: Checkpoint, seal: Seal, look: Look) -> Checkpoint:
    """The ``line`` of the newest commit ``seal``, with a note where another program saved over it, read with
    ``look``.
    """
    shape = look.storage.capabilities.shape
    if not drive(is_overwritten(seal, look.views, shape), look.storage):
        return line
    note = f"another program saved over it: its {METADATA} is not ours"
    return replace(line, note=f"{line.note}; {note}" if line.note else note)


def _told(line: Checkpoint, manifest: Manifest | None) -> Checkpoint:
    if manifest is None:
        return line
    return replace(
        line,
        created_at=manifest.created_at or line.created_at,
        size_bytes=manifest.size_bytes,
        files=len(manifest.files),
        ranks=manifest.world_size,
        manifest=manifest,
    )


def from_seal(line: Checkpoint, seal: Seal, look: Look, *, everything: bool) -> Checkpoint:
    """Return a line with what the sealed manifest says.

    Args:
        line: The line so far.
        seal: The save.
        look: What this process sees of the run.
        everything: Also whether stock readers see it.
    """
    shape = look.storage.capabilities.shape
    try:
        found = drive(find(seal, shape, line.uri), look.storage)
    except (NotFoundError, StaleError, IntegrityError, ManifestError) as error:
        if line.state is not State.COMMITTED:
            return line  # history: that its files are not where they were is no news
        is_lost = isinstance(error, NotFoundError | StaleError)
        note = f"{MANIFEST} of save {seal.save_id} is missing" if is_lost else error.message
        return replace(line, state=State.DAMAGED, note=note)
    line = _told(line, found.manifest)
    for ref in seal.parts:
        line = _with_part(line, piece(seal, ref), look)
    if line.state is State.COMMITTED:
        waits = found.home.startswith(f"{ATTEMPTS}/") or (
            everything and not _is_projected(seal, look)
        )
        if waits:
            line = replace(line, state=State.UNPROJECTED, note=_UNPROJECTED)
    return line


def _with_part(line: Checkpoint, part: Seal, look: Look) -> Checkpoint:
    """With the bytes of a part, where it can be seen from here."""
    try:
        found = drive(find(part, look.storage.capabilities.shape, line.uri), look.storage)
    except (NotFoundError, StaleError, IntegrityError, ManifestError):
        name = part.name.rpartition("/")[2]
        note = f"part {name} is not seen from here"
        return replace(line, note=f"{line.note}; {note}" if line.note else note)
    manifest = found.manifest
    if manifest is None:
        return line
    return replace(
        line,
        size_bytes=(line.size_bytes or 0) + manifest.size_bytes,
        files=(line.files or 0) + len(manifest.files),
    )


def _is_projected(seal: Seal, look: Look) -> bool:
    """Whether ``ckptfs.json`` beside the data names this save, and ``.metadata`` is there."""
    try:
        if names_save(read_limited(look.storage, f"{seal.name}/{MANIFEST}")) != seal.save_id:
            return False
        # A directory artifact has none, and of a whole of parts each part has its own.
        if seal.artifact is not Kind.DIRECTORY and not seal.parts:
            look.storage.stat(f"{seal.name}/{METADATA}")
    except NotFoundError:
        return False
    return True
