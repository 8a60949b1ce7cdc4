"""A committed checkpoint once more at another place: equal, in the stock format, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.digests import decode_digests
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.manifest import FileRecord, decode_manifest
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.save.spec import SaveSpec, fresh_save_id
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.commit.state import catalog
from ckptfs.control.control import Control
from ckptfs.dcp.loading import load_at
from ckptfs.dcp.saving import save_at
from ckptfs.replication.checkpoint_copy import copy_checkpoint
from ckptfs.replication.copied_files import (
    CopyTask,
    Readable,
    Writable,
    copy_share,
    new_path,
    share_out,
    tasks_of,
)
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.reader import LocalReader
from ckptfs.testing.world import End, simulate
from ckptfs.uri import Uri

NODES = ["a", "a", "b", "b"]


def state_of(rank: int) -> dict[str, Any]:
    """Something of every rank's own, something replicated, more than one block of it."""
    return {
        f"w{rank}": torch.arange(300_000.0) + rank,
        "shared": torch.arange(7.0),
        "lr": 0.5,
        "own": {"rng": torch.full((3,), rank)},
    }


def blank(ranks: int, me: int) -> dict[str, Any]:
    """All ranks' tensors, empty, as one process asks for them."""
    return {f"w{r}": torch.zeros(300_000) for r in range(ranks)} | {
        "shared": torch.zeros(7),
        "lr": 0.0,
        "own": {"rng": torch.zeros(3, dtype=torch.int64)},
    }


def session_at(
    control: Control, place: Path, *, node_local: bool, write: bool = True
) -> RunSession:
    """A session at ``place``, or at a directory of each simulated node behind one URI."""
    uri = Uri.parse(place)
    here = f"{place}/{control.world.node}" if node_local else str(place)
    return start_session(control, LocalStorage(uri, directory=here), Place(), write=write)


def saved(control: Control, place: Path, *, node_local: bool, name: str = "step_7") -> Seal:
    """Save on all ranks; its seal."""
    session = session_at(control, place, node_local=node_local)
    spec = SaveSpec(name, 7, per_rank=("own.*",), metrics=(("loss", 0.25),))
    save_at(state_of(control.rank), session, Uri.parse(place) / name, spec)
    return seal_in(session, name)


def seal_in(session: RunSession, name: str) -> Seal:
    """The live save of a name."""

    def local() -> Seal:
        view = drive(read_view(), session.storage)
        assert view is not None
        return next(x.seal for x in catalog(dict([view])) if x.seal.name == name)

    return session.control.step("seal", local)[0]


def ran(ends: Sequence[End[Any]]) -> list[Any]:
    """What all ranks returned."""
    return [end.get() for end in ends]


def loaded_by_stock(step: Path, ranks: int) -> dict[str, Any]:
    """By torch alone."""
    state = blank(ranks, 0)
    del state["own"]
    dcp.load(state, checkpoint_id=step, no_dist=True)
    return state


