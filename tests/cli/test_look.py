"""``ckptfs ls`` and ``ckptfs latest``: what a person sees of runs, healthy and damaged."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.cli.main import COMMANDS
from ckptfs.commit.log.append import append
from ckptfs.commit.log.entries import GENESIS, Kind, Seal
from ckptfs.commit.operations import drive
from ckptfs.errors import IncompleteCheckpointError, ManifestError
from ckptfs.uri import Uri
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import DAMAGES, state_now

DEADLINE_S = 0.6  # promised: 0.3 s; next to others the same instructions take a processor longer


def sizeless(text: str) -> str:
    """Without sizes: ``.metadata`` holds the URI, which is longer on one machine than on another."""
    text = re.sub(r"\b\d+(\.\d+)? (B|kB|MB)(?=\s|$)", "<size>", text)
    return re.sub(r'"size_bytes": \d+', '"size_bytes": <size>', text)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``a_run``, to copy and damage."""
    path = tmp_path_factory.mktemp("healthy") / "run"
    a_run(Place("file", str(path)))
    return path


def test_a_run_is_listed_alike_on_every_storage(cli: Cli, golden: Golden, place: Place) -> None:
    """Step, state, kind, age, size, ranks and pins of a run, as text and as JSON."""
    a_run(place)
    golden("ls", sizeless(cli("ls", place.uri, *place.flags).out), place)
    golden("ls_json", sizeless(cli("ls", place.uri, *place.flags, "--json").out), place)


def test_one_checkpoint_is_listed_with_its_files(cli: Cli, golden: Golden, place: Place) -> None:
    """The URI of a checkpoint gives its line and, asked for, its files."""
    a_run(place)
    ran = cli("ls", f"{place.uri}/step_20", "--files", *place.flags)
    golden("ls_files", sizeless(ran.out), place)


def test_sizes_are_those_of_the_files(cli: Cli, healthy: Path) -> None:
    """The bytes that a line gives are the bytes of the files that the manifest lists."""
    (found,) = cli("ls", healthy / "step_20", "--files", "--json").json["places"]
    (line,) = found["checkpoints"]
    sizes = {f["path"]: f["size_bytes"] for f in found["files"]}
    assert sizes == {path: (healthy / "step_20" / path).stat().st_size for path in sizes}
    assert line["size_bytes"] == sum(sizes.values())
    assert line["files"] == len(sizes)


_TELLING = (
    "missing manifest",
    "changed manifest",
    "missing projected manifest",
    "missing projected metadata",
    "future manifest",
    "half copied",
    "copied without its log",
    "stock",
    "garbage entry",
    "missing entry",
    "future entry",
    "missing domain",
    "abandoned attempt",
    "deleted save",
    "empty run",
    "nothing committed",
    "nowhere",
)


def test_each_damage_is_told(cli: Cli, golden: Golden, healthy: Path, tmp_path: Path) -> None:
    """What ``ls -a`` says of each damage that can be seen without looking at every file."""
    told = []
    for name in _TELLING:
        place = Place("file", str(tmp_path / name.replace(" ", "_") / "run"))
        if DAMAGES[name].on_a_run:
            shutil.copytree(healthy, place.uri)
        hurt = DAMAGES[name].plant(place)
        ran = cli("ls", "-a", hurt.uri)
        text = f"== {name}: {DAMAGES[name].what}\n{ran.out}{ran.err}exit {ran.exit}\n"
        told.append(text.replace(f"file://{place.uri}", "<run>").replace(place.uri, "<run>"))
    golden("ls_damaged", sizeless("\n".join(told)), Place("file", str(tmp_path)))


@pytest.mark.parametrize("name", ["missing manifest", "deleted save", "nowhere"])
def test_a_damage_is_told_alike_on_a_bucket(
    cli: Cli, golden: Golden, radosgw: Any, name: str
) -> None:
    """The damages with a report that depends on the shape of the storage, on S3."""
    server = radosgw
    place = Place("s3", str(server.fresh()), dict(server.storage_options()))
    hurt = DAMAGES[name].made(place)
    ran = cli("ls", "-a", hurt.uri, *hurt.flags)
    golden(
        f"ls_s3_{name.replace(' ', '_')}", sizeless(f"{ran.out}{ran.err}exit {ran.exit}\n"), hurt
    )


