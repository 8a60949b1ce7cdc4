"""How a result is told: names of phases, numbers with units, verdicts as sentences. Pure.

Three digits of a number are what a benchmark can carry; seconds below one are told in milliseconds.
"""

from __future__ import annotations

from ckptfs.bench.results import Phase
from ckptfs.bench.stats import MARGIN, Comparison, Spread, Verdict

__all__ = [
    "PHASES",
    "bytes_text",
    "interval_text",
    "limit_text",
    "number_text",
    "phase_text",
    "seconds_text",
    "spread_text",
    "verdict_text",
]

# In the order in which they are told.
PHASES: dict[Phase, tuple[str, str]] = {
    "save": ("save", "one call, until the bytes are as durable as the engine promises"),
    "load_cold": ("load, cold", "the files were taken out of the page cache before"),
    "load_warm": ("load, warm", "the files had just been written or read"),
    "stall": ("stall", "how long one asynchronous save held the training loop"),
    "steps": ("training loop alone", "steps that save nothing"),
    "steps_saving": ("training loop saving", "the same steps with asynchronous saves"),
}
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def phase_text(phase: str) -> str:
    """The name of ``phase``; an unknown one, of a newer version, as it is written."""
    return PHASES[phase][0] if phase in PHASES else phase


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


def bytes_text(value: float | None) -> str:
    """Return ``1.23 GB``, of 10^9, for ``value`` bytes; ``-`` where it could not be measured, None."""
    if value is None:
        return "-"
    for unit, name in _UNITS:
        if abs(value) >= unit:
            return f"{number_text(value / unit)} {name}"
    return f"{value:.0f} B"


def spread_text(values: Spread) -> str:
    """Return ``1.23 (1.10-1.40)``: median, least and largest of ``values``."""
    if values.count == 1:
        return number_text(values.median)
    least, most = number_text(values.least), number_text(values.most)
    return f"{number_text(values.median)} ({least}-{most})"


def interval_text(found: Comparison) -> str:
    """Return ``0.84 (0.80-0.90)``: the ratio of ``found``, and the interval that holds it."""
    return f"{found.ratio:.2f} ({found.low:.2f}-{found.high:.2f})"


def verdict_text(found: Comparison) -> str:
    """The verdict of ``found`` in words; where there is none, what it would take."""
    if found.verdict is not Verdict.SPREAD_TOO_WIDE:
        return str(found.verdict.value)
    if found.rounds_needed is None:
        return "the spread does not allow a verdict"
    return f"the spread does not allow a verdict; about {found.rounds_needed} rounds might"


def limit_text(to_limit: Comparison) -> str:
    """Return what to say where an engine took less time than its limit; empty where the limit is one.

    What is closer than ``MARGIN`` has reached the limit, not passed it.

    Args:
        to_limit: The engine by its limit.
    """
    if to_limit.verdict is Verdict.FASTER:
        return "faster than the limit: it is no limit here"
    if to_limit.verdict is Verdict.SPREAD_TOO_WIDE and to_limit.ratio <= 1 / MARGIN:
        return "its median is faster than the limit, without a verdict"
    return ""
