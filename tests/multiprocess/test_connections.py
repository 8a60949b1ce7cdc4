"""How often ranks connect to the store that they talk through."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from ckptfs.control.tcpstore_client import WAITING
from tests.multiprocess.harness import Rank, Ranks, launch
from tests.topology.relay import HOST, Relay

RANKS = 2
# Of each rank: the group's own client, the connection that its threads share, and those that wait.
OF_A_RANK = 2 + WAITING


# -- inside the ranks ----------------------------------------------------------------------------


def _state(rank: Rank) -> dict[str, Any]:
    import torch

    return {"w": torch.ones(4), f"own.{rank.number}": torch.ones(2)}


def _plain(rank: Rank, run: str) -> None:
    import ckptfs

    for step in (2, 3):
        ckptfs.save(_state(rank), f"{run}/step_{step}")
        ckptfs.load(_state(rank), f"{run}/step_{step}")
    ckptfs.ensure_dir(f"{run}/logs")
    with ckptfs.prepare_run(run):
        pass
    ckptfs.gather(f"{run}/step_1", f"{run}/../gathered/step_1")


def _directories(rank: Rank, run: str) -> None:
    import ckptfs

    with ckptfs.checkpoint_dir(f"{run}/step_1") as directory:
        Path(directory, f"of-{rank.number}").write_text("x")
    with ckptfs.checkpoint_dir(f"{run}/step_1", "read") as directory:
        assert Path(directory, "of-0").read_text() == "x"
    with ckptfs.DirectoryManager(run, mode="async") as manager:
        with manager.writing(2) as directory:
            Path(directory, f"of-{rank.number}").write_text("x")
        manager.wait()
        with manager.reading() as opened:
            assert opened is not None


def _in_the_background(rank: Rank, run: str) -> None:
    import ckptfs

    with ckptfs.prepare_run(run) as held:
        pending = [
            ckptfs.async_save(_state(rank), f"{run}/step_{step}", run=held) for step in (1, 2)
        ]
        ckptfs.load(_state(rank), f"{run}/../plain/step_1")
        for one in pending:
            one.result()
    ckptfs.async_save(_state(rank), f"{run}/step_3").result()


def _manager(rank: Rank, run: str, **options: Any) -> None:
    import ckptfs

    with ckptfs.CheckpointManager(run, **options) as manager:
        for step in range(1, 5):
            manager.should_save(step)
            manager.save(step, _state(rank), {"loss": 1.0 / step})
        manager.wait()
        manager.pin(4)
        manager.unpin(4)
        manager.delete(3)
        state = _state(rank)
        assert manager.restore(state) is not None
        assert manager.latest is not None


def _managers(rank: Rank, run: str) -> None:
    import ckptfs

    _manager(rank, f"{run}/sync", keep_latest=2)
    _manager(
        rank,
        f"{run}/async",
        mode="async",
        keep_latest=2,
        max_in_flight=2,
        every_steps=2,
        preempt_signals=["SIGUSR1"],
        copies=[ckptfs.Copy(f"{run}/copies")],
    )


def _parts(rank: Rank, run: str) -> None:
    import ckptfs

    with ckptfs.CheckpointManager(run) as manager:
        ticket = manager.begin(1, ["actor", "critic"])
        sealed = [ckptfs.save(_state(rank), ticket.part(name)) for name in ticket.parts]
        ticket.commit(sealed).publish()
        abandoned = manager.begin(2, ["actor"])
        abandoned.abandon()


def _threads(rank: Rank, run: str) -> None:
    """As many threads at a time as the page promises, each with calls of its own."""
    import torch.distributed as dist

    import ckptfs

    groups = [dist.new_group(list(range(rank.size))) for _ in range(WAITING)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in (1, 2):
                uri = f"{run}/{number}/step_{step}"
                ckptfs.save(_state(rank), uri, process_group=groups[number])
                ckptfs.load(_state(rank), uri, process_group=groups[number])
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WAITING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _stock(rank: Rank, run: str) -> None:
    import torch.distributed.checkpoint as dcp

    import ckptfs

    dcp.save(_state(rank), storage_writer=ckptfs.StorageWriter(f"{run}/step_1"))
    dcp.load(_state(rank), storage_reader=ckptfs.StorageReader(f"{run}/step_1"))


CALLS: dict[str, Callable[[Rank, str], None]] = {
    "plain": _plain,
    "directories": _directories,
    "in the background": _in_the_background,
    "managers": _managers,
    "parts": _parts,
    "stock": _stock,
    "threads": _threads,
}


def many_calls(rank: Rank) -> object:
    """One save, and then everything that a training does."""
    import torch.distributed as dist

    import ckptfs

    store = TCPStore(
        HOST,
        rank.args["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size)
    base = rank.args["base"]
    ckptfs.save(_state(rank), f"{base}/plain/step_1")
    rank.tell("first")
    rank.hold("go on")
    for name, call in CALLS.items():
        call(rank, f"{base}/{name.replace(' ', '-')}")
        dist.barrier()  # gloo's own connections, not the store's
        rank.tell(name)
        rank.hold(name)
    rank.tell("done")
    rank.hold("end")
    return "ended"


def two_groups(rank: Rank) -> object:
    """Each rank opens a control of one group first, and not the same as the other rank."""
    import torch.distributed as dist

    from ckptfs.control.control import open_control

    rank.init_group()
    groups = [dist.new_group(list(range(rank.size))) for _ in range(RANKS)]
    said: dict[int, list[int]] = {}

    def talk(number: int) -> None:
        with open_control(process_group=groups[number]) as control:
            said[number] = control.step("say", lambda: number)

    first, second = rank.number, 1 - rank.number
    threads = [threading.Thread(target=talk, args=(number,)) for number in (first, second)]
    threads[0].start()
    rank.tell("first")
    rank.hold("second")
    threads[1].start()
    for thread in threads:
        thread.join()
    return said


# -- in the test -----------------------------------------------------------------------------------


@contextlib.contextmanager
def behind_a_relay(base: Path) -> Iterator[tuple[Ranks, Relay]]:
    """Ranks of ``many_calls`` with a store behind a relay; they have made their first call."""
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Relay(server.port) as relay:
        args = {"port": relay.port, "base": str(base)}
        with launch(many_calls, RANKS, args=args, store="none") as ranks:
            ranks.wait("first")
            yield ranks, relay


def test_no_call_after_the_first_connects_again(tmp_path: Path) -> None:
    """Whatever a process calls after its first call, in whichever mode and from whichever thread, uses
    the connections that the first one made.
    """
    with behind_a_relay(tmp_path) as (ranks, relay):
        assert relay.accepted == OF_A_RANK * RANKS
        ranks.release("go on")
        more = {}
        for name in CALLS:
            before = relay.accepted
            ranks.wait(name)
            more[name] = relay.accepted - before
            ranks.release(name)
        ranks.wait("done")
        ranks.release("end")
        assert ranks.values() == ["ended"] * RANKS
    assert more == dict.fromkeys(CALLS, 0)


def test_groups_of_the_same_ranks_do_not_meet() -> None:
    """Groups share the connections, and not the names: each is among its own."""
    with launch(two_groups, RANKS) as ranks:
        ranks.wait("first")
        ranks.release("second")
        assert ranks.values() == [{"0": [0, 0], "1": [1, 1]}] * RANKS
