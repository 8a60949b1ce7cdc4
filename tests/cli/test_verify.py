"""``ckptfs verify``: every kind of damage is found, nothing healthy is called damaged, and what no one
could look at is never called clean.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.commit.digests import FileDigests, encode_digests
from ckptfs.commit.manifest import digest_of
from ckptfs.tools.findings import Damage, Verdict
from ckptfs.tools.verifying import verify
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import DAMAGES, OWNED, VICTIM, applies, save_id_of, state_now
from tests.cli.sizes import sizeless
from tests.crash.cast import HOME, Cast

OK, NO, NOT_FOUND, ACCESS, UNKNOWN = 0, 1, 3, 4, 7

# Damage: exit of the run, of it with --deep, of the victim, of that with --deep.
EXITS = {
    "nothing": (OK, OK, OK, OK),
    "truncated shard": (NO, NO, NO, NO),
    "flipped bit": (OK, NO, OK, NO),
    "missing shard": (NO, NO, NO, NO),
    "missing sidecar": (NO, NO, NO, NO),
    "damaged sidecar": (NO, NO, NO, NO),
    "missing manifest": (NO, NO, NO, NO),
    "missing projected manifest": (NO, NO, NO, NO),
    "changed manifest": (NO, NO, NO, NO),
    "future manifest": (NO, NO, NO, NO),
    "missing metadata": (NO, NO, NO, NO),
    "missing projected metadata": (NO, NO, NO, NO),
    "garbage metadata": (NO, NO, NO, NO),
    "malicious metadata": (NO, NO, NO, NO),
    "metadata of another save": (NO, NO, NO, NO),
    "garbage entry": (NO, NO, NO, NO),
    "future entry": (OK, OK, OK, OK),
    "missing entry": (NO, NO, NO, NO),
    "missing domain": (NO, NO, NO, NO),
    "abandoned attempt": (OK, OK, OK, OK),
    "deleted save": (OK, OK, OK, OK),
    "orphaned upload": (OK, OK, OK, OK),
    "leftovers": (OK, OK, OK, OK),
    "foreign files": (OK, OK, OK, OK),
    "empty run": (NOT_FOUND,) * 4,
    "nothing committed": (NOT_FOUND,) * 4,
    "nowhere": (NOT_FOUND,) * 4,
    "wrong credentials": (ACCESS,) * 4,
    "stock": (OK, UNKNOWN, NOT_FOUND, NOT_FOUND),
    "copied without its log": (OK, OK, OK, OK),
    "half copied": (NO, NO, NO, NO),
}


def test_every_damage_has_its_line() -> None:
    """The table above knows every kind of damage."""
    assert EXITS.keys() == DAMAGES.keys()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, to be copied and damaged."""
    path = tmp_path_factory.mktemp("healthy") / "run"
    a_run(Place("file", str(path)))
    return path


@pytest.mark.parametrize("name", EXITS)
def test_damage_is_found(cli: Cli, local: Place, healthy: Path, name: str) -> None:
    """Each kind, in the run and in the checkpoint, with the exit code of the table; nothing of the run
    is changed by looking, no code of a malicious file is run, and every finding says what to do.
    """
    damage = DAMAGES[name]
    if applies(damage, local):
        if damage.on_a_run:
            shutil.copytree(healthy, local.uri)
        _all_exits(cli, name, damage.plant(local))


@pytest.mark.parametrize(
    "name",
    [
        "flipped bit",
        "truncated shard",
        "missing shard",
        "missing sidecar",
        "missing projected metadata",
        "orphaned upload",
        "wrong credentials",
        "nowhere",
    ],
)
def test_damage_is_found_on_s3(cli: Cli, bucket: Place, name: str) -> None:
    """The same exit codes where there are no directories, for kinds that look otherwise there."""
    _all_exits(cli, name, DAMAGES[name].made(bucket))


@pytest.fixture
def bucket(radosgw: Any) -> Place:
    """A fresh run on S3."""
    return Place("s3", str(radosgw.fresh()), dict(radosgw.storage_options()))


def _all_exits(cli: Cli, name: str, hurt: Place) -> None:
    before = state_now(hurt)
    found = []
    for uri in (hurt.uri, f"{hurt.uri}/{VICTIM}"):
        for deep in ([], ["--deep"]):
            ran = cli("verify", uri, *deep, *hurt.flags, "--json")
            found.append(ran.exit)
            told = [*ran.json.get("findings", []), *_findings(ran.json)]
            assert bool(told) == (ran.exit == NO), ran.out
            assert all(finding["what"] and finding["todo"] for finding in told)
    assert tuple(found) == EXITS[name]
    assert state_now(hurt) == before
    assert OWNED not in os.environ


