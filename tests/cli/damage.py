"""Damaged runs, one of each kind: what the commands are shown on besides the healthy one.

    damage = DAMAGES["truncated shard"]
    hurt = damage.made(place)        a_run(place), damaged, and where to look at it now
    cli("verify", f"{hurt.uri}/{VICTIM}", *hurt.flags)

Everything is planted behind ckptfs's back: by key through ``place.storage()``, alike on a directory
and on S3. ``kinds`` says where a damage can be. The victim is ``step_20`` unless ``what`` says
otherwise: the newest training state, and pinned.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from ckptfs.commit.log.append import append, catch_up
from ckptfs.commit.log.entries import Delete
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import (
    ATTEMPTS,
    CONTROL,
    DOMAIN,
    LOG,
    MANIFEST,
    METADATA,
    PARTIAL_PREFIX,
    TMP,
    AttemptKeys,
    log_key,
)
from ckptfs.storage.base import Storage
from tests.cli.conftest import Place, a_run, state_of

__all__ = [
    "ABANDONED",
    "DAMAGES",
    "DEBRIS",
    "FOREIGN",
    "OWNED",
    "VICTIM",
    "Damage",
    "applies",
    "client_of",
    "keys_of",
    "save_id_of",
    "state_now",
]

VICTIM = "step_20"
ABANDONED = "20200102T030405-00000000dead"  # the save_id of a writer that was killed
OWNED = "CKPTFS_TEST_OWNED"  # the variable that a malicious pickle sets when it is run
FOREIGN = ("README.md", f"{VICTIM}/notes.txt", "eval/results.json", f"{CONTROL}/somebody.txt")
FAR_FUTURE = 99

_EVERYWHERE = frozenset({"file", "s3"})
_SHARD = "__0_0.distcp"
_SIDECAR = "__0_0.xxh3"
_PART_BYTES = 5 << 20
Plant = Callable[[Place], Place]


@dataclass(frozen=True)
class Damage:
    """plant: damages the run that is there, and returns where commands look now.

    what: it is, in words. on_a_run: whether ``a_run`` is made first. kinds: of places it applies to.
    """

    name: str
    plant: Plant
    what: str
    kinds: frozenset[str] = _EVERYWHERE
    on_a_run: bool = True

    def made(self, place: Place) -> Place:
        """A fresh run with this damage in it."""
        return self.plant(a_run(place) if self.on_a_run else place)


def applies(damage: Damage, place: Place) -> bool:
    """Whether there can be such a damage at such a place."""
    return place.kind in damage.kinds


# -- looking --------------------------------------------------------------------------


def save_id_of(storage: Storage, name: str) -> str:
    """Of a step that was projected."""
    return str(json.loads(storage.read(f"{name}/{MANIFEST}"))["save_id"])


def keys_of(storage: Storage, below: str = "") -> Iterator[str]:
    """Every file below a key."""
    for entry in storage.list(below):
        key = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir:
            yield from keys_of(storage, key)
        else:
            yield key


def state_now(place: Place) -> dict[str, Any]:
    """All that is there, with sizes and etags or times: equal before and after what only reads."""
    with place.storage() as storage:
        try:
            keys = list(keys_of(storage))
        except OSError as error:
            return {"": type(error).__name__}
        found: dict[str, Any] = {}
        for key in keys:
            stat, path = storage.stat(key), storage.local_path(key)
            found[key] = stat if path is None else (stat, Path(path).stat().st_mtime_ns)
        root = storage.local_path("")
        if root is not None:
            # A directory that somebody wrote to and cleaned again has another time. That of the log
            # moves a moment after an append, in the background (for NFSv3): its files tell all.
            for at, _, _ in os.walk(root):
                if not at.endswith("/" + LOG):
                    found[at] = Path(at).stat().st_mtime_ns
        return found


# -- planting -------------------------------------------------------------------------


def _data(storage: Storage, file: str, name: str = VICTIM) -> str:
    return f"{name}/{save_id_of(storage, name)}/{file}"


def _edit(file: str, change: Callable[[bytes], bytes], *, projected: bool = False) -> Plant:
    """Replace a file of the victim by a change of it."""

    def plant(place: Place) -> Place:
        with place.storage() as storage:
            key = f"{VICTIM}/{file}" if projected else _data(storage, file)
            storage.replace(key, change(storage.read(key)))
        return place

    return plant


def _drop(file: str, *, projected: bool = False) -> Plant:
    """Remove a file of the victim."""

    def plant(place: Place) -> Place:
        with place.storage() as storage:
            storage.remove(f"{VICTIM}/{file}" if projected else _data(storage, file))
        return place

    return plant


def _flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _halve(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _manifest(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **changes}, indent=1).encode()


def _future_manifest(place: Place) -> Place:
    """Without the log, or the seal's digest shows first that it was changed."""
    with place.storage() as storage:
        save_id = save_id_of(storage, VICTIM)
        newer = _manifest(min_reader_version=FAR_FUTURE, format_version=FAR_FUTURE)
        for key in (f"{VICTIM}/{MANIFEST}", f"{VICTIM}/{save_id}/{MANIFEST}"):
            storage.replace(key, newer(storage.read(key)))
    return _without_log(place)


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"import os; os.environ[{OWNED!r}] = '1'",))


