"""The power goes under a real ext4, xfs, btrfs while ckptfs works there: nothing that was acknowledged
is lost, nothing half is believed, and the next job continues. Without the fsyncs it is not so.
"""

from __future__ import annotations

from typing import get_args

import pytest

from tests.cuts.conftest import MakeDisk
from tests.cuts.rig import OPERATIONS, Tally, play
from tests.cuts.victim import Syncs
from tests.lab.powercut import Filesystem
from tests.lab.witness import Witness

FILESYSTEMS: tuple[Filesystem, ...] = get_args(Filesystem)
CUTS = 20
FEW_CUTS = 12  # of one life, where the campaign has ten lives of 20
LIVES = 10  # of so many cuts each, in the campaign
_LOST = (" is lost", " is torn", "cannot be read", " is of seed")  # of a checkpoint, nothing else


@pytest.mark.parametrize("fs", FILESYSTEMS)
def test_no_power_cut_takes_what_was_acknowledged(
    fs: Filesystem, make_disk: MakeDisk, victim: Witness
) -> None:
    """12 cuts in one life: every acknowledged checkpoint is found, whole, bit by bit, on the copy."""
    tally = play(make_disk(fs), victim, cuts=FEW_CUTS, seed=1)
    assert not tally.faults
    assert tally.cuts == FEW_CUTS
    assert tally.promises >= FEW_CUTS
    assert len(tally.during) > 2, "the cuts did not come while something was going on"


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 100 + LIVES))
@pytest.mark.parametrize("fs", FILESYSTEMS)
def test_no_power_cut_of_a_campaign_takes_what_was_acknowledged(
    fs: Filesystem, seed: int, make_disk: MakeDisk, victim: Witness
) -> None:
    """200 cuts on each filesystem, in ten lives; says during what they came."""
    tally = play(make_disk(fs), victim, cuts=CUTS, seed=seed)
    print(f"\n{fs} {seed}: {_in_words(tally)}")
    assert not tally.faults
    assert tally.cuts == CUTS


@pytest.mark.parametrize("syncs", [Syncs.NO_FILES, Syncs.NO_DIRECTORIES, Syncs.NONE])
@pytest.mark.parametrize("fs", FILESYSTEMS)
def test_without_its_fsyncs_ckptfs_loses_checkpoints(
    fs: Filesystem, syncs: Syncs, make_disk: MakeDisk, victim: Witness
) -> None:
    """The control: the same without the fsyncs of files, of directories, of both, and within as many
    cuts an acknowledged checkpoint, or the entry of the log that has it, is lost or torn.
    """
    tally = play(
        make_disk(fs),
        victim,
        cuts=CUTS,
        seed=1,
        operations=("save", "overwrite", "retention"),
        syncs=syncs,
        promised_only=True,
        until_fault=True,
    )
    lost = (*_LOST, "not a run log entry")  # which of both is met first depends on the machine
    assert any(words in fault for fault in _faults(tally) for words in lost), _in_words(tally)


@pytest.mark.parametrize("fs", FILESYSTEMS)
def test_a_rename_without_fsync_loses_files(
    fs: Filesystem, make_disk: MakeDisk, victim: Witness
) -> None:
    """The control: a temporary file renamed into place, as people write by hand, is lost or torn."""
    tally = play(
        make_disk(fs),
        victim,
        cuts=CUTS,
        seed=1,
        operations=("plain",),
        promised_only=True,
        until_fault=True,
    )
    assert any(words in fault for fault in _faults(tally) for words in _LOST), _in_words(tally)


def _faults(tally: Tally) -> list[str]:
    return [fault for faults in tally.faults.values() for fault in faults]


def _in_words(tally: Tally) -> str:
    during = ", ".join(f"{tally.during[one]} {one}" for one in (*OPERATIONS, "idle"))
    return (
        f"{tally.cuts} cuts ({during}), {tally.promises} promises held against them, "
        f"{tally.dropped} writes dropped, {len(tally.faults)} with faults: {tally.faults}"
    )
