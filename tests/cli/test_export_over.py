"""``ckptfs export --overwrite``: what it replaces, and all that it leaves alone."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ckptfs.errors import AnswerLostError, StateError, UriError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.tools.export_target import open_target, refuse_place
from ckptfs.tools.exporting import ExportFormat
from ckptfs.uri import Uri
from tests.cli.conftest import Cli, Place, a_run, state_of
from tests.cli.damage import VICTIM, save_id_of, state_now

USAGE, TAKEN = 2, 6
FORMATS = [to.value for to in ExportFormat]

PEOPLES = (
    "proj/thesis.tex",
    "proj/data/set.bin",
    "hf/README.md",
    "hf/model.safetensors",
    "lora/adapter_model.safetensors",
    "nested/model.safetensors/a",
    "ranks/.metadata",
    "ranks/__0_0.distcp",
    "ranks/__1_0.distcp",
    "file",
)


def tree(root: Path) -> dict[str, str | bytes | None]:
    """Everything below: a link's target, a file's bytes, None of a directory."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(root.rglob("*"))
    }


def test_overwriting_takes_nothing_but_an_older_export(cli: Cli, place: Place) -> None:
    """The source, what is above or inside it, the log, other checkpoints, files of people, whatever
    their names, and directories: exit 2, each names why, and every byte stays.
    """
    run = a_run(Place(place.kind, f"{place.uri}/proj/run", place.options))
    source = f"{run.uri}/{VICTIM}"
    with run.storage() as storage:
        saved = save_id_of(storage, VICTIM)
    with place.storage() as storage:
        for key in PEOPLES:
            storage.make_dir(key.rpartition("/")[0])
            storage.replace(key, b"mine")
    before = state_now(place)
    for to, target, why in (
        ("safetensors", "proj", "above the source"),
        ("dcp", f"proj/run/{VICTIM}", "at the source"),
        ("safetensors", f"proj/run/{VICTIM}/hf", "inside the source"),
        ("dcp", f"proj/run/{VICTIM}/{saved}", "belongs to a run"),
        ("dcp", "proj/run/.ckptfs", "'.ckptfs' belongs to a run"),
        ("dcp", "proj/run/.ckptfs/log", "'.ckptfs' belongs to a run"),
        ("torch", "proj/run/step_10/.metadata", "inside a checkpoint"),
        ("safetensors", "hf", "wrote 'README.md'"),
        ("safetensors", "lora", "wrote 'adapter_model.safetensors'"),
        ("safetensors", "nested", "wrote 'model.safetensors'"),
        ("dcp", "ranks", "wrote '__1_0.distcp'"),
        ("torch", "hf", "a directory is there"),
        ("dcp", "file", "a file is there"),
    ):
        out = f"{place.uri}/{target}"
        ran = cli("export", source, out, "--format", to, "--overwrite", *place.flags)
        assert (ran.exit, why in ran.err) == (USAGE, True), (target, ran)
    assert cli("export", source, f"{place.uri}/hf", "--format", "dcp", *place.flags).exit == TAKEN
    assert state_now(place) == before


def test_links_are_neither_followed_nor_replaced(cli: Cli, local: Place, tmp_path: Path) -> None:
    """A link at the target, to a directory, a file, or nothing; one inside an export; one that leads
    to the source, or into the run.
    """
    a_run(local)
    source, big = f"{local.uri}/{VICTIM}", tmp_path / "big"
    big.mkdir()
    (big / "model.safetensors").write_text("mine")
    torch.save(state_of(1), tmp_path / "x.pt")
    links = {"dir": big, "one": big / "model.safetensors", "no": big / "no", "x": tmp_path / "x.pt"}
    links |= {"run": Path(local.uri)}
    for name, to in links.items():
        (tmp_path / f"to_{name}").symlink_to(to)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").symlink_to(big / "model.safetensors")
    before = tree(tmp_path)
    for name in ("to_dir", "to_one", "to_no", "hf"):
        for kind in FORMATS:
            told = [source, tmp_path / name, "--format", kind]
            assert cli("export", *told, "--overwrite").exit == USAGE, (name, kind)
            assert cli("export", *told).exit == TAKEN
    for at, out in (("to_x", "x.pt"), ("to_run/step_20", "run"), ("run/step_20", "to_run/.ckptfs")):
        into = [tmp_path / at, tmp_path / out, "--format", "torch", "--overwrite"]
        assert cli("export", *into).exit == USAGE, (at, out)
    assert tree(tmp_path) == before


