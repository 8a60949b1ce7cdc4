"""Which files stay in use and how the rest is cut: pure functions, and what they promise together."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptfs.commit.digests import ItemDigests
from ckptfs.commit.manifest import FileRecord
from ckptfs.dcp.incremental.reuse import Base, Cut, HeldFile, HeldItem, bundles, files_in_use
from ckptfs.storage.base import Shape
from tests.dcp.reuse_rig import Run


def tensor(name: str, size_bytes: int) -> WriteItem:
    """An item of so many bytes."""
    size = torch.Size([size_bytes])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    data = TensorWriteData(chunk, TensorProperties(torch.uint8), size)
    return WriteItem(MetadataIndex(name, torch.Size([0])), WriteItemType.TENSOR, tensor_data=data)


def leaf(name: str) -> WriteItem:
    """An object."""
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def base_of(files: dict[str, list[int]]) -> tuple[Base, dict[int, HeldItem]]:
    """A base with these files, each of items of these sizes; its items numbered through."""
    items, at = {}, 0
    for path, sizes in files.items():
        for size in sizes:
            items[at] = HeldItem(path, ItemDigests(0, size, 0, 0, ()), None, ())
            at += 1
    held = {
        path: HeldFile(FileRecord(path, sum(sizes)), FileRecord(f"{path}.x", 1))
        for path, sizes in files.items()
    }
    return Base("s", ("home",), {}, held), items


@pytest.mark.parametrize(
    ("unchanged", "stays"),
    [([0, 1, 2], True), ([0, 1], True), ([0], True), ([1, 2], True), ([1], False), ([], False)],
)
def test_a_file_stays_in_use_while_half_of_it_is_unchanged(
    unchanged: list[int], stays: bool
) -> None:
    """Half of its bytes, not of its items; exactly half is enough."""
    base, items = base_of({"a": [50, 20, 30], "b": [1000]})
    found = files_in_use(base, {n: items[n] for n in unchanged})
    assert found == ({"a": unchanged} if stays else {})


@given(st.lists(st.integers(1, 400), max_size=30), st.data())
def test_every_item_is_written_once_and_with_its_like(
    sizes: list[int], data: st.DataObject
) -> None:
    """Whatever is to be written is in exactly one file; no file mixes objects, small tensors that
    changed and small ones that did not, none but a single tensor's is larger than the bound.
    """
    items = [tensor(f"t{n}", size) for n, size in enumerate(sizes)] + [leaf("o"), leaf("p")]
    write = data.draw(st.sets(st.sampled_from(range(len(items)))))
    stable = data.draw(st.sets(st.sampled_from(range(len(items)))))
    cut = Cut(bundle_bytes=500, alone_bytes=300)
    files = bundles(items, write, stable, cut, data.draw(st.integers(1, 4)))
    assert sorted(position for file in files for position, _ in file) == sorted(write)
    for file in files:
        assert len({(items[n].type, n in stable) for n, _ in file}) == 1
        total = sum(sizes[n] for n, _ in file if n < len(sizes))
        assert total <= 500 or len(file) == 1
        assert len(file) == 1 or all(n >= len(sizes) or sizes[n] < 300 for n, _ in file)


def test_threads_have_something_to_share() -> None:
    """Four threads get four files where one would do."""
    items = [tensor(f"t{n}", 100) for n in range(8)]
    assert len(bundles(items, range(8), (), Cut(), 1)) == 1
    assert len(bundles(items, range(8), (), Cut(), 4)) == 4


def test_no_sequence_keeps_more_than_twice_alive() -> None:
    """Eighty saves in which anything may change: the files of each are at most twice its items
    (and a frame for each of these); a save after which nothing changes costs nothing.
    """
    choose = random.Random(7)
    run = Run(Shape.FILESYSTEM, Cut(6000, 4000))
    state = {f"k{n}": torch.zeros(choose.choice([50, 200, 900])) for n in range(24)}
    for step in range(80):
        for key in choose.sample(sorted(state), choose.choice([0, 1, 3, 12])):
            state[key] = state[key] + 1
        saved = run.save(f"step_{step % 3}", state)
        alive = sum(
            run.plain.stat(f"step_{step % 3}/{saved.save_id}/{entry.name}").size_bytes
            for entry in run.plain.list(f"step_{step % 3}/{saved.save_id}")
            if entry.name.endswith(".distcp")
        )
        needed = saved.total.referenced_bytes + saved.total.size_bytes
        assert alive <= 2 * needed
    assert run.save("last", state).total.size_bytes == 0
    run.bury()
