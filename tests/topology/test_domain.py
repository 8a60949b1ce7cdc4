"""Which ranks share storage, found through the storage and through nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.control.control import Control, SoloControl
from ckptfs.control.world import World
from ckptfs.errors import AccessError, CollectiveError, StateError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.memory import MemoryStorage
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.testing.world import End, simulate
from ckptfs.topology.storage_domains import Placement, group_nodes, node_leads, probe_domains
from ckptfs.uri import Uri
from tests.topology.places import Calls, Flickers, LosesAnswers, NfsPlace, Place, on_disks

NODES = ["a", "a", "b", "b", "c", "c"]


def probe(
    opener: Callable[[Control], Storage], nodes: list[str] = NODES, **options: object
) -> list[End[Placement]]:
    """Probe on simulated ranks."""
    return simulate(
        len(nodes),
        lambda control: probe_domains(control, opener(control), **options),  # type: ignore[arg-type]
        nodes=nodes,
    )


def shape_of(ends: list[End[Placement]]) -> list[tuple[int, tuple[int, ...], tuple[str, ...]]]:
    """(owner, ranks, nodes) of each domain; every rank must have found the same."""
    placements = [end.get() for end in ends]
    assert all(p.domains == placements[0].domains for p in placements)
    for rank, placement in enumerate(placements):
        assert rank in placement.mine.ranks
        assert placement.is_owner == (placement.mine.owner == rank)
    return [(d.owner, d.ranks, d.nodes) for d in placements[0].domains]


def test_shared_directory_is_one_domain(tmp_path: Path) -> None:
    """All nodes see the same bytes: one domain, owned by rank 0; one lead per node."""
    ends = probe(lambda _: Place(tmp_path))
    assert shape_of(ends) == [(0, (0, 1, 2, 3, 4, 5), ("a", "b", "c"))]
    assert [end.get().is_node_lead for end in ends] == [True, False] * 3
    left = [p.name for p in (tmp_path / ".ckptfs/tmp").iterdir()]
    assert left == []  # no token stays behind


def test_node_local_disks_are_one_domain_per_node(tmp_path: Path) -> None:
    """Row 22: same path, same st_dev, same hostname in the ranks' eyes, different bytes."""
    disks = {node: tmp_path / node for node in "abc"}

    def on_one_host(control: Control) -> Storage:
        return on_disks(disks)(control)

    ends = probe(on_one_host)
    assert shape_of(ends) == [(0, (0, 1), ("a",)), (2, (2, 3), ("b",)), (4, (4, 5), ("c",))]
    assert len({d.id for d in ends[0].get().domains}) == 3


def test_mixed_mounts_are_found_as_they_are(tmp_path: Path) -> None:
    """Two nodes on one server and one on another: two domains behind one path."""
    disks = {"a": tmp_path / "x", "b": tmp_path / "y", "c": tmp_path / "x"}
    assert shape_of(probe(on_disks(disks))) == [
        (0, (0, 1, 4, 5), ("a", "c")),
        (2, (2, 3), ("b",)),
    ]


def test_ids_are_durable_and_made_once(tmp_path: Path) -> None:
    """A later process finds the id that the first one made; eight at once agree on one."""
    nodes = list("abcdefgh")
    first = probe(lambda _: Place(tmp_path), nodes)
    second = probe(lambda _: Place(tmp_path), nodes)
    ids = {end.get().mine.id for end in [*first, *second]}
    assert len(ids) == 1
    assert (tmp_path / ".ckptfs/domain").read_text() == ids.pop()


def test_operations_do_not_grow_with_the_ranks_of_a_node(tmp_path: Path) -> None:
    """Only node leads touch storage, a fixed number of times each."""
    counts = []
    for per_node in (1, 6):
        calls = Calls()
        disks = dict.fromkeys("ab", tmp_path / f"{per_node}")
        nodes = [node for node in "ab" for _ in range(per_node)]
        shape_of(probe(on_disks(disks, calls), nodes))
        counts.append((calls.of(0), calls.of(per_node)))
        assert sum(counts[-1]) == len(calls.seen)
    assert max(counts[0]) <= 12
    assert max(counts[1]) <= 12


