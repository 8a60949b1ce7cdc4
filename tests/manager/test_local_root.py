"""The local directory that shows what a run holds: what it keeps, and what it never touches."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.control.control import SoloControl
from ckptfs.errors import CommitConflictError, StateError
from ckptfs.integrations._support.local_root import LocalRoot


def _made(root: LocalRoot, name: str) -> Path:
    root.make_room(name)
    folder = Path(root.folder(name))
    folder.mkdir(parents=True)
    (folder / "file").write_text(name)
    return folder


def _names(root: LocalRoot) -> list[str]:
    return sorted(name for name in os.listdir(root.path) if not name.startswith("."))


def test_it_keeps_the_newest_and_what_is_on_its_way(tmp_path: Path) -> None:
    """What was made there before the newest goes, in a later process too; foreign directories stay."""
    root = LocalRoot(tmp_path / "root")
    for name in ("step_1", "step_2", "step_3"):
        _made(root, name)
    (tmp_path / "root" / "step_0").mkdir()
    LocalRoot(tmp_path / "root").keep("step_2", "step_3")
    assert _names(root) == ["latest", "step_0", "step_2", "step_3"]
    assert (tmp_path / "root" / "latest").read_text() == "step_2"
    root.keep("step_3")
    assert _names(root) == ["latest", "step_0", "step_3"]


def test_a_full_disk_leaves_the_old_name(tmp_path: Path) -> None:
    """The pointer that cannot be written still says what it said."""
    root = LocalRoot(tmp_path / "root")
    _made(root, "step_1")
    root.keep("step_1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            root.keep("step_2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "root" / "latest").read_text() == "step_1"


def test_old_files_are_no_part_of_a_new_checkpoint(tmp_path: Path) -> None:
    """What a killed save left goes; what was not made there is moved aside, once, and never lost."""
    root = LocalRoot(tmp_path / "root")
    _made(root, "step_1")
    root.make_room("step_1")
    assert not os.path.exists(root.folder("step_1"))
    foreign = tmp_path / "root" / "step_2"
    foreign.mkdir()
    (foreign / "mine").write_text("mine")
    root.make_room("step_2")
    assert (tmp_path / "root" / "step_2.before" / "mine").read_text() == "mine"
    os.unlink(tmp_path / "root" / ".ckptfs" / "step_2")
    foreign.mkdir()
    with pytest.raises(CommitConflictError, match="was written by this run"):
        root.make_room("step_2")


def _between(monkeypatch: pytest.MonkeyPatch, call: str, nth: int, act: Callable[[], Any]) -> None:
    """Another node acts when this one has come back from its nth call of a function of ``os``."""
    module: Any = os.path if hasattr(os.path, call) else os
    real, count = getattr(module, call), 0

    def called(*given: Any) -> Any:
        nonlocal count
        count += 1
        mine, found = count, real(*given)
        if mine == nth:
            act()
        return found

    monkeypatch.setattr(module, call, called)


def test_leads_with_one_pid_keep_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers that share the root, each lead with the same process number, both move the pointer."""
    here, there = LocalRoot(tmp_path / "root"), LocalRoot(tmp_path / "root")
    _made(here, "step_1")
    _between(monkeypatch, "fsync", 1, lambda: there.keep("step_1"))
    here.keep("step_1")
    assert _names(here) == ["latest", "step_1"]
    assert (tmp_path / "root" / "latest").read_text() == "step_1"


@pytest.mark.parametrize("nth", [1, 2])
def test_nodes_that_share_a_disk_make_room_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """A foreign directory is moved aside by the process that is first, and the other one takes no offence."""
    here, there = LocalRoot(tmp_path / "root"), LocalRoot(tmp_path / "root")
    foreign = tmp_path / "root" / "step_1"
    foreign.mkdir(parents=True)

    def other() -> None:
        os.rename(foreign, tmp_path / "root" / "step_1.before")

    _between(monkeypatch, "lexists", nth, other)
    here.make_room("step_1")
    assert _names(there) == ["step_1.before"]


def test_what_another_run_left_is_refused(tmp_path: Path) -> None:
    """The pointer names what was made here: StateError. A user's own directory, a name that is none, or no
    pointer: nothing.
    """
    root = LocalRoot(tmp_path / "root")
    root.refuse_leftovers()
    _made(root, "step_1")
    root.refuse_leftovers()  # it was never committed
    for text in ("", "..", "stock", "\0"):
        (tmp_path / "root" / "latest").write_text(text)
        root.refuse_leftovers()
    root.keep("step_1")
    with pytest.raises(StateError, match="step_1 of another run: nothing was ever saved"):
        root.refuse_leftovers()


def test_what_is_brought_appears_whole(tmp_path: Path) -> None:
    """A fetch that fails leaves nothing under the name, and the next one is not disturbed by its rest."""
    root, control = LocalRoot(tmp_path / "root"), SoloControl()

    def fetch(_stack: contextlib.ExitStack, into: str) -> str:
        os.makedirs(into)
        (Path(into) / "half").write_text("half")
        return "step_4"

    def fail(stack: contextlib.ExitStack, into: str) -> str:
        fetch(stack, into)
        raise OSError("the network")

    with pytest.raises(OSError, match="the network"):
        root.bring(control, fail, newest=True)
    assert _names(root) == []
    assert root.bring(control, fetch, newest=True) == "step_4"
    assert _names(root) == ["latest", "step_4"]
    assert root.bring(control, lambda *_given: None, newest=True) is None
    assert (tmp_path / "root" / "latest").read_text() == "step_4"


def test_it_knows_itself_by_any_path(tmp_path: Path) -> None:
    """A relative path or a link to the root is the root, and a longer name is not below a shorter one."""
    root = LocalRoot(tmp_path / "root")
    os.makedirs(root.path)
    os.symlink(root.path, tmp_path / "link")
    assert root.is_at(tmp_path / "link")
    assert root.is_at(tmp_path / "x" / ".." / "root")
    assert not root.is_at(tmp_path)
    assert root.holds("step_1", root.folder("step_1") + "/file")
    assert not root.holds("step_1", root.folder("step_10") + "/file")
