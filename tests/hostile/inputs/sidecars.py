"""Digests of data files that say something else than an encoder writes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import xxhash

from tests.hostile.corpus import Group, add
from tests.hostile.place import On, Place

COMMANDS = ("load", "verify", "inspect", "export", "restore", "cp", "checkpoint_dir", "diff")

_HEADER = struct.Struct("<8sHHIQQ")


def _sealed(body: bytes) -> bytes:
    """With the checksum at its end that a reader believes."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def _says(items: int, blocks: int, rest: bytes = b"") -> bytes:
    return _sealed(_HEADER.pack(b"ckptfsX3", 1, 0, 1 << 20, items, blocks) + rest)


SIDECARS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("No byte.", lambda was: b""),
    "truncated": ("Half of it.", lambda was: was[: len(was) // 2]),
    "other-magic": ("Another magic.", lambda was: b"otherXX3" + was[8:]),
    "flipped": ("A flipped bit.", lambda was: was[:40] + bytes([was[40] ^ 1]) + was[41:]),
    "items-huge": ("2^60 items, with a right checksum.", lambda was: _says(1 << 60, 0)),
    "blocks-huge": ("2^60 blocks, with a right checksum.", lambda was: _says(0, 1 << 60)),
    "no-items": ("No items, with a right checksum.", lambda was: _says(0, 0)),
    "item-far": ("An item at 2^60, with a right checksum.", lambda was: _says(1, 0, struct.pack("<QQQQ", 1 << 60, 1 << 60, 0, 0))),
    "item-backwards": ("A payload outside of its item.", lambda was: _says(1, 1, struct.pack("<QQQQQ", 0, 8, 1 << 40, 8, 0))),
    "version-99": ("A version of the future.", lambda was: _sealed(_HEADER.pack(b"ckptfsX3", 99, 0, 1 << 20, 0, 0))),
}  # fmt: skip


def _write(place: Place, change: Callable[[bytes], bytes]) -> None:
    place.sidecar.write_bytes(change(place.sidecar.read_bytes()))
    place.reseal()


for _name, (_tries, _change) in SIDECARS.items():
    add(
        f"sidecar-{_name}",
        f"The digests of a data file: {_tries}",
        Group.SIDECARS,
        partial(_write, change=_change),
        on=On.RUN,
        commands=COMMANDS,
    )