def test_cached_absence_on_one_node_decides_nothing(tmp_path: Path) -> None:
    """Row 10: node b remembers that nothing was there; it still finds what a has made."""
    caches: dict[str, set[str]] = {"a": set(), "b": set()}
    for key in (".ckptfs", ".ckptfs/domain"):
        caches["b"].add(key)
    ends = probe(
        lambda control: NfsPlace(tmp_path, caches[control.world.node], control.rank),
        ["a", "a", "b", "b"],
    )
    assert shape_of(ends) == [(0, (0, 1, 2, 3), ("a", "b"))]


def test_lost_answer_of_the_create_is_settled_by_reading(tmp_path: Path) -> None:
    """The id is whatever is there, ours or another's."""
    ends = probe(lambda _: LosesAnswers(tmp_path))
    assert len(shape_of(ends)) == 1
    assert ends[0].get().mine.id == (tmp_path / ".ckptfs/domain").read_text()


def test_run_copied_whole_to_two_disks_is_an_error_that_names_the_nodes(tmp_path: Path) -> None:
    """Equal ids are not believed: the token of one is not on the other."""
    disks = {"a": tmp_path / "a", "b": tmp_path / "b"}
    probe_domains(SoloControl(), Place(disks["a"]))
    shutil.copytree(disks["a"], disks["b"])
    for end in probe(on_disks(disks), ["a", "b"]):
        assert isinstance(end.error, CollectiveError)
        assert list(end.error.failures) == [1]
        assert end.error.failures[1].node == "b"
        assert ".ckptfs/domain" in str(end.error)


def test_an_id_that_flickers_splits_no_domain(tmp_path: Path) -> None:
    """Seen, then not, then seen again: still one domain. Not seen any more: an error, no second domain."""

    def see(hidden: int) -> list[End[Placement]]:
        probe_domains(SoloControl(), Place(tmp_path))  # the id is there from the start

        def opener(control: Control) -> Storage:
            return Flickers(tmp_path, control.rank, hidden if control.world.node == "b" else 0)

        return probe(opener, ["a", "b"])

    assert shape_of(see(2)) == [(0, (0, 1), ("a", "b"))]
    for end in see(1000):
        assert isinstance(end.error, CollectiveError)
        assert list(end.error.failures) == [1]
        assert "was there, and is not any more" in end.error.failures[1].message


def test_scope_shared_asks_no_other_node(tmp_path: Path) -> None:
    """The caller knows: one domain, and only the coordinator touches storage."""
    calls = Calls()
    ends = probe(on_disks(dict.fromkeys("abc", tmp_path), calls), scope="shared")
    assert shape_of(ends) == [(0, (0, 1, 2, 3, 4, 5), ("a", "b", "c"))]
    assert {rank for rank, _, _ in calls.seen} == {0}
    assert ends[5].get().mine.id


def test_scope_node_needs_no_token_and_refuses_what_is_shared(tmp_path: Path) -> None:
    """One domain per node without a second look; equal ids contradict the caller."""
    calls = Calls()
    disks = {node: tmp_path / node for node in "abc"}
    ends = probe(on_disks(disks, calls), scope="node")
    assert [owner for owner, _, _ in shape_of(ends)] == [0, 2, 4]
    assert calls.count("replace") == 0
    for end in probe(lambda _: Place(tmp_path / "x"), scope="node"):
        assert isinstance(end.error, StateError)
        assert "share this storage" in str(end.error)


def test_names_are_domains(tmp_path: Path) -> None:
    """Ranks that give one name are one domain; its owner alone touches storage."""
    calls = Calls()
    names = {"a": "left", "b": "right", "c": "left"}
    disks = {node: tmp_path / name for node, name in names.items()}

    def body(control: Control) -> Placement:
        place = on_disks(disks, calls)(control)
        return probe_domains(control, place, name=names[control.world.node])

    ends = simulate(6, body, nodes=NODES)
    assert [(o, r) for o, r, _ in shape_of(ends)] == [(0, (0, 1, 4, 5)), (2, (2, 3))]
    assert {rank for rank, _, _ in calls.seen} == {0, 2}
    assert ends[0].get().mine.id == (tmp_path / "left/.ckptfs/domain").read_text()


