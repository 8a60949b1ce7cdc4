"""What is in a checkpoint: its writer, tensors, objects and files. Reads no data file.

    inspect("s3://bucket/run/step_100")     -> Inspected(summary, leaves, files, parts)
    values(uri, filters=...)                -> small leaves as text, loaded with weights_only

Reads checkpoints of ckptfs, stock DCP and safetensors, a single torch.save file, and any other directory
of files. For a checkpoint of parts, ``inspect`` lists the parts; each part is inspected by its own URI.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.catalog.catalog import find, looking_at
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.operations import drive
from ckptfs.commit.session import step_of
from ckptfs.commit.state import piece
from ckptfs.errors import IntegrityError, ManifestError, NotFoundError, SymlinkError
from ckptfs.storage.base import Storage
from ckptfs.tools.contents import Box, Contents, Leaf, ObjectLeaf, TensorLeaf
from ckptfs.tools.opening import Format, Opened, open_contents, whole_of_parts
from ckptfs.uri import Uri, options_of

__all__ = [
    "DomainSummary",
    "FileSummary",
    "Inspected",
    "PartSummary",
    "Summary",
    "inspect",
    "matching",
    "values",
]

SMALL_BYTES = 64 << 10  # values of larger objects are not shown
SMALL_ELEMENTS = 8
_TEXT = 200
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
_DIMENSIONS = 64  # numpy's limit


@dataclass(frozen=True, slots=True)
class DomainSummary:
    """One of the domains that wrote a checkpoint.

    Attributes:
        id: The domain's id.
        ranks: Its ranks.
        hosts: The names of its hosts, for people.
    """

    id: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One file.

    Attributes:
        path: Its path relative to the checkpoint.
        size_bytes: Its bytes; None if they are not known.
    """

    path: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A part of a checkpoint of parts.

    Attributes:
        name: Its name.
        uri: Where it is.
        save_id: Its own id.
        domains: Ids of the domains that hold it.
        hosts: The names of their hosts, for people.
        files: Number of files; None if the part cannot be seen from here.
        size_bytes: Their bytes; None if the part cannot be seen from here.
    """

    name: str
    uri: Uri
    save_id: str
    domains: tuple[str, ...]
    hosts: tuple[str, ...]
    files: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint by its manifest and its seal. Fields that these lack are None or empty.

    Attributes:
        uri: Where it is.
        format: How its bytes are stored.
        name: Its name in the run.
        step: Completed optimizer steps.
        save_id: The id of the save.
        kind: "checkpoint", "weights" or "directory".
        writer: The library that wrote it, as the manifest says.
        created_at: When it was made, in ISO 8601.
        world_size: How many ranks saved it.
        domains: The domains that hold it.
        files: Number of files.
        size_bytes: Bytes of all files.
        per_rank: Keys that have a value of their own on every rank.
        metrics: Metrics of the model that the user gave with the save.
        shares_bytes_with: Ids of other saves that wrote bytes which it uses too.
    """

    uri: Uri
    format: Format
    name: str
    step: int | None = None
    save_id: str | None = None
    kind: str | None = None
    writer: str = ""
    created_at: str = ""
    world_size: int | None = None
    domains: tuple[DomainSummary, ...] = ()
    files: int | None = None
    size_bytes: int | None = None
    per_rank: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    shares_bytes_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is in one checkpoint.

    Attributes:
        summary: The checkpoint as a whole.
        leaves: The leaves that match the filters, in the order of the checkpoint.
        files: The files of a directory of files, or of a checkpoint without leaves; else empty.
        parts: The parts of a checkpoint of parts; else empty.
    """

    summary: Summary
    leaves: tuple[Leaf, ...] = ()
    files: tuple[FileSummary, ...] = ()
    parts: tuple[PartSummary, ...] = ()


def inspect(
    uri: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    filters: Sequence[str] = (),
) -> Inspected:
    """Describe one checkpoint. Local, read-only.

    Reads no data file; of a torch.save file it loads the pickle.

    Args:
        uri: The checkpoint, a part of one, or one safetensors or torch.save file.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        filters: fnmatch patterns of keys; leaves that match any of them are listed. Empty: all.

    Returns:
        What is in it.

    Raises:
        NotFoundError: There is no such checkpoint.
        IncompleteCheckpointError: It is incomplete.
        IntegrityError: The description differs from what was written.
        ManifestError: The description is damaged or too new.
    """
    seal = whole_of_parts(uri, storage_options)
    if seal is not None:
        return _parts_of(seal, uri, storage_options)
    with open_contents(uri, storage_options) as opened:
        leaves = tuple(matching(opened.contents.leaves.values(), filters))
        manifest = None if opened.found is None else opened.found.manifest
        is_directory = manifest is not None and manifest.artifact is Kind.DIRECTORY
        files = tuple(_files(opened)) if is_directory or not opened.contents.leaves else ()
        return Inspected(_summary(opened), leaves, files)


def matching(leaves: Iterable[Leaf], filters: Sequence[str]) -> Iterator[Leaf]:
    """Yield the ``leaves`` with keys that match one of ``filters``; all without filters. Pure."""
    for leaf in leaves:
        if not filters or any(fnmatch.fnmatchcase(leaf.key, pattern) for pattern in filters):
            yield leaf


def values(
    uri: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    filters: Sequence[str] = (),
) -> dict[str, str]:
    """Read small leaves as text: objects of up to 64 KiB, tensors of up to 8 elements. Local, read-only.

    An object that would run code is not loaded, and its text says so.

    Args:
        uri: As for ``inspect``.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        filters: fnmatch patterns of keys; empty: all.

    Returns:
        The texts, by key.

    Raises:
        CkptfsError: As for ``inspect``, and those of reading.
    """
    with open_contents(uri, storage_options) as opened:
        texts: dict[str, str] = {}
        chosen = list(matching(opened.contents.leaves.values(), filters))
        for leaf in chosen:
            if isinstance(leaf, ObjectLeaf) and leaf.size_bytes <= SMALL_BYTES:
                texts[leaf.key] = _object_text(opened.contents, leaf)
        small = [leaf for leaf in chosen if isinstance(leaf, TensorLeaf) and _is_small(leaf)]
        for leaf, tensor in zip(
            small, opened.contents.read([Box.all_of(leaf) for leaf in small]), strict=True
        ):
            texts[leaf.key] = _shortened(str(tensor.tolist()))
        return texts


def _is_small(leaf: TensorLeaf) -> bool:
    is_shown = len(leaf.shape) <= _DIMENSIONS  # deeper lists cannot be shown as text
    return is_shown and leaf.size_bytes <= SMALL_ELEMENTS * leaf.itemsize


def _object_text(contents: Contents, leaf: ObjectLeaf) -> str:
    try:
        return _shortened(_start_of_repr(contents.value(leaf)))
    except (IntegrityError, ManifestError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - the unpickler refuses in a dozen ways
        from ckptfs.dcp.planning.leaves import first_line

        return f"<not loaded: {first_line(error)[:_TEXT]}>"


def _start_of_repr(value: Any) -> str:
    """Return the start of ``repr(value)``; if it is cut, it is longer than what is shown.

    The repr of containers that share elements can have any length, so only the start is made.
    """
    text = ""
    for more in _repr_pieces(value):
        text += more
        if len(text) > _TEXT:
            break
    return text


def _repr_pieces(value: Any) -> Iterator[str]:
    """Yield the repr of a value in pieces.

    Each level yields a character before the next one begins, so the caller's limit bounds the depth.
    """
    kind = type(value)
    if isinstance(value, str | bytes):
        yield repr(value[: _TEXT + 1])
    elif isinstance(value, dict):
        yield "{" if kind is dict else f"{kind.__name__}({{"
        for number, (key, item) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _repr_pieces(key)
            yield ": "
            yield from _repr_pieces(item)
        yield "}" if kind is dict else "})"
    elif kind in _BRACKETS and value:
        opening, closing = _BRACKETS[kind]
        yield opening
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _repr_pieces(item)
        yield f",{closing}" if kind is tuple and len(value) == 1 else closing
    elif getattr(getattr(value, "dtype", None), "hasobject", False):
        yield f"<{kind.__name__} of objects>"
    else:
        yield repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


def _summary(opened: Opened) -> Summary:
    found = opened.found
    manifest = None if found is None else found.manifest
    name = opened.uri.name
    if manifest is None:
        sizes = [file.size_bytes for file in _files(opened)]
        known = [size for size in sizes if size is not None]
        return Summary(
            opened.uri,
            opened.format,
            name,
            step_of(name, None) if found is not None else None,
            files=len(sizes),
            size_bytes=sum(known) if len(known) == len(sizes) else None,
        )
    seal = found.seal if found is not None else None
    return Summary(
        opened.uri,
        opened.format,
        name,
        manifest.step,
        manifest.save_id,
        manifest.artifact.value,
        manifest.writer,
        manifest.created_at,
        manifest.world_size,
        _domains(manifest),
        len(manifest.files),
        manifest.size_bytes,
        manifest.per_rank,
        dict(seal.metrics) if seal is not None else {},
        seal.origins if seal is not None else (),
    )


def _domains(manifest: Manifest) -> tuple[DomainSummary, ...]:
    return tuple(DomainSummary(d.id, d.ranks, d.hosts) for d in manifest.domains)


def _files(opened: Opened) -> Iterator[FileSummary]:
    if opened.found is None:
        yield FileSummary(opened.uri.name, opened.storage.stat(opened.uri.name).size_bytes)
    elif opened.found.manifest is not None:
        for file in opened.found.manifest.files:
            yield FileSummary(file.path, file.size_bytes)
    else:
        yield from _listed(opened.storage, opened.home, "")


def _listed(storage: Storage, home: str, folder: str) -> Iterator[FileSummary]:
    for entry in storage.list(f"{home}/{folder}".rstrip("/")):
        path = f"{folder}/{entry.name}".lstrip("/")
        if entry.is_dir and not entry.is_link:
            yield from _listed(storage, home, path)
        else:
            yield FileSummary(path, _size_of(storage, f"{home}/{path}"))


def _size_of(storage: Storage, key: str) -> int:
    try:
        return storage.stat(key).size_bytes
    except (NotFoundError, SymlinkError):
        return 0  # a link to nothing, or to itself


def _parts_of(seal: Seal, uri: Any, storage_options: Mapping[str, Any] | None) -> Inspected:
    target = Uri.parse(uri)
    parts = []
    with looking_at(target.parent, {**options_of(uri), **(storage_options or {})}) as look:
        manifest = _manifest_of(seal, look.storage, target)
        for ref in seal.parts:
            part_manifest = _manifest_of(piece(seal, ref), look.storage, target / ref.name)
            count = None if part_manifest is None else len(part_manifest.files)
            size = None if part_manifest is None else part_manifest.size_bytes
            fields = (ref.domains, ref.hosts, count, size)
            parts.append(PartSummary(ref.name, target / ref.name, ref.save_id, *fields))
    known = [part.size_bytes for part in parts if part.size_bytes is not None]
    files = [part.files for part in parts if part.files is not None]
    summary = Summary(
        target,
        Format.CKPTFS,
        seal.name,
        seal.step,
        seal.save_id,
        seal.artifact.value,
        "" if manifest is None else manifest.writer,
        "" if manifest is None else manifest.created_at,
        None if manifest is None else manifest.world_size,
        () if manifest is None else _domains(manifest),
        sum(files) if len(files) == len(parts) else None,
        sum(known) if len(known) == len(parts) else None,
        metrics=dict(seal.metrics),
        shares_bytes_with=seal.origins,
    )
    return Inspected(summary, parts=tuple(parts))


def _manifest_of(seal: Seal, storage: Storage, where: Uri) -> Manifest | None:
    """Return the manifest of a sealed save; None if its domain cannot be seen from here."""
    try:
        return drive(find(seal, storage.capabilities.shape, where), storage).manifest
    except NotFoundError:
        return None
