"""The control plane between real processes: gloo, no group, threads, subgroups, death, silence."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from ckptfs.control.control import open_control
from tests.multiprocess.harness import WAIT_S, Rank, Ranks, StoreHost, launch, torchrun
from tests.multiprocess.store_keys import keys_of

TIMEOUT_S = 600.0  # far above what a death may cost: only silence may need it
SOON_S = 60.0  # promised: seconds; the machine of the tests may be busy


class _PickyError(Exception):
    """needs.md row 16: unpickling it calls __init__ with one argument and dies."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code


def total(values: list[int]) -> int:
    """What the coordinator decides."""
    return sum(values)


def joined(values: list[bytes]) -> bytes:
    """What the coordinator decides."""
    return b"".join(values)


# -- bodies: what a rank does ------------------------------------------------------------------


def add_over_gloo(rank: Rank) -> dict[str, Any]:
    """Steps over the default group's store, on the main thread and at once on another: both threads of a
    rank are within a step before either of them has its answer.
    """
    rank.init_group()
    within = threading.Barrier(2, timeout=WAIT_S)

    def value(number: int) -> int:
        within.wait()
        return number

    with open_control(timeout_s=TIMEOUT_S) as control:
        other = control.clone()
        found: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: found.append(
                [other.step(f"b{i}", lambda: value(rank.number), total) for i in range(20)]
            )
        )
        thread.start()
        mine = [control.step(f"a{i}", lambda: value(rank.number + 1), total) for i in range(20)]
        thread.join()
        pids = [world.pid for world in control.worlds]
        return {"main": set(mine), "thread": set(found[0]), "pids": len(set(pids))}


def subgroup_sums(rank: Rank) -> dict[str, Any]:
    """Two disjoint groups on one store: rank in the control is the group's rank."""
    import torch.distributed as dist

    rank.init_group()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank.number % 2]
    with open_control(process_group=group, timeout_s=TIMEOUT_S) as control:
        numbers = control.step("who", lambda: rank.number)
    # The same on one bare store, where no prefix of torch keeps the two apart.
    with open_control(process_group=group, store=rank.store(), timeout_s=TIMEOUT_S) as bare:
        assert bare.step("who", lambda: rank.number) == numbers
    return {"rank": control.rank, "size": control.size, "numbers": numbers}


def group_without_collectives(rank: Rank) -> dict[str, Any]:
    """A default group with a backend that can do nothing at all, as nccl can nothing for two ranks of
    one device.
    """
    import torch
    import torch.distributed as dist

    class Refuses(dist.ProcessGroup):
        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "refuses"

    dist.Backend.register_backend(
        "refuses",
        lambda _store, number, size, _timeout: Refuses(number, size),  # type: ignore[call-arg]
        devices=["cpu"],
    )
    rank.init_group("refuses")
    try:
        dist.all_reduce(torch.zeros(1))
    except (RuntimeError, NotImplementedError):
        refused = True
    with open_control(timeout_s=TIMEOUT_S) as control:
        return {"refused": refused, "numbers": control.step("who", lambda: rank.number)}


def without_group(_rank: Rank) -> dict[str, Any]:
    """No init_process_group: torchrun's environment and its agent's store are enough."""
    import sys

    before = "torch" in sys.modules
    with open_control(timeout_s=TIMEOUT_S) as control:
        numbers = control.step("who", lambda: control.world.local_rank)
        return {"numbers": numbers, "group": control.world.has_group, "torch_before": before}


def raise_on_one(rank: Rank) -> None:
    """One rank fails in a way that no other rank could unpickle."""
    rank.init_group()
    with open_control(timeout_s=TIMEOUT_S) as control:

        def local() -> None:
            if rank.number == 1:
                raise _PickyError(7, "s3://key:secret@bucket went away")

        control.step("write", local)


