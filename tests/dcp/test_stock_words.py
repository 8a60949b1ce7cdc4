"""StorageWriter and StorageReader understand the words of stock's: each does what it means, or says why not."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat

import ckptfs
from ckptfs.errors import CommitConflictError, StateError
from ckptfs.tools.runlog import read_log

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: float) -> dict[str, Any]:
    """Three tensors and an object."""
    return {"a": torch.full((3,), value), "b": torch.ones(2), "c": torch.ones(4), "n": int(value)}


def save(place: Path, value: float, **words: Any) -> None:
    """dcp.save with our writer."""
    dcp.save(state(value), storage_writer=ckptfs.StorageWriter(place, **words))


def value_at(place: Path) -> float:
    """What our reader finds."""
    found = state(0.0)
    dcp.load(found, storage_reader=ckptfs.StorageReader(path=place))
    assert float(found["a"][0]) == found["n"]
    return float(found["n"])


def conflict(call: Any) -> CommitConflictError:
    """Ours within torch's exception."""
    with pytest.raises(CheckpointException) as caught:
        call()
    error = caught.value.failures[0][0]
    assert isinstance(error, CommitConflictError)
    return error


def data_files(place: Path) -> list[Path]:
    """Files with tensors in them."""
    return sorted(place.rglob("*.distcp"))


def test_every_word_of_stocks_constructor_is_taken(tmp_path: Path) -> None:
    """A program that gives all of them, as stock has them by default, needs no other change."""
    writer = ckptfs.StorageWriter(
        path=tmp_path / "step_1",
        single_file_per_rank=True,
        sync_files=True,
        thread_count=1,
        per_thread_copy_ahead=10_000_000,
        cache_staged_state_dict=False,
        overwrite=True,
        _extensions=None,
        serialization_format=SerializationFormat.TORCH_SAVE,
    )
    dcp.save(state(1), storage_writer=writer)
    dcp.save(state(2), storage_writer=pickle.loads(pickle.dumps(writer)))
    assert value_at(tmp_path / "step_1") == 2


def test_a_writer_replaces_as_stock_does(tmp_path: Path) -> None:
    """Ours and stock's checkpoints of that name, by default and by stock's word."""
    save(tmp_path / "step_1", 1)
    save(tmp_path / "step_1", 2)
    assert value_at(tmp_path / "step_1") == 2
    save(tmp_path / "step_1", 3, overwrite=True)
    assert value_at(tmp_path / "step_1") == 3
    dcp.save(state(4), storage_writer=dcp.FileSystemWriter(tmp_path / "step_2"))
    save(tmp_path / "step_2", 5)
    assert value_at(tmp_path / "step_2") == 5


@pytest.mark.parametrize("words", [{"if_exists": "error"}, {"overwrite": False}])
def test_a_name_that_is_taken_can_be_an_error(tmp_path: Path, words: dict[str, Any]) -> None:
    """if_exists="error", overwrite=False: the old one stays, and the error says how to replace it."""
    save(tmp_path / "step_1", 1)
    error = conflict(lambda: save(tmp_path / "step_1", 2, **words))
    assert 'if_exists="replace"' in str(error)
    assert value_at(tmp_path / "step_1") == 1


def test_save_keeps_to_error_and_says_the_word(tmp_path: Path) -> None:
    """ckptfs.save does not replace by default."""
    ckptfs.save(state(1), tmp_path / "step_1")
    with pytest.raises(CommitConflictError, match='if_exists="replace"'):
        ckptfs.save(state(2), tmp_path / "step_1")


def test_a_new_name_claims_nothing(tmp_path: Path) -> None:
    """A writer without a run leaves the owner of the run alone, as long as it replaces nothing."""
    with ckptfs.prepare_run(tmp_path) as run:
        before = [line.entry for line in read_log(tmp_path)]
        save(tmp_path / "step_1", 1)
        new = [line.entry for line in read_log(tmp_path)][len(before) :]
        assert "fence" not in new
        ckptfs.save(state(2), tmp_path / "step_2", run=run)
    assert value_at(tmp_path / "step_2") == 2


