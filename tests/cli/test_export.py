"""``ckptfs export``: what it writes is opened by torch and safetensors themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.tools.exporting import ExportFormat
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import DAMAGES, VICTIM, keys_of, state_now
from tests.cli.sizes import sizeless

OK, NO, USAGE, NOT_FOUND, TAKEN = 0, 1, 2, 3, 6
FORMATS = [to.value for to in ExportFormat]


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of ``state_of``, by key."""
    found = {f"model.{key}": value for key, value in state["model"].items()}
    return found | {"optimizer.exp_avg": state["optimizer"]["exp_avg"]}


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Bit for bit, dtypes included, and no key more."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key


def fetched(place: Place, name: str, into: Path) -> Path:
    """An exported directory or file of a place, on the local disk."""
    with place.storage() as storage:
        keys = [key for key in keys_of(storage) if key == name or key.startswith(f"{name}/")]
        for key in keys:
            (into / key).parent.mkdir(parents=True, exist_ok=True)
            (into / key).write_bytes(storage.read(key))
    return into / name


def test_every_format_on_every_storage(
    cli: Cli, golden: Golden, place: Place, tmp_path: Path
) -> None:
    """safetensors.torch, torch.load and dcp.load read it back bit for bit; nothing of ours is in it,
    and the source is as it was.
    """
    a_run(place)
    before, said = state_now(place), []
    source, out = f"{place.uri}/{VICTIM}", Place(place.kind, f"{place.uri}-out", place.options)
    for to, name in (("safetensors", "hf"), ("torch", "model.pt"), ("dcp", "dcp")):
        ran = cli("export", source, f"{out.uri}/{name}", "--format", to, *place.flags)
        assert ran.exit == OK, ran.err
        said.append(ran.out)
    golden("export", sizeless("".join(said)), place)
    assert state_now(place) == before
    state = state_of(20)
    hf = fetched(out, "hf", tmp_path)
    equal(safetensors.torch.load_file(hf / "model.safetensors"), flat(state))
    loaded: Any = torch.load(fetched(out, "model.pt", tmp_path), weights_only=True)
    equal(loaded["model"], state["model"])
    assert (loaded["step"], loaded["optimizer"]["lr"]) == (20, 0.1)
    plain = fetched(out, "dcp", tmp_path)
    assert sorted(os.listdir(plain)) == [".metadata", "__0_0.distcp"]
    into: Any = state_of(1)
    dcp.load(into, checkpoint_id=plain, no_dist=True)
    equal(into["model"], state["model"])
    assert into["step"] == 20


def test_names_and_dtypes_are_changed_as_asked(cli: Cli, local: Place, tmp_path: Path) -> None:
    """--filter, --strip, --key-prefix, --dtype, in every format; integers keep their dtype."""
    state: Any = {"model": {"w": torch.randn(4, 4), "n": torch.arange(3)}, "lr": 0.5}
    ckptfs.save(state, f"{local.uri}/step_1")
    how = [
        "--filter",
        "model.*",
        "--strip",
        "model.",
        "--key-prefix",
        "base.",
        "--dtype",
        "bfloat16",
    ]
    wanted = {"base.w": state["model"]["w"].bfloat16(), "base.n": torch.arange(3)}
    for to in FORMATS:
        assert cli("export", f"{local.uri}/step_1", tmp_path / to, "--format", to, *how).exit == OK
    equal(safetensors.torch.load_file(tmp_path / "safetensors" / "model.safetensors"), wanted)
    equal(torch.load(tmp_path / "torch", weights_only=True), wanted)
    into = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    equal(into, wanted)


def test_large_exports_are_cut_into_files(cli: Cli, local: Place, tmp_path: Path) -> None:
    """--max-shard-size: several files with an index that has each key where it says, and several data
    files of a plain DCP checkpoint.
    """
    a_run(local)
    source = f"{local.uri}/{VICTIM}"
    for to in ("safetensors", "dcp"):
        ran = cli(
            "export", source, tmp_path / to, "--format", to, "--max-shard-size", "4096", "--json"
        )
        assert ran.exit == OK
        assert len(ran.json["files"]) > 2
    index = json.loads((tmp_path / "safetensors" / "model.safetensors.index.json").read_text())
    found = {
        key: safetensors.torch.load_file(tmp_path / "safetensors" / file)[key]
        for key, file in index["weight_map"].items()
    }
    equal(found, flat(state_of(20)))
    into = state_of(1)
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    equal(flat(into), flat(state_of(20)))


def test_tensors_that_are_larger_than_a_piece_are_streamed(cli: Cli, tmp_path: Path) -> None:
    """40 MiB in pieces of 16: rows, one long row, and a bfloat16 view of it; also mapped from scratch."""
    state = {
        "rows": torch.randn(5, 1 << 20),
        "flat": torch.randn(10 << 20),
        "one": torch.tensor(2.5),
    }
    ckptfs.save(state, tmp_path / "run" / "step_1")
    source = tmp_path / "run" / "step_1"
    half = {key: value.bfloat16() for key, value in state.items()}
    (tmp_path / "scratch").mkdir()
    for to, more in (("safetensors", []), ("torch", ["--scratch", tmp_path / "scratch"])):
        out = ["--format", to, "--dtype", "bfloat16", *more]
        assert cli("export", source, tmp_path / to, *out).exit == OK
    equal(safetensors.torch.load_file(tmp_path / "safetensors" / "model.safetensors"), half)
    equal(torch.load(tmp_path / "torch", weights_only=True), half)
    assert not os.listdir(tmp_path / "scratch")


