"""Who shares what, and what one client's ranks see of the other's: two clients, real ranks, one control.

The ranks are processes on both clients that meet in a store over the lab's network; everything goes
through ``open_control``, ``probe_domains``, ``ensure_dir`` and ``checkpoint_dir``.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.lab.nfs import Machine, NfsLab
from tests.nfs import domains, runs
from tests.nfs.clock import stopped
from tests.nfs.gaps import GAP_S, shows, until_shown
from tests.nfs.together import in_ranks
from tests.nfs.views import naive_absences


@pytest.fixture
def lab(either: NfsLab) -> NfsLab:
    """Ranks of a job cost seconds: over NFS 3 they are for the campaign."""
    return either


@contextlib.contextmanager
def unmounted(node: Machine, at: str) -> Iterator[None]:
    """``at`` is a directory of the node, and nothing is mounted there afterwards."""
    node.call(os.makedirs, at)
    try:
        yield
    finally:
        assert node.run(["umount", at]).status == 0
        node.call(os.rmdir, at)


def mount_tmpfs(node: Machine, at: str) -> None:
    """A disk of the node's own."""
    assert node.run(["mount", "-t", "tmpfs", "own", at]).status == 0


@pytest.fixture
def places(lab: NfsLab) -> Iterator[dict[str, str]]:
    """Paths that are equal on both clients, by what is behind them."""
    one_side, two = (f"/tmp/{name}-{uuid.uuid4().hex[:8]}" for name in ("one-side", "two"))
    private = f"/scratch/{uuid.uuid4().hex[:8]}"
    shared, first, second, third = (lab.fresh() for _ in range(4))
    with contextlib.ExitStack() as stack:
        for node in lab.nodes:
            for at in (one_side, two):
                stack.enter_context(unmounted(node, at))
        for node, export in zip(lab.nodes, (first, second), strict=True):
            lab.mount(node, export=os.path.basename(export), at=two)
        lab.mount(lab.a, export=os.path.basename(third), at=one_side)
        mount_tmpfs(lab.b, one_side)
        yield {
            "shared": f"{shared}/run",
            "private": f"{private}/run",
            "one side": f"{one_side}/run",
            "two": f"{two}/run",
        }


def test_domains_are_what_the_bytes_say(lab: NfsLab, places: dict[str, str]) -> None:
    """NFS on both nodes is one domain; on one node only, two directories behind one path, and private
    disks at one path are two. Device and inode numbers say the same of a shared and of a private disk.
    """
    for path in ("/nfs", "/scratch"):
        numbers = [node.call(domains.identities, path) for node in lab.nodes]
        assert numbers[0] == numbers[1], "a program that compares these would be right"
    for node in lab.nodes:
        for run in places.values():
            assert not node.call(os.path.exists, run)
    both, apart = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
    found = in_ranks(lab, domains.probe_all, places, per_node=2)
    everybody = [f"rank{n}" for n in range(4)]
    for rank, seen in enumerate(found):
        assert seen.pop("shared") == (both, everybody)
        own = everybody[:2] if rank < 2 else everybody[2:]
        assert seen == dict.fromkeys(("private", "one side", "two"), (apart, own))


@pytest.mark.campaign
def test_a_directory_is_ready_when_ensure_dir_returns(lab: NfsLab) -> None:
    """Ranks that had looked for it before write into it at once; after a plain mkdir and a barrier the
    other node's cannot (needs: a directory that exists differs between clients).
    """
    run, rounds = lab.fresh(), 5
    here, there = in_ranks(lab, domains.make_directories, run, rounds)
    assert here == {"barrier": 0, "ours": 0, "exist_ok": 0}
    assert there == {"barrier": rounds, "ours": 0, "exist_ok": 0}


@until_shown
def test_ranks_that_see_different_things_take_the_same_branch(lab: NfsLab) -> None:
    """One node has the step, the other a cached absence of it; opened together it is there for both."""
    run = lab.fresh()
    shows(all(lab.b.call(naive_absences, f"{run}/step_1").values()))
    time.sleep(GAP_S)
    lab.a.call(runs.commit, run, "step_1", {"f": b"one"})
    time.sleep(GAP_S)
    assert lab.a.call(os.path.exists, f"{run}/step_1")
    shows(not lab.b.call(os.path.exists, f"{run}/step_1"))
    found = in_ranks(lab, domains.read_together, run, "step_1")
    assert found == [{"f": b"one"}, {"f": b"one"}]


@pytest.mark.campaign
def test_what_one_node_wrote_last_is_in_the_manifest(lab: NfsLab) -> None:
    """Over v3 a node that has just listed the directory does not see what is written to it within the
    same tick; every file is committed all the same, each once.
    """
    run = lab.fresh()
    with stopped(lab):
        in_ranks(lab, domains.write_listed, run, "step_1")
    wrote = ["m0", "m1", *(f"a{n}" for n in range(6))]
    assert sorted(lab.a.call(runs.listed_in_manifest, run, "step_1")) == sorted(wrote)
    assert lab.a.call(runs.read_step, run, "step_1") == {name: name.encode() for name in wrote}
