"""This version and the first one in the same runs: what one writes the other reads and continues.

``make campaign-versions`` kills either at every storage operation; here it is a choice of them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from tests.versions.hosts import Host, MissingError, Refused, tree_of_old
from tests.versions.rig import (
    LOG,
    SCENARIOS,
    Pair,
    Place,
    Point,
    die,
    do,
    overtake,
    points,
    prepared,
    same_sight,
    until_reached,
)

Writer = tuple[str, dict[str, Any]]

WRITERS: dict[str, tuple[Writer, dict[str, str]]] = {
    "save": (("save", {"name": "step_2", "label": "two"}), {"step_2": "two"}),
    "replace": (("save", {"name": "step_1", "label": "uno", "replace": True}), {"step_1": "uno"}),
    "async": (("async_save", {"name": "step_2", "label": "two"}), {"step_2": "two"}),
    "writer": (("stock_save", {"name": "step_2", "label": "two"}), {"step_2": "two"}),
    "manager": (
        ("manage", {"saves": [[2, "two"], [3, "three"]], "keep_latest": 2, "restore": True}),
        {"step_2": "two", "step_3": "three"},
    ),
    "background": (("manage", {"saves": [[2, "two"]], "mode": "async"}), {"step_2": "two"}),
    "pinned": (
        ("manage", {"saves": [[2, "two"], [3, "three"], [4, "four"]], "pin": 3, "delete": 2}),
        {"step_3": "three", "step_4": "four"},
    ),
    "weights": (("manage", {"saves": [[2, "two"]], "kind": "weights"}), {"weights_2": "two"}),
    "unchanged": (
        ("manage", {"saves": [[2, "two"], [3, "two"]], "unchanged": "reference"}),
        {"step_2": "two", "step_3": "two"},
    ),
    "parts": (("parts", {"step": 2, "label": "two"}), {"step_2": "two actor + two critic"}),
    "directory": (("directory", {"name": "step_2", "label": "two"}), {"step_2": "two"}),
    "clear": (("clear", {"name": "step_2", "label": "two"}), {"step_2": "two"}),
}


_FIRST = ("manager", "unchanged", "parts", "directory")
_SEVERAL = [pytest.param(w, marks=() if w in _FIRST else pytest.mark.campaign) for w in WRITERS]


@pytest.mark.parametrize("writer", _SEVERAL)
def test_what_one_writes_the_other_reads_and_goes_on_with(
    writer: str, pair: Pair, place: Place
) -> None:
    """Readers of both versions see the same; the other restores, saves, pins, deletes; again the same."""
    run = place.fresh()
    do(pair.other, place, run, ("save", {"name": "step_1", "label": "one"})).get()
    step, made = WRITERS[writer]
    do(pair.one, place, run, step).get()
    seen = same_sight(pair, place, run)
    assert {name: seen["labels"][name] for name in made} == made
    newest = list(made.items())[-1]
    restores = writer not in {"parts", "directory", "weights"}
    more = {"saves": [[8, "eight"], [9, "nine"]], "pin": 8, "restore": restores}
    told = do(pair.other, place, run, ("manage", more)).get()
    if restores:
        assert told["restored"][1] == newest[1]
    then = same_sight(pair, place, run)
    assert then["labels"] == {**seen["labels"], "step_8": "eight", "step_9": "nine"}
    # What the other version pinned stays; what retention drops is gone for both.
    thin = {"saves": [[10, "ten"]], "keep_latest": 1}
    do(pair.one, place, run, ("manage", thin)).get()
    last = same_sight(pair, place, run)["labels"]
    assert {"step_8", "step_10"} <= set(last)
    assert "step_9" not in last
    left = {kind for kind, _, fate in debris(pair, place, run) if fate == "goes"}
    assert left <= {"temporary file", "replaced save"}


def debris(pair: Pair, place: Place, run: str) -> list[list[str]]:
    """What gc of both versions would remove, which is the same."""
    found = [host.do("debris", run=run, options=place.options) for host in (pair.one, pair.other)]
    assert found[0] == found[1]
    result: list[list[str]] = found[0]
    return result


def test_objects_stock_readers_copies_and_exports(pair: Pair, place: Place, tmp_path: Path) -> None:
    """What needs no log is read across versions too: objects, DCP's own load, copies, safetensors."""
    run = place.fresh()
    do(pair.one, place, run, ("put_object", {"name": "driver.pt", "label": "seven"})).get()
    do(pair.one, place, run, ("manage", {"saves": [[1, "one"], [2, "two"]], "pin": 1})).get()
    read = [("get_object", "driver.pt", "seven"), ("stock_load", "step_2", "two")]
    for step, name, label in read:
        assert do(pair.other, place, run, (step, {"name": name})).get() == label
    copy = place.fresh()
    options = flags(place, "-o") + flags(place, "-O")
    told = pair.one.do("cli", words=["cp", run, copy, *options], options={})
    assert told["exit"] == 0, told
    assert same_sight(pair, place, copy)["labels"] == {"step_1": "one", "step_2": "two"}
    # The other finds the copy complete, and continues it like any run.
    told = pair.other.do("cli", words=["cp", run, copy, *options], options={})
    assert (told["exit"], told["document"]["copied_bytes"]) == (0, 0), told
    do(pair.other, place, copy, ("manage", {"saves": [[3, "three"]], "restore": True})).get()
    assert same_sight(pair, place, copy)["latest"] == "step_3"
    for host in (pair.one, pair.other):
        file = tmp_path / f"{host.name}.safetensors"
        words = ["export", f"{run}/step_2", str(tmp_path / host.name), "--format", "safetensors"]
        assert host.do("cli", words=words, options=place.options)["exit"] == 0
        file = tmp_path / host.name / "model.safetensors"
        assert pair.other.do("safetensors", file=str(file)) == str(sum(b"two"))