def _malicious(_: bytes) -> bytes:
    return pickle.dumps(_Malicious())


def _metadata_of_another(place: Place) -> Place:
    with place.storage() as storage:
        other = storage.read(_data(storage, METADATA, "step_10"))
        storage.replace(_data(storage, METADATA), other)
    return place


def _entry(number: int, data: bytes | None) -> Plant:
    """Replace entry ``number`` of the log; None removes it."""

    def plant(place: Place) -> Place:
        with place.storage() as storage:
            if data is None:
                storage.remove(log_key(number))
            else:
                storage.replace(log_key(number), data)
        return place

    return plant


def _future_entry(place: Place) -> Place:
    record = {"v": FAR_FUTURE, "kind": "quorum", "id": "w-from-the-future", "by_host": "tomorrow"}
    with place.storage() as storage:
        end = drive(catch_up(), storage).next
        storage.make_dir(TMP)
        storage.create(log_key(end), json.dumps(record).encode() + b"\n", staging=f"{TMP}/future")
    return place


def _without_domain(place: Place) -> Place:
    with place.storage() as storage:
        storage.remove(DOMAIN)
    return place


def _abandoned(place: Place) -> Place:
    """What a writer leaves that was killed after half of its data, before any seal."""
    with place.storage() as storage:
        generation = drive(catch_up(), storage).generation
        keys = AttemptKeys(storage.capabilities.shape, "step_30", ABANDONED)
        record = {"save_id": ABANDONED, "name": "step_30", "base": list(generation)}
        for key in (keys.data, keys.attempt):
            storage.make_dir(key)
        storage.replace(keys.record, json.dumps(record).encode())
        storage.replace(f"{keys.data}/{_SHARD}", b"half" * 1024)
    return place


def _deleted(place: Place) -> Place:
    """The entry is in the log, and its writer died before the bytes went."""
    with place.storage() as storage:
        save_id = save_id_of(storage, "step_10")
        drive(
            append(lambda seen: Delete(save_id, seen.generation, "asked"), write_id="killed"),
            storage,
        )
    return place


def client_of(place: Place) -> Any:
    """boto3, in addition to ckptfs, for what no storage does."""
    import boto3
    from botocore.config import Config

    told = place.options
    return boto3.client(
        "s3",
        endpoint_url=told["endpoint_url"],
        aws_access_key_id=told["key"],
        aws_secret_access_key=told["secret"],
        config=Config(s3={"addressing_style": "path"}),
        **told["client_kwargs"],
    )


def _upload(place: Place) -> Place:
    """A multipart upload that is not completed."""
    bucket, _, prefix = place.uri.removeprefix("s3://").partition("/")
    where = {"Bucket": bucket, "Key": f"{prefix}/step_30/{ABANDONED}/{_SHARD}"}
    with contextlib.closing(client_of(place)) as client:
        begun = client.create_multipart_upload(**where)
        part = b"x" * _PART_BYTES
        client.upload_part(**where, UploadId=begun["UploadId"], PartNumber=1, Body=part)
    return place


def _leftovers(place: Place) -> Place:
    """Temporary files of writers that were killed: of the log, and of a file in the control."""
    with place.storage() as storage:
        storage.replace(f"{TMP}/20200102T030405-00000000deadbeef", b'{"kind": "seal"')
        storage.replace(f"{CONTROL}/{PARTIAL_PREFIX}0123456789abcdef", b"half a hint")
    return place


def _foreign(place: Place) -> Place:
    with place.storage() as storage:
        for key in FOREIGN:
            if "/" in key:
                storage.make_dir(key.rpartition("/")[0])
            storage.replace(key, b"somebody else's\n")
    return place


def _empty(place: Place) -> Place:
    with place.storage() as storage:
        storage.make_dir("")
    return place


def _nothing_committed(place: Place) -> Place:
    """A run that was prepared; its writer was killed in its first save."""
    with place.storage() as storage:
        for key in (ATTEMPTS, TMP, f"{CONTROL}/log"):
            storage.make_dir(key)
        storage.replace(DOMAIN, b"0123456789abcdef0123456789abcdef\n")
    return _abandoned(place)


