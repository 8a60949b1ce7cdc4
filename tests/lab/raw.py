"""Reads and writes behind ckptfs's back, through the stores' own libraries.

s3(server)      a boto3 client            azure(server)   a ContainerClient
make_gcs_bucket, gcs_put, gcs_get, gcs_keys   the JSON API by itself
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from tests.lab.process import LabError
from tests.lab.server import Server

REQUEST_TIMEOUT_S = 120.0
_PRECONDITION_FAILED: Final = HTTPStatus.PRECONDITION_FAILED


class GcsError(LabError):
    """An answer of the JSON API that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def s3(server: Server, **overrides: Any) -> Any:
    """A boto3 client with one try per request; ``overrides`` go to ``boto3.client``."""
    import boto3
    from botocore.config import Config

    options = server.options
    config = Config(
        s3={"addressing_style": "path"},
        retries={"total_max_attempts": 1},
        max_pool_connections=32,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    arguments = {
        "endpoint_url": server.endpoint,
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        "config": config,
        **options["client_kwargs"],
        **overrides,
    }
    return boto3.client("s3", **arguments)


def azure(server: Server) -> Any:
    """The container of an Azure server."""
    from azure.storage.blob import ContainerClient

    return ContainerClient.from_connection_string(
        server.options["connection_string"], server.bucket, retry_total=0
    )


class Bucket(Protocol):
    """The bucket of any server; from several threads at once."""

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def keys(self, prefix: str = "") -> list[str]: ...


@contextlib.contextmanager
def bucket(server: Server) -> Iterator[Bucket]:
    """The server's bucket through the store's own library."""
    match server.protocol:
        case "s3":
            with contextlib.closing(s3(server)) as client:
                yield _S3Bucket(client, server.bucket)
        case "az":
            with azure(server) as container:
                yield _AzureBucket(container)
        case "gs":
            yield _GcsBucket(server)
        case other:
            raise LabError(f"no bucket behind {other}://")


@dataclass(frozen=True)
class _S3Bucket:
    client: Any
    name: str

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def create(self, key: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        try:
            self.client.put_object(Bucket=self.name, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != _PRECONDITION_FAILED:
                raise
            return False
        return True

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in found for entry in page.get("Contents", ())]


@dataclass(frozen=True)
class _AzureBucket:
    container: Any

    def put(self, key: str, data: bytes) -> None:
        self.container.upload_blob(key, data, overwrite=True)

    def create(self, key: str, data: bytes) -> bool:
        from azure.core.exceptions import ResourceExistsError

        try:
            self.container.upload_blob(key, data, overwrite=False)
        except ResourceExistsError:
            return False
        return True

    def get(self, key: str) -> bytes:
        return bytes(self.container.download_blob(key).readall())

    def keys(self, prefix: str = "") -> list[str]:
        return [blob.name for blob in self.container.list_blobs(name_starts_with=prefix)]


@dataclass(frozen=True)
class _GcsBucket:
    server: Server

    def put(self, key: str, data: bytes) -> None:
        gcs_put(self.server, key, data)

    def create(self, key: str, data: bytes) -> bool:
        return gcs_put(self.server, key, data, generation=0)

    def get(self, key: str) -> bytes:
        return gcs_get(self.server, key)

    def keys(self, prefix: str = "") -> list[str]:
        return gcs_keys(self.server, prefix)


def make_gcs_bucket(server: Server, project: str) -> None:
    """Make the server's bucket."""
    _gcs(server, "POST", f"/storage/v1/b?project={project}", json.dumps({"name": server.bucket}))


def gcs_put(server: Server, key: str, data: bytes, *, generation: int | None = None) -> bool:
    """Write one object; with ``generation`` only over that one (0: nothing). Whether it was written."""
    query = {"uploadType": "media", "name": key}
    if generation is not None:
        query["ifGenerationMatch"] = str(generation)
    path = f"/upload/storage/v1/b/{server.bucket}/o?{urllib.parse.urlencode(query)}"
    try:
        _gcs(server, "POST", path, data)
    except GcsError as error:
        if error.status != _PRECONDITION_FAILED:
            raise
        return False
    return True


def gcs_get(server: Server, key: str) -> bytes:
    """Read one object."""
    name = urllib.parse.quote(key, safe="")
    return _gcs(server, "GET", f"/storage/v1/b/{server.bucket}/o/{name}?alt=media")


def gcs_keys(server: Server, prefix: str = "") -> list[str]:
    """All keys below a prefix, in order."""
    keys: list[str] = []
    query = {"prefix": prefix}
    while True:
        path = f"/storage/v1/b/{server.bucket}/o?{urllib.parse.urlencode(query)}"
        page = json.loads(_gcs(server, "GET", path))
        keys += [item["name"] for item in page.get("items", [])]
        if "nextPageToken" not in page:
            return sorted(keys)
        query["pageToken"] = page["nextPageToken"]


def _gcs(server: Server, method: str, path: str, body: str | bytes | None = None) -> bytes:
    """One request of the JSON API; its body, or an error that shows it."""
    connection = http.client.HTTPConnection(
        server.endpoint.removeprefix("http://"), timeout=REQUEST_TIMEOUT_S
    )
    try:
        kind = "application/json" if isinstance(body, str) else "application/octet-stream"
        connection.request(method, path, body, {"Content-Type": kind} if body is not None else {})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status >= HTTPStatus.BAD_REQUEST:
        raise GcsError(answer.status, f"{method} {path}: {answer.status} {content[:500]!r}")
    return content
