"""A trainer on a disk that loses its power: does what it is asked, and says what it was promised.

    live DIRECTORY SYNCS SEED   a life begins: on that filesystem, with those of ckptfs's fsyncs
    prepare save overwrite retention background pointer copy plain     one operation
    end                         the life is over; another may begin, elsewhere

Each life is a forked process of this one, which has imported torch once. What it says is in
``promises``; "done" is said when the call of ckptfs has returned.

    run/      prepare_run, save, save(if_exists="replace"), CheckpointManager with retention
    files/    DirectoryManager with retention and a file ``latest``
    copies/   ckptfs cp --overwrite, of the newest of run/
    plain/    no ckptfs: temporary file, rename, no fsync; what people write by hand
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from stat import S_ISDIR
from typing import Any, BinaryIO

import ckptfs
from ckptfs.cli.main import main as command_line
from ckptfs.storage import registry
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.uri import Uri
from tests.cuts.contents import FILES, file_of, state_of

KEPT = 2  # checkpoints that retention leaves in each run


class Syncs(StrEnum):
    """Which fsyncs of ckptfs's storage reach the kernel; all but the first are controls."""

    ALL = "all"
    NO_FILES = "no-files"
    NO_DIRECTORIES = "no-directories"
    NONE = "none"


class _Deaf(Posix):
    def __init__(self, syncs: Syncs) -> None:
        self._files = syncs in (Syncs.ALL, Syncs.NO_DIRECTORIES)
        self._directories = syncs in (Syncs.ALL, Syncs.NO_FILES)

    def fsync(self, fd: int) -> None:
        is_directory = S_ISDIR(os.fstat(fd).st_mode)
        if self._directories if is_directory else self._files:
            super().fsync(fd)


def _leave_out(syncs: Syncs) -> None:
    choose = registry._factory

    def chosen(uri: Uri) -> registry.Factory:
        def local(place: Uri, options: Mapping[str, Any]) -> LocalStorage:
            return LocalStorage(place, posix=_Deaf(syncs))

        return local if uri.protocol == "file" else choose(uri)

    registry._factory = chosen


