"""Links, FIFOs, devices, sparse giants and mazes in the place of files and directories."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from tests.hostile.corpus import ALL, Group, add, hostile
from tests.hostile.place import On, Place

RUN = ("prepare_run", "gc", "latest", "ls", "log", "load", "restore", "verify-run", "rm", "cp-run")
FILES = ("load", "verify", "cp", "inspect", "restore", "checkpoint_dir", "latest", "ls", "rm")

SMALL: dict[str, Callable[[Place], Path]] = {
    "metadata": lambda place: place.metadata,
    "manifest": lambda place: place.manifest,
    "sidecar": lambda place: place.sidecar,
    "data-file": lambda place: place.data_file,
    "outer-manifest": lambda place: place.checkpoint / "ckptfs.json",
    "outer-metadata": lambda place: place.checkpoint / ".metadata",
    "log-entry": lambda place: place.log(place.log_end - 1),
    "next-entry": lambda place: place.log(place.log_end),
    "hint": lambda place: place.control / "hint",
    "domain": lambda place: place.control / "domain",
    "lease": lambda place: place.control / "lease",
}


def _fifo(path: Path, place: Place) -> None:
    place.remove(path)
    os.mkfifo(path)


def _socket(path: Path, place: Place) -> None:
    place.remove(path)
    os.mknod(path, stat.S_IFSOCK | 0o644)


def _zeros(path: Path, place: Place) -> None:
    place.link(path, "/dev/zero")


def _giant(path: Path, place: Place) -> None:
    with path.open("ab") as file:
        file.truncate(20 << 30)


def _directory(path: Path, place: Place) -> None:
    place.remove(path)
    path.mkdir()


def _secret(path: Path, place: Place) -> None:
    place.link(path, place.victim / "secret.txt")


def _itself(path: Path, place: Place) -> None:
    place.link(path, path.name)


KINDS: dict[str, tuple[str, Callable[[Path, Place], None]]] = {
    "fifo": ("A FIFO, that waits for ever for who opens it, stands", _fifo),
    "socket": ("A socket stands", _socket),
    "dev-zero": ("A link to /dev/zero, that never ends, stands", _zeros),
    "sparse": ("20 GB of holes lie", _giant),
    "directory": ("A directory stands", _directory),
    "secret": ("A link to the victim's file stands", _secret),
    "loop": ("A link to itself stands", _itself),
}


def _instead(
    place: Place, where: Callable[[Place], Path], make: Callable[[Path, Place], None]
) -> None:
    make(where(place), place)


for _what, _where in SMALL.items():
    _is_control = _what in ("log-entry", "next-entry", "hint", "domain", "lease")
    for _kind, (_tries, _make) in KINDS.items():
        add(
            f"{_kind}-as-{_what}",
            f"{_tries} in the place of {_what}.",
            Group.FILES,
            partial(_instead, where=_where, make=_make),
            on=On.RUN,
            commands=RUN if _is_control else FILES,
        )

for _what in ("metadata", "data-file"):
    for _kind, (_tries, _make) in KINDS.items():
        add(
            f"stock-{_kind}-as-{_what}",
            f"{_tries} in the place of {_what} of a stock checkpoint.",
            Group.FILES,
            partial(_instead, where=SMALL[_what], make=_make),
            on=On.STOCK,
            commands=("load", "verify", "cp", "inspect", "checkpoint_dir"),
        )

# -- links where a run keeps its own ------------------------------------------------------------

CONTROL = {
    "control": "",
    "log": "log",
    "tmp": "tmp",
    "attempts": "attempts",
    "trash": "trash",
    "generation": "trash/1-86dfbd05",
    "odd-trash": "trash/Documents",
}


def _led_away(place: Place, at: str) -> None:
    place.link(place.control / at if at else place.control, place.victim)


for _what, _at in CONTROL.items():
    add(
        f"link-as-{_what}",
        f"A link to the victim's directory stands in the place of .ckptfs/{_at}.",
        Group.FILES,
        partial(_led_away, at=_at),
        on=On.RUN,
        commands=RUN,
        forged=True,
    )


@hostile(Group.FILES, on=On.RUN, commands=RUN, forged=True)
def link_as_step(place: Place) -> None:
    """The step is a link to the victim's directory, and an attempt there says that it is of the step."""
    place.link(place.checkpoint, place.victim)
    record = {"name": place.name, "base": [1, "86dfbd05"], "save_id": "Documents"}
    place.attempt("Documents", json.dumps(record).encode())


