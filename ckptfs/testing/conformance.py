"""What every storage backend must do: each sentence of ``ckptfs.storage.base`` that a test can check.

    class TestMine(StorageConformance):
        def make_storage(self, place): return MyStorage(...)     # at a new, empty root
        def raw_write(self, key, data): ...                      # the four hooks BYPASS the store,
        def raw_read(self, key): ...                             # so that it is not its own witness
        def raw_exists(self, key): ...
        def raw_list(self): ...                                  # every file below the root, as keys

A backend is done when this passes. Tests that its shape or capabilities exclude check the refusal
instead. Needs pytest.
"""

from __future__ import annotations

from ckptfs.testing._conformance.base import together
from ckptfs.testing._conformance.data import DataFiles, ParallelFiles
from ckptfs.testing._conformance.names import Names
from ckptfs.testing._conformance.small import SmallFiles

__all__ = ["StorageConformance", "together"]


class StorageConformance(SmallFiles, DataFiles, ParallelFiles, Names):
    """Subclass it in a test module, fill in the five hooks, name it ``Test...``."""