@pytest.mark.parametrize("how", ["not listed", "empty"])
def test_a_data_file_without_digests_is_a_finding(cli: Cli, local: Place, how: str) -> None:
    """A manifest that lists no sidecar of a data file, or an empty one: --deep compared nothing of it and
    said "clean". It names the file and how many bytes were not compared.
    """
    a_run(local)
    place = Path(local.uri, "step_20")
    manifest = json.loads((place / "ckptfs.json").read_text())
    (data,) = (f for f in manifest["files"] if f.get("digests"))
    sidecar = next(f for f in manifest["files"] if f["path"] == data["digests"])
    if how == "empty":
        raw = encode_digests(FileDigests(()))
        (place / sidecar["path"]).write_bytes(raw)
        sidecar.update(size=len(raw), digest=digest_of(raw))
    else:
        manifest["files"].remove(sidecar)
        del data["digests"]
    for path in (place / "ckptfs.json", place / manifest["save_id"] / "ckptfs.json"):
        path.write_text(json.dumps(manifest))
    shutil.copytree(place, local.uri + "-copied/step_20")
    ran = cli("verify", f"{local.uri}-copied/step_20", "--deep")
    assert (ran.exit, "every byte" in ran.out) == (NO, False)
    assert f"none of its {data['size']} bytes could be compared" in ran.out
    document = cli("verify", f"{local.uri}-copied/step_20", "--deep", "--json").json
    (one,) = document["checkpoints"]
    assert (one["compared_bytes"], one["uncompared_bytes"]) == (0, data["size"])


def _findings(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for one in document.get("checkpoints", ()) for f in one["findings"]]


def test_a_healthy_run_is_clean(cli: Cli, golden: Golden, place: Place) -> None:
    """A run and one checkpoint, with and without --deep, as text and as JSON."""
    a_run(place)
    for name, arguments in (
        ("verify", [place.uri]),
        ("verify_deep", [place.uri, "--deep"]),
        ("verify_json", [f"{place.uri}/{VICTIM}", "--deep", "--json"]),
    ):
        ran = cli("verify", *arguments, *place.flags)
        assert ran.exit == OK
        golden(name, sizeless(ran.out), place)


@pytest.mark.parametrize("name", ["flipped bit", "missing manifest"])
def test_what_is_damaged_is_named(cli: Cli, golden: Golden, place: Place, name: str) -> None:
    """File, bytes, tensors, and what to do; the same on every storage."""
    hurt = DAMAGES[name].made(place)
    ran = cli("verify", f"{hurt.uri}/{VICTIM}", "--deep", *hurt.flags)
    assert ran.exit == NO
    golden(f"verify_{name.replace(' ', '_')}", sizeless(ran.out), place)


def test_several_uris_are_one_verdict(cli: Cli, tmp_path: Path) -> None:
    """A clean checkpoint and a damaged one: damaged; both are reported."""
    good = a_run(Place("file", str(tmp_path / "good")))
    bad = DAMAGES["missing shard"].made(Place("file", str(tmp_path / "bad")))
    ran = cli("verify", f"{good.uri}/step_10", f"{bad.uri}/{VICTIM}", "--json")
    assert ran.exit == NO
    assert [one["verdict"] for one in ran.json["checkpoints"]] == ["clean", "damaged"]


def test_resume_without_deep_is_a_wrong_call(cli: Cli, local: Place) -> None:
    """There is nothing to remember; and a file that is no state file is not overwritten."""
    a_run(local)
    state = Path(f"{local.uri}.json")
    assert cli("verify", local.uri, "--resume", state).exit == 2
    state.write_text("my notes")
    assert cli("verify", local.uri, "--deep", "--resume", state).exit == 2
    assert state.read_text() == "my notes"


