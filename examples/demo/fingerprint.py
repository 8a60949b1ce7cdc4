"""One hash over a whole training state, the same in the job and in a stock reader of its checkpoint.

    {"model": {"head.weight": DTensor}}  --flatten-->  {"model.head.weight": Tensor}  -->  sha256

Keys, dtypes, shapes and every byte count. Torch only: the reader that checks ckptfs's work must
not need ckptfs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots as torch.distributed.checkpoint names them.

    Collective where the state holds DTensors: they are gathered whole.
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return flat


def fingerprint(flat: Mapping[str, Any]) -> str:
    """The sha256 of a flat state in hexadecimal digits."""
    digest = hashlib.sha256()
    for key in sorted(flat):
        value = flat[key]
        if isinstance(value, torch.Tensor):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(
                value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            )
        else:
            digest.update(f"{key} {value!r}\n".encode())
    return digest.hexdigest()
