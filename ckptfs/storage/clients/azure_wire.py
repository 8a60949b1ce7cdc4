"""One request to Azure Blob Storage: signed by the Azure SDK, spelled and sent once by us.

    Wire.ask("put", Request("PUT", uri, key, headers, query, body), take) --> take(Answer)

The pipeline is azure-core's with one policy, the login's; it has no retries (they are ours), no
redirects and no logging. Requests run in the calling thread: what is sent goes from the caller's
buffer to the socket, what comes goes from the socket into it. One pipeline per process: a fork
opens its own. Proxies and REQUESTS_CA_BUNDLE are those of the environment.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import requests
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import AzureError, ClientAuthenticationError
from azure.core.pipeline import Pipeline
from azure.core.pipeline.policies import AzureSasCredentialPolicy, BearerTokenCredentialPolicy
from azure.core.pipeline.transport import RequestsTransport
from azure.core.rest import HttpRequest
from azure.storage.blob import BlobServiceClient
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from ckptfs.errors import CkptfsError
from ckptfs.storage.clients.azure_failures import AZURE, Refusal, no_token, refused
from ckptfs.storage.clients.azure_identity import SCOPE, identity_of
from ckptfs.storage.clients.azure_login import Anonymous, Sas, SharedKey
from ckptfs.storage.clients.azure_options import Account
from ckptfs.storage.clients.base import Buffer
from ckptfs.storage.clients.failures import Asked, unanswered
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.uri import Uri

__all__ = ["Answer", "Request", "Wire", "content_md5"]

T = TypeVar("T")

# Of November 2023: everything used here is older, and emulators and sovereign clouds have it.
_VERSION: Final = "2023-11-03"
_PIECE_BYTES: Final = (
    1 << 20
)  # one send: the timeout counts per piece, so a slow line is no silence
_READ_BYTES: Final = 256 << 10
_CONNECTIONS: Final = 256
_FIRST_ERROR: Final = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """A success: its headers, and a response whose body is still to be read."""

    status: int
    headers: Mapping[str, str]
    response: Any

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes."""
        return iter(self.response.iter_raw())

    def body(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces())


@dataclass(frozen=True, slots=True)
class Request:
    """One request: of a blob, or (key None) of the container. uri: what its errors name."""

    method: str
    uri: Uri
    key: str | None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Buffer | None = None


class Wire:
    """One container, reached over one pool of connections. Thread-safe; opened at first use."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._lock = ProcessLock()
        self._pid = os.getpid()
        self._pipeline: Any = None
        self._session: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"account": self.account}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["account"])  # type: ignore[misc]

    def ask(self, action: str, request: Request, take: Callable[[Answer], T]) -> T:
        """One try: what ``take`` makes of the answer. It may read the body; what breaks there is a
        failure of the request.

        Raises the errors of ``ckptfs.storage.clients.base``, outside of any except block: a
        library's exception may hold the URL, and with it a SAS.
        """
        changes = request.method not in ("GET", "HEAD")
        asks = not request.headers.keys().isdisjoint(("If-Match", "If-None-Match"))
        asked = Asked(AZURE, action, request.uri, self.account.endpoint, changes, changes and asks)
        try:
            response = self._sent(request)
            try:
                if response.status_code < _FIRST_ERROR:
                    return take(Answer(response.status_code, response.headers, response))
                failure = refused(asked, self._told(response))
            finally:
                response.close()
        except CkptfsError:
            raise
        except ClientAuthenticationError as error:
            failure = no_token(asked, error)
        except (AzureError, OSError) as error:
            failure = unanswered(asked, error)
        raise failure

    def close(self) -> None:
        """Let the connections go; the next request opens others."""
        with self._lock:
            session, self._pipeline, self._session = self._session, None, None
        if session is not None and self._pid == os.getpid():
            session.close()

    # -- inside ------------------------------------------------------------------------

    def _sent(self, request: Request) -> Any:
        headers = {"x-ms-version": _VERSION, "x-ms-date": formatdate(usegmt=True)}
        # What comes is taken as it is, so nothing may be packed on the way.
        headers |= {"Accept-Encoding": "identity", **request.headers}
        content: Any = b""
        if request.body is not None:
            content = _Pieces(request.body)
            headers["Content-Length"] = str(len(content))
            # Named, because a signature covers it: left out, requests would add one of its own.
            headers.setdefault("Content-Type", "application/octet-stream")
        url = self._url(request.key, request.query)
        # An empty iterable would be sent in chunks, without a length.
        found = HttpRequest(request.method, url, headers=headers, content=content or b"")
        return self._opened().run(found, stream=True).http_response

    def _url(self, key: str | None, query: Mapping[str, str]) -> str:
        path = quote(self.account.container, safe="$")
        if key is not None:
            path += "/" + quote(key, safe="~/")
        asked = urlencode(query, quote_via=quote)
        return f"{self.account.endpoint}/{path}" + (f"?{asked}" if asked else "")

    def _told(self, response: Any) -> Refusal:
        text = response.read().decode(errors="replace")
        login = self.account.login
        return Refusal(
            response.status_code,
            response.headers.get("x-ms-error-code") or _between(text, "Code"),
            _between(text, "Message").partition("\n")[0],
            response.headers.get("Date"),
            login.text if isinstance(login, Sas) else None,
            self.account.container,
        )

    def _opened(self) -> Any:
        with self._lock:
            if self._pid != os.getpid():
                # A fork: the sockets are the parent's.
                self._pid, self._pipeline, self._session = os.getpid(), None, None
            if self._pipeline is None:
                self._session = _session()
                transport = RequestsTransport(
                    session=self._session,
                    connection_timeout=self.account.times.connect_s,
                    read_timeout=self.account.times.request_s,
                    connection_data_block_size=_READ_BYTES,
                )
                self._pipeline = Pipeline(transport, policies=_policies(self.account))
            return self._pipeline


class _Pieces:
    """A buffer as the pieces in which it is sent; nothing is copied. Falsy when empty."""

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data).cast("B")

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._view), _PIECE_BYTES):
            yield self._view[start : start + _PIECE_BYTES]


def content_md5(data: Buffer) -> str:
    """The header by which the service refuses bytes that changed on their way."""
    digest = hashlib.md5(memoryview(data).cast("B"), usedforsecurity=False)
    return base64.b64encode(digest.digest()).decode()


def _session() -> requests.Session:
    session = requests.Session()
    # Else a line of ~/.netrc would replace the signature by a password.
    session.auth = _signed_already
    # total=False: no retry at all, and no exception for a status.
    once = Retry(total=False, redirect=False, raise_on_status=False)
    adapter = HTTPAdapter(pool_connections=4, pool_maxsize=_CONNECTIONS, max_retries=once)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def _signed_already(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _policies(account: Account) -> list[Any]:
    match account.login:
        case SharedKey(name, key):
            named = {"account_name": name, "account_key": key}
            with BlobServiceClient(account.endpoint, credential=named) as client:
                # The SDK's own signature of a request is the client's credential.
                return [client.credential]
        case Sas(token):
            given = AzureSasCredential(token) if isinstance(token, str) else token
            return [AzureSasCredentialPolicy(given)]
        case Anonymous():
            return []
        case login:
            return [BearerTokenCredentialPolicy(identity_of(login), SCOPE)]


def _between(text: str, tag: str) -> str:
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
