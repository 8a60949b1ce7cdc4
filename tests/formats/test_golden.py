"""Checkpoints that stock torch 2.6, 2.10, 2.13 and 2.15 wrote are opened, whatever torch is here."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptfs
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import encode_metadata
from tests.formats.state import blank, differences, flat_keys, state

HERE = Path(__file__).parent
GOLDEN = sorted(HERE.glob("torch-*"), key=lambda path: [int(n) for n in path.name[6:].split(".")])

golden = pytest.mark.parametrize("directory", GOLDEN, ids=lambda path: path.name)


def test_a_golden_checkpoint_of_each_version_is_there() -> None:
    """The four versions that the format promises are the four that are committed."""
    assert [path.name for path in GOLDEN] == [
        "torch-2.6.0",
        "torch-2.10.0",
        "torch-2.13.0",
        "torch-2.15.0",
    ]


@golden
def test_stock_checkpoint_loads_bit_exact(directory: Path) -> None:
    """A checkpoint that two ranks of stock torch wrote loads into plain tensors, bit for bit."""
    wanted = state(sharded=False)
    loaded = blank(copy.deepcopy(wanted))
    ckptfs.load(loaded, directory)
    assert differences(loaded, wanted) == []


@golden
def test_metadata_of_each_version_is_read(directory: Path) -> None:
    """The allow-list knows every class that the version pickles; nothing of the content is lost."""
    metadata = decode_metadata((directory / ".metadata").read_bytes(), directory)
    assert sorted(metadata.state_dict_metadata) == flat_keys()
    weight = metadata.state_dict_metadata["model.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert (weight.size, weight.properties.dtype) == (torch.Size([8, 4]), torch.float32)
    assert [chunk.offsets for chunk in weight.chunks] == [torch.Size([0, 0]), torch.Size([4, 0])]
    assert {info.relative_path for info in metadata.storage_data.values()} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.checkpoint_id) == directory.name  # it was pickled as a Path


@golden
def test_metadata_written_back_is_read_by_the_installed_torch(directory: Path) -> None:
    """Encoded here, even the metadata of a newer torch is a pickle that this torch unpickles."""
    metadata = decode_metadata((directory / ".metadata").read_bytes(), directory)
    back = pickle.loads(encode_metadata(metadata))
    # Not storage_meta: what 2.6 pickled of it lacks fields that today's == asks for, in stock too.
    for field in ("state_dict_metadata", "planner_data", "storage_data"):
        assert getattr(back, field) == getattr(metadata, field)


@pytest.mark.skipif(
    tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 15),
    reason="2.15 reads its own; the gap is in older ones",
)
def test_stock_torch_itself_cannot_read_a_newer_one() -> None:
    """The installed stock torch fails on the metadata of 2.15, which is why ckptfs has its own."""
    values = blank(state(sharded=False))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(values, checkpoint_id=HERE / "torch-2.15.0", no_dist=True)
    assert "too many values to unpack" in str(caught.value)
