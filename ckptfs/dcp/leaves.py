"""Leaves of a state dict: what may be saved, and whether all ranks have the same one.

    check_tensor, check_leaf     refuse, before any file is made, what could not be loaded again
    fingerprint_of               one number for "this rank's value of that key"

DCP writes a plain tensor or an object that several ranks have from one of them, and drops the
others without a word. Equal values have equal fingerprints on every rank: they are taken from
values, never from a pickle, whose bytes depend on which equal strings are one object and on hash
seeds. Tensors up to 256 KiB count whole; of larger ones 64 evenly spaced pages of 4 KiB, ends
included: a rank that really has other data differs in all of them, and a full copy of every
replicated tensor from every device would cost more than the save.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckptfs._torch import is_sharded_tensor, is_wrapper_subclass
from ckptfs.dcp.resolve import host_tensor, memory_of

__all__ = [
    "Leaf",
    "check_leaf",
    "check_tensor",
    "dtype_round_trips",
    "fingerprint_of",
    "load_leaf",
    "serialise_leaf",
]

_WHOLE_BYTES = 256 << 10
_PAGE_BYTES = 4 << 10
_PAGES = 64

_ATOMS = (type(None), bool, int, float, complex, str)
_NAMED = (torch.Size, torch.dtype, torch.device, torch.layout)
# An int of more than 255 bytes pickles with an opcode that weights_only does not know.
_PLAIN_INT_BITS = 255 * 8 - 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is one leaf whatever it holds: DCP does not flatten it.

    Its bytes are those of the plain value, so every reader gets that. owner: whose value it is, for
    messages. any_rank: ranks may differ, and any one's will do.
    """

    value: Any
    owner: str = ""
    any_rank: bool = False


# -- what may be saved -----------------------------------------------------------------------


def check_tensor(tensor: torch.Tensor) -> str | None:
    """Why this tensor, or local shard, could not be loaded again; None when it can."""
    if tensor.is_meta:
        return "it is on the meta device and has no data; materialise it first"
    if is_wrapper_subclass(tensor):
        return f"{type(tensor).__name__} has no memory of its own; save its inner tensors"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} is not supported; save its indices and values"
    if tensor.is_quantized or not dtype_round_trips(tensor.dtype):
        return f"{tensor.dtype} does not survive torch.save and torch.load; view it as another"
    return None


def check_leaf(leaf: object) -> str | None:
    """Why this object could not be loaded by ``torch.load(weights_only=True)``; None when it can.

    Plain values are judged by their types; anything else is serialised and loaded, once.
    """
    if isinstance(leaf, Leaf):
        reason = check_leaf(leaf.value)
        return f"in the state of {leaf.owner}, {reason}" if reason and leaf.owner else reason
    if inside := _sharded_inside(leaf):
        return f"it holds a {inside}, of which only one rank's part would be kept; use a list"
    if _is_plain(leaf):
        return None
    try:
        blob = serialise_leaf(leaf)
    except Exception as error:  # noqa: BLE001 - any __reduce__ of the user's may run here
        return f"{_name(leaf)} cannot be serialised: {error}"
    try:
        load_leaf(blob)
    except Exception as error:  # noqa: BLE001 - whatever it raises here it would raise at load
        return f"{_name(leaf)} could not be loaded without executing code ({_first_line(error)})"
    return None


def serialise_leaf(leaf: object) -> io.BytesIO:
    """The bytes that stock DCP's planner makes of an object; a Leaf's are those of its value."""
    buffer = io.BytesIO()
    torch.save(leaf.value if isinstance(leaf, Leaf) else leaf, buffer)
    buffer.seek(0)
    return buffer


def load_leaf(blob: io.BytesIO, *, weights_only: bool = True) -> Any:
    """The object in a leaf's blob; tensors in it come to the host.

    pickle.UnpicklingError when it would have to execute anything.
    """
    blob.seek(0)
    return torch.load(blob, map_location="cpu", weights_only=weights_only)


@functools.cache
def dtype_round_trips(dtype: torch.dtype) -> bool:
    """True when DCP plans tensors of this dtype, and torch gets them back bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "ComplexHalf is experimental": it round trips
        try:
            tensor, copied = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype)
            _planned_bytes(tensor)
            memory_of(tensor)[:] = bytes([1, *bytes(len(memory_of(tensor)) - 1)])
            copied.copy_(load_leaf(serialise_leaf(tensor)))
        except Exception:  # noqa: BLE001 - each exotic dtype fails in its own way: it is refused
            return False
    return bytes(memory_of(copied)) == bytes(memory_of(tensor))


def _planned_bytes(tensor: torch.Tensor) -> int | None:
    """What DCP takes a tensor's size to be; it knows the sizes of fewer dtypes than torch does."""
    whole = ChunkStorageMetadata(torch.Size([0]), tensor.shape)
    data = TensorWriteData(whole, TensorProperties.create_from_tensor(tensor), tensor.shape)
    item = WriteItem(MetadataIndex("t"), WriteItemType.TENSOR, tensor_data=data)
    return item.tensor_storage_size()


