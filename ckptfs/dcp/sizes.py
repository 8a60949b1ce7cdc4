"""Parse sizes as people write them: one grammar for everything that takes a size. No torch."""

from __future__ import annotations

import re

from ckptfs.errors import StateError

__all__ = ["parse_size"]

_UNITS = {
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


def parse_size(size: int | str, *, least: int = 1) -> int:
    """Read a size as people write it.

    Args:
        size: A number of bytes, or a text such as "1.5GB" (powers of ten) or "5GiB".
        least: The smallest number that is accepted.

    Returns:
        The number of bytes.

    Raises:
        StateError: It is not a size, or is below ``least``.
    """
    match = re.fullmatch(
        r"\s*(\d+)(\.\d+)?\s*([KMGT]i?B|B)?\s*", str(size), re.IGNORECASE | re.ASCII
    )
    if match is None:
        raise _no_size(size)
    factor = _UNITS[(match[3] or "").upper()]
    # Whole numbers stay exact, however large.
    found = int(match[1]) * factor + (round(float(match[2]) * factor) if match[2] else 0)
    if found < least:
        raise _no_size(size)
    return found


def _no_size(size: object) -> StateError:
    return StateError(f"{size!r} is not a size", hint='write 5000000000, "1.5GB" or "5GiB"')
