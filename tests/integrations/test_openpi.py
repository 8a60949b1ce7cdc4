"""openpi's layout: data parallel training; rank 0 writes a few files per step."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import EXAMPLES, Kill, Store, launcher_words, run_words, story

pytestmark = pytest.mark.integrations


def test_a_killed_run_resumes_and_can_be_begun_anew(tmp_path: Path, cell: Cell) -> None:
    """Killed before the commit of its fourth checkpoint it continues from the third. Begun again over that
    run, under the same steps, it is not resumed; what was there goes, files of the user's stay.
    """
    store = Store("file", str(tmp_path / "run"))
    with cell("openpi", store, "sync", package="torch"):
        kill = Kill("close", "*__1_*.distcp", nth=4, rank=1)
        told = story("openpi", store, "sync", kill=kill)
        assert told.resumed.resumed == "3"
    run = Path(store.uri)
    old = {c.save_id for c in ckptfs.list_checkpoints(run)}
    (run / "mine.txt").write_text("a file of the user's")
    words = [str(EXAMPLES / "openpi_example.py"), store.uri, "async", "overwrite"]
    again = run_words([*launcher_words("torchrun", 2), *words], {}, cwd=str(tmp_path))
    assert again.resumed == "none", again.output
    assert again.final == told.reference.final
    there = ckptfs.list_checkpoints(run)
    assert [c.uri.name for c in there] == ["3", "6"]
    assert not old & {c.save_id for c in there}
    assert (run / "mine.txt").exists()
    assert ckptfs.load_object(run / "wandb.pt") == {"id": "3f9a"}
