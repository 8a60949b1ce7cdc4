"""The state that every golden checkpoint holds, and how stock torch writes and reads it.

Run as ``python -m tests.formats.state save|load DIRECTORY RANK SIZE [OVERLAY]`` it is one rank of a
job of SIZE that saves or loads with stock ``torch.distributed.checkpoint``: the installed one, or
the one in OVERLAY (see ``tests/compat/overlay.py``). ``load`` exits with an error that names the key
that differs. No ckptfs is imported here: this is the other side.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RANKS", "blank", "differences", "flat_keys", "lay_over", "state"]

RANKS = 2


def state(*, sharded: bool) -> dict[str, Any]:
    """Return the golden values; with sharded, three of them are DTensors over the default group.

    Leaves: float32 and bfloat16 matrices split evenly and unevenly over 2 ranks, a replicated
    vector, a zero-dim tensor, an empty one, and objects of the kinds that stay loadable.
    """
    weight = torch.arange(32, dtype=torch.float32).reshape(8, 4) / 7
    uneven = torch.arange(15, dtype=torch.bfloat16).reshape(5, 3)
    return {
        "model": {
            "weight": _shard(weight, sharded=sharded),
            "uneven": _shard(uneven, sharded=sharded),
            "replicated": torch.tensor([1, -2, 3], dtype=torch.int64),
        },
        "optim": {
            "state": [{"step": torch.tensor(7.0), "exp_avg": _shard(-weight, sharded=sharded)}],
            "lr": 0.5,
            "betas": (0.9, 0.999),
            "none": None,
            "nothing": {},
        },
        "empty": torch.empty(0, 3),
        "note": "golden",
    }


def _shard(full: torch.Tensor, *, sharded: bool) -> torch.Tensor:
    if not sharded:
        return full
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def blank(values: Any) -> Any:
    """Return the same structure with every value gone: what a load has to fill."""
    if isinstance(values, torch.Tensor):
        return torch.full_like(values, 111)
    if isinstance(values, dict):
        return {key: blank(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(blank(value) for value in values)
    return type(values)() if values is not None else "not none"


def flat_keys() -> list[str]:
    """Return the keys that torch gives the leaves of the state, in order."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return sorted(flatten_state_dict(state(sharded=False))[0])


def differences(loaded: Any, wanted: Any, key: str = "") -> list[str]:
    """Return the keys under which loaded is not bit for bit what was wanted."""
    if isinstance(wanted, dict):
        if not isinstance(loaded, dict) or loaded.keys() != wanted.keys():
            return [key]
        return [d for k, v in wanted.items() for d in differences(loaded[k], v, f"{key}.{k}")]
    if isinstance(wanted, (list, tuple)):
        if type(loaded) is not type(wanted) or len(loaded) != len(wanted):
            return [key]
        return [
            d
            for n, (a, b) in enumerate(zip(loaded, wanted, strict=True))
            for d in differences(a, b, f"{key}.{n}")
        ]
    if isinstance(wanted, torch.Tensor):
        mine, theirs = (t.to_local() if hasattr(t, "to_local") else t for t in (loaded, wanted))
        same = mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if same else [key]
    return [] if type(loaded) is type(wanted) and loaded == wanted else [key]


def lay_over(overlay: str) -> None:
    """Make torch.distributed.checkpoint the one in overlay; it must not have been imported yet."""
    dist.__path__.insert(0, overlay)  # packages below torch.distributed are looked up along this
    import torch.distributed.checkpoint as dcp

    if not str(dcp.__file__).startswith(overlay):
        raise SystemExit(f"the overlay is not what was imported: {dcp.__file__}")


def _main(verb: str, directory: str, rank: str, size: str, overlay: str = "") -> None:
    if overlay:
        lay_over(overlay)
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")  # old torch warns about newer Python; not what is asked here
    if int(size) > 1:
        # A file lets two processes meet without a port; it is next to the checkpoint.
        store = dist.FileStore(str(Path(directory).with_suffix(".store").absolute()), int(size))
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
    wanted = state(sharded=int(size) > 1)
    if verb == "save":
        # A Path, as many trainers pass it: torch pickles it into .metadata as given.
        dcp.save(wanted, checkpoint_id=Path(directory))
    else:
        loaded = blank(copy.deepcopy(wanted))
        dcp.load(loaded, checkpoint_id=directory)
        wrong = differences(loaded, wanted)
        if wrong:
            raise SystemExit(f"rank {rank} loaded other values under {wrong}")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    # Tearing gloo's threads down at interpreter exit aborts now and then ("terminate called
    # without an active exception"); what this process had to show is done.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _main(*sys.argv[1:])
