"""The XML API's multipart uploads.

    POST   /B/K?uploads                     begin: settings as headers, an UploadId back
    PUT    /B/K?partNumber=N&uploadId=I     a part; again: the last one counts
    POST   /B/K?uploadId=I                  complete: the parts with their ETags, in order
    DELETE /B/K?uploadId=I                  abort
    GET    /B/K?uploadId=I                  parts so far
    GET    /B?uploads                       uploads under way, by prefix, in pages

As Google documents it, there are no preconditions here, and the object has no MD5. All parts but
the last have ``Rules.min_part_bytes`` at least (5 MiB).
"""

from __future__ import annotations

import hashlib
from xml.etree import ElementTree as ET

from tests.lab._gcs.rules import Rules
from tests.lab._gcs.store import ANY, Draft, RefusedError, Store, Upload, Why, new_id
from tests.lab._gcs.wire import Request, Response, answer_xml, tag
from tests.lab._gcs.xml_api import draft_of, settings_of, told_of

__all__ = ["abort", "begin", "complete", "list_parts", "list_uploads", "put_part"]

MAX_PARTS = 10_000
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


def begin(store: Store, request: Request, bucket: str, key: str) -> Response:
    """A new upload."""
    if request.conditions != ANY:
        raise RefusedError(Why.BAD, "Preconditions are not supported for multipart uploads.")
    upload = Upload(new_id(), bucket, key, settings_of(request))
    store.begin(store.multipart, upload)
    said = tag("Bucket", bucket) + tag("Key", key) + tag("UploadId", upload.id)
    return answer_xml(f"<InitiateMultipartUploadResult>{said}</InitiateMultipartUploadResult>")


def put_part(store: Store, request: Request, bucket: str, key: str) -> Response:
    """One part; its checksums are verified when they are given."""
    number = int(request.query["partNumber"])
    if not 1 <= number <= MAX_PARTS:
        raise RefusedError(Why.BAD, f"Part number must be an integer between 1 and {MAX_PARTS}.")
    upload = _upload(store, request, bucket, key)
    draft = draft_of(request)
    etag = f'"{hashlib.md5(draft.data, usedforsecurity=False).hexdigest()}"'
    scratch = Store()
    scratch.make_bucket("b")
    blob = scratch.put("b", "part", draft)
    with store.lock:
        upload.parts[number] = (etag, draft.data)
    return Response(200, b"", {"ETag": etag, "x-goog-hash": told_of(blob)["x-goog-hash"]})


def complete(rules: Rules, store: Store, request: Request, bucket: str, key: str) -> Response:
    """The parts become the object, all at once."""
    wanted = [
        (int(part.findtext("{*}PartNumber") or 0), part.findtext("{*}ETag") or "")
        for part in ET.fromstring(request.body).iter()  # noqa: S314 - a test's own client
        if part.tag.rpartition("}")[2] == "Part"
    ]
    with store.lock:
        upload = _upload(store, request, bucket, key)
        numbers = [number for number, _ in wanted]
        if not numbers or numbers != sorted(set(numbers)):
            raise RefusedError(Why.ORDER, "The list of parts was not in ascending order.")
        chosen = []
        for number, etag in wanted:
            found = upload.parts.get(number)
            if found is None or found[0].strip('"') != etag.strip('"'):
                raise RefusedError(
                    Why.PART, "One or more of the specified parts could not be found."
                )
            chosen.append(found[1])
        if any(len(data) < rules.min_part_bytes for data in chosen[:-1]):
            raise RefusedError(
                Why.SMALL_PART, "Your proposed upload is smaller than the minimum size."
            )
        blob = store.put(bucket, key, Draft(b"".join(chosen), upload.settings, composed=True))
        del store.multipart[upload.id]
    said = tag("Bucket", bucket) + tag("Key", key) + tag("ETag", f'"{blob.etag}"')
    told = told_of(blob)
    headers = {n: told[n] for n in ("x-goog-generation", "x-goog-metageneration", "x-goog-hash")}
    body = f"<CompleteMultipartUploadResult>{said}</CompleteMultipartUploadResult>"
    return answer_xml(body, 200, headers)


def abort(store: Store, request: Request, bucket: str, key: str) -> Response:
    """The parts are gone."""
    with store.lock:
        del store.multipart[_upload(store, request, bucket, key).id]
    return Response(204)


def list_parts(store: Store, request: Request, bucket: str, key: str) -> Response:
    """Parts that have arrived."""
    with store.lock:
        upload = _upload(store, request, bucket, key)
        lines = "".join(
            f"<Part>{tag('PartNumber', number)}{tag('ETag', etag)}{tag('Size', len(data))}</Part>"
            for number, (etag, data) in sorted(upload.parts.items())
        )
    head = tag("Bucket", bucket) + tag("Key", key) + tag("UploadId", upload.id)
    return answer_xml(f"<ListPartsResult>{head}{lines}</ListPartsResult>")


def list_uploads(store: Store, request: Request, bucket: str, _: str) -> Response:
    """Uploads under way, by key and id."""
    query = request.query
    store.bucket(bucket)
    limit = max(min(int(query.get("max-uploads", 1000)), 1000), 1)
    marker = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
    with store.lock:
        found = sorted(
            (upload.key, upload.id, upload.began)
            for upload in store.multipart.values()
            if upload.bucket == bucket
            and upload.key.startswith(query.get("prefix", ""))
            and (upload.key, upload.id) > marker
        )
    lines = "".join(
        f"<Upload>{tag('Key', key)}{tag('UploadId', id_)}{tag('Initiated', at.strftime(_TIME))}"
        "</Upload>"
        for key, id_, at in found[:limit]
    )
    more = ""
    if len(found) > limit:
        key, id_, _began = found[limit - 1]
        more = tag("NextKeyMarker", key) + tag("NextUploadIdMarker", id_)
    head = tag("Bucket", bucket) + tag("IsTruncated", str(bool(more)).lower())
    return answer_xml(
        f"<ListMultipartUploadsResult>{head}{more}{lines}</ListMultipartUploadsResult>"
    )


def _upload(store: Store, request: Request, bucket: str, key: str) -> Upload:
    with store.lock:
        upload = store.multipart.get(request.query["uploadId"])
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            store.bucket(bucket)
            raise RefusedError(Why.NO_UPLOAD, "The requested upload was not found.")
        return upload
