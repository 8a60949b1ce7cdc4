"""What .metadata says of tensors: sizes, offsets, dtypes, strides, places in files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.hostile.corpus import Group, add
from tests.hostile.place import On, Place

W = "model.w"
COMMANDS = ("export", "load", "inspect", "verify", "diff")


def _tensor(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Change what is said of model.w."""
    return lambda metadata: change(metadata.state_dict_metadata[W])


def _chunk(offsets: Any, sizes: Any) -> Callable[[Any], None]:
    """model.w has this chunk, and no other."""

    def change(entry: Any) -> None:
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 0]))]
        entry.chunks[0].offsets, entry.chunks[0].sizes = offsets, sizes

    return _tensor(change)


def _size(*sizes: Any) -> Callable[[Any], None]:
    """model.w as one chunk of this size, so that the two agree."""

    def change(entry: Any) -> None:
        entry.size = tuple(sizes)
        entry.chunks[0].sizes = tuple(sizes)

    return _tensor(change)


def _info(**fields: Any) -> Callable[[Any], None]:
    """The place in the file of every item."""

    def change(metadata: Any) -> None:
        metadata.storage_data = {
            index: replace(info, **fields) for index, info in metadata.storage_data.items()
        }

    return change


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, name, value)


def _overlap(entry: Any) -> None:
    half = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 8]))
    entry.chunks = [half, half]


def _many(entry: Any) -> None:
    one = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 0]))
    entry.chunks = [one] * 100_000


def _properties(**fields: Any) -> Callable[[Any], None]:
    def change(entry: Any) -> None:
        for name, value in fields.items():
            setattr(entry.properties, name, value)

    return _tensor(change)


def _other_dtype(entry: Any) -> None:
    entry.properties.dtype = torch.complex128


def _key(name: str) -> Callable[[Any], None]:
    """model.w is called so."""

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(W)
        metadata.storage_data = {
            (replace(index, fqn=name) if index.fqn == W else index): info
            for index, info in metadata.storage_data.items()
        }

    return change


