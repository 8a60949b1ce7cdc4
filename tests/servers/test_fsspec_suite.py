"""fsspec's own suite of what every filesystem does (copy, get, put, pipe, open), on ``ckptfs+X://``."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import fsspec
import pytest
from fsspec.tests import abstract

from tests.lab.server import Server


class Suite(
    abstract.AbstractCopyTests,
    abstract.AbstractGetTests,
    abstract.AbstractPipeTests,
    abstract.AbstractPutTests,
    abstract.AbstractOpenTests,
):
    """All of them. fsspec's fixtures ask for a filesystem, a new path in it, and whether it keeps
    directories in which nothing is.
    """

    @pytest.fixture
    def fs_join(self) -> Any:
        """Join names of a URL."""
        return lambda *names: "/".join(names)


class TestFile(Suite, abstract.AbstractFixtures):
    """On a local disk."""

    @pytest.fixture
    def fs(self) -> Any:
        """The filesystem."""
        return fsspec.filesystem("ckptfs+file")

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        """A directory."""
        (tmp_path / "remote").mkdir()
        return str(tmp_path / "remote")


def for_campaign(test: Any) -> Callable[..., None]:
    """A copy of one of fsspec's tests that runs in a campaign only: a mark is of the function, and so of
    every class that has it.
    """
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__)
    copy.__dict__.update(test.__dict__)
    return pytest.mark.campaign(copy)


class PatternsLater(Suite, abstract.AbstractFixtures):
    """Patterns are resolved above the storage, and are tried on a disk whatever is run; here in make
    campaign-servers.
    """

    test_copy_glob_edge_cases = for_campaign(abstract.AbstractCopyTests.test_copy_glob_edge_cases)
    test_get_glob_edge_cases = for_campaign(abstract.AbstractGetTests.test_get_glob_edge_cases)
    test_put_glob_edge_cases = for_campaign(abstract.AbstractPutTests.test_put_glob_edge_cases)


class TestMemory(PatternsLater):
    """On ckptfs's memory."""

    @pytest.fixture
    def fs(self) -> Any:
        """The filesystem."""
        return fsspec.filesystem("ckptfs+memory")

    @pytest.fixture
    def fs_path(self) -> str:
        """An empty store."""
        return uuid.uuid4().hex


class Bucket(PatternsLater):
    """On an object store."""

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        """Keys have none."""
        return False


class TestS3(Bucket):
    """On Ceph's S3."""

    @pytest.fixture
    def fs(self, radosgw: Server) -> Any:
        """The filesystem."""
        return fsspec.filesystem("ckptfs+s3", **radosgw.options)

    @pytest.fixture
    def fs_path(self, radosgw: Server) -> str:
        """An empty prefix."""
        return radosgw.fresh().partition("://")[2]


@pytest.mark.campaign
class TestGCS(Bucket):
    """On the GCS of tests/lab."""

    @pytest.fixture
    def fs(self, gcs: Server) -> Any:
        """The filesystem."""
        return fsspec.filesystem("ckptfs+gs", **gcs.options)

    @pytest.fixture
    def fs_path(self, gcs: Server) -> str:
        """An empty prefix."""
        return gcs.fresh().partition("://")[2]
