"""Which engines take part at a target, and why others do not. No torch: asked before anything starts.

    name               on a directory                on an object store, and elsewhere
    ckptfs             ckptfs.save, ckptfs.load      the same, through obstore or the fsspec library
    ckptfs:CLIENT      -                             through that library
    dcp                FileSystemWriter, -Reader     FsspecWriter, FsspecReader
    dcp:t2, dcp:t4     with two, four threads        -
    dcp:fsspec         FsspecWriter, FsspecReader    -
    torch.save         one file a rank               the same, into fsspec's file
    safetensors        save_file, load_file          to a local file, then up; down, then from there
    s3torchconnector   -                             S3StorageWriter, S3StorageReader: S3 only
    torchsnapshot      Snapshot.take, restore        -
    torch_checkpointing  save_sync, load             -
    raw                O_DIRECT, as many bytes       multipart put and ranged get: no checkpoint
    raw:direct, raw:buffered    one way each, two threads of 16 MiB, from memory as large as the state

All of them end a load with the bytes in the tensors that were there before: as a job starts again.
What stands after a colon, and torchsnapshot and torch_checkpointing, take part only where they are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ckptfs.errors import MissingDriverError, StateError
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.uri import Uri

__all__ = ["ENGINES", "OBJECT_STORES", "ON_REQUEST", "Chosen", "Kind", "choose", "kind_of"]

OBJECT_STORES = tuple(PROTOCOLS)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine.

    Attributes:
        driver: Where its driver is, "module:factory".
        needs: What has to be installed.
        fits: Whether it makes sense at a URI.
        variants: What may be after a colon; on a directory only, but for clients of ckptfs.
    """

    driver: str
    needs: tuple[str, ...] = ()
    fits: Callable[[Uri], bool] = lambda _: True
    variants: tuple[str, ...] = ()


def _on_s3(uri: Uri) -> bool:
    return uri.protocol in ("s3", "s3a")


def _known_to_fsspec(uri: Uri) -> bool:
    return uri.is_local or uri.protocol in (*OBJECT_STORES, *_FSSPEC)


_FSSPEC = ("hdfs", "webhdfs", "abfs", "sftp", "ssh", "smb", "memory")
ENGINES = {
    "ckptfs": Kind("ckptfs.bench.engine_ckptfs:Ckptfs"),
    "dcp": Kind(
        "ckptfs.bench.engine_dcp:open_dcp", fits=_known_to_fsspec, variants=("t2", "t4", "fsspec")
    ),
    "torch.save": Kind("ckptfs.bench.engine_files:TorchSave", fits=_known_to_fsspec),
    "safetensors": Kind(
        "ckptfs.bench.engine_files:Safetensors", ("safetensors",), fits=_known_to_fsspec
    ),
    "s3torchconnector": Kind(
        "ckptfs.bench.engine_dcp:S3TorchConnector", ("s3torchconnector", "tenacity"), fits=_on_s3
    ),
    "raw": Kind(
        "ckptfs.bench.engine_raw:open_raw", fits=_known_to_fsspec, variants=("direct", "buffered")
    ),
}
# Who takes part only where it is named: a benchmark is not made longer by what happens to be installed.
ON_REQUEST = {
    "torchsnapshot": Kind(
        "ckptfs.bench.engine_peers:TorchSnapshot", ("torchsnapshot",), lambda uri: uri.is_local
    ),
    "torch_checkpointing": Kind(
        "ckptfs.bench.engine_peers:TorchCheckpointing",
        ("torch_checkpointing",),
        lambda uri: uri.is_local,
    ),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine that takes part.

    Attributes:
        name: Its name.
        variant: A client of ckptfs, or one of ``Kind.variants``; None: none of them.
    """

    name: str
    variant: str | None = None

    @property
    def label(self) -> str:
        """As it was asked for."""
        return f"{self.name}:{self.variant}" if self.variant else self.name


def choose(asked: Sequence[str], place: Uri) -> tuple[list[Chosen], list[str]]:
    """Choose who takes part at a target. Imports none of them.

    Args:
        asked: Names of engines; empty: all that fit and are installed.
        place: The target.

    Returns:
        Those that take part, and notes about why others do not. One that does not fit here is a note.

    Raises:
        StateError: There is no such engine.
        MissingDriverError: An engine that was named is not installed.
    """
    chosen, notes = [], []
    for word in asked or ENGINES:
        name, _, variant = word.partition(":")
        kind = ENGINES.get(name) or ON_REQUEST.get(name)
        if kind is None or (variant and name != "ckptfs" and variant not in kind.variants):
            raise StateError(f"no engine is called {word!r}", hint=f"one of {', '.join(_words())}")
        there = place.protocol in OBJECT_STORES if name == "ckptfs" else place.is_local
        if not kind.fits(place) or (variant and not there):
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
        chosen.append(Chosen(name, variant or None))
    return chosen, notes


def kind_of(name: str) -> Kind:
    """Return the kind of the chosen engine ``name``."""
    return ENGINES[name] if name in ENGINES else ON_REQUEST[name]


def _words() -> list[str]:
    known = {**ENGINES, **ON_REQUEST}
    return [*known, *(f"{name}:{one}" for name, kind in known.items() for one in kind.variants)]