def _is_plain(leaf: object) -> bool:
    """True when the exact types alone show that weights_only loads it, in every torch since 2.6."""
    kind = type(leaf)
    if kind is int:
        return bool(leaf.bit_length() <= _PLAIN_INT_BITS)  # type: ignore[attr-defined]
    if kind in _ATOMS or kind in (torch.Size, torch.dtype, torch.device):
        return True
    if kind in (list, tuple):
        return all(map(_is_plain, leaf))  # type: ignore[call-overload]
    if kind in (dict, collections.OrderedDict):
        return all(_is_plain(k) and _is_plain(v) for k, v in leaf.items())  # type: ignore[attr-defined]
    if kind is torch.Tensor:
        return check_tensor(leaf) is None  # type: ignore[arg-type]
    return False


def _sharded_inside(leaf: object) -> str | None:
    """The kind of a sharded tensor somewhere inside, which DCP would pickle as one rank's part."""
    if isinstance(leaf, DTensor):
        return "DTensor"
    if is_sharded_tensor(leaf):
        return "ShardedTensor"
    inner: Iterable[object] = ()
    if isinstance(leaf, dict):
        inner = leaf.values()
    elif isinstance(leaf, (list, tuple, set, frozenset)):
        inner = leaf
    return next((found for value in inner if (found := _sharded_inside(value))), None)


def _name(leaf: object) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def _first_line(error: Exception) -> str:
    # torch explains in ten lines how to allow-list; the class it names is what matters here.
    text = str(error).replace("Weights only load failed.", "").strip()
    named = [line for line in text.splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (named or text.splitlines() or [type(error).__name__])[0].strip()[:300]


# -- whether ranks agree ---------------------------------------------------------------------


def fingerprint_of(value: object) -> int:
    """64 bits that are equal on all ranks that have an equal value."""
    state = xxhash.xxh3_64()
    _feed(state, value)
    return state.intdigest()


def _feed(state: xxhash.xxh3_64, value: object) -> None:
    kind = type(value)
    if isinstance(value, Leaf):
        return None if value.any_rank else _feed(state, value.value)
    if kind in _ATOMS or kind in _NAMED:
        return state.update(f"{kind.__name__} {value!r};".encode("utf-8", "surrogatepass"))
    if isinstance(value, torch.Tensor):
        return _feed_tensor(state, value)
    state.update(f"{kind.__module__}.{kind.__qualname__}(".encode())
    if isinstance(value, (bytes, bytearray)):
        return state.update(b"%d:" % len(value) + value)
    if kind in (list, tuple, collections.deque):
        return _feed_parts(state, map(fingerprint_of, value))  # type: ignore[call-overload]
    if kind in (set, frozenset):
        return _feed_parts(state, sorted(map(fingerprint_of, value)))  # type: ignore[call-overload]
    if kind in (dict, collections.Counter, collections.defaultdict):
        return _feed_parts(state, sorted(map(fingerprint_of, value.items())))  # type: ignore[attr-defined]
    if kind is collections.OrderedDict:
        return _feed_parts(state, map(fingerprint_of, value.items()))  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return state.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    return state.update(_unshared_pickle(value))


def _feed_parts(state: xxhash.xxh3_64, parts: Iterable[int]) -> None:
    for part in parts:
        state.update(part.to_bytes(8, "little"))


def _feed_tensor(state: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    state.update(f"Tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    if check_tensor(tensor) is not None:
        return  # it is refused by its key; there is nothing to compare
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes > _WHOLE_BYTES:
        tensor = _sample(tensor.detach())
    state.update(memory_of(host_tensor(tensor)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced pages, gathered on the tensor's own device: one small copy to the host."""
    # Of one that is not contiguous, which is rare, all is gathered first: the pages have to be those
    # of another rank's contiguous one.
    flat = tensor.reshape(-1)
    page = max(1, _PAGE_BYTES // tensor.element_size())
    step = (flat.numel() - page) / (_PAGES - 1)
    return torch.cat([flat[(at := int(step * n)) : at + page] for n in range(_PAGES)])


def _unshared_pickle(value: object) -> bytes:
    """A pickle that does not depend on which equal parts are the same object."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - cycles; and what cannot be pickled is refused by its key
        return b"?"
    return buffer.getvalue()
