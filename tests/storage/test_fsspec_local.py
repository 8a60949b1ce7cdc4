"""``ckptfs+file://`` does what fsspec's own LocalFileSystem does with links, times and open files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckptfs.errors import NotFoundError, UnsupportedError


def fs(**options: Any) -> Any:
    """The filesystem under test."""
    return fsspec.filesystem("ckptfs+file", **options)


class Interrupted(Exception):  # noqa: N818 - what a program raises in the middle of a file
    """Something went wrong in the middle."""


@pytest.mark.parametrize("to", ["file", "directory", "nothing"])
def test_links_are_removed_and_what_they_lead_to_stays(tmp_path: Path, to: str) -> None:
    """Seen by ``lexists`` and ``islink``; ``rm`` takes the link, recursive or not."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "inside").write_bytes(b"x")
    for options in ({}, {"recursive": True}):
        link = tmp_path / "link"
        link.symlink_to(tmp_path / to)
        assert fs().lexists(str(link))
        assert fs().islink(str(link))
        assert fs().exists(str(link)) == (to != "nothing")
        fs().rm(str(link), **options)
        assert not os.path.lexists(link)
        assert not fs().lexists(str(link))
        assert (tmp_path / "file").read_bytes() == b"x"
        assert (tmp_path / "directory" / "inside").exists()


def test_a_touch_that_keeps_the_bytes(tmp_path: Path) -> None:
    """A new time and nothing else; a missing file is made; elsewhere what is there is not touched."""
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    os.utime(path, (1, 1))
    fs().touch(str(path), truncate=False)
    assert path.read_bytes() == b"kept"
    assert path.stat().st_mtime > 1
    fs().touch(str(tmp_path / "new"), truncate=False)
    assert (tmp_path / "new").read_bytes() == b""
    fs().touch(str(path))
    assert path.read_bytes() == b""
    memory = fsspec.filesystem("ckptfs+memory")
    memory.pipe_file("touch/file", b"kept")
    with pytest.raises(UnsupportedError):
        memory.touch("touch/file", truncate=False)
    assert memory.cat_file("touch/file") == b"kept"


@pytest.mark.parametrize("mode", ["wb", "ab", "xb", "w+b", "w"])
def test_directories_are_not_made_where_that_is_asked(tmp_path: Path, mode: str) -> None:
    """auto_mkdir=False; by default they are made."""
    path = tmp_path / "dir" / "file"
    with pytest.raises(NotFoundError):
        fs(auto_mkdir=False).open(str(path), mode)
    assert not path.parent.exists()
    fs().open(str(path), mode).close()
    assert path.exists()
    path.unlink()
    fs(auto_mkdir=False).open(str(path), mode).close()
    assert path.exists()


def test_a_parent_is_not_made_where_that_is_asked(tmp_path: Path) -> None:
    """mkdir(create_parents=False)."""
    with pytest.raises(FileNotFoundError):
        fs().mkdir(f"{tmp_path}/a/b", create_parents=False)
    fs().mkdir(f"{tmp_path}/a", create_parents=False)
    assert os.listdir(tmp_path) == ["a"]


def test_local_paths(tmp_path: Path) -> None:
    """``fsspec.open_local`` hands them out."""
    (tmp_path / "file").write_bytes(b"x")
    assert fsspec.open_local(f"ckptfs+file://{tmp_path}/file") == f"{tmp_path}/file"


def test_a_file_is_edited(tmp_path: Path) -> None:
    """``r+b``: read, written, cut anywhere; the old bytes are there until it is closed."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with fs().open(str(path), "r+b") as file:
        assert file.read(2) == b"01"
        file.write(b"ab")
        assert file.tell() == 4
        file.seek(-1, os.SEEK_END)
        assert file.read() == b"9"
        file.truncate(12)
        file.seek(0)
        assert file.read() == b"01ab456789\0\0"
        assert file.truncate(8) == 8
        assert path.read_bytes() == b"0123456789"
    assert path.read_bytes() == b"01ab4567"
    with fs().open(str(path), "r+") as text:
        text.write("TEXT")
    assert path.read_bytes() == b"TEXT4567"
    with fs().open(str(path), "w+b") as file:
        file.write(b"new")
        file.seek(0)
        assert file.read() == b"new"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("mode", ["r+b", "w+b", "r+", "w+"])
def test_an_exception_leaves_an_edited_file_as_it_was(tmp_path: Path, mode: str) -> None:
    """As with every other file: whole or not at all."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    def edit() -> None:
        with fs().open(str(path), mode) as file:
            file.write(b"ab" if "b" in mode else "ab")
            raise Interrupted

    with pytest.raises(Interrupted):
        edit()
    file = fs().open(str(path), mode)
    file.write(b"ab" if "b" in mode else "ab")
    del file  # dropped without close
    assert path.read_bytes() == b"0123456789"
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_is_edited_elsewhere(tmp_path: Path) -> None:
    """A missing file, and other places than a disk."""
    with pytest.raises(FileNotFoundError):
        fs().open(f"{tmp_path}/none", "r+b")
    memory = fsspec.filesystem("ckptfs+memory")
    memory.pipe_file("edit/file", b"x")
    with pytest.raises(UnsupportedError):
        memory.open("edit/file", "r+b")


def test_names_by_default(tmp_path: Path) -> None:
    """``ls``, as of LocalFileSystem and s3fs; ``detail`` for more."""
    (tmp_path / "file").write_bytes(b"x")
    assert fs().ls(str(tmp_path)) == [f"{tmp_path}/file"]
    assert fs().ls(str(tmp_path), detail=True)[0]["size"] == 1
