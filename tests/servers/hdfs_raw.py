"""WebHDFS by itself, behind ckptfs's back: one request at a time, nothing retried, nothing typed.

RawHdfs   operations        Place   a fresh directory of a server, by ckptfs and from behind
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ckptfs.storage.webhdfs import WebHdfsStorage, open_webhdfs
from ckptfs.uri import Uri
from tests.faults.proxy import FaultProxy
from tests.lab.server import Server

TIMEOUT_S = 120.0


class RawHdfs:
    """One NameNode. Paths are absolute in HDFS; ``ask`` answers (status, body)."""

    def __init__(self, authority: str, user: str) -> None:
        self.authority = authority
        self.user = user

    def ask(self, method: str, op: str, path: str, body: bytes = b"", **params: str) -> Any:
        """One operation, through the redirect to a DataNode where there is one."""
        query = urlencode({"op": op, "user.name": self.user, **params})
        status, found, where = self._send(
            self.authority, method, f"/webhdfs/v1{quote(path)}?{query}", b""
        )
        if status == http.client.TEMPORARY_REDIRECT:
            parts = urlsplit(where)
            status, found, _ = self._send(parts.netloc, method, f"{parts.path}?{parts.query}", body)
        return status, found

    def _send(
        self, authority: str, method: str, target: str, body: bytes
    ) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection(authority, timeout=TIMEOUT_S)
        try:
            connection.request(method, target, body)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader("Location") or ""
        finally:
            connection.close()

    def data_node(self) -> str:
        """The address of the DataNode that a new file would go to: http://host:port."""
        query = urlencode({"op": "CREATE", "user.name": self.user})
        _, _, where = self._send(self.authority, "PUT", f"/webhdfs/v1/nothing?{query}", b"")
        parts = urlsplit(where)
        return f"{parts.scheme}://{parts.netloc}"

    def write(self, path: str, data: bytes) -> None:
        """Create or overwrite one file, parents included."""
        status, body = self.ask("PUT", "CREATE", path, data, overwrite="true")
        assert status == http.client.CREATED, body

    def read(self, path: str) -> bytes:
        """The bytes of one file."""
        status, body = self.ask("GET", "OPEN", path)
        assert status == http.client.OK, body
        return bytes(body)

    def exists(self, path: str) -> bool:
        """Is anything there, of any kind?"""
        status, _ = self.ask("GET", "GETFILESTATUS", path)
        return bool(status == http.client.OK)

    def files(self, path: str) -> list[str]:
        """Every file below a directory, as paths relative to it, in order."""
        status, body = self.ask("GET", "LISTSTATUS", path)
        if status == http.client.NOT_FOUND:
            return []
        found = []
        for one in json.loads(body)["FileStatuses"]["FileStatus"]:
            name = one["pathSuffix"]
            if one["type"] == "DIRECTORY":
                found += [f"{name}/{below}" for below in self.files(f"{path}/{name}")]
            else:
                found.append(name)
        return sorted(found)


class Place:
    """A fresh directory of the server: its storage, and the same seen from behind."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.root = Uri.parse(server.fresh("hdfs"))
        self.raw = RawHdfs(self.root.authority, server.options["user"])

    def open(self, proxy: FaultProxy | None = None, **options: Any) -> WebHdfsStorage:
        """Its storage, through a proxy before the NameNode where one is given."""
        authority = f"127.0.0.1:{proxy.port}" if proxy else self.root.authority
        root = Uri(self.root.protocol, authority, self.root.path)
        return open_webhdfs(root, self.server.storage_options(**options))

    def write(self, key: str, data: bytes) -> None:
        """Behind the storage's back."""
        self.raw.write(f"{self.root.path}/{key}", data)

    def make_dir(self, key: str) -> None:
        """Behind the storage's back."""
        self.raw.ask("PUT", "MKDIRS", f"{self.root.path}/{key}")

    def files(self) -> list[str]:
        """Every file below the root."""
        return self.raw.files(self.root.path)

    def exists(self, key: str) -> bool:
        """Of any kind."""
        return self.raw.exists(f"{self.root.path}/{key}")


def write_file(store: WebHdfsStorage, key: str, data: bytes) -> None:
    """One data file in one write."""
    with store.open_write(key) as writer:
        writer.write(data)