class Life:
    """What one trainer has done, and the next thing that it does."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed * 1000
        self._order: dict[str, list[str]] = {"run": [], "files": [], "copies": [], "plain": []}
        self._seeds: dict[str, int] = {}  # of what is in run/
        self._run: ckptfs.Run | None = None
        self._steps = 0
        self.operations: Mapping[str, Callable[[], None]] = {
            "prepare": self.prepare,
            "save": self.save,
            "overwrite": self.overwrite,
            "retention": self.retention,
            "background": self.background,
            "pointer": self.pointer,
            "copy": self.copy,
            "plain": self.plain,
        }

    def prepare(self) -> None:
        """Claim the run, from an owner that did not release it."""
        _say("begin prepare")
        # This process lives, and would be waited for.
        self._run = ckptfs.prepare_run(self._directory / "run", takeover="force")
        _say("done prepare")

    def save(self) -> None:
        """A new step."""
        with self._writing("save", "run", self._new_name()) as (target, seed):
            ckptfs.save(state_of(seed), target, run=self._held())

    def overwrite(self) -> None:
        """The oldest step that is there, replaced."""
        name = self._order["run"][0] if self._order["run"] else self._new_name()
        with self._writing("overwrite", "run", name) as (target, seed):
            ckptfs.save(state_of(seed), target, if_exists="replace", run=self._held())

    def retention(self) -> None:
        """A new step, by a manager; older ones go."""
        self._release()
        manager = ckptfs.CheckpointManager(self._directory / "run", keep_latest=KEPT)
        with manager, self._writing("retention", "run", self._new_name(), KEPT) as (_, seed):
            manager.save(self._steps, state_of(seed))

    def background(self) -> None:
        """Two new steps, both on their way at once; older ones go."""
        self._release()
        run = self._directory / "run"
        with ckptfs.CheckpointManager(
            run, keep_latest=KEPT, mode="async", max_in_flight=2
        ) as manager:
            saves = []
            for _ in range(2):
                what = self._begin("background", "run", self._new_name(), KEPT)
                pending = manager.save(self._steps, state_of(what["seed"]))
                assert isinstance(pending, ckptfs.PendingSave)
                saves.append((pending, what))
            for pending, what in saves:
                pending.result()
                self._done("background", what)

    def pointer(self) -> None:
        """A directory with a framework's files, ``latest`` moved on, older ones gone."""
        files = self._directory / "files"
        manager = ckptfs.DirectoryManager(files, keep_latest=KEPT, pointer="latest")
        with (
            manager,
            self._writing("pointer", "files", self._new_name(), KEPT) as (_, seed),
            manager.writing(self._steps) as place,
        ):
            for name in FILES:
                path = Path(place, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(file_of(name, seed))

    def copy(self) -> None:
        """The newest step, copied over an older copy."""
        source = self._order["run"][-1]
        name = f"copy_{self._steps % 2}"
        with self._writing("copy", "copies", name, seed=self._seeds[source]) as (target, _):
            try:
                command_line(
                    ["cp", "--overwrite", str(self._directory / "run" / source), str(target)]
                )
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"ckptfs cp ended with {end.code}") from end

    def plain(self) -> None:
        """A file over the old one, as one does it who does not know fsync."""
        with self._writing("plain", "plain", self._new_name()) as (target, seed):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name("temporary")
            temporary.write_bytes(file_of(FILES[0], seed))
            temporary.rename(target)

    def _new_name(self) -> str:
        self._steps += 1
        return f"step_{self._steps}"

    def _held(self) -> ckptfs.Run:
        if self._run is None:
            self.prepare()
        assert self._run is not None
        return self._run

    def _release(self) -> None:
        if self._run is not None:
            self._run.release()
            self._run = None

    @contextmanager
    def _writing(
        self,
        operation: str,
        place: str,
        name: str,
        kept: int | None = None,
        *,
        seed: int | None = None,
    ) -> Iterator[tuple[Path, int]]:
        """Say that it begins, and that it was done."""
        if operation in ("save", "overwrite"):
            self._held()
        what = self._begin(operation, place, name, kept, seed)
        yield self._directory / place / name, what["seed"]
        self._done(operation, what)

    def _begin(
        self, operation: str, place: str, name: str, kept: int | None, seed: int | None = None
    ) -> dict[str, Any]:
        if seed is None:
            self._seed += 1
            seed = self._seed
        order = [*(one for one in self._order[place] if one != name), name]
        keep = None if kept is None else order[-kept:]
        self._order[place] = order if keep is None else keep
        if place == "run":
            self._seeds[name] = seed
        what = {"place": place, "name": name, "seed": seed, "keep": keep}
        _say(f"begin {operation} {json.dumps(what)}")
        return what

    def _done(self, operation: str, what: dict[str, Any]) -> None:
        _say(f"done {operation} {json.dumps(what)}")


def _say(text: str) -> None:
    os.write(_OUT, f"{time.monotonic_ns()} {text}\n".encode())


def _live(directory: Path, syncs: Syncs, seed: int, commands: BinaryIO) -> None:
    if syncs is not Syncs.ALL:
        _leave_out(syncs)
    life = Life(directory, seed)
    _say("lives")
    while (command := commands.readline().decode().strip()) not in ("", "end"):
        life.operations[command]()
        _say(f"idle {command}")


def _warm_up() -> None:
    """Import what a life will need: each would do it for itself."""
    for name in ("save", "prepare_run", "CheckpointManager", "DirectoryManager"):
        getattr(ckptfs, name)
    for module in (
        "torch.distributed.checkpoint",
        "ckptfs.cli.copy",
        "ckptfs.replication.copier",
        "rich",
    ):
        importlib.import_module(module)


def main() -> None:
    """Fork a process for each life, and wait for its end."""
    _warm_up()
    with open(0, "rb", buffering=0, closefd=False) as commands:
        _say("ready")
        while line := commands.readline().decode().split():
            word, directory, syncs, seed = line
            assert word == "live"
            child = os.fork()
            if not child:
                status = 1
                try:
                    _live(Path(directory), Syncs(syncs), int(seed), commands)
                    status = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    raise
                finally:
                    os._exit(status)  # threads of ckptfs are no reason to stay
            _, ended = os.waitpid(child, 0)
            if ended:
                sys.exit(f"a life ended with {os.waitstatus_to_exitcode(ended)}")
            _say("dead")


if __name__ == "__main__":
    # What ckptfs cp prints for a person must not come between the lines.
    _OUT = os.dup(1)
    os.dup2(2, 1)
    main()