def flags(place: Place, flag: str) -> list[str]:
    """Storage options for a command that takes those of two places."""
    return [part for k, v in place.options.items() for part in (flag, f"{k}={json.dumps(v)}")]


def test_copies_of_a_manager(pair: Pair, place: Place) -> None:
    """A copy that one version made is restored from by the other, when the original is gone."""
    run, copy = place.fresh(), place.fresh()
    do(
        pair.one, place, run, ("manage", {"saves": [[1, "one"], [2, "two"]], "copies": [copy]})
    ).get()
    assert same_sight(pair, place, copy)["labels"] == {"step_1": "one", "step_2": "two"}
    told = do(pair.other, place, copy, ("manage", {"saves": [[3, "three"]], "restore": True})).get()
    assert told["restored"] == [2, "two"]


def test_the_command_line_of_one_on_the_runs_of_the_other(pair: Pair, place: Place) -> None:
    """pin, rm, gc --delete: the other version sees each, with the same exit codes."""
    run = place.fresh()
    saves = {"saves": [[1, "one"], [2, "two"], [3, "three"]]}
    do(pair.one, place, run, ("manage", saves)).get()

    def cli(*words: str) -> int:
        told = pair.other.do("cli", words=list(words), options=place.options)
        return int(told["exit"])

    assert cli("pin", f"{run}/step_1") == 0
    assert (
        pair.one.do("cli", words=["rm", f"{run}/step_1", "--yes"], options=place.options)["exit"]
        == 2
    )
    assert cli("rm", f"{run}/step_2", "--yes") == 0
    assert cli("gc", run, "--delete", "--yes", "--older-than", "0s") == 0
    assert same_sight(pair, place, run)["labels"] == {"step_1": "one", "step_3": "three"}
    assert cli("rm", f"{run}/step_2", "--yes") == 3
    do(pair.one, place, run, ("manage", {"saves": [[4, "four"]], "keep_latest": 1})).get()
    assert same_sight(pair, place, run)["labels"] == {"step_1": "one", "step_4": "four"}


