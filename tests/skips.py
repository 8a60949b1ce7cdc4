"""One line for all tests that were skipped: how many, for what they lack, and what brings it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

__all__ = ["sum_up"]

# What a test lacked, and how its reason says so. The first that fits counts.
LACKS = (
    ("servers and machines of the lab: `make lab-install` brings them", r"lab-install"),
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
