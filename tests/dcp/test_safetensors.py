"""Export and import in one process: tied weights, damage, foreign directories. No framework needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.dcp.metadata.torch_names import dtype_of
from ckptfs.dcp.safetensors.safetensors_format import TensorEntry, encode_header, encode_index
from ckptfs.errors import (
    CollectiveError,
    CommitConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StateError,
)
from ckptfs.integrations.safetensors import load_safetensors, save_safetensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def state_of() -> dict[str, Any]:
    """Every kind of tensor that has a trap: narrow, empty, scalar, not contiguous."""
    torch.manual_seed(0)
    wide = torch.randn(20, 6)
    return {
        "bf16": torch.randn(30, 20).bfloat16(),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "turned": wide.t(),
        "cut": wide[3:9, 1:4],
        "bool": torch.tensor([True, False]),
        "f64": torch.randn(3, dtype=torch.float64),
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """Zeros of the same kinds."""
    return {key: torch.zeros_like(value) for key, value in state.items()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert list(one) == list(other)
    for key, value in one.items():
        left, right = value.contiguous(), other[key].contiguous()
        assert left.dtype == right.dtype
        assert left.flatten().view(torch.uint8).equal(right.flatten().view(torch.uint8)), key


def write_file(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    """A safetensors file by anybody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        TensorEntry(key, dtype_of(value.dtype), tuple(value.shape))
        for key, value in tensors.items()
    ]
    head, header = encode_header(entries, metadata)
    data = [tensors[e.key].contiguous().flatten().view(torch.uint8).numpy() for e in header.entries]
    path.write_bytes(head + b"".join(d.tobytes() for d in data))


@pytest.mark.parametrize("scheme", ["file", "objects"])
@pytest.mark.parametrize("limit", ["5GB", 400])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, scheme: str, limit: Any) -> None:
    """In one file and in several, on a filesystem and on an object store, verified."""
    root = str(tmp_path / "run") if scheme == "file" else f"objects+memory://b/{tmp_path.name}"
    state = state_of()
    saved = save_safetensors(
        state, f"{root}/hf_7", max_shard_size=limit, files={"config.json": "{}"}
    )
    found = blank(state)
    result = load_safetensors(found, f"{root}/hf_7")
    assert_equal(found, state)
    assert (saved.step, result.step, result.verified) == (7, 7, True)
    with ckptfs.checkpoint_dir(f"{root}/hf_7", "read") as path:
        names = {p.name for p in Path(path).iterdir() if p.is_file()}
    assert "config.json" in names
    assert ("model.safetensors" in names) == (limit == "5GB")
    assert ("model.safetensors.index.json" in names) == (limit != "5GB")


def test_tied_weights_are_written_once_and_found_under_every_name(tmp_path: Path) -> None:
    """Under both names, under either alone; the header names the others as save_model does."""
    shared = torch.randn(50, 4)
    state = {"embed": shared, "norm": torch.randn(4), "head": shared}
    result = save_safetensors(state, tmp_path / "run" / "hf_1")
    assert result.total.payload_bytes == shared.nbytes + 16
    for keys in (["embed", "norm", "head"], ["embed", "norm"], ["norm", "head"]):
        asked = {key: state[key] for key in keys}
        found = blank(asked)
        load_safetensors(found, tmp_path / "run" / "hf_1")
        assert_equal(found, asked)
    raw = (tmp_path / "run" / "hf_1" / "model.safetensors").read_bytes()
    assert json.loads(raw[8 : 8 + raw[0] + 256 * raw[1]])["__metadata__"] == {
        "format": "pt",
        "head": "embed",
    }
    with pytest.raises(StateError, match="no rank requests"):
        load_safetensors({"norm": torch.zeros(4)}, tmp_path / "run" / "hf_1")