@pytest.mark.parametrize(
    "who", ["auto", *(pytest.param(w, marks=pytest.mark.campaign) for w in ("never", "rm", "gc"))]
)
def test_a_living_owner_of_the_other_version_is_left_alone(
    who: str, pair: Pair, place: Place, tmp_path: Path
) -> None:
    """No job takes its run, rm and gc are refused; readers read; dead, it is followed at once."""
    run, gate = place.fresh(), tmp_path / "gate"
    for path in (gate, Path(f"{gate}.reached")):
        os.mkfifo(path)
    do(pair.other, place, run, ("save", {"name": "step_0", "label": "zero"})).get()
    owner = pair.one.start(
        "manage", run=run, options=place.options, saves=[[1, "one"], [2, "two"]], until=str(gate)
    )
    try:
        Path(f"{gate}.reached").read_bytes()  # until it is there
        # A save next to it, which dies: gc has something to remove.
        do(pair.other, place, run, ("dying save", {"name": "step_9", "label": "nine"}))
        words = {
            "rm": ["rm", f"{run}/step_1", "--yes"],
            "gc": ["gc", run, "--delete", "--yes", "--older-than", "0s"],
        }
        if who in words:
            told = pair.other.do("cli", words=words[who], options=place.options)
            assert told["exit"] == 6, told
        else:
            with pytest.raises(Refused) as caught:
                pair.other.do("claim", run=run, options=place.options, takeover=who)
            assert caught.value.types[0] == "RunBusyError"
        labels = {"step_0": "zero", "step_1": "one", "step_2": "two"}
        assert same_sight(pair, place, run)["labels"] == labels
    finally:
        owner.kill()
    assert owner.end.killed
    told = do(pair.other, place, run, ("manage", {"saves": [[3, "three"]], "restore": True})).get()
    assert told["restored"] == [2, "two"]
    assert same_sight(pair, place, run)["labels"] == {**labels, "step_3": "three"}


@pytest.mark.parametrize("scenario", ["save", "managed"])
def test_overtaken_in_the_middle_by_the_other_version(
    scenario: str, pair: Pair, place: Place, tmp_path: Path
) -> None:
    """Held at the entry of its seal, robbed by force, released: it commits nothing after the fence."""
    nth = 2 if scenario == "managed" else 1  # a manager's first entry is its own fence
    seal = Point(nth, "before", "create", LOG)
    assert overtake(SCENARIOS[scenario], pair, place, seal, str(tmp_path / "gate"))


@pytest.mark.parametrize("pair", ["old"], ids=["old-first"], indirect=True)
def test_a_moment_that_does_not_come_is_not_waited_for(
    pair: Pair, place: Place, tmp_path: Path
) -> None:
    """The victim ends first: there was nothing to overtake, and the campaign counts that."""
    never = Point(10_000, "before", "create", LOG)
    assert not overtake(SCENARIOS["save"], pair, place, never, str(tmp_path / "gate"))


@pytest.mark.parametrize("scenario", ["save", "managed"])
def test_fenced_before_the_newcomer_has_recovered(
    scenario: str, pair: Pair, place: Place, tmp_path: Path
) -> None:
    """The other version's fence alone keeps a seal out: nothing has aborted the save yet."""
    if place.name != "file":
        pytest.skip("the newcomer is held at the making of its trash, which a bucket has not")
    run = prepared(SCENARIOS[scenario], pair.other, place)
    name, told = SCENARIOS[scenario].victim
    gates = [str(tmp_path / who) for who in ("victim", "newcomer")]
    nth = 2 if scenario == "managed" else 1  # a manager's first entry is its own fence
    victim = pair.one.start(
        name, run=run, options=place.options, faults=f"hold={gates[0]}:{LOG}:{nth}", **told
    )
    until_reached(gates[0])
    newcomer = pair.other.start(
        "force",
        run=run,
        options=place.options,
        faults=f"hold={gates[1]}:make_dir:*/trash/*:1",
        name="step_90",
        label="ninety",
    )
    until_reached(gates[1])
    before = same_sight(pair, place, run)["labels"]
    Path(gates[0]).touch()
    error = victim.end.error
    assert error is not None
    assert error.types[0] == "FencedError", error
    assert same_sight(pair, place, run)["labels"] == before
    Path(gates[1]).touch()
    newcomer.end.get()
    assert same_sight(pair, place, run)["labels"] == {**before, "step_90": "ninety"}


