"""ckptfs.save and ckptfs.load by 2, 4 and 8 real ranks: every sharding, every way to fail together.

round trips   save on n ranks, load on m with another mesh; 0.5 GB on eight ranks
together      what one rank meets is the same error on all; the old checkpoint stays
alone         the user's group is never used: it may be busy, broken or of any backend
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, Result, launch

BIG_BYTES = 1 << 29


# -- inside the ranks ----------------------------------------------------------------------------


def sharded(rows: int, columns: int, seed: int, mesh_shape: list[int], placements: str) -> Any:
    """A DTensor with elements that say where they are; no rank ever holds the whole.

    placements: "0", "1" or "r" for each dimension of the mesh.
    """
    import math

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).reshape(mesh_shape))
    places = [Replicate() if p == "r" else Shard(int(p)) for p in placements]
    shape, offset = compute_local_shape_and_global_offset((rows, columns), mesh, places)
    along = [torch.arange(n, dtype=torch.float32) + at for n, at in zip(shape, offset, strict=True)]
    local = along[0][:, None] * 4099 + along[1] + seed
    return DTensor.from_local(
        local, mesh, places, run_check=False, shape=torch.Size((rows, columns)), stride=(columns, 1)
    )


def build(rank: Rank, mesh: list[int], placements: str, rows: int, columns: int) -> dict[str, Any]:
    """The state under test: one sharded tensor, replicated and plain leaves, one value per rank."""
    import torch

    return {
        "model": {
            "w": sharded(rows, columns, 0, mesh, placements),
            "uneven": sharded(7, 3, 1, mesh, placements),
            "bias": torch.arange(11) * 3,
        },
        "lr": 0.125,
        "step": 40,
        "own": {"seed": 1000 + rank.number, "rng": torch.full((5,), rank.number)},
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same shapes and shards with nothing in them."""
    import torch

    for key in ("w", "uneven"):
        state["model"][key].to_local().zero_()
    state["model"]["bias"].zero_()
    return state | {"lr": 0.0, "step": 0, "own": {"seed": -1, "rng": torch.full((5,), -1)}}


def same(got: dict[str, Any], expected: dict[str, Any], *, own: bool) -> bool:
    """Bit for bit, by this rank's shards."""
    import torch

    tensors = [
        torch.equal(got["model"][k].to_local(), expected["model"][k].to_local())
        for k in ("w", "uneven")
    ]
    mine = not own or (
        got["own"]["seed"] == expected["own"]["seed"]
        and torch.equal(got["own"]["rng"], expected["own"]["rng"])
    )
    return (
        all(tensors)
        and torch.equal(got["model"]["bias"], expected["model"]["bias"])
        and (got["lr"], got["step"]) == (expected["lr"], expected["step"])
        and mine
    )


def save_it(rank: Rank) -> dict[str, Any]:
    """Save, load back on the same ranks; what the result said."""
    import ckptfs

    rank.init_group()
    shape = rank.args["mesh"], rank.args["placements"], rank.args["rows"], rank.args["columns"]
    state = build(rank, *shape)
    result = ckptfs.save(state, rank.args["uri"], per_rank=["own.*"])
    with_own = same(load_into(rank, blank(build(rank, *shape))), state, own=True)
    return {
        "same": with_own,
        "save_id": result.save_id,
        "ranks": len(result.per_rank),
        "mine": result.mine.size_bytes,
        "total": result.total.size_bytes,
        "payload": result.total.payload_bytes,
        "speed": result.total.mib_per_s,
    }


