"""The requests that docs/stores/costs.md lists are those that a server sees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from tests.faults.proxy import Exchange, FaultProxy
from tests.lab.server import Server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stores" / "costs.md"


def _documented(files: int, parts: int) -> Counter[str]:
    """What the page's own function says, without zeros."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(block.rpartition("\n\nprint")[0], space)  # noqa: S102 - the page's own formula
    return +Counter(space["save_requests"](data_files=files, parts=parts))


class Counted:
    """A run on radosgw behind a proxy, and the requests since the last look."""

    def __init__(self, server: Server, proxy: FaultProxy) -> None:
        self.run = server.fresh("costs")
        self.options = server.storage_options(
            client="obstore", endpoint_url=proxy.url, part_size_bytes="5 MiB"
        )
        self._proxy = proxy
        self._seen = 0

    def since(self) -> Counter[str]:
        """Requests by method; those of the lease are the clock's and not a call's."""
        asked = self._proxy.requests()
        fresh, self._seen = asked[self._seen :], len(asked)
        return Counter(_kind(r) for r in fresh if not r.path.endswith("/lease"))

    def paths(self, since: int) -> list[tuple[str, str]]:
        """Method and target of the requests from number ``since``."""
        return [(r.method, r.target) for r in self._proxy.requests()[since:]]

    @property
    def count(self) -> int:
        """Requests so far."""
        return len(self._proxy.requests())


@pytest.fixture
def counted(radosgw: Server) -> Iterator[Counted]:
    """A run of the test's own."""
    with FaultProxy(radosgw.endpoint) as proxy:
        yield Counted(radosgw, proxy)


def _kind(request: Exchange) -> str:
    """The method; a batch delete, which obstore sends for one key too, counts as a DELETE."""
    batch = request.method == "POST" and request.target.partition("?")[2].startswith("delete")
    return "DELETE" if batch else request.method


def _state(mib: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.ones(max(8, mib << 18))}


def _quiet(run: Any) -> None:
    assert run.session.background.drain(60)


def test_a_save_costs_what_the_page_says(counted: Counted) -> None:
    """Small and in parts, in a held run; the second replaced save goes without a listing."""
    with ckptfs.prepare_run(counted.run, storage_options=counted.options) as run:
        _quiet(run)
        counted.since()
        ckptfs.save(_state(), f"{counted.run}/step_1", run=run)
        _quiet(run)
        assert counted.since() == _documented(1, 1)
        ckptfs.save(_state(12), f"{counted.run}/step_2", run=run)
        _quiet(run)
        assert counted.since() == _documented(1, 3)
        ckptfs.save(_state(), f"{counted.run}/step_2", run=run, if_exists="replace")
        _quiet(run)
        assert counted.since() - _documented(1, 1) == Counter(GET=4, HEAD=2)
        began = counted.count
        ckptfs.save(_state(), f"{counted.run}/step_3", run=run)
        _quiet(run)
        more = counted.since() - _documented(1, 1)
        asked = counted.paths(began)
    assert more == Counter(GET=6, HEAD=2, PUT=2, DELETE=2)
    assert not [path for method, path in asked if method == "GET" and "list-type" in path]


def test_latest_lists_the_run_once_for_what_others_saved(counted: Counted) -> None:
    """Its requests are the domain, the hint, the entries, the end of the log and a listing of it; and one
    listing of the run, with a look at the newest commit, for what another program saved after it; and a
    look at that one's manifest: somebody may have removed it.
    """
    ckptfs.save(_state(), f"{counted.run}/step_1", storage_options=counted.options)
    counted.since()
    newest = ckptfs.latest(counted.run, storage_options=counted.options)
    assert newest is not None
    assert newest.step == 1
    assert counted.since() == Counter(GET=12, HEAD=3)
    ckptfs.latest(counted.run, unlogged="ignore", storage_options=counted.options)
    assert counted.since() == Counter(GET=11, HEAD=1)


def test_a_claim_does_not_look_at_every_checkpoint(counted: Counted) -> None:
    """With five checkpoints it costs as many entries more, and nothing per checkpoint."""
    for step in range(5):
        ckptfs.save(_state(), f"{counted.run}/step_{step}", storage_options=counted.options)
    counted.since()
    run = ckptfs.prepare_run(counted.run, storage_options=counted.options)
    _quiet(run)
    asked = counted.since()
    run.release()
    # 5 entries come in one read ahead of eight, which asks for three too many. One more asks
    # whether the URI is a checkpoint, in which no run may be begun.
    assert asked == Counter(GET=2 + 8 + 3 + 3 + 1, HEAD=1, PUT=1)
