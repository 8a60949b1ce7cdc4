"""Bad input to a load: each a typed error that names URI, file, key and rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.manifest import DomainRecord, FileRecord, Manifest
from ckptfs.dcp.loading import who_holds
from ckptfs.dcp.read.data_file import Verify, verify_file
from ckptfs.errors import IncompleteCheckpointError, IntegrityError, ManifestError, StateError
from ckptfs.storage.registry import open_storage
from ckptfs.testing.memory_object_store import STORES
from tests.dcp.fake_ranks import load, our_save, source, stock_save

DATA = "save-1/__0_0.distcp"
SIDECAR = "save-1/__0_0.xxh3"


def build(_: int) -> dict[str, Any]:
    """A tensor of several blocks, an object, a small tensor."""
    return {"w": torch.arange(600_000.0), "leaf": {"text": "x" * 100}, "s": torch.ones(4)}


def blank(_: int) -> dict[str, Any]:
    """The same without values."""
    return {"w": torch.zeros(600_000), "leaf": {"text": ""}, "s": torch.zeros(4)}


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path, by: int) -> None:
    """Take bytes off its end."""
    os.truncate(path, path.stat().st_size - by)


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (lambda p: flip(p / DATA, 1_500_000), IntegrityError, "of 'w', differ"),
        (lambda p: flip(p / DATA, 3000), IntegrityError, "of 'w', differ"),
        (lambda p: flip(p / DATA, 50), IntegrityError, "of 'leaf.text', differ"),
        (lambda p: cut(p / DATA, 1), IntegrityError, "truncated"),
        (lambda p: cut(p / DATA, 1 << 20), IntegrityError, "truncated"),
        (lambda p: (p / DATA).unlink(), IncompleteCheckpointError, "is missing"),
        (lambda p: (p / SIDECAR).unlink(), IncompleteCheckpointError, "digests of"),
        (lambda p: flip(p / SIDECAR, 60), ManifestError, "damaged sidecar"),
        (lambda p: cut(p / SIDECAR, 3), ManifestError, "damaged sidecar"),
    ],
    ids=[
        "bit of a large tensor",
        "bit of its first block",
        "bit of an object",
        "one byte short",
        "a MiB short",
        "data missing",
        "sidecar missing",
        "bit of the sidecar",
        "sidecar short",
    ],
)
def test_damage_is_found_and_named(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], told: str
) -> None:
    """A flipped bit, a short file, a missing one: typed, with URI, file and rank."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, build)
    damage(tmp_path)
    with pytest.raises(error, match=told) as caught:
        load(storage, 2, blank)
    text = str(caught.value)
    assert f"file://{tmp_path}/save-1/__0_0" in text
    assert "rank 0" in text


def test_the_flipped_bit_is_loaded_without_digests(tmp_path: Path) -> None:
    """The control: verify="off", and stock, take the flipped bit for data."""
    import torch.distributed.checkpoint as dcp

    storage = open_storage(tmp_path)
    our_save(storage, 1, build)
    flip(tmp_path / DATA, 1_500_000)
    [same] = load(
        storage, 1, blank, verify=Verify.OFF, view=lambda s: torch.equal(s["w"], build(0)["w"])
    )
    assert not same
    target = blank(0)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert not torch.equal(target["w"], build(0)["w"])


@pytest.mark.parametrize(
    "how", [lambda p: flip(p, 60), lambda p: p.unlink()], ids=["damaged", "missing"]
)
def test_a_lost_sidecar_is_no_obstacle_unverified(
    tmp_path: Path, how: Callable[[Path], None]
) -> None:
    """verify="off" loads the whole data without its digests, through torch.load."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, build)
    how(tmp_path / SIDECAR)
    [same] = load(
        storage, 1, blank, verify=Verify.OFF, view=lambda s: torch.equal(s["w"], build(0)["w"])
    )
    assert same


def test_only_what_is_read_is_verified(tmp_path: Path) -> None:
    """A damaged tensor that is not asked for does not hinder the others."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, build)
    flip(tmp_path / DATA, 1_500_000)
    [seen] = load(storage, 1, lambda _: {"s": torch.zeros(4)}, view=lambda s: s["s"].tolist())
    assert seen == [1.0] * 4