def test_a_file_for_each_item(tmp_path: Path) -> None:
    """single_file_per_rank=False; stock reads it."""
    save(tmp_path / "step_1", 1)
    assert len(data_files(tmp_path / "step_1")) == 1
    save(tmp_path / "step_2", 7, single_file_per_rank=False)
    assert len(data_files(tmp_path / "step_2")) == len(state(0))
    assert value_at(tmp_path / "step_2") == 7
    found = state(0)
    dcp.load(found, checkpoint_id=tmp_path / "step_2")
    assert found["n"] == 7


def test_thread_count_makes_as_many_files(tmp_path: Path) -> None:
    """As threads does."""
    save(tmp_path / "step_1", 1, thread_count=3)
    save(tmp_path / "step_2", 1, threads=3)
    counts = [len(data_files(tmp_path / name)) for name in ("step_1", "step_2")]
    assert counts == [3, 3]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"sync_files": False}, "a commit names only what is durable"),
        ({"per_thread_copy_ahead": 1}, "bounded"),
        ({"cache_staged_state_dict": True}, "async_stager=BlockingAsyncStager"),
    ],
)
def test_a_word_without_effect_is_told_in_one_sentence(
    tmp_path: Path, words: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the save is made."""
    with caplog.at_level(logging.WARNING, "ckptfs"):
        save(tmp_path / "step_1", 1, **words)
    [told] = [record.getMessage() for record in caplog.records if record.name.startswith("ckptfs")]
    assert next(iter(words)) in told
    assert why in told
    assert value_at(tmp_path / "step_1") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"serialization_format": SerializationFormat.SAFETENSORS}, "save_safetensors"),
        ({"_extensions": [object()]}, "places of their bytes"),
        ({"uri": "a", "path": "b"}, "name the same argument"),
        ({"threads": 1, "thread_count": 2}, "name the same argument"),
        ({"overwrite": True, "if_exists": "error"}, "contradict"),
        ({"single_file_per_rank": False, "unchanged": "reference"}, "write tensors again"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_written(
    words: dict[str, Any], why: str
) -> None:
    """Each in one sentence."""
    with pytest.raises(StateError, match=why):
        ckptfs.StorageWriter(**words)


def test_a_reader_says_why_it_has_no_extensions() -> None:
    """FileSystemReader reads what they wrote."""
    with pytest.raises(StateError, match="FileSystemReader"):
        ckptfs.StorageReader("a", _extension_registry=object())


def test_a_place_is_what_the_user_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """checkpoint_id and storage_meta have it back unchanged; path and fs are what stock's are."""
    monkeypatch.chdir(tmp_path)
    for place in ("run/step_1", tmp_path / "run" / "step_2", "s3://bucket/run/step_3"):
        writer, reader = ckptfs.StorageWriter(place), ckptfs.StorageReader(place)
        meta = writer.storage_meta()
        assert meta is not None
        assert meta.checkpoint_id == writer.checkpoint_id == reader.checkpoint_id == place
    writer = ckptfs.StorageWriter()
    assert (writer.checkpoint_id, writer.path) == ("", None)
    dcp.save(state(1), storage_writer=writer, checkpoint_id="run/step_1")
    assert writer.checkpoint_id == "run/step_1"
    assert writer.path == tmp_path / "run" / "step_1"
    assert writer.fs.exists(writer.path / ".metadata")
    far = ckptfs.StorageReader("s3://bucket/run/step_3")
    assert far.path == "s3://bucket/run/step_3"
    with pytest.raises(AttributeError, match="paths only"):
        far.fs.exists(far.path)
    secret = ckptfs.StorageWriter("s3://key:secret@bucket/run/step_3")
    assert "secret" not in str(secret.checkpoint_id)


@pytest.mark.parametrize("kind", [ckptfs.StorageWriter, ckptfs.StorageReader])
def test_only_what_somebody_serves_is_a_place(kind: Any) -> None:
    """validate_checkpoint_id, as torch asks it."""
    served = [
        "/a/b",
        Path("a"),
        "file:///a",
        "s3://b/c",
        "gs://b/c",
        "faults+file:///a",
        "ckptfs+s3://b/c",
    ]
    assert [place for place in served if not kind.validate_checkpoint_id(place)] == []
    unserved = ["nosuch://a/b", "faults+nosuch://a/b", "fsspec+nosuch://a", "", "s3://"]
    assert [place for place in unserved if kind.validate_checkpoint_id(place)] == []
