"""The safetensors format, and the index of a checkpoint in several files. Pure.

    model.safetensors              | 8 bytes: n | n bytes of JSON | tensors, one after another |
    model.safetensors.index.json   {"metadata": {"total_size": N}, "weight_map": {key: file name}}

JSON: key -> {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, and "__metadata__", text to
text. ``encode_header`` puts wide dtypes first, so that every tensor is aligned, as the format's own library
does. Decoders trust nothing: a tensor that extends beyond the file, overlaps another, leaves a hole before
it, or has another size than its shape gives is a ManifestError, or for a file that is too short an
IntegrityError, before a byte of data is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ckptfs.dcp.metadata.torch_names import DTYPES, Dtype
from ckptfs.errors import IntegrityError, ManifestError

__all__ = [
    "INDEX",
    "SUFFIX",
    "Header",
    "TensorEntry",
    "decode_header",
    "decode_index",
    "dtype_name",
    "dtype_named",
    "encode_header",
    "encode_index",
    "header_size",
]

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_ALIGNMENT = 8
_DTYPES: dict[str, Dtype] = {
    "F64": DTYPES["float64"],
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "F8_E4M3": DTYPES["float8_e4m3fn"],
    "F8_E4M3FNUZ": DTYPES["float8_e4m3fnuz"],
    "F8_E5M2": DTYPES["float8_e5m2"],
    "F8_E5M2FNUZ": DTYPES["float8_e5m2fnuz"],
    "C64": DTYPES["complex64"],
    "I64": DTYPES["int64"],
    "I32": DTYPES["int32"],
    "I16": DTYPES["int16"],
    "I8": DTYPES["int8"],
    "U64": DTYPES["uint64"],
    "U32": DTYPES["uint32"],
    "U16": DTYPES["uint16"],
    "U8": DTYPES["uint8"],
    "BOOL": DTYPES["bool"],
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; ``start`` is the offset of its bytes from the beginning of the file."""

    key: str
    dtype: Dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    ``size_bytes`` is the size of the length field and the JSON; the data begins there.
    """

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    size_bytes: int


def dtype_name(dtype: Dtype) -> str | None:
    """Return the format's name of a dtype; None if it has none."""
    return _NAMES.get(dtype)


def dtype_named(name: object) -> Dtype | None:
    """Return the dtype with a name of the format; None if torch has none."""
    return _DTYPES.get(name) if isinstance(name, str) else None


def encode_header(
    entries: Sequence[TensorEntry], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Return the first bytes of a file, and its header with the entries in the order of their data."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    at = 0
    for entry in ordered:
        described[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.size_bytes],
        }
        at += entry.size_bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    size = LENGTH.size + len(text)
    placed, at = [], size
    for entry in ordered:
        placed.append(TensorEntry(entry.key, entry.dtype, entry.shape, at))
        at += entry.size_bytes
    return LENGTH.pack(len(text)) + text, Header(tuple(placed), dict(metadata), size)


def header_size(head: bytes | bytearray, file_size: int, where: object) -> int:
    """Return the size of length field and JSON, from a file's first 8 bytes.

    IntegrityError: the file is too short. ManifestError: it is another kind of file.
    """
    if file_size < LENGTH.size or len(head) < LENGTH.size:
        raise _short(where, f"it has only {file_size} bytes")
    [length] = LENGTH.unpack_from(head)
    if length > _MAX_HEADER_BYTES:
        raise _foreign(where, f"its header would have {length} bytes")
    if LENGTH.size + length > file_size:
        raise _short(where, f"it has {file_size} bytes, but its header alone has {length}")
    return LENGTH.size + int(length)


def decode_header(raw: bytes, file_size: int, where: object) -> Header:
    """Decode the header of the file at ``where`` from its first ``header_size`` bytes, ``raw``.

    IntegrityError: the file is too short. ManifestError: it is another kind of file.
    """
    size = header_size(raw, file_size, where)
    if len(raw) != size:
        raise _short(where, f"its header has {size} bytes, but {len(raw)} were read")
    described = _json(raw[LENGTH.size :], where)
    metadata = described.pop("__metadata__", None) or {}
    if not _is_text_map(metadata):
        raise _foreign(where, "__metadata__ does not map strings to strings")
    entries = sorted(
        (_entry(key, fields, size, where) for key, fields in described.items()),
        key=lambda entry: (entry.start, entry.size_bytes),
    )
    at = size
    for entry in entries:
        if entry.start != at:
            raise _foreign(where, f"{entry.key!r} begins at byte {entry.start} instead of {at}")
        at += entry.size_bytes
    if at > file_size:
        raise _short(where, f"it has {file_size} bytes, but its tensors end at {at}")
    if at < file_size:
        raise _foreign(where, f"it has {file_size - at} bytes after its tensors")
    return Header(tuple(entries), metadata, size)


def encode_index(files: Mapping[str, str], total_size_bytes: int) -> bytes:
    """Return the index of several files; ``files``: key -> file name."""
    index = {"metadata": {"total_size": total_size_bytes}, "weight_map": dict(files)}
    return (json.dumps(index, indent=2) + "\n").encode()


def decode_index(raw: bytes, where: object) -> dict[str, str]:
    """Return key -> file name.

    ManifestError: it is not an index, or a name leads out of the directory.
    """
    found = _json(raw, where).get("weight_map")
    if not _is_text_map(found):
        raise _foreign(where, "weight_map does not map keys to file names")
    for name in set(found.values()):
        if not name.endswith(SUFFIX) or "/" in name or "\\" in name or "\0" in name:
            raise _foreign(where, f"{name!r} is not the name of a file in this directory")
    return dict(found)


def _entry(key: str, fields: Any, data_start: int, where: object) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _foreign(where, f"{key!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = dtype_named(fields["dtype"]), fields["shape"], fields["data_offsets"]
    if dtype is None:
        raise _foreign(where, f"{key!r} has dtype {fields['dtype']!r}, which torch does not have")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:  # noqa: PLR2004
        raise _foreign(where, f"{key!r} has shape {shape!r} and data_offsets {offsets!r}")
    entry = TensorEntry(key, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.size_bytes:
        raise _foreign(
            where, f"{key!r}, {fields['dtype']} {shape}, does not fill its data_offsets {offsets}"
        )
    return entry


def _json(raw: bytes, where: object) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Of two equal keys the last one would win silently.
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key exists twice")
        return dict(pairs)

    try:
        found = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _foreign(where, f"it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _foreign(where, "it is not a JSON object")
    return found


def _is_text_map(value: Any) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_sizes(value: Any) -> bool:
    # bool is a subclass of int, but true is no length
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _foreign(where: object, why: str) -> ManifestError:
    return ManifestError(
        f"not a safetensors checkpoint: {why}", uri=str(where), hint="nothing was read from it"
    )


def _short(where: object, why: str) -> IntegrityError:
    return IntegrityError(
        f"the file is cut short: {why}", uri=str(where), hint="copy or export it again"
    )
