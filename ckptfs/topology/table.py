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

from ckptfs.errors import StateError
from ckptfs.schema import parse

__all__ = ["decode_table", "encode_table"]

_ROW_BYTES = 16 << 10  # of one rank: a few names of a host, at most 4 KiB of them


def encode_table(hellos: Sequence[Mapping[str, Any]]) -> bytes:
    """hellos: of every rank in order, each with its ``world`` and its ``life`` (or None)."""
    names = [*hellos[0]["world"]]
    rows = [[*(hello["world"][name] for name in names), hello["life"]] for hello in hellos]
    return zlib.compress(json.dumps({"names": names, "rows": rows}).encode())


def decode_table(data: bytes, ranks: int) -> list[dict[str, Any]]:
    """The inverse: ``world`` and ``life`` of so many ranks. StateError where it is none of theirs."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, ranks * _ROW_BYTES)
        if inflating.unconsumed_tail or not inflating.eof:
            raise ValueError(f"larger than {ranks * _ROW_BYTES} bytes, or cut short")
        told = parse(text)
    except (zlib.error, ValueError) as error:
        raise StateError(f"the table of the ranks in torch's store is damaged: {error}") from error
    return [
        {"world": dict(zip(told["names"], row[:-1], strict=True)), "life": row[-1]}
        for row in told["rows"]
    ]
