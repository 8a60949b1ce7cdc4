"""``ckptfs inspect``: show what is in a checkpoint, or how it differs from another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import OMITTED, CommandResult, Exit, Omitted, command, place_text, table
from ckptfs.progress import progress
from ckptfs.text import size_text
from ckptfs.tools.comparing import Basis, Change, Compared, Difference, Norms, compare
from ckptfs.tools.contents import Leaf, ObjectLeaf, Shard, TensorLeaf
from ckptfs.tools.inspecting import (
    DomainSummary,
    FileSummary,
    Inspected,
    PartSummary,
    Summary,
    values,
)
from ckptfs.tools.inspecting import inspect as inspect_this
from ckptfs.tools.opening import Format
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["inspect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorDocument:
    key: str
    kind: Literal["tensor"] = "tensor"
    dtype: str
    shape: Sequence[int]
    size_bytes: int
    shards: Sequence[Shard]
    value: str | Omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObjectDocument:
    key: str
    kind: Literal["object"] = "object"
    size_bytes: int
    file: str
    start: int
    length: int
    value: str | Omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _InspectDocument:
    uri: Uri
    format: Format
    name: str
    step: int | None
    save_id: str | None
    kind: str | None
    writer: str
    created_at: str
    world_size: int | None
    domains: Sequence[DomainSummary]
    files: int | None
    size_bytes: int | None
    per_rank: Sequence[str]
    metrics: Mapping[str, float]
    shares_bytes_with: Sequence[str]
    leaves: Sequence[_TensorDocument | _ObjectDocument]
    leaves_in_all: int
    file_list: Sequence[FileSummary]
    parts: Sequence[PartSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SideDocument:
    dtype: str | None
    shape: Sequence[int] | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormsDocument:
    before: float | str
    after: float | str
    difference: float | str
    max_abs: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class _DifferenceDocument:
    key: str
    change: Change
    basis: Basis
    changed_bytes: int
    before: _SideDocument | None
    after: _SideDocument | None
    norms: _NormsDocument | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DiffDocument:
    before: Uri
    after: Uri
    same: int
    changed: int
    unknown: int
    leaves: Sequence[_DifferenceDocument]


@command("inspect", answers=(_InspectDocument, _DiffDocument))
@click.argument("uri")
@click.argument("other", required=False, default=None)
@click.option("--diff", "diff", metavar="OTHER", help="Compare with OTHER; the same as two URIs.")
@click.option(
    "--filter", "filters", multiple=True, metavar="GLOB", help="Show only keys that match."
)
@click.option(
    "--sort",
    type=click.Choice(["size", "name"]),
    help="Sort by this, not in the order of the save.",
)
@click.option("--limit", type=click.IntRange(min=0), help="Show at most N rows.")
@click.option("--values", "with_values", is_flag=True, help="Show small leaves (weights only).")
@click.option("--norms", is_flag=True, help="When comparing: read everything, and show L2 norms.")
@click.option(
    "--no-read",
    is_flag=True,
    help="When comparing: read nothing; what digests cannot decide stays unknown.",
)
@storage_options()
@storage_options("--other-option", "--other-storage-option", of="OTHER, where they differ")
def inspect(  # noqa: PLR0917 - one parameter for each option of the command line
    uri: str,
    other: str | None,
    diff: str | None,
    filters: tuple[str, ...],
    sort: str | None,
    limit: int | None,
    with_values: bool,  # noqa: FBT001 - click passes flags by name
    norms: bool,  # noqa: FBT001
    no_read: bool,  # noqa: FBT001
    storage_options: dict[str, Any],
    other_storage_options: dict[str, Any],
) -> CommandResult:
    """Show the tensors and objects of a checkpoint: shape, dtype, sharding, file, bytes.

    Ours, plain torch.distributed.checkpoint, safetensors, one torch.save file, other files. With two
    URIs: what was added, removed, reshaped, changed; by digests where both have them, else by reading
    both. Exit code 1: they differ; 7: unknown (--no-read).
    """
    if diff is not None and other is not None:
        raise click.UsageError("pass --diff or a second URI, not both")
    second = diff if diff is not None else other
    if second is None:
        if norms or no_read:
            raise click.UsageError("--norms and --no-read need two URIs")
        found = inspect_this(uri, storage_options, filters=filters)
        value_texts = values(uri, storage_options, filters=filters) if with_values else {}
        rows = _rows(found, sort, limit)
        return CommandResult(
            _document(found, rows, value_texts),
            lambda console: _show(found, rows, value_texts, console),
        )
    if with_values:
        raise click.UsageError("--values needs exactly one URI")
    with progress(f"comparing {Uri.parse(uri)} with {Uri.parse(second)}") as meter:
        compared = compare(
            uri,
            second,
            storage_options,
            other_storage_options or None,
            filters=filters,
            norms=norms,
            read=not no_read,
            meter=meter,
        )
    return _diff_answer(Uri.parse(uri), Uri.parse(second), compared, sort, limit)


def _rows(found: Inspected, sort: str | None, limit: int | None) -> list[Leaf]:
    leaves = list(found.leaves)
    if sort == "name":
        leaves.sort(key=lambda leaf: leaf.key)
    elif sort == "size":
        leaves.sort(key=lambda leaf: (-leaf.size_bytes, leaf.key))
    return leaves[:limit]


# -- for programs --------------------------------------------------------------------


def _document(
    found: Inspected, rows: list[Leaf], values_by_key: Mapping[str, str]
) -> _InspectDocument:
    summary = found.summary
    return _InspectDocument(
        uri=summary.uri,
        format=summary.format,
        name=summary.name,
        step=summary.step,
        save_id=summary.save_id,
        kind=summary.kind,
        writer=summary.writer,
        created_at=summary.created_at,
        world_size=summary.world_size,
        domains=summary.domains,
        files=summary.files,
        size_bytes=summary.size_bytes,
        per_rank=summary.per_rank,
        metrics=summary.metrics,
        shares_bytes_with=summary.shares_bytes_with,
        leaves=[_leaf_document(leaf, values_by_key.get(leaf.key, OMITTED)) for leaf in rows],
        leaves_in_all=len(found.leaves),
        file_list=found.files,
        parts=found.parts,
    )


def _leaf_document(leaf: Leaf, value: str | Omitted) -> _TensorDocument | _ObjectDocument:
    if isinstance(leaf, ObjectLeaf):
        return _ObjectDocument(
            key=leaf.key,
            size_bytes=leaf.size_bytes,
            file=leaf.file,
            start=leaf.start,
            length=leaf.length,
            value=value,
        )
    return _TensorDocument(
        key=leaf.key,
        dtype=dtype_text(leaf),
        shape=leaf.shape,
        size_bytes=leaf.size_bytes,
        shards=leaf.shards,
        value=value,
    )


# -- for people ----------------------------------------------------------------------


def _show(found: Inspected, rows: list[Leaf], notes: dict[str, str], console: Console) -> None:
    _show_summary(found.summary, console)
    if found.parts:
        console.print()
        parts = (
            (
                p.name,
                place_text(p.uri),
                _count(p.files),
                size_text(p.size_bytes),
                ", ".join(p.hosts),
            )
            for p in found.parts
        )
        table(console, ["PART", "URI", "FILES>", "BYTES>", "HOSTS"], parts)
        return
    console.print()
    if found.files:
        files = ((f.path, size_text(f.size_bytes)) for f in found.files)
        table(console, ["FILE", "BYTES>"], files)
        if not found.leaves:
            return
        console.print()
    columns = ["NAME", "DTYPE", "SHAPE", "SHARDS", "BYTES>", "FILE"]
    lines = [_line(leaf, f"{found.summary.save_id}/") for leaf in rows]
    if notes:
        columns.append("VALUE")
        lines = [(*line, notes.get(leaf.key, "")) for line, leaf in zip(lines, rows, strict=True)]
    table(console, columns, lines)
    total = sum(leaf.size_bytes for leaf in found.leaves)
    hidden = len(found.leaves) - len(rows)
    more = f", {hidden} not shown" if hidden else ""
    tensors = sum(isinstance(leaf, TensorLeaf) for leaf in found.leaves)
    objects = len(found.leaves) - tensors
    console.print(f"{tensors} tensors, {objects} objects, {size_text(total)}{more}")


def _show_summary(summary: Summary, console: Console) -> None:
    lines = [("uri", place_text(summary.uri)), ("format", summary.format.value)]
    if summary.step is not None:
        lines.append(("step", str(summary.step)))
    if summary.kind is not None:
        lines.append(("kind", summary.kind))
    if summary.save_id:
        wrote = f"{summary.save_id} by {summary.writer or 'nobody known'}"
        lines.append(("save", f"{wrote}, {summary.created_at}" if summary.created_at else wrote))
    if summary.world_size is not None:
        lines.append(("ranks", str(summary.world_size)))
    for domain in summary.domains:
        ranks = ", ".join(str(rank) for rank in domain.ranks)
        lines.append(("domain", f"{domain.id}  ranks {ranks}  on {', '.join(domain.hosts) or '-'}"))
    lines.append(("files", f"{_count(summary.files)}, {size_text(summary.size_bytes)}"))
    if summary.per_rank:
        lines.append(("per rank", ", ".join(summary.per_rank)))
    for name, value in summary.metrics.items():
        lines.append(("metric", f"{name} {value:g}"))
    if summary.shares_bytes_with:
        lines.append(("shares bytes with", ", ".join(summary.shares_bytes_with)))
    for name, text in lines:
        console.print(f"{name:9} {text}")


def _line(leaf: Leaf, folder: str) -> tuple[str, ...]:
    if isinstance(leaf, ObjectLeaf):
        return (
            leaf.key,
            "object",
            "",
            "",
            size_text(leaf.size_bytes),
            leaf.file.removeprefix(folder),
        )
    files = list(dict.fromkeys(shard.file.removeprefix(folder) for shard in leaf.shards))
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return (
        leaf.key,
        dtype_text(leaf),
        _box_text(leaf.shape),
        _shards_text(leaf.shards),
        size_text(leaf.size_bytes),
        (files[0] if files else "-") + more,
    )


def _shards_text(shards: tuple[Shard, ...]) -> str:
    sizes = list(dict.fromkeys(shard.sizes for shard in shards))
    if len(shards) < 2:  # noqa: PLR2004
        return str(len(shards))
    text = f"{len(shards)} x {_box_text(sizes[0])}"
    return text if len(sizes) == 1 else f"{len(shards)}, first {_box_text(sizes[0])}"


def _box_text(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


def dtype_text(leaf: TensorLeaf) -> str:
    """Return the dtype as torch names it, without ``torch.``, such as ``float32``."""
    return leaf.dtype_name


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


# -- two checkpoints, leaf by leaf -----------------------------------------------------


def _diff_answer(
    before: Uri, after: Uri, compared: Compared, sort: str | None, limit: int | None
) -> CommandResult:
    """Return the answer: exit code 1 if they differ, 7 if some leaves could not be compared."""
    rows = _differing(compared, sort)
    shown = rows[:limit]
    hidden = len(rows) - len(shown)
    code = Exit.NO if compared.changed else Exit.UNKNOWN if compared.unknown else Exit.OK
    document = _DiffDocument(
        before=before,
        after=after,
        same=sum(leaf.change is Change.SAME for leaf in compared.leaves),
        changed=len(compared.changed),
        unknown=len(compared.unknown),
        leaves=[_difference_document(one) for one in shown],
    )
    return CommandResult(
        document, lambda console: _show_diff(compared, shown, hidden, console), code
    )


def _differing(compared: Compared, sort: str | None) -> list[Difference]:
    """Return the leaves that differ or could not be compared, and all leaves that have norms."""
    rows = [d for d in compared.leaves if d.change is not Change.SAME or d.norms is not None]
    if sort == "name":
        rows.sort(key=lambda d: d.key)
    elif sort == "size":
        rows.sort(key=lambda d: (-_size_of(d), d.key))
    return rows


def _size_of(one: Difference) -> int:
    return max(leaf.size_bytes for leaf in (one.before, one.after) if leaf is not None)


def _difference_document(one: Difference) -> _DifferenceDocument:
    return _DifferenceDocument(
        key=one.key,
        change=one.change,
        basis=one.basis,
        changed_bytes=one.changed_bytes,
        before=_side_document(one.before),
        after=_side_document(one.after),
        norms=None if one.norms is None else _norms_document(one.norms),
    )


def _side_document(leaf: Leaf | None) -> _SideDocument | None:
    if leaf is None:
        return None
    if isinstance(leaf, TensorLeaf):
        return _SideDocument(dtype=dtype_text(leaf), shape=leaf.shape, size_bytes=leaf.size_bytes)
    return _SideDocument(dtype=None, shape=None, size_bytes=leaf.size_bytes)


def _norms_document(norms: Norms) -> _NormsDocument:
    # JSON has neither nan nor infinity.
    before, after, difference, max_abs = (
        value if math.isfinite(value) else str(value)
        for value in (norms.before, norms.after, norms.difference, norms.max_abs)
    )
    return _NormsDocument(before=before, after=after, difference=difference, max_abs=max_abs)


def _show_diff(compared: Compared, rows: list[Difference], hidden: int, console: Console) -> None:
    columns = ["CHANGE", "NAME", "BEFORE", "AFTER", "BYTES>"]
    with_norms = any(row.norms is not None for row in rows)
    if with_norms:
        columns += ["|BEFORE|>", "|AFTER|>", "|DIFFERENCE|>", "MAX ABS>"]
    if rows:
        table(console, columns, (_diff_line(row, with_norms=with_norms) for row in rows))
    same = sum(leaf.change is Change.SAME for leaf in compared.leaves)
    texts = [f"{len(compared.changed)} changed", f"{same} the same"]
    if compared.unknown:
        texts.append(f"{len(compared.unknown)} not compared: no digests, or another sharding")
    if hidden:
        texts.append(f"{hidden} not shown")
    console.print(", ".join(texts))


def _diff_line(one: Difference, *, with_norms: bool) -> tuple[str, ...]:
    line = (
        one.change.value,
        one.key,
        _side_text(one.before),
        _side_text(one.after),
        size_text(one.changed_bytes) if one.change is Change.BYTES else "",
    )
    if not with_norms:
        return line
    norms = one.norms
    if norms is None:
        return (*line, "", "", "", "")
    values = (norms.before, norms.after, norms.difference, norms.max_abs)
    return (*line, *(f"{value:.6g}" for value in values))


def _side_text(leaf: Leaf | None) -> str:
    if leaf is None:
        return "-"
    if not isinstance(leaf, TensorLeaf):
        return f"object {size_text(leaf.size_bytes)}"
    sizes = ", ".join(str(size) for size in leaf.shape)
    return f"{dtype_text(leaf)} [{sizes}]"
