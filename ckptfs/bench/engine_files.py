"""One file a rank, written whole: torch.save and safetensors. No commit, no other rank.

On anything but a directory torch.save writes into fsspec's file, and safetensors, which writes to
paths only, into a local file that is then sent; its load fetches the file first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ckptfs.bench.engines import Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.places import fsspec_options, fsspec_uri
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State, local_of, locals_of

__all__ = ["Safetensors", "TorchSave"]


class _Files(Driver):
    """One file of each rank below the attempt."""

    ending = ""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.filesystem: Any = None
        if not self.home.place.is_local:
            import fsspec

            # Not from fsspec's cache of instances: options of another target would live on in it.
            options = fsspec_options(self.home) | {"skip_instance_cache": True}
            self.filesystem = fsspec.filesystem(_fsspec_name(self.home.place.protocol), **options)

    @property
    def durable(self) -> str:
        """What a save promises."""
        if self.filesystem is not None:
            return "every object's answer"
        return "file and directory fsynced" if self.setting.durable else "no fsync"

    def _remote(self, at: Attempt) -> str:
        uri = fsspec_uri(at.place / self._name())
        found: str = self.filesystem._strip_protocol(uri)  # noqa: SLF001 - its public spelling
        return found

    def _local(self, at: Attempt) -> str:
        return os.path.join(at.path, self._name())

    def _name(self) -> str:
        return f"rank_{self.setting.group.rank}{self.ending}"

    def _settle(self, path: str) -> None:
        if self.setting.durable:
            fsync(path)
            fsync(os.path.dirname(path))


class TorchSave(_Files):
    """torch.save, torch.load and a copy into the tensors."""

    ending = ".pt"

    def about(self) -> Engine:
        return Engine("torch.save", version_text("torch"), self.durable, "nothing")

    def save(self, state: State, at: Attempt) -> None:
        if self.filesystem is not None:
            with self.filesystem.open(self._remote(at), "wb") as file:
                torch.save(locals_of(state), file)
            return
        path = self._local(at)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(locals_of(state), path)
        self._settle(path)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        if self.filesystem is not None:
            with self.filesystem.open(self._remote(at), "rb") as file:
                found = torch.load(file, map_location="cpu", weights_only=True)
        else:
            found = torch.load(self._local(at), map_location="cpu", weights_only=True)
        copy_into(target, found)


class Safetensors(_Files):
    """save_file, load_file and a copy into the tensors."""

    ending = ".safetensors"

    def about(self) -> Engine:
        return Engine("safetensors", version_text("safetensors"), self.durable, "nothing")

    def save(self, state: State, at: Attempt) -> None:
        from safetensors.torch import save_file

        if self.filesystem is None:
            path = self._local(at)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            save_file(locals_of(state), path)
            self._settle(path)
            return
        with tempfile.TemporaryDirectory(prefix="ckptfs-bench-") as directory:
            path = os.path.join(directory, self._name())
            save_file(locals_of(state), path)
            self.filesystem.put_file(path, self._remote(at))

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        from safetensors.torch import load_file

        if self.filesystem is None:
            copy_into(target, load_file(self._local(at)))
            return
        with tempfile.TemporaryDirectory(prefix="ckptfs-bench-") as directory:
            path = os.path.join(directory, self._name())
            self.filesystem.get_file(self._remote(at), path)
            copy_into(target, load_file(path))


def copy_into(target: State, found: Mapping[str, Tensor]) -> None:
    """Every tensor's bytes into the one of its name."""
    for name, tensor in target.items():
        local_of(tensor).copy_(found[name])


def fsync(path: str) -> None:
    """A file's bytes, or a directory's names, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsspec_name(protocol: str) -> str:
    return "s3" if protocol == "s3a" else protocol
