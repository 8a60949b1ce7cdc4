"""Planners and a stager as users write them, in a module that DCP's own process can import."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager


class HalfPlanner(DefaultSavePlanner):
    """As torch's documentation has it: tensors are saved in another dtype than they have."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        item = super().resolve_data(write_item)
        return item.to(torch.float16) if isinstance(item, torch.Tensor) else item


class RenamingPlanner(DefaultLoadPlanner):
    """As torch's documentation has it: what is loaded was saved under another prefix."""

    def set_up_planner(
        self,
        state_dict: Any,
        metadata: Any = None,
        is_coordinator: bool = False,  # noqa: FBT002 - torch's signature
    ) -> None:
        super().set_up_planner({"old": state_dict}, metadata, is_coordinator)


class FewerPlanner(DefaultLoadPlanner):
    """A plan of fewer items than were asked for."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        plan.items = [item for item in plan.items if item.dest_index.fqn == "sharded"]
        return plan


class Doubling(AsyncStager):
    """A stager of somebody's own: what is saved is twice what it was given."""

    def stage(self, state_dict: Any) -> Any:
        return {key: _twice(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """It is done when ``stage`` returns."""

    def close(self) -> None:
        """Nothing is held."""


def _twice(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _twice(inner) for key, inner in value.items()}
    return value * 2 if isinstance(value, (torch.Tensor, int)) else value
