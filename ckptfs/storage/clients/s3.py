"""S3 through s3fs: its options make the client, whose requests are asked one by one.

    get  get_range   GET (Range, If-Match)            put      PUT (If-None-Match: *, If-Match)
    head             HEAD                             delete   POST ?delete, one DELETE for one key
    list_keys        GET ?list-type=2                 upload   POST ?uploads, PUT parts, POST, DELETE

No other request is made: no HeadBucket, no GetBucketLocation, no copy. What the store verifies:
over https the crc32 of each body (x-amz-checksum-crc32), over http its SHA-256, which is signed.
``config_kwargs={"request_checksum_calculation": "when_required"}`` asks for the SHA-256 over https
too, for stores that do not know the newer header.

If-Match goes without the quotes of the etag on writes, as AWS's examples have it: radosgw 16.2
refuses the quoted one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    IntegrityError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
)
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
from ckptfs.storage.clients.bucket_rules import BucketRules, of_s3
from ckptfs.storage.clients.failures import Asked, Said, answered
from ckptfs.storage.clients.s3_errors import ANONYMOUS_S3, S3, told
from ckptfs.storage.clients.s3_options import parse_s3_options
from ckptfs.storage.clients.s3_upload import Held, S3Upload
from ckptfs.storage.clients.s3_versions import Versions, summed
from ckptfs.storage.clients.s3_wire import Body, S3Wire, Short
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["S3Client", "open_client"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObjectClient:
    """The client of the URI's bucket. UriError: an option that s3fs or S3 does not know."""
    return S3Client(uri, S3Wire(parse_s3_options(uri, options), times))


