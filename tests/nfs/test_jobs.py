"""Known failures of today's tools, as jobs of four ranks on two NFS clients: what scripts meet, we do not."""

from __future__ import annotations

import errno

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.crowd import Crowd
from tests.nfs.inside import tree
from tests.nfs.rows import branches, hosts, mkdirs, removals

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def lab(either: NfsLab) -> NfsLab:
    """Ranks of a job cost seconds: over NFS 3 they are for the campaign."""
    return either


@pytest.mark.campaign
def test_row8_a_directory_that_all_ranks_make_is_made(lab42: NfsLab) -> None:
    """Row 8: absent or there, no rank fails, and each can write into it at once."""
    run = lab42.fresh("row8")
    with Crowd(lab42, mkdirs, {"run": run, "rounds": 2}) as crowd:
        assert [value["ours"] for value in crowd.values()] == [0] * 4
    for number in range(2):
        made = lab42.server.call(tree, lab42.behind(f"{run}/ours-{number}/deep/step"))
        assert made == sorted(f"{rank}-{again}" for rank in range(4) for again in range(2))


@pytest.mark.campaign
def test_row10_all_ranks_take_one_branch(lab: NfsLab) -> None:
    """Row 10: a plain look differs between the nodes; where to continue is the same answer on all ranks."""
    with Crowd(lab, branches, {"run": lab.fresh("row10")}) as crowd:
        values = crowd.values()
    assert [value["plain"] for value in values] == [True, True, False, False], "the control"
    for value in values:
        assert (value["restored"], value["latest"], value["same"]) == (1, 1, True)


@pytest.mark.campaign
def test_row22_what_is_shared_is_found_by_a_token(lab42: NfsLab) -> None:
    """Row 22: equal hostnames and equal device and inode numbers of private disks mislead no rank."""
    args = {"run": lab42.fresh("row22"), "name": f"row22-v{lab42.version}"}
    with Crowd(lab42, hosts, args) as crowd:
        values = crowd.values()
    told_apart = values[0]["seen"][:2] != values[2]["seen"][:2]
    assert not told_apart, "the control: by name and device they cannot be told apart"
    for rank, value in enumerate(values):
        assert (value["private"], value["shared"]) == (2, 1)
        mine = (0, 1) if rank < 2 else (2, 3)
        assert value["private files"] == [f"__{n}_0.distcp" for n in mine]
        assert value["shared files"] == [f"__{n}_0.distcp" for n in range(4)]


def test_row29_retention_survives_a_file_that_is_open(lab42: NfsLab) -> None:
    """Row 29: rmtree is "Directory not empty"; retention continues, and the rest is removed later."""
    run = lab42.fresh("row29")
    with Crowd(lab42, removals, {"run": run}, per_node=2) as crowd:
        values = crowd.values()
    assert values[0]["plain"] == errno.ENOTEMPTY, "the control"
    assert [value["steps"] for value in values] == [([3], [3], True)] * 4
    left = lab42.server.call(tree, lab42.behind(run))
    assert not [name for name in left if name.startswith(("step_1/", "step_2/", ".ckptfs/trash/"))]
