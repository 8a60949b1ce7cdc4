"""The save planner under its documented name; defined in ``ckptfs.dcp.planning.save_planner``."""

from ckptfs.dcp.planning.save_planner import SavePlanner

__all__ = ["SavePlanner"]