def test_the_whole_file_can_be_verified(tmp_path: Path) -> None:
    """Headers and footers of blobs, which a load does not read, are covered by digests too."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, build)
    assert verify_file(source(storage), DATA).items == 3
    flip(tmp_path / DATA, (tmp_path / DATA).stat().st_size - 880)
    load(storage, 1, blank)
    with pytest.raises(IntegrityError, match="differ"):
        verify_file(source(storage), DATA)


def test_digests_of_another_file_are_not_believed(tmp_path: Path) -> None:
    """A sidecar that belongs to another save is noticed."""
    storage = open_storage(tmp_path)
    our_save(storage, 1, lambda _: {"other": torch.ones(7)})
    foreign = (tmp_path / SIDECAR).read_bytes()
    our_save(storage, 1, build)
    (tmp_path / SIDECAR).write_bytes(foreign)
    with pytest.raises(IntegrityError, match="of another file"):
        load(storage, 1, blank)


def test_stock_files_that_are_cut_or_gone_are_typed(tmp_path: Path) -> None:
    """Without digests too: a short or missing stock file is ours to name."""
    stock_save(tmp_path, 1, build)
    storage = open_storage(tmp_path)
    cut(tmp_path / "__0_0.distcp", 100)
    with pytest.raises(IntegrityError, match="truncated"):
        load(storage, 1, blank)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match="missing"):
        load(storage, 1, blank)


def test_a_blob_that_is_no_tensor_is_typed(tmp_path: Path) -> None:
    """A stock file overwritten with noise: IntegrityError, not whatever torch.load raises."""
    stock_save(tmp_path, 1, build)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"\x55" * path.stat().st_size)
    with pytest.raises((IntegrityError, StateError), match=r"torch\.save wrote|does not load"):
        load(open_storage(tmp_path), 1, blank)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_need_17_an_object_is_not_executed(tmp_path: Path) -> None:
    """needs.md row 17: a stock checkpoint with an object that runs code is refused; stock runs it."""
    import torch.distributed.checkpoint as dcp

    target = str(tmp_path / "owned")
    stock_save(tmp_path / "ckpt", 1, lambda _: {"leaf": Evil(target)})
    storage = open_storage(tmp_path / "ckpt")
    with pytest.raises(StateError, match="'leaf'"):
        load(storage, 1, lambda _: {"leaf": 0})
    assert not os.path.exists(target)
    state: dict[str, Any] = {"leaf": 0}
    dcp.load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    state["leaf"].close()
    assert os.path.exists(target), "the control: stock executed it"


@pytest.mark.parametrize("missing", ["id/__2_0.distcp", "id/__2_0.xxh3"])
def test_who_holds_a_file_is_known_of_its_digests_too(missing: str) -> None:
    """Which of the two a reader misses first is chance."""
    far = DomainRecord("far", (2, 3), ("host-1",))
    file = FileRecord("id/__2_0.distcp", 8, "far", "id/__2_0.xxh3")
    manifest = Manifest("id", "step_1", 1, (file,), (DomainRecord("near", (0, 1), ("h",)), far))
    found = LocatedCheckpoint("step_1", "step_1/.metadata", manifest, None)
    hint = who_holds(f"file:///run/step_1/{missing}", found)
    assert hint is not None
    assert "domain far holds it, written by ranks 2, 3 on host-1" in hint


def test_metadata_that_came_with_its_manifest_is_compared_too() -> None:
    """On an object store both are read at once: what is not as it was sealed is refused all the same."""
    STORES.drop("changed-metadata")
    run = "objects+memory://changed-metadata/run"
    done = ckptfs.save({"w": torch.ones(4)}, f"{run}/step_1")
    with closing(open_storage(run)) as storage:
        key = f"step_1/{done.save_id}/.metadata"
        data = bytearray(storage.read(key))
        data[-1] ^= 1
        storage.replace(key, bytes(data))
    with pytest.raises(IntegrityError, match="differs from what was saved"):
        ckptfs.load({"w": torch.zeros(4)}, f"{run}/step_1")
