"""Objects in parts, through GCS' XML API: the only way there whose parts go in parallel.

    POST   /B/K?uploads                 settings as headers; an UploadId
    PUT    /B/K?partNumber=N&uploadId=  a part, with its crc32c, which the server verifies
    POST   /B/K?uploadId=               complete: the parts with their etags, in order
    DELETE /B/K?uploadId=               abort
    GET    /B?uploads&prefix=           what nobody completed

It takes no conditions (cloud.google.com/storage/docs/multipart-uploads), which ckptfs never asks of
it: data keys carry their save's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from html import escape, unescape
from typing import Final

from ckptfs.errors import NotFoundError, UnsupportedError
from ckptfs.storage.clients.base import Buffer, PendingUpload, Upload
from ckptfs.storage.clients.gcs_hash import crc32c_of
from ckptfs.storage.clients.gcs_requests import Requests

__all__ = ["GcsUpload", "abort_upload", "begin_upload", "pending_uploads"]

_PAGE: Final = "1000"
_ONE_PIECE: Final = (
    "an emulator may lack it: with a part_size_bytes above the largest file, files go whole"
)
_UPLOAD: Final = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)


def begin_upload(requests: Requests, key: str) -> Upload:
    """A new upload. UnsupportedError: the endpoint serves no XML API (some emulators)."""
    asked = requests.changing("begin upload", key)
    headers = requests.wire.options.settings.headers()
    try:
        reply = requests.xml(asked, "POST", key, {"uploads": ""}, headers=headers, body=())
    except UnsupportedError as error:
        error.hint = _ONE_PIECE
        raise
    upload_id = _element(reply.body.decode("utf-8", "replace"), "UploadId")
    if not upload_id:
        raise UnsupportedError(
            f"begin upload failed: {asked.endpoint} knows no XML API multipart upload",
            uri=asked.uri,
            hint=_ONE_PIECE,
        )
    return GcsUpload(requests, key, upload_id)


class GcsUpload(Upload):
    """One upload. Part numbers begin at 1 there."""

    def __init__(self, requests: Requests, key: str, upload_id: str) -> None:
        self._requests = requests
        self._key = key
        self._id = upload_id
        self._etags: dict[int, str] = {}

    def put_part(self, number: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        reply = self._requests.xml(
            self._requests.changing("put part", self._key),
            "PUT",
            self._key,
            {"partNumber": str(number + 1), "uploadId": self._id},
            headers={"x-goog-hash": f"crc32c={crc32c_of(view)}"},
            body=(view,),
        )
        self._etags[number] = reply.headers.get("ETag", "")

    def complete(self) -> str | None:
        lines = "".join(
            f"<Part><PartNumber>{number + 1}</PartNumber><ETag>{escape(etag, quote=False)}</ETag></Part>"
            for number, etag in sorted(self._etags.items())
        )
        body = f"<CompleteMultipartUpload>{lines}</CompleteMultipartUpload>".encode()
        asked = self._requests.changing("complete upload", self._key)
        reply = self._requests.xml(asked, "POST", self._key, {"uploadId": self._id}, body=(body,))
        return reply.headers.get("x-goog-generation")

    def abort(self) -> None:
        abort_upload(self._requests, self._key, self._id)


def abort_upload(requests: Requests, key: str, upload_id: str) -> None:
    """Throw its parts away; one that is gone is success."""
    asked = requests.changing("abort upload", key)
    try:
        requests.xml(asked, "DELETE", key, {"uploadId": upload_id})
    except NotFoundError:
        return


def pending_uploads(requests: Requests, prefix: str) -> Iterator[PendingUpload]:
    """What nobody completed below a prefix, with its age by the server's own clock."""
    asked = requests.asked("list uploads", prefix)
    query = {"uploads": "", "prefix": prefix, "max-uploads": _PAGE}
    while True:
        reply = requests.xml(asked, "GET", None, query)
        text, now = reply.body.decode(), _date_of(reply.headers)
        for line in _UPLOAD.findall(text):
            age = now - datetime.fromisoformat(_element(line, "Initiated"))
            key, upload_id = _element(line, "Key"), _element(line, "UploadId")
            yield PendingUpload(key, upload_id, max(age.total_seconds(), 0.0))
        if _element(text, "IsTruncated") != "true":
            return
        query["key-marker"] = _element(text, "NextKeyMarker")
        query["upload-id-marker"] = _element(text, "NextUploadIdMarker")


def _date_of(headers: Mapping[str, str]) -> datetime:
    found = headers.get("Date")
    return parsedate_to_datetime(found) if found else datetime.now(UTC)


def _element(text: str, name: str) -> str:
    """The text of the first element of that name: Google's answers are flat."""
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return unescape(found[1]) if found else ""
