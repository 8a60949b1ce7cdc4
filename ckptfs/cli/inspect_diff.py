"""How ``ckptfs inspect A B`` answers: what differs, leaf by leaf."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckptfs.cli.output import Answer, Exit, table
from ckptfs.cli.text import size_text
from ckptfs.tools.comparing import Change, Compared, Difference, Norms
from ckptfs.tools.contents import Leaf, TensorLeaf
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["diff_answer"]


def diff_answer(
    before: Uri, after: Uri, compared: Compared, sort: str | None, limit: int | None
) -> Answer:
    """Exit code 1 where they differ, 7 where some leaves are not known to be equal."""
    rows = _rows(compared, sort)
    shown = rows[:limit]
    hidden = len(rows) - len(shown)
    code = Exit.NO if compared.changed else Exit.UNKNOWN if compared.unknown else Exit.OK
    document = {
        "before": str(before),
        "after": str(after),
        "same": sum(leaf.change is Change.SAME for leaf in compared.leaves),
        "changed": len(compared.changed),
        "unknown": len(compared.unknown),
        "leaves": [_document(one) for one in shown],
    }
    return Answer(document, lambda console: _show(compared, shown, hidden, console), code)


def _rows(compared: Compared, sort: str | None) -> list[Difference]:
    """What differs; where norms were told every leaf that has them."""
    rows = [d for d in compared.leaves if d.change is not Change.SAME or d.norms is not None]
    if sort == "name":
        rows.sort(key=lambda d: d.key)
    elif sort == "size":
        rows.sort(key=lambda d: (-_size_of(d), d.key))
    return rows


def _size_of(one: Difference) -> int:
    return max(leaf.size_bytes for leaf in (one.before, one.after) if leaf is not None)


def _document(one: Difference) -> dict[str, Any]:
    return {
        "key": one.key,
        "change": one.change.value,
        "basis": one.basis.value,
        "changed_bytes": one.changed_bytes,
        "before": _leaf(one.before),
        "after": _leaf(one.after),
        "norms": None if one.norms is None else _norms(one.norms),
    }


def _leaf(leaf: Leaf | None) -> dict[str, Any] | None:
    if leaf is None:
        return None
    if isinstance(leaf, TensorLeaf):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(leaf.shape), "size_bytes": leaf.size_bytes}
    return {"dtype": None, "shape": None, "size_bytes": leaf.size_bytes}


def _norms(norms: Norms) -> dict[str, Any]:
    values = {
        "before": norms.before,
        "after": norms.after,
        "difference": norms.difference,
        "max_abs": norms.max_abs,
    }
    # JSON has no nan and no infinity.
    return {k: v if math.isfinite(v) else str(v) for k, v in values.items()}


def _show(compared: Compared, rows: list[Difference], hidden: int, console: Console) -> None:
    columns = ["CHANGE", "NAME", "BEFORE", "AFTER", "BYTES>"]
    with_norms = any(row.norms is not None for row in rows)
    if with_norms:
        columns += ["|BEFORE|>", "|AFTER|>", "|DIFFERENCE|>", "MAX ABS>"]
    if rows:
        table(console, columns, (_line(row, with_norms=with_norms) for row in rows))
    same = sum(leaf.change is Change.SAME for leaf in compared.leaves)
    told = [f"{len(compared.changed)} changed", f"{same} the same"]
    if compared.unknown:
        told.append(f"{len(compared.unknown)} not compared: no digests, or another sharding")
    if hidden:
        told.append(f"{hidden} not shown")
    console.print(", ".join(told))


def _line(one: Difference, *, with_norms: bool) -> tuple[str, ...]:
    line = (
        one.change.value,
        one.key,
        _told(one.before),
        _told(one.after),
        size_text(one.changed_bytes) if one.change is Change.BYTES else "",
    )
    if not with_norms:
        return line
    norms = one.norms
    if norms is None:
        return (*line, "", "", "", "")
    values = (norms.before, norms.after, norms.difference, norms.max_abs)
    return (*line, *(f"{value:.6g}" for value in values))


def _told(leaf: Leaf | None) -> str:
    if leaf is None:
        return "-"
    if not isinstance(leaf, TensorLeaf):
        return f"object {size_text(leaf.size_bytes)}"
    sizes = ", ".join(str(size) for size in leaf.shape)
    return f"{str(leaf.dtype).removeprefix('torch.')} [{sizes}]"
