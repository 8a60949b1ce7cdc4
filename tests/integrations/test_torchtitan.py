"""torchtitan 0.3.0, the real package: its manager over ckptfs, and what its own does in the same place.

One launch of two ranks runs every scenario (``SCENARIOS``); each test reads its own. The two ranks are
two nodes with a shared filesystem; the scenarios of node-local disks say so.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.multiprocess.harness import Rank, every_one, launch

pytestmark = pytest.mark.integrations
pytest.importorskip("torchtitan")

RANKS = 2
NODES = ("a", "b")


# -- inside the ranks ----------------------------------------------------------------------------


class Job:
    """A little training job around a checkpoint manager, torchtitan's own or ours."""

    def __init__(self, folder: str, *, stock: bool = False, **config: Any) -> None:
        import torch
        from torch.distributed.checkpoint.stateful import Stateful
        from torch.distributed.fsdp import fully_shard
        from torchtitan.components.checkpointer import CheckpointManager as Stock
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        from ckptfs.integrations.torchtitan import CheckpointManager

        class Progress(Stateful):
            step = 0

            def state_dict(self) -> dict[str, Any]:
                return {"step": self.step, "ntokens_seen": self.step * 8}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.step = state["step"]

        torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # equality below is no accident
        net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        self.model: Any = fully_shard(net)
        adamw = default_adamw(lr=0.01)
        adamw.implementation = "for-loop"
        self.optimizers = adamw.build(model_parts=[self.model])
        self.lrs = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=9
        )
        self.progress = Progress()
        told = {"enable": True, "interval": 1, "keep_latest_k": 2, **config}
        maker = Stock.Config if stock else CheckpointManager.Config
        self.checkpointer = maker(folder=folder, **told).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lrs,
            states={"train_state": self.progress},
            sd_adapter=None,
        )

    def train(self, step: int, **save: Any) -> list[Any]:
        """One step, saved; what was saved."""
        import torch

        self.model(torch.randn(2, 6)).square().mean().backward()
        self.optimizers.step()
        self.lrs.step()
        self.optimizers.zero_grad()
        self.progress.step = step
        state = self.state()
        self.checkpointer.save(step, **save)
        return state

    def state(self) -> list[Any]:
        """All of it that is this rank's."""
        import torch

        parts = [*self.model.state_dict().items(), *self.optimizers.state_dict().items()]
        values = [v.to_local() if hasattr(v, "to_local") else v for _, v in parts]
        flat = [v.tolist() if isinstance(v, torch.Tensor) else repr(v) for v in values]
        return [*flat, self.lrs.state_dict(), self.progress.state_dict()]


def failure(call: Callable[[], Any]) -> str:
    """The type of what a call raises, or what it returns."""
    try:
        return f"returned {call()}"
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return type(error).__name__


def whole(folder: str) -> list[str]:
    """What is in a run and could be loaded."""
    there = (name for name in os.listdir(folder) if name != ".ckptfs")
    return sorted(name for name in there if os.path.isfile(f"{folder}/{name}/.metadata"))


def on_rank_0(rank: Rank, make: Callable[[], Any]) -> None:
    """Done once, before anybody continues."""
    import torch.distributed as dist

    if rank.number == 0:
        make()
    dist.barrier()


def both_ways(rank: Rank, run: str) -> Any:
    """Stock saves, ours continues in its folder, stock continues from ours."""
    stock = Job(run, stock=True)
    stock.train(1)
    first = stock.train(2)
    stock.checkpointer.close()
    ours = Job(run)
    loaded = [ours.checkpointer.load(), ours.state() == first]
    second = ours.train(3)
    ours.checkpointer.close()
    again = Job(run)
    from_ours = [again.checkpointer.load(), again.state() == second]
    again.checkpointer.close()
    last = Job(run, stock=True)
    from_stock = [last.checkpointer.load(), last.state() == second]
    last.checkpointer.close()
    return [loaded, from_ours, from_stock, whole(run)]


