"""What is in a store, seen behind ckptfs's back: keys, sizes, uploads under way."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from tests.lab import raw
from tests.lab.server import Server

__all__ = ["keys_below", "pending_uploads"]


def keys_below(server: Server, uri: str) -> Mapping[str, int]:
    """Every key below a URI, relative to it, with its size in bytes."""
    prefix = _key(server, uri) + "/"
    found: dict[str, int] = {}
    match server.protocol:
        case "s3":
            with contextlib.closing(raw.s3(server)) as client:
                pages = client.get_paginator("list_objects_v2")
                for page in pages.paginate(Bucket=server.bucket, Prefix=prefix):
                    found |= {o["Key"]: o["Size"] for o in page.get("Contents", ())}
        case "az":
            with raw.azure(server) as container:
                found = {b.name: b.size for b in container.list_blobs(name_starts_with=prefix)}
        case "gs":
            found = {k: len(raw.gcs_get(server, k)) for k in raw.gcs_keys(server, prefix)}
        case other:
            raise AssertionError(other)
    return {key.removeprefix(prefix): size for key, size in found.items()}


def pending_uploads(server: Server, uri: str) -> list[str]:
    """Keys of the uncompleted multipart uploads below a URI (S3)."""
    prefix = _key(server, uri) + "/"
    with contextlib.closing(raw.s3(server)) as client:
        found = client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", ())]


def _key(server: Server, uri: str) -> str:
    return uri.removeprefix(server.uri()).strip("/")
