"""``ckptfs inspect``: what is in a checkpoint, and what differs from another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.inspect_diff import diff_answer
from ckptfs.cli.options import storage_options
from ckptfs.cli.output import Answer, command
from ckptfs.cli.text import place_text, size_text
from ckptfs.progress import progress
from ckptfs.tools.comparing import compare
from ckptfs.tools.contents import Leaf, ObjectLeaf, Shard, TensorLeaf
from ckptfs.tools.inspecting import Inspected, Summary, values
from ckptfs.tools.inspecting import inspect as inspect_this
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["inspect"]


@command("inspect")
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
) -> Answer:
    """The tensors and objects of a checkpoint: shape, dtype, sharding, file, bytes.

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
        told = values(uri, storage_options, filters=filters) if with_values else {}
        rows = _rows(found, sort, limit)
        return Answer(
            _document(found, rows, told), lambda console: _show(found, rows, told, console)
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
    return diff_answer(Uri.parse(uri), Uri.parse(second), compared, sort, limit)


def _rows(found: Inspected, sort: str | None, limit: int | None) -> list[Leaf]:
    leaves = list(found.leaves)
    if sort == "name":
        leaves.sort(key=lambda leaf: leaf.key)
    elif sort == "size":
        leaves.sort(key=lambda leaf: (-leaf.size_bytes, leaf.key))
    return leaves[:limit]


# -- for programs --------------------------------------------------------------------


def _document(found: Inspected, rows: list[Leaf], told: dict[str, str]) -> dict[str, Any]:
    return {
        **_summary_document(found.summary),
        "leaves": [
            _leaf_document(leaf) | ({"value": told[leaf.key]} if leaf.key in told else {})
            for leaf in rows
        ],
        "leaves_in_all": len(found.leaves),
        "file_list": [{"path": f.path, "size_bytes": f.size_bytes} for f in found.files],
        "parts": [
            {
                "name": part.name,
                "uri": str(part.uri),
                "save_id": part.save_id,
                "domains": list(part.domains),
                "hosts": list(part.hosts),
                "files": part.files,
                "size_bytes": part.size_bytes,
            }
            for part in found.parts
        ],
    }


def _summary_document(summary: Summary) -> dict[str, Any]:
    return {
        "uri": str(summary.uri),
        "format": summary.format.value,
        "name": summary.name,
        "step": summary.step,
        "save_id": summary.save_id,
        "kind": summary.kind,
        "writer": summary.writer,
        "created_at": summary.created_at,
        "world_size": summary.world_size,
        "domains": [
            {"id": d.id, "ranks": list(d.ranks), "hosts": list(d.hosts)} for d in summary.domains
        ],
        "files": summary.files,
        "size_bytes": summary.size_bytes,
        "per_rank": list(summary.per_rank),
        "metrics": dict(summary.metrics),
        "shares_bytes_with": list(summary.shares_bytes_with),
    }


def _leaf_document(leaf: Leaf) -> dict[str, Any]:
    if isinstance(leaf, ObjectLeaf):
        file = {"file": leaf.file, "start": leaf.start, "length": leaf.length}
        return {"key": leaf.key, "kind": "object", "size_bytes": leaf.size_bytes, **file}
    return {
        "key": leaf.key,
        "kind": "tensor",
        "dtype": dtype_text(leaf),
        "shape": list(leaf.shape),
        "size_bytes": leaf.size_bytes,
        "shards": [_shard_document(shard) for shard in leaf.shards],
    }


def _shard_document(shard: Shard) -> dict[str, Any]:
    return {
        "offsets": list(shard.offsets),
        "sizes": list(shard.sizes),
        "file": shard.file,
        "start": shard.start,
        "length": shard.length,
    }


# -- for people ----------------------------------------------------------------------


def _show(found: Inspected, rows: list[Leaf], told: dict[str, str], console: Console) -> None:
    from ckptfs.cli.output import table

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
    if told:
        columns.append("VALUE")
        lines = [(*line, told.get(leaf.key, "")) for line, leaf in zip(lines, rows, strict=True)]
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
    told = f"{len(shards)} x {_box_text(sizes[0])}"
    return told if len(sizes) == 1 else f"{len(shards)}, first {_box_text(sizes[0])}"


def _box_text(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


def dtype_text(leaf: TensorLeaf) -> str:
    """``float32``: as torch says it, without its name."""
    return str(leaf.dtype).removeprefix("torch.")


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)
