"""Rows 4, 5, 6, 20, 24, 25 and 30 of the needs on real servers: stock torch or a plain client with the
failure, so that the test is known to see it, and ckptfs in the same circumstances.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptfs
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.operations import drive
from ckptfs.storage.registry import open_storage
from tests.faults.proxy import (
    LOSE,
    Answer,
    At,
    Delay,
    Each,
    Exchange,
    FaultProxy,
    HttpFault,
    Nth,
    Reset,
)
from tests.lab import raw
from tests.lab.server import Server
from tests.servers.aftermath import through
from tests.servers.looking import keys_below, pending_uploads

PART_BYTES = 5 << 20
CONDITIONAL = ("radosgw", "moto", "azurite", "gcs")  # stores with a conditional create


def state(value: float, rows: int = 1000, names: str = "abc") -> dict[str, Any]:
    """A few tensors that all hold one value."""
    return {name: torch.full((rows,), float(value)) for name in names}


def loaded(uri: str, options: Mapping[str, Any], rows: int = 1000) -> set[float]:
    """The values that occur in what ckptfs loads."""
    into = state(-1, rows)
    ckptfs.load(into, uri, storage_options=options)
    return {v for tensor in into.values() for v in torch.unique(tensor).tolist()}


@pytest.fixture
def proxy(radosgw: Server) -> Iterator[FaultProxy]:
    """A proxy before radosgw, without faults."""
    with FaultProxy(radosgw.endpoint) as opened:
        yield opened


# -- row 4: an error in the middle of a file -----------------------------------------------------


class OutOfMemory(DefaultSavePlanner):
    """A device that gives two tensors and not the third."""

    def resolve_data(self, write_item: Any) -> Any:
        """One tensor's data, or the error in the middle of the file."""
        if write_item.index.fqn == "c":
            raise MemoryError("no memory for the third tensor")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("rows", [1000, 3 << 20], ids=["one request", "in parts"])
def test_row4_an_error_in_the_middle_of_a_file(
    radosgw: Server, proxy: FaultProxy, rows: int
) -> None:
    """Stock completes the upload of what it had: a truncated object under the final key. Here nothing
    is ever completed there: no object, no upload under way, and no trace of the attempt.
    """
    options = radosgw.storage_options(part_size_bytes=PART_BYTES)
    stock, ours = radosgw.fresh("stock"), radosgw.fresh("ours")
    with pytest.raises(dcp.api.CheckpointException, match="no memory"):
        dcp.save(
            state(1.0, rows),
            storage_writer=FsspecWriter(
                stock, **radosgw.storage_options(default_block_size=PART_BYTES)
            ),
            planner=OutOfMemory(),
            no_dist=True,
        )
    assert 2 * 4 * rows < keys_below(radosgw, stock)["__0_0.distcp"] < 3 * 4 * rows, "the control"
    with pytest.raises(dcp.api.CheckpointException, match="no memory"):
        dcp.save(
            state(1.0, rows),
            storage_writer=ckptfs.StorageWriter(
                f"{ours}/step_1",
                storage_options=through(radosgw, proxy.url, part_size_bytes=PART_BYTES),
            ),
            planner=OutOfMemory(),
            no_dist=True,
        )
    for thread in threading.enumerate():
        if thread.name.startswith("ckptfs-dcp"):
            thread.join(120)  # the writer cleans up in parallel with the caller
    assert proxy.requests("PUT", "*/attempt.json"), "it began"
    completed = [e for e in proxy.requests("PUT", "*.distcp") if not e.query]
    completed += proxy.requests("POST", "*.distcp[?]uploadId=*")
    assert not completed, "and perhaps taken away again"
    left = keys_below(radosgw, ours)
    assert not [key for key in left if not key.startswith(".ckptfs/")], left
    assert not [key for key in left if key.startswith(".ckptfs/attempts/")], left
    assert pending_uploads(radosgw, ours) == []
    ckptfs.save(state(2.0, rows), f"{ours}/step_1", storage_options=options)
    assert loaded(f"{ours}/step_1", options, rows) == {2.0}


