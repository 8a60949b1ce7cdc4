"""Where the machine's processes live: their disks, their deaths, and the ranks that use them.

    site = Site(Layout.TWO_DOMAINS)                 two nodes, each with a disk of its own
    crew = Crew(site, keep=..., mode=...)           one process per rank: a manager each, on threads
    ends = crew.each(lambda member: member.manager.save(1, state))
    site.fate.arm(Blow(rank=1, nth=17, how=How.ALONE))     the 17th operation of rank 1 is its last
    crew.bury()                                     nothing of these processes touches a disk again

The storage is opened by URI like any other: ``simulated://here/run`` with the options ``site`` and
``rank``. Everything between the manager and the disk is the real thing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ckptfs.commit.session import Place
from ckptfs.manager.manager import CheckpointManager
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.testing.faults import Action, Fail, FaultyStorage, Plan, When
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from ckptfs.testing.world import End, SimulatedDeath, ThreadControl, thread_worlds
from ckptfs.uri import Uri

T = TypeVar("T")

RUN = "simulated://here/run"
GROWING = frozenset({"create", "replace", "open_write", "write", "close", "make_dir"})
CHANGING = GROWING | {"rename", "sync", "remove", "remove_dir", "remove_tree", "remove_many"}


class Layout(Enum):
    """The node of each rank of the largest world, whether all nodes see one place, and what it is."""

    SOLO = (("a",), True, Shape.FILESYSTEM)
    ONE_DOMAIN = (("a", "a"), True, Shape.FILESYSTEM)
    TWO_NODES = (("a", "b"), True, Shape.FILESYSTEM)
    TWO_DOMAINS = (("a", "b"), False, Shape.FILESYSTEM)
    BUCKET = (("a", "b"), True, Shape.OBJECT)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank."""
        nodes: tuple[str, ...] = self.value[0]
        return nodes

    @property
    def shared(self) -> bool:
        """Whether there is one disk for all."""
        return bool(self.value[1])

    @property
    def is_bucket(self) -> bool:
        """Whether it is an object store."""
        return self.value[2] is Shape.OBJECT


class How(Enum):
    """What happens at the chosen operation."""

    ALONE = "this rank dies"
    ALL = "every rank dies"
    FULL = "the disk of this rank is full from here on"
    EIO = "this one operation fails"


@dataclass(frozen=True)
class Blow:
    """At the ``nth`` operation of ``rank`` from now. when: for deaths."""

    rank: int
    nth: int
    how: How
    when: When = When.BEFORE


class Fate:
    """Who is dead, and what will go wrong next. One for all ranks of a crew; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blow: Blow | None = None
        self._count = 0
        self.dead: set[int] = set()
        self.struck = False

    def arm(self, blow: Blow | None) -> None:
        """Forget what was planned, and plan this."""
        with self._lock:
            self._blow, self._count, self.struck = blow, 0, False

    def kill_all(self) -> None:
        """Every rank, now."""
        with self._lock:
            self.dead.update(range(8))

    def judge(self, rank: int, op: str) -> Action | None:
        """What becomes of one operation."""
        with self._lock:
            if rank in self.dead:
                # A timer's touch, of no rank: an error that it swallows, where a death would be reported.
                return Fail(OSError(errno.EIO, "dead") if op == "touch" else SimulatedDeath())
            blow = self._blow
            if blow is None or blow.rank != rank or op == "touch":
                return None  # touch comes from a timer's thread, at no fixed place in the order
            self._count += 1
            if self._count < blow.nth:
                return None
            return self._strike(blow, op)

    def _strike(self, blow: Blow, op: str) -> Action | None:
        first = self._count == blow.nth
        match blow.how:
            case How.ALONE | How.ALL:
                self.struck = True
                self.dead.update([blow.rank] if blow.how is How.ALONE else range(8))
                return Fail(SimulatedDeath(), blow.when)
            case How.FULL if op in GROWING:
                self.struck = True
                return Fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            case How.EIO if first and op in CHANGING:
                self.struck = True
                return Fail(OSError(errno.EIO, os.strerror(errno.EIO)))
        return None


class _Plan(Plan):
    def __init__(self, fate: Fate, rank: int) -> None:
        super().__init__()
        self._fate, self._rank = fate, rank

    def begin(self, op: str, key: str) -> Action | None:
        return self._fate.judge(self._rank, op)


_SITES: dict[str, Site] = {}
_numbers = itertools.count(1)


class Site:
    """The disks of one run, or its bucket. They outlive the processes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.name = f"site-{next(_numbers)}"
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.base = tempfile.mkdtemp(prefix="machine-", dir=memory)
        self.bucket = MemoryObjects() if layout.is_bucket else None
        self.fate = Fate()
        _SITES[self.name] = self

    def directory(self, node: str) -> Path:
        """Where the run is for a node."""
        return Path(self.base, "run") if self.layout.shared else Path(self.base, node, "run")

    def directories(self) -> list[Path]:
        """One per domain."""
        return list(dict.fromkeys(self.directory(node) for node in self.layout.nodes))

    def nodes_of(self, size: int) -> tuple[str, ...]:
        """The nodes of a world of ``size`` ranks: one disk of its own must not go without a rank."""
        return self.layout.nodes[:size]

    def options(self, rank: int) -> dict[str, Any]:
        """The storage options by which a rank finds its disk."""
        return {"site": self.name, "rank": rank}

    def open(self, uri: Uri, rank: int) -> Storage:
        """The disk as rank ``rank`` has it: it may die over it."""
        inner = self.plain(uri, rank)
        return FaultyStorage(inner, _Plan(self.fate, rank), root=uri)

    def plain(self, uri: Uri, rank: int) -> Storage:
        """The same without any fate."""
        if self.bucket is not None:
            return ObjectStorage(uri, MemoryObjectClient(self.bucket))
        below = uri.path.removeprefix("/run").strip("/")
        where = self.directory(self.layout.nodes[rank])
        return LocalStorage(uri, directory=str(where / below if below else where))

    def put(self, key: str, text: str) -> None:
        """Somebody else puts a file of their own into the run, on every disk."""
        if self.bucket is not None:
            self.bucket.put_behind(f"run/{key}", text.encode())
            return
        for run in self.directories():
            (run / key).parent.mkdir(parents=True, exist_ok=True)
            (run / key).write_text(key)

    def texts(self, key: str) -> set[str]:
        """What that file holds now, on every disk."""
        if self.bucket is not None:
            return {self.bucket.objects[f"run/{key}"].data.decode()}
        return {(run / key).read_text() for run in self.directories()}

    def keys(self, below: str) -> list[str]:
        """The files directly below a key, on the first disk."""
        if self.bucket is not None:
            return [key for key in list(self.bucket.objects) if key.startswith(f"run/{below}/")]
        directory = self.directories()[0] / below
        return [str(path) for path in directory.iterdir()] if directory.is_dir() else []

    def wipe(self) -> None:
        """The test is over."""
        _SITES.pop(self.name, None)
        shutil.rmtree(self.base, ignore_errors=True)