def typed_error_then_on(rank: Rank) -> dict[str, Any]:
    """A typed error of decide, and the control works on after it."""
    from ckptfs.errors import NoSpaceError

    rank.init_group()
    with open_control(timeout_s=TIMEOUT_S) as control:

        def decide(_: list[None]) -> None:
            raise NoSpaceError("full", errno=28, uri="file:///run", hint="make room")

        try:
            control.step("commit", lambda: None, decide)
        except NoSpaceError as error:
            caught = [type(error).__name__, error.errno, error.uri, error.hint]
        return {"caught": caught, "next": control.step("on", lambda: 1, total)}


def large_values(rank: Rank) -> list[int]:
    """Values and an answer far above what one message of the store may hold."""
    rank.init_group()
    with open_control(timeout_s=TIMEOUT_S) as control:
        for round_ in range(2):
            value = bytes([rank.number + round_]) * ((9 << 20) + rank.number)
            answer = control.step("big", partial(bytes, value), joined)
            sums = [answer.count(bytes([number + round_])) for number in range(rank.size)]
        return sums


def step_until_released(rank: Rank) -> float:
    """One step, then a second one that a victim never enters: ``hold`` keeps it out."""
    rank.init_group()
    control = open_control(timeout_s=rank.args.get("timeout_s", TIMEOUT_S))
    control.step("first", lambda: None)
    rank.tell("ready")
    if rank.number in rank.args["victims"]:
        rank.hold("never")
    rank.hold("go")
    begun = time.monotonic()
    try:
        control.step("second", lambda: None)
    finally:
        rank.tell("took", seconds=time.monotonic() - begun)
    return 0.0


def step_after_a_death(rank: Rank) -> dict[str, Any]:
    """What the step says in which a rank died, and the one after it."""
    rank.init_group()
    control = open_control(timeout_s=TIMEOUT_S)
    control.step("first", lambda: None)
    rank.tell("ready")
    rank.hold("never" if rank.number == rank.args["victim"] else "go")
    worked: list[str] = []

    def failed(label: str) -> str:
        try:
            control.step(label, lambda: worked.append(label))
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return {"errors": [failed("second"), failed("third")], "worked": worked}


def works_for_long(rank: Rank) -> int:
    """A rank that computes for far longer than timeout_s, with a living heartbeat."""
    rank.init_group()
    with open_control(timeout_s=2.0) as control:

        def local() -> int:
            if rank.number == 1:
                rank.hold("done")
            return 1

        return int(control.step("long", local, total))


def leave_early(rank: Rank) -> None:
    """One rank closes its control and lives on; the others still call."""
    rank.init_group()
    control = open_control(timeout_s=TIMEOUT_S)
    control.step("first", lambda: None)
    if rank.number == rank.args["who"]:
        control.close()
        rank.hold("never")
    for name in ("second", "third"):
        try:
            control.step(name, lambda: None)
        except RuntimeError as error:
            last = error
    raise last


def host_ends_first(rank: Rank) -> int:
    """Rank 0 hosts the store and ends as soon as it may."""
    rank.init_group()
    control = open_control(timeout_s=TIMEOUT_S)

    def decide(values: list[int]) -> int:
        rank.tell("inside")
        rank.hold("go")
        return sum(values)

    answer = control.step("last", lambda: rank.number, decide)
    rank.tell("answered")
    control.close()
    rank.tell("closed")
    return int(answer)


def leave_in_turn(rank: Rank) -> str:
    """Rank 1 closes and its process ends; rank 0 keeps its control open and sees that."""
    from ckptfs.control.world import Life, is_gone

    rank.init_group()
    control = open_control(timeout_s=2.0)
    lives = control.step("lives", Life.of_this_process)
    if rank.number == 1:
        control.close()
        return "ended"
    rank.hold("go")
    assert lives[1]
    while not is_gone(lives[1]):
        time.sleep(0.01)
    time.sleep(3)  # many beats and more than timeout_s: what could be said would have been
    control.close()
    return "alone"


