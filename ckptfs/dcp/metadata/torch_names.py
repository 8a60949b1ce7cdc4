"""The values of torch that a ``.metadata`` names, as values of our own: who reads it needs no torch.

    DTYPES["float32"]            a Dtype: its name and its size
    LAYOUTS["torch.strided"]     a TensorLayout
    MemoryFormat(0)              a member of the enum that represents torch's
    TORCH[value]                 torch's own object; torch is imported for it

A name that is not known here is looked up in the torch that is installed: newer versions have more dtypes.
There is one value for each name, so that they are compared by identity, as torch's are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from ckptfs import _torch

__all__ = ["DTYPES", "LAYOUTS", "TORCH", "Dtype", "MemoryFormat", "TensorLayout", "dtype_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Dtype:
    """A dtype of torch.

    Attributes:
        name: Its name without ``torch.``.
        itemsize: The size of an element in bytes.
    """

    name: str
    itemsize: int

    def __repr__(self) -> str:
        """As torch's."""
        return f"torch.{self.name}"

    def __reduce__(self) -> Any:
        """Be the one value of this name in another process too: ranks compare what they sent."""
        return _dtype_named, (self.name,)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """A layout of torch; ``name`` is without ``torch.``."""

    name: str

    def __reduce__(self) -> Any:
        """As for a dtype."""
        return _layout_named, (self.name,)


class MemoryFormat(enum.Enum):
    """The members of the enum inside torch's pickled TensorProperties."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


class _Dtypes(dict[str, Dtype]):
    """Dtypes by name. KeyError: the torch that is installed has none of that name."""

    __slots__ = ()

    def __missing__(self, name: str) -> Dtype:
        return dtype_of(_installed(name, "dtype"))


class _Layouts(dict[str, TensorLayout]):
    """Layouts by name, ``torch.`` included. KeyError: as for dtypes."""

    __slots__ = ()

    def __missing__(self, text: str) -> TensorLayout:
        _installed(text.removeprefix("torch."), "layout")
        return self.setdefault(text, TensorLayout(text.removeprefix("torch.")))


def _installed(name: str, kind: str) -> Any:
    """Return a dtype or a layout of the torch that is installed. KeyError: it has no such name."""
    try:
        import torch
    except ImportError:
        raise KeyError(name) from None
    found = vars(torch).get(name)
    if not isinstance(found, vars(torch)[kind]):
        raise KeyError(name)
    return found


def _dtype_named(name: str) -> Dtype:
    return DTYPES[name]


def _layout_named(name: str) -> TensorLayout:
    return LAYOUTS[f"torch.{name}"]


def dtype_of(dtype: Any) -> Dtype:
    """Return the Dtype of a dtype of torch."""
    name = str(dtype).removeprefix("torch.")
    known = dict.get(DTYPES, name)
    return DTYPES.setdefault(name, Dtype(name, dtype.itemsize)) if known is None else known


# What every torch has since 2.6.
_SIZES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz",
    2: "float16 bfloat16 uint16 int16",
    4: "float32 uint32 int32 complex32",
    8: "float64 uint64 int64 complex64",
    16: "complex128",
}
_LAYOUTS = "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged _mkldnn"
DTYPES: Final = _Dtypes(
    {name: Dtype(name, size) for size, names in _SIZES.items() for name in names.split()}
)
LAYOUTS: Final = _Layouts({f"torch.{name}": TensorLayout(name) for name in _LAYOUTS.split()})


class _Objects(dict[Any, Any]):
    """Torch's objects by the values that represent them, each made at its first use."""

    __slots__ = ()

    def __missing__(self, value: Any) -> Any:
        import torch

        if isinstance(value, MemoryFormat):
            encoding: Any = _torch.mem_format_encoding()
            made = encoding[value.name]
        else:
            made = getattr(torch, value.name)
        self[value] = made
        return made


TORCH: Final = _Objects()
