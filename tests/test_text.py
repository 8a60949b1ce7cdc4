"""Sizes, ages and times as they are printed everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptfs.errors import StateError
from ckptfs.text import age_text, counted, parse_size, seconds_text, size_text

PACKAGE = Path(__file__).resolve().parents[1] / "ckptfs"


def test_a_size_has_three_digits_and_a_decimal_unit() -> None:
    """As ``du --si``; what would be 1000 of a unit is one of the next."""
    sizes = (None, 0, 1, 999, 1000, 1024, 999_499, 999_500, 67_108_864, 1_430_000_000, 2_500e12)
    assert [size_text(size) for size in sizes] == [
        "-",
        "0 B",
        "1 B",
        "999 B",
        "1.00 kB",
        "1.02 kB",
        "999 kB",
        "1.00 MB",
        "67.1 MB",
        "1.43 GB",
        "2500 TB",
    ]


def test_sizes_are_read_as_people_write_them() -> None:
    """Numbers, powers of ten, powers of two; anything else is refused."""
    assert [parse_size(s) for s in (7, 7.0, "7", "5GB", " 2 MiB ", "1.5gb", "3 B")] == [
        7,
        7,
        7,
        5 * 10**9,
        2 << 20,
        15 * 10**8,
        3,
    ]
    assert parse_size("9007199254740993") == 2**53 + 1
    texts = ("", "GB", "-1", "0", "5 PB", "0.1", "1e9", "1,5GB", ".5GB")
    for other in (*texts, -1, 0, 1.5, float("nan"), float("inf"), True, None, b"5GB"):
        with pytest.raises(StateError, match="is not a size"):
            parse_size(other)  # type: ignore[arg-type]  # which is refused


def test_an_age_is_one_whole_number() -> None:
    """Never more than has passed."""
    ages = (None, -3.0, 59.9, 60, 3599, 3600, 47.9 * 3600, 48 * 3600)
    assert [age_text(age) for age in ages] == ["-", "0s", "59s", "1m", "59m", "1h", "47h", "2d"]


def test_times_and_counts() -> None:
    """Two units of seconds, and a plural."""
    assert [seconds_text(s) for s in (0.0123, 0.9, 1.234, 250)] == [
        "12.3 ms",
        "900 ms",
        "1.23 s",
        "250 s",
    ]
    assert [counted(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def test_one_module_formats_sizes() -> None:
    """A second list of units would be a second formatter. One reads sizes, the other scales an axis of a plot."""
    lists = re.compile(r'"[kK]i?B"[^\n]*"Mi?B"|"Mi?B"[^\n]*"[kK]i?B"')
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if lists.search(path.read_text())
    }
    assert found == {"text.py", "bench/plots.py"}
