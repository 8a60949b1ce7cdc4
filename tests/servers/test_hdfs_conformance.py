"""A real NameNode and DataNode do all that a storage must do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.storage.base import Storage
from ckptfs.storage.webhdfs import open_webhdfs
from ckptfs.testing.conformance import StorageConformance
from ckptfs.uri import Uri
from tests.lab.server import Server
from tests.servers.hdfs_raw import RawHdfs

pytestmark = pytest.mark.hdfs


class TestWebHdfs(StorageConformance):
    """webhdfs:// through NameNode and DataNode."""

    @pytest.fixture(autouse=True)
    def _server(self, hdfs: Server) -> Iterator[None]:
        self.server = hdfs
        self.root = Uri.parse(hdfs.fresh("conformance"))
        self.raw = RawHdfs(self.root.authority, hdfs.options["user"])
        yield
        self.raw.ask("DELETE", "DELETE", self.root.path, recursive="true")

    def make_storage(self, place: Path) -> Storage:
        return open_webhdfs(self.root, self.server.storage_options())

    def raw_write(self, key: str, data: bytes) -> None:
        self.raw.write(f"{self.root.path}/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return self.raw.read(f"{self.root.path}/{key}")

    def raw_exists(self, key: str) -> bool:
        return self.raw.exists(f"{self.root.path}/{key}".rstrip("/"))

    def raw_list(self) -> list[str]:
        return self.raw.files(self.root.path)
