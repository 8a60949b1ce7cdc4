"""Lightning's sharded strategies on two ranks (on CPU): stock's ways shown, and ours.

One launch of two ranks makes all claims, since importing Lightning takes longer than the rest; each
test looks at its own part of what the ranks reported. ModelParallelStrategy is FSDP2. Lightning gives
FSDPStrategy to GPUs only, but torch shards on CPU where it is asked to: ``on_cpu`` asks it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")  # before what needs it

import lightning as L  # noqa: N812 - as everybody writes it
import torch
from lightning.fabric.strategies import FSDPStrategy as StockFabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as StockFabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy as StockFSDP
from lightning.pytorch.strategies import ModelParallelStrategy as StockTrainer

import ckptfs
from ckptfs.integrations.lightning import (
    CkptfsDDPStrategy,
    CkptfsFabricFSDPStrategy,
    CkptfsFabricModelParallelStrategy,
    CkptfsFSDPStrategy,
    CkptfsIO,
    CkptfsModelParallelStrategy,
    checkpoint_strategy,
    last_checkpoint,
)
from tests.faults import victim
from tests.multiprocess.harness import Rank, torchrun

pytestmark = [pytest.mark.integrations]

Tried = dict[str, Any]


class Net(L.LightningModule):
    """One layer, sharded over both ranks."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Plain(Net):
    """The same for DDP."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)


def fit(kind: Any, dirpath: str, epochs: int, start: str | None = None, **more: Any) -> Any:
    """Train on two ranks with a ModelParallelStrategy; the whole weights."""
    saves = {name: more.pop(name) for name in ("save_last", "save_top_k") if name in more}
    strategy = kind(data_parallel_size=2, tensor_parallel_size=1, **more)
    net = Net()
    trainer = trainer_of(strategy, epochs, ModelCheckpoint(dirpath, **saves))
    trainer.fit(net, loader(), ckpt_path=start)
    return whole(net)


SHARDING = (
    "setup_module",
    "_setup_model",
)  # the methods of Fabric's FSDPStrategy, and the Trainer's


def sharded_on_cpu(module: Any) -> Any:
    """What an FSDPStrategy makes of a module, on a device that Lightning gives it none on."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def on_cpu(kind: Any) -> Any:
    """An FSDPStrategy with modules sharded on CPU; everything else is its own."""
    body = {name: lambda _, module: sharded_on_cpu(module) for name in SHARDING}
    made = type(kind.__name__, (kind,), body)
    return lambda **more: made(state_dict_type="sharded", **more)


def trainer_of(strategy: Any, epochs: int, callback: Any) -> Any:
    """Two ranks on CPU, and quiet."""
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader() -> Any:
    """Four batches for each rank."""
    data: Any = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(data, batch_size=4)


def whole(module: Any) -> dict[str, torch.Tensor]:
    """Its weights, gathered from both ranks."""
    return {name: value.full_tensor() for name, value in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(one[name], other[name]) for name in one | other)


def parallel(kind: Any, **more: Any) -> Any:
    """A ModelParallelStrategy of Fabric that shards over both ranks."""
    from torch.distributed.fsdp import fully_shard

    def parallelize(module: Any, mesh: Any) -> Any:
        fully_shard(module, mesh=mesh["data_parallel"])
        return module

    return kind(parallelize, data_parallel_size=2, tensor_parallel_size=1, **more)