# -- row 5: options lost in DCP's reset ----------------------------------------------------------


def test_row5_storage_options_survive_reset(
    radosgw: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dcp.save with a checkpoint_id resets the writer: stock then asks whatever endpoint the
    environment names; ours continues with the options it was given, save after save, load after load.
    """
    options = radosgw.storage_options()
    stock, ours = radosgw.fresh("stock"), radosgw.fresh("ours")
    everything = HttpFault("*", "*", Each(), Answer(403, code="AccessDenied"))
    with FaultProxy(radosgw.endpoint, [everything]) as elsewhere:
        for name, value in {
            "AWS_ENDPOINT_URL": elsewhere.url,
            "AWS_ACCESS_KEY_ID": "OTHER",
            "AWS_SECRET_ACCESS_KEY": "OTHER",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        writer = FsspecWriter(f"{stock}/step_1", **options)
        with pytest.raises(dcp.api.CheckpointException):
            dcp.save(
                state(1.0), storage_writer=writer, checkpoint_id=f"{stock}/step_2", no_dist=True
            )
        assert elsewhere.log, "the control"
        elsewhere.forget()
        ours_writer = ckptfs.StorageWriter(f"{ours}/step_1", storage_options=options)
        ours_reader = ckptfs.StorageReader(f"{ours}/step_1", storage_options=options)
        for step in (1, 2, 3):
            where = f"{ours}/step_{step}"
            dcp.save(state(step), storage_writer=ours_writer, checkpoint_id=where, no_dist=True)
            into = state(-1)
            dcp.load(into, storage_reader=ours_reader, checkpoint_id=where, no_dist=True)
            assert {v for t in into.values() for v in t.tolist()} == {float(step)}
        assert elsewhere.log == []
    names = [c.step for c in ckptfs.list_checkpoints(ours, storage_options=options)]
    assert names == [1, 2, 3]


# -- row 6: os.sync of the whole host ------------------------------------------------------------


def test_row6_nobody_elses_disk_is_synced(radosgw: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without a file descriptor makes stock call os.sync(), which flushes every disk of the
    host; ours never does.
    """
    syncs: list[str] = []
    monkeypatch.setattr(os, "sync", lambda: syncs.append("sync"))
    where = radosgw.fresh("sync")
    dcp.save(
        state(1.0),
        storage_writer=FsspecWriter(f"{where}/stock", **radosgw.storage_options()),
        no_dist=True,
    )
    assert syncs, "the control"
    syncs.clear()
    options = radosgw.storage_options()
    ckptfs.save(state(1.0), f"{where}/run/step_1", storage_options=options)
    with ckptfs.checkpoint_dir(f"{where}/run/dir_1", storage_options=options) as path:
        Path(path, "file").write_bytes(b"plain")
    assert syncs == []


# -- row 20: requests that a careful policy forbids ----------------------------------------------


def of_the_bucket(log: Sequence[Exchange], bucket: str) -> list[str]:
    """Requests about the bucket itself (make it, look whether it is there), but not its listings."""
    return [
        f"{e.method} {e.target}"
        for e in log
        if e.path.strip("/") == bucket
        and not (e.method == "GET" and "prefix=" in e.query)
        and not (e.method == "POST" and e.query.rstrip("=") == "delete")
    ]


def test_row20_never_a_bucket_a_marker_a_copy_or_a_look_above_the_run(
    radosgw: Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Stock asks to create the bucket; everything that ckptfs does touches keys below the run only,
    makes no key that ends in a slash, copies nothing and lists nothing above it.
    """
    where, options = radosgw.fresh("row20"), through(radosgw, proxy.url)
    dcp.save(state(1.0), storage_writer=FsspecWriter(f"{where}/stock", **options), no_dist=True)
    assert of_the_bucket(proxy.log, radosgw.bucket), "the control"
    proxy.forget()
    run_uri = f"{where}/run"
    ckptfs.ensure_dir(run_uri, storage_options=options)
    with ckptfs.prepare_run(run_uri, storage_options=options) as run:
        for value in (1.0, 2.0, 3.0):
            ckptfs.save(
                state(value), f"{run_uri}/step_1", if_exists="replace", run=run,
                storage_options=options,
            )  # fmt: skip
        with ckptfs.checkpoint_dir(f"{run_uri}/dir_2", run=run, storage_options=options) as path:
            Path(path, "sub").mkdir()
            Path(path, "sub", "file").write_bytes(b"plain")
    ckptfs.save_object({"x": 1}, f"{run_uri}/step_1/driver.pt", storage_options=options)
    assert ckptfs.load_object(f"{run_uri}/step_1/driver.pt", storage_options=options) == {"x": 1}
    assert loaded(f"{run_uri}/step_1", options) == {3.0}
    assert ckptfs.latest(run_uri, storage_options=options) is not None
    ckptfs.prepare_run(run_uri, mode="overwrite", storage_options=options).release()

    assert len(proxy.log) > 50
    assert of_the_bucket(proxy.log, radosgw.bucket) == []
    prefix = run_uri.removeprefix(f"{radosgw.uri()}/")
    for e in proxy.log:
        assert "x-amz-copy-source" not in e.headers, e
        assert e.method == "GET" or not e.path.endswith("/"), f"a marker: {e.target}"
        assert e.method != "PUT" or e.sent_bytes > 0, f"a marker: {e.target}"
        if e.path.strip("/") == radosgw.bucket:
            if e.method == "GET":
                listed = [q for q in e.query.split("&") if q.startswith("prefix=")]
                assert listed[0].replace("%2F", "/").startswith(f"prefix={prefix}/"), e.target
        else:
            assert e.path.startswith(f"/{radosgw.bucket}/{prefix}/"), e.target


# -- row 24: a conditional PUT with a lost answer ---------------------------------------------


def test_row24_the_control(radosgw: Server, proxy: FaultProxy) -> None:
    """A plain client that repeats a conditional PUT after a lost answer fails against its own object."""
    proxy.plan.add(HttpFault("PUT", "*", Nth(1), LOSE))
    with contextlib.closing(raw.s3(radosgw, endpoint_url=proxy.url)) as client:
        put = {"Bucket": radosgw.bucket, "Key": "row24", "Body": b"ours", "IfNoneMatch": "*"}
        with pytest.raises(botocore.exceptions.ConnectionClosedError):
            client.put_object(**put)
        with pytest.raises(botocore.exceptions.ClientError) as caught:
            client.put_object(**put)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
        client.delete_object(Bucket=radosgw.bucket, Key="row24")


@pytest.mark.parametrize("cut", [LOSE, Reset(At.REQUEST)], ids=["it acted", "it did not"])
@pytest.mark.parametrize("store", CONDITIONAL)
def test_row24_an_append_whose_answer_was_lost(
    store: str, cut: Reset, request: pytest.FixtureRequest
) -> None:
    """Every log entry's answer is lost once: each append is proven by its write-id, happens once, and
    is no conflict; nothing is taken for done that was not.
    """
    server: Server = request.getfixturevalue(store)
    uri = server.fresh("row24")
    with FaultProxy(server.endpoint) as proxy:
        options = through(server, proxy.url)
        if store == "gcs":
            options["client"] = "obstore"  # the other one's uploads name the key in their body
        ckptfs.save(state(1.0), f"{uri}/step_1", storage_options=options)  # the probe is behind us
        appends = "*[.]ckptfs*log*0000000"
        for number in range(1, 6):
            proxy.plan.add(HttpFault("P*", f"{appends}{number}*", Nth(1), cut))
        with ckptfs.prepare_run(uri, storage_options=options) as run:
            for step in (2, 3):
                ckptfs.save(state(step), f"{uri}/step_{step}", run=run, storage_options=options)
        hit = [e for e in proxy.log if f"reset {cut.at.value}" in e.done]
    assert len(hit) == 4, "fence, two seals, release"
    storage = open_storage(uri, server.storage_options())
    try:
        log = drive(catch_up(), storage)
    finally:
        storage.close()
    assert log.next == 5, "every append once"
    assert [s.seal.name for s in log.saves.values() if s.seal] == ["step_1", "step_2", "step_3"]
    for step in (1, 2, 3):
        assert loaded(f"{uri}/step_{step}", server.storage_options()) == {float(step)}


# -- row 25: conditions of CompleteMultipartUpload -----------------------------------------------


def test_row25_the_control(radosgw: Server) -> None:
    """radosgw ignores If-None-Match of CompleteMultipartUpload and overwrites what is there."""
    with contextlib.closing(raw.s3(radosgw)) as client:
        where = {"Bucket": radosgw.bucket, "Key": "row25"}
        client.put_object(**where, Body=b"first")
        upload = client.create_multipart_upload(**where)["UploadId"]
        part = client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x" * PART_BYTES)
        client.complete_multipart_upload(
            **where,
            UploadId=upload,
            IfNoneMatch="*",
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
        )
        assert client.head_object(**where)["ContentLength"] == PART_BYTES
        client.delete_object(**where)


def test_row25_the_commit_is_one_small_conditional_put(radosgw: Server, proxy: FaultProxy) -> None:
    """Uploads in parts carry no condition and nothing depends on one: the data's keys are unique, the
    seal is a PUT of a few hundred bytes with If-None-Match.
    """
    uri = radosgw.fresh("row25")
    options = through(radosgw, proxy.url, part_size_bytes=PART_BYTES)
    ckptfs.save(state(1.0, 3 << 20), f"{uri}/step_1", storage_options=options)
    completes = [e for e in proxy.log if e.method == "POST" and "uploadId=" in e.query]
    assert len(completes) == 1
    assert not {"if-none-match", "if-match"} & set(completes[0].headers)
    conditional = [e for e in proxy.log if e.headers.get("if-none-match") == "*"]
    [seal] = [e for e in conditional if "/.ckptfs/log/" in e.path and e.status == 200]
    assert seal.method == "PUT"
    assert seal.sent_bytes < 4096
    assert seal.number > completes[0].number
    assert all("uploadId" not in e.query for e in conditional)


# -- row 30: parts in parallel -------------------------------------------------------------------


def most_at_once(log: Sequence[Exchange]) -> int:
    """How many part uploads were under way at one moment."""
    parts = [e for e in log if e.method == "PUT" and "partNumber=" in e.query]
    assert len(parts) >= 3, "in parts"
    moments = [(e.began_s, 1) for e in parts] + [(e.ended_s or e.began_s, -1) for e in parts]
    under_way = most = 0
    for _, change in sorted(moments):
        under_way += change
        most = max(most, under_way)
    return most


def test_row30_parts_in_parallel(radosgw: Server, proxy: FaultProxy) -> None:
    """A server that takes 50 ms a part sees stock's parts one after the other, ours together."""
    proxy.plan.add(HttpFault("PUT", "*[?&]partNumber=*", Each(), Delay(0.05)))
    uri, big = radosgw.fresh("row30"), 3 << 20
    stock = through(radosgw, proxy.url, default_block_size=PART_BYTES)
    dcp.save(state(1.0, big), storage_writer=FsspecWriter(f"{uri}/stock", **stock), no_dist=True)
    assert most_at_once(proxy.log) == 1, "the control"
    proxy.forget()
    options = through(radosgw, proxy.url, part_size_bytes=PART_BYTES, concurrency=4)
    ckptfs.save(state(2.0, big), f"{uri}/run/step_1", storage_options=options)
    assert most_at_once(proxy.log) >= 3
    assert loaded(f"{uri}/run/step_1", options, big) == {2.0}
    into = state(-1, big)
    reader = FsspecReader(f"{uri}/run/step_1", **radosgw.storage_options())
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert {v for t in into.values() for v in torch.unique(t).tolist()} == {2.0}
