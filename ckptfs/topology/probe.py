"""What one node lead does to storage to learn who shares it; all the I/O of ``domain``.

look         make .ckptfs and .ckptfs/tmp, read or make the id, leave a token
look_again   read the id, and the token that another node left
clean        remove the token
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    NotFoundError,
    StaleError,
    StateError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.base import SMALL_BYTES, Shape, Storage

__all__ = ["Answer", "Probe"]

_HOME = ".ckptfs"
_TMP = ".ckptfs/tmp"
_ID = ".ckptfs/domain"
_TRIES = 4  # repeats of one create whose answer was lost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node lead found. id is None where the id of another lead counts."""

    shape: Shape
    id: str | None
    token: str = ""
    misses: str = ""


class Probe:
    """One node lead's operations; the only I/O of this module."""

    def __init__(self, storage: Storage, *, write: bool, tokens: bool) -> None:
        self.tokens = tokens
        self._storage = storage
        self._write = write
        self._token = ""

    def look(self, shape: Shape) -> Answer:
        """Read or make the id, leave a token."""
        found = self._own_id() if self._write else self._read_id()
        if self.tokens and shape is Shape.FILESYSTEM:
            self._token = f"{_TMP}/probe-{uuid.uuid4().hex}"
            self._storage.replace(self._token, b"")
        return Answer(shape, found, token=self._token)

    def look_again(self, owners_token: str) -> Answer:
        """Read the id and the owner's token through this node's mount."""
        storage = self._storage
        misses = ""
        try:
            # Without this an NFS client answers from a directory that it cached before the probe.
            storage.refresh(_TMP)
            if owners_token != self._token:
                storage.read_small(owners_token, SMALL_BYTES)
        except (NotFoundError, StaleError) as error:
            misses = str(error)
        found = self._read_id()
        if self._write and not found:
            # It was read or made a moment ago. Believed, a view that flickers would split one shared
            # directory into two domains, each of which writes a checkpoint of its own half.
            misses = misses or f"{storage.uri(_ID)} was there, and is not any more"
        return Answer(storage.capabilities.shape, found, self._token, misses)

    def clean(self) -> None:
        """Remove the token. What stays after a crash is one empty file in tmp."""
        if self._token:
            try:
                self._storage.remove(self._token)
            except StorageError as error:
                log.warning("a probe's token stays behind: %s", error)

    def _own_id(self) -> str:
        storage = self._storage
        # Unconditional: that it is missing may be a cached answer, and mkdir of a name is fresh.
        storage.make_dir(_TMP)
        fresh = uuid.uuid4().hex
        for _ in range(_TRIES):
            found = self._read_id()
            if found:
                return found
            try:
                # The same id every time: whichever of our own repeats arrives, it is one id.
                storage.create(_ID, fresh.encode(), staging=f"{_TMP}/{fresh}")
                return fresh
            except UnsupportedError:
                # No exclusive create here: the last writer wins, and the second look of every lead
                # (see _rule) finds out who that was.
                storage.replace(_ID, fresh.encode())
            except (AlreadyExistsError, AnswerLostError):
                continue  # read what is there; ours or another's, it is the domain's id
        raise NotFoundError(
            "the domain id can be neither made nor read",
            uri=storage.uri(_ID),
            hint="`ckptfs doctor` tests what this storage does",
        )

    def _read_id(self) -> str:
        self._storage.refresh(_HOME)
        try:
            return self._storage.read_small(_ID, SMALL_BYTES).decode("ascii").strip()
        except NotFoundError as error:
            if error.of_bucket:
                raise
            return ""
        except UnicodeDecodeError:
            raise StateError("the domain id is not text", uri=self._storage.uri(_ID)) from None