def other_version(rank: Rank) -> None:
    """Rank 2 runs another version of ckptfs."""
    from ckptfs.control.tcpstore_control import StoreControl
    from ckptfs.control.world import World

    rank.init_group()
    version = "9.9" if rank.number == 2 else "0.1.0"
    StoreControl(World.detect(), rank.store(), timeout_s=TIMEOUT_S, version=version)


def many_controls(rank: Rank) -> dict[str, Any]:
    """Controls one after another and side by side, and what they leave in the store."""
    rank.init_group()
    sums = []
    for i in range(5):
        with open_control(timeout_s=TIMEOUT_S) as control:
            sums.append(control.step("x", partial(int, i), total))
            for _ in range(3):
                control.step("y", lambda: b"x" * (3 << 20), len)
            control.clone().step("z", lambda: None)
    with open_control(timeout_s=TIMEOUT_S) as a, open_control(timeout_s=TIMEOUT_S) as b:
        sums.append(a.step("a", lambda: 10, total))
        sums.append(b.step("b", lambda: 20, total))
    return {"sums": sums}


def interrupted(rank: Rank) -> str:
    """Ctrl-C on one rank inside its part."""
    rank.init_group()
    control = open_control(timeout_s=TIMEOUT_S)

    def local() -> None:
        if rank.number == rank.args["who"]:
            raise KeyboardInterrupt

    try:
        control.step("x", local)
    except KeyboardInterrupt:
        rank.tell("interrupted")
        rank.hold("end")  # alive: no rank learns of it by its death
        return "KeyboardInterrupt"
    except RuntimeError as error:
        return f"{type(error).__name__} {list(getattr(error, 'failures', {}))}"
    return "nothing"


def frozen_while_deciding(rank: Rank) -> str:
    """The coordinator is stopped inside ``decide``; when it wakes up, decide returns a value."""
    rank.init_group()
    control = open_control(timeout_s=3.0)

    def decide(_: list[None]) -> str:
        rank.tell("inside")
        rank.hold("thawed")
        return "committed"

    return str(control.step("commit", lambda: None, decide))


def die_after_speaking(rank: Rank) -> dict[str, Any]:
    """A rank dies when all have spoken and the coordinator is at work."""
    rank.init_group()
    control = open_control(timeout_s=TIMEOUT_S)

    def decide(values: list[int]) -> int:
        rank.tell("inside")
        rank.hold("dead")
        time.sleep(3)  # far longer than a death needs to be seen
        return sum(values)

    first = control.step("first", lambda: 1, decide)
    try:
        control.step("second", lambda: 1)
    except RuntimeError as error:
        return {"first": first, "second": list(getattr(error, "failures", {}))}
    return {"first": first}


# -- tests -------------------------------------------------------------------------------------


def took_s(ranks: Ranks, number: int) -> float:
    """How long the rank's second step took."""
    return float(ranks.wait("took", rank=number)["seconds"])


def test_steps_over_gloo_from_two_threads_at_once() -> None:
    """A clone's steps on another thread and the main thread's steps do not mix or block."""
    with launch(add_over_gloo, 3) as ranks:
        for value in ranks.values():
            assert value == {"main": "{6}", "thread": "{3}", "pids": 3}


def test_disjoint_subgroups_share_a_store_without_meeting() -> None:
    """Each group gets an answer of its own, and rank means the group's rank."""
    with launch(subgroup_sums, 4) as ranks:
        values = ranks.values()
    assert [v["rank"] for v in values] == [0, 0, 1, 1]
    assert [v["numbers"] for v in values] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_no_collective_of_the_users_group_is_called() -> None:
    """Any backend will do: here is one in which every collective fails."""
    with launch(group_without_collectives, 2) as ranks:
        assert ranks.values() == [{"refused": True, "numbers": [0, 1]}] * 2


def test_without_a_group_over_the_launchers_store() -> None:
    """Processes that torchrun started agree without init_process_group."""
    with launch(without_group, 3, launcher_env=True) as ranks:
        for value in ranks.values():
            assert value["numbers"] == [0, 1, 2]
            assert value["group"] is False


