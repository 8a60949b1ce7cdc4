"""``ckptfs inspect``: what is in a checkpoint of any kind, and what differs from another."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptfs
from ckptfs.integrations.safetensors import save_safetensors
from tests.cli.conftest import Cli, Golden, Place, a_run, state_of
from tests.cli.damage import DAMAGES, OWNED, VICTIM, state_now
from tests.cli.sizes import sizeless

OK, NO, USAGE, NOT_FOUND, UNKNOWN = 0, 1, 2, 3, 7


def keys(document: Any) -> list[str]:
    """Of the leaves that were reported."""
    return [leaf["key"] for leaf in document["leaves"]]


def test_a_checkpoint_is_told_alike_on_every_storage(
    cli: Cli, golden: Golden, place: Place
) -> None:
    """Summary, tensors, objects and values of a checkpoint; a directory's files; as text and JSON."""
    a_run(place)
    before = state_now(place)
    for name, arguments in (
        ("inspect", [VICTIM, "--values"]),
        ("inspect_json", [VICTIM, "--json", "--filter", "model.head.*"]),
        ("inspect_files", ["export_1"]),
        ("inspect_diff", [VICTIM, f"{place.uri}/step_10", "--norms"]),
    ):
        ran = cli("inspect", f"{place.uri}/{arguments[0]}", *arguments[1:], *place.flags)
        assert ran.exit == (NO if name == "inspect_diff" else OK), ran.err
        golden(name, sizeless(ran.out), place)
    assert state_now(place) == before


def test_rows_are_filtered_sorted_and_limited(cli: Cli, local: Place) -> None:
    """--filter takes several globs, --sort size puts the largest first, --limit says how many are
    hidden.
    """
    a_run(local)
    uri = f"{local.uri}/{VICTIM}"
    told = cli("inspect", uri, "--filter", "model.*", "--filter", "step", "--json").json
    assert len(keys(told)) == 4
    by_size = cli("inspect", uri, "--sort", "size", "--json").json["leaves"]
    sizes = [leaf["size_bytes"] for leaf in by_size]
    assert sizes == sorted(sizes, reverse=True)
    by_name = keys(cli("inspect", uri, "--sort", "name", "--json").json)
    assert by_name == sorted(by_name)
    ran = cli("inspect", uri, "--limit", "2")
    assert "4 not shown" in ran.out
    assert cli("inspect", uri, "--limit", "2", "--json").json["leaves_in_all"] == 6


def test_every_kind_of_checkpoint_is_read(cli: Cli, tmp_path: Path) -> None:
    """Stock DCP, safetensors as a directory and as one file, torch.save: the same tensors, and equal."""
    state = state_of(5)
    model = state["model"]
    ckptfs.save({"model": model}, tmp_path / "run" / "step_5")
    dcp.save({"model": model}, checkpoint_id=tmp_path / "stock" / "step_5", no_dist=True)
    flat = {f"model.{key}": value for key, value in model.items()}
    save_safetensors(flat, tmp_path / "hf" / "hf_5")
    torch.save({"model": model}, tmp_path / "model.pt")
    ours = tmp_path / "run" / "step_5"
    formats = {
        tmp_path / "stock" / "step_5": "torch.distributed.checkpoint",
        tmp_path / "hf" / "hf_5": "safetensors",
        tmp_path / "hf" / "hf_5" / "model.safetensors": "safetensors",
        tmp_path / "model.pt": "torch.save",
    }
    for uri, name in formats.items():
        told = cli("inspect", uri, "--json").json
        assert told["format"] == name
        assert set(keys(told)) == set(flat)
        ran = cli("inspect", ours, uri, "--json")
        assert (ran.exit, ran.json["same"], ran.json["changed"]) == (OK, len(flat), 0), ran.out
        # Without reading: only where both were written by ckptfs, whatever the format.
        other = cli("inspect", uri, ours, "--no-read", "--json")
        known = uri.name == "hf_5"
        assert other.exit == (OK if known else UNKNOWN)
        assert other.json["unknown"] == (0 if known else len(flat))


def test_a_torch_save_file_with_code_is_not_loaded(cli: Cli, tmp_path: Path) -> None:
    """weights_only refuses it: exit 1, and nothing was run."""

    class Owned:
        def __reduce__(self) -> Any:
            return (exec, (f"import os; os.environ[{OWNED!r}] = '1'",))

    torch.save({"x": Owned()}, tmp_path / "bad.pt")
    ran = cli("inspect", tmp_path / "bad.pt")
    assert ran.exit == NO
    assert "weights_only" in ran.err


