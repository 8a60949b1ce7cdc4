"""One value of everything that format version 1 can put on storage, and its golden bytes.

``golden()`` names a file below ``tests/formats/v1`` for each. Adding a kind of entry adds a value;
a change to an existing file is a change of the format and needs a version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.digests import (
    BlockDigester,
    FileDigests,
    ItemDigests,
    decode_digests,
    encode_digests,
)
from ckptfs.commit.log.entries import (
    Abort,
    Body,
    Decided,
    Delete,
    Entry,
    Fence,
    FenceMode,
    Generation,
    Gone,
    Kind,
    Outcome,
    Part,
    PartRef,
    Pin,
    Release,
    Seal,
    Snapshot,
    Stamp,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry, snapshot_of
from ckptfs.commit.manifest import (
    DomainRecord,
    FileRecord,
    Manifest,
    decode_manifest,
    encode_manifest,
)

__all__ = ["Golden", "golden"]

_BASE = Generation(3, "a1b2")
_SAVE = "20260101-000000-c0ffee"


@dataclass(frozen=True, slots=True)
class Golden:
    """A value, the file that holds its bytes, and the functions between the two."""

    file: str
    value: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, str], Any]


def golden() -> list[Golden]:
    """Return every golden value of format version 1."""
    entries = [
        Golden(
            f"entry-{kind}.json", Entry(f"write-{kind}", body, _STAMP), encode_entry, decode_entry
        )
        for kind, body in _bodies().items()
    ]
    return [
        *entries,
        Golden("ckptfs.json", _manifest(), encode_manifest, decode_manifest),
        Golden("__0_0.xxh3", _sidecar(), encode_digests, _decode_sidecar),
    ]


_STAMP = Stamp(at="2026-01-01T00:00:00Z", host="host-1", pid=4711, rank=0)


def _bodies() -> dict[str, Body]:
    seal = Seal(
        save_id=_SAVE,
        base=_BASE,
        seq=7,
        fenced=True,
        name="step_100",
        step=100,
        artifact=Kind.CHECKPOINT,
        domains=("d1", "d2"),
        digest="0123456789abcdef0123456789abcdef",
    )
    part = Seal(
        save_id=f"{_SAVE}-2",
        base=_BASE,
        seq=8,
        fenced=False,
        name="export",
        step=None,
        artifact=Kind.WEIGHTS,
        domains=("d1",),
        digest="f" * 32,
        references=(_SAVE,),
        parts=(PartRef("actor", f"{_SAVE}-3", "e" * 32, ("d2",)),),
        failure=True,
    )
    fence = Fence(
        generation=_BASE,
        mode=FenceMode.OVERWRITE,
        host="host-1",
        pid=4711,
        job="slurm:17",
        node="boot/mnt:[1]",
        started="2026-01-01T00:00:00Z",
    )
    bodies: dict[str, Body] = {
        "seal": seal,
        "seal-of-parts": part,
        "abort": Abort(_SAVE, _BASE),
        "decided": Decided(_SAVE, Outcome.COMMITTED),
        "fence": fence,
        "release": Release(_BASE),
        "delete": Delete(_SAVE, _BASE, "asked"),
        "gone": Gone(_SAVE, _BASE),
        "pin": Pin(_SAVE, pinned=False),
    }
    state = LogState()
    for body in bodies.values():
        state = fold_entry(state, body)
    promised = Part(
        save_id=f"{_SAVE}-4",
        of=_SAVE,
        part="actor",
        base=_BASE,
        name="step_100",
        step=100,
        home="d1",
        home_host="host-1",
        domains=("d2", "d3"),
        digest="d" * 32,
    )
    hosts = PartRef("actor", promised.save_id, promised.digest, promised.domains, ("h-2", "h-3"))
    return {
        **bodies,
        "snapshot": _snapshot(state),
        "part": promised,
        "seal-of-hosts": replace(seal, domains=("d1",), parts=(hosts,)),
        "snapshot-of-parts": _snapshot(fold_entry(state, promised)),
    }


def _snapshot(state: LogState) -> Snapshot:
    # As it is read back: a pair is a list then.
    body = decode_entry(encode_entry(Entry("w", snapshot_of(state))), "snapshot").body
    assert isinstance(body, Snapshot)
    return body


def _manifest() -> Manifest:
    return Manifest(
        save_id=_SAVE,
        name="step_100",
        step=100,
        files=(
            FileRecord(f"{_SAVE}/__0_0.distcp", 4096, domain="d1", digests=f"{_SAVE}/__0_0.xxh3"),
            FileRecord(f"{_SAVE}/__0_0.xxh3", 80, domain="d1", digest="a" * 32),
            FileRecord(f"{_SAVE}/.metadata", 512, digest="b" * 32),
        ),
        domains=(DomainRecord("d1", (0, 1), ("host-1",)), DomainRecord("d2", (2, 3), ("host-2",))),
        base=_BASE,
        world_size=4,
        created_at="2026-01-01T00:00:00Z",
        writer="ckptfs 0.1.0",
        references=("older",),
        per_rank=("loader.*",),
    )


def _sidecar() -> FileDigests:
    digester = BlockDigester()
    digester.update(b"head")
    digester.cut()
    digester.update(bytes(range(256)) * 6000)  # more than one block
    digester.cut()
    digester.update(b"tail")
    size = 256 * 6000
    return FileDigests(
        (
            ItemDigests(0, size + 8, 4, size, tuple(digester.finish())),
            ItemDigests(size + 64, 0, 0, 0, ()),
        )
    )


def _decode_sidecar(data: bytes, where: str) -> FileDigests:
    """Decode with digests as tuples: a decoder may keep them in an array, which is never equal."""
    found = decode_digests(data, where)
    return FileDigests(
        tuple(
            ItemDigests(i.offset, i.length, i.payload_offset, i.payload_length, tuple(i.blocks))
            for i in found.items
        )
    )
