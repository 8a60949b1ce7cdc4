"""The commands that an input meets. Each returns what was loaded, or None; an error leaves it as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.place import STEP, On, Place

__all__ = ["COMMANDS", "Ended", "check_values"]


class Ended(Exception):  # noqa: N818 - no error: how a command ended
    """A command of the command line ended with this exit code."""


def _load(place: Place) -> dict[str, Any]:
    import ckptfs

    state = place.blanks()
    ckptfs.load(state, place.checkpoint)
    return state


def _restore(place: Place) -> dict[str, Any] | None:
    import ckptfs

    state = place.blanks()
    with ckptfs.CheckpointManager(place.root) as manager:
        restored = manager.restore(state)
    return None if restored is None else state


def _latest(place: Place) -> None:
    import ckptfs

    ckptfs.latest(place.root)


def _list(place: Place) -> None:
    import ckptfs

    ckptfs.list_checkpoints(place.root)


def _prepare_run(place: Place) -> None:
    import ckptfs

    with ckptfs.prepare_run(place.root, takeover="force"):
        pass


def _checkpoint_dir(place: Place) -> None:
    import ckptfs

    into = place.out / "fetched"
    with ckptfs.checkpoint_dir(place.checkpoint, mode="read", into=into) as directory:
        for path in Path(directory).rglob("*"):
            assert not path.is_symlink() or _stays(path, into), f"a link that leads out: {path}"


def _stays(path: Path, top: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(top))


def _line(*arguments: str) -> None:
    from ckptfs.cli.main import main

    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
        if code in (None, 0):
            return
        raise Ended(f"exit {code}") from None


def _command(*arguments: str) -> Callable[[Place], None]:
    """{root}, {checkpoint}, {twin} and {out} are the paths of the tree."""

    def run(place: Place) -> None:
        twin = place.base / ("stock" if place.on is On.STOCK else "twin") / STEP
        paths = {
            "root": str(place.root),
            "checkpoint": str(place.checkpoint),
            "twin": str(twin if place.on is not On.STOCK else place.base / "twin" / STEP),
            "out": str(place.out),
        }
        _line(*(argument.format(**paths) for argument in arguments))

    return run


def _export(place: Place) -> None:
    """All three formats; the first error is raised after the last."""
    first: BaseException | None = None
    for form in ("safetensors", "torch", "dcp"):
        to = place.out / f"as-{form}"
        try:
            _line("export", "--format", form, str(place.checkpoint), str(to))
        except Exception as error:  # noqa: BLE001 - raised below
            first = _worse(first, error)
    if first is not None:
        raise first


def _worse(one: BaseException | None, two: BaseException) -> BaseException:
    """An end that is no typed error shadows any that is."""
    return two if one is None or (isinstance(one, Ended) and not isinstance(two, Ended)) else one


COMMANDS: dict[str, Callable[[Place], Any]] = {
    "load": _load,
    "restore": _restore,
    "latest": _latest,
    "list": _list,
    "ls": _command("ls", "--all", "{root}"),
    "log": _command("log", "{root}"),
    "inspect": _command("inspect", "--values", "{checkpoint}"),
    "diff": _command("inspect", "--diff", "{twin}", "{checkpoint}"),
    "verify": _command("verify", "--deep", "{checkpoint}"),
    "verify-run": _command("verify", "--deep", "{root}"),
    "cp": _command("cp", "{checkpoint}", "{out}/copies/step_9"),
    "cp-run": _command("cp", "{root}", "{out}/copied-run"),
    "gc": _command("gc", "--delete", "--yes", "--older-than", "0s", "{root}"),
    "rm": _command("rm", "--yes", "{checkpoint}"),
    "export": _export,
    "prepare_run": _prepare_run,
    "checkpoint_dir": _checkpoint_dir,
}


def check_values(loaded: dict[str, Any]) -> str:
    """What is wrong with values that a load returned: "" where they are those of one step."""
    import torch

    wanted = Place.values(loaded["step"])
    for key in ("w", "b"):
        if not torch.equal(loaded["model"][key], wanted["model"][key]):
            return f"model.{key} is not what step {loaded['step']} saved"
    return "" if loaded["object"] == wanted["object"] else "object is not what was saved"
