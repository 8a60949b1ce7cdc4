"""A rank hangs in a user's own file, which no storage of ours holds: it is named with the path all the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfs
from ckptfs.control.control import open_control
from ckptfs.integrations._support.local_root import LocalRoot
from tests.multiprocess.harness import Rank, launch

TIMEOUT_S = 3.0
END_S = 400.0


def writes_a_directory(rank: Rank) -> None:
    """Rank 0 leaves a pipe in the directory that is committed, where it syncs and reads every file."""
    rank.init_group()
    with ckptfs.checkpoint_dir(rank.args["run"] + "/step_1", timeout_s=TIMEOUT_S) as path:
        if rank.number == 0:
            os.mkfifo(f"{path}/pipe")
            Path(path, "z").write_text("a file of rank 1")


def publishes_a_directory(rank: Rank) -> None:
    """Each rank reads a directory of its own; that of rank 0 has a pipe in it."""
    rank.init_group()
    with ckptfs.DirectoryManager(rank.args["run"], timeout_s=TIMEOUT_S) as manager:
        manager.save(1, rank.args["source"])


def looks_for_leftovers(rank: Rank) -> None:
    """The pointer of a local root is a pipe."""
    rank.init_group()
    root = LocalRoot(rank.args["source"], "pipe")
    with open_control(timeout_s=TIMEOUT_S) as control:
        root.on_nodes(control, "nothing yet", root.refuse_leftovers)


@pytest.mark.parametrize("what", [writes_a_directory, publishes_a_directory, looks_for_leftovers])
def test_a_rank_that_hangs_in_a_plain_file_is_named_with_the_path(
    tmp_path: Path, what: Callable[[Rank], None]
) -> None:
    """CollectiveError on the other rank within timeout_s, and on the one that hangs when it comes back."""
    run, source = tmp_path / "run", tmp_path / "source"
    run.mkdir()
    source.mkdir()
    if what is not writes_a_directory:
        os.mkfifo(source / "pipe")
        (source / "z").touch()  # that of rank 1
    args = {"run": f"file://{run}", "source": str(source)}
    with launch(what, 2, args=args) as ranks:
        (told,) = ranks.results(ranks=[1], timeout_s=END_S)
        assert told.error_type == "CollectiveError", told.log
        assert told.error
        (pipe,) = tmp_path.rglob("pipe")
        # A long path loses its middle in the text.
        assert re.search(r"open of /\S*pipe has not returned for", told.error["message"])
        assert "rank 0 on " in told.error["message"]
        os.close(os.open(pipe, os.O_RDWR))
