"""The clock of a filesystem, which moves in ticks of some milliseconds."""

from __future__ import annotations

from pathlib import Path

__all__ = ["until_the_clock_ticks"]


def until_the_clock_ticks(place: Path) -> None:
    """Return once what is made in the directory ``place`` is younger than all that was made there before."""
    probe = place / "tick"
    probe.touch()
    began = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns <= began:
        probe.chmod(0o600)
    probe.unlink()
