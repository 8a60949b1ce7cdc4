"""The file server fails in the middle of a save, on a real client: what every rank learns, what is left.

Two ranks, one on each client, save into one run. In each test a first checkpoint is there before the
fault, and is whole after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.inside import tree
from tests.nfs.looks import answers, free_bytes
from tests.nfs.ranks import Claim, Load, Outcome, Save, does
from tests.nfs.team import END_S, Gate, all_say, start, until, wait_stuck

pytestmark = pytest.mark.timeout(900)  # kernels boot in here, and other tests may keep them from it

SILENT_S = 8.0  # what is waited out of a client that is lost
LATE_S = 60.0  # what a machine that is busy with other things may take beyond it
CUT_S = 2.0  # in the suite; 20 in the campaign
LARGE_BYTES = 40 << 20  # of each rank: more than the small export has for both


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    """Both clients are ready to fork ranks."""
    for name in ("lab", "either", "lab42"):
        if name in request.fixturenames:
            request.getfixturevalue(name).warm()


@pytest.fixture
def exported_again(either: NfsLab) -> Iterator[None]:
    """The export is as it was, whatever the test did."""
    yield
    either.export()


def first_of(lab: NfsLab, run: str) -> None:
    """The checkpoint that is there before."""
    assert all_say(start(lab, does, Save(f"{run}/step_1", 1))) == (Outcome(),)


@pytest.mark.campaign
def test_the_server_is_restarted_in_the_middle_of_a_save(lab: NfsLab) -> None:
    """A hard mount: its kernel is killed, ranks wait, it boots; the save finishes, bit for bit."""
    run, gate = lab.fresh(), Gate(lab.b)
    uri = f"faults+file://{run}/step_1"
    ranks = start(lab, does, Save(uri, 1), gate=gate.at("close", "*.distcp"))
    gate.wait_reached(ranks)
    lab.server.kill()
    try:
        gate.release()
        wait_stuck(ranks[1])
    finally:
        lab.server.boot()
    assert all_say(ranks) == (Outcome(),)
    assert all_say(start(lab, does, Load(f"{run}/step_1", 1))) == (Outcome(),)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "cut_s", [CUT_S, pytest.param(20.0, marks=pytest.mark.campaign)], ids=lambda s: f"{s:g}s"
)
def test_the_network_is_cut_in_the_middle_of_a_save(lab42: NfsLab, cut_s: float) -> None:
    """A hard mount, and a cut shorter than the silence allowed: only the clock notices."""
    run, gate = lab42.fresh(), Gate(lab42.b)
    uri = f"faults+file://{run}/step_1"
    ranks = start(lab42, does, Save(uri, 1), gate=gate.at("close", "*.distcp"))
    gate.wait_reached(ranks)
    with lab42.unplugged("server"):
        gate.release()
        wait_stuck(ranks[1])
        time.sleep(cut_s)  # the length of the cut is what is tested
    assert all_say(ranks) == (Outcome(),)
    assert all_say(start(lab42, does, Load(f"{run}/step_1", 1))) == (Outcome(),)


@pytest.mark.campaign
def test_a_client_is_cut_off_for_20_s_in_the_middle_of_a_save(lab42: NfsLab) -> None:
    """From the other ranks too: its heart is silent, for less than the silence allowed."""
    run, gate = lab42.fresh(), Gate(lab42.a)
    uri = f"faults+file://{run}/step_1"
    ranks = start(lab42, does, Save(uri, 1), gate=gate.at("close", "*.distcp"))
    gate.wait_reached(ranks)
    with lab42.unplugged("b"):
        time.sleep(20.0)  # the length of the cut is what is tested
    gate.release()
    assert all_say(ranks) == (Outcome(),)
    assert all_say(start(lab42, does, Load(f"{run}/step_1", 1))) == (Outcome(),)


@pytest.mark.campaign
def test_a_client_is_lost_in_the_middle_of_a_save(lab42: NfsLab) -> None:
    """Its kernel is killed: the other rank learns who is silent; the next start has the old state, and saves."""
    run, gate = lab42.fresh(), Gate(lab42.b)
    first, second = Save(f"{run}/step_1", 1), Save(f"faults+file://{run}/step_2", 2)
    ranks = start(lab42, does, first, second, gate=gate.at("close", "*.distcp"), timeout_s=SILENT_S)
    gate.wait_reached(ranks)
    lab42.b.kill()
    try:
        begun = time.monotonic()
        old, lost = ranks[0].result(END_S)
        assert time.monotonic() - begun < SILENT_S + LATE_S
        assert old == Outcome()
        assert lost.error == "DeadlineError"
        assert "rank 1 on b (pid " in lost.text
    finally:
        lab42.b.boot()
        lab42.mount(lab42.b)
    lab42.warm()
    after = (Load(f"{run}/step_1", 1), Save(f"{run}/step_2", 3), Load(f"{run}/step_2", 3))
    found, *worked = all_say(start(lab42, does, Claim(run), *after))
    assert found.names == ("step_1",)
    assert worked == [Outcome()] * 3


@pytest.mark.campaign
@pytest.mark.parametrize(
    "version", ["4.1", "3"]
)  # not the lab's, with which it would share a connection
def test_a_soft_mount_loses_the_server_in_the_middle_of_a_save(lab42: NfsLab, version: str) -> None:
    """A typed error on all ranks; when it is back nothing half is believed, and the next save works."""
    for node in lab42.nodes:
        lab42.mount(node, at="/soft", options="soft,timeo=30,retrans=2", version=version)
    run, gate = lab42.fresh().replace("/nfs/", "/soft/"), Gate(lab42.b)
    first, second = Save(f"{run}/step_1", 1), Save(f"faults+file://{run}/step_2", 2)
    ranks = start(lab42, does, first, second, gate=gate.at("close", "*.distcp"))
    gate.wait_reached(ranks)
    lab42.server.kill()
    try:
        gate.release()
        old, lost = all_say(ranks)
    finally:
        lab42.server.boot()
    for node in lab42.nodes:
        until(lambda node=node: node.call(answers, "/soft"), "the soft mount answers again")  # type: ignore[misc]
    assert old == Outcome()
    assert lost.error == "CollectiveError"
    assert {kind for _, kind in lost.kinds} <= {"StorageError", "TransientError", "AnswerLostError"}
    after = (Load(f"{run}/step_1", 1), Save(f"{run}/step_2", 3), Load(f"{run}/step_2", 3))
    found, *worked = all_say(start(lab42, does, Claim(run), *after))
    assert (found.error, found.names) == ("", ("step_1",)), found.text
    assert worked == [Outcome()] * 3
    control = f"{lab42.behind(run.replace('/soft/', '/nfs/'))}/.ckptfs"
    for place in ("attempts", "trash"):
        assert lab42.server.call(tree, f"{control}/{place}") == [], "nothing half is left"
    for node in lab42.nodes:
        node.run(["umount", "-l", "/soft"])


@pytest.mark.campaign
def test_a_full_export(either: NfsLab) -> None:
    """NoSpaceError on all ranks; the older checkpoint is whole, the space is free again and usable."""
    for node in either.nodes:
        either.mount(node, export="small", at="/small")
    where = f"/small/{os.path.basename(either.fresh())}"
    free = either.server.call(free_bytes, "/export/small")
    first_of(either, where)
    there = either.server.call(free_bytes, "/export/small")
    full, old = all_say(
        start(
            either,
            does,
            Save(f"{where}/step_2", 2, LARGE_BYTES),
            Load(f"{where}/step_1", 1),
        )
    )
    either.server.call(os.sync)  # ext4 gives freed blocks away at its next journal commit
    (new,) = all_say(start(either, does, Save(f"{where}/step_3", 3)))
    assert full.error == "CollectiveError"
    assert {kind for _, kind in full.kinds} == {"NoSpaceError"}, full.text
    assert "what was committed is safe" in full.text
    assert (old, new) == (Outcome(), Outcome())
    # Of the failed save nothing is left: two checkpoints take twice the room of one, and little more.
    used = free - there
    assert either.server.call(free_bytes, "/export/small") > free - 3 * used
    assert all_say(start(either, does, Claim(where)))[0].names == ("step_1", "step_3")
    for node in either.nodes:
        node.run(["umount", "/small"])


@pytest.mark.usefixtures("exported_again")
@pytest.mark.campaign
def test_a_read_only_export(either: NfsLab) -> None:
    """A save is AccessError on all ranks and says why; what is there is loaded."""
    run = either.fresh()
    first_of(either, run)
    either.export("ro", "no_root_squash")
    refused, old = all_say(start(either, does, Save(f"{run}/step_2", 2), Load(f"{run}/step_1", 1)))
    assert refused.error in ("CollectiveError", "AccessError")
    assert {kind for _, kind in refused.kinds} <= {"AccessError"}
    assert "the mount is read-only" in refused.text
    assert old == Outcome()


@pytest.mark.usefixtures("exported_again")
@pytest.mark.campaign
def test_root_is_squashed(either: NfsLab) -> None:
    """Where the server maps root to ``nobody``, the error says so; reading works."""
    run = either.fresh()
    first_of(either, run)
    either.server.call(os.chmod, either.behind(run), 0o755)
    either.export("rw", "root_squash")
    refused, old = all_say(start(either, does, Save(f"{run}/step_2", 2), Load(f"{run}/step_1", 1)))
    assert refused.error in ("CollectiveError", "AccessError")
    assert {kind for _, kind in refused.kinds} <= {"AccessError"}
    assert "root_squash" in refused.text
    assert old == Outcome()
