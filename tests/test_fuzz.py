"""Every decoder of what is on storage, with valid bytes that were damaged: a value or one typed error.

JSON is in ``test_schema.py``. A short run here; more with HYPOTHESIS_MAX_EXAMPLES.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.commit.digests import decode_digests
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.pickle_scan import check_archive
from ckptfs.dcp.planning.leaves import load_leaf, serialise_leaf
from ckptfs.dcp.safetensors.safetensors_format import decode_header, decode_index, encode_index
from ckptfs.errors import CkptfsError
from ckptfs.schema import SchemaError

EXAMPLES = int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "150"))


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder and bytes that it takes."""

    valid: bytes = field(repr=False)
    decode: Callable[[bytes], object] = field(repr=False)


def _header() -> bytes:
    text = b'{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    return len(text).to_bytes(8, "little") + text


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """Each with what ckptfs and stock torch write."""
    place = tmp_path_factory.mktemp("fuzz")
    leaf = {"a": [1, (2.5, None)], "t": torch.arange(3), "s": {1, 2}}
    state = {"w": torch.arange(300_000.0), "e": torch.zeros(0), "leaf": leaf, "n": 3}
    ckptfs.save(state, str(place / "ours"))
    torch.distributed.checkpoint.save(state, checkpoint_id=str(place / "stock"))
    (sidecar,) = Path(place, "ours").rglob("*.xxh3")
    blob = serialise_leaf(leaf).getvalue()
    return {
        "our .metadata": Target(
            (place / "ours/.metadata").read_bytes(), lambda data: decode_metadata(data, "x")
        ),
        "stock's .metadata": Target(
            (place / "stock/.metadata").read_bytes(), lambda data: decode_metadata(data, "x")
        ),
        "digests": Target(sidecar.read_bytes(), lambda data: decode_digests(data, "x").by_offset()),
        "safetensors": Target(_header(), lambda data: decode_header(data, len(data) + 16, "x")),
        "index": Target(
            encode_index({"w": "model-1.safetensors"}, 8), lambda data: decode_index(data, "x")
        ),
        "object": Target(blob, lambda data: load_leaf(io.BytesIO(data))),
        "archive": Target(blob, lambda data: check_archive(io.BytesIO(data))),
    }


NAMES = [
    "our .metadata",
    "stock's .metadata",
    "digests",
    "safetensors",
    "index",
    "object",
    "archive",
]


@pytest.mark.parametrize("name", NAMES)
def test_valid_bytes_are_taken(name: str, targets: dict[str, Target]) -> None:
    """Else what follows would fail at the same place every time."""
    targets[name].decode(targets[name].valid)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of escapes in protocol 0
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_damaged_bytes_are_a_value_or_a_typed_error(
    name: str, data: st.DataObject, targets: dict[str, Target]
) -> None:
    """Bytes replaced, put in, taken out and doubled, the end cut off."""
    target = targets[name]
    changed = bytearray(target.valid)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(changed)))
        what = data.draw(st.sampled_from(["put", "insert", "drop", "double", "cut"]))
        if what == "put":
            new = data.draw(st.binary(min_size=1, max_size=4))
            changed[at : at + len(new)] = new
        elif what == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif what == "drop":
            del changed[at : at + data.draw(st.integers(1, 40))]
        elif what == "double":
            changed[at:at] = changed[at : at + data.draw(st.integers(1, 200))]
        else:
            del changed[at:]
    try:
        target.decode(bytes(changed))
    except (CkptfsError, SchemaError, pickle.UnpicklingError, ValueError):
        # The last two: what load_leaf and check_archive document.
        return
