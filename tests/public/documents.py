"""Fields of every ``--json`` document, as the commands print them on a small run in a directory.

    ls places[].checkpoints[].age_s      one field of one command

Keys that are data (metrics of a user, versions of what is installed) are ``*``. A document of an error
is the same for every command.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import ckptfs
from ckptfs.cli.main import main

__all__ = ["documents", "fields"]

# Below these, keys are data, or depend on the machine.
_DATA = {
    "inspect metrics",
    "bench run result.versions",
    "bench run result.machine",
    "doctor findings[].data",
}


def fields() -> Iterator[str]:
    """All of them, each once, in alphabetical order."""
    with tempfile.TemporaryDirectory() as directory:
        found = {
            f"{command} {path}"
            for command, document in documents(directory)
            for path in _paths(command, "", document)
        }
    yield from sorted(found)


def _paths(command: str, where: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if f"{command} {where}" in _DATA:
                yield f"{where}.*"
            else:
                path = f"{where}.{key}".lstrip(".")
                yield path
                # An error is one document, wherever it is.
                yield from () if key == "error" and where else _paths(command, path, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(command, f"{where}[]", inner)


def _run(*arguments: object) -> Any:
    """The document of one command, run as the console script runs it."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main([*(str(argument) for argument in arguments), "--json"])
    return json.loads(out.getvalue())


def _stream(*arguments: object) -> Iterator[Any]:
    """The documents of a command that prints one on each line."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main([*(str(argument) for argument in arguments), "--json"])
    yield from map(json.loads, out.getvalue().splitlines())


def documents(directory: str) -> Iterator[tuple[str, Any]]:
    """Each command with a document that it printed, of runs below an empty directory."""
    run, other = f"{directory}/runs/llm", f"{directory}/copy"
    _fill(run)
    step = f"{run}/step_20"
    calls: list[tuple[object, ...]] = [
        ("ls", f"{directory}/runs"),
        ("ls", run, "-a"),
        ("ls", step, "--files"),
        ("log", run),
        ("latest", run, "--max-age", "1h"),
        ("inspect", step, "--values"),
        ("inspect", f"{run}/step_30"),
        ("verify", step, "--deep"),
        ("cp", run, other),
        ("pin", step),
        ("unpin", step),
        ("export", step, f"{directory}/safetensors", "--format", "safetensors"),
        ("export", step, f"{directory}/one.pt", "--format", "torch"),
        ("export", step, f"{directory}/dcp", "--format", "dcp"),
        ("rm", f"{run}/weights_20", "--yes"),
        ("doctor", run, "--size", "1MiB"),
    ]
    for call in calls:
        yield str(call[0]), _run(*call)
    for document in _stream("watch", run, "--from", "0", "--until-end"):
        yield "watch", document
    with ckptfs.checkpoint_dir(f"{run}/export_1") as path:
        Path(path, "config.json").write_text("{}")
    yield "inspect", _run("inspect", f"{run}/export_1")
    yield "inspect OTHER", _run("inspect", f"{run}/step_10", step, "--norms")
    yield from _of_debris(run)
    yield from _of_damage(run, step)
    yield from _of_bench(directory)
    yield "error", {"error": _run("ls", f"{directory}/none/at/all")["error"]}


def _fill(run: str) -> None:
    weights = torch.arange(64.0)
    state: dict[str, Any] = {
        "model": {"w": weights, "b": weights.to(torch.bfloat16)},
        "loader": {"position": 3},
    }
    with ckptfs.CheckpointManager(run, keep_latest=4, per_rank=["loader.*"]) as manager:
        for step in (5, 10, 20):
            manager.save(step, state, {"loss": 1.0 / step})
        manager.save(20, {"model": state["model"]}, kind="weights")
        manager.delete(5)
        ticket = manager.begin(30, ["actor", "critic"])
        ticket.commit([ckptfs.save(state["model"], ticket.part(part)) for part in ticket.parts])
    state["model"]["w"] = weights + 1
    ckptfs.save(state, f"{run}/step_10", if_exists="replace")


def _of_debris(run: str) -> Iterator[tuple[str, Any]]:
    """What a dead job leaves, looked at and removed; without attempt.json it stays."""
    save_id = "20200101T000000-0123456789ab"
    data = Path(run, ".ckptfs", "attempts", save_id, save_id)
    data.mkdir(parents=True)
    data.joinpath("__0_0.distcp").write_bytes(b"half")
    yield "gc", _run("gc", run)
    yield "gc", _run("gc", run, "--delete", "--yes", "--older-than", "0s")


def _of_damage(run: str, step: str) -> Iterator[tuple[str, Any]]:
    """A checkpoint with a flipped bit and without a file, and a log with a gap."""
    data = next(Path(step).rglob("*.distcp"))
    held = bytearray(data.read_bytes())
    held[len(held) // 2] ^= 1
    data.write_bytes(held)
    yield "verify", _run("verify", step, "--deep")
    data.unlink()
    yield "verify", _run("verify", step)
    yield "verify", _run("verify", run)
    min(Path(run, ".ckptfs", "log").glob("0*")).unlink()
    for command in ("ls", "log"):
        yield command, _run(command, run)


def _of_bench(directory: str) -> Iterator[tuple[str, Any]]:
    file = f"{directory}/a.json"
    told = ("--params", "20K", "--rounds", "1", "-e", "ckptfs,raw", "--out", file)
    yield "bench run", _run("bench", f"{directory}/bench", *told)
    yield "bench compare", _run("bench", "compare", file, file)
    yield "bench report", _run("bench", "report", file, "--out", f"{directory}/report")