def stock_deletes_first(rank: Rank, run: str) -> Any:
    """Stock, asynchronous, keep_latest_k=2: the third save cannot be written."""
    job = Job(run, stock=True, async_mode="async")
    job.train(1)
    job.train(2)
    job.checkpointer.maybe_wait_for_saving()
    on_rank_0(rank, lambda: Path(run, "step-3").touch())  # no directory can be made there
    job.train(3)
    failed = failure(job.checkpointer.maybe_wait_for_saving)
    job.checkpointer.close()  # its purging thread has ended
    import torch.distributed as dist

    dist.barrier()
    return [failed, whole(run)]


def ours_deletes_last(rank: Rank, run: str) -> Any:
    """Ours, the same: rank 1 cannot write its part of the third save."""
    if rank.number == 1:
        os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:close:*__1_0.distcp:3"
    try:
        job = Job(f"faults+file://{run}", async_mode="async")
        job.train(1)
        job.train(2)
        job.train(3)
        failed = failure(lambda: job.train(4))
        left = whole(run)
        job.train(4)
        job.checkpointer.close()  # on the rank that deletes, what it had to delete is gone
    finally:
        os.environ.pop("CKPTFS_TEST_FAULT", None)
    import torch.distributed as dist

    dist.barrier()
    return [failed, left, whole(run)]


def _neighbours(run: str) -> None:
    for name, file in (("step-9.backup", ".metadata"), ("old-step-1", "precious")):
        os.makedirs(f"{run}/{name}")
        Path(run, name, file).touch()


def names(rank: Rank, run: str) -> Any:
    """Directories with step-N in their names: what stays, and what is taken for the newest."""
    found = []
    for stock in (True, False):
        folder = f"{run}-{stock}"
        on_rank_0(rank, lambda folder=folder: _neighbours(folder))  # type: ignore[misc]
        job = Job(folder, stock=stock)
        job.train(2)
        saved = job.train(3)
        job.checkpointer.close()
        on_rank_0(rank, lambda: None)
        again = Job(folder, stock=stock)
        loaded = failure(again.checkpointer.load)
        there = sorted(name for name in os.listdir(folder) if name != ".ckptfs")
        found.append([loaded, again.state() == saved, there])
        again.checkpointer.close()
        on_rank_0(rank, lambda: None)
    return found


def node_local(rank: Rank, run: str) -> Any:
    """Two nodes with a disk each; then rank 0 starts on a fresh one."""
    stock = Job(f"{run}/{NODES[rank.number]}/stock", stock=True)
    stock.train(1)
    stock_finds = stock.checkpointer._find_load_step()
    ours = Job(f"nodes+file://{run}/@node/run")
    saved = ours.train(1)
    ours.checkpointer.close()
    again = Job(f"nodes+file://{run}/@node/run")
    loaded = [again.checkpointer.load(), again.state() == saved]
    again.checkpointer.close()
    on_rank_0(rank, lambda: shutil.rmtree(f"{run}/{NODES[0]}/run"))
    fresh = Job(f"nodes+file://{run}/@node/run")
    return [stock_finds, loaded, failure(fresh.checkpointer.load)]


def rank_fails(rank: Rank, run: str) -> Any:
    """Synchronous: rank 1 has no space for its first part."""
    if rank.number == 1:
        os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:close:*__1_0.distcp:1"
    try:
        job = Job(f"faults+file://{run}")
        failed = failure(lambda: job.train(1))
        left = whole(run)
        job.train(2)
        job.checkpointer.close()
    finally:
        os.environ.pop("CKPTFS_TEST_FAULT", None)
    return [failed, left, whole(run)]


