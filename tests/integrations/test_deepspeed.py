"""DeepSpeed: what its own checkpointing does, and what the same calls do with ours attached.

One launch of two ranks shows several things: DeepSpeed takes seconds to import.
"""

from __future__ import annotations

import functools
import hashlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.multiprocess.harness import Rank, describe, launch

pytestmark = pytest.mark.integrations

ENV = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
STAGES = (0, 1, 2, 3)


# -- inside the ranks ----------------------------------------------------------------------------


def _begin(rank: Rank, timeout_s: float = 400.0) -> None:
    """The group as a launcher of DeepSpeed makes it, without the compiler."""
    os.environ |= {"RANK": str(rank.number), "LOCAL_RANK": str(rank.number)}
    os.environ |= {"WORLD_SIZE": str(rank.size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(rank.port())}
    import deepspeed
    import torch.distributed as dist

    # An operator for inference would be compiled here, for a minute.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    rank.meet()
    dist.init_process_group(
        "gloo",
        store=rank.store(),
        rank=rank.number,
        world_size=rank.size,
        timeout=timedelta(seconds=timeout_s),
    )


def _engine(stage: int = 1) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def _train(engine: Any, steps: int = 1) -> None:
    import torch

    for _ in range(steps):
        torch.manual_seed(engine.global_steps)
        engine.backward(engine(torch.randn(2, 4)).pow(2).mean())
        engine.step()


def _state(engine: Any) -> str:
    """All that training changes on this rank."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves([engine.module_state_dict(), engine.optimizer.state_dict()])
    told = [leaf.tolist() for leaf in leaves if torch.is_tensor(leaf)]
    return hashlib.sha256(repr((engine.global_steps, told)).encode()).hexdigest()


def _weights(tensors: Any) -> str:
    told = {name: tensor.tolist() for name, tensor in sorted(tensors.items())}
    return hashlib.sha256(repr(told).encode()).hexdigest()


@contextmanager
def _full_disk(limit_bytes: int = 0) -> Iterator[None]:
    """Files of this process cannot grow beyond that, as on a disk that is full: a real OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _raised(call: Callable[[], object]) -> dict[str, Any]:
    """What a call raised, as the harness reports it; {} where it came back."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is the value
        return describe(error)
    return {}


def _attached(engine: Any, root: str, uri: str, **options: Any) -> Any:
    from ckptfs.integrations.deepspeed import CkptfsEngine

    return CkptfsEngine(root, uri, **options).attach(engine)


# -- the story -------------------------------------------------------------------------------------


def test_a_killed_run_resumes_to_the_same_state(store: Store, mode: Mode, cell: Cell) -> None:
    """DeepSpeed, killed at the commit of its fourth checkpoint, continues from the third."""
    with cell("DeepSpeed", store, mode):
        kill = Kill("create", "*.ckptfs/log/*", nth=6, rank=0)
        told = story("deepspeed", store, mode, kill=kill)
        assert told.resumed.resumed == "3"
        there = ckptfs.list_checkpoints(store.uri, storage_options=store.storage_options)
        assert [c.uri.name for c in there] == ["global_step5", "global_step6"]


# -- stock -----------------------------------------------------------------------------------------


def stock_ranks(rank: Rank) -> dict[str, Any]:
    """Everything that goes wrong without us; the last of it breaks the group."""
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    base = Path(rank.args["base"])
    _begin(rank, timeout_s=4.0)
    told: dict[str, Any] = {}

    class Refusing(TorchCheckpointEngine):
        def commit(self, info: Any) -> bool:
            return False

    engine = _engine(stage=0)
    engine.checkpoint_engine = Refusing()
    told["commit said no"] = engine.save_checkpoint(str(base / "refused"))

    # Rank 1 is on another node; its disk cannot have the directory.
    mine = base / f"node{rank.number}"
    mine.mkdir()
    if rank.number == 1:
        (mine / "global_step0").write_text("a file")
    engine.checkpoint_engine = TorchCheckpointEngine()
    told["no directory"] = engine.save_checkpoint(str(mine))

    engine = _engine(stage=1)
    root = str(base / "emptied")
    engine.save_checkpoint(root, tag="good")

    class Filling(TorchCheckpointEngine):
        def commit(self, info: Any) -> bool:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return True

    engine.checkpoint_engine = Filling()
    with _full_disk(resource.RLIM_INFINITY):
        told["latest"] = _raised(lambda: engine.save_checkpoint(root, tag="next"))
    if rank.number == 0:
        dist.barrier()  # the one that rank 1 waits in
    told["emptied"] = Path(root, "latest").read_text()
    told["after"] = _raised(lambda: _engine(stage=1).load_checkpoint(root))

    engine = _engine(stage=1)
    root = str(base / "torn")
    engine.save_checkpoint(root, tag="last")
    called: list[str] = []

    class Watched(TorchCheckpointEngine):
        def commit(self, info: Any) -> bool:
            called.append(info.tag)
            return True

    engine.checkpoint_engine = Watched()
    with _full_disk(1000 if rank.number == 0 else resource.RLIM_INFINITY):
        told["failed"] = _raised(lambda: engine.save_checkpoint(root, tag="last"))
    told["committed"] = called
    if rank.number == 0:
        rank.hold("looked")  # alive, and out of save_checkpoint: as a loop that runs on
    return told


def test_what_stock_deepspeed_does(tmp_path: Path) -> None:
    """Stock DeepSpeed 0.19 ignores a refused commit and an OSError, empties `latest` on a full disk,
    leaves a torn checkpoint under it, and lets rank 1 hang where rank 0 failed.
    """
    with launch(stock_ranks, 2, args={"base": str(tmp_path)}, env=ENV, warm=False) as ranks:
        second = ranks.results(ranks=[1])[0]
        ranks.release("looked", rank=0)
        told = [ranks.results(ranks=[0])[0].value, second.value]
    assert told[0] is not None, second.log
    assert [one["commit said no"] for one in told] == [True, True]
    assert [one["no directory"] for one in told] == [True, True]
    assert (tmp_path / "node1" / "global_step0").read_text() == "a file"
    assert "OSError" in told[0]["latest"]["type"]
    assert [one["emptied"] for one in told] == ["", ""]  # it said "good"
    assert all(one["after"] for one in told)
    assert told[0]["failed"]["type"]
    assert told[0]["committed"] == []
    assert told[1]["committed"] == ["last"]  # a commit, although rank 0 has failed
    assert "imed out" in told[1]["failed"]["message"]  # in the barrier, until the group's timeout
    assert (tmp_path / "torn" / "latest").read_text() == "last"
    assert (tmp_path / "torn" / "last" / "mp_rank_00_model_states.pt").stat().st_size <= 1000


# -- ours: every stage, every reader ---------------------------------------------------------------


def readers_ranks(rank: Rank) -> dict[str, Any]:
    """Save with ours and with stock, load with both, at each stage of ZeRO; each rank on its own node."""
    import torch.distributed as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    base = Path(rank.args["base"])
    _begin(rank)
    told: dict[str, Any] = {}
    for stage in STAGES:
        uri, local = str(base / f"run{stage}"), base / f"disk{rank.number}" / str(stage)
        engine = _engine(stage)
        with _attached(engine, str(local / "a"), uri, keep_latest=2):
            assert engine.load_checkpoint(str(local / "a")) == (None, None)
            for _ in range(3):
                _train(engine)
                engine.save_checkpoint(str(local / "a"), client_state={"mark": stage})
        state = _state(engine)
        root = sorted(os.listdir(local / "a"))

        again = _engine(stage)
        with _attached(again, str(local / "b"), uri):
            path, client = again.load_checkpoint(str(local / "b"))
        found = [_state(again) == state, client["mark"] == stage, path.startswith(str(local / "b"))]

        older = _engine(stage)
        with _attached(older, str(local / "b"), uri):
            older.load_checkpoint(str(local / "b"), tag="global_step2")
        found.append(older.global_steps == 2)

        stock = _engine(stage)
        stock.load_checkpoint(uri)  # the run itself is what DeepSpeed would have made
        found.append(_state(stock) == state)
        if stage and rank.number == 0:
            whole = get_fp32_state_dict_from_zero_checkpoint(uri)
            found.append(sum(tensor.numel() for tensor in whole.values()) == 4 * 8 + 8 + 8 * 2 + 2)
            if stage < 3:
                found.append(_weights(whole) == _weights(stock.module_state_dict()))

        other = _engine(stage)
        with _attached(other, str(local / "b"), str(base / f"other{stage}")):
            told["other"] = _raised(functools.partial(other.load_checkpoint, str(local / "b")))
        found.append(other.global_steps == 0)

        plain = str(base / f"stock{stage}")
        stock.save_checkpoint(plain)
        dist.barrier()
        ours = _engine(stage)
        with _attached(ours, str(local / "c"), plain):
            ours.load_checkpoint(str(local / "c"))
            found.append(_state(ours) == state)
            _train(ours)
            ours.save_checkpoint(str(local / "c"))  # and the run continues next to what stock wrote
        told[str(stage)] = {"found": found, "root": root}
    return told


@pytest.fixture(scope="module")
def read_by_all(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where the ranks saved, and what they found."""
    base, nodes = tmp_path_factory.mktemp("readers"), ["a", "b"]
    args = {"base": str(base)}
    with launch(readers_ranks, 2, args=args, nodes=nodes, env=ENV, warm=False) as ranks:
        return base, ranks.values()


@pytest.mark.parametrize("stage", STAGES)
def test_every_reader_reads_every_writer(
    read_by_all: tuple[Path, list[dict[str, Any]]], stage: int
) -> None:
    """What ours wrote, ours reads on an empty machine, also by tag, and so do stock DeepSpeed and
    zero_to_fp32; what stock wrote, ours reads and continues. Bit by bit, on both ranks.
    """
    base, told = read_by_all
    for one in told:
        assert all(one[str(stage)]["found"]), one
    run = base / f"run{stage}"
    assert (run / "latest").read_text() == "global_step3"
    assert [c.uri.name for c in ckptfs.list_checkpoints(run)] == ["global_step2", "global_step3"]
    mixed = ckptfs.list_checkpoints(base / f"stock{stage}")
    assert mixed[-1].uri.name == "global_step4"
    assert (base / f"stock{stage}" / "latest").read_text() == "global_step4"


def test_a_new_run_does_not_go_on_from_another(
    read_by_all: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Nothing was saved at its URI, and the root still holds the newest of another run: a StateError on
    all ranks, where stock DeepSpeed would load that.
    """
    _, told = read_by_all
    for one in told:
        for failure in one["other"]["data"]["failures"].values():
            assert failure["type"] == "ckptfs.errors.StateError"


@pytest.mark.parametrize("stage", STAGES)
def test_root_holds_the_newest_only(
    read_by_all: tuple[Path, list[dict[str, Any]]], stage: int
) -> None:
    """After each commit the root on each node's own disk holds one checkpoint and its `latest`, whatever
    retention keeps.
    """
    base, told = read_by_all
    for rank, one in enumerate(told):
        tags = [name for name in one[str(stage)]["root"] if name.startswith("global_step")]
        assert tags == ["global_step3"]
        root = base / f"disk{rank}" / str(stage) / "a"
        assert (root / "latest").read_text() == "global_step3"


# -- ours: what goes wrong -------------------------------------------------------------------------


def failing_ranks(rank: Rank) -> dict[str, Any]:
    """Failures of one rank at every place of a save, each followed by a save that is whole."""
    base = Path(rank.args["base"])
    _begin(rank)
    told: dict[str, Any] = {}
    root, uri = str(base / "root"), str(base / "run")
    engine = _engine(1)
    store = _attached(engine, root, uri)
    _train(engine)
    engine.save_checkpoint(root)

    def attempt(name: str, failing: int | None, limit_bytes: int = 1000, **options: Any) -> None:
        full = rank.number == failing
        with _full_disk(limit_bytes if full else resource.RLIM_INFINITY):
            told[name] = _raised(lambda: engine.save_checkpoint(root, **options))

    _train(engine)
    attempt("rank 0 writes", 0)
    attempt("rank 1 writes", 1)
    script = Path(root, "zero_to_fp32.py")
    if rank.number == 0:
        script.unlink()
        script.mkdir()  # what DeepSpeed copies on rank 0 alone, behind the back of its engine
    attempt("rank 0 copies", None)
    if rank.number == 0:
        script.rmdir()
    told["latest then"] = Path(uri, "latest").read_text()
    attempt("then", None)
    attempt("again", None)
    attempt("tag", None, tag="best")
    attempt("tags", None, tag=f"global_step{7 + rank.number}")
    told["16 bit"] = _raised(lambda: engine.save_16bit_model(root, "weights.bin"))
    told["elsewhere"] = _raised(lambda: engine.save_checkpoint(str(base / "plain"), tag="any"))
    told["steps"] = store.manager.steps
    store.close()

    # The root of rank 0 cannot be made: DeepSpeed would raise there, before a barrier.
    Path(base, "file").write_text("")
    blocked = str(base / "file" / "root")
    engine = _engine(1)
    store = _attached(engine, blocked, uri)
    told["no root"] = _raised(lambda: engine.save_checkpoint(blocked))
    store.close()
    return told | _in_the_background(base, rank.number)


def _in_the_background(base: Path, rank: int) -> dict[str, Any]:
    """The upload of the first save fails behind training's back."""
    told: dict[str, Any] = {}
    engine = _engine(1)
    os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:write:*zero_pp_rank_1_*:1"
    root, uri = str(base / "aside"), f"faults+file://{base}/later"
    store = _attached(engine, root, uri, mode="async", keep_latest=1)
    _train(engine)
    told["returns"] = _raised(lambda: engine.save_checkpoint(root))
    _train(engine)
    told["next"] = _raised(lambda: engine.save_checkpoint(root))
    if rank == 0:
        store.save_object("driver.pt", {"epoch": 3})
    told["retry"] = _raised(lambda: engine.save_checkpoint(root))
    told["end"] = _raised(store.close)
    told["driver"] = ckptfs.load_object(f"{base}/later/global_step2/driver.pt")
    return told


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the ranks saved, and what each call raised."""
    base = tmp_path_factory.mktemp("failing")
    with launch(failing_ranks, 2, args={"base": str(base)}, env=ENV, warm=False) as ranks:
        return base, ranks.values()


def _same(told: list[Any], name: str) -> dict[str, Any]:
    """What both ranks raised, which has to be the same."""
    both = [one[name] for one in told]
    assert both[0].get("message") == both[1].get("message"), both
    found: dict[str, Any] = both[0]
    return found


def test_a_failure_of_one_rank_reaches_all(failed: tuple[Path, list[Any]]) -> None:
    """Wherever a save fails, on whichever rank, all ranks raise the same typed error, nothing that was
    committed is touched, and the next save is whole.
    """
    base, told = failed
    for name, rank in [("rank 0 writes", "0"), ("rank 1 writes", "1"), ("rank 0 copies", "0")]:
        error = _same(told, name)
        assert error["type"] == "ckptfs.errors.CollectiveError", error
        assert list(error["data"]["failures"]) == [rank]
    assert told[0]["latest then"] == "global_step1"
    assert _same(told, "then") == {}
    assert told[0]["steps"] == [1, 2]
    assert (base / "run" / "latest").read_text() == "global_step2"
    error = _same(told, "no root")
    assert error["data"]["failures"]["0"]["type"] == "builtins.NotADirectoryError"


def test_what_cannot_be_committed_is_refused(failed: tuple[Path, list[Any]]) -> None:
    """A tag that is committed, that the template does not make or that ranks do not share is a typed
    error on all ranks; weights for export and other directories stay DeepSpeed's own business.
    """
    base, told = failed
    assert _same(told, "again")["type"] == "ckptfs.errors.CommitConflictError"
    assert _same(told, "tag")["type"] == "ckptfs.errors.StateError"
    assert _same(told, "tags")["type"] == "ckptfs.errors.StateError"
    assert _same(told, "16 bit") == {}
    assert (base / "root" / "weights.bin").exists()
    assert _same(told, "elsewhere") == {}
    assert (base / "plain" / "latest").read_text() == "any"


def test_a_failure_in_the_background_is_raised_by_the_next_save(
    failed: tuple[Path, list[Any]],
) -> None:
    """What fails behind an asynchronous save's back is raised on all ranks at the next save, and the
    save after that is committed, with the object that was put next to it.
    """
    base, told = failed
    assert _same(told, "returns") == {}
    assert _same(told, "next")["type"].startswith("ckptfs.errors.")
    assert "No space left" in _same(told, "next")["message"]
    assert _same(told, "retry") == {}
    assert _same(told, "end") == {}
    assert [c.step for c in ckptfs.list_checkpoints(base / "later")] == [2]
    assert told[0]["driver"] == {"epoch": 3}
