"""``copy_to`` is ``ckptfs cp`` for programs. ``ckptfs.replication.copier`` does the work."""

from __future__ import annotations

from ckptfs.replication.copier import CopyOptions, copy_to, copy_with
from ckptfs.replication.plan import Copied, CopyReport, Status

__all__ = ["Copied", "CopyOptions", "CopyReport", "Status", "copy_to", "copy_with"]
