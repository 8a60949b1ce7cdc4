"""What a symbolic link in a checkpoint leads to is copied only if the caller asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ckptfs
from ckptfs.cli.main import ckptfs as line
from ckptfs.errors import SymlinkError
from ckptfs.tools.exporting import export

SECRET = b"what lies elsewhere"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A committed directory of files; one of them became a link that leads out of it."""
    run = tmp_path / "run"
    (tmp_path / "secret").write_bytes(SECRET)
    with ckptfs.checkpoint_dir(run / "files_1") as path:
        Path(path, "config.json").write_bytes(b"x" * len(SECRET))
    listed = run / "files_1" / "config.json"
    listed.unlink()
    listed.symlink_to(tmp_path / "secret")
    return run / "files_1"


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A stock checkpoint, moved away as a cache of snapshots does it: each file is a link to a blob."""
    state = {"w": torch.arange(8.0)}
    dcp.save(state, checkpoint_id=tmp_path / "blobs", no_dist=True)
    snapshot = tmp_path / "snapshots" / "step_1"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def _cp(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(line, ["cp", *map(str, arguments)])
    return done.exit_code, done.output


def test_cp_refuses_a_link_by_its_name_and_leaves_nothing(files: Path, tmp_path: Path) -> None:
    """The error names the link and the way out; the bytes behind it are nowhere in the target."""
    code, said = _cp(files, tmp_path / "copies" / "files_1")
    assert code != 0
    assert "config.json is a symbolic link" in said
    assert "--follow-links" in said
    found = [p for p in (tmp_path / "copies").rglob("*") if p.is_file()]
    assert all(SECRET not in path.read_bytes() for path in found)


def test_cp_copies_what_links_lead_to_if_asked(stock: Path, tmp_path: Path) -> None:
    """A snapshot of links becomes a checkpoint of files, and is loaded where it lay as well."""
    copied = tmp_path / "run" / "step_1"
    assert _cp(stock, copied)[0] != 0
    code, said = _cp("--follow-links", stock, copied)
    assert code == 0, said
    assert not any(path.is_symlink() for path in copied.rglob("*"))
    for place in (stock, copied):
        state = {"w": torch.zeros(8)}
        ckptfs.load(state, place)
        assert torch.equal(state["w"], torch.arange(8.0))


def test_a_fetched_directory_has_what_links_lead_to_if_asked(stock: Path, tmp_path: Path) -> None:
    """SymlinkError, and nothing appears; with follow_links files, and no link."""
    into = tmp_path / "into"
    with (
        pytest.raises(ckptfs.CkptfsError, match="is a symbolic link"),
        ckptfs.checkpoint_dir(stock, "read", into=into),
    ):
        raise AssertionError("it was entered")
    assert not into.exists()
    with ckptfs.checkpoint_dir(stock, "read", into=into, follow_links=True) as path:
        assert sorted(os.listdir(path)) == sorted(os.listdir(stock))
        assert not any(os.path.islink(os.path.join(path, name)) for name in os.listdir(path))


def test_links_that_stay_in_the_checkpoint_come_back_as_files(tmp_path: Path) -> None:
    """A directory with a link "newest" to one of its files is fetched and copied as it was saved, by default."""
    run = tmp_path / "run"
    with ckptfs.DirectoryManager(run) as manager:
        with manager.writing(1) as path:
            os.mkdir(f"{path}/shards")
            Path(path, "shards", "7.bin").write_bytes(b"7")
            os.symlink("shards/7.bin", f"{path}/newest")
            os.symlink("shards", f"{path}/current")
        with manager.reading(into=tmp_path / "into") as opened:
            assert opened is not None
    with ckptfs.checkpoint_dir(run / "step_1", "read", into=tmp_path / "fetched"):
        pass
    code, said = _cp(run / "step_1", tmp_path / "copies" / "step_1")
    assert code == 0, said
    for place in (tmp_path / "into", tmp_path / "fetched", tmp_path / "copies" / "step_1"):
        assert (place / "newest").read_bytes() == b"7"
        if (
            "copies" not in place.parts
        ):  # cp copies what the manifest lists: files, and no linked directory
            assert (place / "current" / "7.bin").read_bytes() == b"7"
        assert not any(path.is_symlink() for path in place.rglob("*"))


def test_a_directory_is_not_fetched_without_what_no_key_can_name(tmp_path: Path) -> None:
    """It would look whole: the error names the file, and nothing appears."""
    with ckptfs.checkpoint_dir(tmp_path / "run" / "files_1") as path:
        Path(path, "plain").write_bytes(b"1")
        os.mkdir(f"{path}/folder")
        Path(path, "folder", "plain").write_bytes(b"1")
    for strange in (b"a\x1bb", b"caf\xe9"):
        name = os.fsencode(tmp_path / "run" / "files_1" / "folder") + b"/" + strange
        Path(os.fsdecode(name)).write_bytes(b"2")
        with (
            pytest.raises(ckptfs.StorageError, match="no key can have the name") as caught,
            ckptfs.checkpoint_dir(tmp_path / "run/files_1", "read", into=tmp_path / "into"),
        ):
            raise AssertionError("it was entered")
        assert str(caught.value).isascii()
        assert str(caught.value).isprintable()
        assert not (tmp_path / "into").exists()
        os.unlink(name)


def test_an_export_reads_through_links_if_asked(stock: Path, tmp_path: Path) -> None:
    """SymlinkError, and no target; with follow_links the tensors."""
    target = tmp_path / "exported"
    with pytest.raises(SymlinkError):
        export(stock, target, "safetensors")
    assert not target.exists()
    export(stock, target, "safetensors", follow_links=True)
    assert torch.equal(load_file(target / "model.safetensors")["w"], torch.arange(8.0))


def test_a_link_to_a_file_that_a_person_named_is_read(tmp_path: Path) -> None:
    """The name itself may be a link: it is what was asked for."""
    save_file({"w": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    export(tmp_path / "model.safetensors", tmp_path / "out", "safetensors")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.ones(3))


def test_a_maze_of_links_ends_where_links_are_followed(stock: Path, tmp_path: Path) -> None:
    """A second link to one directory is refused by name, before 2^20 paths are walked."""
    rooms = [stock / f"room{n}" for n in range(21)]
    for room in rooms:
        room.mkdir()
    for n, room in enumerate(rooms[:-1]):
        (room / "left").symlink_to(rooms[n + 1])
        (room / "right").symlink_to(rooms[n + 1])
    with (
        pytest.raises(ckptfs.CkptfsError, match="leads to the same directory as another link"),
        ckptfs.checkpoint_dir(stock, "read", into=tmp_path / "into", follow_links=True),
    ):
        raise AssertionError("it was entered")
