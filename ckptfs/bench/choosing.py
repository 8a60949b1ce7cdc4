"""Which engines take part at a target, and why others do not. No torch: asked before anything starts.

    name               on a directory                on an object store, and elsewhere
    ckptfs             ckptfs.save, ckptfs.load      the same, through obstore or the fsspec library
    ckptfs:CLIENT      -                             through that library
    dcp                FileSystemWriter, -Reader     FsspecWriter, FsspecReader
    torch.save         one file a rank               the same, into fsspec's file
    safetensors        save_file, load_file          to a local file, then up; down, then from there
    s3torchconnector   -                             S3StorageWriter, S3StorageReader: S3 only
    raw                O_DIRECT, as many bytes       multipart put and ranged get: no checkpoint

All of them end a load with the bytes in the tensors that were there before: as a job starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ckptfs.errors import MissingDriverError, StateError
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.uri import Uri

__all__ = ["ENGINES", "OBJECT_STORES", "Chosen", "Kind", "choose"]

OBJECT_STORES = tuple(PROTOCOLS)


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a driver is ("module:factory"), what it needs installed, and where it makes sense."""

    driver: str
    needs: tuple[str, ...] = ()
    fits: Callable[[Uri], bool] = lambda _: True


def _on_s3(uri: Uri) -> bool:
    return uri.protocol in ("s3", "s3a")


def _known_to_fsspec(uri: Uri) -> bool:
    return uri.is_local or uri.protocol in (*OBJECT_STORES, *_FSSPEC)


_FSSPEC = ("hdfs", "webhdfs", "abfs", "sftp", "ssh", "smb", "memory")
ENGINES = {
    "ckptfs": Kind("ckptfs.bench.engine_ckptfs:Ckptfs"),
    "dcp": Kind("ckptfs.bench.engine_dcp:open_dcp", fits=_known_to_fsspec),
    "torch.save": Kind("ckptfs.bench.engine_files:TorchSave", fits=_known_to_fsspec),
    "safetensors": Kind(
        "ckptfs.bench.engine_files:Safetensors", ("safetensors",), fits=_known_to_fsspec
    ),
    "s3torchconnector": Kind(
        "ckptfs.bench.engine_dcp:S3TorchConnector", ("s3torchconnector", "tenacity"), fits=_on_s3
    ),
    "raw": Kind("ckptfs.bench.engine_raw:open_raw", fits=_known_to_fsspec),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine that takes part. client: of ckptfs's, where it was named."""

    name: str
    client: str | None = None

    @property
    def label(self) -> str:
        """As it was asked for."""
        return f"{self.name}:{self.client}" if self.client else self.name


def choose(asked: Sequence[str], place: Uri) -> tuple[list[Chosen], list[str]]:
    """Who takes part at a target, and why others do not. Imports none of them.

    Without a word, all that fit and are installed. StateError: no such engine. MissingDriverError:
    one that was asked for by name is not installed. One that does not fit here is a note.
    """
    chosen, notes = [], []
    for word in asked or ENGINES:
        name, _, client = word.partition(":")
        kind = ENGINES.get(name)
        if kind is None or (client and name != "ckptfs"):
            raise StateError(f"no engine is called {word!r}", hint=f"one of {', '.join(ENGINES)}")
        if not kind.fits(place) or (client and place.protocol not in OBJECT_STORES):
            notes.append(f"{word} does not take part at {place}: not made for it")
            continue
        missing = [module for module in kind.needs if find_spec(module) is None]
        if missing and asked:
            raise MissingDriverError(
                f"the engine {word} needs {', '.join(missing)}",
                hint=f"pip install {' '.join(missing)}",
            )
        if missing:
            notes.append(f"{word} does not take part: {', '.join(missing)} is not installed")
            continue
        chosen.append(Chosen(name, client or None))
    return chosen, notes
