"""What every rank is told of all when a control opens: one table, read by each of them. Pure.

With thousands of ranks its size counts once for each, so it is packed: of rows that differ in few
places little is left, and what only the coordinator needs (a nonce, a version) is not in it. All ranks
run the same version when they read it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["decode_table", "encode_table"]


def encode_table(hellos: Sequence[Mapping[str, Any]]) -> bytes:
    """hellos: of every rank in order, each with its ``world`` and its ``life`` (or None)."""
    names = [*hellos[0]["world"]]
    rows = [[*(hello["world"][name] for name in names), hello["life"]] for hello in hellos]
    return zlib.compress(json.dumps({"names": names, "rows": rows}).encode())


def decode_table(data: bytes) -> list[dict[str, Any]]:
    """The inverse: ``world`` and ``life`` of every rank."""
    told = json.loads(zlib.decompress(data))
    return [
        {"world": dict(zip(told["names"], row[:-1], strict=True)), "life": row[-1]}
        for row in told["rows"]
    ]
