"""GCS through gcsfs: its credentials and session, requests asked one by one.

    get  get_range   GET alt=media (Range, ifGenerationMatch)         head       GET fields=size,generation,updated
    put              POST uploadType=multipart (ifGenerationMatch)    list_keys  GET prefix, delimiter
    delete           DELETE one, or a batch of up to 100              upload     XML API: POST ?uploads, PUT
                                                                                 parts, POST, DELETE

An *etag* here is the generation, as text: what Google's preconditions are about. It only grows, so
that "the object of this etag" never means another one, and 0 stands for nothing. Reads carry it as a
condition, not as a version to look for: of a versioned bucket they notice a replacement too.

What the store verifies: the crc32c of every body, put or part. What we verify: the crc32c of small
objects as they are read (of ranges Google tells none; ckptfs has its own digests).

Large objects go through the XML API's multipart upload, the only one whose parts go in parallel. It
takes no conditions, which the protocol never asks of it. Settings are the same by every way.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from ckptfs.errors import AnswerLostError, NotFoundError, StorageError, TransientError
from ckptfs.storage.clients.base import (
    ALWAYS,
    Always,
    Buffer,
    Condition,
    Conditions,
    Head,
    IfAbsent,
    Limits,
    Listed,
    ObjectClient,
    PendingUpload,
    Refused,
    Upload,
    check_size,
)
from ckptfs.storage.clients.bucket_rules import BucketRules, of_gcs
from ckptfs.storage.clients.failures import Asked, Reason, failed
from ckptfs.storage.clients.gcs_batch import batch_body, batch_replies
from ckptfs.storage.clients.gcs_errors import refused, said_of
from ckptfs.storage.clients.gcs_hash import crc32c_of, crc32c_told
from ckptfs.storage.clients.gcs_options import parse_gcs_options
from ckptfs.storage.clients.gcs_requests import Requests
from ckptfs.storage.clients.gcs_uploads import abort_upload, begin_upload, pending_uploads
from ckptfs.storage.clients.gcs_wire import Call, GcsWire, Reply
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["GcsClient", "open_client"]

_NO_BATCH: Final = (404, 405, 501)
_PAGE: Final = "1000"


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObjectClient:
    """The client of the URI's bucket. UriError: an option that gcsfs or GCS does not know."""
    return GcsClient(uri, GcsWire(parse_gcs_options(uri, options), times))


