"""Checkpoints that no log orders: every reader of the newest, and every list, agrees which one that is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

import ckptfs
from ckptfs.commit.catalog.unlogged import UnloggedCheckpoint, oldest_first
from ckptfs.commit.paths import number_order
from tests.cli.conftest import Cli, Place, cli, no_accounts, place, radosgw

__all__ = ["cli", "no_accounts", "place", "radosgw"]

Newest = Callable[[Place, Cli, Path], str]


def stock(place: Place, names: Sequence[str], times_s: Sequence[float] = ()) -> None:
    """What stock torch leaves there under these names, written at these Unix times."""
    for name in names:
        if place.kind == "file":
            dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{place.uri}/{name}", no_dist=True)
            continue
        with tempfile.TemporaryDirectory() as made, place.storage() as storage:
            dcp.save({"w": torch.ones(4)}, checkpoint_id=made, no_dist=True)
            for file in Path(made).iterdir():
                storage.replace(f"{name}/{file.name}", file.read_bytes())
    for name, then in zip(names, times_s, strict=False):
        os.utime(Path(place.uri, name, ".metadata"), (then, then))


def by_api(place: Place, _: Cli, __: Path) -> str:
    """What ``ckptfs.latest`` returns."""
    found = ckptfs.latest(place.uri, storage_options=place.options)
    assert found is not None
    return found.uri.name


def by_command(place: Place, cli: Cli, _: Path) -> str:
    """What ``ckptfs latest`` prints."""
    return cli("latest", place.uri, *place.flags).out.strip().rpartition("/")[2]


def by_ls(place: Place, cli: Cli, _: Path) -> str:
    """The last line of ``ckptfs ls``."""
    (found,) = cli("ls", place.uri, *place.flags, "--json").json["places"]
    return str(found["checkpoints"][-1]["name"])


def by_ls_limited(place: Place, cli: Cli, _: Path) -> str:
    """The one line that ``ckptfs ls --limit 1`` leaves."""
    (found,) = cli("ls", place.uri, *place.flags, "--limit", "1", "--json").json["places"]
    (line,) = found["checkpoints"]
    return str(line["name"])


def by_ls_above(place: Place, cli: Cli, _: Path) -> str:
    """What ``ckptfs ls`` of the directory above names as the latest of the run."""
    above = place.uri.rpartition("/")[0]
    places = cli("ls", above, *place.flags, "--json").json["places"]
    return str(places[0]["runs"][0]["latest"])


def by_cp(place: Place, cli: Cli, tmp: Path) -> str:
    """What ``ckptfs cp --latest`` brings to an empty run."""
    ran = cli("cp", "--latest", place.uri, tmp / "copied", *place.flags)
    assert ran.exit == 0, ran.err
    (name,) = [path.name for path in (tmp / "copied").iterdir() if not path.name.startswith(".")]
    return name


def by_list(place: Place, _: Cli, __: Path) -> str:
    """The last of ``list_checkpoints``."""
    return ckptfs.list_checkpoints(place.uri, storage_options=place.options)[-1].uri.name


READERS: dict[str, Newest] = {
    "latest": by_api,
    "ckptfs latest": by_command,
    "ls": by_ls,
    "ls --limit": by_ls_limited,
    "ls above": by_ls_above,
    "cp --latest": by_cp,
    "list_checkpoints": by_list,
}

RUNS = {
    "steps": (("step_100", "step_200"), (), "step_200"),
    "bare numbers": (("9", "10", "100"), (), "100"),
    # A copy with `cp -r` or from a bucket has times in any order.
    "copied in another order": (("step_9", "step_10"), (2e9, 1e9), "step_10"),
    "no numbers": (("best", "final", "last"), (3e9, 1e9, 2e9), "best"),
    "two patterns": (("ckpt-900", "step_5", "step_40"), (1e9, 3e9, 2e9), "step_5"),
    "dates": (("run-2026-11-24", "run-2026-12-01"), (1e9, 2e9), "run-2026-12-01"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("run", RUNS)
def test_everybody_takes_the_same_one_for_the_newest(
    cli: Cli, tmp_path: Path, run: str, reader: str
) -> None:
    """By the number where the names are one pattern, else by time; and alike by every way of asking."""
    names, times_s, newest = RUNS[run]
    place = Place("file", str(tmp_path / "runs" / "llm"))
    stock(place, names, times_s)
    Path(place.uri, "tensorboard").mkdir()  # is no checkpoint, and is not counted
    assert READERS[reader](place, cli, tmp_path) == newest


def test_so_it_is_on_a_bucket(place: Place, cli: Cli, tmp_path: Path) -> None:
    """Nothing of this is a matter of filesystems."""
    place = replace(place, uri=f"{place.uri}/runs/llm")
    stock(place, ["step_9", "step_10", "step_100"])
    assert {reader: READERS[reader](place, cli, tmp_path) for reader in READERS} == dict.fromkeys(
        READERS, "step_100"
    )


def test_lists_are_in_the_order_of_numbers(cli: Cli, tmp_path: Path) -> None:
    """ls, list_checkpoints and verify name 9 before 10 before 100, and so does ``--sort name``."""
    place = Place("file", str(tmp_path / "run"))
    stock(place, ["100", "9", "10"])
    found = ckptfs.list_checkpoints(place.uri)
    assert [(c.uri.name, c.step) for c in found] == [("9", 9), ("10", 10), ("100", 100)]
    for flags in ((), ("--sort", "name"), ("--sort", "step")):
        (run,) = cli("ls", place.uri, *flags, "--json").json["places"]
        assert [line["name"] for line in run["checkpoints"]] == ["9", "10", "100"]
        assert [line["step"] for line in run["checkpoints"]] == [9, 10, 100]
    verified = cli("verify", place.uri, "--json").json["checkpoints"]
    assert [(one["name"], one["step"]) for one in verified] == [("9", 9), ("10", 10), ("100", 100)]


def test_a_copy_says_its_step_itself(tmp_path: Path) -> None:
    """A step that a manifest gives counts, whatever the directory is called; stock next to it by its name."""
    run = tmp_path / "run"
    ckptfs.save({"w": torch.ones(4)}, tmp_path / "other" / "final", step=300)
    run.mkdir()
    (tmp_path / "other" / "final").rename(run / "final")
    stock(Place("file", str(run)), ["step_200"])
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [200, 300]
    stock(Place("file", str(run)), ["step_400"])
    latest = ckptfs.latest(run)
    assert latest is not None
    assert latest.step == 400


NAMES = st.lists(
    st.from_regex(r"(step_|ckpt-)?[0-9]{0,4}", fullmatch=True).filter(bool), unique=True
)


@given(NAMES, st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=40, max_size=40))
def test_the_order_does_not_depend_on_the_listing(
    names: list[str], times: list[int | None]
) -> None:
    """However a storage lists them, the order is one; of one pattern it is that of the numbers."""
    found = [
        UnloggedCheckpoint(name, None, modified_s=at)
        for name, at in zip(names, times, strict=False)
    ]
    order = [one.name for one in oldest_first(found)]
    assert order == [one.name for one in oldest_first(reversed(found))]
    assert sorted(order) == sorted(names)
    if all(name.startswith("step_") and name != "step_" for name in names):
        steps = [int(name.removeprefix("step_")) for name in order]
        assert steps == sorted(steps)


@given(st.lists(st.text(max_size=8)))
def test_names_are_sorted_as_people_read_them(names: list[str]) -> None:
    """Any names can be compared, and numbers in them count as numbers."""
    assert sorted(sorted(names, key=number_order)) == sorted(names)
    assert number_order("step_9") < number_order("step_10") < number_order("step_10b")