def _nowhere(place: Place) -> Place:
    if place.kind == "s3":
        return replace(place, uri="s3://ckptfs-no-such-bucket/run")
    return replace(place, uri=f"{place.uri}/no/such/directory")


def _wrong_credentials(place: Place) -> Place:
    return replace(place, options={**place.options, "secret": "not-the-secret"})


def _without_log(place: Place) -> Place:
    """As ``cp -r run/step_*`` leaves it: the steps, and no log."""
    with place.storage() as storage:
        storage.remove_tree(CONTROL)
    return place


def _stock(place: Place) -> Place:
    """What ``torch.distributed.checkpoint`` writes by itself."""
    with tempfile.TemporaryDirectory() as here, place.storage() as storage:
        dcp.save(state_of(5), checkpoint_id=here, no_dist=True)
        storage.make_dir("step_5")
        for file in Path(here).iterdir():
            storage.replace(f"step_5/{file.name}", file.read_bytes())
    return place


def _half_copied(place: Place) -> Place:
    """As an interrupted ``cp -r`` leaves it: no log, and the last file is not there."""
    with place.storage() as storage:
        storage.remove(_data(storage, _SHARD))
    return _without_log(place)


_FILE, _S3 = frozenset({"file"}), frozenset({"s3"})

DAMAGES = {
    damage.name: damage
    for damage in (
        Damage("nothing", lambda place: place, "a healthy run"),
        Damage("truncated shard", _edit(_SHARD, _halve), "half of a data file is gone"),
        Damage("flipped bit", _edit(_SHARD, _flip), "one bit of a data file, the size is right"),
        Damage("missing shard", _drop(_SHARD), "a data file is gone"),
        Damage("missing sidecar", _drop(_SIDECAR), "the digests of a data file are gone"),
        Damage("damaged sidecar", _edit(_SIDECAR, _flip), "one bit of the digests"),
        Damage("missing manifest", _drop(MANIFEST), "the immutable ckptfs.json is gone"),
        Damage(
            "missing projected manifest",
            _drop(MANIFEST, projected=True),
            "step_20/ckptfs.json is gone; the immutable one is there",
        ),
        Damage("changed manifest", _edit(MANIFEST, _manifest(step=21)), "not what was sealed"),
        Damage("future manifest", _future_manifest, "min_reader_version 99, and no log"),
        Damage("missing metadata", _drop(METADATA), "the immutable .metadata is gone"),
        Damage(
            "missing projected metadata",
            _drop(METADATA, projected=True),
            "stock readers see no checkpoint; ours is whole",
        ),
        Damage("garbage metadata", _edit(METADATA, lambda _: b"garbage"), "no pickle"),
        Damage("malicious metadata", _edit(METADATA, _malicious), "a pickle that runs code"),
        Damage("metadata of another save", _metadata_of_another, "the .metadata of step_10"),
        Damage("garbage entry", _entry(2, b"garbage\n"), "log entry 2 is no JSON"),
        Damage("future entry", _future_entry, "an entry of a kind that nobody knows yet"),
        Damage("missing entry", _entry(2, None), "log entry 2, step_20's seal: a gap"),
        Damage("missing domain", _without_domain, ".ckptfs/domain is gone"),
        Damage("abandoned attempt", _abandoned, "a writer was killed in step_30"),
        Damage("deleted save", _deleted, "step_10 is deleted, its bytes are there"),
        Damage("orphaned upload", _upload, "a multipart upload that nobody completes", _S3),
        Damage("leftovers", _leftovers, "temporary files of killed writers", _FILE),
        Damage("foreign files", _foreign, "files of somebody else in every place"),
        Damage("empty run", _empty, "a directory with nothing in it", on_a_run=False),
        Damage("nothing committed", _nothing_committed, "only an attempt", on_a_run=False),
        Damage("nowhere", _nowhere, "a directory, a bucket that does not exist", on_a_run=False),
        Damage("wrong credentials", _wrong_credentials, "a secret that is not the secret", _S3),
        Damage("stock", _stock, "a plain torch.distributed.checkpoint in step_5", on_a_run=False),
        Damage("copied without its log", _without_log, "cp -r of the steps: valid by themselves"),
        Damage("half copied", _half_copied, "cp -r that was interrupted: a data file is missing"),
    )
}

# What a dead writer leaves: ``gc`` finds these, and finds nothing in the others.
DEBRIS = (
    "abandoned attempt",
    "deleted save",
    "orphaned upload",
    "leftovers",
    "nothing committed",
)
