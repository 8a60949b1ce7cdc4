"""One rank of a simulated world has storage that fails at one operation, in every public collective call.

    stage = Stage(directory, SHARED)        a run with checkpoints of both kinds, made once
    ends = stage.run(CALLS["load"], ...)    the call on every rank; one plan of faults for each rank

python -m tests.crash.one_rank [name prefix ...]       every operation of every call, with every error

Storage is reached through a protocol of its own that wraps what it opens in the plan of the rank of the
thread that opens it, and ``open_control`` gives each thread its simulated control: the calls are the
user's, from the URI on.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import ckptfs
from ckptfs.commit import session
from ckptfs.control.control import Control
from ckptfs.errors import AccessError, CkptfsError, IntegrityError, TransientError
from ckptfs.storage import registry
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.testing.faults import Action, Fail, FaultyStorage, Plan
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from ckptfs.testing.world import End, simulate
from ckptfs.uri import Uri

CAUSE = "the storage of this rank fails"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Ground:
    """The node of each rank, and what the nodes share."""

    nodes: str
    shared: bool = True
    objects: bool = False


GROUNDS = {
    "shared": Ground("aab"),
    "disks": Ground("ab", shared=False),
    "objects": Ground("ab", objects=True),
}


@dataclass
class _Here(threading.local):
    """What the thread of a rank works with."""

    control: Control | None = None
    plan: Plan = field(default_factory=Plan)
    node: str = ""
    leaving: bool = False


Call = Callable[[int], object]


def _state(rank: int) -> dict[str, Any]:
    return {"weight": torch.full((8,), 1.0), f"own.{rank}": torch.full((4,), float(rank))}


def _save(rank: int) -> object:
    return ckptfs.save(_state(rank), "rank+file:///site/run/step_2")


def _replace(rank: int) -> object:
    return ckptfs.save(_state(rank), "rank+file:///site/run/step_1", if_exists="replace")


def _load(rank: int) -> object:
    return ckptfs.load(_state(rank), "rank+file:///site/run/step_1")


def _load_stock(rank: int) -> object:
    return ckptfs.load(_state(rank), "rank+file:///site/loose/step_1")


def _load_in_a_run(rank: int) -> object:
    plan, HERE.plan = HERE.plan, Plan()
    with ckptfs.prepare_run("rank+file:///site/other") as run:
        HERE.plan = plan
        return ckptfs.load(_state(rank), "rank+file:///site/run/step_1", run=run)


def _prepare(_: int) -> object:
    with ckptfs.prepare_run("rank+file:///site/run"):
        HERE.leaving = True
    return None


def _ensure(_: int) -> object:
    return ckptfs.ensure_dir("rank+file:///site/run/logs")


def _read(uri: str) -> object:
    with ckptfs.checkpoint_dir(uri, "read") as path:
        return path


def _read_dir(_: int) -> object:
    return _read("rank+file:///site/dirs/step_1")


def _write_dir(rank: int) -> object:
    with ckptfs.checkpoint_dir("rank+file:///site/dirs/step_2") as path:
        Path(path, f"file-{rank}").write_text("x")
        return path


def _gather(_: int) -> object:
    return ckptfs.gather("rank+file:///site/run/step_1", "rank+file:///site/copies/step_1")


def _restore(rank: int) -> object:
    with ckptfs.CheckpointManager("rank+file:///site/run") as manager:
        return manager.restore(_state(rank))


def _reading(_: int) -> object:
    with (
        ckptfs.DirectoryManager("rank+file:///site/dirs") as manager,
        manager.reading() as opened,
    ):
        return opened


def _manager_save(rank: int) -> object:
    # No signal, but watched for: it then looks how long the last save took.
    signals: Iterator[str] = iter(())
    uri = "rank+file:///site/run"
    with ckptfs.CheckpointManager(uri, keep_latest=1, preempt_signals=signals) as manager:
        return manager.save(2, _state(rank))


CALLS: dict[str, Call] = {
    "save": _save,
    "replace": _replace,
    "load": _load,
    "load-stock": _load_stock,
    "load-in-a-run": _load_in_a_run,
    "prepare_run": _prepare,
    "ensure_dir": _ensure,
    "checkpoint_dir-read": _read_dir,
    "checkpoint_dir-write": _write_dir,
    "gather": _gather,
    "manager-restore": _restore,
    "directories-reading": _reading,
    "manager-save": _manager_save,
}

# What must be there after a call that succeeded, and how it is read.
MADE: dict[str, Call] = {
    "save": lambda rank: ckptfs.load(_state(rank), "rank+file:///site/run/step_2"),
    "replace": _load,
    "manager-save": lambda rank: ckptfs.load(_state(rank), "rank+file:///site/run/step_2"),
    "gather": lambda rank: ckptfs.load(_state(rank), "rank+file:///site/copies/step_1"),
    "checkpoint_dir-write": lambda _: _read("rank+file:///site/dirs/step_2"),
}

HERE = _Here()


class Stage:
    """A site with a run, a run of directories and a loose copy, as they are before each call."""

    def __init__(self, directory: Path, ground: Ground) -> None:
        self.directory = directory
        self.ground = ground
        self.server = MemoryObjects()
        self._objects: dict[str, Any] = {}
        with self._seams():
            for end in self._on_ranks(_first, {}):
                end.get()
        for place in self._places("now"):
            # A checkpoint that was copied out of its run, without the log.
            loose = place / "loose"
            shutil.copytree(place / "run" / "step_1", loose / "step_1")
        if ground.objects:
            self._objects = dict(self.server.objects)
            for key, data in self._objects.copy().items():
                if key.startswith("run/step_1/"):
                    self._objects[f"loose/{key.removeprefix('run/')}"] = data
        else:
            (directory / "now").rename(directory / "first")

    def run(self, call: Call, faults: Mapping[int, Plan]) -> list[End[object]]:
        """The call on every rank, over the site as it was in the beginning."""
        if self.ground.objects:
            self.server = MemoryObjects()
            self.server.objects.update(self._objects)
        else:
            shutil.rmtree(self.directory / "now", ignore_errors=True)
            shutil.copytree(self.directory / "first", self.directory / "now", symlinks=True)
        return self.go_on(call, faults)

    def go_on(self, call: Call, faults: Mapping[int, Plan]) -> list[End[object]]:
        """The call on every rank, over what the one before left."""
        with self._seams():
            return self._on_ranks(call, faults)

    def _places(self, state: str) -> list[Path]:
        if self.ground.objects:
            return []
        nodes = {"all"} if self.ground.shared else set(self.ground.nodes)
        return [self.directory / state / node for node in sorted(nodes)]

    def _on_ranks(self, call: Call, faults: Mapping[int, Plan]) -> list[End[object]]:
        def work(control: Control) -> object:
            HERE.control, HERE.node = control, control.world.node
            HERE.plan, HERE.leaving = faults.get(control.rank, Plan()), False
            return call(control.rank)

        return simulate(
            len(self.ground.nodes), work, nodes=list(self.ground.nodes), timeout_s=DEADLINE_S
        )

    @contextmanager
    def _seams(self) -> Iterator[None]:
        def control(**_: object) -> Control:
            assert HERE.control is not None
            return HERE.control.clone()

        with (
            patch.object(session, "open_control", control),
            patch.dict(registry._WRAPPERS, {"rank": f"{__name__}:open_storage"}),
            patch.object(sys.modules[__name__], "STAGE", self),
        ):
            yield

    def open(self, uri: Uri) -> Storage:
        """What the rank of this thread sees under a URI."""
        below = uri.full.partition("/site/")[2]
        if self.ground.objects:
            inner: Storage = ObjectStorage(
                Uri.parse(f"s3://bucket/{below}"), MemoryObjectClient(self.server)
            )
        else:
            node = "all" if self.ground.shared else HERE.node
            place = self.directory / "now" / node
            place.mkdir(parents=True, exist_ok=True)
            inner = LocalStorage(Uri.parse(f"file:///site/{below}"), directory=str(place / below))
        return FaultyStorage(inner, HERE.plan, root=uri)


STAGE: Stage | None = None


def open_storage(uri: Uri, storage_options: Mapping[str, Any]) -> Storage:
    """The factory of ``rank+file``."""
    del storage_options
    assert STAGE is not None
    return STAGE.open(uri)


def _first(rank: int) -> None:
    ckptfs.save(_state(rank), "rank+file:///site/run/step_1")
    with ckptfs.checkpoint_dir("rank+file:///site/dirs/step_1") as path:
        Path(path, f"file-{rank}").write_text("x")


@dataclass(frozen=True)
class Case:
    """One operation of one rank in one call, as it came in a clean run.

    kind: its operation and key, without what differs from run to run. leaving: the rank was leaving the
    run that it held. nth: of that kind, from 1. Threads other than the rank's own make the place in the whole
    trace differ, so another run finds the operation again by its kind.
    """

    call: str
    rank: int
    op: str
    key: str
    leaving: bool = False
    nth: int = 1

    @property
    def kind(self) -> str:
        """Equal for what is asked again in another run."""
        return kind_of(self.op, self.key)

    @property
    def errors(self) -> tuple[type[CkptfsError], ...]:
        """What this operation may fail with. Only what is read can be damaged."""
        damage = (IntegrityError,) if self.op in ("read", "read_into") else ()
        return (AccessError, TransientError, *damage)

    def __str__(self) -> str:
        when = " on leaving" if self.leaving else ""
        return f"{self.call} rank {self.rank} {self.op} {self.key} ({self.nth}.){when}"


def kind_of(op: str, key: str) -> str:
    """An operation without the ids and times that differ from run to run."""
    varies = r"[0-9a-f]{9,}|\d+-[0-9a-f]{8}|\d{8}T\d+-\w+"
    return re.sub(varies, "*", f"{op} {key}".strip())


class _Watched(Plan):
    """Finds the cases of a call, or fails the operation of one."""

    def __init__(
        self, call: str, rank: int, failing: Case | None = None, fail: Fail | None = None
    ) -> None:
        super().__init__()
        self.call, self.rank = call, rank
        self.failing, self.fail = failing, fail
        self.cases: list[Case] = []
        self.failed = False
        self._nth: Counter[tuple[str, bool]] = Counter()

    def begin(self, op: str, key: str) -> Action | None:
        """Count it; fail it where it is the one."""
        super().begin(op, key)
        with self._lock:
            kind = kind_of(op, key), HERE.leaving
            self._nth[kind] += 1
            case = Case(self.call, self.rank, op, key, HERE.leaving, self._nth[kind])
            self.cases.append(case)
        one = self.failing
        if one is None or (one.kind, one.leaving, one.nth) != (case.kind, case.leaving, case.nth):
            return None
        self.failed = True
        return self.fail


def cases_of(stage: Stage, name: str) -> list[Case]:
    """Every operation of a clean run of a call."""
    plans = {rank: _Watched(name, rank) for rank in range(len(stage.ground.nodes))}
    for end in stage.run(CALLS[name], plans):
        end.get()
    return [case for plan in plans.values() for case in plan.cases]


def verdict(stage: Stage, case: Case, error: type[Exception]) -> str:
    """How it ended: "failed", an error everywhere, which names the rank and the cause, one for all others;
    "succeeded", every rank did, and what it saved is there; "was not asked", the operation did not come
    this time; else what is wrong.
    """
    # A busy machine may stop us for so long once; what waits for a timeout does so each time.
    for _ in range(3):
        plan = _Watched(case.call, case.rank, case, Fail(error(CAUSE)))
        started = time.monotonic()
        ends = stage.run(CALLS[case.call], {case.rank: plan})
        took_s = time.monotonic() - started
        if took_s <= DEADLINE_S / 2:
            break
    else:
        return f"took {took_s:.1f} s"
    errors = [end.error for end in ends]
    if not plan.failed:
        return "was not asked"
    if not any(errors):
        made = stage.go_on(MADE[case.call], {}) if case.call in MADE else []
        lost = [end.error for end in made if end.error is not None]
        return f"nothing was saved: {lost[0]}" if lost else "succeeded"
    if not all(errors):
        return f"only some ranks failed: {errors}"
    for one in errors:
        assert one is not None
        if not isinstance(one, CkptfsError):
            return f"{type(one).__name__}: {one}"
        if CAUSE not in str(one):
            return f"the cause is lost: {type(one).__name__}: {one}"
        text_names = f"rank {case.rank}" in str(one) or one.rank == case.rank
        if not text_names and case.rank not in getattr(one, "failures", ()):
            return f"the rank is lost: {type(one).__name__}: {one}"
    # Only in a block that a user left: the rank that failed keeps the error that it met.
    others = [e for rank, e in enumerate(errors) if rank != case.rank or not isinstance(e, error)]
    if len({(type(one), str(one)) for one in others}) > 1:
        return f"different errors: {[(type(one).__name__, str(one)) for one in errors]}"
    return "failed"


def main() -> int:
    """Every case; prints what is wrong, and what succeeded in spite of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", nargs="*", default=["*"], help="ground:call, as shell patterns")
    parser.add_argument("--error", default="*", help="a class of ckptfs.errors, as shell pattern")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for place, ground in GROUNDS.items():
            named = [n for n in CALLS if _is_wanted(f"{place}:{n}", options.calls)]
            if not named:
                continue
            stage = Stage(Path(directory, place), ground)
            for name in named:
                wrong += _campaign(stage, f"{place}:{name}", name, options.error)
    return 1 if wrong else 0


def _is_wanted(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _campaign(stage: Stage, title: str, name: str, wanted: str) -> int:
    began, wrong = time.monotonic(), 0
    spared: Counter[str] = Counter()
    cases = cases_of(stage, name)
    for case in cases:
        for error in case.errors:
            if not fnmatch.fnmatchcase(error.__name__, wanted):
                continue
            found = verdict(stage, case, error)
            if found in ("succeeded", "was not asked"):
                spared[f"{found}: {case.op} {case.key} {error.__name__}"] += 1
            elif found != "failed":
                wrong += 1
                print(f"  {case} {error.__name__}: {found}", flush=True)
    print(f"{title}: {len(cases)} operations, {time.monotonic() - began:.1f} s", flush=True)
    for text, count in spared.items():
        print(f"    {text} ({count})")
    return wrong


if __name__ == "__main__":
    from tests.crash import one_rank

    sys.exit(one_rank.main())
