"""GCS requests of one bucket with their errors: the edge where libraries' exceptions become typed.

    Requests.json   a request of the JSON API, and its good answer
    Requests.xml    a request of the XML API, and its good answer
    Requests.sent   any answer

Which of Google's answers means what is in ``gcs_errors``; how a request goes out in ``gcs_wire``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote

from ckptfs.errors import CkptfsError, TransientError, UnsupportedError
from ckptfs.storage.clients.failures import Asked, Reason, failed
from ckptfs.storage.clients.gcs_errors import GCS, refused, said_of, told, unusable
from ckptfs.storage.clients.gcs_wire import Call, GcsWire, Reply, ShortError, UnusableError
from ckptfs.uri import Uri

__all__ = ["Requests"]

T = TypeVar("T")
_Pieces = tuple[bytes | memoryview, ...]


@dataclass(frozen=True, slots=True)
class Requests:
    """One bucket through one wire. Keys are whole keys; errors name their URI."""

    wire: GcsWire
    uri: Uri

    @property
    def bucket(self) -> str:
        """The bucket, as a component of a path."""
        return quote(self.uri.authority, safe="")

    def asked(self, action: str, key: str) -> Asked:
        """A read, as its error tells of it."""
        uri = replace(self.uri, path=f"/{key}", query="")
        return Asked(GCS, action, uri, self.wire.options.endpoint)

    def changing(self, action: str, key: str) -> Asked:
        """A change: without an answer it may have happened."""
        return replace(self.asked(action, key), changes=True)

    def json(
        self,
        asked: Asked,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        body: _Pieces | None = None,
        out: memoryview | None = None,
        check: Callable[[int], None] | None = None,
    ) -> Reply:
        """A request of the JSON API, and its good answer (of a read, its bytes in ``out``). check: raises of
        a number of bytes that is too large.
        """
        payer = self.payer(asked)
        paid = dict(query) if payer is None else {**query, "userProject": payer}
        # Bytes as they are stored: no decompression on the way, by the server or by the library.
        plain = {"Accept-Encoding": "identity", **(headers or {})}
        return self.check(
            asked, self.sent(asked, Call(method, path, paid, plain, body, out, check))
        )

    def xml(
        self,
        asked: Asked,
        method: str,
        key: str | None,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        body: _Pieces | None = None,
    ) -> Reply:
        """A request of the XML API on a key, or on the bucket, and its good answer."""
        path = f"/{self.bucket}" if key is None else f"/{self.bucket}/{quote(key, safe='')}"
        payer = self.payer(asked)
        paid = {} if payer is None else {"x-goog-user-project": payer}
        reply = self.sent(asked, Call(method, path, query, {**(headers or {}), **paid}, body))
        if reply.status < HTTPStatus.BAD_REQUEST and b"<Error>" in reply.body[:200]:
            # It took so long that 200 had been said before.
            reply = replace(reply, status=HTTPStatus.SERVICE_UNAVAILABLE)
        return self.check(asked, reply)

    def payer(self, asked: Asked) -> str | None:
        """The project that pays for requests, where it is not the bucket's."""
        return self._edge(asked, self.wire.payer)

    def sent(self, asked: Asked, call: Call) -> Reply:
        """Whatever is answered."""
        return self._edge(asked, lambda: self.wire.ask(call))

    def check(self, asked: Asked, reply: Reply) -> Reply:
        """A good answer, or its error."""
        if HTTPStatus.OK <= reply.status < HTTPStatus.MULTIPLE_CHOICES:
            return reply
        if reply.status == HTTPStatus.UNAUTHORIZED and self._edge(
            asked, lambda: self.wire.renew(reply.token)
        ):
            raise TransientError(
                f"{asked.action} failed: the token was refused, and is renewed now", uri=asked.uri
            )
        raise refused(asked, said_of(reply.status, reply.body))

    def _edge(self, asked: Asked, work: Callable[[], T]) -> T:
        """What ``work`` returns, or a typed error that no exception of a library hangs on."""
        failure: Exception
        try:
            return work()
        except CkptfsError:
            raise
        except UnusableError as error:
            failure = unusable(asked, error)
        except ShortError as error:
            failure = (
                UnsupportedError(
                    f"get failed: {asked.endpoint} does not answer ranges", uri=asked.uri
                )
                if error.surplus
                else failed(asked, Reason.SHORT)
            )
        except Exception as error:  # noqa: BLE001 - the edge: whatever a library raises becomes typed
            failure = told(asked, error)
        raise failure