def test_a_healthy_run_is_verified_without_torch(local: Place) -> None:
    """Form and digests both: `ckptfs verify` of our own checkpoints imports no torch without --deep."""
    a_run(local)
    code = (
        "import sys; from ckptfs.tools.verifying import verify;"
        f"print(verify([{local.uri!r}]).verdict, 'torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=400
    )
    assert ran.stdout.split() == ["clean", "False"]


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_the_command_verifies_the_form_without_torch(local: Place, flags: tuple[str, ...]) -> None:
    """Of a run of ours, which has tensors, and of one of its checkpoints: most of the time would be the import."""
    a_run(local)
    code = (
        "import sys; from ckptfs.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: sys.exit(ended.code or 8 * ('torch' in sys.modules))"
    )
    for uri in (local.uri, f"{local.uri}/step_10"):
        call = [sys.executable, "-c", code, "verify", uri, *flags]
        ran = subprocess.run(call, capture_output=True, text=True, check=False, timeout=400)
        assert ran.returncode == 0, ran
        assert "clean" in ran.stdout


# -- one bit, anywhere ----------------------------------------------------------------


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_bit_anywhere_is_found_by_deep_and_not_by_form(
    healthy: Path, data: st.DataObject
) -> None:
    """Of any data file, tensors and objects alike; the finding names the file and the byte."""
    files = [*sorted(healthy.glob("*_*/*/*.distcp")), healthy / "export_1" / "config.json"]
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    try:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        assert verify([healthy]).verdict is Verdict.CLEAN
        (finding,) = verify([healthy], deep=True).all_findings
    finally:
        file.write_bytes(whole)
    assert finding.damage is Damage.BYTES
    assert str(finding.uri).endswith(str(file))
    assert finding.start is not None
    assert finding.stop is not None
    assert finding.start <= at < finding.stop


def test_each_damaged_range_is_told(tmp_path: Path) -> None:
    """Two far blocks of one tensor and one of another are three findings; neighbours are one."""
    state = {"a": torch.zeros(5 << 18), "b": torch.zeros(1 << 18)}  # 5 MiB and 1 MiB
    ckptfs.save(state, tmp_path / "run" / "step_1")
    (file,) = (tmp_path / "run").glob("step_1/*/*.distcp")
    whole = bytearray(file.read_bytes())
    for at in (100_000, 3_300_000, 4_300_000, len(whole) - 500_000):
        whole[at] ^= 1
    file.write_bytes(whole)
    (one,) = verify([tmp_path / "run"], deep=True, jobs=3).checkpoints
    told = [(f.blocks, f.tensors) for f in one.findings]
    assert told == [(1, ("a",)), (2, ("a",)), (1, ("b",))]


# -- what is not seen, or cannot be compared -------------------------------------------


def test_parts_on_other_disks_are_not_clean(cli: Cli, tmp_path: Path) -> None:
    """From one node the parts of others are not seen: exit 7, and the domain is named; on shared
    storage all parts are verified, and each by its own URI.
    """
    apart = Cast(str(tmp_path / "apart"), shared=False)
    apart.play("one")
    ran = cli("verify", apart.directory(HOME), "--json")
    assert ran.exit == UNKNOWN
    verdicts = {one["name"]: one["verdict"] for one in ran.json["checkpoints"]}
    assert verdicts["step_1/driver"] == "clean"
    assert verdicts["step_1/actor"] == verdicts["step_1/critic"] == "unknown"
    assert cli("verify", f"{apart.directory('a')}/step_1/actor").exit == OK

    together = Cast(str(tmp_path / "together"), shared=True)
    together.play("one")
    ran = cli("verify", f"{together.directory(HOME)}/step_1", "--json")
    assert ran.exit == OK
    names = [one["name"] for one in ran.json["checkpoints"]]
    assert names == ["step_1", "step_1/actor", "step_1/critic", "step_1/driver"]
    os.unlink(next(Path(together.directory(HOME)).glob("step_1/critic/*/*.distcp")))
    assert cli("verify", f"{together.directory(HOME)}/step_1").exit == NO
    assert cli("verify", f"{together.directory(HOME)}/step_1/critic").exit == NO
    assert cli("verify", f"{together.directory(HOME)}/step_1/actor").exit == OK


def test_a_stock_checkpoint_is_checked_by_sizes(cli: Cli, local: Place) -> None:
    """A file that is shorter than its .metadata says, or not there, is found; with --deep it is said
    that nothing could be compared.
    """
    DAMAGES["stock"].made(local)
    file = Path(local.uri, "step_5", "__0_0.distcp")
    assert "no digests: only sizes" in cli("verify", f"{local.uri}/step_5").out
    assert "no digests: only sizes" in cli("verify", f"{local.uri}/step_5", "--deep").out
    file.write_bytes(file.read_bytes()[:-100])
    ran = cli("verify", f"{local.uri}/step_5", "--json")
    assert ran.exit == NO
    (finding,) = _findings(ran.json)
    assert finding["damage"] == "size"
    assert finding["tensors"]
    file.unlink()
    (finding,) = _findings(cli("verify", f"{local.uri}/step_5", "--json").json)
    assert finding["damage"] == "missing"


