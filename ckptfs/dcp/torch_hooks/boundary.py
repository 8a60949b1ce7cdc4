"""What is shared by the hooks of ``StorageWriter`` and ``StorageReader`` towards torch.

    crossing                     errors: plain, and sure to be unpickled on the other ranks
    StockPlace, one_place        where a checkpoint is, as stock's readers and writers name it

torch pickles what a hook raised, to gather it. If an exception's class has its own ``__init__``, the
exception can be pickled but often not unpickled: the coordinator fails with that error, and every other rank
loses the connection.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

from ckptfs import _torch
from ckptfs.errors import CkptfsError, StateError, UriError
from ckptfs.storage.registry import is_served
from ckptfs.uri import Uri, mask_credentials

__all__ = ["Given", "StockPlace", "crossing", "one_place"]

Given = str | os.PathLike[str] | Uri | None  # a place as a user wrote it


@contextlib.contextmanager
def crossing(rank: int | None) -> Iterator[None]:
    """Raise errors of a hook in a form that arrives on every rank; add the rank."""
    try:
        yield
    except CkptfsError as error:
        if error.rank is None:
            error.rank = rank
        raise  # all of ckptfs's errors can be unpickled, whatever arguments their constructors take
    except Exception as error:
        raise _plain(error, rank) from error


def one_place(uri: Given, path: Given) -> Given:
    """Return ``uri``, or ``path``, which is stock's name for it. StateError if both are given."""
    if uri is not None and path is not None:
        raise StateError("uri and path name the same argument", hint="pass one of them")
    return path if uri is None else uri


class StockPlace:
    """Where a checkpoint is, with the attributes that stock's readers and writers have for it.

    A derived class keeps what its user gave in ``_uri``; None: nothing was given yet.
    """

    _uri: Given

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """What the user gave, credentials masked; "" if nothing was given yet."""
        if self._uri is None:
            return ""
        parsed = Uri.parse(self._uri)
        if isinstance(self._uri, Uri) or parsed.full != str(parsed):
            return str(parsed)
        return self._uri

    @property
    def path(self) -> Any:
        """As in stock: a Path on a mounted filesystem, else the URI; None if nothing was given yet."""
        if self._uri is None:
            return None
        parsed = Uri.parse(self._uri)
        return pathlib.Path(parsed.local_path) if parsed.is_local else str(parsed)

    @property
    def fs(self) -> Any:
        """torch's own FileSystem, for ``path``. AttributeError if ``path`` is not a Path."""
        if self._uri is not None and Uri.parse(self._uri).is_local:
            return _torch.local_filesystem()
        raise AttributeError(
            "fs works for paths only; for other places use ckptfs.list_checkpoints and fsspec"
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a URI with a protocol that some storage serves. No I/O."""
        try:
            return is_served(Uri.parse(checkpoint_id))
        except UriError:
            return False

    @property
    def _shown(self) -> str:
        """The URI, credentials masked; "" if nothing was given yet."""
        return "" if self._uri is None else str(Uri.parse(self._uri))


def _plain(error: Exception, rank: int | None) -> Exception:
    try:
        twin = pickle.loads(pickle.dumps(error))  # noqa: S301 - made on this line
    except Exception:  # noqa: BLE001 - whatever its __reduce__ raises: it cannot be sent
        twin = None
    if type(twin) is type(error):
        return error
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return CkptfsError(f"{kind}: {mask_credentials(str(error))}", rank=rank)
