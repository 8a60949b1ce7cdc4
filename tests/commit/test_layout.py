"""Names below a run: what is the id of a save, and what is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptfs
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import is_save_id
from ckptfs.commit.save.shared_attempt import next_id
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.integrations.fsspec.arrivals import agreed_id
from ckptfs.replication.backlog import fresh_id
from ckptfs.replication.checkpoint_copy import stock_manifest
from ckptfs.storage.base import Shape
from ckptfs.storage.registry import open_storage

HERE = Path(ckptfs.__file__).parent
DATED = re.compile(r"\\d\{8\}T\\d\{6\}")
# The doctor's own scratch directories and the names of entries on their way: no data is below them.
OTHER_NAMES = {"commit/paths.py": 1, "tools/doctor/session.py": 1, "tools/collecting.py": 1}


def test_every_id_that_is_made_is_one(tmp_path: Path) -> None:
    """The ids of saves, of exports, of stock checkpoints that are copied, of copies by the command and
    in the background, and of copies of those, all are ids of saves.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    saved = ckptfs.save({"w": torch.ones(2)}, tmp_path / "run/step_1").save_id
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "stock/step_1"))
    stock = stock_manifest(open_storage(tmp_path / "stock"), "step_1").save_id
    storage = open_storage(tmp_path / "run")
    first = [saved, next(fresh_ids()), stock, agreed_id("anything")]
    for origin in first:
        copied = drive(next_id(origin, "step_1", Shape.FILESYSTEM, LogState(), held=False), storage)
        behind = fresh_id(copied, {}, tried=[copied])
        for made in (origin, copied, fresh_id(origin, {}, tried=[origin]), behind):
            assert is_save_id(made), made


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step_100",
        "__0_0.distcp",
        "20261120T100000",
        "20261120T100000-",
        "20261120T100000-0123456789a",
        "20261120T100000-0123456789ag",
        "20261120T100000-0123456789ab~",
        "20261120T100000-0123456789ab~12",
        "x20261120T100000-0123456789ab",
        "20261120T100000-0123456789ab\n",
        "\N{ARABIC-INDIC DIGIT TWO}0261120T100000-0123456789ab",
        "dcp-0123",
    ],
)
def test_other_names_are_not(name: str) -> None:
    """Names of steps, of files, and ids with more or less than belongs there are no ids of saves."""
    assert not is_save_id(name)


def test_there_is_one_pattern() -> None:
    """No other module of ckptfs has a pattern of its own for the ids of saves."""
    found = {
        path.relative_to(HERE).as_posix(): len(DATED.findall(path.read_text()))
        for path in HERE.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == OTHER_NAMES
