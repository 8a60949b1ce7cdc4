"""A projected file taken away by a removal, and put back where it was another's. Filesystems.

    take_projected   move step_N/.metadata to the trash, look at it there, unlink it or put it back
    put_back         the second half: of a file that lies in the trash, also for the next owner

``.metadata`` and ``ckptfs.json`` are moved by a name that every save of the step has. Between the look
that finds the old save's and the rename, another process of the same generation may project a newer
save, or stock torch may save there: without the second look that file is gone for good.

The way back is a link. It never replaces what has come to stand there meanwhile, and it fails once a
newer owner took the trash away, who then puts the file back himself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptfs.commit.fold import LogState
from ckptfs.commit.foreign import names_save, saves_named
from ckptfs.commit.layout import MANIFEST, METADATA, staging_key
from ckptfs.commit.log import catch_up
from ckptfs.commit.ops import (
    Create,
    Link,
    MakeDir,
    Pause,
    Program,
    Read,
    Remove,
    Rename,
    StatOf,
    Sync,
)
from ckptfs.commit.pieces import part_name
from ckptfs.errors import AlreadyExistsError, NotFoundError, UnsupportedError

__all__ = ["names_it", "put_back", "put_back_all", "take_projected"]


def names_it(key: str, save_id: str) -> Program[bool]:
    """Whether the file that stands under a projected name is this save's."""
    try:
        data: bytes = yield Read(key)
    except NotFoundError:
        return False
    return _is_of(key, data, save_id)


def take_projected(key: str, save_id: str, trash: str) -> Program[None]:
    """Take a projected file away if it names this save; what is another's stays, or goes back."""
    moved = f"{trash}/{save_id}.{key.rpartition('/')[2]}"
    # An earlier try of ours may have failed between its rename and its look.
    yield from put_back(moved, key, save_id)
    if not (yield from names_it(key, save_id)):
        return
    try:
        yield Rename(key, moved)
    except NotFoundError:
        return  # gone already, or a newer owner took our trash away: not ours any more
    yield from put_back(moved, key, save_id)


def put_back(moved: str, key: str, save_id: str) -> Program[None]:
    """Unlink what lies in the trash if it is this save's; else give it back the name that it had."""
    try:
        data: bytes = yield Read(moved)
    except NotFoundError:
        return
    if not _is_of(key, data, save_id):
        yield from _link_back(moved, key, data)
        # While it lay in the trash its own remover did not find it under its name.
        state = yield from catch_up()
        for other in _named(key, data, state):
            if state.save(other).deleted:
                yield from take_projected(key, other, moved.rpartition("/")[0])
    yield Remove(moved)


def put_back_all(trash: str, names: Iterable[str], state: LogState) -> Program[None]:
    """For the next owner: what a remover that died or stalls has in its trash, of which these are the
    names. One that goes on finds nothing there any more.
    """
    for name in names:
        for piece in (METADATA, MANIFEST):
            save_id = name.removesuffix(f".{piece}")
            home = _home_of(save_id, state) if save_id != name else None
            if home is not None:
                yield from put_back(f"{trash}/{name}", f"{home}/{piece}", save_id)


def _home_of(save_id: str, state: LogState) -> str | None:
    """The directory that a save, or a part of one, is projected to."""
    save = state.save(save_id)
    if save.seal is not None:
        return save.seal.name
    if save.part is not None:
        return part_name(save.part.name, save.part.part)
    seals = (other.seal for other in state.saves.living.values() if other.seal is not None)
    parts = ((seal, ref) for seal in seals for ref in seal.parts)
    return next((part_name(s.name, ref.name) for s, ref in parts if ref.save_id == save_id), None)


def _link_back(moved: str, key: str, data: bytes) -> Program[None]:
    parent, attempt = key.rpartition("/")[0], 0
    while True:
        try:
            yield Link(moved, key)
            break
        except AlreadyExistsError:
            return  # what came later stands there: that is as good
        except UnsupportedError:
            # Linux forbids links to the files of other users. A copy does not replace anything either.
            try:
                yield Create(key, data, staging=staging_key(moved.rpartition("/")[2]))
                break
            except AlreadyExistsError:
                return
        except NotFoundError:
            try:
                yield StatOf(moved)
            except NotFoundError:
                return  # a newer owner took our trash away, and puts it back
        # Somebody removed the step directory, which was empty without this file.
        yield MakeDir(parent)
        yield Pause(attempt, f"putting {key} back")
        attempt += 1
    yield Sync(parent)


def _is_of(key: str, data: bytes, save_id: str) -> bool:
    if key.endswith(MANIFEST):
        return names_save(data) == save_id
    return save_id.encode() in data  # its data paths carry the id


def _named(key: str, data: bytes, state: LogState) -> tuple[str, ...]:
    if key.endswith(MANIFEST):
        save_id = names_save(data)
        return () if save_id is None else (save_id,)
    return tuple(sorted(saves_named(data, state)))
