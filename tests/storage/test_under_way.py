"""Which system call a process waits for is known to its other threads, as long as it waits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ckptfs.control.heartbeat import Hanging, Patience
from ckptfs.control.tcpstore_client import StepKeys
from ckptfs.storage.inflight import in_flight, in_task, new_task, oldest_call, with_task
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.threads import Threads


def test_a_call_that_does_not_return_is_told_with_its_path(tmp_path: Path) -> None:
    """On a thread that was handed the work too; nothing once it has returned."""
    os.mkfifo(tmp_path / "pipe")
    with in_task(new_task()) as part:
        work = with_task(Posix().open)
    reader = threading.Thread(target=work, args=(str(tmp_path / "pipe"), os.O_RDONLY))
    reader.start()
    while (waited := oldest_call(part)) is None:
        reader.join(0.01)
    assert waited.text == f"open of {tmp_path}/pipe"
    assert oldest_call(new_task()) is None
    os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
    reader.join(120)
    assert oldest_call(part) is None


def test_of_a_descriptor_the_path_is_told(tmp_path: Path) -> None:
    """As the kernel calls it; of one that is closed the number."""
    fd = os.open(tmp_path, os.O_RDONLY)
    with in_task(new_task()) as part, in_flight("fsync", fd):
        waited = oldest_call(part)
        assert waited is not None
        assert waited.text == f"fsync of {tmp_path}"
        os.close(fd)
        assert waited.text == f"fsync of descriptor {fd}"


def test_a_close_is_told_with_its_path(tmp_path: Path) -> None:
    """What the kernel does not know any more when the close hangs. A number that is used again is another file's."""
    told = list[str]()

    def heard(_: FrameType, event: str, function: object) -> None:
        if event == "c_call" and function is os.close:
            waited = oldest_call(part)
            told.append("" if waited is None else waited.text)

    kernel = Posix()
    with in_task(new_task()) as part:
        for name in ("one", "two"):
            fd = kernel.open(str(tmp_path / name), os.O_WRONLY | os.O_CREAT)
            sys.setprofile(heard)
            try:
                kernel.close(fd)
            finally:
                sys.setprofile(None)
    assert told == [f"close of {tmp_path}/one", f"close of {tmp_path}/two"]


def test_a_child_of_a_fork_waits_for_nothing_that_its_parent_does() -> None:
    """The threads of the parent are not in it."""
    with in_task(new_task()) as part, in_flight("fsync", "x"):
        pid = os.fork()
        if not pid:
            os._exit(oldest_call(part) is not None)
        assert os.waitpid(pid, 0)[1] == 0


def test_what_threads_are_given_belongs_to_the_part_that_gave_it() -> None:
    """Theirs while they do it, and no longer."""

    def own(part: int) -> bool:
        with in_flight("read", "x"):
            return oldest_call(part) is not None

    with Threads(1, "t") as pool:
        with in_task(new_task()) as part:
            assert pool.submit(own, part).result(120)
        assert not pool.submit(own, part).result(120)


def test_only_one_and_the_same_thing_is_waited_for() -> None:
    """Another one begins at nothing, and who was frozen has waited for no more than a tick."""
    patience = Patience(4.0)
    assert [patience.tick(3.0, thing) for thing in ("a", "a", "a", "b", "b", None)] == [
        *(0.0, 3.0, 6.0),
        *(0.0, 3.0),
        0.0,
    ]
    patience.tick(3.0, "c")
    assert patience.tick(1000.0, "c") == 4.0


@contextmanager
def call(path: str) -> Iterator[None]:
    """A call that does not return inside, on a thread of its own: of no part that anybody works at."""
    begun, end = threading.Event(), threading.Event()

    def hang() -> None:
        with in_flight("unlink", path):
            begun.set()
            end.wait(120)

    thread = threading.Thread(target=hang)
    thread.start()
    begun.wait(120)
    try:
        yield
    finally:
        end.set()
        thread.join(120)


class Ear:
    """Hears what a part hangs at."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.heard = threading.Event()

    def __call__(self, text: str, goes_on: Callable[[], bool]) -> None:
        self.told.append(text)
        self.heard.set()


def test_a_part_hangs_at_its_own_calls_alone() -> None:
    """Not at those of another control's step, and not at a chore's that began after it."""
    hanging, chosen, other = Hanging(5.0, 4.0), Ear(), Ear()
    with (
        hanging.working(StepKeys("other", 7, 2), other),
        hanging.working(StepKeys("chosen", 3, 2), chosen),
        call("/chore"),
    ):
        assert [hanging.at(4.0) for _ in range(3)] == [{}] * 3
        with in_flight("fsync", "/nfs/x"):
            assert [hanging.at(4.0) for _ in range(2)] == [{}] * 2
            with hanging.working(StepKeys("later", 0, 2), other):
                stuck = hanging.at(4.0)
            text = "fsync of /nfs/x has not returned for 8 s"
            assert stuck == {"chosen": (3, text)}
            assert chosen.heard.wait(120)
            assert (chosen.told, other.told) == ([text], [])
        assert hanging.at(4.0) == {}


def test_a_part_is_told_at_the_next_beat_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the beat continues; a name that is no text is reported as one."""
    hanging, ear = Hanging(1.0, 4.0), Ear()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with hanging.working(StepKeys("p", 0, 2), ear), in_flight("open", os.fsdecode(b"/nfs/\xff")):
        hanging.at(4.0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            text = hanging.at(4.0)["p"][1]
        assert text.encode().startswith(b"open of /nfs/\\udcff has")
        assert not ear.told
        hanging.at(4.0)
        assert ear.heard.wait(120)


def test_a_part_that_has_returned_is_known_to_have() -> None:
    """A rank that was about to report it to others asks once more."""
    hanging, asked = Hanging(1.0, 4.0), []
    ready = threading.Event()

    def tell(_: str, goes_on: Callable[[], bool]) -> None:
        asked.append(goes_on)
        ready.set()

    with hanging.working(StepKeys("p", 0, 2), tell):
        with in_flight("open", "x"):
            hanging.at(4.0)
            hanging.at(4.0)
            assert ready.wait(120)
        assert asked[0]()
    assert not asked[0]()
