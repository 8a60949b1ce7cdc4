"""Faults come exactly where the plan says, and nowhere else."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NoSpaceError,
    NotFoundError,
    TransientError,
    UriError,
)
from ckptfs.storage.base import Shape
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import (
    Fail,
    Fault,
    FaultyStorage,
    Hold,
    Kill,
    Lose,
    Operation,
    Plan,
    When,
    parse_faults,
)
from ckptfs.uri import Uri


def model(plan: Plan, *, shape: Shape = Shape.FILESYSTEM) -> FaultyStorage:
    """A model with the directories d and tmp, under a plan."""
    inner = MemoryStorage(Uri.parse("memory://name/run"), shape=shape, stores=MemoryStoreRegistry())
    inner.make_dir("d")
    inner.make_dir("tmp")
    return FaultyStorage(inner, plan)


def test_every_operation_is_counted_and_traced() -> None:
    """The trace names each operation and its key, from 1, writers and readers included."""
    storage = model(Plan())
    storage.make_dir("e")
    storage.create("d/0", b"x", staging="tmp/w")
    with storage.open_write("d/f") as writer:
        writer.write(b"12")
    with storage.open_read("d/f") as reader:
        reader.read_into(0, memoryview(bytearray(2)))
    storage.rename("d/f", "d/g")
    assert storage.plan.trace == [
        Operation(1, "make_dir", "e"),
        Operation(2, "create", "d/0"),
        Operation(3, "open_write", "d/f"),
        Operation(4, "write", "d/f"),
        Operation(5, "close", "d/f"),
        Operation(6, "open_read", "d/f"),
        Operation(7, "read_into", "d/f"),
        Operation(8, "close_read", "d/f"),
        Operation(9, "rename", "d/f"),
    ]


def test_a_fault_hits_its_operation_only() -> None:
    """The nth match of operation and key fails, before or after it is done; the others do not."""
    denied = OSError(13, "denied")
    storage = model(
        Plan(
            [
                Fault("replace", "d/*", 2, Fail(denied)),
                Fault("remove", "*", 1, Fail(denied, When.AFTER)),
            ]
        )
    )
    storage.replace("d/a", b"x")
    storage.replace("tmp/a", b"x")
    with pytest.raises(AccessError):
        storage.replace("d/b", b"x")
    storage.replace("d/b", b"y")
    assert storage.inner.read("d/b") == b"y"
    with pytest.raises(AccessError):
        storage.remove("d/b")
    with pytest.raises(NotFoundError):
        storage.read("d/b")


def test_each_match_and_any_exception() -> None:
    """Nth None is every match; other exceptions come as they are."""
    storage = model(
        Plan(
            [
                Fault("stat", "*", None, Fail(TransientError("again"))),
                Fault("list", "*", 1, Fail(KeyboardInterrupt())),
            ]
        )
    )
    for _ in range(3):
        with pytest.raises(TransientError):
            storage.stat("d")
    with pytest.raises(KeyboardInterrupt):
        storage.list("d")
    assert storage.list("d") == []


def test_lost_answers() -> None:
    """Done, not done, or done later: the caller sees the same error."""
    storage = model(
        Plan(
            [
                Fault("create", "d/done", 1, Lose()),
                Fault("create", "d/undone", 1, Lose(done=False)),
                Fault("create", "d/late", 1, Lose(done=False, later=True)),
                Fault("create", "d/soon", 1, Lose(done=False, later=True, after=2)),
            ]
        )
    )
    for name in ("done", "undone", "late", "soon"):
        with pytest.raises(AnswerLostError) as caught:
            storage.create(f"d/{name}", b"x", staging="tmp/w")
        assert caught.value.outcome == "unknown"
    assert [e.name for e in storage.inner.list("d")] == ["done"]
    storage.refresh("")
    assert [e.name for e in storage.inner.list("d")] == ["done"]
    storage.refresh("")
    assert [e.name for e in storage.inner.list("d")] == ["done", "soon"]
    storage.create("d/late", b"somebody else", staging="tmp/v")
    storage.plan.deliver()
    assert storage.read("d/late") == b"somebody else"


def test_an_operation_is_held_until_released() -> None:
    """The writer stops at its operation, others continue, and it wakes up."""
    hold = Hold()
    storage = model(Plan([Fault("create", "d/0", 1, hold)]))
    outcome: list[BaseException] = []

    def stalled() -> None:
        try:
            storage.create("d/0", b"stalled", staging="tmp/a")
        except AlreadyExistsError as error:
            outcome.append(error)

    thread = threading.Thread(target=stalled)
    thread.start()
    hold.reached.wait()
    storage.inner.create("d/0", b"other", staging="tmp/b")
    hold.release.set()
    thread.join()
    assert len(outcome) == 1
    assert storage.read("d/0") == b"other"


def test_half_of_a_write_and_half_of_a_tree(tmp_path: Path) -> None:
    """Half-way: half the bytes reached the kernel, half the names are gone, half a staging file."""
    full = Fail(OSError(28, "full"), When.HALF)
    inner = LocalStorage(Uri.parse(str(tmp_path / "run")))
    inner.make_dir("d")
    inner.make_dir("tmp")
    for name in "abcd":
        inner.replace(f"d/{name}", b"x")
    storage = FaultyStorage(
        inner,
        Plan(
            [
                Fault("write", "*", 1, full),
                Fault("remove_tree", "*", 1, full),
                Fault("create", "*", 1, full),
            ]
        ),
    )
    writer = storage.open_write("f")
    with pytest.raises(NoSpaceError):
        writer.write(b"x" * 1000)
    partial = next((tmp_path / "run").glob(".partial-*"))
    assert partial.stat().st_size == 500
    writer.abort()
    with pytest.raises(NoSpaceError):
        storage.remove_tree("d")
    assert [e.name for e in inner.list("d")] == ["c", "d"]
    with pytest.raises(NoSpaceError):
        storage.create("d/0", b"x" * 100, staging="tmp/w")
    assert (tmp_path / "run/tmp/w").stat().st_size == 50
    assert not (tmp_path / "run/d/0").exists()


VICTIM = """
import sys
from ckptfs.storage.registry import open_storage
storage = open_storage(sys.argv[1])
storage.make_dir("log")
storage.make_dir("tmp")
with storage.open_write("data") as writer:
    writer.write(b"x" * 1000)
