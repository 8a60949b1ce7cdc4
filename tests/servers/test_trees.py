"""Directories behind sftp, ftp and webdav, through fsspec's clients: what every storage does, and a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from tests import lab
from tests.lab.server import Server
from tests.servers.conftest import session_of
from tests.storage.test_conformance import OnDisk


@pytest.fixture(scope="module")
def sftp() -> Iterator[Server]:
    """OpenSSH."""
    yield from session_of(lab.sftp())


@pytest.fixture(scope="module")
def ftp() -> Iterator[Server]:
    """pyftpdlib."""
    yield from session_of(lab.ftp())


@pytest.fixture(scope="module")
def webdav() -> Iterator[Server]:
    """WsgiDAV."""
    yield from session_of(lab.webdav())


def directory_of(server: Server, root: str) -> Path:
    """Where the server keeps what is below a URI of its own."""
    files = Path(server.run_dir) / "files"
    if server.protocol == "sftp":
        return Path(root.removeprefix(f"sftp://{server.endpoint.rpartition(':')[0][6:]}"))
    if server.protocol == "ftp":
        return files / root.removeprefix(f"{server.endpoint}/")
    return files / root.removeprefix("webdav://")


class OnTree(OnDisk):
    """A fresh directory of a server; its raw hooks look at the server's own disk."""

    server: Server

    def make_storage(self, place: Path) -> Storage:
        root = self.server.fresh("conformance")
        self.root = directory_of(self.server, root)
        return open_storage(root, self.server.storage_options())


class TestSftp(OnTree):
    """OpenSSH, through paramiko."""

    @pytest.fixture(autouse=True)
    def _server(self, sftp: Server) -> None:
        self.server = sftp


class TestFtp(OnTree):
    """pyftpdlib, through ftplib."""

    @pytest.fixture(autouse=True)
    def _server(self, ftp: Server) -> None:
        self.server = ftp


# webdav4's stream warns where it was dropped, which is what one of these tests does.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestWebdav(OnTree):
    """WsgiDAV, through webdav4."""

    @pytest.fixture(autouse=True)
    def _server(self, webdav: Server) -> None:
        self.server = webdav


@pytest.mark.parametrize("kind", ["sftp", "ftp", "webdav"])
def test_a_run_on_it(kind: str, request: pytest.FixtureRequest) -> None:
    """Saves with retention, a restore, a load: all that a small job does."""
    server: Server = request.getfixturevalue(kind)
    run, options = server.fresh("run"), server.storage_options()
    weights = torch.arange(1000.0)
    state = {"w": weights, "step": 0}
    with ckptfs.CheckpointManager(run, keep_latest=2, storage_options=options) as manager:
        assert manager.restore(state) is None
        for step in (1, 2, 3):
            manager.save(step, {"w": weights + step, "step": step})
    listed = ckptfs.list_checkpoints(run, storage_options=options)
    assert [one.step for one in listed] == [2, 3]
    got: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    ckptfs.load(got, f"{run}/step_3", storage_options=options)
    assert got["step"] == 3
    assert torch.equal(got["w"], weights + 3)
    assert not [p for p in (directory_of(server, run) / "step_1").rglob("*") if p.is_file()]


@pytest.mark.parametrize("kind", ["sftp", "ftp", "webdav"])
def test_threads_share_a_client(kind: str, request: pytest.FixtureRequest) -> None:
    """Eight of them write and read at once: no client gets another's answer."""
    server: Server = request.getfixturevalue(kind)
    wrong: list[int] = []
    with closing(open_storage(server.fresh("threads"), server.storage_options())) as storage:

        def use(number: int) -> None:
            for turn in range(5):
                data = bytes([number]) * (1000 + turn)
                storage.replace(f"deep/{number}/{turn}", data)
                if storage.read(f"deep/{number}/{turn}") != data:
                    wrong.append(number)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert sorted(entry.name for entry in storage.list("deep")) == [str(n) for n in range(8)]