def _planner(value: Any) -> Callable[[Any], None]:
    return _set("planner_data", value)


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "rows-4-peta": ("A tensor said to have 4 PiB.", _size(1 << 47, 8)),
    "rows-2-gib": ("A tensor said to have 2 GiB, in a file of 2 kB.", _size(1 << 26, 8)),
    "rows-overflow": ("2^62 rows of 8: the product overflows.", _size(1 << 62, 8)),
    "rows-beyond-int64": ("2^70 rows.", _size(1 << 70, 8)),
    "rows-negative": ("-8 rows.", _size(-8, 8)),
    "rows-text": ("Sizes that are text.", _size("8", "8")),
    "rows-float": ("Sizes that are fractions.", _size(8.5, 8)),
    "rows-nan": ("A size that is not a number.", _size(float("nan"), 8)),
    "rows-none": ("A size that is None.", _size(None, 8)),
    "rows-dtype": ("A size that is a dtype.", _size(torch.int8, 8)),
    "dims-300": ("300 dimensions.", _size(*([1] * 300))),
    "dims-none": ("No dimension at all.", _size()),
    "size-disagrees": ("A size that its chunks do not fill.", _tensor(lambda e: setattr(e, "size", torch.Size([9, 8])))),
    "size-int": ("A size that is one number.", _tensor(lambda e: setattr(e, "size", 8))),
    "chunk-negative": ("A chunk at -1.", _chunk((-1, 0), (8, 8))),
    "chunk-outside": ("A chunk behind the end.", _chunk((8, 0), (8, 8))),
    "chunk-far": ("A chunk at 2^62.", _chunk((1 << 62, 0), (8, 8))),
    "chunk-wide": ("A chunk of 2^40 columns.", _chunk((0, 0), (8, 1 << 40))),
    "chunk-of-3-dims": ("A chunk of other dimensions.", _chunk((0, 0, 0), (8, 8, 1))),
    "chunk-text": ("A chunk whose offsets are text.", _chunk("ab", "cd")),
    "chunk-none": ("A chunk of None.", _chunk(None, None)),
    "chunks-overlap": ("Two chunks that say the same rows, and none the others.", _tensor(_overlap)),
    "chunks-100000": ("A hundred thousand empty chunks.", _tensor(_many)),
    "chunks-none": ("No chunk.", _tensor(lambda e: setattr(e, "chunks", []))),
    "chunks-text": ("Chunks that are text.", _tensor(lambda e: setattr(e, "chunks", "chunks"))),
    "dtype-complex": ("Another dtype than the file has.", _tensor(_other_dtype)),
    "dtype-text": ("A dtype that is text.", _properties(dtype="float32")),
    "dtype-none": ("No dtype.", _properties(dtype=None)),
    "dtype-quantised": ("A quantised dtype.", _properties(dtype=torch.qint8)),
    "layout-sparse": ("A sparse layout.", _properties(layout=torch.sparse_coo)),
    "properties-none": ("No properties.", _tensor(lambda e: setattr(e, "properties", None))),
    "offset-far": ("Bytes at 2^62 of the file.", _info(offset=1 << 62)),
    "offset-beyond-int64": ("Bytes at 2^80.", _info(offset=1 << 80)),
    "offset-negative": ("Bytes at -1.", _info(offset=-1)),
    "offset-text": ("An offset that is text.", _info(offset="0")),
    "length-3-gib": ("An item said to have 3 GiB.", _info(length=3 << 30)),
    "length-32-tib": ("An item said to have 32 TiB.", _info(length=32 << 40)),
    "length-negative": ("An item of -1 bytes.", _info(length=-1)),
    "length-none": ("An item without a length.", _info(length=None)),
    "path-up": ("A data file ../../victim/secret.txt.", _info(relative_path="../../victim/secret.txt")),
    "path-absolute": ("A data file /etc/passwd.", _info(relative_path="/etc/passwd")),
    "path-uri": ("A data file at a URI.", _info(relative_path="file:///etc/passwd")),
    "path-nul": ("A NUL in a path.", _info(relative_path="__0_0.distcp\0x")),
    "path-backslash": ("A backslash in a path.", _info(relative_path="..\\..\\victim")),
    "path-surrogate": ("A lone surrogate in a path.", _info(relative_path="\udc80.distcp")),
    "path-empty": ("An empty path.", _info(relative_path="")),
    "path-long": ("A path of 100,000 characters.", _info(relative_path="a" * 100_000)),
    "path-directory": ("A data file that is the directory.", _info(relative_path=".")),
    "path-number": ("A path that is a number.", _info(relative_path=7)),
    "path-metadata": ("A data file that is .metadata itself.", _info(relative_path=".metadata")),
    "key-escape": ("A key that sets the terminal's title.", _key("\x1b]0;owned\x07model.w")),
    "key-newline": ("A key that forges a row.", _key("model.w\r\nstep_9  whole")),
    "key-bidi": ("A key that is turned round.", _key("model.\u202ew")),
    "key-surrogate": ("A lone surrogate in a key.", _key("model.\udc80w")),
    "key-empty": ("An empty key.", _key("")),
    "key-long": ("A key of a million characters.", _key("k" * 1_000_000)),
    "storage-none": ("No place for anything.", _set("storage_data", {})),
    "storage-text": ("Places that are text.", _set("storage_data", "x")),
    "storage-odd-index": ("A place under a key that is no index.", _set("storage_data", {7: 7})),
    "storage-infos-none": ("A place that is None.", lambda m: m.storage_data.update({MetadataIndex(W): None})),
    "tensors-none": ("No tensors.", _set("state_dict_metadata", {})),
    "tensors-list": ("Tensors that are a list.", _set("state_dict_metadata", [1, 2])),
    "tensors-odd-value": ("A tensor that is a number.", lambda m: m.state_dict_metadata.update({W: 7})),
    "planner-number": ("planner_data that is a number.", _planner(7)),
    "planner-index-4e8": ("A path in planner_data with the index 4e8.", _planner({W: ("list", 400_000_000)})),
    "planner-index-negative": ("A path in planner_data with a negative index.", _planner({W: ("list", -1)})),
    "planner-other-key": ("A path in planner_data that is another key's.", _planner({W: ("model", "b")})),
    "planner-empty-path": ("An empty path in planner_data.", _planner({W: ()})),
    "planner-deep-path": ("A path of 100,000 parts in planner_data.", _planner({W: ("a",) * 100_000})),
}  # fmt: skip


def _build(place: Place, change: Callable[[Any], None]) -> None:
    place.change_metadata(change)


for _name, (_tries, _change) in CHANGES.items():
    add(
        f"geometry-{_name}",
        _tries,
        Group.GEOMETRY,
        partial(_build, change=_change),
        on=On.STOCK,
        commands=COMMANDS,
        forged=True,
    )

for _name in ("rows-4-peta", "length-3-gib", "chunks-overlap", "path-up", "offset-far"):
    add(
        f"sealed-geometry-{_name}",
        f"{CHANGES[_name][0]} The log vouches for it.",
        Group.GEOMETRY,
        partial(_build, change=CHANGES[_name][1]),
        on=On.RUN,
        commands=COMMANDS,
        forged=True,
    )