def test_without_a_group_under_real_torchrun() -> None:
    """The real agent's store carries a control; two agents are two nodes."""
    results = torchrun(without_group, 1, nnodes=2, warm=True)
    assert [r.value and r.value["numbers"] for r in results] == [[0, 0]] * 2, results[0].log


def test_error_with_its_own_init_travels_to_all_ranks() -> None:
    """Row 16: stock DCP dies unpickling it; here it is text, with credentials masked."""
    with launch(raise_on_one, 3) as ranks:
        results = ranks.results()
    for result in results:
        assert result.error_type == "CollectiveError"
        assert result.error
        failure = result.error["data"]["failures"]["1"]
        assert failure["type"].endswith("._PickyError")
        assert "went away (7)" in failure["message"]
        assert "secret" not in str(result.error["message"])
    messages = {str(r.error and r.error["message"]) for r in results}
    assert len(messages) == 1


def test_typed_error_of_decide_arrives_as_its_type_and_the_control_goes_on() -> None:
    """Class, errno, URI and hint are equal on all ranks; the next step works."""
    with launch(typed_error_then_on, 3) as ranks:
        for value in ranks.values():
            assert value["caught"] == ["NoSpaceError", 28, "file:///run", "make room"]
            assert value["next"] == 3


def test_values_of_many_mebibytes_travel_in_chunks() -> None:
    """9 MiB per rank and 27 MiB back; one such message would kill the store's connection."""
    with launch(large_values, 3) as ranks:
        for value in ranks.values():
            assert value == [(9 << 20) + n for n in range(3)]


@pytest.mark.parametrize("victims", [[2], [0], [1, 2]])
def test_killed_ranks_are_named_on_every_other_rank_within_seconds(victims: list[int]) -> None:
    """The pid is seen gone by its node: no rank waits for the 600 s of silence."""
    with launch(step_until_released, 4, args={"victims": victims}) as ranks:
        ranks.wait("ready")
        alive = [n for n in range(4) if n not in victims]
        for number in alive:
            ranks.release("go", rank=number)
        for victim in victims:
            ranks.kill(victim)
        for result in ranks.results(ranks=alive):
            assert result.error_type == "CollectiveError", result.log
            assert result.error
            assert [int(r) for r in result.error["data"]["failures"]] == victims
            assert "gone" in result.error["message"]
            assert took_s(ranks, result.rank) < SOON_S


@pytest.mark.parametrize("victim", [0, 2])
def test_after_a_death_every_later_step_ends_before_it_begins(victim: int) -> None:
    """The dead do not come back: the next step raises the error of the one in which the death was seen,
    on every rank, and no rank does its part of it (which may write) for a step that cannot succeed.
    """
    with launch(step_after_a_death, 3, args={"victim": victim}) as ranks:
        ranks.wait("ready")
        alive = [n for n in range(3) if n != victim]
        for number in alive:
            ranks.release("go", rank=number)
        ranks.kill(victim)
        for result in ranks.results(ranks=alive):
            assert result.value, result.log
            second, third = result.value["errors"]
            assert second.startswith("CollectiveError: second failed on 1 of 3 ranks")
            assert third == second
            assert result.value["worked"] == ["second"]


def test_zombie_counts_as_dead() -> None:
    """A killed child that its parent has not waited for still has a pid."""
    with launch(step_until_released, 2, args={"victims": [1]}, warm=False) as ranks:
        ranks.wait("ready")
        ranks.release("go", rank=0)
        ranks.kill(1)
        (result,) = ranks.results(ranks=[0])
    assert result.error_type == "CollectiveError", result.log


