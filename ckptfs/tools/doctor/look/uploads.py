"""Uploads in parts, request by request, on keys of this rank's own below the corner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ckptfs.errors import CkptfsError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.clients.base import Limits, ObjectClient
from ckptfs.tools.doctor.seen import Multipart, Refusal, Why

__all__ = ["client_of", "look_at_multipart"]

_PART_BYTES = 5 << 20
_TAIL = b"the last part"


def client_of(storage: Storage) -> ObjectClient | None:
    """The client of an object store; None: this place has none."""
    found = getattr(storage, "client", None)
    return found if isinstance(found, ObjectClient) else None


def look_at_multipart(storage: Storage, client: ObjectClient, rank: int) -> Multipart:
    """Begin, put two parts, complete; begin, put a part, look whether the list has it, abort."""
    part = _part_bytes(client.limits)

    def at(name: str) -> str:
        return storage.uri(f"uploads/{rank}-{name}").path.lstrip("/")

    def complete() -> None:
        key = at("completed")
        upload = client.begin_upload(key, part_bytes=part)
        with _abort_on_error(upload.abort):
            upload.put_part(0, bytes(part))
            upload.put_part(1, _TAIL)
            upload.complete()
        size_bytes = client.head(key).size_bytes
        if size_bytes != part + len(_TAIL):
            raise StorageError(f"{size_bytes} bytes stand there after {part + len(_TAIL)} were put")
        client.delete([key])

    forgets = type(client).list_uploads is ObjectClient.list_uploads
    listed = None if forgets else Refusal(Why.OTHER, "not tried: no upload could be begun")

    def look() -> None:
        if at("aborted") not in [upload.key for upload in client.list_uploads(at(""))]:
            raise StorageError("an upload that is under way is not in the list of unfinished ones")

    def abort() -> None:
        nonlocal listed
        upload = client.begin_upload(at("aborted"), part_bytes=part)
        with _abort_on_error(upload.abort):
            upload.put_part(0, bytes(part))  # a whole one: a smaller part may wait for the end
            if not forgets:
                listed = _tried(look)
        upload.abort()

    completed, aborted = _tried(complete), _tried(abort)
    return Multipart(completed, aborted, listed, forgets=forgets)


def _part_bytes(limits: Limits) -> int:
    least = max(limits.min_part_bytes, min(_PART_BYTES, limits.max_part_bytes))
    return -(-least // limits.part_multiple_bytes) * limits.part_multiple_bytes


def _tried(act: Callable[[], None]) -> Refusal | None:
    try:
        act()
    except CkptfsError as error:
        return Refusal.of(error)
    return None


@contextlib.contextmanager
def _abort_on_error(abort: Callable[[], None]) -> Iterator[None]:
    """Parts of an upload that failed, or was interrupted, are thrown away."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptfsError):
            abort()
        raise