def open_simulated(uri: Uri, storage_options: Mapping[str, Any]) -> Storage:
    """The registry's factory of ``simulated``."""
    return _SITES[storage_options["site"]].open(uri, int(storage_options["rank"]))


@contextlib.contextmanager
def registered(directory: Path) -> Iterator[None]:
    """``simulated://`` is a backend for as long as the block lasts; its package is in directory."""
    import sys

    package = directory / "simulated-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: simulated\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[ckptfs.backends]\nsimulated = simulated_disk:open_simulated\n"
    )
    (directory / "simulated_disk.py").write_text(
        f"import sys\nopen_simulated = sys.modules[{__name__!r}].open_simulated\n"
    )
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop("simulated_disk", None)


@dataclass
class Member:
    """One rank's process."""

    rank: int
    control: ThreadControl
    manager: CheckpointManager


class Crew:
    """The processes of one job, from its start to its end. options: of every manager."""

    def __init__(self, site: Site, size: int, **options: Any) -> None:
        self.site = site
        self.size = size
        site.fate = Fate()
        controls = thread_worlds(size, nodes=site.nodes_of(size), timeout_s=120.0)
        self.members = [Member(c.rank, c, _manager(site, c, options)) for c in controls]

    @property
    def alive(self) -> bool:
        """Whether all live."""
        return not self.site.fate.dead

    def each(self, act: Callable[[Member], T]) -> list[End[T]]:
        """The same call on every rank at once; how each ended. A hang is an end with a name."""
        ends: list[End[T]] = [End(m.rank, error=TimeoutError("did not end")) for m in self.members]

        def run(member: Member) -> None:
            try:
                ends[member.rank] = End(member.rank, value=act(member))
            except SimulatedDeath:
                member.control.die()
                # Without its frames: what they hold, a killed process holds no more.
                ends[member.rank] = End(member.rank, error=SimulatedDeath())
            except BaseException as error:  # noqa: BLE001 - the rank's end, whatever it is
                ends[member.rank] = End(member.rank, error=error)

        run_all(run, self.members)
        return ends

    def bury(self) -> None:
        """The processes are gone: their threads end, and no operation of theirs is done."""
        self.site.fate.kill_all()
        for member in self.members:
            member.control.die()

        def end(member: Member) -> None:
            # Every storage operation and every step of it fails; only its threads are wanted.
            with contextlib.suppress(BaseException):
                member.manager.close()
            with contextlib.suppress(BaseException):
                member.control.leave_all()

        run_all(end, self.members)


def run_all(act: Callable[[Any], None], members: Sequence[Any]) -> None:
    """One thread per rank, all joined."""
    if len(members) == 1:
        act(members[0])
        return
    threads = [threading.Thread(target=act, args=(m,), daemon=True) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"


def _manager(site: Site, control: ThreadControl, options: Mapping[str, Any]) -> CheckpointManager:
    given = site.options(control.rank)
    ground = RunHandle(Where(RUN, Place(given)), control=control)
    return CheckpointManager(RUN, storage_options=given, ground=ground, **options)
