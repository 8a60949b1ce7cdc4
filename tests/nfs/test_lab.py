"""The lab itself: real caches, real faults, and everything back as it was."""

from __future__ import annotations

import errno
import os

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.gaps import shows, until_shown
from tests.nfs.inside import touch_at_exit
from tests.nfs.looks import exists, exists_after_refresh
from tests.nfs.team import until


@until_shown
def test_clients_cache_absence_as_real_ones_do(lab: NfsLab) -> None:
    """A plain look at what another client has just made is stale: the lab can show what it is for."""
    run = lab.fresh()
    for _ in range(2):
        assert not lab.b.call(exists, f"{run}/made")
    lab.a.call(os.mkdir, f"{run}/made")
    shows(not lab.b.call(exists, f"{run}/made"))


def test_an_export_is_read_only_and_writable_again(lab: NfsLab) -> None:
    """A re-export reaches clients that have it mounted; the server's own disk is where files are."""
    run = lab.fresh()
    lab.export("ro", "no_root_squash")
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            lab.a.call(os.mkdir, f"{run}/x")
    finally:
        lab.export()
    lab.a.call(os.mkdir, f"{run}/x")
    assert lab.server.call(os.listdir, lab.behind(run)) == ["x"]


def test_opening_the_parent_looks_afresh(lab42: NfsLab) -> None:
    """Over 4.2 one open of the parent is enough, even at once."""
    run = lab42.fresh()
    assert not lab42.b.call(exists, f"{run}/made")
    lab42.a.call(os.mkdir, f"{run}/made")
    assert lab42.b.call(exists_after_refresh, f"{run}/made")


def test_a_forked_process_runs_its_exit_hooks_and_is_gone(lab42: NfsLab) -> None:
    """What a rank does at exit is done, though its interpreter is not taken apart."""
    lab42.warm()
    mark = "/tmp/exit-hook"
    rank = lab42.a.fork(touch_at_exit, mark)
    rank.result()
    until(lambda: lab42.a.call(os.path.exists, mark), "its hook has run")
    until(lambda: not lab42.a.call(os.path.exists, f"/proc/{rank.pid}"), "it is gone")
    lab42.a.call(os.unlink, mark)
