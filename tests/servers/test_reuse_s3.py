"""unchanged="reference" on real servers: bytes once, every reader follows, files go with their last user."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from tests.faults.proxy import FaultProxy
from tests.lab import raw
from tests.lab.server import Server
from tests.servers.test_requests import Counted
from tests.servers.test_requests import _documented as documented_requests

MIB = 1 << 20


def state(value: float, seed: int = 0) -> dict[str, Any]:
    """A frozen part of 12 MiB, and a trained one of 4 KiB."""
    frozen = torch.rand(3 * MIB, generator=torch.Generator().manual_seed(seed))
    return {"frozen": frozen, "w": torch.full((1000,), float(value))}


def blank() -> dict[str, Any]:
    """The same with nothing in it."""
    return {"frozen": torch.zeros(3 * MIB), "w": torch.zeros(1000)}


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Bit for bit."""
    return all(torch.equal(got[key], value) for key, value in wanted.items())


def keys(server: Server, run: str) -> dict[str, int]:
    """What is below a run: key -> bytes."""
    prefix = run.removeprefix(f"{server.uri()}/") + "/"
    with contextlib.closing(raw.s3(server)) as s3:
        listed = s3.list_objects_v2(Bucket=server.bucket, Prefix=prefix).get("Contents", [])
    return {line["Key"].removeprefix(prefix): line["Size"] for line in listed}


def quiet(run: Any) -> None:
    """Wait for the chores."""
    assert run.session.background.drain(60)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_the_frozen_part_is_stored_once_and_stock_readers_follow(
    radosgw: Server, client: str
) -> None:
    """Four saves over S3 with the bytes of one, and some; the third's owner is another process. Each
    loads bit-exact here, and in torch's FsspecReader, which knows nothing of us.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    run, options = radosgw.fresh("reuse"), radosgw.storage_options(client=client)
    for steps in ((1, 2), (3, 4)):
        with ckptfs.prepare_run(run, storage_options=options) as held:
            for step in steps:
                saved = ckptfs.save(
                    state(step), f"{run}/step_{step}", run=held, unchanged="reference"
                )
                assert (saved.total.referenced_bytes > 12 * MIB) is (step > 1)
    assert sum(keys(radosgw, run).values()) < 12.2 * MIB
    for step in (1, 2, 4):
        at, got = f"{run}/step_{step}", blank()
        assert ckptfs.load(got, at, storage_options=options).verified
        assert same(got, state(step))
        got = blank()
        dcp.load(got, storage_reader=FsspecReader(at, **radosgw.storage_options()), no_dist=True)
        assert same(got, state(step)), "stock"


def test_bytes_go_with_the_last_save_that_uses_them(radosgw: Server) -> None:
    """The writer is replaced and goes, its bytes stay for those that use them; when the last of these
    is replaced they go too. Nothing is listed to find that out.
    """
    with FaultProxy(radosgw.endpoint) as proxy:
        run = radosgw.fresh("reuse")
        options = radosgw.storage_options(endpoint_url=proxy.url)
        with ckptfs.prepare_run(run, storage_options=options) as held:

            def save(name: str, seed: int) -> str:
                uri = f"{run}/{name}"
                return ckptfs.save(
                    state(1, seed), uri, run=held, unchanged="reference", if_exists="replace"
                ).save_id

            writer = save("a", 0)
            save("b", 0)
            quiet(held)
            since = len(proxy.requests())
            save("a", 0)
            save("c", 1)
            quiet(held)
            held_keys = keys(radosgw, run)
            assert not any(key.startswith(f"a/{writer}") for key in held_keys), "it was deleted"
            assert any(key.startswith(f"_data/{writer}") for key in held_keys), "others use them"
            got = blank()
            ckptfs.load(got, f"{run}/b", storage_options=options)
            assert same(got, state(1, 0))
            save("a", 1)
            save("b", 1)
            save("d", 1)
            quiet(held)
            left = {key for key in keys(radosgw, run) if key.startswith(f"_data/{writer}")}
            assert not left
            listings = [r for r in proxy.requests()[since:] if "list-type=2" in r.target]
            assert not listings
    got = blank()
    ckptfs.load(got, f"{run}/a", storage_options=radosgw.storage_options())
    assert same(got, state(1, 1))


@pytest.mark.parametrize("kind", ["gcs", "azurite"])
def test_stock_readers_follow_on_other_stores(kind: str, request: pytest.FixtureRequest) -> None:
    """The rooted path begins at the bucket or container, as gcsfs and adlfs read it."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    server: Server = request.getfixturevalue(kind)
    run, options = server.fresh("reuse"), server.storage_options()
    with ckptfs.prepare_run(run, storage_options=options) as held:
        for step in (1, 2):
            uri = f"{run}/step_{step}"
            saved = ckptfs.save(state(step), uri, run=held, unchanged="reference")
    assert saved.total.referenced_bytes > 12 * MIB
    got = blank()
    ckptfs.load(got, f"{run}/step_2", storage_options=options)
    assert same(got, state(2))
    got = blank()
    reader = FsspecReader(f"{run}/step_2", **options)
    dcp.load(got, storage_reader=reader, no_dist=True)
    assert same(got, state(2))


def test_a_save_that_references_asks_once_for_each_file(radosgw: Server) -> None:
    """In addition to what docs/stores/costs.md says of a save of so many files: what docs/howto/unchanged.md
    says, one HEAD for the referenced file and three GET to know the last checkpoint.
    """
    with FaultProxy(radosgw.endpoint) as proxy:
        counted = Counted(radosgw, proxy)
        with ckptfs.prepare_run(counted.run, storage_options=counted.options) as run:

            def save(name: str, value: float) -> Counter[str]:
                ckptfs.save(
                    {"frozen": torch.ones(30_000), "w": torch.full((9,), value)},
                    f"{counted.run}/{name}",
                    run=run,
                    unchanged="reference",
                )
                quiet(run)
                return counted.since()

            save("step_1", 1.0)
            read_back = save("step_2", 2.0)
            documented = documented_requests(1, 1)
            # The manifest of the last one, its .metadata, and the digests of one file.
            extra = Counter({"HEAD": 1, "GET": 3})
            assert read_back == documented + extra
