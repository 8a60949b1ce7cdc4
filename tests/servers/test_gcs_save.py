"""Checkpoints on GCS: saved, loaded, read by stock PyTorch; with settings, and few permissions."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptfs
from ckptfs.errors import AlreadyExistsError, UnsupportedError
from ckptfs.storage.base import Capabilities
from ckptfs.storage.clients.choose import open_client
from ckptfs.storage.options import ObjectOptions
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri
from tests.lab import raw
from tests.lab.gcs_server import GcsServer
from tests.lab.server import Server
from tests.servers.test_gcs_options import COMMON, MORE, SHOWN_MORE

LIBRARIES = ("obstore", "gcsfs")  # the usual one, and the one for what it cannot express
# aiohttp's advice to gcsfs.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
NUMBERS = 3_000_000  # 12 MB: with parts of 5 MiB an upload in three parts


def state() -> dict[str, Any]:
    """A large tensor and a leaf."""
    return {"w": torch.arange(NUMBERS, dtype=torch.float32), "step": 7}


def blank() -> dict[str, Any]:
    """To be loaded into."""
    return {"w": torch.zeros(NUMBERS), "step": 0}


def same(found: dict[str, Any]) -> bool:
    """Whether it is ``state()`` again."""
    return torch.equal(found["w"], state()["w"]) and found["step"] == 7


@pytest.fixture
def own() -> Iterator[GcsServer]:
    """A server with rules that the test bends."""
    with GcsServer() as server:
        yield server


@pytest.mark.parametrize("client", LIBRARIES)
def test_saved_loaded_and_read_by_stock_pytorch(gcs: Server, client: str) -> None:
    """A save in parts comes back bit-exact, through us and through DCP with fsspec's reader."""
    options = gcs.storage_options(client=client, part_size_bytes="5 MiB")
    uri = f"{gcs.fresh('run')}/step_7"
    saved = ckptfs.save(state(), uri, storage_options=options)
    assert not saved.warnings
    mine, theirs = blank(), blank()
    ckptfs.load(mine, uri, storage_options=options)
    assert same(mine)
    with _quiet():
        dcp.load(theirs, storage_reader=FsspecReader(uri, **gcs.options), no_dist=True)
    assert same(theirs)
    assert ckptfs.latest(uri.rpartition("/")[0], storage_options=options) is not None


def test_settings_reach_every_object_of_a_save(own: GcsServer) -> None:
    """Data in parts and whole, digests, manifests, log entries, projections: all carry the settings,
    and no other object is made.
    """
    options = own.options | COMMON | MORE | {"part_size_bytes": "5 MiB"}
    run = f"gs://{own.bucket}/run"
    ckptfs.save(state(), f"{run}/step_1", storage_options=options)
    ckptfs.save(state(), f"{run}/step_1", storage_options=options, if_exists="replace")
    live = own.store.bucket(own.bucket).live
    assert len(live) >= 10
    for key, blob in live.items():
        settings = dict(blob.settings)
        settings["predefinedAcl"] = str(settings["predefinedAcl"]).replace("-", "").lower()
        assert settings == SHOWN_MORE, key


@pytest.mark.parametrize("client", LIBRARIES)
def test_the_permissions_of_the_documentation_are_enough(own: GcsServer, client: str) -> None:
    """Saving, replacing, loading and listing need six permissions, ask nothing of the bucket, list
    nothing above the run, and leave no upload.
    """
    options = own.options | {"client": client, "part_size_bytes": "5 MiB"}
    run = f"gs://{own.bucket}/team/run"
    for if_exists in ("error", "replace"):
        ckptfs.save(state(), f"{run}/step_1", storage_options=options, if_exists=if_exists)
    found = blank()
    ckptfs.load(found, f"{run}/step_1", storage_options=options)
    assert same(found)
    assert len(ckptfs.list_checkpoints(run, storage_options=options)) == 1
    seen = own.rules.seen
    assert {one.permission for one in seen} <= {
        "storage.objects.create",
        "storage.objects.get",
        "storage.objects.list",
        "storage.objects.delete",
        "storage.multipartUploads.create",
        "storage.multipartUploads.list",  # what a dead writer left, when the run is claimed
        "batch",
    }
    for one in seen:
        if one.permission == "storage.objects.list":
            assert one.query["prefix"].startswith("team/run/")
    assert not own.store.multipart


