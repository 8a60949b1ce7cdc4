"""fsspec's own suite of what every filesystem does (copy, get, put, pipe, open), on ``ckptfs+X://``."""

from __future__ import annotations

import uuid
from pathlib import Path
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


class TestMemory(Suite, abstract.AbstractFixtures):
    """On ckptfs's memory."""

    @pytest.fixture
    def fs(self) -> Any:
        """The filesystem."""
        return fsspec.filesystem("ckptfs+memory")

    @pytest.fixture
    def fs_path(self) -> str:
        """An empty store."""
        return uuid.uuid4().hex


class Bucket(Suite, abstract.AbstractFixtures):
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
