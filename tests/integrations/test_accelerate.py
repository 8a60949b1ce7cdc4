"""Accelerate: save_state at a URI, and what stock save_state does with its own directories.

One group of two processes saves and loads for all claims but the story's; what it saw is asserted one
claim at a time.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, each_claim, error_of, story
from tests.multiprocess.harness import Rank, launch

pytestmark = pytest.mark.integrations


def test_a_killed_run_resumes_to_the_same_state(store: Store, mode: Mode, cell: Cell) -> None:
    """A run killed just before the commit of its fourth save_state is written continues from the third:
    parameters, optimizer, schedule, random numbers and the data's position are those of an
    undisturbed run.
    """
    with cell("Accelerate", store, mode):
        kill = Kill("create", "*.ckptfs/log/*", nth=6, rank=0)
        told = story("accelerate", store, mode, kill=kill)
        assert told.resumed.resumed == "3"


# -- two processes --------------------------------------------------------------------------------


class Counter:
    """A custom object; it refuses to be saved on some ranks."""

    def __init__(self) -> None:
        self.value = 0
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        """Its state."""
        if self.fails:
            raise OSError("this rank cannot")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it back."""
        self.value = state["value"]


def saves_and_loads(rank: Rank) -> object:
    """What every rank saw, by claim."""
    rank.init_group()
    claims: dict[str, Callable[[Rank, Path], object]] = {
        "stock total limit": _stock_total_limit,
        "stock one rank": _stock_one_rank,
        "stock uri": _stock_uri,
        "stock random": _stock_random,
        "failing": _failing,
        "round trip": _round_trip,
        "in the background": _in_the_background,
        "fsdp": _fsdp,
        "bad": _bad,
    }
    return each_claim(rank, claims, Path(rank.args["top"]))


