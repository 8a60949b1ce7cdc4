"""What is not hostile at all: every command does what it is for, so an error elsewhere is an answer."""

from __future__ import annotations

from tests.hostile.corpus import Group, add
from tests.hostile.place import On, Place

__all__ = ["EVERY"]

_FILE = ("inspect", "diff")
_BOTH = ("load", "inspect", "diff", "verify", "cp", "export", "checkpoint_dir")
_RUN = ("restore", "latest", "list", "ls", "log", "verify-run", "cp-run", "gc", "rm", "prepare_run")
EVERY = {
    On.RUN: (*_BOTH, *_RUN),
    On.LOOSE: (*_BOTH, "restore", "latest", "list", "ls"),
    On.STOCK: (*_BOTH, "latest", "list", "ls"),
    On.FILES: ("inspect", "verify", "cp", "checkpoint_dir", "rm"),
    On.SAFETENSORS: _FILE,
    On.TORCH: _FILE,
}


def _nothing(place: Place) -> None:
    """It stays as it is."""


for _on, _commands in EVERY.items():
    add(
        f"untouched-{_on.value}",
        "Nothing: the command does what it is for.",
        Group.NAMES,
        _nothing,
        on=_on,
        commands=_commands,
    )
