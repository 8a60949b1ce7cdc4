"""How many operations a save costs an NFS server, counted by the clients' kernels."""

from __future__ import annotations

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.counting import operations
from tests.nfs.counts import NAMES, counted, table

RANKS = 8
TEXT = """device rootfs mounted on / with fstype rootfs
device server:/ mounted on /nfs with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 0 0 0 0 0 0 0 0 0
\t       WRITE: 12 12 0 4000 1400 0 3 3 0

device server:/other mounted on /other with fstype nfs4 statvers=1.1
\tper-op statistics
\t       WRITE: 99 99 0 0 0 0 0 0 0
"""


def test_operations_of_one_mount_are_found() -> None:
    """Each mount has a table of its own; what never occurred is left out."""
    assert operations(TEXT, "/nfs") == {"NULL": 1, "WRITE": 12}
    assert operations(TEXT, "/other") == {"WRITE": 99}
    assert operations(TEXT, "/nowhere") == {}


@pytest.mark.timeout(600)
@pytest.mark.campaign
def test_a_save_costs_the_server_what_the_page_says(lab42: NfsLab) -> None:
    """A save of 8 ranks on 2 nodes: one LINK, directories once and not by each rank, two files for each
    rank and a handful for all, each under its final name by one rename.
    """
    assert_cheap(lab42, rounds=1)


def assert_cheap(lab: NfsLab, *, rounds: int) -> str:
    """Count and compare; the table."""
    found = counted(lab, rounds=rounds)
    shown = f"\n{table(found)}"
    ours = found["ours"]
    made = ours.span("MKDIR") if lab.version == "3" else ours.span("CREATE")
    files = ours.span("CREATE") if lab.version == "3" else ours.span("OPEN", "OPEN_NOATTR")
    assert ours.span("LINK") == (1, 1), shown
    assert made[1] <= 4, shown
    # The rest is what a lease that is kept during the saves costs on a slow machine.
    assert files[1] <= 2 * RANKS + 24, shown
    assert ours.span("RENAME")[1] <= 2 * RANKS + 20, shown
    assert ours.span(*NAMES)[1] <= 120, shown
    assert ours.span()[1] <= 450, shown
    assert all(found[way].span("WRITE")[0] >= RANKS for way in found), "a mount was not counted"
    return shown


@pytest.mark.campaign
def test_campaign_operations_side_by_side(lab: NfsLab) -> None:
    """The table of docs/nfs.md: ours, stock DCP's, verl's, in turn."""
    print(f"\nNFS {lab.version}{assert_cheap(lab, rounds=5)}")
