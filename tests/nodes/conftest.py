"""Machines for the tests of this directory: skipped where they cannot be, an error in CI.

``trainers`` are three for the whole session, on the host's loopback: containers of one hostname, so that
code that compares names is wrong from the start. Ranks are forked there from processes that are warm, so
tests that need no more than two machines take the first two, and a run of their own on each disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.lab import Nodes, UnavailableError
from tests.lab.nodes import Private, Shared

MakeNodes = Callable[..., Nodes]

# In addition to /scratch, a tmpfs of each, and /shared, one directory.
MOUNTS = {
    "/bound": Shared(),  # /shared again
    "/data": (Shared("a"), Shared("b"), Shared("b")),  # two directories behind one path
    "/partly": (Shared("p"), Shared("p"), Private()),  # a disk of its own for the third
}


def started(stack: ExitStack, count: int, **options: Any) -> Nodes:
    """Nodes that are up until the stack closes."""
    try:
        return stack.enter_context(Nodes(count, **options))
    except UnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture
def make_nodes() -> Iterator[MakeNodes]:
    """``Nodes(...)`` that are up, until the test ends."""
    with ExitStack() as stack:
        yield lambda count, **options: started(stack, count, **options)


@pytest.fixture(scope="session")
def trainers() -> Iterator[Nodes]:
    """Three containers, which no test may kill."""
    with ExitStack() as stack:
        yield started(stack, 3, mounts=MOUNTS, hostnames=("trainer",) * 3, network=False)
