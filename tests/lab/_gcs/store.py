"""What a bucket holds and what a generation is; no HTTP here.

    Store.put(bucket, key, draft, Conditions)   checks, then replaces: one step under one lock
    Store.get / delete / keys                   Conditions again; absent is a RefusedError
    Store.uploads                               of both kinds, until completed or aborted

Generations only ever grow, across the whole store and across deletions. Every refusal is a
``RefusedError``, which the JSON and the XML side spell each in their own way.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum

import google_crc32c

__all__ = [
    "ANY",
    "Blob",
    "Bucket",
    "Conditions",
    "Draft",
    "RefusedError",
    "Store",
    "Upload",
    "Why",
    "crc32c_of",
    "md5_of",
]


class Why(Enum):
    """Refusals: HTTP status, the JSON API's reason, the XML API's code."""

    BAD = (400, "invalid", "InvalidArgument")
    DIGEST = (400, "invalid", "BadDigest")
    RANGE_OF_UPLOAD = (400, "badRequest", "InvalidArgument")
    SMALL_PART = (400, "invalid", "EntityTooSmall")
    PART = (400, "invalid", "InvalidPart")
    ORDER = (400, "invalid", "InvalidPartOrder")
    TOKEN = (401, "authError", "AuthenticationRequired")
    ANONYMOUS = (401, "required", "AccessDenied")
    FORBIDDEN = (403, "forbidden", "AccessDenied")
    HELD = (403, "retentionPolicyNotMet", "ObjectUnderActiveHold")
    NO_BUCKET = (404, "notFound", "NoSuchBucket")
    NO_KEY = (404, "notFound", "NoSuchKey")
    NO_UPLOAD = (404, "notFound", "NoSuchUpload")
    NO_API = (404, "notFound", "NotFound")
    TAKEN = (409, "conflict", "BucketNameUnavailable")
    GONE = (410, "uploadBrokenConnection", "NoSuchUpload")
    CONDITION = (412, "conditionNotMet", "PreconditionFailed")
    RANGE = (416, "requestedRangeNotSatisfiable", "InvalidRange")
    SLOW_DOWN = (429, "rateLimitExceeded", "SlowDown")
    BACKEND = (500, "backendError", "InternalError")
    UNAVAILABLE = (503, "backendError", "ServiceUnavailable")


class RefusedError(Exception):
    """The request is answered with an error; nothing changed."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why
        self.message = message