def _accelerator(**project: Any) -> tuple[Any, Any, Counter]:
    """A fresh one, with a model, an optimizer and a custom object."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    set_seed(1)
    configuration = ProjectConfiguration(**project) if project else None
    accelerator = Accelerator(cpu=True, project_config=configuration)
    net = torch.nn.Linear(4, 4)
    net, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(counter := Counter())
    return accelerator, net, counter


def _step(accelerator: Any, net: Any) -> None:
    import torch

    accelerator.backward(net(torch.randn(2, 4)).square().mean())
    for optimizer in accelerator._optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _numbers(net: Any) -> list[float]:
    return [float(v) for p in net.parameters() for v in p.detach().flatten()]


def _steps(run: Path) -> list[int]:
    return ckptfs.DirectoryManager(run, name="checkpoint_{N}").steps


def _wait() -> None:
    import torch.distributed as dist

    dist.barrier()


def _stock_total_limit(rank: Rank, place: Path) -> object:
    naming = {"automatic_checkpoint_naming": True, "total_limit": 1}
    accelerator, _, counter = _accelerator(project_dir=str(place), **naming)
    accelerator.save_state()
    _wait()
    counter.fails = True
    said = error_of(accelerator.save_state)
    _wait()
    left = {p.name: sorted(os.listdir(p)) for p in (place / "checkpoints").iterdir()}
    return {"said": said, "left": left}


def _stock_one_rank(rank: Rank, place: Path) -> object:
    accelerator, _, counter = _accelerator()
    counter.fails = rank.number == 1
    return error_of(lambda: accelerator.save_state(str(place)))


def _stock_uri(rank: Rank, place: Path) -> object:
    place.mkdir(exist_ok=True)
    accelerator, _, _ = _accelerator()
    with contextlib.chdir(place):
        accelerator.save_state("s3://bucket/run")
        _wait()
        return sorted(os.listdir("s3:/bucket/run"))


def _stock_random(rank: Rank, place: Path) -> object:
    accelerator, _, _ = _accelerator()
    accelerator.save_state(str(place))
    _wait()
    if rank.number == 1:
        (place / "random_states_1.pkl").unlink()
    random.seed(rank.number + 5)
    before = random.getstate()
    said = error_of(lambda: accelerator.load_state(str(place)))
    return {"said": said, "restored": random.getstate() != before}


def _failing(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.accelerate import CkptfsState

    accelerator, net, counter = _accelerator()
    with CkptfsState(accelerator, place, keep_latest=1) as saves:
        counter.value = 7
        saves.save(1)
        saved = _numbers(net)
        counter.fails = rank.number == 1
        _step(accelerator, net)
        said = error_of(lambda: saves.save(2))
        counter.fails, counter.value = False, 0
        done = saves.load()
        same = _numbers(net) == saved
        saves.save(2)
    seen = {"said": said, "done": done, "same": same, "counter": counter.value}
    return {**seen, "steps": _steps(place)}


def _round_trip(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.accelerate import CkptfsState

    accelerator, net, counter = _accelerator(
        automatic_checkpoint_naming=True, project_dir=str(place)
    )
    random.seed(40 + rank.number)
    with CkptfsState(accelerator, place / "run", keep_latest=2) as saves:
        for counter.value in (1, 2, 3):
            _step(accelerator, net)
            saves.save()  # checkpoint_0, checkpoint_1, checkpoint_2
    state, saved = random.getstate(), _numbers(net)
    files = sorted(os.listdir(place / "run" / "checkpoint_2"))

    def seen(load: Callable[[Any], object]) -> object:
        accelerator, net, counter = _accelerator()
        random.seed(0)
        done = load(accelerator)
        same = _numbers(net) == saved and random.getstate() == state
        return [done, same, counter.value]

    def ours(accelerator: Any) -> object:
        with CkptfsState(accelerator, place / "run", keep_latest=2) as again:
            done = again.load()
            again.save(metrics={"loss": 1.0})
            return done

    read = seen(ours)
    by_stock = seen(lambda one: one.load_state(str(place / "run" / "checkpoint_2")))
    accelerator.project_configuration.automatic_checkpoint_naming = False
    accelerator.save_state(str(place / "stock"))
    _wait()

    def of_stock(accelerator: Any) -> object:
        with ckptfs.checkpoint_dir(place / "stock", "read") as path:
            return accelerator.load_state(path)

    steps = _steps(place / "run")
    return {
        "files": files,
        "ours": read,
        "by stock": by_stock,
        "of stock": seen(of_stock),
        "steps": steps,
    }


def _in_the_background(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.accelerate import CkptfsState

    accelerator, net, _ = _accelerator()
    scratch = place / "scratch"
    os.environ.pop("CKPTFS_TEST_FAULT", None)
    if rank.number == 1:
        os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:close:*random_states_1.pkl:2"
    with CkptfsState(
        accelerator, f"faults+file://{place}/run", mode="async", scratch=scratch
    ) as saves:
        saves.save(1)
        saved = _numbers(net)
        _step(accelerator, net)
        saves.manager.wait()
        saves.save(2)
        said = error_of(lambda: saves.save(3))
        saves.save(3)
        saves.manager.wait()
        kept = sorted(p.name for p in scratch.glob("*/files/*"))
        _wait()
        done = saves.load(1)
        same = _numbers(net) == saved
    _wait()
    os.environ.pop("CKPTFS_TEST_FAULT", None)
    steps, left = _steps(place / "run"), os.listdir(scratch)
    return {"said": said, "kept": kept, "done": done, "same": same, "steps": steps, "left": left}


def _fsdp(rank: Rank, place: Path) -> object:
    """FSDP2's own functions: on CPU the Accelerator itself never takes that way."""
    import torch
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
    from torch.distributed.fsdp import fully_shard

    from ckptfs.integrations.accelerate import CkptfsState

    accelerator, _, _ = _accelerator()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net: Any = fully_shard(torch.nn.Linear(8, 8))
        adam = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(torch.randn(2, 8)).square().mean().backward()
        adam.step()
        return net, adam

    def local(net: Any, adam: Any) -> list[float]:
        moments = [m for s in adam.state.values() for m in s.values() if m.dim()]
        tensors = [t.to_local() for t in [*net.parameters(), *moments]]
        return [float(v) for t in tensors for v in t.detach().flatten()]

    net, adam = made(1)
    with CkptfsState(accelerator, place / "run") as saves:
        with saves.manager.writing(1) as path:
            fsdp_utils.save_fsdp_model(plugin, accelerator, net, path)
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, adam, net, path)
        other, others_adam = made(2)
        differs = local(other, others_adam) != local(net, adam)
        with saves.manager.reading() as opened:
            assert opened is not None
            fsdp_utils.load_fsdp_model(plugin, accelerator, other, opened.path)
            fsdp_utils.load_fsdp_optimizer(plugin, accelerator, others_adam, other, opened.path)
    folder = place / "run" / "checkpoint_1"
    stock = {"model": {"weight": torch.empty(8, 8)}}
    dcp.load(stock, checkpoint_id=str(folder / "pytorch_model_fsdp_0"))
    whole = dict(net.named_parameters())["weight"].full_tensor()
    with contextlib.chdir(rank.args["top"]):
        fsdp_utils.save_fsdp_model(plugin, accelerator, net, "s3://bucket/fsdp")
    return {
        "differs": differs,
        "same": local(other, others_adam) == local(net, adam),
        "stock": bool((stock["model"]["weight"] == whole).all()),
        "files": sorted(str(p.relative_to(folder)) for p in folder.glob("*_0/*")),
        "made locally": os.path.isdir(f"{rank.args['top']}/s3:/bucket/fsdp"),
    }


