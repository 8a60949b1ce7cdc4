"""Nodes and domains between real processes: simulated nodes, a dying owner. Real ones: tests/nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.multiprocess.harness import Rank, launch

TIMEOUT_S = 600.0


def make_counted(rank: Rank) -> dict[str, Any]:
    """ensure_dir on simulated node-local disks; which make_dir did this rank do?"""
    from ckptfs.control.control import open_control
    from ckptfs.storage.local import LocalStorage
    from ckptfs.topology.ensure_dir import ensure_dir
    from ckptfs.topology.storage_domains import probe_domains
    from ckptfs.uri import Uri

    made: list[str] = []

    class Counted(LocalStorage):
        def make_dir(self, key: str) -> None:
            made.append(key)
            super().make_dir(key)

    from ckptfs.testing.nodes import node_directory

    uri = Uri.parse(f"nodes+file://{rank.args['base']}/@node/run")
    storage = Counted(uri, directory=node_directory(uri, os.environ["CKPTFS_NODE"]))
    rank.init_group()
    with open_control(timeout_s=TIMEOUT_S) as control:
        placement = probe_domains(control, storage)
        for step in (10, 20):
            ensure_dir(control, storage, placement, f"step_{step}")
    return {"made": made, "id": placement.mine.id, "owner": placement.mine.owner}


def die_while_making(rank: Rank) -> None:
    """The owner is killed inside its mkdir."""
    from ckptfs.control.control import open_control
    from ckptfs.storage.local import LocalStorage
    from ckptfs.topology.ensure_dir import ensure_dir
    from ckptfs.topology.storage_domains import probe_domains
    from ckptfs.uri import Uri

    class Slow(LocalStorage):
        def make_dir(self, key: str) -> None:
            if key == "step_20" and rank.number == 0:
                rank.tell("inside")
                rank.hold("never")
            super().make_dir(key)

    storage = Slow(Uri.parse(str(rank.args["run"])))
    rank.init_group()
    control = open_control(timeout_s=TIMEOUT_S)
    ensure_dir(control, storage, probe_domains(control, storage), "step_20")


def test_n1_each_node_local_directory_is_made_by_one_process_per_node(tmp_path: Path) -> None:
    """N1, counted in real processes: of three ranks per node one makes each directory."""
    nodes = ["a"] * 3 + ["b"] * 3
    with launch(make_counted, 6, args={"base": str(tmp_path)}, nodes=nodes) as ranks:
        values = ranks.values()
    for number, value in enumerate(values):
        made = [key for key in value["made"] if key.startswith("step")]
        assert made == (["step_10", "step_20"] if number in (0, 3) else [])
        assert value["owner"] == (0 if number < 3 else 3)
    assert len({value["id"] for value in values}) == 2
    assert (tmp_path / "a/run/step_20").is_dir()
    assert (tmp_path / "b/run/step_20").is_dir()


def test_n2_owner_killed_inside_the_step_is_named_by_every_other_rank(tmp_path: Path) -> None:
    """N2: the owner is SIGKILLed in its mkdir; no rank waits for the 600 s of silence."""
    with launch(die_while_making, 4, args={"run": str(tmp_path)}) as ranks:
        ranks.wait("inside", rank=0)
        ranks.kill(0)
        for result in ranks.results(ranks=[1, 2, 3]):
            assert result.error_type == "CollectiveError", result.log
            assert result.error
            assert list(result.error["data"]["failures"]) == ["0"]