class UnchangedError(Exception):
    """A read with an ifGenerationNotMatch or ifMetagenerationNotMatch that does not hold: 304."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Preconditions on what is under the key now; generation 0 is "nothing"."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    def check(self, live: Blob | None, *, reading: bool) -> None:
        """RefusedError with 412 (or UnchangedError, for the negative ones of a read), or nothing."""
        generation = live.generation if live else 0
        wrong = self.generation not in (None, generation) or (
            self.metageneration is not None
            and (live is None or live.metageneration != self.metageneration)
        )
        same = self.not_generation == generation or (
            live is not None and self.not_metageneration == live.metageneration
        )
        if same and reading and not wrong:
            raise UnchangedError
        if wrong or same:
            raise RefusedError(
                Why.CONDITION, "At least one of the pre-conditions you specified did not hold."
            )


ANY = Conditions()


@dataclass(frozen=True, slots=True)
class Draft:
    """An object that somebody wants: bytes and settings (JSON names); checksums that were given."""

    data: bytes
    settings: dict[str, object] = field(default_factory=dict)
    crc32c: str | None = None
    md5: str | None = None
    composed: bool = False


@dataclass(frozen=True, slots=True)
class Blob:
    """One generation of one object. md5 is None for what was put together from parts."""

    key: str
    data: bytes
    settings: dict[str, object]
    generation: int
    metageneration: int
    created: datetime
    crc32c: str
    md5: str | None
    etag: str


@dataclass(slots=True)
class Upload:
    """One resumable session (``data``) or one multipart upload (``parts``)."""

    id: str
    bucket: str
    key: str
    settings: dict[str, object]
    conditions: Conditions = ANY
    crc32c: str | None = None
    md5: str | None = None
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    data: bytearray = field(default_factory=bytearray)
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    done: Blob | None = None


@dataclass(slots=True)
class Bucket:
    """Keys, what they were (if ``versioning``), and holds that forbid to touch some."""

    name: str
    versioning: bool = False
    live: dict[str, Blob] = field(default_factory=dict)
    noncurrent: dict[tuple[str, int], Blob] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


class Store:
    """All buckets. Every method is one step under one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buckets: dict[str, Bucket] = {}
        self.resumable: dict[str, Upload] = {}
        self.multipart: dict[str, Upload] = {}
        self._last = itertools.count(time.time_ns() // 1000)

    def make_bucket(self, name: str, *, versioning: bool = False) -> Bucket:
        """A new, empty bucket."""
        with self.lock:
            if name in self.buckets:
                raise RefusedError(
                    Why.TAKEN, "Your previous request to create the named bucket exists."
                )
            return self.buckets.setdefault(name, Bucket(name, versioning))

    def bucket(self, name: str) -> Bucket:
        """The bucket of that name."""
        with self.lock:
            if name not in self.buckets:
                raise RefusedError(Why.NO_BUCKET, "The specified bucket does not exist.")
            return self.buckets[name]

    def get(
        self, bucket: str, key: str, *, generation: int | None = None, conditions: Conditions = ANY
    ) -> Blob:
        """The live object, or the one of that generation where it is kept."""
        with self.lock:
            found = self.bucket(bucket).live.get(key)
            if generation is not None and (found is None or found.generation != generation):
                found = self.bucket(bucket).noncurrent.get((key, generation))
            conditions.check(found, reading=True)
            if found is None:
                raise RefusedError(Why.NO_KEY, f"No such object: {bucket}/{key}")
            return found

    def put(self, bucket: str, key: str, draft: Draft, conditions: Conditions = ANY) -> Blob:
        """Check everything, then let the new generation stand there, in one step."""
        crc32c, md5 = crc32c_of(draft.data), md5_of(draft.data)
        _check_digest("CRC32C", draft.crc32c, crc32c)
        _check_digest("MD5 hash", draft.md5, md5)
        with self.lock:
            place = self.bucket(bucket)
            conditions.check(place.live.get(key), reading=False)
            self._refuse_held(place, key)
            generation = next(self._last)
            self._archive(place, key)
            place.live[key] = made = Blob(
                key=key,
                data=draft.data,
                settings=draft.settings,
                generation=generation,
                metageneration=1,
                created=datetime.now(UTC),
                crc32c=crc32c,
                md5=None if draft.composed else md5,
                etag=f"C{generation:x}" if draft.composed else base64.b64decode(md5).hex(),
            )
            return made

    def delete(
        self, bucket: str, key: str, *, generation: int | None = None, conditions: Conditions = ANY
    ) -> None:
        """Remove what is there."""
        with self.lock:
            place = self.bucket(bucket)
            live = place.live.get(key)
            if generation is not None and (live is None or live.generation != generation):
                if place.noncurrent.pop((key, generation), None) is None:
                    raise RefusedError(Why.NO_KEY, f"No such object: {bucket}/{key}")
                return
            if live is None:
                raise RefusedError(Why.NO_KEY, f"No such object: {bucket}/{key}")
            conditions.check(live, reading=False)
            self._refuse_held(place, key)
            self._archive(place, key)
            del place.live[key]

    def keys(self, bucket: str, prefix: str, delimiter: str) -> Iterator[tuple[str, Blob | None]]:
        """(name, its object) and (common prefix, None), in the order of their names."""
        with self.lock:
            found = sorted(self.bucket(bucket).live.items())
        last = None
        for key, blob in found:
            if not key.startswith(prefix):
                continue
            head, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if slash and (common := prefix + head + slash) != last:
                last = common
                yield common, None
            elif not slash:
                yield key, blob

    def begin(self, table: dict[str, Upload], upload: Upload) -> Upload:
        """Remember a new upload; its bucket must exist."""
        with self.lock:
            self.bucket(upload.bucket)
            table[upload.id] = upload
            return upload

    @staticmethod
    def _archive(place: Bucket, key: str) -> None:
        if place.versioning and (old := place.live.get(key)):
            place.noncurrent[key, old.generation] = old

    @staticmethod
    def _refuse_held(place: Bucket, key: str) -> None:
        if key in place.held and key in place.live:
            raise RefusedError(
                Why.HELD,
                f"Object '{place.name}/{key}' is under active Event-Based hold and cannot be "
                "deleted or overwritten until the hold is removed.",
            )


def new_id() -> str:
    """An upload's id."""
    return uuid.uuid4().hex


def crc32c_of(data: bytes) -> str:
    """Base64 of the big-endian CRC32C, as the API writes it."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5_of(data: bytes) -> str:
    """Base64 of the MD5, as the API writes it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _check_digest(name: str, told: str | None, found: str) -> None:
    if told is not None and told != found:
        raise RefusedError(
            Why.DIGEST, f'Provided {name} "{told}" doesn\'t match calculated {name} "{found}".'
        )
