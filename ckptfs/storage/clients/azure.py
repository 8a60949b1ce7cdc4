"""Azure Blob Storage through the libraries that adlfs brings, with adlfs's options.

    get, get_range    GET [x-ms-range, If-Match]          head       HEAD
    put               PUT BlockBlob, If-None-Match or If-Match       at most 5000 MiB
    upload            PUT ?comp=block ... PUT ?comp=blocklist        50,000 blocks of 4000 MiB
    list_keys         GET ?comp=list, 5000 names a page   delete     DELETE, several at once

adlfs itself is not in the way: its filesystem retries, splits downloads and copies what it sends.
``azure_options`` reads its options as it does; ``azure_wire`` sends one request, once.

A blob that is being uploaded is invisible, and blocks that nobody committed are dropped by the
service a week later: so ``abort`` sends nothing, and there are no pending uploads to sweep. A
Content-MD5 goes with all data (``validate_content=False`` spares its CPU second per 600 MB); the
service refuses what does not match. Hierarchical namespaces: directories appear by themselves below
the keys that are written; no listing shows them as keys, no request here makes or removes one.
"""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from ckptfs.errors import (
    CkptfsError,
    IntegrityError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptfs.storage.clients.azure_failures import LIMITS
from ckptfs.storage.clients.azure_options import resolve
from ckptfs.storage.clients.azure_wire import Answer, Request, Wire, content_md5
from ckptfs.storage.clients.base import (
    ALWAYS,
    Always,
    Buffer,
    Condition,
    Conditions,
    Head,
    IfAbsent,
    IfMatch,
    Listed,
    ObjectClient,
    Refused,
    Upload,
    check_size,
)
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["AzureClient", "open_client"]

_DELETES: Final = 16  # under way at once
_PAGE_NAMES: Final = 5000  # the most that the service gives at once
_PARTIAL: Final = 206


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> AzureClient:
    """The client of one container; no I/O. UriError names an option that is unknown or clashes."""
    return AzureClient(uri, Wire(resolve(uri, options, times)))


class AzureClient(ObjectClient):
    """One container. Picklable, with its credentials."""

    limits = LIMITS
    conditions = Conditions(if_absent=True, if_match=True)
    copies_parts = False  # they go from the caller's buffer to the socket

    def __init__(self, root: Uri, wire: Wire) -> None:
        self.endpoint = wire.account.endpoint
        self._root = root
        self._account = wire.account
        self._wire = wire

    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        uri = self._uri(key)
        request = Request("GET", uri, key, self._account.key_headers())

        def take(it: Answer) -> tuple[bytes, str | None]:
            check_size(int(it.headers.get("Content-Length") or 0), limit_bytes, uri)
            pieces, done = [], 0
            for piece in it.pieces():
                pieces.append(piece)
                done += len(piece)
                check_size(done, limit_bytes, uri)
            return b"".join(pieces), _etag(it)

        return self._wire.ask("get", request, take)

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        view, uri = out.cast("B"), self._uri(key)
        if not view:
            return
        headers = {"x-ms-range": f"bytes={offset}-{offset + len(view) - 1}"}
        headers |= self._account.key_headers()
        if etag is not None:
            headers["If-Match"] = _quoted(etag)
        request = Request("GET", uri, key, headers)
        self._wire.ask("get range", request, lambda it: _fill(view, it, uri, offset))

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        headers = {"x-ms-blob-type": "BlockBlob", **_condition(condition), **self._checksum(data)}
        headers |= self._account.storing() | self._account.key_headers()
        request = Request("PUT", self._uri(key), key, headers, body=data)
        return self._wire.ask("put", request, _etag)

    def head(self, key: str) -> Head:
        uri = self._uri(key)
        request = Request("HEAD", uri, key, self._account.key_headers())
        return self._wire.ask("head", request, lambda it: _head(it, uri))

    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[Listed]:
        query = {"restype": "container", "comp": "list", "prefix": prefix}
        query["maxresults"] = str(_PAGE_NAMES)
        if delimiter:
            query["delimiter"] = "/"
        uri = self._uri(prefix.rstrip("/"))
        while True:
            page = self._wire.ask("list", Request("GET", uri, None, {}, query), Answer.body)
            found = ET.fromstring(page)  # noqa: S314 - the store that holds the user's bytes
            yield from _listed(found)
            marker = found.findtext("NextMarker")
            if not marker:
                return
            query = {**query, "marker": marker}

    def delete(self, keys: Sequence[str]) -> list[Refused]:
        if len(keys) <= 1:
            return [refused for key in keys if (refused := self._delete(key)) is not None]
        with ThreadPoolExecutor(min(_DELETES, len(keys)), "ckptfs-delete") as pool:
            return [refused for refused in pool.map(self._delete, keys) if refused is not None]

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        del part_bytes
        return _Blocks(self._wire, self._uri(key), key, self._checksum)

    def close(self) -> None:
        self._wire.close()

    # -- inside ------------------------------------------------------------------------

    def _uri(self, key: str) -> Uri:
        # Not ``/``, which takes keys below the run only, and none that a foreign program named "a//b".
        return replace(self._root, path=f"/{key}")

    def _checksum(self, data: Buffer) -> dict[str, str]:
        return {} if self._account.md5 is False else {"Content-MD5": content_md5(data)}

    def _delete(self, key: str) -> Refused | None:
        try:
            self._wire.ask("delete", Request("DELETE", self._uri(key), key), _nothing)
            return None
        except NotFoundError as error:
            # Absent is success; a missing container is a typo, and hides what stands elsewhere.
            return Refused(key, error) if "container" in error.message else None
        except CkptfsError as error:
            return Refused(key, error)


class _Blocks(Upload):
    """Blocks staged under one name. Their ids begin with this upload's own nonce: the service keeps
    one list of uncommitted blocks per name, and two writers must not commit each other's.
    """

    def __init__(self, wire: Wire, uri: Uri, key: str, checksum: Any) -> None:
        self._wire = wire
        self._uri = uri
        self._key = key
        self._checksum = checksum
        self._nonce = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._staged: set[int] = set()

    def put_part(self, number: int, data: Buffer) -> None:
        account = self._wire.account
        scope = {n: v for n, v in account.stored.items() if n == "x-ms-encryption-scope"}
        headers = {**scope, **account.key_headers(), **self._checksum(data)}
        query = {"comp": "block", "blockid": self._id(number)}
        request = Request("PUT", self._uri, self._key, headers, query, data)
        self._wire.ask("put part", request, _nothing)
        with self._lock:
            self._staged.add(number)

    def complete(self) -> str | None:
        with self._lock:
            numbers = sorted(self._staged)
        if numbers != list(range(len(numbers))):
            raise StorageError("complete upload failed: a part is missing", uri=self._uri)
        # Latest, not Uncommitted: a repeat after a lost answer finds the blocks committed.
        listed = "".join(f"<Latest>{self._id(number)}</Latest>" for number in numbers)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        account = self._wire.account
        headers = {
            "x-ms-blob-content-type": "application/octet-stream",
            **account.storing(),
            **account.key_headers(),
            **self._checksum(body),
            "Content-Type": "application/xml",
        }
        request = Request("PUT", self._uri, self._key, headers, {"comp": "blocklist"}, body)
        return self._wire.ask("complete upload", request, _etag)

    def abort(self) -> None:
        """Nothing to send: see the module's docstring."""

    def _id(self, number: int) -> str:
        return base64.b64encode(f"{self._nonce}{number:08d}".encode()).decode()


def _condition(condition: Condition) -> dict[str, str]:
    match condition:
        case Always():
            return {}
        case IfAbsent():
            return {"If-None-Match": "*"}
        case IfMatch(etag):
            return {"If-Match": _quoted(etag)}


def _quoted(etag: str) -> str:
    """With its quotes: listings and some tools tell it without, and the header wants them."""
    return etag if etag.startswith(('"', "W/")) else f'"{etag}"'


def _etag(answer: Answer) -> str | None:
    return answer.headers.get("ETag")


def _nothing(answer: Answer) -> None:
    del answer


def _head(answer: Answer, uri: Uri) -> Head:
    if _is_directory(answer.headers):
        raise NotFoundError("head failed: a directory, not a blob", uri=uri)
    modified = answer.headers.get("Last-Modified")
    modified_s = None if modified is None else parsedate_to_datetime(modified).timestamp()
    return Head(int(answer.headers["Content-Length"]), _etag(answer), modified_s)


def _is_directory(headers: Mapping[str, str]) -> bool:
    # A directory of a hierarchical namespace, or the marker by which other tools pretend one.
    marks = (headers.get("x-ms-resource-type"), headers.get("x-ms-meta-hdi_isfolder"))
    return any((mark or "").lower() in ("directory", "true") for mark in marks)


def _fill(view: memoryview, answer: Answer, uri: Uri, offset: int) -> None:
    at = 0
    coming = int(answer.headers["Content-Length"])
    if coming != len(view) or (answer.status != _PARTIAL and offset):
        raise IntegrityError(
            f"the object ends at byte {offset + coming}, {offset + len(view)} were asked for",
            uri=uri,
        )
    for piece in answer.pieces():
        view[at : at + len(piece)] = piece
        at += len(piece)
    if at != len(view):
        raise TransientError(f"get range failed: {at} of {len(view)} bytes came", uri=uri)


def _listed(page: ET.Element) -> Iterator[Listed]:
    for item in page.iterfind("Blobs/*"):
        name = item.find("Name")
        if name is None or name.text is None:
            continue
        # Names that XML cannot hold come percent-encoded, and say so.
        key = unquote(name.text) if name.get("Encoded") == "true" else name.text
        if item.tag == "BlobPrefix":
            yield Listed(key, is_prefix=True)
        elif item.findtext("Properties/ResourceType") != "directory":
            yield Listed(key, int(item.findtext("Properties/Content-Length") or 0))
