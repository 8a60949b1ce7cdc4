"""Bytes, ages and counts as a person reads them. Pure."""

from __future__ import annotations

import re

from ckptfs.events import size_text
from ckptfs.uri import Uri

__all__ = ["age_text", "counted", "parse_duration", "place_text", "size_text"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhdw]?)")


def counted(number: int, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def age_text(seconds: float | None) -> str:
    """``42s``, ``7m``, ``3h``, ``12d``; ``-`` where nobody told."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    for unit, length in (("s", 60), ("m", 3600), ("h", 2 * 86400)):
        if seconds < length:
            return f"{int(seconds // _UNITS[unit])}{unit}"
    return f"{int(seconds // _UNITS['d'])}d"


def place_text(uri: Uri) -> str:
    """As a person types it: the path of a mounted directory, the URI of anything else."""
    return uri.local_path if uri.is_local else str(uri)


def parse_duration(text: str) -> float:
    """Seconds of ``30m``, ``1.5h``, ``2d``, ``90``. ValueError: it is none."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 90s, 30m, 1.5h, 2d or 1w")
    return float(match["number"]) * _UNITS[match["unit"] or "s"]
