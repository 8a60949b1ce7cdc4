"""What is known of the ranks that this process starts: typed values, typed errors, last words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfs.bench.messages import Asked, Told, WorkloadAsked
from ckptfs.bench.results import Sample
from ckptfs.bench.run import cleaned, run_ranks, target_asked
from ckptfs.bench.target import Home
from ckptfs.errors import CkptfsError, StateError

DIES = """
import os, sys
if os.environ.get("LOCAL_RANK") == "1":
    sys.stderr.write("no luck today at https://user:hunter2@host/")
    sys.stderr.flush()
    os._exit(3)
"""


def test_findings_come_as_they_are(tmp_path: Path) -> None:
    """Those of rank 0 alone, of the classes that it sent."""
    target = target_asked(tmp_path / "run")
    asked = Asked((target,), (WorkloadAsked("llm", params=20_000),), ("ckptfs",), 1, ranks=2)
    told: list[Told] = []
    with cleaned([Home(target)], keep=False):
        run_ranks(asked, str(tmp_path), told.append)
    assert [one.phase for one in told if isinstance(one, Sample)] == [
        "save",
        "load_warm",
        "load_cold",
    ]


def test_the_last_words_of_a_rank_that_dies_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number, how it ended, what it wrote to standard error, without credentials."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(DIES)
    path = [str(tmp_path / "first"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with pytest.raises(CkptfsError, match=r"rank 1 .* ended with exit code 3") as caught:
        run_ranks(Asked((), (), ranks=2), str(tmp_path), lambda _: None)
    assert caught.value.rank == 1
    assert "no luck today" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_error_of_a_rank_is_of_its_own_type(tmp_path: Path) -> None:
    """With what it carries, and without the credentials of its text."""
    target = target_asked(tmp_path / "run")
    asked = Asked((target,), (WorkloadAsked("https://user:hunter2@host/"),), ("ckptfs",), 1)
    with pytest.raises(StateError) as caught:
        run_ranks(asked, str(tmp_path), lambda _: None)
    assert "hunter2" not in str(caught.value)
