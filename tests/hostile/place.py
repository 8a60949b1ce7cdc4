"""The tree that an input changes: a run, a stock checkpoint, files, and somebody else's directory next to them.

base/run/        step_1, step_2, files_2 (a directory of files), and the log
base/loose/      the same checkpoints without the log: their manifests alone vouch for them
base/stock/      step_2 as stock torch.distributed.checkpoint wrote it
base/twin/       an untouched copy of run, to compare with
base/single/     files by themselves: model.safetensors, model.pt
base/victim/     what no command may touch, nor carry away
base/out/        where commands write
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["SECRET", "STEP", "On", "Place", "picture"]

SECRET = "what nobody may carry away: 6f1dd0c2a9"  # noqa: S105 - in a file of the victim
STEP = "step_2"


class On(Enum):
    """What of the tree the commands are given."""

    RUN = "run"
    LOOSE = "loose"
    STOCK = "stock"
    FILES = "files"  # run/files_2, a checkpoint of kind directory
    SAFETENSORS = "safetensors"  # single/model.safetensors
    TORCH = "torch"  # single/model.pt


class Place:
    """One tree, and the ways to damage it. Paths are of the checkpoint that the commands are given."""

    def __init__(self, base: Path, on: On) -> None:
        self.base = base
        self.on = on
        self.root = base / {
            On.FILES: "run",
            On.SAFETENSORS: "single",
            On.TORCH: "single",
        }.get(on, on.value)
        self.name = {
            On.FILES: "files_2",
            On.SAFETENSORS: "model.safetensors",
            On.TORCH: "model.pt",
        }.get(on, STEP)
        self.victim = base / "victim"
        self.out = base / "out"
        self.canary = base / "canary"

    # -- where things are ----------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        """The directory (or file) of the checkpoint."""
        return self.root / self.name

    @property
    def control(self) -> Path:
        return self.root / ".ckptfs"

    @property
    def save_id(self) -> str:
        """Of the checkpoint; a stock one has none."""
        return next(p.name for p in self.checkpoint.iterdir() if p.name[:2] == "20" and p.is_dir())

    @property
    def data(self) -> Path:
        """Where its data files are."""
        return self.checkpoint if self.on is On.STOCK else self.checkpoint / self.save_id

    @property
    def data_file(self) -> Path:
        return self.data / "__0_0.distcp"

    @property
    def sidecar(self) -> Path:
        return self.data / "__0_0.xxh3"

    @property
    def metadata(self) -> Path:
        return self.data / ".metadata"

    @property
    def manifest(self) -> Path:
        return self.data / "ckptfs.json"

    def log(self, number: int) -> Path:
        return self.control / "log" / f"{number:08d}"

    @property
    def log_end(self) -> int:
        """The number that the next entry has."""
        return len(list((self.control / "log").iterdir()))

    # -- damage ---------------------------------------------------------------------------

    def remove(self, path: Path) -> None:
        """Whatever it is."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def link(self, path: Path, target: Path | str) -> None:
        """A symbolic link in the place of ``path``."""
        self.remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def set_metadata(self, raw: bytes) -> None:
        """These bytes are its .metadata, and whatever vouches for it vouches for them."""
        self.metadata.write_bytes(raw)
        (self.checkpoint / ".metadata").write_bytes(raw)
        self.reseal()

    def change_metadata(self, change: Callable[[Any], None]) -> None:
        """Change torch's Metadata in place."""
        metadata = pickle.loads(self.metadata.read_bytes())
        change(metadata)
        self.set_metadata(pickle.dumps(metadata))

    def change_manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the record of the manifest in place; the log vouches for the changed one."""
        record = json.loads(self.manifest.read_bytes())
        change(record)
        self.set_manifest(json.dumps(record).encode())

    def set_manifest(self, raw: bytes) -> None:
        """These bytes are its manifest, and the log vouches for them."""
        self.manifest.write_bytes(raw)
        (self.checkpoint / "ckptfs.json").write_bytes(raw)
        digest = xxhash.xxh3_128(raw).hexdigest()
        for entry in sorted((self.control / "log").glob("*")) if self.control.is_dir() else ():
            record = json.loads(entry.read_bytes())
            if record["kind"] == "seal" and record["name"] == self.name:
                entry.write_text(json.dumps({**record, "digest": digest}))

    def reseal(self) -> None:
        """Sizes and digests in the manifest, and the manifest's own in the log, are those of the files."""
        if self.on is On.STOCK:
            return

        def seal(record: dict[str, Any]) -> None:
            for file in record["files"]:
                path = self.checkpoint / file["path"]
                if path.is_file():
                    file["size"] = path.stat().st_size
                    if "digest" in file:
                        file["digest"] = xxhash.xxh3_128(path.read_bytes()).hexdigest()

        self.change_manifest(seal)

    def set_object(self, raw: bytes) -> None:
        """These bytes are the saved object ``object`` of a stock checkpoint."""
        assert self.on is On.STOCK
        at = self.data_file.stat().st_size
        with self.data_file.open("ab") as file:
            file.write(raw)

        def point(metadata: Any) -> None:
            for index, info in metadata.storage_data.items():
                if index.fqn == "object":
                    info.offset, info.length = at, len(raw)

        self.change_metadata(point)

    def append(self, record: dict[str, Any], number: int | None = None) -> None:
        """An entry behind the end of the log, or in the place of one; what it lacks comes from a real one."""
        number = self.log_end if number is None else number
        entry = {"v": 1, "id": "20261124T053851-1e3ee0d42f7cdbb0", **record}
        self.log(number).write_text(json.dumps(entry))

    def seal_record(self) -> dict[str, Any]:
        """The entry that seals the checkpoint."""
        found = [json.loads(p.read_bytes()) for p in sorted((self.control / "log").iterdir())]
        return next(e for e in found if e["kind"] == "seal" and e["name"] == self.name)

    def change_seal(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the entry that seals the checkpoint."""
        for path in sorted((self.control / "log").iterdir()):
            record = json.loads(path.read_bytes())
            if record["kind"] == "seal" and record["name"] == self.name:
                change(record)
                path.write_text(json.dumps(record))

    def attempt(self, save_id: str, record: bytes) -> Path:
        """The attempt of a dead job, that says so of itself."""
        data = self.control / "attempts" / save_id / save_id
        data.mkdir(parents=True)
        (data / "attempt.json").write_bytes(record)
        return data

    # -- the base ---------------------------------------------------------------------------

    @staticmethod
    def values(step: int) -> dict[str, Any]:
        """What step ``step`` holds: values of its own."""
        import torch

        return {
            "model": {
                "w": torch.arange(64.0).reshape(8, 8) + step,
                "b": torch.full((8,), float(step), dtype=torch.bfloat16),
            },
            "step": step,
            "object": ("text", 1, step),
        }

    @staticmethod
    def blanks() -> dict[str, Any]:
        """What a job loads into."""
        import torch

        return {
            "model": {"w": torch.zeros(8, 8), "b": torch.zeros(8, dtype=torch.bfloat16)},
            "step": 0,
            "object": (),
        }

    @classmethod
    def make(cls, base: Path) -> None:
        """The tree that every trial begins with a copy of."""
        import torch
        import torch.distributed.checkpoint as dcp
        from safetensors.torch import save_file

        import ckptfs

        run = base / "run"
        with ckptfs.prepare_run(run) as held:
            for step in (1, 2):
                ckptfs.save(cls.values(step), run / f"step_{step}", run=held)
            with ckptfs.checkpoint_dir(run / "files_2", step=2, run=held) as directory:
                Path(directory, "config.json").write_text("{}")
                Path(directory, "model.bin").write_bytes(bytes(range(256)))
        shutil.copytree(run, base / "loose", symlinks=True)
        shutil.rmtree(base / "loose" / ".ckptfs")
        shutil.copytree(run, base / "twin", symlinks=True)
        dcp.save(cls.values(2), checkpoint_id=base / "stock" / STEP, no_dist=True)
        (base / "single").mkdir()
        save_file(cls.values(2)["model"], base / "single" / "model.safetensors")
        torch.save(cls.values(2)["model"], base / "single" / "model.pt")
        (base / "out").mkdir()
        victim = base / "victim"
        (victim / "Documents" / "Documents").mkdir(parents=True)
        (victim / "secret.txt").write_text(SECRET)
        (victim / "Documents" / "thesis.txt").write_text("weeks of work")
        (victim / "Documents" / "Documents" / "attempt.json").write_text("{}")
        (victim / "20261122T101124-8d2008231d0d").write_text("named as an entry on its way")


def picture(top: Path) -> str:
    """A digest of everything below: names, kinds, modes, bytes, targets of links."""
    digest = hashlib.sha256()
    for path in sorted(top.rglob("*")):
        found = path.lstat()
        digest.update(f"{path.relative_to(top)} {found.st_mode} {found.st_mtime_ns}".encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif stat.S_ISREG(found.st_mode):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def object_bytes(value: object) -> bytes:
    """What DCP writes for an object."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
