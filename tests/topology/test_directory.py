"""A directory that every rank may use: made once per node, seen by all, or one error for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfs.control.control import Control
from ckptfs.errors import AccessError, CollectiveError
from ckptfs.storage.base import Shape
from ckptfs.storage.memory import MemoryStorage
from ckptfs.testing.world import SimulatedDeath, simulate
from ckptfs.topology.ensure_dir import ensure_dir
from ckptfs.topology.storage_domains import probe_domains
from ckptfs.uri import Uri
from tests.topology.places import Calls, NfsPlace, Place, on_disks

NODES = ["a"] * 3 + ["b"] * 3


def test_n1_node_local_directories_are_made_by_one_process_per_node(tmp_path: Path) -> None:
    """N1: two nodes of three ranks: two make_dir in all, and every rank sees its directory."""
    calls = Calls()
    disks = {node: tmp_path / node for node in "ab"}

    def body(control: Control) -> bool:
        place = on_disks(disks, calls)(control)
        placement = probe_domains(control, place)
        ensure_dir(control, place, placement, "step_20/data")
        return place.stat("step_20/data").is_dir

    assert all(end.get() for end in simulate(6, body, nodes=NODES))
    made = [rank for rank, op, key in calls.seen if op == "make_dir" and key == "step_20/data"]
    assert sorted(made) == [0, 3]


def test_shared_directory_is_made_by_its_owner_and_confirmed_once_per_node(tmp_path: Path) -> None:
    """The owner makes it, the other node's lead names it once, no other rank does; no token stays."""
    calls = Calls()

    def body(control: Control) -> None:
        place = Place(tmp_path, control.rank, calls)
        placement = probe_domains(control, place)
        ensure_dir(control, place, placement, "step_20")

    for end in simulate(6, body, nodes=NODES):
        end.get()
    assert calls.count("make_dir", key="step_20") == 2
    assert list((tmp_path / "step_20").iterdir()) == []


def test_cached_absence_does_not_split_the_ranks(tmp_path: Path) -> None:
    """Row 10: on node b the directory was seen missing; after the call all of b see it."""
    caches: dict[str, set[str]] = {"a": set(), "b": {"step_20", "step_20/data"}}

    def body(control: Control) -> bool:
        place = NfsPlace(tmp_path, caches[control.world.node], control.rank)
        placement = probe_domains(control, place)
        ensure_dir(control, place, placement, "step_20/data")
        return place.stat("step_20/data").is_dir

    assert all(end.get() for end in simulate(6, body, nodes=NODES))


def test_existence_is_not_identity(tmp_path: Path) -> None:
    """Node b's path leads to another directory of that name: the token is not in it."""
    disks = {node: tmp_path / node for node in "ab"}

    def body(control: Control) -> None:
        place = on_disks(disks)(control)
        placement = probe_domains(control, place, scope="shared")  # what the caller believes
        ensure_dir(control, place, placement, "step_20")

    for end in simulate(6, body, nodes=NODES):
        assert isinstance(end.error, CollectiveError)
        assert list(end.error.failures) == [3]
        assert end.error.failures[3].type.endswith("IncompleteCheckpointError")
    assert list((tmp_path / "a/step_20").iterdir()) == []  # the token goes even so


def test_owner_that_fails_fails_all_ranks_alike(tmp_path: Path) -> None:
    """N2: no rank waits in a barrier that the owner never reaches."""

    class Refuses(Place):
        def make_dir(self, key: str) -> None:
            if key == "step_20":
                raise AccessError("read-only", uri=self.uri(key))
            super().make_dir(key)

    def body(control: Control) -> None:
        place = (Place if control.rank else Refuses)(tmp_path, control.rank)
        ensure_dir(control, place, probe_domains(control, place), "step_20")

    texts = set()
    for end in simulate(6, body, nodes=NODES):
        assert isinstance(end.error, CollectiveError)
        assert end.error.all_are(AccessError)
        texts.add(str(end.error))
    assert len(texts) == 1


@pytest.mark.parametrize("victim", [0, 3, 5])
def test_rank_that_dies_inside_is_named_by_all_others(tmp_path: Path, victim: int) -> None:
    """The owner, a node's lead or anybody else ends in the middle: the others raise."""

    class Dies(Place):
        def make_dir(self, key: str) -> None:
            self._die(key)
            super().make_dir(key)

        def stat(self, key: str):  # type: ignore[no-untyped-def] # noqa: ANN202
            self._die(key)
            return super().stat(key)

        def _die(self, key: str) -> None:
            if self.rank == victim and key == "step_20":
                raise SimulatedDeath

    def body(control: Control) -> None:
        place = Dies(tmp_path, control.rank)
        ensure_dir(control, place, probe_domains(control, place), "step_20")

    for end in simulate(6, body, nodes=NODES):
        if end.rank == victim:
            assert end.died
        else:
            assert isinstance(end.error, CollectiveError)
            assert list(end.error.failures) == [victim]


def test_object_stores_have_no_directories() -> None:
    """Nothing is made, and it is still a barrier."""
    store = MemoryStorage(Uri.parse("memory://bucket/run"), shape=Shape.OBJECT)

    def body(control: Control) -> None:
        ensure_dir(control, store, probe_domains(control, store), "step_20")

    for end in simulate(4, body):
        end.get()


def test_file_in_the_way_is_an_error_for_all(tmp_path: Path) -> None:
    """A file of that name is neither replaced nor taken for a directory."""
    (tmp_path / "step_20").write_text("mine")

    def body(control: Control) -> None:
        place = Place(tmp_path, control.rank)
        ensure_dir(control, place, probe_domains(control, place), "step_20")

    for end in simulate(6, body, nodes=NODES):
        assert isinstance(end.error, CollectiveError)
    assert (tmp_path / "step_20").read_text() == "mine"
