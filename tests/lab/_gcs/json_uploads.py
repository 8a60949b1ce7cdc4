"""The JSON API's inserts: uploadType=media, multipart and resumable, with 308 and status queries.

    POST   ...?uploadType=media&name=K             the body is the object
    POST   ...?uploadType=multipart                a JSON part, then the bytes (multipart/related)
    POST   ...?uploadType=resumable                settings; Location: the session
    PUT    session, Content-Range: bytes A-B/N|*   308 with Range, or the object when it is whole
    PUT    session, Content-Range: bytes */N|*     what has arrived so far
    DELETE session                                 499

A chunk that is not the last is a multiple of 256 KiB. A session answers again after it is done.
"""

from __future__ import annotations

import json
import re

from tests.lab._gcs.json_api import resource
from tests.lab._gcs.store import Draft, RefusedError, Store, Upload, Why, new_id
from tests.lab._gcs.wire import Request, Response, answer_json

__all__ = ["insert", "name_of", "session"]

CHUNK_MULTIPLE = 256 << 10
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_NOT_SETTINGS = ("name", "bucket", "crc32c", "md5Hash", "size", "kind")


def name_of(request: Request) -> str:
    """The key of an insert, from the query or from the settings in the body."""
    if name := request.query.get("name"):
        return name
    if request.query.get("uploadType") == "multipart":
        return str(_related(request)[0].get("name", ""))
    return str(_settings(request.body).get("name", ""))


def insert(store: Store, request: Request, bucket: str, key: str) -> Response:
    """A new object, or a new resumable session."""
    kind = request.query.get("uploadType", "media")
    if not key:
        raise RefusedError(Why.BAD, "Required parameter: name")
    if kind == "resumable":
        return _begin(store, request, bucket, key)
    hashes = _hashes(request)
    if kind == "multipart":
        settings, data = _related(request)
    else:
        settings, data = {"contentType": request.headers.get("content-type", "")}, request.body
    draft = Draft(
        data,
        _kept(settings, request),
        crc32c=_text(settings.get("crc32c") or hashes.get("crc32c")),
        md5=_text(settings.get("md5Hash") or hashes.get("md5Hash")),
    )
    return answer_json(resource(bucket, store.put(bucket, key, draft, request.conditions)))


def _begin(store: Store, request: Request, bucket: str, key: str) -> Response:
    settings = _settings(request.body)
    with store.lock:
        request.conditions.check(store.bucket(bucket).live.get(key), reading=False)
    upload = store.begin(
        store.resumable,
        Upload(
            new_id(),
            bucket,
            key,
            _kept(settings, request),
            request.conditions,
            crc32c=_text(settings.get("crc32c")),
            md5=_text(settings.get("md5Hash")),
        ),
    )
    where = f"{request.base_url}{request.path}?uploadType=resumable&upload_id={upload.id}"
    return Response(200, b"", {"Location": where, "X-GUploader-UploadID": upload.id})


def session(store: Store, request: Request, bucket: str, _: str) -> Response:
    """A chunk, a status query, or the end of a session."""
    with store.lock:
        upload = store.resumable.get(request.query["upload_id"])
        if upload is None:
            raise RefusedError(Why.GONE, "The upload session is gone.")
        if request.method == "DELETE":
            del store.resumable[upload.id]
            return Response(499)
        if upload.done is not None:
            return answer_json(resource(bucket, upload.done))
        total = _add(upload, request)
        if total is None or len(upload.data) < total:
            last = len(upload.data) - 1
            return Response(308, b"", {"Range": f"bytes=0-{last}"} if last >= 0 else {})
        hashes = _hashes(request)
        draft = Draft(
            bytes(upload.data),
            upload.settings,
            crc32c=upload.crc32c or _text(hashes.get("crc32c")),
            md5=upload.md5 or _text(hashes.get("md5Hash")),
        )
        try:
            upload.done = store.put(bucket, upload.key, draft, upload.conditions)
        except RefusedError:
            del store.resumable[upload.id]
            raise
        upload.data.clear()
        return answer_json(resource(bucket, upload.done))


def _add(upload: Upload, request: Request) -> int | None:
    """Take the chunk in; the object's whole size, where it is known by now."""
    text = request.headers.get("content-range")
    if text is None:
        upload.data[:] = request.body
        return len(upload.data)
    found = _RANGE.fullmatch(text)
    if found is None:
        raise RefusedError(Why.RANGE_OF_UPLOAD, f"Failed to parse Content-Range header: {text}")
    first, last, total = found.groups()
    whole = None if total == "*" else int(total)
    if first is None:
        return whole
    start, stop = int(first), int(last) + 1
    if stop - start != len(request.body) or start > len(upload.data):
        raise RefusedError(Why.RANGE_OF_UPLOAD, "Invalid request. The bytes do not follow.")
    if stop != whole and len(request.body) % CHUNK_MULTIPLE:
        raise RefusedError(
            Why.RANGE_OF_UPLOAD, "Invalid request. The chunk is no multiple of 262144 bytes."
        )
    upload.data += request.body[len(upload.data) - start :]
    return whole


def _related(request: Request) -> tuple[dict[str, object], bytes]:
    """The settings and the bytes of a multipart/related body, which may hold any bytes."""
    found = re.search(r'boundary="?([^";]+)"?', request.headers.get("content-type", ""))
    if found is None:
        raise RefusedError(Why.BAD, "A multipart upload needs a boundary.")
    line = b"--" + found[1].encode()
    first = request.body.find(line)
    second = request.body.find(b"\n" + line, first + 1)
    last = request.body.rfind(b"\n" + line + b"--")
    if not 0 <= first < second < last:
        raise RefusedError(Why.BAD, "A multipart upload has two parts.")
    return _settings(_payload(request.body[first:second])), _payload(
        request.body[second + 1 : last]
    )


def _payload(part: bytes) -> bytes:
    """What follows the first empty line; the line end before the next boundary is the boundary's."""
    found = re.search(rb"\r?\n\r?\n", part)
    return part[found.end() :].removesuffix(b"\r") if found else b""


def _settings(body: bytes) -> dict[str, object]:
    found = json.loads(body or b"{}")
    if not isinstance(found, dict):
        raise RefusedError(Why.BAD, "Parse Error")
    return found


def _kept(settings: dict[str, object], request: Request) -> dict[str, object]:
    kept = {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}
    for name in ("kmsKeyName", "predefinedAcl"):
        if value := request.query.get(name):
            kept[name] = value
    return kept


def _hashes(request: Request) -> dict[str, str]:
    """x-goog-hash: crc32c=...,md5=..."""
    pairs = request.headers.get("x-goog-hash", "").split(",")
    found = dict(pair.strip().split("=", 1) for pair in pairs if "=" in pair)
    return {"md5Hash" if name == "md5" else name: value for name, value in found.items()}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