class GcsClient(ObjectClient):
    """One bucket."""

    # cloud.google.com/storage/quotas: objects, XML API multipart uploads; json_api/v1/how-tos/batch.
    limits = Limits(delete_batch=100)
    conditions = Conditions(if_absent=True, if_match=True)
    copies_parts = False

    def __init__(self, uri: Uri, wire: GcsWire) -> None:
        self._requests = Requests(wire, uri)
        self._objects = f"/storage/v1/b/{self._requests.bucket}/o"
        self.endpoint = wire.options.endpoint

    # -- small -------------------------------------------------------------------------

    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        asked = self._requests.asked("get", key)

        def check(size_bytes: int) -> None:
            check_size(size_bytes, limit_bytes, asked.uri)

        reply = self._requests.json(asked, "GET", self._media(key), {"alt": "media"}, check=check)
        told_crc = crc32c_told(reply.headers)
        if told_crc is not None and told_crc != crc32c_of(reply.body):
            raise TransientError(
                "get failed: the data was damaged on the way: its crc32c differs", uri=asked.uri
            )
        return reply.body, reply.headers.get("X-Goog-Generation")

    def head(self, key: str) -> Head:
        fields = {"fields": "size,generation,updated"}
        asked = self._requests.asked("head", key)
        found = _parsed(asked, self._requests.json(asked, "GET", self._object(key), fields))
        updated = found.get("updated")
        modified_s = None if updated is None else datetime.fromisoformat(updated).timestamp()
        return Head(int(found["size"]), str(found["generation"]), modified_s)

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        asked = replace(
            self._requests.changing("put", key), conditional=not isinstance(condition, Always)
        )
        view = memoryview(data).cast("B")
        settings = self._requests.wire.options.settings
        resource = {"name": key, "crc32c": crc32c_of(view), **settings.resource()}
        line = f"--{secrets.token_hex(16)}"
        head = (
            f"{line}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}"
            f"\r\n{line}\r\nContent-Type: {settings.content_type}\r\n"
            "Content-Transfer-Encoding: binary\r\n\r\n"
        )
        query = {"uploadType": "multipart", **settings.query(), **_matching(condition)}
        reply = self._requests.json(
            asked,
            "POST",
            f"/upload{self._objects}",
            query | {"fields": "generation"},
            body=(head.encode(), view, f"\r\n{line}--\r\n".encode()),
            headers={"Content-Type": f'multipart/related; boundary="{line[2:]}"'},
        )
        return str(_parsed(asked, reply)["generation"])

    # -- ranges ------------------------------------------------------------------------

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        view = out.cast("B")
        if not view:
            return
        query = {"alt": "media"} | ({} if etag is None else {"ifGenerationMatch": etag})
        self._requests.json(
            self._requests.asked("get", key),
            "GET",
            self._media(key),
            query,
            headers={"Range": f"bytes={offset}-{offset + len(view) - 1}"},
            out=view,
        )

    # -- names -------------------------------------------------------------------------

    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[Listed]:
        asked = self._requests.asked("list", prefix)
        query = {
            "prefix": prefix,
            "maxResults": _PAGE,
            "fields": "items(name,size),prefixes,nextPageToken",
        }
        if delimiter:
            query["delimiter"] = "/"
        while True:
            page = _parsed(asked, self._requests.json(asked, "GET", self._objects, query))
            found = [Listed(item["name"], int(item["size"])) for item in page.get("items", ())]
            found += [Listed(name, is_prefix=True) for name in page.get("prefixes", ())]
            yield from sorted(found, key=lambda listed: listed.key)
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def delete(self, keys: Sequence[str]) -> list[Refused]:
        if len(keys) == 1:
            self._gone(lambda: self._delete_one(keys[0]))
            return []
        asked = self._requests.changing("delete", _folder(keys))
        query = {} if (payer := self._requests.payer(asked)) is None else {"userProject": payer}
        content_type, body = batch_body([self._object(key) for key in keys], query)
        call = Call(
            "POST", "/batch/storage/v1", headers={"Content-Type": content_type}, body=(body,)
        )
        reply = self._requests.sent(asked, call)
        if reply.status in _NO_BATCH:
            return self._delete_each(keys)
        self._requests.check(asked, reply)
        replies = batch_replies(reply.headers.get("Content-Type", ""), reply.body, len(keys))
        if HTTPStatus.UNAUTHORIZED in (one.status for one in replies):
            # The token is the whole batch's: where it can be renewed, the batch goes again.
            body = next(one.body for one in replies if one.status == HTTPStatus.UNAUTHORIZED)
            self._requests.check(asked, replace(reply, status=HTTPStatus.UNAUTHORIZED, body=body))
        found = []
        for key, one in zip(keys, replies, strict=True):
            if 0 < one.status < HTTPStatus.BAD_REQUEST:
                continue
            asked = self._requests.changing("delete", key)
            said = said_of(one.status, one.body)
            error = refused(asked, said) if one.status else failed(asked, Reason.BROKEN)
            if not isinstance(error, NotFoundError):
                found.append(Refused(key, error))
            elif error.hint is not None:  # the bucket, not the key
                raise error
        return found

    def _delete_each(self, keys: Sequence[str]) -> list[Refused]:
        found = []
        for key in keys:
            try:
                self._gone(lambda key=key: self._delete_one(key))  # type: ignore[misc]
            except StorageError as error:
                if isinstance(error, NotFoundError):
                    raise
                found.append(Refused(key, error))
        return found

    def _delete_one(self, key: str) -> None:
        asked = self._requests.changing("delete", key)
        self._requests.json(asked, "DELETE", self._object(key), {})

    @staticmethod
    def _gone(delete: Callable[[], None]) -> None:
        try:
            delete()
        except NotFoundError as error:
            if error.hint is not None:  # the bucket, not the key
                raise

    # -- uploads -----------------------------------------------------------------------

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        del part_bytes
        return begin_upload(self._requests, key)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        return pending_uploads(self._requests, prefix)

    def abort_pending(self, upload: PendingUpload) -> None:
        abort_upload(self._requests, upload.key, upload.upload_id)

    def bucket_rules(self) -> BucketRules:
        asked = self._requests.asked("get bucket", "")
        query = {"fields": "versioning,retentionPolicy,lifecycle"}
        at = self._objects.removesuffix("/o")
        return of_gcs(lambda: _parsed(asked, self._requests.json(asked, "GET", at, query)))

    def close(self) -> None:
        self._requests.wire.close()

    def _object(self, key: str) -> str:
        return f"{self._objects}/{quote(key, safe='')}"

    def _media(self, key: str) -> str:
        return f"/download{self._object(key)}"


# -- pure ------------------------------------------------------------------------------


def _matching(condition: Condition) -> dict[str, str]:
    match condition:
        case Always():
            return {}
        case IfAbsent():
            return {"ifGenerationMatch": "0"}
        case _:
            return {"ifGenerationMatch": condition.etag}


def _parsed(asked: Asked, reply: Reply) -> dict[str, Any]:
    """The answer's JSON. Cut in the middle, it tells nothing: of a change, not even whether it was done."""
    try:
        found: dict[str, Any] = json.loads(reply.body)
    except ValueError as error:
        kind = AnswerLostError if asked.changes else TransientError
        raise kind(
            f"{asked.action} failed: the answer of {asked.endpoint} was cut short", uri=asked.uri
        ) from error
    return found


def _folder(keys: Sequence[str]) -> str:
    """The prefix that an error of many keys names."""
    return keys[0].rpartition("/")[0]
