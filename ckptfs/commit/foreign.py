"""Whose a ``.metadata`` is: of a save that this log knows, or foreign, such as one that stock torch wrote.

    is_known(name, data, state)   whether this log's saves wrote it
    saves_named(data, state)      those whose ids it carries
    names_save(data)              the save that a ``ckptfs.json`` names

A foreign ``.metadata`` is another program's checkpoint: nothing of ours replaces or removes it. Pure.
"""

from __future__ import annotations

import json
import re

from ckptfs.commit.entries import Kind
from ckptfs.commit.fold import LogState

__all__ = ["is_known", "names_save", "saves_named"]

_WORD = re.compile(rb"[\w~.-]+", re.ASCII)


def is_known(name: str, metadata: bytes, state: LogState) -> bool:
    """Whether a ``.metadata`` under that name is of a save that this log knows."""
    if saves_named(metadata, state):
        return True
    # Of a directory artifact any file is its own, also a `.metadata` that a framework wrote there.
    return any(
        save.seal is not None
        and save.seal.artifact is Kind.DIRECTORY
        and not save.gone
        and name.partition("/")[0] == save.seal.name
        for save in state.saves.values()
    )


def saves_named(metadata: bytes, state: LogState) -> frozenset[str]:
    """The saves of a log whose ids a ``.metadata`` carries, in its data paths. Nothing is unpickled."""
    words = set(_WORD.findall(metadata))
    # A pickle writes the length of a short text as one byte before it, which may look like a letter.
    words |= {word[1:] for word in words}
    return frozenset(save_id for save_id in state.saves if save_id.encode() in words)


def names_save(manifest: bytes) -> str | None:
    """The save_id that a projected ``ckptfs.json`` names, or None where it is not ours."""
    try:
        return str(json.loads(manifest)["save_id"])
    except (ValueError, KeyError, TypeError):
        return None
