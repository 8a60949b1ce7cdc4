"""Two labs, v4.2 and v3, started by the first test that asks and kept for the session.

``lab`` runs a test on both. A test that kills, cuts or re-exports puts everything back as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from tests.lab import UnavailableError, UnsuitableError
from tests.lab.nfs import NfsLab, Version

VERSIONS: tuple[Version, ...] = ("4.2", "3")
Labs = Callable[[Version], NfsLab]


@contextlib.contextmanager
def startable() -> Iterator[None]:
    """Skips with the reason where a lab cannot be started. Where CI=true that is a failure, but on a machine that
    could not run it with anything installed.
    """
    try:
        yield
    except UnsuitableError as error:
        pytest.skip(str(error))
    except UnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def labs() -> Iterator[Labs]:
    """Starts the lab of a version once; on a machine that cannot run it, it is not tried again."""
    running: dict[Version, NfsLab] = {}
    unsuitable = list[str]()
    with contextlib.ExitStack() as stack:

        def start(version: Version) -> NfsLab:
            if unsuitable:
                pytest.skip(unsuitable[0])
            if version not in running:
                with startable():
                    try:
                        running[version] = stack.enter_context(NfsLab(version))
                    except UnsuitableError as error:
                        unsuitable.append(str(error))
                        raise
            return running[version]

        yield start


@pytest.fixture(params=VERSIONS, ids=lambda version: f"v{version}")
def lab(request: pytest.FixtureRequest, labs: Labs) -> NfsLab:
    """The server and its two clients, over NFS 4.2 and over NFS 3."""
    return labs(request.param)


@pytest.fixture
def lab42(labs: Labs) -> NfsLab:
    """Over NFS 4.2 alone."""
    return labs("4.2")


@pytest.fixture(params=["4.2", pytest.param("3", marks=pytest.mark.campaign)], ids="v{}".format)
def either(request: pytest.FixtureRequest, labs: Labs) -> NfsLab:
    """Over NFS 4.2, and in the campaign over NFS 3: for what takes long and shows little of the version."""
    return labs(request.param)