class Lab:
    """A model and an optimizer under Fabric."""

    def __init__(self, strategy: Any) -> None:
        self.fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        self.module = self.fabric.setup_module(torch.nn.Linear(8, 4))
        optimizer = torch.optim.Adam(self.module.parameters(), 0.01)
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def train(self, steps: int) -> None:
        for number in range(steps):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            self.fabric.backward(self.module(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer, "steps": 0}

    def save(self, path: str, **more: Any) -> None:
        self.fabric.save(path, {**self.state, "steps": 3, **more})

    def load(self, path: str) -> int:
        state = self.state
        assert self.fabric.load(path, state) == {}
        return int(state["steps"])


@contextlib.contextmanager
def watched(what: str, found: list[str]) -> Iterator[None]:
    """Collects the paths of an audited call of this process, below directories of the test."""
    on = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if on and event == what:
            found.append(str(arguments[0]))

    sys.addaudithook(hook)
    try:
        yield
    finally:
        on = False


def raised(act: Callable[[], Any]) -> str:
    """The class of what it raised, and the first line of its text."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - passed to the test
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


# -- stock, and ours next to it ---------------------------------------------------------------------


def try_stock(run: Path) -> Tried:
    """What stock's strategies do to the file system."""
    lab = Lab(parallel(StockFabric))
    lab.train(3)
    tried: Tried = {}
    os.chdir(run)
    lab.save("file:///elsewhere/a.ckpt")
    tried["mangled"] = (run / "file:" / "elsewhere" / "a.ckpt" / ".metadata").is_file()
    made: list[str] = []
    with watched("os.mkdir", made):
        lab.save(str(run / "stock.ckpt"))
    tried["mkdir"] = str(run / "stock.ckpt") in made
    torn = run / "torn.ckpt"
    tried["torn"] = raised(lambda: lab.save(str(torn), steps=lambda: 3))
    if lab.fabric.global_rank == 0:
        lab.fabric.barrier()  # rank 1 waits in it, inside of save
    tried["torn is committed"] = (torn / ".metadata").is_file()
    return tried


def try_ours(run: Path, uri: str, stock: Path) -> Tried:
    """The same with ours, at any URI, and each other's checkpoints."""
    lab = Lab(parallel(CkptfsFabricModelParallelStrategy, mode="async"))
    lab.train(3)
    tried: Tried = {}
    made: list[str] = []
    with watched("os.mkdir", made):
        lab.save(f"{uri}/a.ckpt")
        lab.fabric.strategy.wait()
    tried["mkdir"] = len([path for path in made if path.startswith(str(run))])
    tried["torn"] = raised(lambda: lab.save(f"{uri}/torn.ckpt", steps=lambda: 3))
    tried["torn is there"] = [c.uri.name for c in ckptfs.list_checkpoints(uri)]
    lab.train(3)
    after = whole(lab.module)

    fresh = Lab(parallel(CkptfsFabricModelParallelStrategy))
    tried["steps"] = fresh.load(f"{uri}/a.ckpt")
    fresh.train(3)
    tried["resumed"] = same(whole(fresh.module), after)
    if "://" not in uri:
        theirs = Lab(parallel(StockFabric))
        theirs.load(f"{uri}/a.ckpt")
        theirs.train(3)
        tried["stock reads ours"] = same(whole(theirs.module), after)
        if lab.fabric.global_rank == 0:
            os.remove(f"{uri}/a.ckpt/meta.pt")
        lab.fabric.barrier()
        tried["steps without meta.pt"] = fresh.load(f"{uri}/a.ckpt")
    fresh.load(str(stock))
    fresh.train(3)
    tried["ours reads stock's"] = same(whole(fresh.module), after)

    one = Lab(parallel(CkptfsFabricModelParallelStrategy, save_distributed_checkpoint=False))
    one.train(3)
    one.save(f"{uri}/full.ckpt")
    fresh.load(f"{uri}/full.ckpt")
    fresh.train(3)
    tried["full"] = same(whole(fresh.module), after)
    tried["over a file"] = raised(lambda: lab.save(f"{uri}/full.ckpt"))
    tried["nothing there"] = raised(lambda: fresh.load(f"{uri}/nothing.ckpt"))
    # With no state Lightning reads a file: rank 0 cannot copy it, and rank 1 is not left waiting.
    tried["no file"] = raised(lambda: fresh.fabric.load(f"{uri}/nothing.ckpt"))
    lab.fabric.strategy.teardown()
    return tried


def everything(rank: Rank) -> Tried:
    """Fabric and the Trainer, stock and ours, in a directory and on S3; faults come last."""
    run, remote = Path(rank.args["run"]), rank.args["s3"]
    tried: Tried = {
        "stock": try_stock(run),
        "file": try_ours(run / "ours", str(run / "ours" / "run"), run / "stock.ckpt"),
        "s3": try_ours(run / "ours", f"{remote}/run", run / "stock.ckpt"),
    }
    reference = fit(StockTrainer, f"{run}/reference", 3, save_top_k=-1)
    tried["trainer file"] = try_trainer(str(run / "trainer"), reference)
    tried["trainer s3"] = try_trainer(f"{remote}/trainer", reference)
    tried["trainer stock"] = try_stock_files(str(run), reference)
    tried["fsdp"] = try_fsdp(f"{run}/fsdp")
    tried["by name"] = {name: try_name(name, f"{run}/by-name") for name in BY_NAME}
    tried["fabric by name"] = try_fabric_names(f"{run}/fabric-by-name")
    for mode in ("sync", "async"):
        tried[f"full {mode}"] = try_full_disk(f"{run}/{mode}", mode)
    tried["ddp"] = try_ddp(f"{run}/ddp")
    return tried


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, lab_s3: Any) -> list[Tried]:
    """What each rank of the launch reported."""
    run = tmp_path_factory.mktemp("lightning")
    (run / "ours").mkdir()
    args = {"run": str(run), "s3": lab_s3.fresh()}
    results = torchrun(everything, 2, args=args, env=lab_s3.environment)
    for result in results:
        assert result.value is not None, result.error or result.log[-6000:]
    return [result.value for result in results]


