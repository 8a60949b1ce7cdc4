"""A file on its way that its process may leave half-way: the next one goes on with it.

    .partial-kept-<name>      the same name each time, beside the key; of long names their hash
    read_there  skip          whoever goes on compares what lies there, then writes behind it
    close                     cut to its size, fsync, rename over the key

One process at a time: the file is locked (flock), and a lock ends with its process, SIGKILL included.
Where there are no locks two may write, and they write the same bytes to the same places: nothing is
cut before the end, so none makes a hole in what the other has written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable

from ckptfs.errors import AlreadyExistsError, IntegrityError
from ckptfs.storage.local.files import LocalWriter
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.os_errors import translated
from ckptfs.uri import Uri

__all__ = ["KeptFile", "kept_name"]

# Everybody knows the name: a link that somebody put there would be written through.
_GO_ON = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_TAKEN = frozenset({errno.EAGAIN, errno.EACCES})
_TRIES = 4
_LONG_BYTES = 100  # a name as long as the filesystem takes (255, some 143) leaves no room for more


def kept_name(path: str) -> str:
    """Where a file lies until it is whole. Every process finds it again."""
    folder, name = os.path.split(path)
    raw = os.fsencode(name)
    if len(raw) > _LONG_BYTES:
        name = hashlib.sha256(raw).hexdigest()[:32]
    return f"{folder}/.partial-kept-{name}"


class KeptFile(LocalWriter):
    """See ``Storage.open_kept``. size_bytes: of the whole file."""

    def __init__(
        self,
        posix: Posix,
        uri: Uri,
        partial: str,
        publish: Callable[[str], None],
        size_bytes: int,
    ) -> None:
        super().__init__(posix, uri, partial, publish)
        fd = self._open_fd()
        with translated(uri, "write"):
            self.there_bytes = min(posix.fstat(fd).st_size, size_bytes)

    def read_there(self, offset: int, buffer: memoryview) -> None:
        fd, done = self._open_fd(), 0
        while done < len(buffer):
            with translated(self._uri, "read"):
                count = self._posix.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                raise IntegrityError(f"what was left ends at byte {offset + done}", uri=self._uri)
            done += count

    def skip(self, size_bytes: int) -> None:
        fd = self._open_fd()
        with translated(self._uri, "write"):
            self._posix.seek(fd, size_bytes)
        self._sent = self._behind = size_bytes

    def _opened(self) -> int:
        """The file of that name, ours alone: between open and lock another may have published it."""
        for _ in range(_TRIES):
            fd = self._posix.open(self._partial, _GO_ON)
            try:
                self._lock(fd)
                mine = self._posix.fstat(fd)
                named = self._posix.stat(self._partial, follow=False)
                if stat.S_ISREG(mine.st_mode) and mine.st_ino == named.st_ino:
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                self._posix.close(fd)
                raise
            self._posix.close(fd)
        raise self._taken()

    def _lock(self, fd: int) -> None:
        try:
            self._posix.lock(fd)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._taken() from error
            if error.errno not in _NO_LOCKS:
                raise

    def _taken(self) -> AlreadyExistsError:
        return AlreadyExistsError(
            "another process is writing this file",
            uri=self._uri,
            hint="the same copy is on its way already: wait for it",
        )

    def _finish(self, fd: int) -> None:
        if self._posix.fstat(fd).st_size > self._sent:
            self._posix.truncate(fd, self._sent)
        super()._finish(fd)

    def _empty(self, fd: int) -> None:
        """What is there stays."""

    def _discard(self) -> None:
        """What is there stays."""
