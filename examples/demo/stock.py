"""A reader that knows nothing of ckptfs: plain torch.distributed.checkpoint in a single process.

    one path per line on standard input   ->   one JSON object per line on standard output
        {"path": ..., "fingerprint": ..., "tensors": 62, "size_bytes": ..., "knows_ckptfs": false}
        {"path": ..., "error": "..."}

It stays up, because importing torch costs seconds and it is asked three times.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fingerprint import fingerprint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load(path: str) -> dict[str, Any]:
    """Everything in a checkpoint, flat."""
    described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        if isinstance(about, TensorStorageMetadata)
        else None
        for key, about in described.items()
    }
    dcp.load(state, checkpoint_id=path)
    return state


def answer(path: str) -> dict[str, Any]:
    """What this reader finds at ``path``."""
    try:
        state = load(path)
    except Exception as error:  # noqa: BLE001 - whatever stock torch says is the answer
        return {"path": path, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {
        "path": path,
        "fingerprint": fingerprint(state),
        "tensors": len(tensors),
        "size_bytes": sum(tensor.nbytes for tensor in tensors),
        "knows_ckptfs": any(name.partition(".")[0] == "ckptfs" for name in sys.modules),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch says that a single process is no process group
    for line in sys.stdin:
        print(json.dumps(answer(line.rstrip("\n"))), flush=True)