def test_a_late_remover_gives_another_one_no_trash_again(
    pair: Pair, place: Place, hosts: dict[str, Host], tmp_path: Path
) -> None:
    """Two rm of one checkpoint in a run without an owner. One is held before it takes the ``.metadata``,
    the other before it has begun; an owner comes and takes the first one's trash. The second continues, and
    then the first: it takes no data from under the ``.metadata`` that it did not get.
    """
    if place.name != "file":
        pytest.skip("a bucket has no trash")
    run = place.fresh()
    do(pair.other, place, run, SCENARIOS["rm"].before[0]).get()
    gates = {who: str(tmp_path / who) for who in ("metadata", "data", "late", "owner")}
    words: dict[str, Any] = {"words": ["rm", f"{run}/step_1", "--yes"], "options": {}}
    stops = f"hold={gates['metadata']}:rename:step_1/*:1;hold={gates['data']}:rename:step_1/*:3"
    first = pair.one.start("cli", faults=stops, **words)
    hold = f"hold={gates['late']}:make_dir:.ckptfs/trash/*:1"
    late = pair.other.start("cli", faults=hold, **words)
    until_reached(gates["late"])
    until_reached(gates["metadata"])
    owner = hosts["new"].start(
        "claim", run=run, options={}, faults=f"hold={gates['owner']}:rename:*:1"
    )
    until_reached(gates["owner"])
    Path(gates["metadata"]).touch()
    until_reached(gates["data"])
    Path(gates["late"]).touch()
    assert late.end.value["exit"] != 0
    Path(gates["data"]).touch()
    assert first.end.value["exit"] != 0
    step = Path(run, "step_1")
    assert {path.name for path in step.iterdir()} == {".metadata", "ckptfs.json", *saves_in(step)}
    assert len(saves_in(step)) == 1
    Path(gates["owner"]).touch()
    owner.end.get()
    assert same_sight(pair, place, run)["labels"] == {"step_2": "two"}
    assert not step.exists()


def saves_in(step: Path) -> list[str]:
    """The data directories of a step."""
    return [path.name for path in step.iterdir() if path.is_dir()]


@pytest.mark.parametrize("pair", ["old"], ids=["both"], indirect=True)  # it asks both, in any order
@pytest.mark.parametrize("writer", ["manager", "parts", "replace", "clear", "pinned"])
def test_both_write_the_same_words(writer: str, pair: Pair, place: Place) -> None:
    """Entries, manifests and records have the same version and fields, whichever version wrote them."""
    step, _ = WRITERS[writer]
    words = []
    for host in (pair.one, pair.other):
        run = place.fresh()
        do(host, place, run, ("save", {"name": "step_1", "label": "one"})).get()
        do(host, place, run, step).get()
        words.append(written_words(run, place))
    # A call drops at once what it replaced, which the old version left to the next commit: the fields
    # of these entries are compared where both write them, in "clear".
    more = {"entry delete", "entry gone"} if writer == "replace" else set()
    assert words[0].keys() ^ words[1].keys() <= more
    shared = words[0].keys() & words[1].keys()
    assert {kind: words[0][kind] for kind in shared} == {kind: words[1][kind] for kind in shared}
    assert {kind for kind in words[0] if kind.startswith("entry")} >= {"entry seal", "entry fence"}
    for kind, fields in words[0].items():
        if kind.startswith("entry"):
            assert "v=1" in fields
        if kind == "manifest":
            assert "format_version=1" in fields