class S3Client(ObjectClient):
    """One bucket. ``versions`` is what ``ObjectClient`` does not ask for."""

    # docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
    limits = Limits()
    conditions = Conditions(if_absent=True, if_match=True)
    copies_parts = False
    resumes = True

    def __init__(self, uri: Uri, wire: S3Wire) -> None:
        self._wire = wire
        self._root = replace(uri, path="", query="")
        self._bucket = uri.authority
        self._dialect = ANONYMOUS_S3 if wire.options.client.get("anon") else S3
        self.endpoint = wire.endpoint

    # -- small -------------------------------------------------------------------------

    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        asked = self._asked("get", key)

        def check(size_bytes: int) -> None:
            check_size(size_bytes, limit_bytes, asked.uri)

        data, answer = self._say(asked, lambda: self._wire.fetch(self.at(key), check))
        return data, answer.get("ETag")

    def head(self, key: str) -> Head:
        asked = self._asked("head", key)
        try:
            answer = self._say(asked, lambda: self._wire.ask("HeadObject", self.at(key)))
        except (NotFoundError, TransientError, AnswerLostError):
            raise
        except StorageError:
            # A HEAD has no body, so it cannot tell an expired token from a missing permission.
            with suppress(IntegrityError):
                wanted = self.at(key) | {"Range": "bytes=0-0"}
                self._say(asked, lambda: self._wire.fetch(wanted))
            raise
        modified = answer.get("LastModified")
        modified_s = None if modified is None else modified.timestamp()
        return Head(int(answer["ContentLength"]), answer.get("ETag"), modified_s)

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        asked = replace(
            self._asked("put", key), changes=True, conditional=not isinstance(condition, Always)
        )
        answer = self._say(asked, lambda: self._put(key, Body(data), condition))
        return answer.get("ETag")

    def _put(self, key: str, body: Body, condition: Condition) -> dict[str, Any]:
        wanted = self.at(key) | self.checksum("put", key, body)
        if isinstance(condition, IfAbsent):
            wanted["IfNoneMatch"] = "*"
        elif not isinstance(condition, Always):
            wanted["IfMatch"] = condition.etag.strip('"')
        return self._wire.ask("PutObject", wanted, body)

    # -- ranges ------------------------------------------------------------------------

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        view = out.cast("B")
        if not view:
            return
        asked = self._asked("get", key)
        wanted = self.at(key) | {"Range": f"bytes={offset}-{offset + len(view) - 1}"}
        if etag is not None and not self._wire.options.etag_by_client:
            wanted["IfMatch"] = etag
        try:
            answer = self._say(asked, lambda: self._wire.fill(wanted, view))
        except _Surplus:
            raise UnsupportedError(
                "get failed: the server does not answer ranges", uri=asked.uri
            ) from None
        if etag is not None and answer.get("ETag", etag).strip('"') != etag.strip('"'):
            raise StaleError("get failed: the object was replaced meanwhile", uri=asked.uri)

    # -- names -------------------------------------------------------------------------

    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[Listed]:
        wanted = {"Bucket": self._bucket, "Prefix": prefix}
        if delimiter:
            wanted["Delimiter"] = "/"
        for page in self._pages("list", prefix, "ListObjectsV2", wanted, _NEXT_KEYS):
            found = [Listed(item["Key"], int(item["Size"])) for item in page.get("Contents", ())]
            found += [
                Listed(item["Prefix"], is_prefix=True) for item in page.get("CommonPrefixes", ())
            ]
            yield from sorted(found, key=lambda listed: listed.key)

    def delete(self, keys: Sequence[str]) -> list[Refused]:
        if len(keys) == 1:
            return self._delete_each(keys)
        wanted = {
            "Bucket": self._bucket,
            "Delete": {"Objects": [{"Key": key} for key in keys], "Quiet": True},
        }
        try:
            answer = self.change("delete", _folder(keys), "DeleteObjects", wanted)
        except UnsupportedError:
            return self._delete_each(keys)
        refused = (
            (item["Key"], _said_of_key(item)) for item in answer.get("Errors", ()) if "Key" in item
        )
        found = [(key, self._refusal(key, said)) for key, said in refused]
        return [Refused(key, e) for key, e in found if not isinstance(e, NotFoundError)]

    def _delete_each(self, keys: Sequence[str]) -> list[Refused]:
        refused = []
        for key in keys:
            try:
                self.change("delete", key, "DeleteObject", self.at(key))
            except NotFoundError as error:
                if error.hint is not None:  # the bucket, not the key
                    raise
            except StorageError as error:
                if len(keys) == 1:
                    raise
                refused.append(Refused(key, error))
        return refused

    def _refusal(self, key: str, said: Said) -> CkptfsError:
        return answered(replace(self._asked("delete", key), changes=True), said)

    # -- uploads -----------------------------------------------------------------------

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        del part_bytes
        wanted = self.at(key)
        if self._adds_crc32("begin upload", key):
            wanted["ChecksumAlgorithm"] = "CRC32"
        answer = self.change("begin upload", key, "CreateMultipartUpload", wanted)
        return S3Upload(self, key, answer["UploadId"])

    def resume_upload(self, key: str) -> Upload | None:
        """As ``ObjectClient.resume_upload``; None too where it may not look (s3:ListBucketMultipartUploads,
        s3:ListMultipartUploadParts).
        """
        found: list[S3Upload] = []
        try:
            for pending in self.list_uploads(key):
                if pending.key == key:
                    parts = self._parts(key, pending.upload_id)
                    found.append(S3Upload(self, key, pending.upload_id, parts))
        except (AccessError, UnsupportedError) as error:
            _log.info("what was left of %s is not looked for: %s", key, error)
        return max(found, key=lambda upload: upload.held_bytes, default=None)

    def _parts(self, key: str, upload_id: str) -> dict[int, Held]:
        wanted = self.at(key) | {"UploadId": upload_id}
        held: dict[int, Held] = {}
        try:
            for page in self._pages("list parts", key, "ListParts", wanted, _NEXT_PARTS):
                for item in page.get("Parts", ()):
                    crc32 = item.get("ChecksumCRC32")
                    held[int(item["PartNumber"]) - 1] = Held(int(item["Size"]), item["ETag"], crc32)
        except NotFoundError:
            return {}  # completed or aborted meanwhile
        return held

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        wanted = {"Bucket": self._bucket, "Prefix": prefix}
        pages = self._pages("list uploads", prefix, "ListMultipartUploads", wanted, _NEXT_UPLOADS)
        try:
            for page in pages:
                for item in page.get("Uploads", ()):
                    age_s = _age_s(page, item["Initiated"])
                    yield PendingUpload(item["Key"], item["UploadId"], age_s)
        except UnsupportedError as error:
            _log.info("unfinished uploads stay: %s", error)

    def abort_pending(self, upload: PendingUpload) -> None:
        self.abort(upload.key, upload.upload_id)

    def abort(self, key: str, upload_id: str) -> None:
        wanted = self.at(key) | {"UploadId": upload_id}
        try:
            self.change("abort upload", key, "AbortMultipartUpload", wanted)
        except NotFoundError:
            return

    # -- versions ----------------------------------------------------------------------

    def versions(self, prefix: str) -> Versions | None:
        """What noncurrent versions below ``prefix`` keep, or None where the bucket keeps none.

        Needs s3:ListBucketVersions; one request per 1000 versions.
        """
        wanted = {"Bucket": self._bucket, "Prefix": prefix}
        try:
            return summed(
                self._pages("list versions", prefix, "ListObjectVersions", wanted, _NEXT_VERSIONS)
            )
        except UnsupportedError:
            return None

    def bucket_rules(self) -> BucketRules:
        def ask(operation: str) -> dict[str, Any]:
            asked = self._asked(operation, "")
            return self._say(asked, lambda: self._wire.ask(operation, {"Bucket": self._bucket}))

        return of_s3(ask)

    def close(self) -> None:
        self._wire.forget()

    # -- one request -------------------------------------------------------------------

    def _pages(
        self, action: str, prefix: str, operation: str, wanted: dict[str, str], next_by: _Next
    ) -> Iterator[dict[str, Any]]:
        asked = self._asked(action, prefix)
        while True:
            now = dict(wanted)
            page = self._say(asked, partial(self._wire.ask, operation, now))
            yield page
            if not page.get("IsTruncated"):
                return
            wanted |= {name: page[source] for name, source in next_by.items() if source in page}

    def change(
        self,
        action: str,
        key: str,
        operation: str,
        wanted: Mapping[str, Any],
        body: Body | None = None,
    ) -> dict[str, Any]:
        asked = replace(self._asked(action, key), changes=True)
        return self._say(asked, lambda: self._wire.ask(operation, wanted, body))

    def _say(self, asked: Asked, request: Callable[[], T]) -> T:
        """The answer, or a typed error that no exception of a library hangs on."""
        failure: Exception
        try:
            return request()
        except CkptfsError:
            raise
        except Short as error:
            failure = (
                _Surplus()
                if error.surplus
                else IntegrityError(
                    f"{asked.action} failed: the object ends before the bytes that were asked for",
                    uri=asked.uri,
                )
            )
        except Exception as error:  # noqa: BLE001 - the edge: whatever a library raises becomes typed
            self.endpoint = self._wire.endpoint
            failure = told(replace(asked, endpoint=self.endpoint), error)
        if isinstance(failure, CredentialsError):
            # Whoever asks again shall do so with the credentials of then.
            self._wire.forget()
        raise failure

    def _asked(self, action: str, key: str) -> Asked:
        return Asked(self._dialect, action, self._root / key.strip("/"), self.endpoint)

    def at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": key}

    def _adds_crc32(self, action: str, key: str) -> bool:
        # The first question may make the client, and that may fail.
        return self._say(self._asked(action, key), lambda: self._wire.adds_crc32)

    def checksum(self, action: str, key: str, body: Body) -> dict[str, str]:
        return {"ChecksumCRC32": body.crc32()} if self._adds_crc32(action, key) else {}


class _Surplus(Exception):  # noqa: N818 - a finding, never seen outside
    """More bytes than asked for: the server ignored the range."""


_Next = Mapping[str, str]
_NEXT_KEYS: _Next = {"ContinuationToken": "NextContinuationToken"}
_NEXT_UPLOADS: _Next = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
_NEXT_PARTS: _Next = {"PartNumberMarker": "NextPartNumberMarker"}
_NEXT_VERSIONS: _Next = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}


def _said_of_key(item: Mapping[str, str]) -> Said:
    # A batch answers 200 with a code for each key; which status it would have is not told.
    return Said(0, item.get("Code", ""), item.get("Message", ""))


def _folder(keys: Sequence[str]) -> str:
    return keys[0].rpartition("/")[0] if keys else ""


def _age_s(page: Mapping[str, Any], began: Any) -> float:
    """By the server's clock. Where it does not tell its time, an upload is new: nobody aborts it."""
    date = page["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    if not date:
        return 0.0
    return max(0.0, float((parsedate_to_datetime(date) - began).total_seconds()))
