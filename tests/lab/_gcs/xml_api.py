"""The XML API's objects and listings, path style, conditions in x-goog-if-generation-match.

    /B/K     GET (Range, ?generation=), HEAD, PUT (x-goog-hash, Content-MD5), DELETE
    /B       GET ?list-type=2

Settings come as headers and are kept under their JSON names, so that both sides show the same.
Uploads in parts are in ``xml_uploads``.
"""

from __future__ import annotations

import base64
from email.utils import format_datetime
from typing import Final

from tests.lab._gcs.store import Blob, Draft, RefusedError, Store, Why
from tests.lab._gcs.wire import Request, Response, answer_xml, tag

__all__ = ["delete", "draft_of", "error", "get", "list_objects", "put", "settings_of", "told_of"]

_SETTINGS: Final = {
    "content-type": "contentType",
    "cache-control": "cacheControl",
    "content-encoding": "contentEncoding",
    "content-language": "contentLanguage",
    "content-disposition": "contentDisposition",
    "x-goog-custom-time": "customTime",
    "x-goog-storage-class": "storageClass",
    "x-goog-encryption-kms-key-name": "kmsKeyName",
    "x-goog-acl": "predefinedAcl",
}
_META: Final = "x-goog-meta-"


def get(store: Store, request: Request, bucket: str, key: str) -> Response:
    """The object, or a range of it; HEAD: its headers."""
    blob = store.get(bucket, key, generation=request.generation, conditions=request.conditions)
    _check_etag(request, blob)
    span = request.span(len(blob.data))
    body = blob.data if span is None else blob.data[span]
    headers = {"Content-Length": str(len(body)), **told_of(blob)}
    if span is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{len(blob.data)}"
    return Response(206 if span else 200, body, headers)


def put(store: Store, request: Request, bucket: str, key: str) -> Response:
    """The whole object."""
    if "x-goog-copy-source" in request.headers:
        raise RefusedError(Why.BAD, "Copies are not served here.")
    blob = store.put(bucket, key, draft_of(request), request.conditions)
    headers = {name: value for name, value in told_of(blob).items() if name != "Content-Type"}
    return Response(200, b"", headers)


def delete(store: Store, request: Request, bucket: str, key: str) -> Response:
    """One object."""
    store.delete(bucket, key, generation=request.generation, conditions=request.conditions)
    return Response(204)


def list_objects(store: Store, request: Request, bucket: str, _: str) -> Response:
    """One page of a version 2 listing; the token is the last name of the page before."""
    query = request.query
    limit = max(min(int(query.get("max-keys", 1000)), 1000), 1)
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = base64.b64decode(query.get("continuation-token", "")).decode()
    after = max(after, query.get("start-after", ""))
    lines: list[str] = []
    last = token = ""
    for name, blob in store.keys(bucket, prefix, delimiter):
        if name <= after:
            continue
        if len(lines) == limit:
            token = tag("NextContinuationToken", base64.b64encode(last.encode()).decode())
            break
        last = name
        lines.append(
            f"<CommonPrefixes>{tag('Prefix', name)}</CommonPrefixes>"
            if blob is None
            else f"<Contents>{_line(name, blob)}</Contents>"
        )
    truncated = tag("IsTruncated", str(bool(token)).lower())
    head = tag("Name", bucket) + tag("Prefix", prefix) + tag("KeyCount", len(lines)) + truncated
    namespace = "xmlns='http://doc.s3.amazonaws.com/2006-03-01'"
    return answer_xml(
        f"<ListBucketResult {namespace}>{head}{token}{''.join(lines)}</ListBucketResult>"
    )


def error(refused: RefusedError) -> Response:
    """The XML API's error."""
    status, _, code = refused.why.value
    said = tag("Code", code) + tag("Message", _MESSAGES.get(refused.why, refused.message))
    return answer_xml(f"<Error>{said}{tag('Details', refused.message)}</Error>", status)


_MESSAGES: Final = {
    Why.NO_KEY: "The specified key does not exist.",
    Why.FORBIDDEN: "Access denied.",
    Why.TOKEN: "Authentication required.",
    Why.DIGEST: "The MD5 you specified in Content-MD5 or x-goog-hash was invalid.",
    Why.SLOW_DOWN: "Please reduce your request rate.",
}


def draft_of(request: Request) -> Draft:
    """The bytes, the settings and the given checksums of a PUT."""
    pairs = request.headers.get("x-goog-hash", "").split(",")
    hashes = dict(pair.strip().split("=", 1) for pair in pairs if "=" in pair)
    return Draft(
        request.body,
        settings_of(request),
        crc32c=hashes.get("crc32c"),
        md5=hashes.get("md5") or request.headers.get("content-md5"),
    )


def settings_of(request: Request) -> dict[str, object]:
    """An object's settings, from the headers of a PUT or of the POST that begins an upload."""
    headers = request.headers
    found: dict[str, object] = {
        json: headers[name] for name, json in _SETTINGS.items() if headers.get(name)
    }
    if meta := {n.removeprefix(_META): v for n, v in headers.items() if n.startswith(_META)}:
        found["metadata"] = meta
    return found


def told_of(blob: Blob) -> dict[str, str]:
    """The headers that tell of an object."""
    metadata = blob.settings.get("metadata")
    meta = metadata if isinstance(metadata, dict) else {}
    return {
        "Content-Type": str(blob.settings.get("contentType", "application/octet-stream")),
        "ETag": f'"{blob.etag}"',
        "Last-Modified": format_datetime(blob.created, usegmt=True),
        "x-goog-generation": str(blob.generation),
        "x-goog-metageneration": str(blob.metageneration),
        "x-goog-hash": f"crc32c={blob.crc32c}" + (f",md5={blob.md5}" if blob.md5 else ""),
        "x-goog-storage-class": str(blob.settings.get("storageClass", "STANDARD")),
        "x-goog-stored-content-length": str(len(blob.data)),
        **{_META + name: str(value) for name, value in meta.items()},
    }


def _check_etag(request: Request, blob: Blob) -> None:
    wanted = request.headers.get("if-match")
    if wanted not in (None, "*", f'"{blob.etag}"', blob.etag):
        raise RefusedError(
            Why.CONDITION, "At least one of the pre-conditions you specified did not hold."
        )


def _line(name: str, blob: Blob) -> str:
    return (
        tag("Key", name)
        + tag("Generation", blob.generation)
        + tag("MetaGeneration", blob.metageneration)
        + tag("LastModified", blob.created.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
        + tag("ETag", f'"{blob.etag}"')
        + tag("Size", len(blob.data))
    )
