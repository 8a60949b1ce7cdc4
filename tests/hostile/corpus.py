"""The list of inputs: each one's name, what it tries, where it is, and the commands that meet it."""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from tests.hostile.place import On, Place

__all__ = [
    "ALL",
    "READERS",
    "RUNS",
    "Group",
    "Hostile",
    "Trial",
    "add",
    "hostile",
    "inputs",
    "trials",
]

HERE = Path(__file__).resolve().parent
IN_CI = 3  # of a family one input of so many meets a command in CI

# Commands that meet the bytes of one checkpoint, and those that meet a whole run.
READERS = ("load", "inspect", "verify", "export", "restore", "cp", "diff", "checkpoint_dir")
RUNS = ("latest", "prepare_run", "gc", "list", "ls", "log", "rm", "restore", "verify", "cp")
ALL = tuple(dict.fromkeys((*READERS, *RUNS)))


class Group(Enum):
    """What kind of thing is hostile."""

    PICKLES = "pickles"  # what .metadata, or an object leaf, has unpickled
    GEOMETRY = "geometry"  # what .metadata says of tensors and of places in files
    MANIFESTS = "manifests"  # ckptfs.json
    RUN_LOG = "run-log"  # entries, hint, domain, attempt.json
    FILES = "files"  # links, FIFOs, devices, sparse giants
    SAFETENSORS = "safetensors"
    TORCH_FILES = "torch-files"  # torch.save files
    SIDECARS = "sidecars"  # digests of data files
    NAMES = "names"  # of files and directories


@dataclass(frozen=True, slots=True)
class Hostile:
    """One input. forged: its values are none that anybody saved, so none are compared. by_itself: of no
    family that is made in a loop.
    """

    name: str
    tries: str
    group: Group
    on: On
    commands: tuple[str, ...]
    build: Callable[[Place], None]
    forged: bool = False
    by_itself: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """An input and a command. finding: why it does not hold yet; None: it has to."""

    input: Hostile
    command: str
    in_ci: bool
    finding: str | None

    @property
    def name(self) -> str:
        return f"{self.input.group.value}/{self.input.name}:{self.command}"


_FOUND: dict[str, Hostile] = {}


def add(
    name: str,
    tries: str,
    group: Group,
    build: Callable[[Place], None],
    *,
    on: On,
    commands: Sequence[str],
    forged: bool = False,
    by_itself: bool = False,
) -> None:
    """An input of a family that is made in a loop; its most important command comes first."""
    assert name not in _FOUND, f"two inputs are called {name}"
    _FOUND[name] = Hostile(name, tries, group, on, tuple(commands), build, forged, by_itself)


def hostile(
    group: Group, *, on: On, commands: Sequence[str], forged: bool = False
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """An input by itself: its docstring says what it tries."""

    def decorate(build: Callable[[Place], None]) -> Callable[[Place], None]:
        name = build.__name__.strip("_").replace("_", "-")
        add(
            name,
            build.__doc__ or "",
            group,
            build,
            on=on,
            commands=commands,
            forged=forged,
            by_itself=True,
        )
        return build

    return decorate


def inputs() -> dict[str, Hostile]:
    """Every input by its name."""
    for module in iter_modules([str(HERE / "inputs")]):
        import_module(f"tests.hostile.inputs.{module.name}")
    return _FOUND


def trials() -> Iterator[Trial]:
    """Every pair. In CI an input meets its first command; of large families a part does."""
    known = tomllib.loads((HERE / "known.toml").read_text())
    for one in inputs().values():
        number = zlib.crc32(one.name.encode())
        chosen = one.commands[number % len(one.commands)] if number % IN_CI == 0 else None
        if one.group is Group.FILES or one.by_itself:
            chosen = one.commands[0]
        awaited = known.get(one.name, {})
        findings = {
            command: finding for finding, commands in awaited.items() for command in commands
        }
        for command in one.commands:
            finding = findings.get(command)
            # What is known to be wrong is run by the campaign: some of it hangs.
            yield Trial(one, command, command == chosen and finding is None, finding)
