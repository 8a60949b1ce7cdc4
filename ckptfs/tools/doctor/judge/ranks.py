"""Ranks, times and sizes as findings tell them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptfs.control.world import World

__all__ = ["hosts", "many", "on_ranks", "seconds", "size"]

_SHOWN = 4
_GB = 10**9
_MINUTE_S = 60.0
_HOUR_S = 3600.0


def on_ranks(worlds: Sequence[World], ranks: Collection[int]) -> str:
    """``rank 3 on host-b: `` where only some ranks are meant; empty where all are."""
    if len(ranks) == len(worlds):
        return ""
    shown = [f"rank {rank} on {worlds[rank].site}" for rank in sorted(ranks)[:_SHOWN]]
    more = len(ranks) - len(shown)
    return f"{', '.join(shown)}{f' and {more} more' if more else ''}: "


def hosts(worlds: Sequence[World], nodes: Sequence[str]) -> str:
    """The hosts of these nodes."""
    return ", ".join(next(w.site for w in worlds if w.node == node) for node in nodes)


def many(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def seconds(value: float) -> str:
    """``0.4 ms``, ``12 ms``, ``3.1 s``, ``4 min``, ``2.5 h``."""
    if value < 1:
        return f"{value * 1000:.2g} ms" if value < 0.01 else f"{value * 1000:.0f} ms"  # noqa: PLR2004 - two digits
    if value < 2 * _MINUTE_S:
        return f"{value:.1f} s"
    return f"{value / _MINUTE_S:.0f} min" if value < 2 * _HOUR_S else f"{value / _HOUR_S:.1f} h"


def size(size_bytes: float) -> str:
    """``512 MB``, ``1.5 TB``; decimal, as disks and networks are sold."""
    value = size_bytes / 1000
    for unit in ("kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":  # noqa: PLR2004 - decimal units
            break
        value /= 1000
    return f"{value:.3g} {unit}"
