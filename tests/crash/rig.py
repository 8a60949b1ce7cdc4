"""The rig of the crash tests: one small run, who sits at it, and how its state is judged.

    layout    which ranks there are, on which nodes, and whether the nodes share the disk
    scenario  what lay there before, and what the victim was doing when it died
    judge     readers and stock's eyes on every node; then the next writer; then readers again

No torch here. A data file says which save and rank wrote it, so that a mix of two saves shows.
``.metadata`` is a stand-in: it lists the files that a stock reader would open.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.catalog.catalog import LocatedCheckpoint, list_live, read_view
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.catalog.unlogged import list_unlogged
from ckptfs.commit.directory_checkpoints.write import (
    Publication,
    collected_files,
    list_files,
    share_files,
)
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Mode, claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import IfExists, SaveSpec, WrittenPart
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import Control
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    CommitInDoubtError,
    IncompleteCheckpointError,
    NoSpaceError,
    NotFoundError,
)
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.testing.faults import Action, Fail, FaultyStorage, Kill, Plan, When
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.testing.world import End, SimulatedDeath, simulate
from ckptfs.uri import Uri

RUN = "deep/run"  # so that a newborn run has a missing ancestor too
DATA_BYTES = 3000
State = Mapping[str, str]  # name of a checkpoint -> label of the save that it shows


@dataclass(frozen=True)
class Layout:
    """The node of each rank, and whether all nodes see one disk."""

    nodes: tuple[str, ...]
    shared: bool

    def directory(self, base: str, node: str) -> str:
        """Where the run is for a node."""
        return f"{base}/{RUN}" if self.shared else f"{base}/{node}/{RUN}"

    def directories(self, base: str) -> dict[str, str]:
        """One directory per domain, by the first node that sees it."""
        out: dict[str, str] = {}
        for node in self.nodes:
            if (path := self.directory(base, node)) not in out.values():
                out[node] = path
        return out

    def ranks_at(self, node: str) -> list[int]:
        """The ranks with files in the domain of ``node``."""
        return [r for r, n in enumerate(self.nodes) if self.shared or n == node]


SOLO = Layout(("a",), shared=True)
ONE_DOMAIN = Layout(("a", "a", "b"), shared=True)  # an owner, a mere writer, another node's lead
TWO_DOMAINS = Layout(("a", "b"), shared=False)
TWO_FULL_DOMAINS = Layout(("a", "a", "b"), shared=False)


# -- what ranks do ------------------------------------------------------------------------------


def contents(label: str, rank: int) -> bytes:
    """The bytes of one rank's file in one save."""
    line = f"{label} of rank {rank}\n".encode()
    return (line * (DATA_BYTES // len(line) + 1))[:DATA_BYTES]


def save(
    session: RunSession, name: str, label: str, run: Run | None = None, *, replace: bool = False
) -> str:
    """One save over all ranks; abandons on failure, as the callers of SaveAttempt do."""
    spec = SaveSpec(
        name,
        None,
        IfExists.REPLACE if replace else IfExists.ERROR,
        run=None if run is None else run.generation,
    )
    attempt = SaveAttempt(session, spec)
    rank = session.control.rank

    def write() -> WrittenPart:
        data = contents(label, rank)
        with session.storage.open_write(f"{attempt.prefix}__{rank}_0.distcp") as writer:
            writer.write(data)
        path = f"{attempt.save_id}/__{rank}_0.distcp"
        return WrittenPart((FileRecord(path, len(data), session.placement.mine.id),))

    def finish(parts: list[WrittenPart]) -> dict[str, bytes]:
        paths = [f.path for part in parts for f in part.files]
        return {".metadata": json.dumps({"label": label, "files": paths}).encode()}

    try:
        attempt.begin()
        return attempt.commit(write, finish).save_id
    except BaseException:
        attempt.abandon()
        raise


def save_directory(session: RunSession, name: str, label: str) -> None:
    """A commit of files with plain names, as checkpoint_dir makes it."""
    attempt = SaveAttempt(session, SaveSpec(name, None, artifact=Kind.DIRECTORY))
    rank = session.control.rank
    try:
        attempt.begin()
        with collected_files(attempt) as collector:
            with open(f"{collector.path}/plain_{rank}_0.distcp", "wb") as file:
                file.write(contents(label, rank))
            session.control.step("leave", lambda: None)
            collector.share_out()
            attempt.commit(collector.write, collector.finish)
    except BaseException:
        attempt.abandon()
        raise


def publish(session: RunSession, name: str, label: str) -> None:
    """A commit of a directory next to the run, as DirectoryManager.save makes it."""
    control, here = session.control, session.storage.local_path("")
    assert here is not None
    source = os.path.join(here, "..", "..", f"source-{control.world.node}")
    os.makedirs(source, exist_ok=True)
    with open(f"{source}/plain_{control.rank}_0.distcp", "wb") as file:
        file.write(contents(label, control.rank))
    control.step("written", lambda: None)
    nodes = [world.node for world in control.worlds]
    shares = control.step(
        "list",
        lambda: list_files(source) if session.placement.is_node_lead else None,
        lambda told: share_files(told, nodes, [d.ranks for d in session.placement.domains]),
    )
    attempt = SaveAttempt(session, SaveSpec(name, None, artifact=Kind.DIRECTORY))
    try:
        attempt.begin()
        part = Publication(attempt, session, source, shares[control.rank])
        attempt.commit(part.write, part.finish)
    except BaseException:
        attempt.abandon()
        raise


Body = Callable[[RunSession], Any]


def sessions(
    layout: Layout,
    base: str,
    body: Body,
    *,
    job: str,
    write: bool = True,
    plans: Mapping[int, Plan] | None = None,
    posix: Posix | None = None,
    read_only: bool = False,
) -> list[End[Any]]:
    """Run ``body(session)`` on every rank of the layout."""

    def sit(control: Control) -> Any:
        where = layout.directory(base, control.world.node)
        root = Uri.parse("/simulated/run")  # the same on every node, as node-local paths are
        storage: Storage = LocalStorage(root, posix=posix, directory=where)
        if plans and control.rank in plans:
            storage = FaultyStorage(storage, plans[control.rank])
        guard = ReadOnlyStorage(storage) if read_only else None
        storage = guard or storage
        value = body(start_session(control, storage, Place(), write=write))
        assert guard is None or guard.refused == 0, "a reader tried to write"
        return value

    return simulate(len(layout.nodes), sit, nodes=layout.nodes, job_id=job, timeout_s=120.0)


def values(ends: Sequence[End[Any]]) -> list[Any]:
    """The values of all ranks; raises the first error."""
    return [end.get() for end in ends]


# -- scenarios ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """before: makes what is there; victim: what is killed. old, new: the states allowed.

    between: further states that a reader may see until the next owner came. stages: what may stand for good
    besides, of a victim that commits more than once. foreign: files put there by somebody else, that must survive: paths below the run, the same in every domain.
    lingering: what one node's own log may still list, because another node's deleted it. removed: what
    somebody removed by hand: the logs list it until they say so, and there is nothing to be found.
    """

    before: Body
    victim: Body
    old: State
    new: State
    between: tuple[State, ...] = ()
    stages: tuple[State, ...] = ()
    foreign: tuple[str, ...] = ()
    lingering: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


def _one(session: RunSession) -> None:
    save(session, "step_1", "one")


def _fresh(session: RunSession) -> None:
    save(session, "step_2", "two")


def _fenced_fresh(session: RunSession) -> int:
    with claim(session) as run:
        save(session, "step_2", "two", run)
    return run.generation.number


def _replaced_once(session: RunSession) -> None:
    save(session, "step_1", "one")
    with claim(session) as run:
        save(session, "step_1", "uno", run, replace=True)


def _replace_again(session: RunSession) -> int:
    # The first one goes now: its successor has a successor.
    with claim(session) as run:
        save(session, "step_1", "eins", run, replace=True)
    return run.generation.number


def _two(session: RunSession) -> None:
    save(session, "step_1", "one")
    save(session, "step_2", "two")


def _overwrite(session: RunSession) -> int:
    with claim(session, Mode.OVERWRITE) as run:
        save(session, "step_3", "three", run)
    return run.generation.number


def _retire(session: RunSession) -> int:
    with claim(session) as run:
        retirer = Retirer(run, Keep(1), lambda _: True)
        retained = retirer.after_commit(run.session)
        retirer.close(30.0)  # the removal is done, or killed, before the release
    if retained is None:
        raise CommitInDoubtError("a rank was lost while the delete was entered")
    return run.generation.number


def _held_twice(session: RunSession) -> int:
    # The second one knows what the first has made durable.
    with claim(session) as run:
        save(session, "step_2", "two", run)
        save(session, "step_3", "three", run)
    return run.generation.number


def _withdrawn(session: RunSession) -> int:
    # No other save comes between the projection and the delete.
    is_saved = False
    try:
        with claim(session) as run:
            retirer = Retirer(run, Keep(), lambda _: True)
            save_id = save(session, "step_2", "two", run)
            is_saved = True
            retirer.delete(run.session, save_id)
            retirer.close(30.0)
    except CkptfsError as error:
        if is_saved:
            raise
        # Without this save the run is as it is after the delete: its failure is judged in "fenced".
        raise CommitInDoubtError("the save ended before the delete") from error
    return run.generation.number


def _claim(session: RunSession) -> int:
    with claim(session) as run:
        return run.generation.number


def _directory(session: RunSession) -> None:
    save_directory(session, "step_2", "two")


def _published(session: RunSession) -> None:
    publish(session, "step_2", "two")


def _abandoned(session: RunSession) -> None:
    attempt = SaveAttempt(session, SaveSpec("step_2", None))

    def write() -> WrittenPart:
        with session.storage.open_write(
            f"{attempt.prefix}__{session.control.rank}_0.distcp"
        ) as writer:
            writer.write(contents("two", session.control.rank))
        raise NoSpaceError("the disk is full", uri=session.storage.root)

    try:
        attempt.begin()
        attempt.commit(write, lambda _: {})
    except CollectiveError:
        attempt.abandon()


def _nothing(session: RunSession) -> None:
    del session


def _one_removed(session: RunSession) -> None:
    save(session, "step_1", "one")
    save(session, "step_2", "two")
    if session.placement.is_owner:
        shutil.rmtree(session.storage.local_path("step_1") or "")


def _removed_again(session: RunSession) -> None:
    save(session, "step_1", "uno")


def _birth(session: RunSession) -> None:
    save(session, "step_1", "one")


SCENARIOS = {
    "abandoned": Scenario(_one, _abandoned, {"step_1": "one"}, {"step_1": "one"}),
    "claim": Scenario(_nothing, _claim, {}, {}),
    "birth": Scenario(_nothing, _birth, {}, {"step_1": "one"}),
    "directory": Scenario(_one, _directory, {"step_1": "one"}, {"step_1": "one", "step_2": "two"}),
    "published": Scenario(_one, _published, {"step_1": "one"}, {"step_1": "one", "step_2": "two"}),
    "fresh": Scenario(_one, _fresh, {"step_1": "one"}, {"step_1": "one", "step_2": "two"}),
    "fenced": Scenario(
        _one,
        _fenced_fresh,
        {"step_1": "one"},
        {"step_1": "one", "step_2": "two"},
        # A driver's save_object got there first: the step directory exists.
        foreign=("step_1/notes.txt", "step_2/data.pt", "step_9/only.pt"),
    ),
    "twice": Scenario(
        _one,
        _held_twice,
        {"step_1": "one"},
        {"step_1": "one", "step_2": "two", "step_3": "three"},
        stages=({"step_1": "one", "step_2": "two"},),
    ),
    "withdrawn": Scenario(
        _one,
        _withdrawn,
        {"step_1": "one", "step_2": "two"},
        {"step_1": "one"},
        lingering=frozenset({"step_2"}),
    ),
    "replace": Scenario(
        _replaced_once,
        _replace_again,
        {"step_1": "uno"},
        {"step_1": "eins"},
        foreign=("step_1/notes.txt",),
    ),
    "overwrite": Scenario(
        _two,
        _overwrite,
        {"step_1": "one", "step_2": "two"},
        {"step_3": "three"},
        between=({},),
        foreign=("step_1/notes.txt", "mine/backup.bin"),
    ),
    "retire": Scenario(
        _two,
        _retire,
        {"step_1": "one", "step_2": "two"},
        {"step_2": "two"},
        foreign=("step_1/notes.txt", "mine/backup.bin"),
        lingering=frozenset({"step_1"}),
    ),
    "removed": Scenario(
        _one_removed,
        _removed_again,
        {"step_2": "two"},
        {"step_1": "uno", "step_2": "two"},
        removed=frozenset({"step_1"}),
    ),
}


def prepare(scenario: Scenario, layout: Layout, base: str) -> None:
    """What lay there before the victim came."""
    os.makedirs(base)
    if scenario.before is _nothing:
        return
    for path in layout.directories(base).values():
        os.makedirs(path)
        for name in scenario.foreign:
            os.makedirs(os.path.dirname(f"{path}/{name}"), exist_ok=True)
            with open(f"{path}/{name}", "w", encoding="utf-8") as file:
                file.write(f"foreign {name}")
    values(sessions(layout, base, scenario.before, job="before"))


# -- where it dies ------------------------------------------------------------------------------

HALVES = frozenset({"write", "create", "replace", "make_dir", "remove_tree"})


@dataclass(frozen=True)
class Point:
    """The moment: before, half-way through or after the ``nth`` operation of ``rank``."""

    rank: int
    nth: int
    when: str = "before"

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.when} operation {self.nth}"


class Mortal(Plan):
    """Ends the process, or (alone=True) this rank only, at one operation; counts from 1.

    A rank that died alone may do nothing any more: its thread still runs its ``finally`` blocks.
    """

    def __init__(self, nth: int | None, when: str, *, alone: bool) -> None:
        super().__init__()
        self._nth, self._when, self._alone = nth, When(when), alone
        self.names: list[tuple[str, str]] = []

    def begin(self, op: str, key: str) -> Action | None:
        if op == "touch":  # from a timer's thread, at no fixed place in the order
            return Fail(SimulatedDeath()) if self._dead() else None
        with self._lock:
            was_dead = self._dead()
            self.names.append((op, key))
            if self._nth is None or len(self.names) < self._nth:
                return None
            if not self._alone:
                return Kill(self._when)
            return Fail(SimulatedDeath(), When.BEFORE if was_dead else self._when)

    def _dead(self) -> bool:
        return self._nth is not None and len(self.names) >= self._nth


def points(scenario: Scenario, layout: Layout, base: str) -> Iterator[Point]:
    """Every moment of every rank, found by letting the victim live once. Uses up ``base``."""
    plans = {rank: Mortal(None, "before", alone=True) for rank in range(len(layout.nodes))}
    values(sessions(layout, base, scenario.victim, job="victim", plans=plans))
    for rank, plan in plans.items():
        for nth, (op, _) in enumerate(plan.names, 1):
            yield Point(rank, nth)
            if op in HALVES:
                yield Point(rank, nth, "half")
            if op == "create":  # done, and without an answer
                yield Point(rank, nth, "after")


# -- the judge ----------------------------------------------------------------------------------


@dataclass
class Sight:
    """What one look at a run found. local: what each rank's node lists by itself.
    fences: the newest generation's number in each rank's log.
    """

    state: dict[str, str]
    local: list[set[str]]
    fences: list[int]


def look(layout: Layout, base: str, names: Sequence[str]) -> Sight:
    """Read everything there is, through every rank, with a storage that refuses to write."""

    def read(session: RunSession) -> tuple[dict[str, str], set[str], int]:
        seen = {}
        for name in names:
            try:
                found = locate(session, name)
            except (NotFoundError, IncompleteCheckpointError):
                continue  # also what the log has and no reader finds: it is in no state that is allowed
            seen[name] = _label(session, found)
        view = drive(read_view(), session.storage)
        views = {} if view is None else dict([view])
        unlogged = drive(list_unlogged(views, session.storage.root), session.storage)
        assert not unlogged, f"not in the log, yet listed: {unlogged}"
        fence = max((v.generation.number for v in views.values()), default=0)
        return seen, {seal.name for seal in list_live(views)}, fence

    found = values(sessions(layout, base, read, job="reader", write=False, read_only=True))
    states = [state for state, _, _ in found]
    assert all(state == states[0] for state in states), f"ranks see different states: {states}"
    return Sight(states[0], [names for _, names, _ in found], [fence for _, _, fence in found])


def _label(session: RunSession, found: LocatedCheckpoint) -> str:
    """Read this rank's share of a checkpoint, bit by bit."""
    assert found.manifest is not None
    files = [f for f in found.manifest.files if f.path.endswith(".distcp")]
    if found.manifest.artifact is Kind.DIRECTORY:
        here = next(f for f in files if f.domain == session.placement.mine.id)
        label = session.storage.read(f"{found.home}/{here.path}").decode().split()[0]
    else:
        said = json.loads(session.storage.read(found.metadata))
        label = str(said["label"])
        assert sorted(f.path for f in files) == sorted(said["files"])
    for record in files:
        if record.domain == session.placement.mine.id:
            data = session.storage.read(f"{found.home}/{record.path}")
            wanted = contents(label, rank_of(record.path))
            assert data == wanted, f"{record.path} is not what {label} wrote"
    return label


def rank_of(path: str) -> int:
    """The rank that wrote a file."""
    return int(path.rsplit("/", 1)[-1].split("_")[-2])


def stock_look(layout: Layout, base: str) -> dict[str, set[str]]:
    """What a reader sees that knows only step_N and its .metadata: labels by name, all domains.

    A ``.metadata`` with files that are missing or of another save fails here.
    """
    seen: dict[str, set[str]] = {}
    for node, path in layout.directories(base).items():
        for name in sorted(os.listdir(path)) if os.path.exists(path) else ():
            if name != ".ckptfs" and (found := _stock_label(f"{path}/{name}", layout, node)):
                seen.setdefault(name, set()).add(found)
    return seen


def _stock_label(step: str, layout: Layout, node: str) -> str | None:
    mine = layout.ranks_at(node)
    paths = [f"plain_{rank}_0.distcp" for rank in mine]
    if os.path.exists(f"{step}/.metadata"):
        with open(f"{step}/.metadata", encoding="utf-8") as file:
            said = json.load(file)
        label, paths = said["label"], [p for p in said["files"] if rank_of(p) in mine]
    elif os.path.exists(f"{step}/{paths[0]}"):
        with open(f"{step}/{paths[0]}", encoding="utf-8") as file:
            label = file.read().split()[0]
    else:
        return None
    for path in paths:
        with open(f"{step}/{path}", "rb") as data:
            assert data.read() == contents(label, rank_of(path)), f"a mix in {step}"
    return str(label)


@dataclass(frozen=True)
class Told:
    """What the victim's ranks learned before the end, or what the survivors learned.

    acknowledged: some call returned. failed: some call raised an error with outcome "failed".
    fence: number of the fence of a call that returned, 0 for none.
    """

    acknowledged: bool = False
    failed: bool = False
    fence: int = 0


def judge(
    scenario: Scenario, layout: Layout, base: str, told: Told, *, next_job: str = "next"
) -> str:
    """Everything that must hold after the victim's death. Returns "old" or "new".

    next_job: the victim's own, where its process lives and would be waited for.
    """
    names = sorted({*scenario.old, *scenario.new})
    first = look(layout, base, names)
    lasting = (scenario.old, scenario.new, *scenario.stages)
    allowed = [*lasting, *scenario.between]
    assert first.state in allowed, f"neither old nor new: {first.state}"
    assert not told.acknowledged or first.state == scenario.new, "an acknowledged save is gone"
    if told.failed and scenario.new != scenario.old:
        assert first.state != scenario.new, "a save that surely failed is there"
    assert min(first.fences) >= told.fence, "an acknowledged fence is gone"
    if first.state in lasting:
        _check_local(layout, first, scenario.lingering | scenario.removed)
    _check_stock(stock_look(layout, base), first.state, scenario)

    # The next writer: recovers, continues, leaves in peace.
    def go_on(session: RunSession) -> None:
        with claim(session) as run:
            save(session, "next", "next", run)

    values(sessions(layout, base, go_on, job=next_job))
    after = look(layout, base, [*names, "next"])
    settled = {name: label for name, label in after.state.items() if name != "next"}
    assert after.state.get("next") == "next"
    if first.state in lasting:
        assert settled == first.state, f"recovery changed {first.state} to {settled}"
    assert settled in lasting, f"neither old nor new: {settled}"
    unfound = scenario.removed - set(after.state)
    assert all(local - unfound == set(after.state) for local in after.local), after.local
    stock = stock_look(layout, base)
    assert stock == {name: {label} for name, label in after.state.items()}, f"stock sees {stock}"
    _check_clean(scenario, layout, base, after.state)
    return "new" if settled == scenario.new else "old"


def _check_local(layout: Layout, sight: Sight, lingering: frozenset[str]) -> None:
    """One node's list: everything where it knows everything, never more than there is."""
    for local in sight.local:
        wrong = local - set(sight.state) - lingering
        assert not wrong, f"listed, not to be found: {wrong}"
        if layout.shared:
            assert local - lingering == set(sight.state) - lingering


def _check_stock(stock: dict[str, set[str]], state: State, scenario: Scenario) -> None:
    """Never newer than the commit; older in two windows: from the commit to the projection, and
    from a delete entry to the removal.
    """
    for name, labels in stock.items():
        allowed = {scenario.old.get(name), state.get(name)}
        assert labels <= allowed, f"stock sees {labels} of {name}, the log says {state}"


def _check_clean(scenario: Scenario, layout: Layout, base: str, state: State) -> None:
    """Nothing of a dead attempt is left; what somebody else put there is."""
    for path in layout.directories(base).values():
        left = os.listdir(f"{path}/.ckptfs/attempts")
        assert not left, f"dead attempts are left: {left}"
        trash = f"{path}/.ckptfs/trash"
        left = [f"{top}/{n}" for top, _, files in os.walk(trash) for n in files]
        assert not left, f"in the trash: {left}"
        assert len(os.listdir(trash)) <= 1, f"older trash: {os.listdir(trash)}"
        wanted = {".ckptfs", *state, *(name.split("/")[0] for name in scenario.foreign)}
        assert set(os.listdir(path)) == wanted, f"left over: {set(os.listdir(path)) - wanted}"
        for name in scenario.foreign:
            with open(f"{path}/{name}", encoding="utf-8") as file:
                assert file.read() == f"foreign {name}"
        for name in wanted - {".ckptfs"}:
            foreign = {f.split("/")[1] for f in scenario.foreign if f.startswith(f"{name}/")}
            found = set(os.listdir(f"{path}/{name}")) - foreign
            _check_step(f"{path}/{name}", found, live=name in state)


def _check_step(step: str, found: set[str], *, live: bool) -> None:
    """A step directory holds one save and nothing of any other."""
    if not live:
        assert not found, f"left over in {step}: {found}"
        return
    with open(f"{step}/ckptfs.json", encoding="utf-8") as file:
        manifest = json.load(file)
    listed = {f["path"].split("/")[0] for f in manifest["files"]}
    allowed = {"ckptfs.json", ".metadata", manifest["save_id"], *listed}
    assert found <= allowed, f"left over in {step}: {found - allowed}"