def written_words(run: str, place: Place) -> dict[str, list[str]]:
    """Of everything of JSON in a run, by kind: the names of its fields, and the versions in it."""
    found: dict[str, set[str]] = {}
    with contextlib.closing(open_storage(run, place.options)) as storage:
        for key in json_files(storage, ""):
            record = json.loads(storage.read(key))
            name = key.rpartition("/")[2]
            kind = {"ckptfs.json": "manifest", "attempt.json": "record"}.get(name, "entry")
            if kind == "entry":
                kind = f"entry {record['kind']}"
            fields = found.setdefault(kind, set())
            fields |= set(record)
            fields |= {f"{k}={record[k]}" for k in VERSIONS if k in record}
    return {kind: sorted(fields) for kind, fields in sorted(found.items())}


VERSIONS = ("v", "format_version", "min_reader_version")


def json_files(storage: Storage, folder: str) -> Iterator[str]:
    """The log's entries, manifests and records of attempts."""
    for entry in storage.list(folder):
        key = f"{folder}/{entry.name}".lstrip("/")
        if entry.is_dir:
            yield from json_files(storage, key)
        elif entry.name in ("ckptfs.json", "attempt.json") or folder == ".ckptfs/log":
            yield key


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", [n for n, s in SCENARIOS.items() if s.victim[0] != "cli"])
def test_campaign_overtaken_at_every_operation(
    scenario: str, pair: Pair, place: Place, tmp_path: Path
) -> None:
    """The same at all of them."""
    moments = [one for one in points(SCENARIOS[scenario], pair, place) if one.when == "before"]
    reached = [
        overtake(SCENARIOS[scenario], pair, place, point, str(tmp_path / str(nth)))
        for nth, point in enumerate(moments)
    ]
    assert reached.count(False) <= len(moments) // 10


@pytest.mark.parametrize(
    ("scenario", "nth", "when"),
    [
        # The entry that decides: in the order of the log, among those that the victim makes.
        ("managed", 2, "before"),
        ("replace", 2, "after"),
        ("parts", 2, "before"),
    ],
)
def test_killed_at_the_entry_that_decides_and_the_other_goes_on(
    scenario: str, nth: int, when: str, pair: Pair, place: Place
) -> None:
    """Nothing committed is lost, latest is right, and the other version's next save works."""
    die(SCENARIOS[scenario], pair, place, Point(nth, when, "create", LOG))


@pytest.mark.parametrize("pair", ["old"], ids=["old-first"], indirect=True)
def test_both_versions_on_an_object_store(pair: Pair, bucket: Place) -> None:
    """One death on S3, with seals that are conditional puts; all of the others are the campaign's, and
    those of this version.
    """
    die(SCENARIOS["retire"], pair, bucket, Point(3, "after", "create", LOG))


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_campaign_killed_at_every_operation(scenario: str, pair: Pair, place: Place) -> None:
    """Every death there is, and the commit is among them."""
    ends, bad = [], []
    for point in list(points(SCENARIOS[scenario], pair, place)):
        try:
            ends.append(die(SCENARIOS[scenario], pair, place, point))
        except (AssertionError, Refused) as error:
            bad.append(f"{point}: {str(error)[:1500]}")
    assert not bad, f"{len(bad)} of {len(bad) + len(ends)}:\n" + "\n".join(bad[:3])
    same = SCENARIOS[scenario].old == SCENARIOS[scenario].new
    assert set(ends) == ({"old"} if same else {"old", "new"})


def test_a_clone_without_history_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shallow clone has not the old version: the error says what to fetch."""
    monkeypatch.setattr("tests.versions.hosts.OLD", "0" * 7)
    with pytest.raises(MissingError, match="--unshallow"):
        tree_of_old(tmp_path)
