"""Copies and waiting on a real S3: drained from a disk, from a bucket to another, over a bad network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.session import Place, open_session
from ckptfs.control.control import SoloControl
from ckptfs.events import CopyCommitted, Event
from ckptfs.manager.waiting import Watcher
from ckptfs.replication.tiers import Copier, Copy, copies_of
from ckptfs.retention.policy import Keep
from ckptfs.uri import Uri
from tests.faults.proxy import At, FaultProxy, HttpFault, Nth, Reset
from tests.lab.server import Server
from tests.servers.looking import keys_below, pending_uploads

MIB = 1 << 20


def state(step: int) -> dict[str, Any]:
    """A frozen part of several upload parts, and a trained one."""
    frozen = torch.rand(3 * MIB, generator=torch.Generator().manual_seed(7))
    return {"frozen": frozen, "w": torch.full((1000,), float(step))}


def check(uri: str, step: int, options: dict[str, Any]) -> None:
    """Bit for bit through us, verified, and through torch's FsspecReader over s3fs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    plain = {k: v for k, v in options.items() if k not in ("client", "part_size_bytes")}
    for ours in (True, False):
        got = {"frozen": torch.zeros(3 * MIB), "w": torch.zeros(1000)}
        if ours:
            assert ckptfs.load(got, uri, storage_options=options).verified
        else:
            dcp.load(got, storage_reader=FsspecReader(uri, **plain), no_dist=True)
        assert all(torch.equal(got[key], value) for key, value in state(step).items())


@contextlib.contextmanager
def draining(run: Run, copy: Copy) -> Iterator[tuple[Copier, list[Event]]]:
    """A copier of a held run, and what it reported."""
    told: list[Event] = []
    copier = Copier(run, copies_of([copy], run.uri), lambda seal: True, tell=told.append)
    try:
        yield copier, told
    finally:
        assert copier.close()


def test_a_disk_is_drained_into_a_bucket_and_pruned_there(radosgw: Server, tmp_path: Path) -> None:
    """Awaited, verified, in parts, with a retention of its own; no orphan is left."""
    primary, bucket = tmp_path / "run", radosgw.fresh("drained")
    options = radosgw.storage_options(part_size_bytes="5 MiB")
    copy = Copy(bucket, keep=Keep(latest=2), storage_options=options)
    with ckptfs.prepare_run(primary) as run, draining(run, copy) as (copier, told):
        for step in (1, 2, 3):
            saved = ckptfs.save(state(step), primary / f"step_{step}", run=run)
            copier.after_commit(saved)
            assert copier.wait() == ()
            assert copier.waiting() == frozenset()
    assert len([e for e in told if isinstance(e, CopyCommitted)]) == 3
    found = ckptfs.list_checkpoints(bucket, storage_options=options)
    assert [c.step for c in found] == [2, 3]
    assert found[-1].save_id == saved.save_id
    for step in (2, 3):
        check(f"{bucket}/step_{step}", step, options)
    keys = keys_below(radosgw, bucket)
    assert {key.split("/")[0] for key in keys} == {".ckptfs", "step_2", "step_3"}
    assert not pending_uploads(radosgw, bucket)


def test_a_copy_of_referenced_files_stands_by_itself(radosgw: Server) -> None:
    """From a bucket where steps share their frozen part to one where each has all of its bytes: the
    original may go altogether.
    """
    options = radosgw.storage_options(client="obstore")
    primary, bucket = radosgw.fresh("shared"), radosgw.fresh("apart")
    with ckptfs.prepare_run(primary, storage_options=options) as run:
        for step in (1, 2):
            target = f"{primary}/step_{step}"
            ckptfs.save(state(step), target, run=run, unchanged="reference")
        with draining(run, Copy(bucket, storage_options=options)) as (copier, _):
            assert copier.wait() == ()
    assert any(key.startswith("_data/") for key in keys_below(radosgw, primary))
    keys = keys_below(radosgw, bucket)
    assert not any(key.startswith("_data/") for key in keys)
    for step in (1, 2):
        assert sum(n for k, n in keys.items() if k.startswith(f"step_{step}/")) > 12 * MIB
        check(f"{bucket}/step_{step}", step, options)


def test_a_connection_that_breaks_costs_a_try_and_no_byte(radosgw: Server, tmp_path: Path) -> None:
    """Uploads are cut in the middle; the copy is whole all the same."""
    primary, bucket = tmp_path / "run", radosgw.fresh("cut")
    faults = [HttpFault("PUT", "*partNumber*", Nth(n), Reset(At.REQUEST)) for n in (1, 3)]
    with FaultProxy(radosgw.endpoint, faults) as proxy:
        options = radosgw.storage_options(endpoint_url=proxy.url, part_size_bytes="5 MiB")
        with ckptfs.prepare_run(primary) as run:
            ckptfs.save(state(1), primary / "step_1", run=run)
            with draining(run, Copy(bucket, storage_options=options)) as (copier, _):
                copier.wait()
                assert copier.wait() == ()
    check(f"{bucket}/step_1", 1, radosgw.storage_options())


def test_waiting_costs_one_get_per_poll(radosgw: Server) -> None:
    """Sixteen idle polls of a run: sixteen GETs, two that make sure it is still that run, and two looks
    of three requests for what another program saved into it; an announcement is one more poll with two
    GETs, and such a look.
    """
    uri = radosgw.fresh("waiting")
    straight = radosgw.storage_options(client="obstore")

    def commit(step: int) -> None:
        with (
            open_session(Uri.parse(uri), SoloControl(), Place(straight), write=True) as session,
            claim(session) as run,
        ):
            ckptfs.save({"w": torch.ones(4)}, f"{uri}/step_{step}", run=run)

    commit(1)
    with FaultProxy(radosgw.endpoint) as proxy:
        options = radosgw.storage_options(client="obstore", endpoint_url=proxy.url)
        idle: list[int] = []

        def rest(_: float) -> bool:
            idle.append(len(proxy.requests()))
            return len(idle) > 17

        with Watcher(uri, storage_options=options, rest=rest) as watcher:
            seen = watcher.wait()
            assert watcher.wait(seen) is None
            asked = len(proxy.requests())
            commit(2)
            found = watcher.wait(seen)
        assert found is not None
        assert found.step == 2
        assert idle[16] - idle[0] == 16 + 2 + 2 * 3
        new = proxy.requests()[asked:]
    assert all(r.method in ("GET", "HEAD") for r in new)
    assert len([r for r in new if "list-type" in r.target]) <= 1
    assert len(new) <= 3 + 16 + 4  # a fence, a seal and a release, read ahead; and one look