def test_parts_are_listed_and_inspected_by_their_own_uri(cli: Cli, local: Place) -> None:
    """A whole names its parts with their sizes; a part is a checkpoint like any other."""
    with ckptfs.CheckpointManager(local.uri, keep_latest=None) as manager:
        ticket = manager.begin(3, parts=["actor", "critic"])
        sealed = [
            ckptfs.save(state_of(n), ticket.part(p)) for n, p in enumerate(["actor", "critic"])
        ]
        ticket.commit(sealed)
    whole = cli("inspect", f"{local.uri}/step_3", "--json").json
    assert [part["name"] for part in whole["parts"]] == ["actor", "critic"]
    assert whole["step"] == 3
    assert whole["size_bytes"] == sum(part["size_bytes"] for part in whole["parts"])
    assert "actor" in cli("inspect", f"{local.uri}/step_3").out
    told = cli("inspect", whole["parts"][0]["uri"], "--json").json
    assert told["save_id"] == whole["parts"][0]["save_id"]
    assert "model.embed.weight" in keys(told)
    assert cli("inspect", f"{local.uri}/step_3/actor", f"{local.uri}/step_3/critic").exit == NO


@pytest.mark.parametrize(
    ("name", "exit"),
    [
        ("missing manifest", NO),
        ("changed manifest", NO),
        ("missing metadata", NO),
        ("garbage metadata", NO),
        ("malicious metadata", NO),
        ("missing shard", OK),
        ("nowhere", NOT_FOUND),
    ],
)
def test_damaged_checkpoints_end_with_their_codes(
    cli: Cli,
    local: Place,
    name: str,
    exit: int,  # noqa: A002 - as pytest names it
) -> None:
    """What describes a checkpoint must be right; its data is not looked at."""
    hurt = DAMAGES[name].made(local)
    ran = cli("inspect", f"{hurt.uri}/{VICTIM}")
    assert ran.exit == exit, ran.err


@pytest.mark.parametrize(
    "arguments", [["--norms"], ["--no-read"], ["x", "--diff", "y"], ["x", "--values"]]
)
def test_options_that_mean_nothing_are_wrong_calls(
    cli: Cli, local: Place, arguments: list[str]
) -> None:
    """Before anything is opened."""
    assert cli("inspect", f"{local.uri}/x", *arguments).exit == USAGE


# -- what differs ---------------------------------------------------------------------


def _pair(tmp_path: Path, after: dict[str, Any]) -> tuple[Path, Path]:
    before = {
        "same": torch.ones(3),
        "bytes": torch.arange(4.0),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "gone": torch.ones(1),
        "lr": 0.1,
        "kind": 1,
        "note": "short",
    }
    ckptfs.save(before, tmp_path / "a" / "step_1")
    ckptfs.save(after, tmp_path / "b" / "step_1")
    return tmp_path / "a" / "step_1", tmp_path / "b" / "step_1"


def test_each_kind_of_change_is_told(cli: Cli, tmp_path: Path) -> None:
    """Added, removed, reshaped, of another dtype, an object where a tensor was, other bytes, the same;
    norms of what can be subtracted.
    """
    after = {
        "same": torch.ones(3),
        "bytes": torch.tensor([0.0, 1.0, 2.0, 7.0]),
        "shape": torch.ones(3),
        "dtype": torch.ones(2).double(),
        "new": torch.ones(1),
        "lr": 0.2,
        "kind": torch.ones(1),
        "note": "a longer one" * 10,
    }
    before, other = _pair(tmp_path, after)
    told = cli("inspect", before, other, "--norms", "--json").json["leaves"]
    found = {leaf["key"]: leaf for leaf in told}
    changes = {key: leaf["change"] for key, leaf in found.items()}
    assert changes == {
        "same": "same",
        "bytes": "bytes",
        "shape": "shape",
        "dtype": "shape",
        "gone": "removed",
        "new": "added",
        "lr": "bytes",
        "kind": "shape",
        "note": "bytes",
    }
    norms = found["bytes"]["norms"]
    assert norms["before"] == pytest.approx(math.sqrt(14))
    assert norms["after"] == pytest.approx(math.sqrt(54))
    assert norms["difference"] == norms["max_abs"] == pytest.approx(4.0)
    assert found["dtype"]["norms"]["difference"] == 0.0
    assert found["shape"]["norms"] is None


def test_digests_decide_without_reading_data(cli: Cli, tmp_path: Path) -> None:
    """Of two of ours that are sharded alike: the answer is the same when the data files are gone, and
    the bytes are given by blocks of 1 MiB.
    """
    big = torch.zeros(3 << 18)
    changed = big.clone()
    changed[300_000] = 1
    ckptfs.save({"big": big, "w": torch.ones(5)}, tmp_path / "run" / "step_1")
    ckptfs.save({"big": changed, "w": torch.ones(5)}, tmp_path / "run" / "step_2")
    for file in (tmp_path / "run").glob("*/*/*.distcp"):
        file.unlink()
    ran = cli("inspect", tmp_path / "run" / "step_1", tmp_path / "run" / "step_2", "--json")
    assert ran.exit == NO
    (leaf,) = ran.json["leaves"]
    assert (leaf["key"], leaf["basis"], leaf["changed_bytes"]) == ("big", "digests", 1 << 20)