def test_nothing_is_overwritten_unasked(cli: Cli, local: Place, tmp_path: Path) -> None:
    """Exit 6 and what is there stays; with --overwrite it is replaced whole; a run and a checkpoint of
    one never are.
    """
    a_run(local)
    source = f"{local.uri}/{VICTIM}"
    for to in FORMATS:
        out = tmp_path / to
        assert cli("export", f"{local.uri}/step_10", out, "--format", to).exit == OK
        before = state_now(Place("file", str(tmp_path)))
        assert cli("export", source, out, "--format", to).exit == TAKEN
        assert state_now(Place("file", str(tmp_path))) == before
        assert cli("export", source, out, "--format", to, "--overwrite").exit == OK
    equal(
        safetensors.torch.load_file(tmp_path / "safetensors" / "model.safetensors"),
        flat(state_of(20)),
    )
    assert torch.load(tmp_path / "torch", weights_only=True)["step"] == 20
    assert sorted(os.listdir(tmp_path)) == sorted([*FORMATS, "run"])
    before = state_now(local)
    for target in (local.uri, f"{local.uri}/step_10"):
        for to in FORMATS:
            assert cli("export", source, target, "--format", to, "--overwrite").exit == USAGE
    assert state_now(local) == before


def test_an_overwritten_export_on_s3_leaves_no_old_file(
    cli: Cli, tmp_path: Path, radosgw: Any
) -> None:
    """The old one had three files and an index, the new one has one: no reader takes a mixture; and a
    directory with something else in it is refused.
    """
    out = Place("s3", str(radosgw.fresh()), dict(radosgw.storage_options()))
    ckptfs.save(state_of(1), tmp_path / "run" / "step_1")
    target = [part for option in out.flags[1::2] for part in ("--target-option", option)]
    told = [tmp_path / "run" / "step_1", f"{out.uri}/hf", "--format", "safetensors", *target]
    assert cli("export", *told, "--max-shard-size", "4096").exit == OK
    assert cli("export", *told).exit == TAKEN
    assert cli("export", *told, "--overwrite").exit == OK
    with out.storage() as storage:
        assert list(keys_of(storage)) == ["hf/model.safetensors"]
        storage.replace("hf/notes.txt", b"mine")
    assert cli("export", *told, "--overwrite").exit == USAGE


def test_damaged_data_is_not_exported(cli: Cli, local: Place, tmp_path: Path) -> None:
    """One bit: exit 1, and the target is not there at all."""
    hurt = DAMAGES["flipped bit"].made(local)
    for to in FORMATS:
        ran = cli("export", f"{hurt.uri}/{VICTIM}", tmp_path / "out" / to, "--format", to)
        assert ran.exit == NO
        assert "model.head.weight" in ran.err
    assert not [name for name in os.listdir(tmp_path / "out") if name]


def test_a_killed_export_leaves_no_target(tmp_path: Path) -> None:
    """SIGKILL half-way through a file: the name is not there, what is left says that it is partial."""
    ckptfs.save(state_of(1), tmp_path / "run" / "step_1")
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["export", str(tmp_path / "run" / "step_1"), f"faults+file://{out}/hf"]
    ran = subprocess.run(
        [sys.executable, "-m", "ckptfs", *arguments, "--format", "safetensors"],
        env={**os.environ, "CKPTFS_TEST_FAULT": "kill-half:write:*:1"},
        check=False,
        capture_output=True,
        timeout=400,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    (left,) = os.listdir(out)
    assert left.startswith(".hf.partial-")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--filter", "no.*"], USAGE),
        (["--strip", "step"], USAGE),
        (["--max-shard-size", "5 apples"], USAGE),
    ],
)
def test_what_cannot_be_exported_is_refused(
    cli: Cli, local: Place, tmp_path: Path, arguments: list[str], code: int
) -> None:
    """Before anything is written."""
    a_run(local)
    ran = cli("export", f"{local.uri}/{VICTIM}", tmp_path / "x", "--format", "dcp", *arguments)
    assert ran.exit == code, ran.out
    assert not (tmp_path / "x").exists()


def test_a_part_and_a_file_are_exported_too(cli: Cli, local: Place, tmp_path: Path) -> None:
    """One part of a checkpoint; a torch.save file to safetensors; a whole of parts names its parts."""
    with ckptfs.CheckpointManager(local.uri, keep_latest=None) as manager:
        ticket = manager.begin(3, parts=["actor", "critic"])
        sealed = [
            ckptfs.save(state_of(n), ticket.part(p)) for n, p in enumerate(["actor", "critic"])
        ]
        ticket.commit(sealed)
    out = tmp_path / "critic"
    assert cli("export", f"{local.uri}/step_3/critic", out, "--format", "safetensors").exit == OK
    equal(safetensors.torch.load_file(out / "model.safetensors"), flat(state_of(1)))
    ran = cli("export", f"{local.uri}/step_3", tmp_path / "whole", "--format", "dcp")
    assert ran.exit == USAGE
    assert "actor" in ran.err
    torch.save(state_of(4), tmp_path / "x.pt")
    assert cli("export", tmp_path / "x.pt", tmp_path / "x", "--format", "safetensors").exit == OK
    equal(safetensors.torch.load_file(tmp_path / "x" / "model.safetensors"), flat(state_of(4)))