def test_wrong_credentials_are_told_as_such(cli: Cli, radosgw: Any) -> None:
    """A secret that is not the secret ends ls with 4, and is not printed."""
    place = Place("s3", str(radosgw.fresh()), dict(radosgw.storage_options()))
    hurt = DAMAGES["wrong credentials"].plant(place)
    ran = cli("ls", hurt.uri, *hurt.flags)
    assert ran.exit == 4
    assert "not-the-secret" not in ran.out + ran.err


def test_what_is_on_its_way_and_who_holds_the_run(cli: Cli, golden: Golden, place: Place) -> None:
    """While a job saves, ls names the job and the attempt; after it, the run is free."""
    with (
        ckptfs.prepare_run(place.uri, storage_options=place.options) as run,
        ckptfs.checkpoint_dir(f"{place.uri}/export_2", run=run) as path,
    ):
        Path(path, "a.txt").write_text("half")
        golden("ls_held", sizeless(cli("ls", place.uri, *place.flags).out), place)
    (found,) = cli("ls", place.uri, *place.flags, "--json").json["places"]
    assert found["owner"]["hold"] == "free"
    assert [line["state"] for line in found["checkpoints"]] == ["committed"]


def test_history_is_shown_when_asked_for(cli: Cli, local: Place) -> None:
    """Replaced, overwritten and aborted saves are lines of -a alone."""
    with ckptfs.prepare_run(local.uri) as held:
        for seed in (1, 2):
            ckptfs.save(state_of(seed), f"{local.uri}/step_1", if_exists="replace", run=held)
    states = [
        [
            line["state"]
            for line in cli("ls", local.uri, *flags, "--json").json["places"][0]["checkpoints"]
        ]
        for flags in ((), ("-a",))
    ]
    assert states == [["committed"], ["replaced", "committed"]]
    with ckptfs.prepare_run(local.uri, mode="overwrite"):
        (found,) = cli("ls", local.uri, "--json").json["places"]
        assert found["checkpoints"] == []
        assert found["withheld"] == 2
        (found,) = cli("ls", "-a", local.uri, "--json").json["places"]
        assert [line["state"] for line in found["checkpoints"]] == ["overwritten", "overwritten"]


def test_a_save_whose_domain_is_out_of_reach_is_in_doubt(cli: Cli, local: Place) -> None:
    """A seal of two domains, only one seen from here, is neither committed nor gone."""
    ckptfs.save(state_of(1), f"{local.uri}/step_1")
    with local.storage() as storage:
        mine = storage.read(".ckptfs/domain").decode().strip()
        seal = Seal(
            save_id="20260102T030405-000000000abc",
            base=GENESIS,
            seq=1,
            fenced=True,
            name="step_2",
            step=2,
            artifact=Kind.CHECKPOINT,
            domains=(mine, "f" * 32),
            digest="0" * 32,
        )
        drive(append(lambda _: seal, write_id="planted"), storage)
    (found,) = cli("ls", local.uri, "--json").json["places"]
    line = found["checkpoints"][-1]
    assert (line["name"], line["state"]) == ("step_2", "in doubt")
    assert "f" * 32 in line["note"]


def test_parts_are_named_and_their_bytes_counted(cli: Cli, local: Place) -> None:
    """A checkpoint of several groups is one line, with its parts' names and all their bytes."""
    with ckptfs.CheckpointManager(local.uri) as manager:
        ticket = manager.begin(5, parts=["actor", "critic"])
        sealed = [ckptfs.save(state_of(5), ticket.part(name)) for name in ("actor", "critic")]
        (found,) = cli("ls", local.uri, "--json").json["places"]
        assert {line["state"] for line in found["checkpoints"]} == {"on its way"}
        ticket.commit(sealed)
    (found,) = cli("ls", local.uri, "--json").json["places"]
    (line,) = found["checkpoints"]
    assert line["parts"] == ["actor", "critic"]
    parts = list(Path(local.uri, "step_5").rglob("*.distcp"))
    assert len(parts) == 2
    assert line["size_bytes"] > sum(p.stat().st_size for p in parts)