def test_nan_and_infinity_are_equal_to_themselves(cli: Cli, tmp_path: Path) -> None:
    """By bytes; norms that are no numbers are given as text, because JSON has none."""
    odd = {"x": torch.tensor([float("nan"), float("inf"), 1.0])}
    ckptfs.save(odd, tmp_path / "run" / "step_1")
    torch.save(odd, tmp_path / "x.pt")
    ran = cli("inspect", tmp_path / "run" / "step_1", tmp_path / "x.pt", "--norms", "--json")
    assert ran.exit == OK
    (leaf,) = ran.json["leaves"]
    assert leaf["change"] == "same"
    assert leaf["norms"]["before"] == "nan"


class _Custom:
    """What weights_only does not load."""


def test_a_plain_file_is_told_without_advice_to_unpickle(cli: Cli, tmp_path: Path) -> None:
    """A text, and a file of torch.save with an object of a class: what it is, and not torch's two ways
    to load it all the same.
    """
    (tmp_path / "notes.txt").write_text("hello")
    torch.save({"x": _Custom()}, tmp_path / "custom.pt")
    text = cli("inspect", tmp_path / "notes.txt")
    assert (text.exit, "a plain file" in text.err) == (NO, True)
    custom = cli("inspect", tmp_path / "custom.pt")
    assert custom.exit == NO
    assert "an object of tests.cli.test_inspect._Custom" in custom.err
    for ran in (text, custom):
        assert "still be loaded" not in ran.err
        assert "weights_only=False" not in ran.err


def test_the_files_of_a_directory_are_listed_beside_its_tensors(cli: Cli, tmp_path: Path) -> None:
    """A directory of files with weights among them: its tensors, and all its files."""
    with ckptfs.checkpoint_dir(tmp_path / "run" / "hf_1") as path:
        save_file({"w": torch.ones(3)}, Path(path, "model.safetensors"))
        Path(path, "config.json").write_text("{}")
    ran = cli("inspect", tmp_path / "run" / "hf_1", "--json").json
    assert keys(ran) == ["w"]
    assert sorted(file["path"] for file in ran["file_list"]) == ["config.json", "model.safetensors"]
    assert "config.json" in cli("inspect", tmp_path / "run" / "hf_1").out


# -- without torch ---------------------------------------------------------------------------------

WITHOUT_TORCH = (
    "import sys; from ckptfs.cli.main import main\n"
    "try: main(sys.argv[1:])\n"
    "except SystemExit as ended: code = ended.code\n"
    "assert 'torch' not in sys.modules\n"
    "sys.exit(code)"
)


CODES = {
    ("inspect", "ONE"): (OK, OK),
    ("inspect", "ONE", "--json"): (OK, OK),
    ("inspect", "ONE", "TWO"): (NO, NO),
    ("inspect", "ONE", "TWO", "--no-read", "--json"): (NO, NO),
    ("verify", "ONE"): (OK, OK),
    ("verify", "--deep", "ONE", "TWO"): (OK, UNKNOWN),
}


@pytest.mark.parametrize("origin", ["ours", "stock"])
@pytest.mark.parametrize("words", CODES, ids=" ".join)
def test_no_torch_where_no_tensor_is_made(
    tmp_path: Path, origin: str, words: tuple[str, ...]
) -> None:
    """In an interpreter of its own: of two checkpoints that differ in a shape, or in bytes with digests."""
    states = [{"w": torch.full((3, 4), n), "wide": torch.zeros(n), "step": 3} for n in (1, 2)]
    for name, state in zip(("one", "two"), states, strict=True):
        if origin == "ours":
            ckptfs.save(state, tmp_path / name)
        else:
            dcp.save({"wide": state["wide"]}, checkpoint_id=tmp_path / name, no_dist=True)
    places = {"ONE": str(tmp_path / "one"), "TWO": str(tmp_path / "two")}
    call = [sys.executable, "-c", WITHOUT_TORCH, *(places.get(word, word) for word in words)]
    ran = subprocess.run(call, capture_output=True, text=True, check=False, timeout=400)
    assert ran.returncode == CODES[words][origin == "stock"], ran
    assert ran.stderr == ""


def test_no_torch_for_the_headers_of_safetensors(tmp_path: Path) -> None:
    """One file, and a directory of one: keys, dtypes and shapes are in the header."""
    save_safetensors({"w": torch.ones(3, 4)}, tmp_path / "hf" / "hf_5")
    for place in (tmp_path / "hf" / "hf_5", tmp_path / "hf" / "hf_5" / "model.safetensors"):
        call = [sys.executable, "-c", WITHOUT_TORCH, "inspect", str(place)]
        ran = subprocess.run(call, capture_output=True, text=True, check=False, timeout=400)
        assert (ran.returncode, ran.stderr) == (OK, ""), ran
        assert "float32" in ran.stdout
