"""Files on their way: written under a name that no request ever had, then renamed to their key.

    put       CREATE name, bytes, closed
    publish   RENAME name -> key, over what is there        exclude   RENAME, refused if it is taken

Why a fresh name for every try: a delayed CREATE of an earlier one would truncate the very file that
is being renamed. It makes the rename decisive, too: nobody else moves that name, so the rename can be
repeated until it is answered, and if the source is gone after an answer was lost, that answer said yes.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ckptfs.errors import AnswerLostError, NotFoundError, StorageError, TransientError
from ckptfs.storage.hdfs_client import HdfsClient, Over, Sink
from ckptfs.storage.retry import NOT_DONE, Retrier
from ckptfs.uri import Uri

__all__ = ["PARTIAL", "Aside", "beside"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

PARTIAL: Final = ".partial-"
_LATE_TRIES: Final = 5
_LATE_S: Final = 0.1
_MISSING_PARENTS: Final = 5  # others may remove an empty directory as often as we make it


def beside(path: str) -> str:
    """How names of files on their way to ``path`` begin."""
    return f"{path.rpartition('/')[0]}/{PARTIAL}"


class Aside:
    """One client with the policy of its retries."""

    def __init__(self, client: HdfsClient, retrier: Retrier) -> None:
        self.client = client
        self._retrier = retrier

    def again(self, request: Callable[[], T]) -> T:
        """A request of which two are as good as one, until it is answered or the time is over."""
        return self._retrier.run(request)

    def put(self, prefix: str, data: bytes) -> str:
        """A new closed file; its path."""
        return self.again(lambda: self._put(f"{prefix}{secrets.token_hex(8)}", data))

    def _put(self, path: str, data: bytes) -> str:
        try:
            self.client.put(path, data)
        except BaseException as error:
            self.drop(path, late=isinstance(error, TransientError))
            raise
        return path

    def begin(self, prefix: str, tried: list[str]) -> Sink:
        """A new file to be streamed; every path that was tried is added, the last is the file's."""

        def begin() -> Sink:
            tried.append(f"{prefix}{secrets.token_hex(8)}")
            return self.client.begin(tried[-1])

        return self._retrier.run(begin, after=NOT_DONE)

    def exclude(self, mine: str, target: str, uri: Uri) -> None:
        """Give ``mine`` the key ``target``, which nobody has. AlreadyExistsError; AnswerLostError."""
        self._rename(mine, target, Over.REFUSE, uri)

    def publish(self, mine: str, target: str, uri: Uri) -> None:
        """Give ``mine`` the key ``target``; where that surely failed, ``mine`` is gone."""
        try:
            self._rename(mine, target, Over.REPLACE, uri)
        except AnswerLostError:
            raise  # it may yet happen
        except BaseException:
            self.drop(mine)
            raise

    def _rename(self, mine: str, target: str, over: Over, uri: Uri) -> None:
        lost = False

        def rename() -> None:
            nonlocal lost
            try:
                self.client.rename(mine, target, over)
            except AnswerLostError:
                lost = True
                raise

        for _ in range(_MISSING_PARENTS):
            try:
                self.again(rename)
                return
            except NotFoundError:
                if not self._is_there(mine):
                    if lost:
                        return
                    raise TransientError(
                        "the temporary file is gone: somebody removed it", uri=uri
                    ) from None
            self.again(lambda: self.client.make_dirs(target.rpartition("/")[0] or "/"))
        raise TransientError("the key's directory is removed as often as it is made", uri=uri)

    def _is_there(self, path: str) -> bool:
        try:
            self.again(lambda: self.client.status(path))
        except NotFoundError:
            return False
        return True

    def drop(self, path: str, *, late: bool = False) -> None:
        """Delete a temporary file; ``late``: a request that broke off may make it only now."""
        for turn in range(_LATE_TRIES if late else 1):
            if turn:
                time.sleep(_LATE_S)
            try:
                if self.client.delete(path, recursive=False):
                    return
            except StorageError as error:
                logger.info("left behind until it is swept: %s (%s)", path, error)
                return
