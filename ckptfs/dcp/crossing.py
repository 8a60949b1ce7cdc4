"""What crosses between torch and the hooks of ``StorageWriter`` and ``StorageReader``.

    crossing                     errors: plain, and sure to be unpickled on the other ranks
    one_place, given, path_of, filesystem_of, is_valid
                                 where a checkpoint is, in the words of stock's readers and writers

torch gathers what a hook raised by pickling it. An exception whose class has its own ``__init__``
pickles and does not unpickle: the coordinator dies of it and every other rank loses the connection.
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

__all__ = [
    "Given",
    "crossing",
    "filesystem_of",
    "given",
    "is_valid",
    "one_place",
    "path_of",
]

Given = str | os.PathLike[str] | Uri | None  # a place as a user wrote it


@contextlib.contextmanager
def crossing(rank: int | None) -> Iterator[None]:
    """Let errors out of a hook in a form that arrives on every rank; names the rank."""
    try:
        yield
    except CkptfsError as error:
        if error.rank is None:
            error.rank = rank
        raise  # ours all pickle, whatever their constructors take
    except Exception as error:
        raise _plain(error, rank) from error


def one_place(uri: Given, path: Given) -> Given:
    """``path`` is stock's word for ``uri``. StateError: both."""
    if uri is not None and path is not None:
        raise StateError("uri and path are two words for one place", hint="give one of them")
    return path if uri is None else uri


def given(place: Given) -> str | os.PathLike[str]:
    """What the user wrote, as stock's ``checkpoint_id`` has it; the URI without its credentials where there
    are some, "" where nothing was given yet.
    """
    if place is None:
        return ""
    parsed = Uri.parse(place)
    if isinstance(place, Uri) or parsed.full != str(parsed):
        return str(parsed)
    return place


def path_of(place: Given) -> Any:
    """What a stock writer has as ``path``: a Path on a mounted filesystem, else the URI as text."""
    if place is None:
        return None
    parsed = Uri.parse(place)
    return pathlib.Path(parsed.local_path) if parsed.is_local else str(parsed)


def filesystem_of(place: Given) -> Any:
    """What a stock writer has as ``fs``. AttributeError: the place is not on a mounted filesystem."""
    if place is not None and Uri.parse(place).is_local:
        return _torch.local_filesystem()
    raise AttributeError(
        "fs is there for paths only; of other places use ckptfs.list_checkpoints and fsspec"
    )


def is_valid(checkpoint_id: Any) -> bool:
    """Whether it is a URI whose protocol some storage serves. No I/O."""
    try:
        return is_served(Uri.parse(checkpoint_id))
    except UriError:
        return False


def _plain(error: Exception, rank: int | None) -> Exception:
    try:
        twin = pickle.loads(pickle.dumps(error))  # noqa: S301 - made on this line
    except Exception:  # noqa: BLE001 - whatever its __reduce__ raises: it does not travel
        twin = None
    if type(twin) is type(error):
        return error
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return CkptfsError(f"{kind}: {mask_credentials(str(error))}", rank=rank)
