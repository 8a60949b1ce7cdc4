"""Sharded checkpoints with names and an end that a framework decides, on two nodes with a disk each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.log.entries import Kind
from ckptfs.errors import StateError
from ckptfs.integrations._support.named_checkpoints import NamedCheckpointRuns, NamedCheckpoints
from ckptfs.uri import Uri
from tests.faults import victim
from tests.multiprocess.harness import Rank, launch


def state(number: float) -> dict[str, Any]:
    """Replicated: each node has a copy."""
    return {"t": torch.full((4,), number), "more": b"bytes"}


def keep_and_remove(rank: Rank) -> list[Any]:
    """Saves, removals and a failure, synchronously and not; what was there in between."""
    rank.init_group()
    os.environ["RANK"] = str(rank.number)  # at fault
    return [
        there for mode in ("sync", "async") for there in one(f"{rank.args['uri']}/{mode}", mode)
    ]


def one(uri: str, mode: str) -> list[Any]:
    """Three processes of one run, one after the other: what the first two left, and the error."""

    def there() -> list[str]:
        return [checkpoint.uri.name for checkpoint in ckptfs.list_checkpoints(uri)]

    first = NamedCheckpoints(uri, mode=mode, extra_files=["meta"])
    for number, name in enumerate(("a", "b", "c")):
        first.save(name, state(number), step=number, extra_files={"meta": name.encode()})
    first.hold("b")
    for name in ("a", "b", "stranger"):
        first.remove(name)  # "c" is on its way, or committed
    first.close()
    told: list[Any] = [there()]

    second = NamedCheckpoints(uri, mode=mode, extra_files=["meta"])
    os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:open_write:*.distcp:1@1"
    victim.install()
    try:
        second.save("d", state(4))
        second.wait()
    except ckptfs.CollectiveError as error:
        told.append(error.all_are(ckptfs.NoSpaceError))
    second.remove("b")  # waits for a commit that does not come
    second.close()
    told.append(there())

    third = NamedCheckpoints(uri, mode=mode, extra_files=["meta"])
    third.save("e", state(5))
    third.remove("e")  # nothing came after it
    third.remove("b")  # of an earlier process
    third.close()
    return told


def test_removed_on_every_node_after_the_commit_and_never_before(tmp_path: Path) -> None:
    """The owner of each disk removes; what is held, newest or a stranger's stays, and so does what a
    failed save was to replace. What is next to it goes with its checkpoint.
    """
    uri = f"nodes+file://{tmp_path}/@node"
    for node in "xy":
        for mode in ("sync", "async"):
            (tmp_path / node / mode / "stranger").mkdir(parents=True)
    with launch(keep_and_remove, 2, args={"uri": uri}, nodes=["x", "y"]) as ranks:
        assert ranks.values() == [[["b", "c"], True, ["b", "c"]] * 2] * 2
    for node in "xy":
        for mode in ("sync", "async"):
            left = sorted(path.name for path in (tmp_path / node / mode).iterdir())
            assert left == [".ckptfs", "c", "e", "stranger"]
            assert (tmp_path / node / mode / "c" / "meta").read_bytes() == b"c"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_are_nothing_to_go_on_from(tmp_path: Path, mode: str) -> None:
    """An export is listed as weights, and what resumes from the latest passes it by."""
    run = tmp_path / "run"
    shelf = NamedCheckpoints(run, mode=mode)
    shelf.save("epoch=1.ckpt", {"w": torch.ones(4)}, step=10)
    shelf.save("export.ckpt", {"w": torch.ones(4)}, step=20, kind=Kind.WEIGHTS)
    shelf.close()
    found = {c.uri.name: c.kind for c in ckptfs.list_checkpoints(run)}
    assert found == {"epoch=1.ckpt": Kind.CHECKPOINT, "export.ckpt": Kind.WEIGHTS}
    latest = ckptfs.latest(run)
    assert latest is not None
    assert latest.uri.name == "epoch=1.ckpt"
    assert ckptfs.load({"w": torch.zeros(4)}, run / "export.ckpt").step == 20


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_replace_no_checkpoint(tmp_path: Path, mode: str) -> None:
    """The last full checkpoint stays when an export came after it: there is nothing else to continue from."""
    run = tmp_path / "run"
    shelf = NamedCheckpoints(run, mode=mode)
    shelf.save("a", state(1), step=1)
    shelf.save("export", state(1), step=1, kind=Kind.WEIGHTS)
    shelf.remove("a")
    shelf.close()
    assert [c.uri.name for c in ckptfs.list_checkpoints(run)] == ["a", "export"]


def _saved(shelf: NamedCheckpoints, name: str, state: dict[str, Any]) -> None:
    shelf.save(name, state)
    shelf.wait()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_make_up_for_no_failed_save(tmp_path: Path, mode: str) -> None:
    """What a failed checkpoint was to replace stays, though an export is committed after it."""
    run = tmp_path / "run"
    shelf = NamedCheckpoints(run, mode=mode)
    for name in ("a", "b"):
        shelf.save(name, state(1))
    with pytest.raises(StateError):
        _saved(shelf, "c", {"nobody loads this": lambda: None})
    shelf.remove("a")
    shelf.save("export", state(3), kind=Kind.WEIGHTS)
    shelf.close()
    assert [c.uri.name for c in ckptfs.list_checkpoints(run)] == ["a", "b", "export"]


def test_a_missing_optimizer_is_not_told_to_be_skipped(tmp_path: Path) -> None:
    """The hint of a load into an optimizer from weights names the ways to resume, not strict=False alone."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    target = Uri.parse(tmp_path / "run" / "export.ckpt")
    named_runs = NamedCheckpointRuns(mode="sync", meta_file="meta.pt")
    named_runs.save(target, {"model": model.state_dict()}, b"", step=1, kind=Kind.WEIGHTS)
    with pytest.raises(StateError, match="lacks") as caught:
        named_runs.load(target, "model", model, {"optimizer_0": optimizer})
    told = str(caught.value)
    assert "weights" in told
    assert "ckptfs.latest" in told
    named_runs.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_links_to_checkpoints_of_the_run_are_removed_and_no_others(
    tmp_path: Path, mode: str
) -> None:
    """A framework makes them by itself; the checkpoint behind one stays."""
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    shelf = NamedCheckpoints(run, mode=mode)
    shelf.save("a", state(1.0), step=1)
    shelf.wait()
    (run / "last").symlink_to("a")
    (run / "out").symlink_to(other)
    shelf.remove("last")
    shelf.remove("out")
    shelf.close()
    assert sorted(os.listdir(run)) == [".ckptfs", "a", "out"]
    assert ckptfs.load({"t": torch.zeros(4), "more": b""}, run / "a").step == 1