def test_a_committed_export_is_never_overwritten(tmp_path: Path) -> None:
    """Stock writes into the old files in place; here the name is refused and stays as it was."""
    save_safetensors({"a": torch.ones(3)}, tmp_path / "run" / "hf_1")
    with pytest.raises(CommitConflictError):
        save_safetensors({"a": torch.zeros(3)}, tmp_path / "run" / "hf_1")
    found = {"a": torch.zeros(3)}
    load_safetensors(found, tmp_path / "run" / "hf_1")
    assert found["a"].sum() == 3


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (3, "is a int"),
        (torch.zeros(2, dtype=torch.complex128), "has no torch.complex128"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "layout"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, value: Any, why: str) -> None:
    """Before a file is made, and by its key."""
    with pytest.raises((StateError, CollectiveError), match=why) as caught:
        save_safetensors({"odd": value}, tmp_path / "run" / "hf_1")
    assert "odd" in str(caught.value)
    assert not (tmp_path / "run" / "hf_1").exists()


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a//b", "", "s3://b/x", "ckptfs.json", "model.safetensors"]
)
def test_a_file_beside_the_tensors_stays_beside_them(tmp_path: Path, name: str) -> None:
    """It replaces nothing and leads nowhere else; a directory of its own is allowed."""
    state = {"a": torch.ones(2)}
    with pytest.raises((StateError, CollectiveError), match="cannot be the name of a file"):
        save_safetensors(state, tmp_path / "run" / "hf_1", files={name: "text"})
    save_safetensors(state, tmp_path / "run" / "hf_1", files={"original/params.json": "{}"})
    assert (tmp_path / "run" / "hf_1" / "original" / "params.json").read_text() == "{}"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full in the middle of the second file: nothing is there, and a retry succeeds."""
    state = {"a": torch.ones(100), "b": torch.ones(100)}
    place = f"{tmp_path}/run/hf_1"
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"fail=ENOSPC:write:*{SECOND}:2")
    with pytest.raises(CollectiveError, match="No space"):
        save_safetensors(state, f"faults+file://{place}", max_shard_size=400)
    with pytest.raises(NotFoundError):
        load_safetensors(blank(state), place)
    save_safetensors(state, place, max_shard_size=400)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """In the data and in the header, by the digests that were written with it."""
    state = {"a": torch.ones(100)}
    for n, at in ((1, -1), (2, 20)):
        save_safetensors(state, tmp_path / "run" / f"hf_{n}")
        file = tmp_path / "run" / f"hf_{n}" / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[at] ^= 1
        file.write_bytes(raw)
        with pytest.raises((CollectiveError, IntegrityError, ManifestError)):
            load_safetensors(blank(state), tmp_path / "run" / f"hf_{n}")
    load_safetensors(blank(state), tmp_path / "run" / "hf_1", verify="off")


def test_foreign_directories_load(tmp_path: Path) -> None:
    """One file; an index with stale neighbours, which do not count; shards that say where they are."""
    a, b = torch.randn(4, 3), torch.randn(5)
    write_file(tmp_path / "one" / "model.safetensors", {"a": a, "b": b})
    write_file(tmp_path / "two" / FIRST, {"a": a})
    write_file(tmp_path / "two" / SECOND, {"b": b, "a": a + 1})
    (tmp_path / "two" / "model.safetensors.index.json").write_bytes(
        encode_index({"a": FIRST, "b": SECOND}, 0)
    )
    for n, rows in enumerate((a[:3], a[3:])):
        told = json.dumps({"a": {"saved_offsets": [3 * n, 0]}, "b": {"saved_offsets": [0]}})
        tensors = {"a": rows, "b": b} if n else {"a": rows}
        write_file(tmp_path / "cut" / f"shard-{n}.safetensors", tensors, DCP_SHARDING_INFO=told)
    for name in ("one", "two", "cut"):
        found = {"a": torch.zeros(4, 3), "b": torch.zeros(5)}
        result = load_safetensors(found, tmp_path / name)
        assert_equal(found, {"a": a, "b": b})
        assert not result.verified
    narrow = {"a": torch.zeros(4, 3, dtype=torch.bfloat16), "new": torch.zeros(2)}
    result = load_safetensors(narrow, tmp_path / "one", strict=False)
    assert narrow["a"].equal(a.bfloat16())
    assert (result.missing_keys, result.unexpected_keys) == (("new",), ("b",))


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    """A lost shard, a file that the index names, a key that is not in it, two checkpoints in one."""
    a = torch.randn(4, 3)
    for n, rows in ((0, a[:1]), (2, a[2:])):
        told = json.dumps({"a": {"saved_offsets": [n, 0]}})
        write_file(tmp_path / "hole" / f"s{n}.safetensors", {"a": rows}, DCP_SHARDING_INFO=told)
    for name in ("lost", "lie"):
        write_file(tmp_path / name / FIRST, {"a": a})
        index = encode_index({"a": FIRST, "b": SECOND if name == "lost" else FIRST}, 0)
        (tmp_path / name / "model.safetensors.index.json").write_bytes(index)
    for n, part in enumerate(("x", "y")):
        write_file(tmp_path / "both" / f"{part}.safetensors", {"a": a})
        told = json.dumps({"a": {"saved_offsets": [n, 0]}})  # row 1 and 2 twice
        place = tmp_path / "over" / f"{part}.safetensors"
        write_file(place, {"a": a[n : n + 3]}, DCP_SHARDING_INFO=told)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "readme.txt").write_text("no model")
    for name, kind, why in (
        ("hole", IncompleteCheckpointError, "only 9 of 12"),
        ("lost", IncompleteCheckpointError, "missing"),
        ("lie", ManifestError, "index says"),
        ("both", ManifestError, "more than once"),
        ("over", ManifestError, "more than once"),
        ("none", NotFoundError, "no safetensors"),
        ("nowhere", NotFoundError, "no committed"),
    ):
        with pytest.raises(kind, match=why):
            load_safetensors({"a": torch.zeros(4, 3)}, tmp_path / name)


def test_state_that_does_not_fit_is_told_before_a_byte_is_read(tmp_path: Path) -> None:
    """Shapes, dtypes, keys: all named, and the tensors are as they were."""
    save_safetensors({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "run" / "hf_1")
    for asked, why in (
        ({"a": torch.zeros(4), "b": torch.zeros(2)}, "shape"),
        ({"a": torch.zeros(3).half(), "b": torch.zeros(2)}, "float32 saved"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "not in the checkpoint"),
        ({"a": torch.zeros(3)}, "no rank requests"),
    ):
        with pytest.raises((StateError, CollectiveError), match=why):
            load_safetensors(asked, tmp_path / "run" / "hf_1")
        assert not any(value.any() for value in asked.values())