def test_stock_makes_a_directory_of_a_uri(ranks: list[Tried]) -> None:
    """Path() around file:///elsewhere writes to ./file:/elsewhere and says nothing; ours goes to S3."""
    assert all(tried["stock"]["mangled"] for tried in ranks)
    assert all(tried["s3"]["steps"] == 3 for tried in ranks)


def test_one_rank_makes_directories(ranks: list[Tried]) -> None:
    """Stock: every rank calls mkdir on the checkpoint. Ours: the owner of the domain alone."""
    assert [tried["stock"]["mkdir"] for tried in ranks] == [True, True]
    owner, other = (tried["file"]["mkdir"] for tried in ranks)
    assert owner > 0
    assert other == 0


def test_meta_is_part_of_the_commit(ranks: list[Tried]) -> None:
    """Meta data that cannot be pickled: stock has committed its tensors by then, and rank 1 hears of
    nothing; ours raises on both ranks, and nothing is there.
    """
    zero, one = (tried["stock"] for tried in ranks)
    assert "pickle" in zero["torn"]
    assert one["torn"] == "nothing"
    assert zero["torn is committed"]
    for kind in ("file", "s3"):
        zero, one = (tried[kind] for tried in ranks)
        assert "pickle" in zero["torn"]
        assert one["torn"].startswith("CollectiveError: rank 0 failed")
        assert zero["torn is there"] == ["a.ckpt"]
    assert all(tried["file"]["steps without meta.pt"] == 3 for tried in ranks)


def test_fabric_resumes_and_each_reads_the_other(ranks: list[Tried]) -> None:
    """Bit for bit: ours from ours (asynchronous), stock from ours, ours from stock, and single files."""
    for tried in ranks:
        assert tried["file"]["stock reads ours"]
        for kind in ("file", "s3"):
            told = tried[kind]
            assert (told["resumed"], told["ours reads stock's"], told["full"]) == (True,) * 3


def test_a_file_is_not_overlaid_with_a_directory(ranks: list[Tried]) -> None:
    """Else the file, which is older, would be what is loaded from then on."""
    for kind in ("file", "s3"):
        zero, one = (tried[kind]["over a file"] for tried in ranks)
        assert zero.startswith("StateError: a single-file checkpoint has that name")
        assert one.startswith("CollectiveError: rank 0 failed")


def test_nothing_there_is_the_same_error_on_all_ranks(ranks: list[Tried]) -> None:
    """NotFoundError, with the URI, and no ckptfs+ in it."""
    for kind in ("file", "s3"):
        told = {tried[kind]["nothing there"] for tried in ranks}
        assert len(told) == 1
        assert told.pop().startswith("NotFoundError: no committed checkpoint there")


def test_a_file_that_cannot_be_copied_fails_on_all_ranks(ranks: list[Tried]) -> None:
    """Rank 0 of the node finds nothing to copy; both ranks raise that, and none waits in a barrier."""
    told = [tried["s3"]["no file"] for tried in ranks]
    assert told[0] == told[1]
    assert told[0].startswith("CollectiveError: copy the file to each node failed on 1 of 2 ranks")
    assert "NotFoundError" in told[0]
    assert all(tried["file"]["no file"].startswith("ValueError") for tried in ranks)


# -- Trainer ---------------------------------------------------------------------------------------