def crashed(rank: Rank, run: str) -> Any:
    """Rank 0's training fails before the second save, which rank 1 has on its way when it hears."""
    job = Job(run, async_mode="async")
    job.train(1)
    job.checkpointer.maybe_wait_for_saving()
    closed: list[Any] = []
    if rank.number == 1:
        job.checkpointer.save(2)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            closed.append(failure(job.checkpointer.close))
    on_rank_0(rank, lambda: None)
    if rank.number == 0:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            closed.append(failure(job.checkpointer.close))
    on_rank_0(rank, lambda: None)
    return [closed, whole(run)]


def bad_input(rank: Rank, run: str) -> Any:
    """Nothing there; a step that is not; a scheme that is none; what was not saved."""
    empty = Job(run)
    found = [failure(empty.checkpointer.load), failure(lambda: empty.checkpointer.load(7))]
    found.append(failure(Job("nosuch://bucket/run").checkpointer.load))
    empty.train(1, last_step=True)  # the model only, by torchtitan's default
    empty.checkpointer.close()
    again = Job(run)
    found.append(failure(again.checkpointer.load))
    again.checkpointer.close()
    without = Job(
        run, exclude_from_loading=["optimizer", "lr_scheduler", "train_state", "dataloader"]
    )
    found.append(failure(without.checkpointer.load))
    found.append(failure(lambda: without.checkpointer.load(7)))
    without.checkpointer.close()
    return found


def initial(rank: Rank, run: str) -> Any:
    """initial_load_path: another run's model, then the own run's checkpoints before it."""
    first = Job(f"{run}-first")
    saved = first.train(5)
    first.checkpointer.close()
    job = Job(f"{run}-second", initial_load_path=f"{run}-first/step-5")
    found: list[Any] = [job.checkpointer.load(), job.state()[:4] == saved[:4], job.progress.step]
    mine = job.train(1)
    job.checkpointer.close()
    again = Job(f"{run}-second", initial_load_path=f"{run}-first/step-5")
    found += [again.checkpointer.load(), again.state() == mine]
    again.checkpointer.close()
    return found


SCENARIOS: list[Callable[[Rank, str], Any]] = [
    both_ways,
    stock_deletes_first,
    ours_deletes_last,
    names,
    node_local,
    rank_fails,
    crashed,
    bad_input,
    initial,
]


def run_scenarios(rank: Rank) -> dict[str, Any]:
    """All of them in order; a scenario's unexpected error is its result."""
    warnings.simplefilter("ignore")
    rank.init_group()
    claims = {scenario.__name__: scenario for scenario in SCENARIOS}
    return every_one(rank, claims, rank.args["base"])


# -- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Every scenario's result on every rank."""
    base = tmp_path_factory.mktemp("torchtitan")
    with launch(run_scenarios, RANKS, nodes=NODES, args={"base": str(base)}) as ranks:
        yield ranks.values()


def test_killed_mid_save_it_resumes_bit_identically(store: Store, mode: Mode, cell: Cell) -> None:
    """The example of the page, killed when a rank's part of the fourth save is written."""
    with cell("torchtitan", store, mode):
        story("torchtitan", store, mode, kill=Kill("close", "*__1_0.distcp", nth=4, rank=1))


def test_stock_and_ours_go_on_from_each_other(outcomes: Any) -> None:
    """Ours resumes in stock's folder, stock's unmodified manager in ours, with the same state."""
    for outcome in outcomes:
        loaded, from_ours, from_stock, there = outcome["both_ways"]
        assert loaded == from_ours == from_stock == [True, True]
        assert there == ["step-1", "step-2", "step-3"]  # what stock wrote, ours does not delete


def test_stock_deletes_before_the_commit(outcomes: Any) -> None:
    """Stock's bug: of two checkpoints to keep one is left, for the sake of a save that failed."""
    for outcome in outcomes:
        assert outcome["stock_deletes_first"] == ["CheckpointException", ["step-2"]]


def test_ours_deletes_after_the_commit(outcomes: Any) -> None:
    """The failed save costs nothing; its error reaches both ranks; the next commit retains."""
    for outcome in outcomes:
        failed, left, at_last = outcome["ours_deletes_last"]
        assert failed == "CollectiveError"
        assert left == ["step-1", "step-2"]
        assert at_last == ["step-2", "step-4"]