def _bad(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.accelerate import CkptfsState

    accelerator, _, _ = _accelerator()
    limited, _, _ = _accelerator(total_limit=1, project_dir=str(place))
    with CkptfsState(accelerator, place / "run") as saves:
        nothing = saves.load()
        saves.save(1)
        again = error_of(lambda: saves.save(1))
        absent = error_of(lambda: saves.load(5))
        with saves.manager.writing(2) as path:
            accelerator.save_state(path)
            if rank.number == 1:
                Path(path, "random_states_1.pkl").unlink()
        fewer, dropped = error_of(saves.load), saves.load(per_rank="drop")
        _wait()
        if rank.number == 0:
            (place / "run" / "checkpoint_2" / "random_states_0.pkl").write_bytes(b"")
        _wait()
        damaged = error_of(saves.load)
    return {
        "nothing": nothing,
        "again": again,
        "absent": absent,
        "fewer": fewer,
        "dropped": dropped,
        "damaged": damaged,
        "unknown": error_of(lambda: CkptfsState(accelerator, "nosuch://bucket/run").load()),
        "total limit": error_of(lambda: CkptfsState(limited, place)),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks saw, in order of rank."""
    top = tmp_path_factory.mktemp("accelerators")
    with launch(saves_and_loads, 2, args={"top": str(top)}, launcher_env=True) as ranks:
        results = ranks.results()
    for result in results:
        assert result.error is None, result.log
    return [result.value for result in results]


Seen = list[dict[str, Any]]


def test_stock_deletes_the_old_checkpoint_before_the_new_one_is_written(seen: Seen) -> None:
    """Stock: with total_limit=1 a save_state that fails leaves neither the old checkpoint nor a whole new
    one.
    """
    for rank in seen:
        told = rank["stock total limit"]
        assert told["said"] == "OSError: this rank cannot"
        assert list(told["left"]) == ["checkpoint_1"]
        assert "custom_checkpoint_0.pkl" not in told["left"]["checkpoint_1"]


def test_a_save_that_fails_on_one_rank_loses_nothing(seen: Seen) -> None:
    """keep_latest=1: where stock informs no other rank, the failure of rank 1 is raised on both, the checkpoint
    before is still there and is loaded, and the next save takes its place.
    """
    assert [rank["stock one rank"] for rank in seen] == ["no error", "OSError: this rank cannot"]
    assert "rank 1 on" in seen[0]["failing"]["said"]
    assert "OSError: this rank cannot" in seen[0]["failing"]["said"]
    assert seen[1]["failing"]["said"] == "OSError: this rank cannot"
    for rank in seen:
        told = rank["failing"]
        assert (told["done"], told["same"], told["counter"], told["steps"]) == (1, True, 7, [2])


def test_stock_takes_a_uri_for_a_directory(seen: Seen) -> None:
    """Stock: save_state and save_fsdp_model of s3://bucket/run make ./s3:/bucket/run, without an error."""
    for rank in seen:
        assert "model.safetensors" in rank["stock uri"]
        assert rank["fsdp"]["made locally"] is True


def test_the_whole_state_goes_and_comes_back(seen: Seen) -> None:
    """Parameters, custom objects and every rank's random numbers come back from the newest checkpoint;
    saves are numbered on from there, and retention keeps the last two.
    """
    for rank in seen:
        told = rank["round trip"]
        assert {"random_states_0.pkl", "random_states_1.pkl"} <= set(told["files"])
        assert told["ours"] == [2, True, 3]
        assert told["steps"] == [2, 3]


def test_stock_load_state_reads_ours_and_ours_reads_stock(seen: Seen) -> None:
    """accelerator.load_state of a committed directory, and of one that stock save_state wrote, opened by
    checkpoint_dir: the same state.
    """
    for rank in seen:
        assert rank["round trip"]["by stock"] == [None, True, 3]
        assert rank["round trip"]["of stock"] == [None, True, 3]


def test_random_numbers_are_not_lost_without_a_word(seen: Seen) -> None:
    """Stock: load_state continues without a rank's random states and says nothing. Ours is an error on all
    ranks, unless per_rank="drop" allows it.
    """
    assert seen[1]["stock random"] == {"said": "no error", "restored": False}
    for rank in seen:
        assert "random_states_1.pkl cannot be read: FileNotFoundError" in rank["bad"]["fewer"]
        assert rank["bad"]["dropped"] == 2


def test_a_background_failure_is_raised_by_the_next_save(seen: Seen) -> None:
    """Asynchronous: what the second save failed of on rank 1 both ranks raise when they call save again;
    the first one is there, and scratch is empty at the end.
    """
    for rank in seen:
        told = rank["in the background"]
        assert "NoSpaceError" in told["said"]
        assert (told["done"], told["same"], told["steps"]) == (1, True, [1, 3])
        assert told["left"] == []


def test_sharded_fsdp_state_is_part_of_the_one_commit(seen: Seen) -> None:
    """FSDP2's save_fsdp_model and save_fsdp_optimizer write their shards into one checkpoint, come back from
    it bit for bit on every rank, and plain dcp.load reads them.
    """
    for rank in seen:
        told = rank["fsdp"]
        assert (told["differs"], told["same"], told["stock"]) == (True, True, True)
        assert "optimizer_0/__1_0.distcp" in told["files"]
        assert "pytorch_model_fsdp_0/__0_0.distcp" in told["files"]


def test_what_cannot_work_is_a_typed_error_on_all_ranks(seen: Seen) -> None:
    """Nothing there is None; a step that is committed, one that is absent, a damaged one, a wrong URI and
    Accelerate's total_limit are typed errors that say what to do.
    """
    for rank in seen:
        told = rank["bad"]
        assert told["nothing"] is None
        assert told["again"].startswith("CommitConflictError: checkpoint_1")
        assert told["absent"].startswith("NotFoundError: no checkpoint of step 5")
        assert told["damaged"].startswith("IncompleteCheckpointError: checkpoint_2 is damaged")
        assert "UriError: no backend knows nosuch://" in told["unknown"]
        assert "pass keep_latest" in told["total limit"]