def test_a_save_that_is_not_projected_is_told_and_not_damaged(cli: Cli, local: Place) -> None:
    """Its committer died between the seal and the rename: whole for us, and said so."""
    a_run(local)
    with local.storage() as storage:
        save_id = save_id_of(storage, VICTIM)
    shutil.move(f"{local.uri}/{VICTIM}", f"{local.uri}/.ckptfs/attempts/{save_id}")
    ran = cli("verify", f"{local.uri}/{VICTIM}", "--deep")
    assert ran.exit == OK
    assert "not projected yet" in ran.out


# -- resume ----------------------------------------------------------------------------


def _killed(uri: str, state: Path, fault: str) -> int:
    environment = {**os.environ, "CKPTFS_TEST_FAULT": fault}
    arguments = ["verify", uri, "--deep", "--jobs", "1", "--resume", str(state)]
    ran = subprocess.run(
        [sys.executable, "-m", "ckptfs", *arguments],
        env=environment,
        check=False,
        capture_output=True,
        timeout=400,
    )
    return ran.returncode


def test_a_killed_verification_goes_on_where_it_was(cli: Cli, local: Place) -> None:
    """SIGKILL in the middle of --deep --resume: the second call skips what the first had compared,
    compares the rest, and finds damage in both halves that came later.
    """
    a_run(local)
    state = Path(f"{local.uri}.json")
    uri = f"faults+file://{local.uri}"
    killed = _killed(uri, state, "kill:read_into:*weights_20*:1")
    assert killed == -signal.SIGKILL
    known = json.loads(state.read_text())["verified"]
    assert known
    ran = cli("verify", uri, "--deep", "--resume", state, "--json")
    assert ran.exit == OK
    resumed = {one["name"]: one["resumed_bytes"] for one in ran.json["checkpoints"]}
    compared = {one["name"]: one["compared_bytes"] for one in ran.json["checkpoints"]}
    assert resumed["step_10"] == compared["step_10"] > 0
    assert resumed["weights_20"] == 0 < compared["weights_20"]
    again = cli("verify", uri, "--deep", "--resume", state, "--json")
    told = again.json["checkpoints"]
    assert [one["resumed_bytes"] for one in told] == [one["compared_bytes"] for one in told]


def test_what_was_written_anew_is_compared_anew(cli: Cli, local: Place) -> None:
    """A replaced checkpoint has another save_id, and a damage that was found is found again."""
    a_run(local)
    state = Path(f"{local.uri}.json")
    assert cli("verify", local.uri, "--deep", "--resume", state).exit == OK
    ckptfs.save(state_of(3), f"{local.uri}/step_10", if_exists="replace")
    with local.storage() as storage:
        save_id = save_id_of(storage, "step_10")
    file = Path(local.uri, "step_10", save_id, "__0_0.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"x")
    for _ in range(2):
        assert cli("verify", local.uri, "--deep", "--resume", state).exit == NO
    file.write_bytes(whole)
    assert cli("verify", local.uri, "--deep", "--resume", state).exit == OK


def test_what_is_remembered_is_of_one_place_and_one_time(cli: Cli, local: Place) -> None:
    """A copy of what was compared is not compared by that; nor is a file that was changed since, its
    size kept. What an earlier call compared is said to be so.
    """
    a_run(local)
    state, copied = Path(f"{local.uri}.json"), f"{local.uri}-copy"
    shutil.copytree(local.uri, copied)
    assert cli("verify", local.uri, "--deep", "--resume", state).exit == OK
    for run in (copied, local.uri):
        before = cli("verify", local.uri, "--deep", "--resume", state)
        assert before.exit == OK
        assert "by an earlier call" in before.out.splitlines()[-1]
        (file,) = Path(run).glob("step_10/*/__0_0.distcp")
        whole = bytearray(file.read_bytes())
        whole[1000] ^= 1
        file.write_bytes(whole)
        assert cli("verify", run, "--deep", "--resume", state).exit == NO
