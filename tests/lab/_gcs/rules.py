"""What a test may tell the server to do to its clients, and what the server noticed of them.

rules.token         the one bearer token that is good; None: everybody is
rules.forbidden     IAM permissions that no one has ("storage.objects.list")
rules.fail(...)     the next requests of a kind are refused, after they did their work or before
rules.seen          every request, in order: what it wanted, its query, its headers
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.lab._gcs.store import RefusedError, Why
from tests.lab._gcs.wire import Request

__all__ = ["Burst", "Rules", "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One request. permission: what IAM calls it; body: what a JSON or XML one said."""

    permission: str
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Burst:
    """``left`` more failures of requests that need ``permission`` (None: of all).

    why None: the connection breaks without an answer. after: the request does its work first.
    """

    why: Why | None
    left: int
    permission: str | None = None
    after: bool = False

    def takes(self, permission: str, *, after: bool) -> bool:
        """Whether this one is hit; counts it."""
        hit = self.left > 0 and self.after == after and self.permission in (None, permission)
        self.left -= hit
        return hit


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass(slots=True)
class Rules:
    """The knobs of one server."""

    token: str | None = None
    forbidden: set[str] = field(default_factory=set)
    requester_pays: bool = False
    min_part_bytes: int = 5 << 20
    short_batches: bool = False
    token_lifetime_s: int = 3600
    seen: list[Seen] = field(default_factory=list)
    gate: threading.Event = field(default_factory=_open_gate)
    _bursts: list[Burst] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _issued: int = 0

    def fail(
        self, why: Why | None, count: int = 1, *, permission: str | None = None, after: bool = False
    ) -> None:
        """The next ``count`` requests that need ``permission`` (any) are answered with ``why``;
        None breaks the connection. ``after``: they do their work first, the answer is lost.
        """
        with self._lock:
            self._bursts.append(Burst(why, count, permission, after))

    def burst(self, permission: str, *, after: bool) -> Burst | None:
        """The failure that is due for this request."""
        with self._lock:
            return next((b for b in self._bursts if b.takes(permission, after=after)), None)

    def note(self, permission: str, request: Request) -> None:
        """Remember a request; of large bodies nothing is kept."""
        body = request.body if len(request.body) < 1 << 16 else b""
        with self._lock:
            self.seen.append(
                Seen(permission, request.method, request.path, request.query, request.headers, body)
            )

    def admit(self, request: Request, permission: str, where: str) -> None:
        """RefusedError, unless the caller has a good token and the permission."""
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        if self.token is not None and sent and (kind != "Bearer" or sent != self.token):
            raise RefusedError(Why.TOKEN, "Invalid Credentials")
        anonymous = self.token is not None and not sent
        if anonymous or permission in self.forbidden:
            who = "Anonymous caller" if anonymous else "ckptfs-test@lab.iam.gserviceaccount.com"
            raise RefusedError(
                Why.ANONYMOUS if anonymous and "/storage/v1" in request.path else Why.FORBIDDEN,
                f"{who} does not have {permission} access to the Google Cloud Storage {where}. "
                f"Permission '{permission}' denied on resource (or it may not exist).",
            )
        user = request.query.get("userProject") or request.headers.get("x-goog-user-project")
        if self.requester_pays and not user:
            raise RefusedError(
                Why.BAD, "Bucket is a requester pays bucket but no user project provided."
            )

    def issue(self) -> dict[str, Any]:
        """A new token, the only good one from now on (an OAuth token endpoint's answer)."""
        with self._lock:
            self._issued += 1
            self.token = f"issued-{self._issued}"
            return {
                "access_token": self.token,
                "expires_in": self.token_lifetime_s,
                "token_type": "Bearer",
            }
