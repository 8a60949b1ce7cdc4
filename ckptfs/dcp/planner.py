"""The save planner under the name that the manual uses; it lives in ``ckptfs.dcp.planning.save_planner``."""

from ckptfs.dcp.planning.save_planner import SavePlanner

__all__ = ["SavePlanner"]
