"""What ``make test-cloud`` runs: conformance, races, lost answers, deaths at every operation, clean-up.

Not collected by name: it needs a bucket (``python -m tests.cloud URI``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.errors import AnswerLostError, CkptfsError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.conformance import StorageConformance
from tests.cloud.bucket import Bucket, the_place
from tests.servers.racers import Job, race

PLACE = the_place()
WRITERS = 8
# A process of its own for each death: none inherits a client, or a thread of one.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "ckptfs.dcp.api", "ckptfs.api", "tests.cloud.suite"])


@pytest.fixture
def run() -> Iterator[str]:
    """The URI of a new run, deleted afterwards."""
    uri = PLACE.fresh("run")
    yield uri
    _delete(uri)


def _delete(uri: str) -> None:
    root, _, name = uri.rpartition("/")
    with contextlib.closing(open_storage(root, PLACE.options)) as store:
        store.remove_tree(name)


class TestConformance(StorageConformance):
    """Everything that a storage must do."""

    place: Bucket = PLACE

    @pytest.fixture(autouse=True)
    def _prefix(self) -> Iterator[None]:
        self.uri = PLACE.fresh("conformance")
        self.files = PLACE.library()
        yield
        _delete(self.uri)

    def make_storage(self, place: Path) -> Storage:
        del place
        return open_storage(self.uri, PLACE.options)

    def raw_write(self, key: str, data: bytes) -> None:
        self.files.pipe_file(f"{PLACE.path(self.uri)}/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return bytes(self.files.cat_file(f"{PLACE.path(self.uri)}/{key}"))

    def raw_exists(self, key: str) -> bool:
        return bool(self.files.exists(f"{PLACE.path(self.uri)}/{key}".rstrip("/")))

    def raw_list(self) -> list[str]:
        return PLACE.keys_below(self.uri)


def test_racing_writers(run: str) -> None:
    """Eight processes seal one name at once, twice: one commits, the others conflict, nothing is left."""
    with contextlib.closing(open_storage(run, PLACE.options)) as store:
        if not store.probe("probe").exclusive_create:
            pytest.skip("this place lets two win: the log is advice, and each save says so")
    rounds = race(Job(run, PLACE.options, WRITERS, rounds=2))
    keys = PLACE.keys_below(run)
    for number, outcomes in enumerate(rounds):
        winners = [one.save_id for one in outcomes if not one.error]
        assert len(winners) == 1, outcomes
        assert {one.error for one in outcomes if one.error} == {"CommitConflictError"}, outcomes
        here = {key.split("/")[1] for key in keys if key.startswith(f"step_{number}/")}
        assert here == {winners[0], ".metadata", "ckptfs.json"}, here
    assert not _leftovers(keys)


# -- one save, with a fault ------------------------------------------------------------------------


def state(value: int) -> dict[str, Any]:
    """Every element says which save wrote it."""
    return {"w": torch.full((1000,), float(value)), "n": value}


def values(uri: str) -> dict[str, int]:
    """Every checkpoint of a run, and what it holds."""
    found = {}
    for checkpoint in ckptfs.list_checkpoints(uri, storage_options=PLACE.options):
        loaded = state(-1)
        ckptfs.load(loaded, checkpoint.uri, storage_options=PLACE.options)
        assert set(loaded["w"].tolist()) == {float(loaded["n"])}, "a mix of two saves"
        found[str(checkpoint.uri).rpartition("/")[2]] = int(loaded["n"])
    return found


def save(uri: str, value: int, name: str) -> None:
    """One save of ``state(value)``, without faults."""
    ckptfs.save(state(value), f"{uri}/{name}", storage_options=PLACE.options)


def save_with(faults: str, uri: str, trace: str = "") -> None:
    """The save of step_2, with the faults of ``ckptfs.testing.faults`` in its storage."""
    os.environ["CKPTFS_TEST_FAULT"] = faults
    if trace:
        os.environ["CKPTFS_TEST_TRACE"] = trace
    try:
        ckptfs.save(state(2), f"faults+{uri}/step_2", storage_options=PLACE.options)
    finally:
        os.environ.pop("CKPTFS_TEST_FAULT")
        os.environ.pop("CKPTFS_TEST_TRACE", None)


def _in_a_process(faults: str, uri: str, trace: str = "") -> int:
    process = PROCESSES.Process(target=save_with, args=(faults, uri, trace))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def operations(tmp_path: Path) -> list[str]:
    """The operations of one save, "NUMBER OP KEY", found by letting one live."""
    uri = PLACE.fresh("survey")
    save(uri, 1, "step_1")
    assert _in_a_process("", uri, str(tmp_path / "trace")) == 0
    _delete(uri)
    [written] = tmp_path.glob("trace*")
    return written.read_text().splitlines()


def _leftovers(keys: list[str]) -> list[str]:
    unfinished = (".ckptfs/attempts/", ".ckptfs/tmp/")
    return [key for key in keys if key.startswith(unfinished) or ".partial-" in key]


@pytest.mark.parametrize("fault", ["lose", "lose-undone"])
@pytest.mark.parametrize("op", ["create", "replace", "close"])
def test_lost_answers(run: str, fault: str, op: str) -> None:
    """The first answer of each kind of change is lost, done or not: what a save that returned wrote is
    there, what raised is there whole or not at all, and the next save goes through.
    """
    save(run, 1, "step_1")
    returned = True
    try:
        save_with(f"{fault}:{op}:*:1", run)
    except (AnswerLostError, CkptfsError):
        returned = False
    found = values(run)
    assert found in (
        [{"step_1": 1, "step_2": 2}] if returned else [{"step_1": 1, "step_2": 2}, {"step_1": 1}]
    )
    save(run, 3, "step_3")
    assert values(run) == {**found, "step_3": 3}


def test_killed_after_every_operation(tmp_path: Path) -> None:
    """SIGKILL after each operation of a save: the step is there whole or not at all, the others stay, and
    after the next owner's save nothing of the dead one is left.
    """
    found = operations(tmp_path)
    stride = -(-len(found) // PLACE.cases)
    ends = set()
    for number in range(1, len(found) + 1, stride):
        uri, after = PLACE.fresh("killed"), f"after {found[number - 1]}"
        save(uri, 1, "step_1")
        ended = _in_a_process(f"kill-after:*:*:{number}", uri)
        # Threads make one operation more or less from save to save: the last may not have come.
        assert ended in (0, -signal.SIGKILL), after
        alive = values(uri)
        assert alive in ({"step_1": 1}, {"step_1": 1, "step_2": 2}), after
        ends.add("step_2" in alive)
        with ckptfs.prepare_run(uri, takeover="force", storage_options=PLACE.options) as held:
            ckptfs.save(state(3), f"{uri}/step_3", run=held, storage_options=PLACE.options)
        assert values(uri) == {**alive, "step_3": 3}, after
        keys = PLACE.keys_below(uri)
        assert not _leftovers(keys), after
        if "step_2" not in alive:
            assert not [key for key in keys if key.startswith("step_2/")], after
        _delete(uri)
    assert ends == {False, True}, "the deaths were on both sides of the commit"


def test_uploads_of_the_dead_are_swept(run: str) -> None:
    """A process dies in the middle of a large file: nothing is under its key, and no part stays."""
    options = {**PLACE.options, "part_size_bytes": 5 << 20}
    process = PROCESSES.Process(target=_write_half, args=(run, options))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with contextlib.closing(open_storage(run, PLACE.options)) as store:
        assert not store.list("")
        store.sweep_uploads(older_than_s=-3600.0)
        assert store.unfinished_uploads() == ()
    assert PLACE.keys_below(run) == []


def _write_half(uri: str, options: dict[str, Any]) -> None:
    store = open_storage(uri, options)
    writer = store.open_write("f", size_hint_bytes=32 << 20)
    writer.write(bytes(16 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
