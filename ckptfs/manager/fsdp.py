"""Modules under torch's older FullyShardedDataParallel, and their optimizers. Local in form only.

It flattens parameters into pieces that have no names, so torch's own helpers take them apart and put
them together: they run collectives on the group that the module is sharded over, and make a fresh
optimizer's state by a step with zero gradients. FSDP2 (``fully_shard``) needs none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptfs.dcp.leaves import Leaf
from ckptfs.manager.objects import plain_state
from ckptfs.manager.saved import NOT_LOADED, Path, Saved, is_loaded, put_at

__all__ = ["FlatModule", "FlatOptimizer"]


class FlatModule:
    """A module under FullyShardedDataParallel, sharded by parameters. A ``StoredObject``."""

    order = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def save(self) -> Any:
        """Parameters and buffers by name, this rank's shards of them."""
        return plain_state(get_model_state_dict(self._module))

    def target(self, saved: Saved, path: Path) -> Any:
        """The same, to be loaded into."""
        return get_model_state_dict(self._module)

    def put(self, loaded: Any) -> None:
        """Flatten them again."""
        set_model_state_dict(self._module, loaded)


class FlatOptimizer:
    """The optimizer of such a module. A ``StoredObject``."""

    order = 1

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module

    def save(self) -> Any:
        """As other optimizers are: state by name, groups with their options."""
        whole: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        groups = [
            {k: Leaf(v, any_rank=True) if k == "params" else plain_state(v) for k, v in g.items()}
            for g in whole["param_groups"]
        ]
        return {"state": plain_state(whole["state"]), "param_groups": groups}

    def target(self, saved: Saved, path: Path) -> Any:
        """Shards like this optimizer's own for all that was saved of its parameters."""
        like = get_optimizer_state_dict(self._module, self._optimizer)
        found: dict[str, Any] = {}
        for rest, key in saved.below(path):
            mine: Any = like.get("state", {})
            if rest[0] == "state" and len(rest) > 2:  # noqa: PLR2004 - state, parameter, name
                if rest[1] not in mine:
                    continue
                put_at(found, rest, saved.blank_of(key, mine[rest[1]].get(rest[2])))
            else:
                put_at(found, rest, saved.blank_of(key))
        return found or NOT_LOADED

    def put(self, loaded: Any) -> None:
        """Flatten it again, with this optimizer's own parameters in its groups."""
        like: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        groups = [
            {**now, **{k: v for k, v in then.items() if is_loaded(v)}, "params": now["params"]}
            for now, then in zip(like["param_groups"], loaded["param_groups"], strict=True)
        ]
        state = loaded.get("state") or {}
        set_optimizer_state_dict(
            self._module, self._optimizer, {"state": state, "param_groups": groups}
        )
