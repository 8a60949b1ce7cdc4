"""When a rank sees what another wrote, and what the clocks say."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable
from email.utils import parsedate_to_datetime

from ckptfs.errors import NotFoundError, StaleError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.tools.doctor.look.uploads import client_of
from ckptfs.tools.doctor.seen import Arrivals, Refusal
from ckptfs.tools.doctor.settings import Clock

__all__ = ["Watcher", "place_clock"]

_DIR = "seen"
_FIRST_WAIT_S = 0.005
_LONGEST_WAIT_S = 0.25
_DATE_TIMEOUT_S = 5.0


class Watcher:
    """One rank's eyes. ``prime``, then the writers ``write``, then all ``watch``; a step between."""

    def __init__(
        self, storage: Storage, rank: int, clock: Clock, name: str, *, fresh: bool
    ) -> None:
        self._storage = storage
        self._rank = rank
        self._clock = clock
        self._name = name
        self._fresh = fresh

    def prime(self, writers: Iterable[int]) -> None:
        """Look for what is not there yet: a client that caches absence caches it now."""
        self._storage.make_dir(_DIR)
        self._storage.list(_DIR)
        for rank in writers:
            self._is_there(rank)

    def write(self) -> None:
        """This rank's file."""
        self._storage.replace(self._key(self._rank), b"seen?")

    def watch(self, writers: Iterable[int], patience_s: float) -> Arrivals:
        """Look until all writers' files are there, or patience ends."""
        begun_s, wait_s = self._clock.now_s(), _FIRST_WAIT_S
        seen: dict[int, float | None] = dict.fromkeys(writers)
        try:
            while True:
                for rank in [rank for rank, at in seen.items() if at is None]:
                    if self._is_there(rank):
                        seen[rank] = self._clock.now_s() - begun_s
                if None not in seen.values() or self._clock.now_s() - begun_s >= patience_s:
                    return Arrivals(seen)
                self._clock.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except StorageError as error:
            return Arrivals(seen, Refusal.of(error))

    def _is_there(self, rank: int) -> bool:
        try:
            if self._fresh:
                self._storage.refresh(_DIR)
            self._storage.read(self._key(rank))
        except (NotFoundError, StaleError):
            return False
        return True

    def _key(self, rank: int) -> str:
        return f"{_DIR}/{self._name}-{rank}"


def place_clock(
    storage: Storage, clock: Clock, rank: int
) -> tuple[tuple[float, float] | None, str]:
    """The place's clock against this node's, in seconds at least and at most, and who told it.

    A file's time of modification, or the Date of one HTTP request without credentials; None: nobody.
    """
    before_s = clock.wall_s()
    key = f"clock-{rank}"
    path = storage.local_path(key)
    if path is not None:
        storage.replace(key, b"now")
        after_s = clock.wall_s()
        changed_s = os.stat(path).st_mtime
        return (changed_s - after_s, changed_s - before_s), "time of a file"
    client = client_of(storage)
    told_s = None if client is None else _server_date(client.endpoint)
    if told_s is None:
        return None, ""
    # The header has whole seconds: the server's clock was anywhere within that one.
    return (told_s - clock.wall_s(), told_s + 1 - before_s), "Date of the server"


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the clock in question is this server's."""

    def redirect_request(self, *_: object) -> None:
        """None: the redirect is the answer."""


def _server_date(endpoint: str) -> float | None:
    if not endpoint.startswith(("http://", "https://")):
        return None
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - http, see above
    try:
        opener = urllib.request.build_opener(_Stay)
        with opener.open(request, timeout=_DATE_TIMEOUT_S) as answer:
            told = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        told = error.headers.get("Date")  # it refuses, and tells its time
        error.close()
    except (OSError, ValueError):
        return None
    try:
        return None if told is None else parsedate_to_datetime(told).timestamp()
    except ValueError:
        return None