def try_trainer(uri: str, reference: Any) -> Tried:
    """Retention, and resuming, through ModelCheckpoint."""
    ours = CkptfsModelParallelStrategy
    fit(ours, uri, 2, save_last=True, mode="async")
    tried: Tried = {"kept": listed(uri), "start": last_checkpoint(uri)}
    tried["resumed"] = same(fit(ours, uri, 3, tried["start"], save_last=True), reference)
    tried["kept then"] = listed(uri)
    return tried


def try_stock_files(run: str, reference: Any) -> Tried:
    """Each other's checkpoints, and those of one file."""
    ours, stock = CkptfsModelParallelStrategy, f"{run}/reference/epoch=1-step=8.ckpt"
    tried: Tried = {"from stock": same(fit(ours, f"{run}/other", 3, stock), reference)}
    tried["stock stays"] = os.path.isfile(f"{stock}/.metadata")
    mine = f"{run}/other/epoch=2-step=12.ckpt"
    tried["stock from ours"] = same(fit(StockTrainer, f"{run}/x", 3, mine), reference)
    whole_files: Tried = {"save_last": True, "save_distributed_checkpoint": False}
    fit(ours, f"{run}/full", 2, **whole_files)
    tried["full"] = sorted(os.listdir(f"{run}/full"))
    full = f"{run}/full/epoch=1-step=8.ckpt"
    tried["from full"] = same(fit(ours, f"{run}/y", 3, full), reference)
    fit(ours, f"{run}/full", 3, f"{run}/full/last.ckpt", **whole_files)
    tried["full then"] = sorted(os.listdir(f"{run}/full"))
    return tried


def try_fsdp(run: str) -> Tried:
    """FSDPStrategy, of Fabric and of the Trainer."""
    tried: Tried = {}
    ours, stock = on_cpu(CkptfsFabricFSDPStrategy), on_cpu(StockFabricFSDP)
    one, two, three = Lab(ours(mode="async")), Lab(ours()), Lab(stock())
    one.train(3)
    one.save(f"{run}/fabric.ckpt")
    one.fabric.strategy.wait()
    one.train(3)
    after = shards(one.module)
    for name, lab in (("resumed", two), ("stock reads ours", three)):
        tried[f"{name} at"] = lab.load(f"{run}/fabric.ckpt")
        lab.train(3)
        tried[name] = torch.equal(shards(lab.module), after)
    three.save(f"{run}/stock.ckpt")
    two.load(f"{run}/stock.ckpt")
    tried["ours reads stock's"] = torch.equal(shards(two.module), after)
    one.fabric.strategy.teardown()

    ours, stock = on_cpu(CkptfsFSDPStrategy), on_cpu(StockFSDP)

    def fitted(strategy: Any, where: str, epochs: int, start: str | None = None) -> Any:
        net = Plain()
        trainer = trainer_of(strategy, epochs, ModelCheckpoint(where, save_last=True))
        trainer.fit(net, loader(), ckpt_path=start)
        return shards(trainer.strategy.model)

    reference = fitted(stock(), f"{run}/t0", 3)
    fitted(ours(mode="async"), f"{run}/t1", 2)
    tried["kept"] = listed(f"{run}/t1")
    last = last_checkpoint(f"{run}/t1")
    tried["trainer"] = torch.equal(fitted(ours(), f"{run}/t1", 3, last), reference)
    tried["trainer stock"] = torch.equal(fitted(stock(), f"{run}/t2", 3, last), reference)

    class Export(Callback):
        """Publishes the weights after each epoch, when its checkpoint is there."""

        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            trainer.save_checkpoint(
                f"{run}/t3/export-{trainer.current_epoch}.ckpt", weights_only=True
            )

    trainer = trainer_of(ours(mode="async"), 2, ModelCheckpoint(f"{run}/t3", save_last=True))
    trainer.callbacks.append(Export())  # behind the one that saves
    trainer.fit(Plain(), loader())
    found = ckptfs.list_checkpoints(f"{run}/t3")
    tried["exports"] = {c.uri.name: c.kind.value for c in found if "export" in c.uri.name}
    tried["last beside exports"] = last_checkpoint(f"{run}/t3")
    exported = f"{run}/t3/export-1.ckpt"
    tried["resumed from an export"] = raised(lambda: fitted(ours(), f"{run}/t4", 3, exported))
    return tried


