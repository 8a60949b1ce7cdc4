"""safetensors files and torch.save files by themselves."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.hostile.corpus import Group, add
from tests.hostile.inputs.pickles import (
    _archive,
    _equal_hashes,
    _hash_bomb,
    _named,
    _nested_tuples,
    archive_of_zeros,
)
from tests.hostile.place import On, Place

COMMANDS = ("inspect", "diff")


def _header(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def _one(name: str = "w", **fields: Any) -> dict[str, Any]:
    return {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


def _fields(odd: str, value: str) -> str:
    """The fields of a tensor as JSON, one of them this."""
    fields = {"dtype": '"F32"', "shape": "[2]", "data_offsets": "[0,8]", odd: value}
    return ",".join(f'"{key}":{text}' for key, text in fields.items())


TENSORS: dict[str, tuple[str, bytes]] = {
    "empty": ("No byte.", b""),
    "short": ("Four bytes.", b"abcd"),
    "length-huge": ("A header said to have 2^63 bytes.", _header({}, length=1 << 63)),
    "length-most": ("A header said to have 2^64 - 1 bytes.", _header({}, length=(1 << 64) - 1)),
    "length-100-mb": ("A header said to have 100 MB, in a file of 50 bytes.", _header({}, length=100_000_000)),
    "not-json": ("A header that is no JSON.", _header(b"{")),
    "not-utf8": ("A header that is no text.", _header(b"\xff\xfe")),
    "list": ("A header that is a list.", _header([])),
    "deep": ("A hundred thousand brackets.", _header(b"[" * 100_000)),
    "twice": ("One name twice.", _header(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8))),
    "overlap": ("Two tensors in the same bytes.", _header({**_one("a"), **_one("b")}, bytes(8))),
    "hole": ("Bytes that are no tensor's.", _header(_one(), bytes(100))),
    "beyond": ("Bytes behind the end of the file.", _header(_one(data_offsets=[0, 1 << 40], shape=[1 << 38]))),
    "negative": ("Negative offsets.", _header(_one(data_offsets=[-8, 0]), bytes(8))),
    "backwards": ("An end before its beginning.", _header(_one(data_offsets=[8, 0]), bytes(8))),
    "shape-huge": ("A shape whose product overflows.", _header(_one(shape=[1 << 40, 1 << 40]), bytes(8))),
    "shape-negative": ("A negative shape.", _header(_one(shape=[-2]), bytes(8))),
    "shape-float": ("A shape that is a fraction.", _header(_one(shape=[2.5]), bytes(8))),
    "shape-infinite": ("A shape that is infinite.", _header(b'{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', bytes(8))),
    "shape-text": ("A shape that is text.", _header(_one(shape="2"), bytes(8))),
    **{
        f"{key}-nested-{depth}": (
            f"{key} is {depth} lists in each other, which are read and then shown.",
            _header(f'{{"w":{{{_fields(key, "[" * depth + "]" * depth)}}}}}'.encode(), bytes(8)),
        )
        for key in ("shape", "dtype", "data_offsets")
        for depth in (300, 450, 600, 800, 940)
    },
    "dtype-8-mb": ("A dtype of 8 MB.", _header(_one(dtype="x" * (8 << 20)), bytes(8))),
    "shape-8-mb": ("A shape of 8 MB of text.", _header(_one(shape=["x" * (8 << 20)]), bytes(8))),
    "dims-1000": ("A thousand dimensions.", _header(_one(shape=[1] * 1000, data_offsets=[0, 4]), bytes(4))),
    "dtype-odd": ("A dtype that is none.", _header(_one(dtype="F7"), bytes(8))),
    "dtype-list": ("A dtype that is a list.", _header(_one(dtype=["F32"]), bytes(8))),
    "name-escape": ("A name that sets the terminal's title.", _header(_one("\x1b]0;owned\x07"), bytes(8))),
    "name-newline": ("A name that forges a row.", _header(_one("w\r\nforged"), bytes(8))),
    "name-surrogate": ("A lone surrogate in a name.", _header(_one("\udc80"), bytes(8))),
    "name-empty": ("An empty name.", _header(_one(""), bytes(8))),
    "metadata-number": ("__metadata__ is a number.", _header({"__metadata__": 7, **_one()}, bytes(8))),
    "metadata-nested": ("__metadata__ holds lists.", _header({"__metadata__": {"a": [1]}, **_one()}, bytes(8))),
    "many-empty": ("Two thousand tensors without elements.", _header({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(2000)})),
}  # fmt: skip


def _torch_archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name.replace('_', '.', 1)}", data)
    return buffer.getvalue()


SAVED: dict[str, tuple[str, Callable[[Place], bytes]]] = {
    "empty": ("No byte.", lambda place: b""),
    "text": ("It is no archive.", lambda place: b"not a checkpoint\n" * 10),
    "calls": ("A call of os.system.", lambda place: _archive(_named("os", "system", f"touch {place.canary}"))),
    "legacy-calls": ("A call of os.system, in the format of old torch.", lambda place: _named("posix", "system", f"touch {place.canary}")),
    "no-pickle": ("An archive without a pickle.", lambda place: _torch_archive(version=b"3")),
    "nested": ("Two million nested tuples as a key.", lambda place: _archive(_nested_tuples(2_000_000, key=True))),
    "hash-bomb": ("A key that takes 2^44 steps to hash.", lambda place: _archive(_hash_bomb())),
    "equal-hashes": ("100,000 keys whose hashes are equal.", lambda place: _archive(_equal_hashes(100_000))),
    "zeros": ("1 MB deflated that is a GB.", lambda place: archive_of_zeros()),
    "bytearray": ("bytearray(2 << 30).", lambda place: _archive(b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R.")),
    "itself": ("A list that holds itself.", lambda place: _archive(b"\x80\x02]q\x00h\x00a.")),
    "number": ("A number by itself.", lambda place: _archive(b"\x80\x02K\x07.")),
    "torchscript": ("An archive that says it is a program.", lambda place: _torch_archive(data_pkl=b"N.", constants_pkl=b"N.", code=b"x")),
}  # fmt: skip


def _write(place: Place, data: bytes) -> None:
    place.checkpoint.write_bytes(data)


def _make(place: Place, make: Callable[[Place], bytes]) -> None:
    place.checkpoint.write_bytes(make(place))


def _fifo(place: Place) -> None:
    place.remove(place.checkpoint)
    os.mkfifo(place.checkpoint)


def _giant(place: Place) -> None:
    os.truncate(place.checkpoint, 20 << 30)


for _name, (_tries, _data) in TENSORS.items():
    add(
        f"safetensors-{_name}",
        f"A safetensors file: {_tries}",
        Group.SAFETENSORS,
        partial(_write, data=_data),
        on=On.SAFETENSORS,
        commands=COMMANDS,
    )

for _name, (_tries, _saved) in SAVED.items():
    add(
        f"torch-file-{_name}",
        f"A torch.save file: {_tries}",
        Group.TORCH_FILES,
        partial(_make, make=_saved),
        on=On.TORCH,
        commands=COMMANDS,
    )

for _on, _group in ((On.SAFETENSORS, Group.SAFETENSORS), (On.TORCH, Group.TORCH_FILES)):
    add(f"{_on.value}-is-a-fifo", "A FIFO.", _group, _fifo, on=_on, commands=COMMANDS)
    add(f"{_on.value}-is-a-giant", "20 GB of holes.", _group, _giant, on=_on, commands=COMMANDS)
