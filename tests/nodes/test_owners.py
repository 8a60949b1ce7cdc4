"""Is the owner of a run alive? Containers of one hostname, where one number is many processes.

Who may look the process up says at once that it is gone; everybody else must watch its lease. Each
newcomer here is patient or endlessly patient, so that a test cannot pass by waiting.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.nodes import Node
from tests.multiprocess.harness import Rank, Ranks, launch
from tests.nodes.conftest import MakeNodes

RUN = "/shared/run"
NOBODY = 65534


def own(rank: Rank) -> None:
    """Hold the run until the end, or a SIGKILL."""
    import os

    from ckptfs.commit.ownership.claim import claim

    os.umask(0)
    run = claim(_session(), times=_times(1.0))
    rank.tell("owns", pid=os.getpid(), generation=run.generation.number)
    rank.hold("the end")
    run.release()


def come(rank: Rank) -> dict[str, Any]:
    """Look who holds the run, then claim it."""
    import os
    import socket

    from ckptfs.commit.catalog.catalog import read_view
    from ckptfs.commit.operations import drive
    from ckptfs.commit.ownership.claim import claim
    from ckptfs.errors import RunBusyError
    from ckptfs.storage import registry  # noqa: F401 - another user may not read our interpreter
    from ckptfs.tools.lines import holding_of

    if rank.args.get("uid"):
        os.setgroups([])  # hidepid hides nothing from the group 0
        os.setgid(rank.args["uid"])
        os.setuid(rank.args["uid"])
    session = _session()
    view = drive(read_view(), session.storage)
    seen: dict[str, Any] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "hold": holding_of({} if view is None else dict([view])).hold.value,
    }
    try:
        run = claim(session, times=_times(rank.args["still_s"]))
    except RunBusyError as error:
        return seen | {"got": "busy", "text": str(error)}
    run.release()
    return seen | {"got": run.generation.number}


def _times(still_s: float) -> Any:
    from ckptfs.commit.ownership.lease import LeaseTimes

    return LeaseTimes(rewrite_s=0.1, still_s=still_s)


def _session() -> Any:
    from ckptfs.commit.session import Place, start_session
    from ckptfs.control.control import SoloControl
    from ckptfs.storage.registry import open_storage

    return start_session(SoloControl(), open_storage(RUN), Place(), write=True)


@contextmanager
def owner_on(node: Node) -> Iterator[Ranks]:
    """A process there that holds the run."""
    with launch(own, 1, store="none", prefix=lambda _: node.prefix) as ranks:
        ranks.wait("owns", timeout_s=240)
        yield ranks


def newcomer_on(node: Node, *, patience_s: float, uid: int = 0) -> dict[str, Any]:
    """What another process there finds. patience_s: 3600 fails the test where it is needed."""
    args = {"still_s": patience_s, "uid": uid}
    with launch(come, 1, store="none", prefix=lambda _: node.prefix, args=args) as ranks:
        (value,) = ranks.values()
    seen: dict[str, Any] = value
    return seen


@contextmanager
def namesake_on(node: Node, pid: int) -> Iterator[None]:
    """Some process there that has this number."""
    node.next_pid(pid)
    script = ["sh", "-c", "echo $$; exec sleep infinity"]
    with node.popen(script, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == pid
        yield
        process.kill()


def test_equal_hostnames_and_pids_say_nothing_about_life_or_death(make_nodes: MakeNodes) -> None:
    """In a container of the owner's hostname another process has the owner's number. No process there calls
    the owner dead while it lives, or takes that process for it afterwards: the lease decides. In the
    owner's own container its death is seen at once.
    """
    nodes = make_nodes(2, hostnames=("trainer", "trainer"), network=False)
    with owner_on(nodes[0]) as owner:
        pid = owner.wait("owns")["pid"]
        with namesake_on(nodes[1], pid):
            other = newcomer_on(nodes[1], patience_s=3600.0)
            assert (other["host"], other["hold"], other["got"]) == ("trainer", "held", "busy")
            assert f"host trainer pid {pid}" in other["text"]
            owner.kill(0)
            owner.results()
            other = newcomer_on(nodes[1], patience_s=1.0)
            assert (other["hold"], other["got"]) == ("held", 2)
    with owner_on(nodes[0]) as owner:
        owner.kill(0)
        owner.results()
        mine = newcomer_on(nodes[0], patience_s=3600.0)
        assert (mine["hold"], mine["got"]) == ("gone", 4)


def test_a_proc_that_shows_other_numbers_kills_no_living_owner(make_nodes: MakeNodes) -> None:
    """In a pid namespace under the host's /proc the owner's own number is unused there: it is not
    taken for dead, and its death is seen at once all the same.
    """
    (node,) = make_nodes(1, network=False, fresh_proc=False)
    node.next_pid(_unused_here())
    with owner_on(node) as owner:
        assert not Path(f"/proc/{owner.wait('owns')['pid']}").exists(), "nothing shown"
        other = newcomer_on(node, patience_s=3600.0)
        assert other["hold"] == "held"
        assert other["got"] == "busy"
        owner.kill(0)
        owner.results()
        other = newcomer_on(node, patience_s=3600.0)
        assert other["hold"] == "gone"
        assert other["got"] == 2


def test_an_owner_whom_proc_hides_is_not_taken_for_dead(make_nodes: MakeNodes) -> None:
    """Where /proc shows users their own processes only (hidepid), another user's owner lives on."""
    (node,) = make_nodes(1, network=False)
    with owner_on(node) as owner:
        node.run(["mount", "-o", "remount,hidepid=2", "/proc"])
        other = newcomer_on(node, patience_s=3600.0, uid=NOBODY)
        assert other["hold"] == "held"
        assert other["got"] == "busy"
        owner.kill(0)
        owner.results()
        other = newcomer_on(node, patience_s=3600.0, uid=NOBODY)
        assert other["hold"] == "gone"
        assert other["got"] == 2


def _unused_here() -> int:
    """A process id that the host does not use, and will not soon."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    return next(pid for pid in range(most - 1000, 1000, -1) if not Path(f"/proc/{pid}").exists())