def test_death_on_another_node_that_has_a_survivor_is_told_at_once() -> None:
    """Ranks 2 and 3 share a node; 3 is busy elsewhere, sees 2 die and reports it to ranks 0 and 1."""
    args = {"victims": [2, 3]}  # 3 only holds: it works on something else
    with launch(step_until_released, 4, args=args, nodes=["a", "a", "b", "b"]) as ranks:
        ranks.wait("ready")
        for number in (0, 1):
            ranks.release("go", rank=number)
        ranks.kill(2)
        for result in ranks.results(ranks=[0, 1]):
            assert result.error
            assert list(result.error["data"]["failures"]) == ["2"]
            assert took_s(ranks, result.rank) < SOON_S


@pytest.mark.parametrize("victim", [0, 1])
def test_frozen_rank_is_named_after_timeout_s_of_silence(victim: int) -> None:
    """SIGSTOP: DeadlineError within timeout_s on all others, also when it is the coordinator."""
    args = {"victims": [victim], "timeout_s": 3.0}
    with launch(step_until_released, 3, args=args) as ranks:
        ranks.wait("ready")
        others = [n for n in range(3) if n != victim]
        for number in others:
            ranks.release("go", rank=number)
        ranks.freeze(victim)
        for result in ranks.results(ranks=others):
            assert result.error_type == "DeadlineError", result.log
            assert result.error
            assert result.error["data"]["silent"] == [victim]
            assert 1.5 < took_s(ranks, result.rank) < SOON_S
            assert f"rank {victim}" in result.log  # the warning, before the error


def test_frozen_rank_that_wakes_up_gets_the_same_answer() -> None:
    """The verdict of the step is one: who slept through it obeys it and accuses none."""
    args = {"victims": [], "timeout_s": 3.0}
    with launch(step_until_released, 3, args=args) as ranks:
        ranks.wait("ready")
        ranks.freeze(1)
        for number in range(3):
            ranks.release("go", rank=number)
        ranks.results(ranks=[0, 2])
        ranks.thaw(1)
        (result,) = ranks.results(ranks=[1])
    assert result.error_type == "DeadlineError", result.log
    assert result.error
    assert result.error["data"]["silent"] == [1]


def test_coordinator_that_slept_obeys_the_verdict_of_the_others() -> None:
    """One verdict: what decide returned after the others gave up is no rank's answer."""
    with launch(frozen_while_deciding, 3) as ranks:
        ranks.wait("inside", rank=0)
        ranks.freeze(0)
        ranks.results(ranks=[1, 2])
        ranks.thaw(0)
        ranks.release("thawed", rank=0)
        for result in ranks.results():
            assert result.error_type == "DeadlineError", result.log
            assert result.error
            assert result.error["data"]["silent"] == [0]


def test_death_after_all_have_spoken_does_not_change_the_answer() -> None:
    """decide may have committed: its answer counts, and the next step names the dead."""
    with launch(die_after_speaking, 3) as ranks:
        ranks.wait("inside", rank=0)
        ranks.kill(2)
        ranks.release("dead", rank=0)
        for result in ranks.results(ranks=[0, 1]):
            assert result.value == {"first": 3, "second": [2]}, result.log


def test_rank_that_works_for_longer_than_timeout_s_is_waited_for() -> None:
    """timeout_s bounds silence, not work."""
    with launch(works_for_long, 3) as ranks:
        ranks.wait("pid")
        ranks.stay_without("result", for_s=6)
        ranks.release("done", rank=1)
        assert ranks.values() == [3, 3, 3]


@pytest.mark.parametrize("store", ["apart", "rank0"])
def test_lost_store_is_the_same_typed_error_everywhere(store: StoreHost) -> None:
    """The store's host is killed, apart or as rank 0: ControlPlaneLostError within seconds."""
    victims = [0] if store == "rank0" else [9]
    with launch(step_until_released, 3, args={"victims": [*victims, 1]}, store=store) as ranks:
        ranks.wait("ready")
        waiting = [2] if store == "rank0" else [0, 2]
        for number in waiting:
            ranks.release("go", rank=number)
        if store == "rank0":
            ranks.kill(0)
        else:
            ranks.kill_store()
        for result in ranks.results(ranks=waiting):
            assert result.error_type == "ControlPlaneLostError", result.log
            assert took_s(ranks, result.rank) < SOON_S
            assert result.error
            assert store == "apart" or "rank 0 on" in result.error["message"]  # its host's name


