"""What a run says at its end: one line for all skipped tests, with what they lack and what brings it, and
one for each test that failed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["name_failures", "sum_up"]

# What a test lacked, and how its reason says so. The first that fits counts.
LACKS = (
    ("servers and machines of the lab: `make lab-install` brings them", r"lab-install"),
    ("a CPU that the kernel of the NFS lab can run on", r"user-mode Linux cannot run"),
    ("root", r"\broot\b"),
    ("a CUDA device", r"CUDA"),
    ("frameworks: `make test-integrations` brings them", r"could not import|No module named"),
    (
        "what this store, filesystem or system does not have",
        r"\bhere\b|streams only|this (filesystem|system|torch|kernel|HDFS)|/proc|/dev|strace|mount|obstore",
    ),
)


def sum_up(reasons: Iterable[str]) -> str:
    """The line; empty where nothing was skipped."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        lacks = (name for name, pattern in LACKS if re.search(pattern, reason))
        counts[next(lacks, "something else, listed above")] += 1
    if not counts:
        return ""
    parts = ", ".join(f"{count} lack {name}" for name, count in counts.most_common())
    return f"{counts.total()} skipped: {parts}"


def name_failures(stats: Mapping[str, Sequence[Any]]) -> list[str]:
    """A line for each test that failed or broke: its name and the first line of its error."""
    lines = []
    for report in (*stats.get("failed", ()), *stats.get("error", ())):
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (crash.message if crash else str(report.longrepr)).strip().splitlines()
        lines.append(f"FAILED {report.nodeid}: {message[0][:300] if message else ''}\n")
    return lines