def test_names_are_matched_exactly(outcomes: Any) -> None:
    """torchtitan #4292: stock deletes what is only called alike, and loads a step that is not there."""
    for outcome in outcomes:
        stock, ours = outcome["names"]
        assert stock == ["FileNotFoundError", False, ["step-3", "step-9.backup"]]
        assert ours == ["returned True", True, ["old-step-1", "step-2", "step-3", "step-9.backup"]]


def test_the_step_is_decided_once_for_all_ranks(outcomes: Any) -> None:
    """On node-local disks stock's ranks disagree whether there is a checkpoint; ours load it."""
    assert [o["node_local"][0] for o in outcomes] == [1, -1]
    assert [o["node_local"][1] for o in outcomes] == [[True, True]] * RANKS


def test_a_fresh_disk_is_no_fresh_start(outcomes: Any) -> None:
    """Where one node's disk is lost, all ranks get the same error, and none begins at step 0."""
    assert [o["node_local"][2] for o in outcomes] == ["IncompleteCheckpointError"] * RANKS


def test_a_failing_rank_fails_all_and_loses_nothing(outcomes: Any) -> None:
    """ENOSPC on rank 1 is a CollectiveError on both, and the next save is committed."""
    for outcome in outcomes:
        assert outcome["rank_fails"] == ["CollectiveError", [], ["step-2"]]


def test_a_crashed_rank_closes_alone(outcomes: Any) -> None:
    """torchtitan closes in its `except`, where other ranks do not come: it waits for none of them."""
    for outcome in outcomes:
        assert outcome["crashed"] == [["returned None"], ["step-1"]]


def test_what_is_not_there_is_a_typed_error_on_all_ranks(outcomes: Any) -> None:
    """Empty: no checkpoint. A missing step, an unknown scheme, a missing optimizer: errors."""
    for outcome in outcomes:
        assert outcome["bad_input"] == [
            "returned False",
            "NotFoundError",
            "UriError",
            "StateError",
            "returned True",
            "NotFoundError",
        ]


def test_initial_load_path_gives_way_to_the_own_run(outcomes: Any) -> None:
    """A fresh run takes another's model and not its progress; resumed, it takes its own."""
    assert [o["initial"] for o in outcomes] == [[True, True, 0, True, True]] * RANKS


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank of a group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_plain_uris_are_stocks_too(store: Store) -> None:
    """What ours wrote, stock's unmodified manager loads by the plain URI, and ours what it wrote."""
    ours = Job(store.uri, last_save_model_only=False)
    saved = ours.train(1)
    ours.checkpointer.close()
    stock = Job(store.uri, stock=True)
    assert stock.checkpointer.load()
    assert stock.state() == saved
    theirs = stock.train(2)
    stock.checkpointer.close()
    again = Job(
        f"{store.uri}-own", initial_load_path=store / "step-2", initial_load_model_only=False
    )
    assert again.checkpointer.load()
    assert again.state() == theirs
    again.checkpointer.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_without_any_code_by_the_folder_alone(store: Store, async_mode: str) -> None:
    """checkpoint.folder="ckptfs+...": stock's own manager commits, retains and resumes through it.

    What is not committed is not listed: stock does not count it, and one more stays for now.
    """
    plain = store.uri if "://" in store.uri else f"file://{store.uri}"
    job = Job(f"ckptfs+{plain}", stock=True, async_mode=async_mode)
    job.train(1)
    job.train(2)
    saved = job.train(3)
    job.checkpointer.maybe_wait_for_saving()
    job.checkpointer.close()
    left = [c.step for c in ckptfs.list_checkpoints(store.uri)]
    assert left in ([[2, 3]] if async_mode == "disabled" else [[2, 3], [1, 2, 3]])
    again = Job(f"ckptfs+{plain}", stock=True)
    assert again.checkpointer.load()
    assert again.state() == saved
    again.checkpointer.close()


