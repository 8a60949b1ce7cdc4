"""Errors that cross torch: plain, and sure to be unpickled on the other ranks.

torch gathers what a hook raised by pickling it. An exception whose class has its own ``__init__``
pickles and does not unpickle: the coordinator dies of it and every other rank loses the connection.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator

from ckptfs.errors import CkptfsError
from ckptfs.uri import mask_credentials

__all__ = ["crossing"]


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


def _plain(error: Exception, rank: int | None) -> Exception:
    try:
        twin = pickle.loads(pickle.dumps(error))  # noqa: S301 - made on this line
    except Exception:  # noqa: BLE001 - whatever its __reduce__ raises: it does not travel
        twin = None
    if type(twin) is type(error):
        return error
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return CkptfsError(f"{kind}: {mask_credentials(str(error))}", rank=rank)
