"""What readers on one client see of what another client commits, projects, deletes.

Their caches hold what was there before. A program that looks for directories is misled for 30 s and
more; the run log and the names in it are found at once.
"""

from __future__ import annotations

import os
import time

from tests.lab.nfs import NfsLab
from tests.nfs import runs
from tests.nfs.gaps import GAP_S, Gap, gaps, shows, until_shown
from tests.nfs.views import ours, write


@gaps
@until_shown
def test_a_commit_is_found_by_a_node_that_saw_nothing_before(lab: NfsLab, gap: Gap) -> None:
    """The catalog finds what plain looks miss: the checkpoint, its name, its files; no run was there."""
    run = f"{lab.fresh()}/run"
    with gap.between(lab):
        for _ in range(2):
            assert lab.b.call(runs.latest_name, run) is None
            assert not lab.b.call(os.path.exists, f"{run}/step_1")
        gap.wait()
        lab.a.call(runs.commit, run, "step_1", {"f": b"one"})
        gap.wait()
        shows(not lab.b.call(os.path.exists, f"{run}/step_1"))
    assert lab.b.call(runs.latest_name, run) == "step_1"
    assert lab.b.call(runs.read_step, run, "step_1") == {"f": b"one"}


@until_shown
def test_a_save_that_was_projected_is_found_where_it_is(lab: NfsLab) -> None:
    """A node that worked in the attempt still has its old name, which the next save takes away from it in
    the middle of a load: readers look in the place where it is now.
    """
    run = lab.fresh()
    old = lab.a.call(runs.begin_commit, run, "step_1", {"f": b"one"})
    lab.b.call(os.listdir, old)
    time.sleep(GAP_S)
    lab.a.call(runs.end_commit)
    time.sleep(GAP_S)
    shows(lab.b.call(os.path.exists, f"{old}/f"))
    assert lab.b.call(runs.home_of, run, "step_1") == "step_1"
    assert lab.b.call(runs.read_step, run, "step_1") == {"f": b"one"}


@until_shown
def test_a_name_that_was_deleted_and_committed_again_is_the_new_one(lab: NfsLab) -> None:
    """A node that read the old directory has its name in the cache; it is asked for again."""
    run = lab.fresh()
    lab.a.call(runs.commit, run, "step_1", {"f": b"old"})
    time.sleep(GAP_S)
    assert lab.b.call(runs.read_step, run, "step_1") == {"f": b"old"}
    time.sleep(GAP_S)
    lab.a.call(ours, run, "rename", "step_1", "aside")  # as a delete does; its bytes go later
    lab.a.call(runs.delete, run, "step_1")
    lab.a.call(runs.commit, run, "step_1", {"f": b"new"})
    time.sleep(GAP_S)
    shows(lab.b.call(os.path.exists, f"{run}/step_1/f"))
    assert lab.b.call(runs.read_step, run, "step_1") == {"f": b"new"}


@until_shown
def test_a_checkpoint_beside_the_log_is_listed_when_it_is_whole(lab: NfsLab) -> None:
    """What another tool completes is seen by a node that looked into its directory before."""
    run = lab.fresh()
    lab.a.call(ours, run, "make_dir", "step_7")
    for _ in range(2):
        assert lab.b.call(runs.names, run) == []
    time.sleep(GAP_S)
    lab.a.call(write, f"{run}/step_7/.metadata", b"of stock torch")
    shows(not lab.b.call(os.path.exists, f"{run}/step_7/.metadata"))
    assert lab.b.call(runs.names, run) == ["step_7"]
