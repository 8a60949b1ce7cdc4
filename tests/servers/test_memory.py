"""What a save and a load of gigabytes hold in memory beyond the tensors: the bounds that are documented."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.server import Server
from tests.multiprocess.harness import launch
from tests.servers.memory_client import measured

MIB = 1 << 20
# What a Python process grows by in addition: threads, connections, what malloc has not given back.
SLACK_BYTES = 48 * MIB
CONCURRENCY, WINDOW_BYTES, BLOCK_BYTES = 8, 8 * MIB, MIB
LOAD_BYTES = CONCURRENCY * (WINDOW_BYTES + 2 * BLOCK_BYTES)


def most_bytes(uri: str, options: dict[str, Any], do: str, gib: float, dtype: str = "") -> int:
    """What memory_client says of one save or load, in a process of its own."""
    asked = {"do": do, "uri": uri, "options": options, "gib": gib, "dtype": dtype}
    with launch(measured, 1, args=asked) as ranks:
        (told,) = ranks.values()
    return int(told["bytes"])


def test_a_transfer_holds_what_is_told_and_no_more(sink: Server) -> None:
    """A quarter of a GiB in one file: memory_bytes (a fourth of the default) on the way up; on the way
    down, converted to another dtype, a window and two digest blocks for each request.
    """
    uri = sink.fresh("memory")
    options = sink.storage_options(concurrency=CONCURRENCY, memory_bytes=64 * MIB)
    assert most_bytes(uri, options, "save", 0.25) <= 64 * MIB + SLACK_BYTES
    assert most_bytes(uri, options, "load", 0.25, "bfloat16") <= LOAD_BYTES + SLACK_BYTES


@pytest.mark.campaign
def test_a_4_gib_transfer_holds_no_more_than_a_small_one(sink: Server) -> None:
    """What is held does not grow with the file."""
    uri = sink.fresh("memory")
    options = sink.storage_options(concurrency=CONCURRENCY)
    assert most_bytes(uri, options, "save", 4.0) <= 256 * MIB + SLACK_BYTES
    for dtype in ("float32", "bfloat16"):
        assert most_bytes(uri, options, "load", 4.0, dtype) <= LOAD_BYTES + SLACK_BYTES


@pytest.mark.campaign
def test_the_bound_is_the_callers(sink: Server) -> None:
    """memory_bytes=64 MiB is a fourth of the default, and held as well."""
    options = sink.storage_options(memory_bytes=64 * MIB)
    assert most_bytes(sink.fresh("memory"), options, "save", 4.0) <= 64 * MIB + SLACK_BYTES
