"""What is on a disk before a scenario begins: log entries, saves in their step or on their way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.commit.log.entries import Body, Entry, Generation, encode_entry
from ckptfs.storage.base import Shape
from tests.model.disk import DIR, Disk, Files

__all__ = ["G1", "G2", "G2B", "G3", "committed_disk"]

G1, G2, G2B, G3 = (
    Generation(1, "x"),
    Generation(2, "y"),
    Generation(2, "z"),
    Generation(3, "w"),
)


def _entry(number: int, body: Body, writer: str = "init") -> tuple[str, bytes]:
    return f".ckptfs/log/{number:08d}", encode_entry(Entry(f"{writer}-{number}", body))


def committed_disk(
    shape: Shape,
    bodies: list[Body],
    *,
    projected: tuple[Any, ...] = (),
    waiting: tuple[Any, ...] = (),
    domain: str = "A",
    foreign: Mapping[str, bytes] | None = None,
    trash: bool = True,
) -> Disk:
    """A disk with these log entries, saves in their step, and saves still in attempts/."""
    files: Files = {}
    if shape is Shape.FILESYSTEM:
        for key in (".ckptfs", ".ckptfs/log", ".ckptfs/tmp", ".ckptfs/attempts"):
            files[key] = DIR
        if trash:
            files[".ckptfs/trash"] = files[".ckptfs/trash/1-x"] = DIR
    files |= dict(_entry(n, body) for n, body in enumerate(bodies))
    placed: dict[str, bytes] = {}
    for what in projected:
        placed |= _lying(what, what.name, domain)
    for what in waiting:
        placed |= _lying(what, f".ckptfs/attempts/{what.save_id}", domain)
    placed |= foreign or {}
    for path, data in placed.items():
        if shape is Shape.FILESYSTEM:
            parts = path.split("/")[:-1]
            files |= {"/".join(parts[: n + 1]): DIR for n in range(len(parts))}
        files[path] = data
    return Disk.of(files)


def _lying(what: Any, home: str, domain: str) -> dict[str, bytes]:
    small, path = what.small(), what.data_path(domain)
    record = getattr(what, "record", None)
    return (
        ({} if path is None else {f"{home}/{path}": what.data(domain)})
        | ({} if record is None else {f"{home}/{what.save_id}/attempt.json": record})
        | {f"{home}/{what.save_id}/{n}": data for n, data in small.items()}
        | {f"{home}/{n}": data for n, data in small.items()}
    )
