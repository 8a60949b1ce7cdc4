"""``ckptfs log``: the run log as a person reads it, also where it is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptfs
from ckptfs.commit.log.entries import (
    Abort,
    Body,
    Decided,
    Delete,
    Entry,
    Fence,
    FenceMode,
    Generation,
    Gone,
    Kind,
    Outcome,
    Part,
    Pin,
    Release,
    Seal,
    Snapshot,
    Stamp,
    encode_entry,
)
from ckptfs.tools.runlog import Condition, told
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import DAMAGES

G1, G2 = Generation(1, "aa"), Generation(2, "bb")
STAMP = Stamp("2026-01-02T03:04:05Z", "node4", 71, 0)


def seal(name: str, save_id: str, base: Generation = G1) -> Seal:
    """A seal of one domain."""
    return Seal(save_id, base, 1, fenced=True, name=name, step=1, artifact=Kind.CHECKPOINT,
                domains=("d",), digest="0")  # fmt: skip


def written(*bodies: Body | None) -> list[bytes | None]:
    """The bytes of a log with these entries; None is one that is missing."""
    return [
        None if body is None else encode_entry(Entry(f"w{number}", body, STAMP))
        for number, body in enumerate(bodies)
    ]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``a_run``, to copy and damage."""
    path = tmp_path_factory.mktemp("healthy") / "run"
    a_run(Place("file", str(path)))
    return path


def test_a_log_is_told_alike_on_every_storage(cli: Cli, golden: Golden, place: Place) -> None:
    """Who saved, fenced, pinned, deleted and left, when and from where, as text and as JSON."""
    a_run(place)
    assert cli("rm", f"{place.uri}/step_10", "--yes", *place.flags).exit == 0
    golden("log", cli("log", place.uri, *place.flags).out, place)
    golden("log_json", cli("log", place.uri, *place.flags, "--json").out, place)


@pytest.mark.parametrize("name", ["garbage entry", "missing entry", "future entry", "deleted save"])
def test_a_damaged_log_is_told_to_its_end(
    cli: Cli, golden: Golden, healthy: Path, tmp_path: Path, name: str
) -> None:
    """A damaged, missing or newer entry is a line; what follows it is shown, and that no reader takes it."""
    place = Place("file", str(tmp_path / "run"))
    shutil.copytree(healthy, place.uri)
    hurt = DAMAGES[name].plant(place)
    ran = cli("log", hurt.uri)
    golden(f"log_{name.replace(' ', '_')}", f"{ran.out}{ran.err}exit {ran.exit}\n", hurt)


def test_every_kind_of_entry_has_its_words(golden: Golden, local: Place) -> None:
    """Fences, parts, aborts, decisions, snapshots: each says what it did to which save."""
    fence = Fence(G2, FenceMode.OVERWRITE, "node4", 71, "slurm:4711")
    part = Part("p-1", "s-5", "actor", G2, "step_5", 5, "d", "node4", ("d",), "0")
    lines = told(
        written(
            Fence(G1, host="node4", pid=71),
            seal("step_1", "s-1"),
            Pin("s-1"),
            Pin("s-1", pinned=False),
            fence,
            part,
            Abort("s-9", G2),
            Decided("s-1", Outcome.COMMITTED),
            Delete("s-1", G2, "retention"),
            Gone("s-1", G2),
            Snapshot({"saves": [1, 2]}),
            Release(G2),
        )
    )
    assert {line.condition for line in lines} == {Condition.VALID}
    golden("log_words", "\n".join(line.what for line in lines) + "\n", local)


@pytest.mark.parametrize(
    ("bodies", "why"),
    [
        ((Abort("s-1", G1), seal("step_1", "s-1")), "it was aborted before"),
        ((seal("step_1", "s-1"), Abort("s-1", G1)), "it was sealed by entry 0"),
        ((seal("step_1", "s-1"), seal("step_1", "s-1")), "it was sealed by entry 0"),
        ((Fence(G2), Fence(G1)), "generation 2 has the run already"),
        ((Fence(G2), Release(G1)), "generation 2 has the run"),
        (
            (seal("step_1", "s-1"), Delete("s-1", G1), Delete("s-1", G1)),
            "it was deleted before",
        ),
        (
            (Decided("s-1", Outcome.ABORTED), Decided("s-1", Outcome.COMMITTED)),
            "it was aborted before",
        ),
    ],
)
def test_a_void_entry_says_why(bodies: tuple[Body, ...], why: str) -> None:
    """An entry that those below it make void is shown as such, and by what; the others count."""
    *valid, void = told(written(*bodies))
    assert (void.condition, void.why) == (Condition.VOID, why)
    assert {line.condition for line in valid} == {Condition.VALID}


def test_what_follows_a_gap_is_not_believed() -> None:
    """Behind a missing entry everything is unread, whatever it says."""
    lines = told(written(Fence(G1), None, seal("step_1", "s-1")))
    assert [line.condition for line in lines] == [
        Condition.VALID,
        Condition.MISSING,
        Condition.UNREAD,
    ]


def test_a_part_of_the_log(cli: Cli, healthy: Path) -> None:
    """--save by name or id, --limit, --since, and the URI of a checkpoint choose the lines."""

    def numbers(*arguments: object) -> list[int]:
        entries = cli("log", *arguments, "--json").json["entries"]
        return [entry["number"] for entry in entries]

    everything = cli("log", healthy, "--json").json["entries"]
    save_id = next(entry["save_id"] for entry in everything if entry["name"] == "step_20")
    assert numbers(healthy, "--save", "step_20") == [2, 4]
    assert numbers(healthy, "--save", save_id) == [2, 4]
    assert numbers(healthy / "step_20") == [2, 4]
    assert numbers(healthy, "--limit", 2) == [5, 6]
    assert numbers(healthy, "--since", "1h") == [entry["number"] for entry in everything]
    assert cli("log", healthy, "--since", "yesterday").exit == 2


def test_since_leaves_out_what_is_older(cli: Cli, local: Place) -> None:
    """Entries before the given time are left out; those of the last hour stay."""
    with ckptfs.prepare_run(local.uri):
        pass
    old = Entry("old", Pin("s-1"), Stamp("2020-01-02T03:04:05Z", "node4", 71))
    key = Path(local.uri, ".ckptfs/log")
    (key / "00000000").rename(key / "00000002")
    (key / "00000001").rename(key / "00000003")
    for number in (0, 1):
        (key / f"0000000{number}").write_bytes(encode_entry(old))
    entries = cli("log", local.uri, "--since", "1h", "--json").json["entries"]
    assert [entry["number"] for entry in entries] == [2, 3]


def test_a_place_without_a_log_is_told_as_such(cli: Cli, local: Place, tmp_path: Path) -> None:
    """Neither a directory of copied checkpoints nor an absent one has a log: exit 3."""
    ckptfs.save(state_of(1), f"{local.uri}/step_1")
    DAMAGES["copied without its log"].plant(local)
    for uri in (local.uri, tmp_path / "nowhere"):
        ran = cli("log", uri)
        assert ran.exit == 3
        assert "no run has a log there" in ran.err