def shards(module: Any) -> torch.Tensor:
    """This rank's part of the parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


BY_NAME: dict[Any, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"state_dict_type": "sharded"},
    "model_parallel": {"data_parallel_size": 2, "tensor_parallel_size": 1},
}


def try_name(name: Any, run: str) -> Tried:
    """A strategy of ``checkpoint_strategy``: two epochs, and a run that continues from them."""

    def fitted(where: str, epochs: int, start: str | None, mode: Any) -> Any:
        strategy = checkpoint_strategy(name, mode=mode, **BY_NAME[name])
        if name == "fsdp":
            strategy._setup_model = sharded_on_cpu
        net = Net() if name == "model_parallel" else Plain()
        trainer = trainer_of(strategy, epochs, ModelCheckpoint(where, save_last=True))
        trainer.fit(net, loader(), ckpt_path=start)
        trainer.save_checkpoint(f"{where}/by-hand.ckpt")
        strategy.wait()
        return net, trainer

    def bits(net: Any) -> torch.Tensor:
        parts = (getattr(p, "_local_tensor", p) for p in net.parameters())
        return torch.cat([part.detach().flatten() for part in parts])

    reference, _ = fitted(f"{run}/{name}-0", 3, None, "sync")
    fitted(f"{run}/{name}", 2, None, "async")
    start = last_checkpoint(f"{run}/{name}", "by-hand")
    resumed, trainer = fitted(f"{run}/{name}", 3, start, "sync")
    return {
        "start": start,
        "resumed": torch.equal(bits(resumed), bits(reference)),
        "steps": trainer.global_step,
        "sharded": [c.uri.name for c in ckptfs.list_checkpoints(f"{run}/{name}")],
    }


def try_fabric_names(run: str) -> Tried:
    """Fabric's DDP: what one lab saved another has, and a save that fails is raised on both ranks."""
    one, two = (Lab(checkpoint_strategy("ddp", mode="async", fabric=True)) for _ in range(2))
    one.train(3)
    one.save(f"{run}/a.ckpt")
    one.fabric.strategy.wait()
    tried: Tried = {"steps": two.load(f"{run}/a.ckpt")}
    tried["same"] = torch.equal(shards(one.module), shards(two.module))
    if one.fabric.global_rank == 0:
        Path(run, "file").write_text("no directory")
    one.fabric.barrier()
    one.save(f"{run}/file/b.ckpt")  # in the background: it returns
    tried["raised"] = raised(one.fabric.strategy.wait)
    sync = Lab(checkpoint_strategy("ddp", fabric=True))
    tried["raised at once"] = raised(lambda: sync.save(f"{run}/file/b.ckpt"))
    made = {"fsdp": checkpoint_strategy("fsdp", fabric=True)}
    made["model_parallel"] = checkpoint_strategy(
        "model_parallel", fabric=True, parallelize_fn=parallel
    )
    tried |= {name: type(strategy).__name__ for name, strategy in made.items()}
    return tried


def test_every_strategy_is_had_by_its_name(ranks: list[Tried]) -> None:
    """Of checkpoint_strategy, in the Trainer: an asynchronous save by hand is whole after ``wait``, and the
    run that continues from it ends in the bits of one that was never interrupted.
    """
    for name, told in ((name, tried["by name"][name]) for tried in ranks for name in BY_NAME):
        assert (told["resumed"], told["steps"]) == (True, 12), name
        assert bool(told["sharded"]) is (name != "ddp"), name


def test_fabric_has_its_strategies_by_the_same_names(ranks: list[Tried]) -> None:
    """Saved, loaded, and a save that rank 0 could not make is an error on both ranks."""
    zero, one = (tried["fabric by name"] for tried in ranks)
    for when in ("raised", "raised at once"):
        assert zero[when].startswith("NotFoundError")
        assert one[when].startswith("CollectiveError: rank 0 failed")
    for told in (zero, one):
        assert (told["steps"], told["same"]) == (3, True)
        assert told["fsdp"] == "CkptfsFabricFSDPStrategy"
        assert told["model_parallel"] == "CkptfsFabricModelParallelStrategy"


def try_full_disk(run: str, mode: str) -> Tried:
    """Rank 1 has no space for its part of the second checkpoint."""
    os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:open_write:*__1_0.distcp:2@1"
    victim.install()  # counts again
    tried: Tried = {"raised": raised(lambda: fit(CkptfsModelParallelStrategy, run, 3, mode=mode))}
    return {**tried, "kept": listed(run), "there": sorted(os.listdir(run))}