def load_into(rank: Rank, state: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint of the arguments; only other ranks' own values may be left out."""
    import ckptfs

    result = ckptfs.load(state, rank.args["uri"], strict="own" in state)
    assert result.verified
    assert result.missing_keys == ()
    assert all(key.startswith("own@rank") for key in result.unexpected_keys)
    return state


def load_it(rank: Rank) -> bool:
    """Load on other ranks and another mesh; keys of single ranks are not asked for."""
    rank.init_group()
    shape = rank.args["mesh"], rank.args["placements"], rank.args["rows"], rank.args["columns"]
    expected = build(rank, *shape)
    state = blank(build(rank, *shape))
    del state["own"]
    return same(load_into(rank, state), expected, own=False)


def small_state(rank: Rank, value: float) -> dict[str, Any]:
    """One sharded and one plain tensor that tell ``value``."""
    import torch

    w = sharded(rank.size * 2, 4, 0, [rank.size], "0")
    w.to_local().fill_(float(value))
    return {"w": w, "b": torch.full((3,), float(value))}


def value_at(rank: Rank, uri: str) -> float:
    """The one value that the checkpoint has on this rank; collective."""
    import ckptfs

    state = small_state(rank, -1)
    ckptfs.load(state, uri)
    found = {*state["w"].to_local().flatten().tolist(), *state["b"].tolist()}
    assert len(found) == 1, f"a mix: {found}"
    return float(found.pop())


def failure(call: Callable[[], object]) -> dict[str, Any]:
    """How a collective call failed on this rank."""
    from ckptfs.errors import CkptfsError
    from tests.multiprocess.harness import describe

    try:
        call()
    except CkptfsError as error:
        told = describe(error)
        return {
            "type": told["type"].rsplit(".", 1)[-1],
            "text": str(error),
            "failures": {
                rank: [f["type"].rsplit(".", 1)[-1], f["message"]]
                for rank, f in told["data"].get("failures", {}).items()
            },
        }
    return {"type": None, "text": "", "failures": {}}


@contextlib.contextmanager
def fault_on(rank: Rank, number: int, fault: str) -> Iterator[None]:
    """The fault on one rank, for as long as the block lasts."""
    if rank.number == number:
        os.environ["CKPTFS_TEST_FAULT"] = fault
    try:
        yield
    finally:
        os.environ.pop("CKPTFS_TEST_FAULT", None)


def nothing_to_save(rank: Rank, run: str) -> Any:
    """Ranks 1 and up have an empty state; only rank 0 asks for what is there."""
    import torch

    import ckptfs

    first = rank.number == 0
    result = ckptfs.save({"only": torch.ones(9)} if first else {}, f"{run}/step_1")
    state: dict[str, Any] = {"only": torch.zeros(9)} if first else {}
    ckptfs.load(state, f"{run}/step_1")
    return [result.mine.files, state["only"].tolist() if first else [1.0] * 9]


def different_uris(rank: Rank, run: str) -> Any:
    """Rank 1 was given another name."""
    import ckptfs

    uri = f"{run}/step_{min(rank.number, 1)}"
    return [
        failure(lambda: ckptfs.save({"x": 1}, uri)),
        failure(lambda: ckptfs.load({"x": 1}, uri)),
        os.path.exists(run),
    ]


def different_values(rank: Rank, run: str) -> Any:
    """A seed that differs by rank, by default; then on request."""
    import ckptfs

    state = {"lr": 0.5, "own": {"seed": rank.number // 2}}
    failed = failure(lambda: ckptfs.save(state, f"{run}/step_1"))
    there = [c.uri.name for c in ckptfs.list_checkpoints(run)]
    ckptfs.save(state, f"{run}/step_1", per_rank=["own.*"])
    return [failed, there, [c.uri.name for c in ckptfs.list_checkpoints(run)]]


def no_space_on_one_rank(rank: Rank, run: str) -> Any:
    """The disk is full for rank 2's data, for a new name and for the replacement of an old one."""
    import ckptfs

    bad = f"faults+file://{run}"
    ckptfs.save(small_state(rank, 1), f"{run}/step_1")
    told = []
    for name, how in (("step_1", "replace"), ("step_2", "error")):
        with fault_on(rank, 2, "fail=ENOSPC:write:*__2_0.distcp:1"):
            told.append(
                failure(
                    lambda name=name, how=how: ckptfs.save(  # type: ignore[misc]
                        small_state(rank, 2), f"{bad}/{name}", if_exists=how
                    )
                )
            )
    found = [value_at(rank, f"{run}/step_1"), [c.uri.name for c in ckptfs.list_checkpoints(run)]]
    left = sorted(os.listdir(f"{run}/.ckptfs/attempts"))
    ckptfs.save(small_state(rank, 3), f"{run}/step_2")
    return [told, found, left, value_at(rank, f"{run}/step_2")]


def read_fails_on_one_rank(rank: Rank, run: str) -> Any:
    """Rank 1 cannot read: an I/O error in the middle of a load."""
    import ckptfs

    ckptfs.save(small_state(rank, 1), f"{run}/step_1")
    with fault_on(rank, 1, "fail=EIO:read_into:*:1"):
        told = failure(lambda: ckptfs.load(small_state(rank, 0), f"faults+file://{run}/step_1"))
    return [told, value_at(rank, f"{run}/step_1")]


def own_group_untouched(rank: Rank, run: str) -> Any:
    """Every collective of torch.distributed raises while we save and load."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import ckptfs

    state, into = small_state(rank, 5), small_state(rank, -1)
    names = [n for n in COLLECTIVES if hasattr(c10d, n)]
    kept = {n: getattr(c10d, n) for n in names}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective on the user's group")

    try:
        for name in names:
            setattr(c10d, name, refuse)
            setattr(dist, name, refuse)
        with ckptfs.prepare_run(run) as held:
            ckptfs.save(state, f"{run}/step_1", run=held)
            ckptfs.save(state, f"{run}/step_1", run=held, if_exists="replace")
        ckptfs.load(into, f"{run}/step_1")
        with ckptfs.checkpoint_dir(f"{run}/d_1") as path:
            Path(path, f"{rank.number}").write_text("x")
        ckptfs.ensure_dir(f"{run}/logs")
    finally:
        for name, function in kept.items():
            setattr(c10d, name, function)
            setattr(dist, name, function)
    return [len(names) > 10, into["b"].tolist()]


COLLECTIVES = [
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
    "new_group",
    "_new_group_with_tag",
    "split_group",
    "new_subgroups",
]


def saves_beside_training(rank: Rank, run: str) -> Any:
    """Needs row 11: a thread saves while the main thread reduces on the same group."""
    import torch
    import torch.distributed as dist

    import ckptfs

    done = threading.Event()
    errors: list[str] = []
    saved: list[int | None] = []

    def save() -> None:
        try:
            for step in range(3):
                result = ckptfs.save(states[step], f"{run}/step_{step}")
                saved.append(result.step)
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            errors.append(repr(error))
        finally:
            done.set()

    states = [small_state(rank, step) for step in range(3)]  # DTensors use the group: made here
    thread = threading.Thread(target=save)
    thread.start()
    loops = 0
    while True:
        # The ranks agree when to stop by the very collective that they train with.
        busy = torch.tensor([0.0 if done.is_set() else 1.0, 1.0])
        dist.all_reduce(busy)
        assert busy[1] == rank.size
        loops += 1
        if busy[0] == 0:
            break
    thread.join()
    return [errors, saved, loops > 1, [value_at(rank, f"{run}/step_{s}") for s in range(3)]]


def relative_paths(rank: Rank, root: str) -> Any:
    """Every rank works in a directory of its own, and names the run by one relative path."""
    from torch.distributed.checkpoint import save as stock_save

    import ckptfs

    own, before = f"{root}/{rank.number}", os.getcwd()
    os.makedirs(own)
    os.chdir(own)
    try:
        ckptfs.save(small_state(rank, 1), "run/step_1")
        ckptfs.async_save(small_state(rank, 2), "run/step_2").result()
        stock_save(small_state(rank, 3), storage_writer=ckptfs.StorageWriter("run/step_3"))
        with ckptfs.prepare_run("run") as run:
            ckptfs.save(small_state(rank, 4), "run/step_4", run=run)
            held = small_state(rank, -1)
            ckptfs.load(held, "run/step_4", run=run)
        with ckptfs.CheckpointManager("run") as manager:
            manager.save(5, small_state(rank, 5))
        found = [value_at(rank, f"run/step_{step}") for step in range(1, 6)]
        return [found, held["b"].tolist(), os.listdir(own)]
    finally:
        os.chdir(before)


SCENARIOS: list[Callable[[Rank, str], Any]] = [
    nothing_to_save,
    different_uris,
    relative_paths,
    different_values,
    no_space_on_one_rank,
    read_fails_on_one_rank,
    own_group_untouched,
    saves_beside_training,
]


def run_scenarios(rank: Rank) -> dict[str, Any]:
    """All of them in order, on one group: that each works after the one before is shown too."""
    rank.init_group()
    return {s.__name__: s(rank, f"{rank.args['root']}/{s.__name__}") for s in SCENARIOS}


def without_a_group(rank: Rank) -> Any:
    """Launched as torchrun does, and init_process_group was forgotten."""
    import ckptfs

    uri = rank.args["uri"]
    return [failure(lambda: ckptfs.save({"x": 1}, uri)), failure(lambda: ckptfs.load({}, uri))]


# -- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "mesh", "placements", "other"),
    [
        (2, [2], "1", (4, [2, 2], "01")),
        (4, [2, 2], "0r", (2, [2], "r")),
    ],
)
def test_saved_by_some_ranks_loads_by_others(
    tmp_path: Path, size: int, mesh: list[int], placements: str, other: tuple[int, list[int], str]
) -> None:
    """DTensors on 1-D and 2-D meshes, replicated and per-rank leaves, then another sharding."""
    round_trip(tmp_path, size, (mesh, placements), other, (24, 10))


def test_half_a_gigabyte_by_eight_ranks(tmp_path: Path) -> None:
    """0.5 GB on eight ranks, loaded bit for bit on the same ones and on two."""
    values = round_trip(tmp_path, 8, ([4, 2], "01"), (2, [2], "1"), (BIG_BYTES // 4 // 4096, 4096))
    assert values[0]["payload"] >= BIG_BYTES
    assert max(v["mine"] for v in values) < BIG_BYTES / 8 * 1.05


def round_trip(
    tmp_path: Path,
    size: int,
    saved_as: tuple[list[int], str],
    loaded_as: tuple[int, list[int], str],
    shape: tuple[int, int],
) -> list[Any]:
    """Save and load on some ranks, load on others; what the results said."""
    common = {"uri": str(tmp_path / "run" / "step_40"), "rows": shape[0], "columns": shape[1]}
    mesh, placements = saved_as
    with launch(save_it, size, args={**common, "mesh": mesh, "placements": placements}) as ranks:
        values = ranks.values()
    assert [v["same"] for v in values] == [True] * size
    assert [v["ranks"] for v in values] == [size] * size
    assert len({v["save_id"] for v in values}) == 1
    assert len({v["total"] for v in values}) == 1
    # Replicated shards and plain leaves are written once: what is there is what was counted.
    data = list((tmp_path / "run" / "step_40" / values[0]["save_id"]).glob("__*"))
    assert (
        sum(f.stat().st_size for f in data) == values[0]["total"] == sum(v["mine"] for v in values)
    )
    elements = shape[0] * shape[1] + 21
    assert values[0]["payload"] < elements * 4 + size * 2000 + 10_000, "written more than once"
    assert values[0]["speed"] > 0
    count, mesh, placements = loaded_as
    with launch(load_it, count, args={**common, "mesh": mesh, "placements": placements}) as ranks:
        assert ranks.values() == [True] * count
    return values


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every scenario's result on each of four ranks."""
    root = tmp_path_factory.mktemp("scenarios")
    with launch(run_scenarios, 4, args={"root": str(root)}) as ranks:
        results: list[Result] = ranks.results()
    assert [r.error and r.error["traceback"] for r in results] == [None] * 4
    return [r.value for r in results]


def test_ranks_with_nothing_to_save_take_part(outcomes: Any) -> None:
    """An empty state makes no file, and the others' are committed and loaded."""
    told = [o["nothing_to_save"] for o in outcomes]
    assert [files for files, _ in told] == [2, 0, 0, 0]
    assert all(values == [1.0] * 9 for _, values in told)


def test_different_uris_are_refused_on_all_ranks(outcomes: Any) -> None:
    """UriError that names both and who has them; nothing is made."""
    for outcome in outcomes:
        *failed, made = outcome["different_uris"]
        assert not made
        for told in failed:
            assert told["type"] == "UriError"
            assert "step_0 on rank 0" in told["text"]
            assert "step_1 on rank 1" in told["text"]


def test_ranks_in_different_directories_mean_the_one_of_rank_0(outcomes: Any) -> None:
    """A relative path is made absolute by rank 0 alone, for every way to save and load."""
    for number, outcome in enumerate(outcomes):
        found, held, made = outcome["relative_paths"]
        assert (found, held) == ([1.0, 2.0, 3.0, 4.0, 5.0], [4.0] * 3)
        assert made == ([] if number else ["run"])


def test_a_value_that_differs_unasked_is_refused_on_all_ranks(outcomes: Any) -> None:
    """StateError with the key and the ranks before a file is made; per_rank= is the way."""
    for outcome in outcomes:
        failed, before, after = outcome["different_values"]
        assert failed["type"] == "StateError"
        for word in ("own.seed", "2", "3", "per_rank"):
            assert word in failed["text"]
        assert (before, after) == ([], ["step_1"])


def test_no_space_on_one_rank_is_told_on_all_and_the_old_state_stands(outcomes: Any) -> None:
    """CollectiveError naming rank 2, old checkpoint whole, nothing new visible, nothing left."""
    for outcome in outcomes:
        told, found, left, later = outcome["no_space_on_one_rank"]
        for failed in told:
            assert failed["type"] == "CollectiveError"
            assert list(failed["failures"]) == ["2"]
            assert failed["failures"]["2"][0] == "NoSpaceError"
            assert "rank 2" in failed["text"]
            assert "__2_0.distcp" in failed["text"]
        assert found == [1.0, ["step_1"]]
        assert left == []
        assert later == 3.0


def test_a_read_that_fails_on_one_rank_fails_the_load_on_all(outcomes: Any) -> None:
    """CollectiveError naming rank 1 and the file; the next load is whole."""
    for outcome in outcomes:
        told, later = outcome["read_fails_on_one_rank"]
        assert told["type"] == "CollectiveError"
        assert list(told["failures"]) == ["1"]
        assert ".distcp" in told["text"]
        assert later == 1.0


def test_the_users_group_is_not_used(outcomes: Any) -> None:
    """Claim, save, replace, load, directories: all with every collective of torch forbidden."""
    assert [o["own_group_untouched"] for o in outcomes] == [[True, [5.0] * 3]] * 4


def test_row11_a_thread_saves_while_the_main_thread_trains(outcomes: Any) -> None:
    """all_reduce in a loop on the same group: neither waits for the other, all saves are whole."""
    for outcome in outcomes:
        assert outcome["saves_beside_training"] == [[], [0, 1, 2], True, [0.0, 1.0, 2.0]]


def test_ranks_without_a_group_are_told_to_make_one(tmp_path: Path) -> None:
    """WORLD_SIZE says two ranks: StateError with the call to add, instead of two lone saves."""
    with launch(
        without_a_group, 2, args={"uri": str(tmp_path / "run" / "step_1")}, launcher_env=True
    ) as ranks:
        values = ranks.values()
    for told in [told for value in values for told in value]:
        assert told["type"] == "StateError"
        assert "init_process_group" in told["text"]
    assert not (tmp_path / "run").exists()
