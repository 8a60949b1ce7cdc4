"""The JSON API's objects and buckets: metadata, media, listings, deletes, compose, batch.

    /storage/v1/b/B/o                       GET list
    /storage/v1/b/B/o/K                     GET (alt=media: bytes), DELETE
    /storage/v1/b/B/o/K/compose             POST
    /storage/v1/b, /storage/v1/b/B          POST make, GET
    /batch/storage/v1                       POST multipart/mixed of the above (100 at most)

Inserts are in ``json_uploads``.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from email.parser import BytesParser
from email.policy import HTTP

from tests.lab._gcs.store import Blob, Conditions, Draft, RefusedError, Store, Why
from tests.lab._gcs.wire import Request, Response, answer_json

__all__ = ["batch", "bucket_call", "compose", "delete", "error", "get", "list_objects", "resource"]

BATCH_LIMIT = 100


def resource(bucket: str, blob: Blob) -> dict[str, object]:
    """The object resource."""
    made = blob.created.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    found: dict[str, object] = {
        "kind": "storage#object",
        "id": f"{bucket}/{blob.key}/{blob.generation}",
        "name": blob.key,
        "bucket": bucket,
        "generation": str(blob.generation),
        "metageneration": str(blob.metageneration),
        "contentType": "application/octet-stream",
        "storageClass": "STANDARD",
        "size": str(len(blob.data)),
        "crc32c": blob.crc32c,
        "etag": base64.b64encode(str(blob.generation).encode()).decode(),
        "timeCreated": made,
        "updated": made,
        **blob.settings,
    }
    if blob.md5 is not None:
        found["md5Hash"] = blob.md5
    return found


def get(store: Store, request: Request, bucket: str, key: str) -> Response:
    """Metadata, or with alt=media the bytes."""
    blob = store.get(bucket, key, generation=request.generation, conditions=request.conditions)
    if request.query.get("alt") != "media" and not request.path.startswith("/download/"):
        return answer_json(resource(bucket, blob))
    span = request.span(len(blob.data))
    body = blob.data if span is None else blob.data[span]
    headers = {
        "Content-Type": str(blob.settings.get("contentType", "application/octet-stream")),
        "ETag": base64.b64encode(str(blob.generation).encode()).decode(),
        "X-Goog-Generation": str(blob.generation),
        "X-Goog-Metageneration": str(blob.metageneration),
        "X-Goog-Hash": f"crc32c={blob.crc32c}" + (f",md5={blob.md5}" if blob.md5 else ""),
        "X-Goog-Storage-Class": str(blob.settings.get("storageClass", "STANDARD")),
    }
    if span is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{len(blob.data)}"
    return Response(206 if span else 200, body, headers)


def delete(store: Store, request: Request, bucket: str, key: str) -> Response:
    """One object."""
    store.delete(bucket, key, generation=request.generation, conditions=request.conditions)
    return Response(204)


def list_objects(store: Store, request: Request, bucket: str, _: str) -> Response:
    """One page; the token is the last name of the page before."""
    query = request.query
    limit = max(min(int(query.get("maxResults", 1000)), 1000), 1)
    after = base64.b64decode(query.get("pageToken", "")).decode()
    items: list[object] = []
    prefixes: list[str] = []
    answer: dict[str, object] = {"kind": "storage#objects"}
    last = ""
    for name, blob in store.keys(bucket, query.get("prefix", ""), query.get("delimiter", "")):
        if name <= after or name < query.get("startOffset", ""):
            continue
        if len(items) + len(prefixes) == limit:
            answer["nextPageToken"] = base64.b64encode(last.encode()).decode()
            break
        last = name
        if blob is None:
            prefixes.append(name)
        else:
            items.append(resource(bucket, blob))
    if items:
        answer["items"] = items
    if prefixes:
        answer["prefixes"] = prefixes
    return answer_json(answer)


def compose(store: Store, request: Request, bucket: str, key: str) -> Response:
    """Up to 32 objects of the bucket into one."""
    wanted = json.loads(request.body or b"{}")
    data = b"".join(
        store.get(
            bucket,
            str(source["name"]),
            conditions=Conditions(source.get("objectPreconditions", {}).get("ifGenerationMatch")),
        ).data
        for source in wanted["sourceObjects"]
    )
    draft = Draft(data, wanted.get("destination", {}), composed=True)
    return answer_json(resource(bucket, store.put(bucket, key, draft, request.conditions)))


def bucket_call(store: Store, request: Request, bucket: str, _: str) -> Response:
    """POST makes one (versioning as the bucket resource says), GET describes one."""
    if request.method == "POST":
        wanted = json.loads(request.body or b"{}")
        versioning = bool(wanted.get("versioning", {}).get("enabled"))
        found = store.make_bucket(str(wanted["name"]), versioning=versioning)
    else:
        found = store.bucket(bucket)
    versioned = {"enabled": found.versioning}
    return answer_json({"kind": "storage#bucket", "name": found.name, "versioning": versioned})


def error(refused: RefusedError) -> Response:
    """The JSON API's error."""
    status, reason, _ = refused.why.value
    detail: dict[str, object] = {"message": refused.message, "domain": "global", "reason": reason}
    if refused.why is Why.CONDITION:
        detail |= {"locationType": "header", "location": "If-Match"}
    body = {"error": {"code": status, "message": refused.message, "errors": [detail]}}
    headers = {"WWW_Authenticate": "Bearer realm=lab"} if status == 401 else {}
    return answer_json(body, status, **headers)


def batch(
    request: Request, answer: Callable[[Request], Response], *, leave_out: bool = False
) -> Response:
    """Every inner request is answered as if it came alone; the credentials are the outer's.

    leave_out: the last one is done, and its answer left out.
    """
    head = f"Content-Type: {request.headers.get('content-type', '')}\r\n\r\n".encode()
    outer = BytesParser(policy=HTTP).parsebytes(head + request.body)
    parts = list(outer.iter_parts()) if outer.is_multipart() else []
    if not 0 < len(parts) <= BATCH_LIMIT:
        return error(RefusedError(Why.BAD, f"A batch takes 1 to {BATCH_LIMIT} calls."))
    said = []
    for part in parts:
        text = part.get_payload(decode=True)
        lines, _, body = (text if isinstance(text, bytes) else b"").partition(b"\r\n\r\n")
        first, *rest = lines.decode().split("\r\n")
        method, target, *_ = first.split(" ")
        named = dict(line.lower().split(": ", 1) for line in rest if ": " in line)
        headers = {**named, "authorization": request.headers.get("authorization", "")}
        inner = answer(Request(method, re.sub(r"^https?://[^/]+", "", target), headers, body))
        content_id = str(part.get("Content-ID", "<none>"))
        said.append(
            f"--batch_lab\r\nContent-Type: application/http\r\n"
            f"Content-ID: <response-{content_id.strip('<>')}>\r\n\r\n"
            f"HTTP/1.1 {inner.status} Said\r\nContent-Length: {len(inner.body)}\r\n\r\n".encode()
            + inner.body
            + b"\r\n"
        )
    body = b"".join(said[:-1] if leave_out else said) + b"--batch_lab--\r\n"
    return Response(200, body, {"Content-Type": "multipart/mixed; boundary=batch_lab"})
