"""Tests of what every storage backend must do: all of ``ckptfs.storage.base`` that can be tested.

    class TestMine(StorageConformance):
        def make_storage(self, place): return MyStorage(...)     # at a new, empty root
        def raw_write(self, key, data): ...                      # the four hooks BYPASS the store,
        def raw_read(self, key): ...                             # so that it does not check itself
        def raw_exists(self, key): ...
        def raw_list(self): ...                                  # every file below the root, as keys

A backend is complete when these tests pass. If its shape or its capabilities exclude an operation, the
tests check that it is refused. Needs pytest.
"""

from __future__ import annotations

from ckptfs.testing._conformance.base import together
from ckptfs.testing._conformance.data import DataFiles, ParallelFiles
from ckptfs.testing._conformance.names import Names
from ckptfs.testing._conformance.small import SmallFiles

__all__ = ["StorageConformance", "together"]


class StorageConformance(SmallFiles, DataFiles, ParallelFiles, Names):
    """The suite. Subclass it in a test module as ``Test...`` and implement the five hooks."""