@pytest.mark.usefixtures("alone")
def test_checkpoint_storage_answers_by_uri(store: Store) -> None:
    """torchtitan's next release asks these four; what is removed is deleted in the run's log too."""
    from ckptfs.integrations.torchtitan import CheckpointStorage

    job = Job(store.uri, keep_latest_k=0)
    job.train(1)
    job.train(2)
    job.checkpointer.close()
    storage = CheckpointStorage()
    assert [storage.isdir(store.uri), storage.isdir(store / "step-2")] == [True, True]
    assert storage.isfile(store / "step-1/.metadata")
    assert not storage.isdir(store / "step-1/.metadata")
    assert not storage.isfile(store / "step-9/.metadata")
    assert not storage.isdir(store / "step-9")
    assert {"step-1", "step-2"} <= set(storage.listdir(store.uri))
    storage.remove(store / "step-1")
    storage.remove(store / "step-1")
    assert not storage.isdir(store / "step-1")
    assert [c.step for c in ckptfs.list_checkpoints(store.uri)] == [2]


@pytest.mark.usefixtures("alone")
def test_a_bucket_that_is_not_there_is_told(store: Store) -> None:
    """The folder's place does not exist and cannot be made: reported by its name, on all ranks."""
    if store.kind == "file":
        Path(store.uri).touch()
    folder = {"file": store / "run", "s3": "s3://there-is-no-such-bucket/run"}[store.kind]
    job = Job(folder)
    with pytest.raises(ckptfs.CollectiveError, match=folder.removesuffix("/run")):
        job.train(1)
    job.checkpointer.close()


def test_the_override_replaces_torchtitans_manager() -> None:
    """--override.imports: the trainer's config gets our manager, with its own settings kept."""
    from dataclasses import dataclass, field

    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.components.checkpointer import CheckpointManager as Stock
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides

    from ckptfs.integrations.torchtitan import CheckpointManager

    class Trainer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            checkpoint: BaseCheckpointManager.Config = field(
                default_factory=lambda: Stock.Config(folder="s3://bucket/run", keep_latest_k=3)
            )

    config = Trainer.Config()
    name = "ckptfs.integrations.torchtitan.checkpoint_manager"
    apply_overrides(OverrideConfig(imports=[(name, {"storage_options": {"anon": True}})]), config)
    made = config.checkpoint
    assert isinstance(made, CheckpointManager.Config)
    assert made._owner is CheckpointManager
    assert (made.folder, made.keep_latest_k) == ("s3://bucket/run", 3)
    assert made.storage_options == {"anon": True}


def test_safetensors_of_the_end_are_committed_as_one(tmp_path: Path) -> None:
    """What torchtitan's adapter writes is one checkpoint of the run that the manager holds; the client
    is made with storage_options.
    """
    import torch
    from torchtitan.components.checkpointer import AsyncMode

    from ckptfs.integrations.torchtitan import CheckpointManager

    manager = object.__new__(CheckpointManager)
    manager.enable, manager.storage_options = True, {"none_such": 1}
    manager.sd_adapter = SimpleNamespace(to_hf=dict, fqn_to_index_mapping=None)
    run = str(tmp_path / "run")
    with ckptfs.CheckpointManager(run, name="step-{N}") as manager._run:
        manager._run.save(1, {"w": torch.ones(2)})
        state = {"w": torch.ones(2)}
        with pytest.raises(ckptfs.CollectiveError, match="storage option 'none_such'"):
            manager.dcp_save(state, f"{run}/step-2", AsyncMode.DISABLED, to_hf=True)
        manager.storage_options = {}
        manager.dcp_save(state, f"{run}/step-2", AsyncMode.DISABLED, to_hf=True)
    assert [one.uri.name for one in ckptfs.list_checkpoints(run)] == ["step-1", "step-2"]
    assert list((tmp_path / "run/step-2").glob("*.safetensors"))
