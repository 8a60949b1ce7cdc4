"""``ckptfs gc --delete``, killed at every operation that changes the storage.

    python -m tests.cli.gc_deaths < {"uri": run to copy, "options": {...}, "copies": where, "stride": 1}

One process that never opens a storage itself: each case copies the run, kills the collector there,
and judges, in forks of their own. One JSON line per death: {"fault", "trouble"}.

    after the death    every committed checkpoint is there with all its bytes, and foreign files
    after a second gc  the same, and nothing is left over
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ckptfs.commit.catalog.catalog import Look, find, list_live, looking_at
from ckptfs.commit.operations import drive
from ckptfs.storage.registry import open_storage
from ckptfs.tools.collecting import collect, look_for_debris
from ckptfs.tools.debris import files_below
from ckptfs.uri import Uri

OPERATIONS = (
    "create",
    "replace",
    "link",
    "rename",
    "remove",
    "remove_many",
    "remove_dir",
    "remove_tree",
    "make_dir",
    "sync",
    "sweep_uploads",
)
HALVES = ("create", "replace", "remove_many", "remove_tree")


def live_bytes(look: Look) -> dict[str, bytes]:
    """Every file of every live checkpoint, by its name in the run."""
    shape, found = look.storage.capabilities.shape, {}
    for seal in list_live(look.views):
        at = drive(find(seal, shape, look.root), look.storage)
        assert at.manifest is not None
        for file in at.manifest.files:
            found[f"{seal.name}/{file.path}"] = look.storage.read(f"{at.home}/{file.path}")
    return found


def foreign_bytes(look: Look, names: tuple[str, ...]) -> dict[str, bytes]:
    """The files that are somebody else's."""
    return {name: look.storage.read(name) for name in names}


def copy(source: str, target: str, options: dict[str, Any]) -> None:
    """The run as it is, file by file."""
    if "://" not in source:
        shutil.copytree(source, target)
        return
    there, here = open_storage(source, options), open_storage(target, options)
    for key in files_below(there, ""):
        if "/" in key:
            here.make_dir(key.rpartition("/")[0])
        here.replace(key, there.read(key))


def judge(source: str, target: str, options: dict[str, Any], foreign: tuple[str, ...]) -> None:
    """AssertionError for anything that a death must not do."""
    with looking_at(source, options) as look:
        live, theirs = live_bytes(look), foreign_bytes(look, foreign)
    for again in (False, True):
        if again:
            collect(target, 0.0, options)
        with looking_at(target, options) as look:
            assert live_bytes(look) == live, "a committed checkpoint lost bytes"
            assert foreign_bytes(look, foreign) == theirs, "a foreign file is gone"
    left = look_for_debris(target, 0.0, options).going
    assert not left, f"left after the second: {left}"


def in_fork(act: Callable[[], None]) -> tuple[int, str]:
    """The wait status of a process that does this, and its traceback."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:  # noqa: BLE001 - a death of any kind is reported
            os.write(writer, traceback.format_exc()[-4000:].encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    return os.waitpid(pid, 0)[1], told


def deaths(job: dict[str, Any]) -> Iterator[dict[str, str]]:
    """One for every operation that the collector made, ``stride`` apart."""
    count = itertools.count()
    kinds = [("kill", op) for op in OPERATIONS] + [("kill-half", op) for op in HALVES]
    for kind, op in kinds:
        for number in itertools.count(1, job["stride"]):
            fault = f"{kind}:{op}:*:{number}"
            target = f"{job['copies']}/{next(count)}"
            died, trouble = death(job, target, fault)
            if not died and not trouble:
                break
            yield {"fault": fault, "trouble": trouble}


def death(job: dict[str, Any], target: str, fault: str) -> tuple[bool, str]:
    """Whether the fault was met, and what came of it."""
    source, options, foreign = job["uri"], job["options"], tuple(job["foreign"])

    def die() -> None:
        os.environ["CKPTFS_TEST_FAULT"] = fault
        faulty = Uri.parse(target)
        collect(faulty.with_protocol(f"faults+{faulty.protocol}"), 0.0, options)

    status, told = in_fork(lambda: copy(source, target, options))
    if status:
        return True, told
    status, told = in_fork(die)
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if status and not died:
        return True, told or f"ended with {status}"
    status, told = in_fork(lambda: judge(source, target, options, foreign))
    return died, told or (f"judge ended with {status}" if status else "")


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if "://" not in asked["uri"]:
        look_for_debris(asked["uri"])  # what is imported late is imported once, before the forks
    for verdict in deaths(asked):
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()