def test_order_kind_and_limit(cli: Cli, healthy: Path) -> None:
    """--sort, --kind and --limit choose and order the lines; the last of the order stay."""

    def names(*flags: str) -> list[str]:
        (found,) = cli("ls", healthy, *flags, "--json").json["places"]
        return [line["name"] for line in found["checkpoints"]]

    assert names() == ["step_10", "step_20", "weights_20", "export_1"]
    assert names("--limit", "2") == ["weights_20", "export_1"]
    assert names("--sort", "name", "--limit", "2") == ["step_20", "weights_20"]
    assert names("--sort", "step")[0] == "export_1"
    assert names("--sort", "size")[0] == "export_1"
    assert names("--kind", "checkpoint", "--kind", "weights", "--limit", "2") == [
        "step_20", "weights_20",
    ]  # fmt: skip


def test_runs_below_a_directory(cli: Cli, golden: Golden, healthy: Path, tmp_path: Path) -> None:
    """A place above runs lists them: with a log, without one, damaged, and further down."""
    above = tmp_path / "above"
    shutil.copytree(healthy, above / "one")
    shutil.copytree(healthy, above / "team" / "two")
    shutil.copytree(healthy, above / "copied")
    shutil.copytree(healthy, above / "damaged")
    DAMAGES["copied without its log"].plant(Place("file", str(above / "copied")))
    DAMAGES["garbage entry"].plant(Place("file", str(above / "damaged")))
    (above / "notes").mkdir()
    place = Place("file", str(above))
    golden("ls_runs", cli("ls", above).out, place)
    golden("ls_runs_json", cli("ls", above, "--json").out, place)


def test_of_several_places_each_is_told(cli: Cli, healthy: Path, tmp_path: Path) -> None:
    """One that fails does not keep the others from being listed; its code is the exit."""
    ran = cli("ls", tmp_path / "nowhere", healthy)
    assert ran.exit == 3
    assert "step_20" in ran.out
    assert "nothing exists there" in ran.err
    found = cli("ls", tmp_path / "nowhere", healthy, "--json").json["places"]
    assert [place["type"] for place in found] == ["error", "run"]


def test_looking_changes_nothing(cli: Cli, place: Place) -> None:
    """Whatever is asked, not one name, byte or time of the run is another one afterwards."""
    a_run(place)
    before = state_now(place)
    for command in (("ls", "-a"), ("latest",), ("log",)):
        assert cli(*command, place.uri, *place.flags).exit == 0
    cli("ls", f"{place.uri}/step_10", "--files", *place.flags)
    assert state_now(place) == before


# -- latest -----------------------------------------------------------------------------------


def test_latest_is_the_last_commit_of_its_kind(cli: Cli, place: Place) -> None:
    """By commit and never by step: a run that went back is not continued at what it gave up."""
    a_run(place)
    with ckptfs.CheckpointManager(place.uri, storage_options=place.options) as manager:
        manager.resumed_at(10)
        manager.save(15, state_of(15))
    for flags, name in (((), "step_15"), (("--kind", "weights"), "weights_20")):
        ran = cli("latest", place.uri, *flags, *place.flags)
        assert (ran.exit, ran.out) == (0, f"{place.uri}/{name}\n")


