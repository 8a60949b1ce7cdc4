"""Names of files and directories in a run that no program of ours makes."""

from __future__ import annotations

import os
from functools import partial

from tests.hostile.corpus import Group, add
from tests.hostile.place import On, Place

COMMANDS = ("prepare_run", "list", "ls", "gc", "latest", "verify-run", "cp-run", "restore")

NAMES: dict[str, bytes] = {
    "escape": b"\x1b]0;owned\x07",
    "newline": b"step_9\nforged",
    "not-utf8": b"step_\xff\xfe",
    "bidi": "step_\u202e9".encode(),
    "quotes": b"step_'\"$(touch canary)`",
    "spaces": b" step_9 ",
    "backslash": b"step\\9",
    "percent": b"step_%2e%2e",
    "question": b"step_9?x=1#y",
    "colon": b"s3:",
    "long": b"n" * 255,
    "dash": b"-rf",
}
WHERE = {
    "run": b"run",
    "checkpoint": b"run/step_2",
    "attempts": b"run/.ckptfs/attempts",
    "trash": b"run/.ckptfs/trash",
    "log": b"run/.ckptfs/log",
    "tmp": b"run/.ckptfs/tmp",
}


def _directory(place: Place, where: bytes, name: bytes) -> None:
    """A directory of that name, with a .metadata in it, and a file next to it."""
    at = os.path.join(os.fsencode(place.base), where, name)
    os.makedirs(at, exist_ok=True)
    with open(os.path.join(at, b".metadata"), "wb") as file:
        file.write(b"x")


for _at, _where in WHERE.items():
    for _name, _bytes in NAMES.items():
        if _at in ("checkpoint", "log", "tmp") and _name not in ("escape", "not-utf8", "newline"):
            continue
        add(
            f"name-{_name}-in-{_at}",
            f"A directory called {_bytes[:40]!r} in the {_at}.",
            Group.NAMES,
            partial(_directory, where=_where, name=_bytes),
            on=On.RUN,
            commands=COMMANDS,
        )