def check(state: Mapping[str, Any], ranks: int) -> None:
    """Bit for bit what was saved."""
    for rank in range(ranks):
        assert torch.equal(state[f"w{rank}"], state_of(rank)[f"w{rank}"])
    assert torch.equal(state["shared"], state_of(0)["shared"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_from_shared_to_shared_is_equal_and_loads(tmp_path: Path, ranks: int) -> None:
    """Same save_id, step, metrics, world size and bytes; ours and stock's readers open it."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"

    def body(control: Control) -> Any:
        seal = saved(control, primary, node_local=False)
        source = session_at(control, primary, node_local=False)
        target = session_at(control, copy, node_local=False)
        result = copy_checkpoint(source, seal, target)
        return seal, seal_in(target, "step_7"), result.total.files, result.mine.files

    for seal, copied, files, mine in ran(simulate(ranks, body)):
        kept = ("save_id", "step", "artifact", "metrics", "name", "failure")
        assert all(getattr(seal, k) == getattr(copied, k) for k in kept)
        assert (files, mine) == (2 * ranks, 2)  # each rank copied one data file and its digests
    old, new = (
        decode_manifest((p / "step_7/ckptfs.json").read_bytes(), p) for p in (primary, copy)
    )
    assert new.world_size == old.world_size == ranks
    for record in old.files:
        if not record.path.endswith(".metadata"):
            assert (copy / "step_7" / record.path).read_bytes() == (
                primary / "step_7" / record.path
            ).read_bytes()
    state = loaded_by_stock(copy / "step_7", ranks)
    check(state, ranks)


def test_node_local_shards_become_one_checkpoint_on_shared_storage(tmp_path: Path) -> None:
    """Four ranks on two nodes with a disk each: the copy is one domain that any one process loads,
    with the ``.metadata`` of the copy naming the copy.
    """
    primary, copy = tmp_path / "primary", tmp_path / "copy"

    def body(control: Control) -> Any:
        seal = saved(control, primary, node_local=True)
        source = session_at(control, primary, node_local=True)
        target = session_at(control, copy, node_local=False)
        result = copy_checkpoint(source, seal, target)
        # Back on the ranks that saved it, each gets its own.
        state = state_of(control.rank) | {"shared": torch.zeros(7), "own": {"rng": torch.zeros(3)}}
        found = locate(target, "step_7")
        load_at(state, target, Uri.parse(copy) / "step_7", found, strict=False)
        return len(seal.domains), result.mine.files, state["own"]["rng"].tolist()

    for rank, (domains, files, own) in enumerate(ran(simulate(4, body, nodes=NODES))):
        assert domains == 2
        assert files == 2  # what its own node holds, and not more than its share
        assert own == [rank] * 3
    check(loaded_by_stock(copy / "step_7", 4), 4)
    state = blank(4, 0)
    del state["own"]
    ckptfs.load(state, copy / "step_7", strict=False)
    check(state, 4)
    raw = (copy / "step_7/.metadata").read_bytes()
    assert str(copy).encode() in raw
    assert str(primary).encode() not in raw


def test_node_local_to_node_local_has_metadata_for_each_domain(tmp_path: Path) -> None:
    """Where the copy has several domains too, each node's metadata points to its own copies."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"

    def body(control: Control) -> bool:
        seal = saved(control, primary, node_local=True)
        source = session_at(control, primary, node_local=True)
        target = session_at(control, copy, node_local=True)
        copy_checkpoint(source, seal, target)
        # Every rank reads from its own node's disk alone: its shard, and what is replicated.
        state: dict[str, Any] = {"shared": torch.zeros(7), "lr": 0.0}
        state[f"w{control.rank}"] = torch.zeros(300_000)
        found = locate(target, "step_7")
        load_at(state, target, Uri.parse(copy) / "step_7", found, strict=False)
        mine = state_of(control.rank)
        return all(torch.equal(state[k], mine[k]) for k in (f"w{control.rank}", "shared")) and bool(
            state["lr"] == 0.5
        )

    assert ran(simulate(4, body, nodes=NODES)) == [True] * 4
    assert (copy / "a/step_7/.metadata").read_bytes() != (copy / "b/step_7/.metadata").read_bytes()


def test_a_node_that_came_later_takes_part_and_a_lost_one_is_named(tmp_path: Path) -> None:
    """Saved on two nodes: three can copy it; without one of the two none can, and the error says who
    had what.
    """
    primary = tmp_path / "primary"
    [seal, *_] = ran(simulate(4, lambda c: saved(c, primary, node_local=True), nodes=NODES))

    def copied_to(copy: Path) -> Callable[[Control], int]:
        def body(control: Control) -> int:
            source = session_at(control, primary, node_local=True)
            target = session_at(control, copy, node_local=False)
            return copy_checkpoint(source, seal, target).total.files

        return body

    more = simulate(5, copied_to(tmp_path / "more"), nodes=["new", *NODES])
    assert ran(more) == [8] * 5
    check(loaded_by_stock(tmp_path / "more/step_7", 4), 4)
    raw = (tmp_path / "more/step_7/ckptfs.json").read_bytes()
    assert decode_manifest(raw, tmp_path).world_size == 4  # who saved it, not who copied it
    fewer = simulate(2, copied_to(tmp_path / "fewer"), nodes=["a", "a"])
    for end in fewer:
        with pytest.raises(ckptfs.IncompleteCheckpointError, match=r"no rank can see .*host-b"):
            end.get()
    assert not (tmp_path / "fewer/step_7").exists()


def flip(file: Path) -> None:
    """One bit of a tensor's bytes."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def cut_off(file: Path) -> None:
    """Half of it."""
    os.truncate(file, file.stat().st_size // 2)


def lengthen(file: Path) -> None:
    """A byte that no rank wrote."""
    with file.open("ab") as more:
        more.write(b"x")


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a flipped bit": (flip, "distcp", "IntegrityError"),
    "longer": (lengthen, "distcp", "IntegrityError"),
    "truncated": (cut_off, "distcp", "IntegrityError"),
    "missing": (Path.unlink, "distcp", "IncompleteCheckpointError"),
    "digests of another file": (cut_off, "xxh3", "ManifestError"),
    "no digests": (Path.unlink, "xxh3", "IncompleteCheckpointError"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_source_is_never_committed(tmp_path: Path, damage: str) -> None:
    """The same typed error on both ranks names the file; the target has neither step nor attempt."""
    spoil, suffix, error = DAMAGE[damage]
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    [seal, _] = ran(simulate(2, lambda c: saved(c, primary, node_local=False)))
    [file] = (primary / "step_7").glob(f"*/__1_0.{suffix}")
    spoil(file)

    def body(control: Control) -> None:
        source = session_at(control, primary, node_local=False)
        copy_checkpoint(source, seal, session_at(control, copy, node_local=False))

    for end in simulate(2, body):
        with pytest.raises(ckptfs.CollectiveError) as told:
            end.get()
        [failure] = told.value.failures.values()
        assert failure.type == f"ckptfs.errors.{error}"
        assert file.name in failure.message
    assert ckptfs.list_checkpoints(copy) == []
    assert not list((copy / ".ckptfs/attempts").iterdir())


def test_metadata_that_points_elsewhere_is_not_copied(tmp_path: Path) -> None:
    """``.metadata`` is compared with its digest like everything else."""
    primary = tmp_path / "primary"
    [seal] = ran(simulate(1, lambda c: saved(c, primary, node_local=False)))
    [file] = (primary / "step_7").glob("*/.metadata")
    flip(file)

    def body(control: Control) -> None:
        source = session_at(control, primary, node_local=False)
        copy_checkpoint(source, seal, session_at(control, tmp_path / "copy", node_local=False))

    [end] = simulate(1, body)
    with pytest.raises(ckptfs.CollectiveError, match="the metadata differs from what was saved"):
        end.get()


def test_a_copy_is_exclusive_by_name_unless_the_run_is_held(tmp_path: Path) -> None:
    """Under another name next to the original; a second one is refused; a held run replaces it."""
    primary = tmp_path / "primary"

    def body(control: Control) -> None:
        seal = saved(control, primary, node_local=False)
        source = session_at(control, primary, node_local=False)
        copy_checkpoint(source, seal, source, name="kept", save_id="a-copy")
        with pytest.raises(ckptfs.CommitConflictError):
            copy_checkpoint(source, seal, source, name="kept", save_id="another")
        with claim(session_at(control, primary, node_local=False)) as run:
            copy_checkpoint(
                source, seal, run.session, name="kept", save_id="third", run=run.generation
            )

    ran(simulate(2, body))
    assert [(c.uri.name, c.save_id) for c in ckptfs.list_checkpoints(primary)][1] == (
        "kept",
        "third",
    )
    check(loaded_by_stock(primary / "kept", 2), 2)


def test_a_directory_of_plain_files_keeps_its_names(tmp_path: Path) -> None:
    """Copied as it is, and never replaced."""
    with ckptfs.checkpoint_dir(tmp_path / "run/model") as path:
        Path(path, "config.json").write_text("{}")

    def body(control: Control) -> None:
        source = session_at(control, tmp_path / "run", node_local=False)
        for _ in range(2):
            copy_checkpoint(
                source, seal_in(source, "model"), source, name="other", save_id=fresh_save_id()
            )

    [end] = simulate(1, body)
    with pytest.raises(ckptfs.CommitConflictError, match="other"):
        end.get()
    assert Path(tmp_path / "run/other/config.json").read_text() == "{}"


# -- who copies what, and what passes by ----------------------------------------------------------


def test_each_file_is_read_once_by_a_rank_that_sees_it_and_the_load_is_even() -> None:
    """Sharing out by size: no rank has more than the largest file above any that sees the same."""
    domains: dict[str | None, tuple[int, ...]] = {"a": (0, 1, 2), "b": (3,), None: (0, 1, 2, 3)}
    sizes = [900, 500, 400, 300, 300, 100, 7, 0]
    tasks = [
        CopyTask(FileRecord(f"s/{domain}{n}", size, domain))
        for domain in ("a", "b")
        for n, size in enumerate(sizes)
    ]
    tasks.append(CopyTask(FileRecord("s/all", 50, None)))
    shares = share_out(tasks, domains, 4)
    assert sorted(t.record.path for s in shares for t in s) == sorted(t.record.path for t in tasks)
    for rank, share in enumerate(shares):
        assert all(rank in domains[task.record.domain] for task in share)
    loads = [sum(task.size_bytes for task in share) for share in shares[:3]]
    assert max(loads) - min(loads) <= max(sizes)
    assert max(loads) == 900


def test_files_shared_between_saves_get_names_of_their_own() -> None:
    """Two writers may have used one name."""
    own = FileRecord("mine/__0_0.distcp", 1)
    shared = FileRecord("older/__0_0.distcp", 1, origin="older")
    assert new_path(own, "mine", "copy") == "copy/__0_0.distcp"
    assert new_path(shared, "mine", "copy") == "copy/older.__0_0.distcp"


class Windows(LocalStorage):
    """A directory that is read as a network store is: in windows of a size, several at once."""

    window_bytes = 1 << 20

    def open_read(self, key: str) -> LocalReader:
        reader = super().open_read(key)
        reader.window_bytes, reader.concurrency = self.window_bytes, 3
        return reader


@pytest.mark.parametrize("window", [4093, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 30])
def test_every_block_is_compared_however_the_file_is_read(tmp_path: Path, window: int) -> None:
    """Windows of any size, read ahead by threads: the bytes arrive in order, and a flipped bit in the
    first, a middle or the last block of an item is found.
    """
    storage = Windows(Uri.parse(tmp_path))
    storage.window_bytes = window
    storage.make_dir("a")
    storage.make_dir("b")
    state = {"big": torch.rand(700_000), "small": torch.rand(10), "odd": torch.rand(1000)}
    [seal] = ran(simulate(1, lambda c: _saved_as(c, tmp_path, state)))
    [file] = tmp_path.glob("run/step_1/*/__0_0.distcp")
    manifest = decode_manifest((tmp_path / "run/step_1/ckptfs.json").read_bytes(), tmp_path)
    source = Readable(storage, "run/step_1", 0)
    good = copy_share(tasks_of(manifest), source, Writable(storage, "a/", "new", "d"), seal.save_id)
    assert (tmp_path / "a/__0_0.distcp").read_bytes() == file.read_bytes()
    assert good.files[0].path == "new/__0_0.distcp"
    whole = file.read_bytes()
    items = decode_digests(file.with_suffix(".xxh3").read_bytes(), file).items
    for item in items:
        for at in {item.offset, item.offset + item.length // 2, item.offset + item.length - 1}:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ckptfs.IntegrityError, match="differ from what was written"):
                copy_share(
                    tasks_of(manifest), source, Writable(storage, "b/", "new", "d"), seal.save_id
                )
            assert not (tmp_path / "b/__0_0.distcp").exists()


def _saved_as(control: Control, place: Path, state: dict[str, Any]) -> Seal:
    session = session_at(control, place / "run", node_local=False)
    save_at(state, session, Uri.parse(place) / "run/step_1", SaveSpec("step_1", 1))
    return seal_in(session, "step_1")