def test_frozen_store_costs_timeout_s_and_no_more() -> None:
    """A host that does not answer holds no rank longer than the silence allowed."""
    args = {"victims": [], "timeout_s": 3.0}
    with launch(step_until_released, 2, args=args, store="apart") as ranks:
        ranks.wait("ready")
        ranks.freeze_store()
        ranks.release("go")
        for result in ranks.results():
            assert result.error_type == "ControlPlaneLostError", result.log
            assert took_s(ranks, result.rank) < SOON_S


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_left_is_named_at_once_and_in_every_later_step(who: int) -> None:
    """A rank that leaves says goodbye: every later step of the others fails, none waits."""
    with launch(leave_early, 3, args={"who": who}) as ranks:
        for result in ranks.results(ranks=[n for n in range(3) if n != who]):
            assert result.error_type == "CollectiveError", result.log
            assert result.error
            (failure,) = result.error["data"]["failures"].items()
            assert failure[0] == str(who)
            # Or the survivors' error would be a StateError too: they did nothing wrong.
            assert failure[1]["type"] == "ckptfs.errors.CollectiveError"


def test_coordinator_that_hosts_the_store_lingers_until_all_have_read() -> None:
    """Rank 0 takes the store along when it ends: not before a slow rank has read the answer."""
    with launch(host_ends_first, 3, store="rank0") as ranks:
        ranks.wait("inside", rank=0)
        ranks.freeze(1)
        ranks.release("go", rank=0)
        ranks.wait("answered", rank=0)
        ranks.stay_without("closed", rank=0, for_s=1.5)
        ranks.thaw(1)
        assert ranks.values() == [3, 3, 3]


def test_rank_that_left_and_ended_is_not_reported_as_dead() -> None:
    """An orderly end leaves no error in the logs of those who stay."""
    with launch(leave_in_turn, 2) as ranks:
        assert ranks.results(ranks=[1])[0].value == "ended"
        ranks.release("go", rank=0)
        (result,) = ranks.results(ranks=[0])
    assert result.value == "alone", result.log
    assert "gone" not in result.log
    assert "silent" not in result.log


def test_ranks_on_different_versions_all_get_the_same_typed_error() -> None:
    """The handshake names versions and ranks; no rank opens a control."""
    with launch(other_version, 3) as ranks:
        results = ranks.results()
    for result in results:
        assert result.error_type == "CollectiveError", result.log
        assert result.error
        assert "0.1.0 on ranks [0, 1], 9.9 on ranks [2]" in result.error["message"]
        assert list(result.error["data"]["failures"]) == ["2"]


def test_controls_one_after_another_leave_nothing_in_the_store() -> None:
    """Keys are unique per control and deleted at the end: a store must not grow with saves."""
    with launch(many_controls, 3) as ranks:
        for value in ranks.values():
            assert value["sums"] == [0, 3, 6, 9, 12, 30, 60]
        left = keys_of(ranks.store)
    assert [key for key in left if "ckptfs" in key] == []


@pytest.mark.parametrize("who", [0, 1])
def test_interrupt_on_one_rank_frees_all(who: int) -> None:
    """Ctrl-C is raised as itself where it happens, and is a failure of that rank elsewhere."""
    with launch(interrupted, 3, args={"who": who}) as ranks:
        others = ranks.results(ranks=[n for n in range(3) if n != who])
        ranks.wait("interrupted", rank=who)
        ranks.release("end", rank=who)
        assert ranks.values()[who] == "KeyboardInterrupt"
    assert {result.value for result in others} == {f"CollectiveError [{who}]"}
