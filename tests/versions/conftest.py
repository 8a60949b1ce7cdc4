"""Warm processes of both versions, and the places where they meet."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lab.server import Server
from tests.servers.conftest import moto, no_accounts
from tests.versions.hosts import ROOT, Host, MissingError, tree_of_old
from tests.versions.rig import Pair, Place

__all__ = ["moto", "no_accounts"]


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """Called "old" and "new"; skipped where this clone has no history, and failed with CI=true."""
    try:
        tree = tree_of_old(tmp_path_factory.mktemp("old"))
    except MissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    with Host("old", tree) as old, Host("new", ROOT) as new:
        runs = [str(tmp_path_factory.mktemp("warm") / "run") for _ in range(2)]
        with ThreadPoolExecutor() as both:  # each is a process of its own
            list(both.map(lambda host, run: host.warm(run, {}), (old, new), runs))
        yield {"old": old, "new": new}


@pytest.fixture(params=["old", "new"], ids=["old-first", "new-first"])
def pair(request: pytest.FixtureRequest, hosts: dict[str, Host]) -> Pair:
    """Each version once as the one that acts, or dies, with the other next to it."""
    other = {"old": "new", "new": "old"}[request.param]
    return Pair(hosts[request.param], hosts[other])


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.campaign)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A directory in memory, where there is one, and a bucket of moto's S3."""
    if request.param == "s3":
        yield request.getfixturevalue("bucket")
        return
    base = tempfile.mkdtemp(
        prefix="versions-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    )
    numbers = itertools.count()
    yield Place("file", lambda: str(Path(base, f"run-{next(numbers)}")))
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="session")
def bucket(moto: Server, hosts: dict[str, Host]) -> Place:
    """A bucket of moto's S3, for the few tests that are not left to the campaign."""
    with ThreadPoolExecutor() as both:
        list(both.map(lambda host: host.warm(moto.fresh(), moto.storage_options()), hosts.values()))
    return Place("s3", moto.fresh, moto.storage_options())
