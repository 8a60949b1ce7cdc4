"""Our own storage options: what they take, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfs.errors import UriError
from ckptfs.storage.options import OURS, ObjectOptions, Times, parse_options
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

URI = Uri.parse("s3://bucket/run")


def test_ours_are_taken_out_and_the_rest_goes_on() -> None:
    """The library sees its own options only, as they were given."""
    config = {"retries": 1}
    options, rest = parse_options(
        URI, {"client": "s3fs", "concurrency": 3, "config_kwargs": config}
    )
    assert options == ObjectOptions(client="s3fs", concurrency=3)
    assert rest == {"config_kwargs": config}
    assert rest["config_kwargs"] is config


def test_without_options_the_defaults() -> None:
    """16 MiB parts by size, 8 at once, 256 MiB, 60 s."""
    assert parse_options(URI, {}) == (ObjectOptions(), {})
    usual = ObjectOptions()
    assert (usual.concurrency, usual.memory_bytes, usual.retry_s) == (8, 256 << 20, 60.0)
    assert usual.times == Times(connect_s=10.0, request_s=60.0)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"part_size_bytes": 8 << 20}, "part_size_bytes", 8 << 20),
        ({"part_size_bytes": "8388608"}, "part_size_bytes", 8 << 20),
        ({"part_size_bytes": "8 MiB"}, "part_size_bytes", 8 << 20),
        ({"part_size_bytes": "8MB"}, "part_size_bytes", 8_000_000),
        ({"part_size_bytes": "0.5 MiB"}, "part_size_bytes", 1 << 19),
        ({"part_size_bytes": "0.3 MiB"}, "part_size_bytes", 314_573),
        ({"part_size_bytes": float(8 << 20)}, "part_size_bytes", 8 << 20),
        ({"part_size_bytes": None}, "part_size_bytes", None),
        ({"memory_bytes": "1 GiB"}, "memory_bytes", 1 << 30),
        ({"concurrency": "16"}, "concurrency", 16),
        ({"retry_s": 0}, "retry_s", 0.0),
        ({"retry_s": "2.5 s"}, "retry_s", 2.5),
        ({"connect_timeout_s": 3}, "times", Times(connect_s=3.0)),
        ({"request_timeout_s": "90"}, "times", Times(request_s=90.0)),
    ],
)
def test_numbers_and_text_with_units(given: dict[str, Any], name: str, value: object) -> None:
    """A URI's query is text: the same values may be written out."""
    assert getattr(parse_options(URI, given)[0], name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("part_size_bytes", 0),
        ("part_size_bytes", -1),
        ("part_size_bytes", "16 parsecs"),
        ("part_size_bytes", "lots"),
        ("part_size_bytes", True),
        ("part_size_bytes", 70000.5),
        ("memory_bytes", 1000),
        ("memory_bytes", float("inf")),
        ("concurrency", 0),
        ("concurrency", 1.5),
        ("concurrency", "many"),
        ("concurrency", 10_000),
        ("concurrency", None),
        ("retry_s", -1),
        ("retry_s", float("nan")),
        ("retry_s", "1 h"),
        ("connect_timeout_s", 0),
        ("request_timeout_s", float("inf")),
        ("client", ""),
        ("client", 3),
    ],
)
def test_nonsense_names_the_option_and_what_it_takes(name: str, value: object) -> None:
    """UriError with the name, the value and the form that is right."""
    with pytest.raises(UriError) as caught:
        parse_options(URI, {name: value})
    assert f"{name}={value!r}: it takes" in str(caught.value)


def test_a_part_that_does_not_fit_is_a_contradiction() -> None:
    """A part above memory_bytes cannot be held: an error, not a smaller part in silence."""
    with pytest.raises(UriError, match="memory_bytes"):
        parse_options(URI, {"part_size_bytes": "32 MiB", "memory_bytes": "16 MiB"})


def test_every_option_of_ours_is_parsed() -> None:
    """OURS is what the parser knows: each of them, with nonsense, is refused by name."""
    for name in OURS:
        with pytest.raises(UriError, match=name):
            parse_options(URI, {name: object()})


def test_they_may_stand_in_the_uri() -> None:
    """The query carries them; storage_options win."""
    storage = open_storage("objects+memory://opts/run?concurrency=3&retry_s=1", {"retry_s": 2})
    assert storage.options.concurrency == 3  # type: ignore[attr-defined]
    assert storage.options.retry_s == 2.0  # type: ignore[attr-defined]
    with pytest.raises(UriError, match="no option 'colour'"):
        open_storage("objects+memory://opts/run?colour=red")