def test_what_comes_while_an_export_is_written_stays(tmp_path: Path) -> None:
    """The directory was an export when it began; then somebody put a file there: StateError, and the
    old one is as it was.
    """
    old, ours = tmp_path / "hf", re.compile(r"model\.safetensors")
    old.mkdir()
    (old / "model.safetensors").write_text("old")

    def write() -> None:
        with open_target(Uri.parse(old), None, overwrite=True, ours=ours, markers=()) as made:
            made.put("model.safetensors", b"new")
            (old / "README.md").write_text("mine")

    with pytest.raises(StateError, match=r"README\.md"):
        write()
    left = {"hf": None, "hf/README.md": b"mine", "hf/model.safetensors": b"old"}
    assert tree(tmp_path) == left


BUCKET = "objects+memory://export-over"
SHARDS = re.compile(r"model(-\d+)?\.safetensors|index\.json")


@pytest.fixture
def bucket() -> Iterator[Storage]:
    """An object store of its own."""
    with contextlib.closing(open_storage(f"{BUCKET}/{uuid.uuid4().hex}", None)) as storage:
        yield storage


class BrokenError(Exception):
    """What ends an export half way."""


def write_some(
    storage: Storage,
    names: Sequence[str],
    half: str,
    *,
    done: bool = False,
    error: BaseException | None = None,
) -> None:
    """Export files of these names over what is there; it ends inside the last one, or after it."""
    place = Uri.parse(storage.uri("out").full)
    with open_target(place, None, overwrite=True, ours=SHARDS, markers=("index.json",)) as made:
        for name in names:
            made.put(name, b"new")
        with contextlib.ExitStack() as opened:
            writer = opened.enter_context(made.storage.open_write(made.key(half)))
            writer.write(b"ne")
            if not done:
                raise error or BrokenError
        raise BrokenError


def files_of(storage: Storage) -> dict[str, bytes]:
    """What is at the target."""
    return {e.name: storage.read(f"out/{e.name}") for e in storage.list("out")}


@pytest.mark.parametrize("old", [("model.safetensors",), ("model-1.safetensors", "index.json")])
@pytest.mark.parametrize(
    ("names", "half"),
    [
        ((), "model.safetensors"),
        ((), "model-1.safetensors"),
        (("model-2.safetensors",), "model-1.safetensors"),
        (("model-2.safetensors", "model-3.safetensors"), "index.json"),
    ],
)
def test_an_export_that_fails_leaves_the_old_one(
    bucket: Storage, old: tuple[str, ...], names: tuple[str, ...], half: str
) -> None:
    """On an object store, where files are replaced one by one: as long as no file of the old export was
    replaced, a failure leaves it whole, its marker too, and nothing of the new one.
    """
    for name in old:
        bucket.replace(f"out/{name}", b"old")
    with pytest.raises(BrokenError):
        write_some(bucket, names, half)
    assert files_of(bucket) == dict.fromkeys(old, b"old")


def test_an_export_that_replaced_a_file_has_no_marker(bucket: Storage) -> None:
    """Of two exports mixed no reader takes either: the old marker is gone, and so is what is only new."""
    for name in ("model-1.safetensors", "model-2.safetensors", "index.json"):
        bucket.replace(f"out/{name}", b"old")
    with pytest.raises(BrokenError):
        write_some(bucket, ("model-3.safetensors", "model-1.safetensors"), "model-4.safetensors")
    left = {"model-1.safetensors": b"new", "model-2.safetensors": b"old"}
    assert files_of(bucket) == left


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AnswerLostError("cut off")])
def test_an_export_whose_last_write_is_in_doubt_has_no_marker(
    bucket: Storage, error: BaseException
) -> None:
    """A PUT that was not waited for may still replace a file: then the old marker does not come back."""
    old = {"model-1.safetensors": b"old", "index.json": b"old"}
    for name, data in old.items():
        bucket.replace(f"out/{name}", data)
    with pytest.raises(type(error)):
        write_some(bucket, (), "model-1.safetensors", error=error)
    assert files_of(bucket) == {"model-1.safetensors": b"old"}


def test_an_export_that_fails_after_its_one_file_leaves_that(bucket: Storage) -> None:
    """A file that replaced the only one of an old export is there, whole: it is never removed."""
    bucket.replace("out/model.safetensors", b"old")
    with pytest.raises(BrokenError):
        write_some(bucket, (), "model.safetensors", done=True)
    assert files_of(bucket) == {"model.safetensors": b"ne"}


def test_places_are_compared_with_their_servers() -> None:
    """s3a is s3; a bucket of the same name on another server is another place; a root is no target."""
    at, to = Uri.parse("s3://b/run/step_1"), Uri.parse("s3a://b/run")
    one, other = {"endpoint_url": "http://one"}, {"endpoint_url": "http://other"}
    refuse_place(at, to, one, other)
    refuse_place(at, Uri.parse("s3://b/run/step_10"), one, one)
    with pytest.raises(StateError, match="above"):
        refuse_place(at, to, one, one)
    with pytest.raises(UriError):
        refuse_place(at, Uri.parse("gs://b"))