def test_latest_for_alerts(cli: Cli, golden: Golden, healthy: Path, tmp_path: Path) -> None:
    """--max-age ends with 1 and says why where the newest is too old; so does a run without any."""
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    manifests = [run / "step_20" / "ckptfs.json", *run.glob("step_20/*/ckptfs.json")]
    assert cli("latest", run, "--max-age", "1h").exit == 0
    shutil.rmtree(run / ".ckptfs")
    for manifest in manifests:
        text = manifest.read_text()
        manifest.write_text(
            re.sub(r'"created_at": "[^"]*"', '"created_at": "2020-01-02T03:04:05Z"', text)
        )
    old = cli("latest", run, "--max-age", "1h")
    assert (old.exit, old.out) == (1, f"{run}/step_20\n")
    assert "step_20 is" in old.err
    assert "more than 1h" in old.err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli("latest", empty).exit == 1
    assert cli("latest", empty, "--json").json["uri"] is None
    assert cli("latest", tmp_path / "nowhere").exit == 3
    assert cli("latest", run, "--max-age", "soon").exit == 2
    document = cli("latest", healthy, "--max-age", "1h", "--json").out
    golden("latest_json", sizeless(document), Place("file", str(healthy)))


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("missing entry", 1, "the run log has a gap: entry 2 is missing"),
        ("missing domain", 0, ".ckptfs/domain is missing"),
        ("future entry", 0, "newer version"),
    ],
)
def test_latest_says_what_is_odd(
    cli: Cli, healthy: Path, tmp_path: Path, name: str, code: int, word: str
) -> None:
    """Where the log cannot tell all, latest says so; where a newer one may be hidden, it is no answer."""
    shutil.copytree(healthy, tmp_path / "run")
    hurt = DAMAGES[name].plant(Place("file", str(tmp_path / "run")))
    ran = cli("latest", hurt.uri)
    assert ran.exit == code
    assert word in ran.err
    assert ran.out == ("" if code else f"{hurt.uri}/step_20\n")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_latest_does_not_answer_with_a_stale_checkpoint(cli: Cli, local: Place, count: int) -> None:
    """However many entries are missing before the last one: ``latest`` exits with 1 and prints no
    checkpoint, in Python it raises, ``ls`` and ``rm`` say what is missing, and a restore refuses.
    """
    for step in (1, 2, 3, 4, 5):
        ckptfs.save(state_of(step), f"{local.uri}/step_{step}")
    log = Path(local.uri, ".ckptfs/log")
    last = max(int(entry.name) for entry in log.iterdir())
    lost = range(last - count, last)
    for number in lost:
        (log / f"{number:08d}").unlink()
    ran = cli("latest", local.uri)
    assert (ran.exit, ran.out) == (1, "")
    assert f"the run log has a gap: entry {lost[0]} is missing" in ran.err
    for kind in ("checkpoint", "directory"):
        with pytest.raises(ManifestError, match=f"entry {lost[0]} is missing"):
            ckptfs.latest(local.uri, kind)
    assert f"entry {lost[0]} of the log is missing" in cli("ls", local.uri).out
    assert cli("rm", f"{local.uri}/step_1", "--yes").exit == 1
    with (
        ckptfs.CheckpointManager(local.uri) as manager,
        pytest.raises(IncompleteCheckpointError, match=f"entry {lost[0]} is missing"),
    ):
        manager.restore(state_of())


