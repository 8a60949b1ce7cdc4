"""Loggers have names that stay, and their records say which save or load they are of."""

from __future__ import annotations

import ast
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.events import SaveResult
from ckptfs.storage.inflight import FIELDS, LOGGERS, add_fields, log_fields, with_task
from ckptfs.storage.threads import Threads
from ckptfs.testing.world import simulate

ROOT = Path(__file__).resolve().parents[1]
STATE = {"w": torch.ones(8)}


class JsonFormatter(logging.Formatter):
    """As users write one: a JSON object of a record, with the fields that the manual names."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        known = {name: getattr(record, name) for name in ("run", "step", "rank", "save_id")}
        return json.dumps({"logger": record.name, "message": record.getMessage(), **known})


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler with that formatter writes of all of ckptfs."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("ckptfs")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.setLevel(before)
    logger.removeHandler(handler)


def _records(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def _names_of(path: Path) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
            yield from node.args[:1]


def test_a_logger_is_called_after_its_folder() -> None:
    """A module may move or be renamed within it: handlers, levels and dashboards go by the name."""
    wrong = []
    for path in sorted((ROOT / "ckptfs").rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        right = "ckptfs" if len(parts) == 2 else f"ckptfs.{parts[1]}"
        named = () if path.name == "inflight.py" else _names_of(path)
        wrong += [
            f"{path.relative_to(ROOT)}: {ast.unparse(name)} is not {right!r}"
            for name in named
            if not (isinstance(name, ast.Constant) and name.value == right)
        ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_logger_and_the_manual_names_all() -> None:
    """Those that stand in no page would not be found."""
    folders = {path.parent.name for path in (ROOT / "ckptfs").glob("*/__init__.py")}
    assert {*LOGGERS} == {"ckptfs", *(f"ckptfs.{name}" for name in folders)}
    page = (ROOT / "docs" / "howto" / "logging.md").read_text()
    assert [name for name in LOGGERS if f"logger `{name}`" not in page] == []
    assert [name for name in FIELDS if f"`{name}`" not in page] == []


def test_records_of_a_save_say_of_which(lines: io.StringIO) -> None:
    """Each rank's with its own number; the id of the save from where it is known."""

    def on_two(control: Any) -> str:
        with log_fields(rank=control.rank):
            logging.getLogger("ckptfs.testing").info("mine")
        return ""

    simulate(2, on_two)
    assert {one["rank"] for one in _records(lines)} == {0, 1}
    # Without exclusive creates each save warns, once it is committed.
    run = "fsspec+memory://logged/run"
    result = ckptfs.save(STATE, f"{run}/step_7")
    (warning,) = [one for one in _records(lines) if "is committed; " in one["message"]]
    assert warning == {
        "logger": "ckptfs.commit",
        "message": warning["message"],
        "run": run,
        "step": 7,
        "rank": 0,
        "save_id": result.save_id,
    }
    assert {one["logger"] for one in _records(lines)} <= {*LOGGERS}
    lines.seek(0)
    lines.truncate(0)
    ckptfs.async_save(STATE, f"{run}/step_8").result(60)
    (warning,) = [one for one in _records(lines) if "is committed; " in one["message"]]
    assert (warning["run"], warning["step"]) == (run, 8)
    logging.getLogger("ckptfs.commit").info("after")
    assert _records(lines)[-1]["run"] is None


def test_fields_are_none_outside_and_extra_wins(lines: io.StringIO) -> None:
    """A formatter may name them always; a record of another library has none of them."""
    logger = logging.getLogger("ckptfs.storage")
    logger.info("outside")
    with log_fields(run="r", step=1):
        add_fields(save_id="s")
        with log_fields(step=2):
            logger.info("inside", extra={"rank": 9})
        logger.info("after")
    found = [[one[name] for name in FIELDS] for one in _records(lines)]
    assert found == [[None] * 4, ["r", 2, 9, "s"], ["r", 1, None, "s"]]
    record = logging.getLogger("another").makeRecord("another", 20, "", 0, "", (), None)
    assert not hasattr(record, "save_id")


def test_threads_that_work_for_a_save_say_so(lines: io.StringIO) -> None:
    """Also what was learnt after they began; a thread of somebody else says nothing."""
    logger, goes_on = logging.getLogger("ckptfs.dcp"), threading.Event()

    def work() -> None:
        assert goes_on.wait(60)
        logger.info("work")

    with log_fields(step=3), Threads(1, "test-logs") as threads:
        done = threads.submit(work)
        own = threading.Thread(target=with_task(work))
        other = threading.Thread(target=work)
        for thread in (own, other):
            thread.start()
        add_fields(save_id="s")
        goes_on.set()
        done.result(60)
        own.join(60)
        other.join(60)
    found = sorted((one["step"] or 0, one["save_id"] or "") for one in _records(lines))
    assert found == [(0, ""), (3, "s"), (3, "s")]


def test_records_of_retention_and_copies_say_of_which(lines: io.StringIO, tmp_path: Path) -> None:
    """What runs after the commit, on threads too, is about a save that was committed earlier."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    with ckptfs.CheckpointManager(run, keep_latest=1, copies=[copy]) as manager:
        results = [manager.save(step, STATE) for step in (1, 2)]
        manager.wait()
    ids = [result.save_id for result in results if isinstance(result, SaveResult)]
    found = {
        (one["logger"], one["step"]): one for one in _records(lines) if one["step"] is not None
    }
    for key, save_id in (
        (("ckptfs.replication", 1), ids[0]),
        (("ckptfs.replication", 2), ids[1]),
        (("ckptfs.retention", 1), ids[0]),
    ):
        assert (found[key]["run"], found[key]["rank"]) == (f"file://{run}", 0)
        assert found[key]["save_id"] == save_id
    assert all(one["run"] for one in _records(lines)), lines.getvalue()
