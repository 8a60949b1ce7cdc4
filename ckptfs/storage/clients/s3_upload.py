"""One multipart upload to S3, fresh or gone on with.

put_part  complete  abort     one request each
holds                         a part that an interrupted upload left, by its MD5 or its checksum
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ckptfs.storage.clients.base import Buffer, Upload
from ckptfs.storage.clients.s3_wire import Body

__all__ = ["Held", "Requests", "S3Upload"]


class Requests(Protocol):
    """What an upload asks its client for."""

    def at(self, key: str) -> dict[str, Any]:
        """Bucket and key, as requests name them."""

    def checksum(self, action: str, key: str, body: Body) -> dict[str, str]:
        """What is sent for the store to verify."""

    def change(
        self,
        action: str,
        key: str,
        operation: str,
        wanted: Mapping[str, Any],
        body: Body | None = None,
    ) -> dict[str, Any]:
        """One request that changes something."""

    def abort(self, key: str, upload_id: str) -> None:
        """Throw an upload away; it may be gone."""


@dataclass(frozen=True, slots=True)
class Held:
    """One part of an upload that was left. crc32: where the store was told one."""

    size_bytes: int
    etag: str
    crc32: str | None


class S3Upload(Upload):
    """One multipart upload. Parts are numbered from 1 there and from 0 here."""

    def __init__(
        self, client: Requests, key: str, upload_id: str, held: Mapping[int, Held] | None = None
    ) -> None:
        self._client = client
        self._key = key
        self._upload_id = upload_id
        self._parts: dict[int, dict[str, Any]] = {}
        self._held = held or {}

    @property
    def held_bytes(self) -> int:
        """Of the parts that were left."""
        return sum(part.size_bytes for part in self._held.values())

    def holds(self, number: int, data: Buffer) -> bool:
        """By the part's ETag, which is an MD5 but for some encryptions, else by its checksum."""
        part, view = self._held.get(number), memoryview(data).cast("B")
        if part is None or part.size_bytes != len(view):
            return False
        md5 = hashlib.md5(view, usedforsecurity=False).hexdigest()
        same = part.etag.strip('"') == md5
        if not same and (part.crc32 is None or part.crc32 != Body(view).crc32()):
            return False
        checksum = {} if part.crc32 is None else {"ChecksumCRC32": part.crc32}
        self._parts[number] = {"PartNumber": number + 1, "ETag": part.etag} | checksum
        return True

    def put_part(self, number: int, data: Buffer) -> None:
        client, body = self._client, Body(data)
        checksum = client.checksum("put part", self._key, body)
        wanted = self._at() | {"PartNumber": number + 1} | checksum
        answer = client.change("put part", self._key, "UploadPart", wanted, body)
        self._parts[number] = {"PartNumber": number + 1, "ETag": answer["ETag"]} | checksum

    def complete(self) -> str | None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        wanted = self._at() | {"MultipartUpload": {"Parts": parts}}
        answer = self._client.change(
            "complete upload", self._key, "CompleteMultipartUpload", wanted
        )
        # radosgw 16.2 completes with an empty one.
        return answer.get("ETag") or None

    def abort(self) -> None:
        self._client.abort(self._key, self._upload_id)

    def _at(self) -> dict[str, Any]:
        return self._client.at(self._key) | {"UploadId": self._upload_id}