# -- at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "log", "latest", "watch", "rm", "pin", "unpin"])
def test_no_torch_is_imported(command: str, healthy: Path, tmp_path: Path) -> None:
    """Commands that read no tensor answer without importing torch."""
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    module = COMMANDS[command][0].partition(":")[0]
    script = (
        "import sys\n"
        "from ckptfs.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    assert ended.code == 0, ended.code\n"
        f"assert {module!r} in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    target = run / "step_10" if command in ("rm", "pin", "unpin") else run
    flags = {"rm": ["--yes"], "watch": ["--from", "0", "--until-end"]}.get(command, [])
    subprocess.run([sys.executable, "-c", script, command, str(target), *flags], check=True)


def test_ls_answers_at_once(healthy: Path, tmp_path: Path) -> None:
    """A local run is listed in a fraction of a second, interpreter and imports included."""
    # Other tests run with no bytecode cache; a user of ckptfs has one from the second call on.
    env = {name: told for name, told in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "ckptfs", "ls", str(healthy)]
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    took: list[float] = []
    for _ in range(5):
        # It waits for no one: its own processor time is what it takes on a machine that has one free.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < DEADLINE_S, took


def test_an_empty_control_directory_is_no_run(cli: Cli, tmp_path: Path) -> None:
    """No run was begun where ``.ckptfs`` is empty: ls says so, and does not list it above."""
    (tmp_path / "empty" / ".ckptfs").mkdir(parents=True)
    ckptfs.save(state_of(5), tmp_path / "run" / "step_5")
    assert "no run: .ckptfs is empty" in cli("ls", tmp_path / "empty").out
    (found,) = cli("ls", tmp_path, "--json").json["places"]
    assert [run["uri"] for run in found["runs"]] == [str(Uri.parse(tmp_path / "run"))]


@pytest.mark.parametrize("command", ["ls", "gc", "latest"])
def test_a_file_is_told_as_one(cli: Cli, tmp_path: Path, command: str) -> None:
    """Not as a place where nothing is."""
    (tmp_path / "file").write_bytes(b"bytes")
    ran = cli(command, tmp_path / "file")
    assert (ran.exit, "a file, not a run" in ran.err) == (2, True), ran.err
    ran = cli(command, tmp_path / "nothing")
    assert (ran.exit, "nothing exists there" in ran.err) == (3, True), ran.err


def test_a_directory_of_single_files_is_told_as_one(cli: Cli, tmp_path: Path) -> None:
    """Lightning's ``.ckpt`` files and torch's ``.pt`` files are in no run: ls names them."""
    for name in ("last.ckpt", "epoch=1.ckpt"):
        torch.save(state_of(5), tmp_path / name)
    ran = cli("ls", tmp_path)
    assert ran.exit == 0
    assert "no run, a directory of single files: epoch=1.ckpt, last.ckpt" in ran.out
    assert "no run" not in cli("ls", _run_beside(tmp_path)).out


def _run_beside(path: Path) -> Path:
    """A run with a single file in its directory too."""
    ckptfs.save(state_of(5), path / "run" / "step_5")
    torch.save(state_of(5), path / "run" / "best.ckpt")
    return path / "run"


@pytest.mark.parametrize(
    ("began", "written"),
    [("now", "now"), ("two days ago", "now"), ("two days ago", "two days ago")],
)
def test_ls_and_gc_have_one_opinion_of_an_attempt(
    cli: Cli, healthy: Path, tmp_path: Path, began: str, written: str
) -> None:
    """A valid attempt of the owner: gc leaves it alone, and ls says that it is on its way, until
    nothing was written to it for a day, whenever it began.
    """
    run = shutil.copytree(healthy, tmp_path / "run")
    place = Place("file", str(run))
    DAMAGES["abandoned attempt"].plant(place)
    attempts = run / ".ckptfs" / "attempts"
    (attempt,) = attempts.iterdir()
    ago = datetime.now(UTC) - timedelta(days=2 if began == "two days ago" else 0)
    renamed = f"{ago:%Y%m%dT%H%M%S}-{attempt.name.partition('-')[2]}"
    (attempt / attempt.name).rename(attempt / renamed)
    (record,) = attempt.rglob("attempt.json")
    record.write_text(record.read_text().replace(attempt.name, renamed))
    attempt.rename(attempts / renamed)
    if written == "two days ago":
        for path in [*attempts.rglob("*"), attempts / renamed]:
            os.utime(path, (ago.timestamp(),) * 2)
    (found,) = cli("ls", "-a", run, "--json").json["places"]
    (state,) = [one["state"] for one in found["checkpoints"] if one["name"] == "step_30"]
    (gone,) = cli("gc", run, "--json").json["runs"]
    (fate,) = [one["fate"] for one in gone["found"] if one["kind"] == "abandoned attempt"]
    is_dead = written == "two days ago"
    assert (fate, state) == (("goes", "abandoned") if is_dead else ("young", "on its way"))
