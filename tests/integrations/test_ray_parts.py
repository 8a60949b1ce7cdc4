"""verl's shape on Ray: two groups of actors with process groups of their own, and a CPU driver.

The actors are Ray workers with other working directories than the driver's; what travels between
them travels as Ray arguments and results.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integrations
ray = pytest.importorskip("ray", reason="Ray is not installed: make test-integrations")


class Worker:
    """One rank of a worker group, on a simulated node of its own or not."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self.rank, self.size = rank, size

    def state(self, value: float) -> dict[str, Any]:
        """A tensor sharded over the group, and a replicated one."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (self.size,))
        local = torch.full((4,), value + self.rank)
        return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.full((2,), value)}

    def save(self, part: Any, value: float) -> Any:
        """Save this group's part."""
        import ckptfs

        return ckptfs.save(self.state(value), part)

    def publish(self, decision: Any) -> None:
        """Make the commit known on this group's disks."""
        decision.publish()

    def load(self, uri: str) -> list[float]:
        """What this rank holds after a load: its shard's value, the replicated one."""
        import ckptfs

        state = self.state(0.0)
        ckptfs.load(state, uri)
        return [float(state["w"].to_local()[0]), float(state["b"][0])]


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group(size: int, node: str) -> list[Any]:
    port = _port()
    variables = {"CKPTFS_NODE": node, "OMP_NUM_THREADS": "1"}
    actor = ray.remote(Worker).options(num_cpus=0.1, runtime_env={"env_vars": variables})
    return [actor.remote(rank, size, port) for rank in range(size)]


def _all(group: list[Any], method: str, *args: object) -> list[Any]:
    found = ray.get([getattr(worker, method).remote(*args) for worker in group], timeout=400)
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[dict[str, list[Any]]]:
    """Two groups of two actors, each group on a node of its own."""
    made = {"actor": _group(2, "a"), "critic": _group(2, "b")}
    yield made
    for worker in [worker for group in made.values() for worker in group]:
        ray.kill(worker)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "nodes"])
def test_two_worker_groups_and_a_driver(
    groups: dict[str, list[Any]], shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of Ray actors and a driver without a group save, commit, publish and load."""
    import ckptfs
    from ckptfs.commit.parts.tickets import begin_parts

    uri = f"{tmp_path}/run" if shared else f"nodes+file://{tmp_path}/@node/run"
    monkeypatch.setenv("CKPTFS_NODE", "head")
    with ckptfs.prepare_run(uri) as run:
        ticket = begin_parts(run, "global_step_20", 20, ["actor", "critic", "driver"])
        actor = _all(groups["actor"], "save", ticket.part("actor"), 1.0)
        driver = ckptfs.save({"loader": {"epoch": 2}}, ticket.part("driver"))
        with pytest.raises(ckptfs.IncompleteCheckpointError, match="part critic"):
            ticket.commit([actor[0], driver])
        critic = _all(groups["critic"], "save", ticket.part("critic"), 5.0)
        assert len({part.ref for part in critic}) == 1
        decision = ticket.commit([actor[0], critic[0], driver])
        for group in groups.values():
            _all(group, "publish", decision)
    state: dict[str, Any] = {"loader": {"epoch": 0}}
    ckptfs.load(state, str(decision.parts["driver"]))
    assert state["loader"]["epoch"] == 2
    assert _all(groups["actor"], "load", str(decision.parts["actor"])) == [[1.0, 1.0], [2.0, 1.0]]
    assert _all(groups["critic"], "load", str(decision.parts["critic"])) == [[5.0, 5.0], [6.0, 5.0]]
    found = ckptfs.latest(uri)
    assert found is not None
    assert (found.step, found.parts) == (20, ("actor", "critic", "driver"))
