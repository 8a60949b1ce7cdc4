"""az:// as a storage, and a checkpoint on it, through both libraries."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptfs
from ckptfs.errors import AlreadyExistsError, NotFoundError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.conformance import StorageConformance
from tests.lab import raw
from tests.lab.azurite import ACCOUNT
from tests.lab.server import Server
from tests.servers.azure_rig import connection, sas

LIBRARIES = ("obstore", "adlfs")  # the usual one, and the one for what it cannot express
# aiohttp's advice to the Azure SDK.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


class OnAzurite(StorageConformance):
    """The raw hooks of a prefix in the server's container."""

    kind: str

    @pytest.fixture(autouse=True)
    def _server(self, azurite: Server) -> Iterator[None]:
        self.server = azurite
        self.root = azurite.fresh("conformance")
        self.base = self.root.removeprefix(azurite.uri() + "/")
        self.container = raw.azure(azurite)
        yield
        for name in self.raw_list():
            self.container.delete_blob(f"{self.base}/{name}")

    def make_storage(self, place: Path) -> Storage:
        # Parts so small that the larger files of the suite are uploads in parts.
        options = self.server.storage_options(client=self.kind, part_size_bytes="256 KiB")
        return open_storage(self.root, options)

    def raw_write(self, key: str, data: bytes) -> None:
        self.container.upload_blob(f"{self.base}/{key}", data, overwrite=True)

    def raw_read(self, key: str) -> bytes:
        return bytes(self.container.download_blob(f"{self.base}/{key}").readall())

    def raw_exists(self, key: str) -> bool:
        return bool(self.container.get_blob_client(f"{self.base}/{key}".rstrip("/")).exists())

    def raw_list(self) -> list[str]:
        found = self.container.list_blobs(name_starts_with=f"{self.base}/")
        return sorted(blob.name.removeprefix(f"{self.base}/") for blob in found)


class TestAdlfs(OnAzurite):
    """FsspecStorage over adlfs, which is used where obstore cannot express an option."""

    kind = "adlfs"


class TestObstore(OnAzurite):
    """Through obstore."""

    kind = "obstore"

    def test_last_writer_of_a_key_wins(self, store: Storage) -> None:
        """Two uploads of one key do not mix. The service drops all blocks that a commit does not name;
        whether those of the one that closes last had been sent is obstore's own business. It is there,
        whole, or there is an error and the other is.
        """
        first, second = store.open_write("d/f"), store.open_write("d/f")
        second.write(b"2" * 2_000_000)
        first.write(b"1" * 1_500_000)
        second.close()
        there = b"1" * 1_500_000
        try:
            first.close()
        except StorageError:
            first.abort()
            there = b"2" * 2_000_000
        assert self.raw_read("d/f") == there
        assert self.raw_list() == ["d/f"]


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_checkpoint(azurite: Server, kind: str) -> None:
    """Saved and loaded by ckptfs with the least permissions that the docs name, and opened by the
    stock reader through adlfs.
    """
    run = azurite.fresh("save")
    text = connection(azurite.endpoint, sas=sas(azurite, "rcwdl"))
    options = {"client": kind, "connection_string": text}
    state = {"w": torch.randn(700, 900), "i": torch.arange(10), "step": 3}
    ckptfs.save(state, f"{run}/step_3", storage_options=options)
    blank = {"w": torch.zeros(700, 900), "i": torch.zeros(10, dtype=torch.int64), "step": 0}
    ckptfs.load(blank, f"{run}/step_3", storage_options=options)
    assert torch.equal(blank["w"], state["w"])  # type: ignore[arg-type]
    assert blank["step"] == 3
    stock = {"w": torch.zeros(700, 900), "i": torch.zeros(10, dtype=torch.int64)}
    reader = FsspecReader(f"{run}/step_3", **azurite.storage_options())
    dcp.load(stock, storage_reader=reader, no_dist=True)
    assert torch.equal(stock["w"], state["w"])  # type: ignore[arg-type]
    assert [saved.step for saved in ckptfs.list_checkpoints(run, storage_options=options)] == [3]


@pytest.mark.parametrize("kind", LIBRARIES)
def test_the_long_form_is_the_same_place(azurite: Server, kind: str) -> None:
    """abfss://container@account.dfs... and az://container: one writes what the other reads."""
    options = azurite.storage_options(client=kind)
    short = azurite.fresh("forms")
    path = short.removeprefix(azurite.uri())
    long = f"abfss://{azurite.bucket}@{ACCOUNT}.dfs.core.windows.net{path}"
    with (
        contextlib.closing(open_storage(long, options)) as one,
        contextlib.closing(open_storage(short, options)) as other,
    ):
        one.create("log/0", b"entry", staging="")
        assert other.read("log/0") == b"entry"
        assert [entry.name for entry in one.list("log")] == ["0"]
        with pytest.raises(NotFoundError, match=f"uri {re.escape(long)}/absent"):
            one.read("absent")
        one.remove_tree("log")
        assert other.list("") == []


def test_a_stock_view_is_replaced_by_its_successor_alone(azurite: Server) -> None:
    """Through adlfs too a stale etag replaces nothing, and "" only what is not there."""
    options = azurite.storage_options(client="adlfs")
    with contextlib.closing(open_storage(azurite.fresh("view"), options)) as storage:
        storage.replace("k", b"1", if_match="")
        first = storage.stat("k").etag
        storage.replace("k", b"2", if_match=first)
        for stale in (first, ""):
            with pytest.raises(AlreadyExistsError):
                storage.replace("k", b"wrong", if_match=stale)
        assert storage.read("k") == b"2"