for number in range(3):
    storage.create(f"log/{number}", b"entry", staging="tmp/w")
"""


def run_victim(place: Path, fault: str, **more: str) -> tuple[int, list[str]]:
    """Run the victim under a fault; its exit code, and the files that it left."""
    environment = {**os.environ, "CKPTFS_TEST_FAULT": fault, **more}
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, f"faults+file://{place}/run"],
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
    )
    left = sorted(
        str(path.relative_to(place / "run"))
        for path in (place / "run").rglob("*")
        if path.is_file()
    )
    return done.returncode, left


def test_a_process_is_killed_where_the_environment_says(tmp_path: Path) -> None:
    """SIGKILL before, after and half-way through a named operation, by URI and environment alone."""
    killed = -signal.SIGKILL
    assert run_victim(tmp_path / "a", "kill:create:log/*:2") == (killed, ["data", "log/0"])
    assert run_victim(tmp_path / "b", "kill-after:create:log/*:2") == (
        killed,
        ["data", "log/0", "log/1"],
    )
    code, left = run_victim(tmp_path / "c", "kill-half:write:data:1")
    assert (code, len(left)) == (killed, 1)
    assert left[0].startswith(".partial-")
    assert (tmp_path / "c/run" / left[0]).stat().st_size == 500
    assert run_victim(tmp_path / "d", "kill:*:*:1")[1] == []
    assert run_victim(tmp_path / "e", "")[0] == 0


def test_only_the_rank_and_restart_named(tmp_path: Path) -> None:
    """@RANK.RESTART chooses the process; the trace outlives the kill and is one file per rank."""
    fault = "kill:create:*:1@1.0"
    trace = str(tmp_path / "trace")
    assert run_victim(tmp_path / "a", fault, RANK="0", TORCHELASTIC_RESTART_COUNT="0")[0] == 0
    assert run_victim(tmp_path / "b", fault, RANK="1", TORCHELASTIC_RESTART_COUNT="1")[0] == 0
    code, _ = run_victim(
        tmp_path / "c", fault, RANK="1", TORCHELASTIC_RESTART_COUNT="0", CKPTFS_TEST_TRACE=trace
    )
    assert code == -signal.SIGKILL
    lines = (tmp_path / "trace.1").read_text().splitlines()
    assert lines[0] == "1 make_dir log"
    assert lines[-1] == "6 create log/0"


def test_plans_are_read() -> None:
    """The text of every action means what the docstring says."""
    faults = parse_faults(
        "kill:*:*:17; fail=ENOSPC:write:*:*;fail-after=StaleError:read:a/*:1;lose-late=3:create:*:1"
    )
    assert faults[0] == Fault("*", "*", 17, Kill())
    assert isinstance(faults[1].action, Fail)
    assert faults[1].nth is None
    assert isinstance(faults[2].action, Fail)
    assert faults[2].action.when is When.AFTER
    assert faults[3].action == Lose(done=False, later=True, after=3)


@pytest.mark.parametrize(
    "text", ["kill", "kill:a:b", "kill:a:b:c", "maim:a:b:1", "fail=ENOTHING:a:b:1", "hold:a:b:1"]
)
def test_bad_plans_are_refused(text: str) -> None:
    """A fault that would never come is an error, not a green test."""
    with pytest.raises(UriError):
        parse_faults(text)


def test_production_never_reads_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPTFS_TEST_FAULT does nothing to any backend but the wrapper."""
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=EIO:*:*:*")
    storage = open_storage(str(tmp_path / "run"))
    storage.make_dir("")
    storage.replace("f", b"x")
    assert open_storage(f"memory://{tmp_path.name}").capabilities.exclusive_create
    with pytest.raises(OSError, match="failed"):
        open_storage(f"faults+file://{tmp_path}/run").read("f")


def test_wrappers_nest_and_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults over nodes over file, by one URI that stays the same; a pickled one counts afresh."""
    monkeypatch.setenv("CKPTFS_NODE", "n1")
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=EIO:read:*:2")
    text = f"faults+nodes+file://{tmp_path}/@node/run"
    storage = open_storage(text)
    storage.make_dir("")
    storage.replace("f", b"x")
    storage.read("f")
    again = pickle.loads(pickle.dumps(storage))
    assert str(again.root) == text
    assert again.read("f") == b"x"
    assert (tmp_path / "n1/run/f").exists()
    assert storage.local_path("f") == str(tmp_path / "n1/run/f")
    assert storage.space() is not None
    storage.close()