@hostile(Group.FILES, on=On.RUN, commands=(*FILES, "prepare_run"))
def link_as_data_directory(place: Place) -> None:
    """The directory of the data files was moved out and linked back."""
    away = place.base / "away"
    data = place.data
    data.rename(away)
    data.symlink_to(away)


@hostile(Group.FILES, on=On.RUN, commands=RUN)
def link_as_run(place: Place) -> None:
    """The run itself is reached through a link, which is fine."""
    away = place.base / "away"
    place.root.rename(away)
    place.root.symlink_to(away)


# -- links out of a checkpoint --------------------------------------------------------------------

_COPIERS = ("cp", "checkpoint_dir", "export", "verify", "ls", "load", "cp-run")


@hostile(
    Group.FILES, on=On.FILES, commands=("cp", "checkpoint_dir", "verify", "rm", "ls", "cp-run")
)
def directory_links_to_secret(place: Place) -> None:
    """A file of a committed directory is a link to the victim's file."""
    place.link(place.checkpoint / "config.json", place.victim / "secret.txt")


@hostile(Group.FILES, on=On.FILES, commands=("cp", "checkpoint_dir", "verify", "rm", "cp-run"))
def directory_lists_a_secret(place: Place) -> None:
    """A manifest lists config.json, a link to the victim's file, with its true size and no digest."""

    def change(record: dict[str, object]) -> None:
        files = record["files"]
        assert isinstance(files, list)
        for file in files:
            if file["path"] == "config.json":
                file["size"] = (place.victim / "secret.txt").stat().st_size
                file.pop("digest", None)
                file.pop("digests", None)

    place.link(place.checkpoint / "config.json", place.victim / "secret.txt")
    place.change_manifest(change)


@hostile(Group.FILES, on=On.STOCK, commands=("checkpoint_dir", "cp", "inspect", "verify"))
def stock_links_to_secret(place: Place) -> None:
    """A file next to a stock checkpoint is a link to the victim's file, another to its directory."""
    place.link(place.checkpoint / "config.json", place.victim / "secret.txt")
    place.link(place.checkpoint / "more", place.victim)


@hostile(Group.FILES, on=On.LOOSE, commands=("checkpoint_dir", "cp", "inspect", "verify", "rm"))
def copy_links_to_secret(place: Place) -> None:
    """A file next to a copied checkpoint is a link to the victim's file, another to its directory."""
    place.link(place.checkpoint / "config.json", place.victim / "secret.txt")
    place.link(place.checkpoint / "more", place.victim)


def _maze(top: Path) -> None:
    """2^26 paths of 27 directories and 52 links."""
    rooms = [top / f"room{n}" for n in range(27)]
    for room in rooms:
        room.mkdir(parents=True)
    for here, there in pairwise(rooms):
        (here / "left").symlink_to(Path("..") / there.name)
        (here / "right").symlink_to(Path("..") / there.name)


def _maze_beside(place: Place, at: str) -> None:
    _maze(place.checkpoint / at)


for _on in (On.RUN, On.STOCK, On.FILES):
    add(
        f"maze-in-{_on.value}",
        "27 directories and 52 links that are 2^26 paths.",
        Group.FILES,
        partial(_maze_beside, at="maze"),
        on=_on,
        commands=("inspect", "gc", "checkpoint_dir", "cp", "verify", "ls", "rm", "load"),
        forged=_on is On.FILES,
    )


@hostile(Group.FILES, on=On.RUN, commands=("gc", "prepare_run", "ls", "verify-run", "cp-run"))
def maze_in_the_control_directory(place: Place) -> None:
    """The same in the trash and in an attempt."""
    _maze(place.control / "trash" / "1-86dfbd05")
    _maze(place.control / "attempts" / "20261124T053851-aaaaaaaaaaaa")


@hostile(
    Group.FILES, on=On.RUN, commands=("gc", "ls", "list", "latest", "verify-run", "cp-run", "load")
)
def link_to_the_run_in_the_run(place: Place) -> None:
    """Links that lead up: each directory holds itself."""
    place.link(place.root / "again", ".")
    place.link(place.checkpoint / "up", "..")


@hostile(Group.FILES, on=On.RUN, commands=ALL)
def unreadable_beside(place: Place) -> None:
    """A directory next to the checkpoints that holds a FIFO, a socket and a link to nothing."""
    odd = place.root / "odd"
    odd.mkdir()
    os.mkfifo(odd / ".metadata")
    os.mkfifo(odd / "ckptfs.json")
    os.mkfifo(place.root / "step_7")
    (odd / "nothing").symlink_to("/nothing/at/all")
