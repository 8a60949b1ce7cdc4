"""A save that is planned by itself: what ``ckptfs.dcp.saving`` does in a step that it shares with other stages."""

from __future__ import annotations

from typing import Any

from ckptfs.control.control import Control
from ckptfs.dcp.write.pipeline import PlannedSave, SavePlanning


def plan_save(state_dict: Any, control: Control, **options: Any) -> PlannedSave:
    """Collective. options: those of ``SavePlanning``."""
    planning = SavePlanning(state_dict, control, **options)
    while True:
        stage = planning.stage
        planned = planning.planned(control.step(stage.label, stage.local, stage.decide))
        if planned is not None:
            return planned