def test_an_emulator_without_preconditions_is_told(gcs_emulator: Server) -> None:
    """Where conditions are ignored a save works, says that no writer is excluded, and can be loaded."""
    options = gcs_emulator.storage_options(client="gcsfs")
    run = gcs_emulator.fresh("run")
    small: dict[str, Any] = {"w": torch.arange(1000), "step": 7}
    saved = ckptfs.save(small, f"{run}/step_7", storage_options=options)
    assert any("no exclusive create" in warning for warning in saved.warnings)
    assert capabilities(run, options).exclusive_create is False
    found: dict[str, Any] = {"w": torch.zeros(1000, dtype=torch.int64), "step": 0}
    ckptfs.load(found, f"{run}/step_7", storage_options=options)
    assert torch.equal(found["w"], small["w"])
    log = raw.gcs_keys(gcs_emulator, f"{run.rpartition('/')[2]}/.ckptfs/log/")
    assert log
    assert all("." in key.rpartition("/")[2] for key in log)  # number and write-id: advice only


def test_an_emulator_without_the_xml_api_is_told(gcs_emulator: Server) -> None:
    """What needs the XML API says so, and what to do, there."""
    uri = Uri.parse(gcs_emulator.fresh("run"))
    client = open_client(uri, ObjectOptions(client="obstore"), gcs_emulator.options)
    with pytest.raises(UnsupportedError, match="client='gcsfs'"):
        client.get("run/k")


def test_the_server_with_preconditions_is_trusted(gcs: Server) -> None:
    """A probe, not a name, says that creates exclude here and replaces can be conditional."""
    options = gcs.storage_options()
    run = gcs.fresh("run")
    ckptfs.save({"step": 1}, f"{run}/step_1", storage_options=options)
    found = capabilities(run, options)
    assert found.exclusive_create
    assert found.conditional_replace


def capabilities(run: str, options: dict[str, Any]) -> Capabilities:
    """What a storage says of the place that this process has written to."""
    with contextlib.closing(open_storage(run, options)) as storage:
        return storage.capabilities


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        yield


def _saved_in_a_child(uri: str, options: dict[str, Any]) -> None:
    """Runs in a forked process."""
    ckptfs.save({"step": 2}, uri, storage_options=options)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_saves_through_gcsfs(gcs: Server) -> None:
    """obstore does not survive a fork: what a child opens goes through gcsfs, and both saves are there."""
    options, run = gcs.storage_options(), gcs.fresh("fork")
    ckptfs.save({"step": 1}, f"{run}/step_1", storage_options=options)
    child = multiprocessing.get_context("fork").Process(
        target=_saved_in_a_child, args=(f"{run}/step_2", options)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [c.step for c in ckptfs.list_checkpoints(run, storage_options=options)] == [1, 2]


def test_a_stock_view_is_replaced_by_its_successor_alone(gcs: Server) -> None:
    """Through gcsfs too a stale generation replaces nothing, and "" only what is not there."""
    uri, options = gcs.fresh("view"), gcs.storage_options(client="gcsfs")
    with contextlib.closing(open_storage(uri, options)) as storage:
        storage.replace("k", b"1", if_match="")
        first = storage.stat("k").etag
        storage.replace("k", b"2", if_match=first)
        for stale in (first, ""):
            with pytest.raises(AlreadyExistsError):
                storage.replace("k", b"wrong", if_match=stale)
        assert storage.read("k") == b"2"
