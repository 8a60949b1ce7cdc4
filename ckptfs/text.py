"""Sizes, ages, times and counts as a person reads and writes them, the same everywhere. Pure.

What is printed has decimal units, as the sizes of disks, the speeds of networks and ``du --si`` have. A size
that is read may have either: ``parse_size`` is the one grammar for everything that takes a size.
"""

from __future__ import annotations

import re

from ckptfs.errors import StateError

__all__ = ["age_text", "counted", "number_text", "parse_size", "seconds_text", "size_text"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_LEAST = 0.9995  # of a unit: from here on, three digits of the smaller unit would be 1000
_SIZE = re.compile(r"\s*(\d+)(\.\d+)?\s*([KMGT]i?B|B)?\s*", re.IGNORECASE | re.ASCII)
_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def counted(number: int, thing: str) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def size_text(size_bytes: float | None) -> str:
    """Return ``1.43 GB``, of 10^9; bytes below one kB are exact; ``-`` if the size is not known."""
    if size_bytes is None:
        return "-"
    for unit, name in _UNITS:
        if abs(size_bytes) >= _LEAST * unit:
            return f"{number_text(size_bytes / unit)} {name}"
    return f"{size_bytes:.0f} B"


def age_text(seconds: float | None) -> str:
    """Return ``42s``, ``7m``, ``3h``, ``12d``; ``-`` if the age is not known."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    for unit, length_s, most_s in (
        ("s", 1, _MINUTE_S),
        ("m", _MINUTE_S, _HOUR_S),
        ("h", _HOUR_S, 2 * _DAY_S),
    ):
        if seconds < most_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{int(seconds // _DAY_S)}d"


def number_text(value: float) -> str:
    """Return three digits of ``value``: ``1.23``, ``12.3``, ``123``, ``0.0120``."""
    if value == 0:
        return "0"
    for limit, digits in ((100.0, 0), (10.0, 1), (1.0, 2), (0.1, 3)):
        if abs(value) >= limit - 0.5 * 10.0**-digits:
            return f"{value:.{digits}f}"
    return f"{value:#.3g}"


def seconds_text(value: float) -> str:
    """Return ``1.23 s``, ``12.3 ms`` for ``value`` seconds."""
    return f"{number_text(value)} s" if value >= 1 else f"{number_text(1e3 * value)} ms"


def parse_size(size: float | str, *, least: int = 1) -> int:
    """Read a size as people write it.

    Args:
        size: A whole number of bytes, or a text such as "1.5GB" (powers of ten) or "5GiB".
        least: The smallest number that is accepted.

    Returns:
        The number of bytes.

    Raises:
        StateError: It is not a size, or is below ``least``.
    """
    found: int | None = None
    if isinstance(size, str):
        found = _bytes_of(size)
    elif _is_integral(size):
        found = int(size)
    if found is None or found < least:
        hint = 'write 5000000000, "1.5GB" or "5GiB"'
        raise StateError(f"{size!r} is not a size", hint=hint)
    return found


def _is_integral(size: object) -> bool:
    if isinstance(size, bool) or not isinstance(size, int | float):
        return False
    return isinstance(size, int) or size.is_integer()


def _bytes_of(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    factor = _FACTORS[(match[3] or "").upper()]
    # Whole numbers stay exact, however large.
    return int(match[1]) * factor + (round(float(match[2]) * factor) if match[2] else 0)