def test_one_node_cannot_have_two_names(tmp_path: Path) -> None:
    """Ranks of one node see the same mounts: different names are a mistake of the caller."""

    def body(control: Control) -> Placement:
        return probe_domains(control, Place(tmp_path), name=f"n{control.rank}")

    for end in simulate(2, body, nodes=["a", "a"]):
        assert isinstance(end.error, StateError)


def test_readers_write_nothing(tmp_path: Path) -> None:
    """With read permission only: ids are read, equal ids share, nothing is made or removed."""
    disks = {"a": tmp_path / "x", "b": tmp_path / "y", "c": tmp_path / "x"}
    made = shape_of(probe(on_disks(disks)))
    calls = Calls()
    ends = probe(lambda control: ReadOnlyStorage(on_disks(disks, calls)(control)), write=False)
    assert shape_of(ends) == made
    assert {op for _, op, _ in calls.seen} <= {"read", "refresh"}


def test_reader_of_a_copy_without_its_log_finds_a_domain_per_node(tmp_path: Path) -> None:
    """No id, nothing is known to be shared: id "" and one domain per node; nothing is made."""
    ends = probe(lambda _: Place(tmp_path), write=False)
    assert [nodes for _, _, nodes in shape_of(ends)] == [("a",), ("b",), ("c",)]
    assert {d.id for d in ends[0].get().domains} == {""}
    assert list(tmp_path.iterdir()) == []


def test_object_store_is_one_domain_with_an_id() -> None:
    """One domain without a token; the coordinator alone makes the id."""
    root = Uri.parse("memory://bucket/run?shape=object")
    store = MemoryStorage(root, shape=Shape.OBJECT)
    ends = probe(lambda _: store)
    assert shape_of(ends) == [(0, (0, 1, 2, 3, 4, 5), ("a", "b", "c"))]
    assert ends[3].get().mine.id == store.read(".ckptfs/domain").decode()


def test_node_that_may_not_write_fails_all_with_its_name(tmp_path: Path) -> None:
    """One read-only mount: every rank raises the same error, which names that node."""

    class Refuses(Place):
        def make_dir(self, key: str) -> None:
            raise AccessError("read-only mount", uri=self.uri(key))

    def opener(control: Control) -> Storage:
        return (Refuses if control.world.node == "b" else Place)(tmp_path)

    for end in probe(opener):
        assert isinstance(end.error, CollectiveError)
        assert list(end.error.failures) == [2]
        assert end.error.failures[2].node == "b"
        assert end.error.all_are(AccessError)


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["", "x", "y", "z"])),
)
def test_grouping_is_a_partition_by_answer(nodes: list[str], answers: dict[str, str]) -> None:
    """For any world and answers: every rank in one domain, nodes never split, equal ids together,
    unknown ids alone, the owner the lowest rank and a node lead.
    """
    solo = World.solo()
    worlds = [replace(solo, rank=r, size=len(nodes), node=n) for r, n in enumerate(nodes)]
    keys = {node: answers.get(node, "") for node in nodes}
    domains = group_nodes(worlds, keys)
    leads = node_leads(worlds)
    assert sorted(rank for d in domains for rank in d.ranks) == list(range(len(nodes)))
    assert [d.owner for d in domains] == sorted(d.owner for d in domains)
    for domain in domains:
        assert domain.owner == min(domain.ranks)
        assert domain.owner in leads.values()
        assert set(domain.nodes) == {nodes[rank] for rank in domain.ranks}
        assert {keys[node] for node in domain.nodes} == {domain.id}
        assert domain.id or len(domain.nodes) == 1
        assert set(domain.ranks) == {r for r, n in enumerate(nodes) if n in domain.nodes}
    known = [d.id for d in domains if d.id]
    assert len(known) == len(set(known))
