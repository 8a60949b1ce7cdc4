"""Disks with power that can be cut: skipped where they cannot be, an error in CI. And one victim for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.lab import PowerCut, UnavailableError
from tests.lab.powercut import Filesystem
from tests.lab.process import REPOSITORY
from tests.lab.witness import Witness

MakeDisk = Callable[[Filesystem], PowerCut]


@pytest.fixture
def make_disk() -> Iterator[MakeDisk]:
    """A disk with a filesystem, mounted until the test ends."""
    with ExitStack() as stack:

        def make(fs: Filesystem) -> PowerCut:
            try:
                return stack.enter_context(PowerCut(fs))
            except UnavailableError as error:
                if os.environ.get("CI") == "true":
                    raise
                pytest.skip(str(error))

        yield make


@pytest.fixture(scope="session")
def victim() -> Iterator[Witness]:
    """The process that has imported torch and lives one life after the other."""
    environment = {"PYTHONPATH": str(REPOSITORY)}
    with Witness([sys.executable, "-m", "tests.cuts.victim"], env=environment) as witness:
        witness.wait_for("ready")
        yield witness