def try_ddp(run: str) -> Tried:
    """Rank 0, which writes for both, has no space for the second file."""
    os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:close:*.ckpt:2"
    victim.install()
    strategy = CkptfsDDPStrategy(checkpoint_io=CkptfsIO())
    trainer = trainer_of(strategy, 3, ModelCheckpoint(run))
    tried: Tried = {"raised": raised(lambda: trainer.fit(Plain(), loader()))}
    torch.distributed.barrier()
    return {**tried, "there": sorted(os.listdir(run))}


def listed(uri: str) -> list[str]:
    """The committed ones, oldest first, when every rank is here."""
    torch.distributed.barrier()
    return [checkpoint.uri.name for checkpoint in ckptfs.list_checkpoints(uri)]


def test_the_trainer_retains_and_resumes(ranks: list[Tried]) -> None:
    """ModelCheckpoint over sharded checkpoints, asynchronous at first: what it drops is gone from the
    log, and the run that continues from last.ckpt ends in the same bits.
    """
    for told in (tried[f"trainer {kind}"] for kind in ("file", "s3") for tried in ranks):
        assert told["kept"] == ["epoch=1-step=8.ckpt", "last.ckpt"]
        assert str(told["start"]).endswith("/last.ckpt")
        assert told["resumed"]
        assert told["kept then"] == ["epoch=2-step=12.ckpt", "last.ckpt"]


def test_the_trainer_reads_what_stock_wrote_and_stock_reads_ours(ranks: list[Tried]) -> None:
    """Directories and single files, with optimizer and progress; what stock wrote is not removed."""
    for tried in ranks:
        told = tried["trainer stock"]
        assert (told["from stock"], told["stock from ours"], told["from full"]) == (True,) * 3
        assert told["stock stays"]
        assert told["full"] == ["epoch=1-step=8.ckpt", "last.ckpt"]
        assert told["full then"] == ["epoch=2-step=12.ckpt", "last.ckpt"]


def test_a_rank_without_space_fails_the_save_on_both(ranks: list[Tried]) -> None:
    """The same error on both ranks, synchronous or not, and save_top_k=1 has kept the one before."""
    for told in (tried[f"full {mode}"] for mode in ("sync", "async") for tried in ranks):
        assert told["raised"].startswith("CollectiveError")
        assert "rank 1" in told["raised"]
        assert told["kept"] == ["epoch=0-step=4.ckpt"]
        assert told["there"] == [".ckptfs", "epoch=0-step=4.ckpt"]


def test_every_rank_of_ddp_hears_of_a_failed_save(ranks: list[Tried]) -> None:
    """The rank that writes raises its own error, the other one reports it; the file before stays."""
    zero, one = (tried["ddp"] for tried in ranks)
    assert zero["raised"].startswith("NoSpaceError")
    assert one["raised"].startswith("CollectiveError: rank 0 failed")
    assert zero["there"] == ["epoch=0-step=4.ckpt"]


def test_fsdp_too(ranks: list[Tried]) -> None:
    """FSDPStrategy of Fabric and of the Trainer: saved, resumed, and read by the other side, each rank's
    shards bit for bit.
    """
    for told in (tried["fsdp"] for tried in ranks):
        assert (told["resumed"], told["stock reads ours"], told["ours reads stock's"]) == (
            True,
        ) * 3
        assert (told["resumed at"], told["stock reads ours at"]) == (3, 3)
        assert (told["trainer"], told["trainer stock"]) == (True, True)
        assert told["kept"] == ["epoch=1-step=8.ckpt", "last.ckpt"]


def test_an_export_is_no_checkpoint_to_go_on_from(ranks: list[Tried]) -> None:
    """save_checkpoint(weights_only=True) is listed as weights, last_checkpoint passes it by, and to resume from it
    is an error that does not advise strict=False alone.
    """
    for rank in ranks:
        assert rank["fsdp"]["exports"] == {"export-0.ckpt": "weights", "export-1.ckpt": "weights"}
        assert "export" not in rank["fsdp"]["last beside exports"]
        assert "ckptfs.latest() of its run" in str(rank["fsdp"]["resumed from an export"])
