"""``ckptfs cp``: what a person sees, what scripts get, and every kind of damage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ckptfs
from tests.cli.conftest import Cli, Golden, Place, a_run, masked, state_of
from tests.cli.sizes import sizeless
from tests.lab.server import Server


@pytest.fixture
def source(tmp_path: Path) -> Place:
    """The run that most commands are shown on, on a disk."""
    return a_run(Place("file", str(tmp_path / "source")))


def into(place: Place) -> list[str]:
    """The options of a target."""
    return [("-O" if word == "-o" else word) for word in place.flags]


def test_a_run_is_copied_and_then_it_is_there(
    cli: Cli, golden: Golden, source: Place, place: Place
) -> None:
    """From a disk to a disk and to S3: a dry run, the copy, and once more; the same words for both."""
    words = ("cp", source.uri, place.uri, *into(place))
    texts = []
    for more in (["--dry-run"], [], []):
        ran = cli(*words, *more)
        assert (ran.exit, ran.err) == (0, "")
        assert bool(ckptfs.list_checkpoints(place.uri, storage_options=place.options)) != bool(more)
        texts.append(ran.out)
    said = sizeless("\n".join(texts))
    golden("cp", re.sub(r"[\d.]+ s$", "<number> s", said, flags=re.MULTILINE), place)


def test_a_checkpoint_comes_back_from_s3(
    cli: Cli, golden: Golden, source: Place, tmp_path: Path, radosgw: Server
) -> None:
    """One document, with the bytes and the digests; the options of each side are its own."""
    there = Place("s3", str(radosgw.fresh()), dict(radosgw.storage_options()))
    assert cli("cp", f"{source.uri}/step_10", f"{there.uri}/", *into(there)).exit == 0
    back = Place("file", str(tmp_path / "back"))
    ran = cli("cp", f"{there.uri}/step_10", f"{back.uri}/step_10", *there.flags, "--json")
    assert ran.exit == 0, ran.err
    golden("cp_json", sizeless(masked(ran.out, there)).replace("<run>", "<source>"), back)
    [one] = ran.json["checkpoints"]
    assert one["copied_bytes"] > 0
    assert one["digests_verified"] > 0
    state = state_of(0)
    ckptfs.load(state, f"{back.uri}/step_10")
    assert torch.equal(state["model"]["head.bias"], state_of(10)["model"]["head.bias"])


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["{source}/step_99", "{target}/step_99"], 3, "neither a checkpoint nor a run"),
        (["{source}", "{target}", "--step", "11"], 3, "no checkpoint of step 11"),
        (["{source}/step_10", "{target}/x", "--latest"], 2, "choose from a run"),
        (["{source}/step_10", "{source}/step_20"], 6, "is another save"),
        (["{source}/step_10"], 2, "Missing argument"),
        (["{source}/step_10", "s4://x/y"], 2, "s4"),
    ],
)
def test_what_cannot_be_copied_ends_with_its_code_and_changes_nothing(
    cli: Cli, source: Place, tmp_path: Path, words: list[str], exit_code: int, said: str
) -> None:
    """One line that says what, and a hint."""
    target = tmp_path / "target"
    ran = cli("cp", *(word.format(source=source.uri, target=target) for word in words))
    assert ran.exit == exit_code
    assert said in ran.err
    assert not list(target.glob("*"))


def test_a_name_is_replaced_by_overwrite(cli: Cli, source: Place) -> None:
    """The older save of the name goes with the commit of the copy."""
    ran = cli("cp", f"{source.uri}/step_10", f"{source.uri}/step_20", "--overwrite")
    assert ran.exit == 0, ran.err
    state = state_of(0)
    ckptfs.load(state, f"{source.uri}/step_20")
    assert state["step"] == 10


def test_a_damaged_file_is_named_and_nothing_is_committed(
    cli: Cli, golden: Golden, place: Place, tmp_path: Path
) -> None:
    """Exit 1, with the file and its bytes; from a disk and from S3."""
    a_run(place)
    with place.storage() as storage:
        [folder] = [e.name for e in storage.list("step_20") if e.name[:2] == "20"]
        key = f"step_20/{folder}/__0_0.distcp"
        data = bytearray(storage.read(key))
        data[len(data) // 2] ^= 0xFF
        storage.replace(key, bytes(data))
    target = tmp_path / "target"
    ran = cli("cp", f"{place.uri}/step_20", f"{target}/step_20", *place.flags)
    assert ran.exit == 1
    golden("cp_damaged", ran.err, place)
    assert ckptfs.list_checkpoints(target) == []
