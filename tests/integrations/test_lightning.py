"""Lightning, checkpoints of one file: what the stock path loses is shown, then that ours does not.

In this process there is one rank; the story has two. What is two ranks' business otherwise, and
strategies that shard, are in test_lightning_strategies.py; how files are ordered, removed and kept is
tested without Lightning in tests/manager/test_object_files.py.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

pytest.importorskip("lightning")  # before what needs it

import lightning as L  # noqa: N812 - as everybody writes it
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import ckptfs
from ckptfs.errors import NoSpaceError, NotFoundError, StateError, UriError
from ckptfs.integrations.lightning import CkptfsIO, checkpoint_strategy, last_checkpoint
from ckptfs.storage import registry
from ckptfs.storage.base import Storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.uri import Uri
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.measures import own_threads

pytestmark = [pytest.mark.integrations]

Faults = Callable[..., Plan]


class Net(L.LightningModule):
    """Nine numbers and an optimizer with memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(
    plugin: Any,
    dirpath: Any,
    epochs: int,
    *,
    start: Any = None,
    loader: Any = None,
    limit: int | None = None,
    checkpoint: Any = ModelCheckpoint,
    callbacks: Any = (),
    strategy: Any = "auto",
    **saves: Any,
) -> tuple[Net, Any]:
    """Train in this process; one checkpoint per epoch by default."""
    callback = checkpoint(dirpath, **saves)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        max_steps=-1 if limit is None else limit,
        callbacks=[callback, *callbacks],
        plugins=[] if plugin is None else [plugin],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    data: Any = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    loader = loader or torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(net, loader, ckpt_path=start)
    return net, callback


def same(one: Any, other: Any) -> bool:
    """Whether two nets have the same bits."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Puts a plan around every storage that ckptfs opens from then on."""

    def plant(*planned: Fault) -> Plan:
        plan, choose = Plan(list(planned)), registry._factory

        def chosen(uri: Uri) -> registry.Factory:
            factory = choose(uri)

            def opened(place: Uri, options: Mapping[str, Any]) -> Storage:
                return FaultyStorage(factory(place, options), plan)

            return opened

        monkeypatch.setattr(registry, "_factory", chosen)
        return plan

    return plant


def full_at(key: str, nth: int = 1) -> Fault:
    """No space when that file is closed."""
    return Fault("close", key, nth, Fail(OSError(errno.ENOSPC, "no space left")))


class FullDisk(LocalFileSystem):
    """A disk that is full from the second checkpoint on, as fsspec sees it.

    It says so once something was removed from it: a failure that is faster than the trainer's next
    line would be raised there, before the removal.
    """

    protocol = "fulldisk"
    root_marker = "/"
    written = 0
    removed = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("fulldisk://")))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            type(self).written += 1
            if type(self).written > 1:
                assert self.removed.wait(240), "nothing was removed"
                raise OSError(errno.ENOSPC, "no space left")
        return super().open(path, mode, **options)

    def rm(self, path: Any, *args: Any, **options: Any) -> None:
        super().rm(path, *args, **options)
        self.removed.set()


# -- the story ---------------------------------------------------------------------------------


def test_a_run_killed_while_it_saves_resumes_to_the_same_bits(
    store: Store, mode: Mode, cell: Cell
) -> None:
    """Rank 0 dies between its second checkpoint and last.ckpt; the next run ends as if it had not."""
    with cell("Lightning", store, mode):
        told = story("lightning", store, mode, kill=Kill("close", "*last.ckpt", nth=2, rank=0))
    assert told.resumed.resumed == "4"
    if store.kind == "file":  # the file that the killed save was writing went with the next one
        assert not list(Path(store.uri).rglob(".partial-*"))


# -- deferred removal --------------------------------------------------------------------------


class FirstFinished(AsyncCheckpointIO):
    """The stock one, with its first file there before training continues, however slow its thread is."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        first = self._executor is None
        super().save_checkpoint(*args, **options)
        if first:
            self._executor.submit(int).result()  # its one thread takes them in order


def test_stock_async_loses_everything_when_the_second_save_fails(tmp_path: Path) -> None:
    """AsyncCheckpointIO with save_top_k=1: the first file is removed before the second is there."""
    fsspec.register_implementation("fulldisk", FullDisk, clobber=True)
    FullDisk.written = 0
    FullDisk.removed.clear()
    run = tmp_path / "run"
    with pytest.raises(OSError, match="no space"):
        fit(FirstFinished(), f"fulldisk://{run}", 2, save_top_k=1)
    assert list(run.glob("*.ckpt")) == []


@pytest.mark.parametrize("how", ["sync", "async"])
def test_the_last_checkpoint_stays_until_the_next_is_committed(
    tmp_path: Path, faults: Faults, how: Mode
) -> None:
    """The same failure through CkptfsIO: it is raised, typed, and the first checkpoint is there."""
    faults(full_at("epoch=1*"))
    with pytest.raises(NoSpaceError, match="epoch=1"):
        fit(CkptfsIO(how), tmp_path, 2, save_top_k=1)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=4.ckpt"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]


# -- what is never removed -----------------------------------------------------------------------


@pytest.fixture
def bucket(lab_s3: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A fresh place on S3, with the environment that s3fs needs."""
    for variable, value in lab_s3.environment.items():
        monkeypatch.setenv(variable, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return Store("s3", lab_s3.fresh(), lab_s3.environment, lab_s3.storage_options())


def names(uri: str) -> list[str]:
    """The checkpoints below a URI, asked of the store again."""
    fs, path = fsspec.core.url_to_fs(uri)
    fs.invalidate_cache()
    return sorted(found.rpartition("/")[2] for found in fs.glob(f"{path}/*.ckpt"))


def test_what_a_run_was_resumed_from_stays_on_s3(bucket: Store) -> None:
    """Stock deletes the other run's checkpoint that it resumed from (Lightning #21813); ours does not,
    in the same directory either, and still deletes what an earlier process of this run wrote.
    """
    one, two = bucket / "one", bucket / "two"
    fit(None, one, 1)
    fit(None, two, 2, start=f"{one}/epoch=0-step=4.ckpt")
    assert names(one) == []

    three, four = bucket / "three", bucket / "four"
    fit(CkptfsIO(), three, 1)
    fit(CkptfsIO(), four, 2, start=f"{three}/epoch=0-step=4.ckpt")
    assert names(three) == ["epoch=0-step=4.ckpt"]
    assert names(four) == ["epoch=1-step=8.ckpt"]
    fit(CkptfsIO(), three, 3, start=f"{three}/epoch=0-step=4.ckpt")
    assert names(three) == ["epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt"]


def test_files_of_an_earlier_process_go_and_strangers_stay(tmp_path: Path) -> None:
    """What ModelCheckpoint remembers of its run may be removed; what no callback remembers may not."""
    settings: dict[str, Any] = {"save_top_k": 2, "monitor": "step", "mode": "max"}
    fit(CkptfsIO(), tmp_path, 2, **settings)
    stranger = tmp_path / "stranger.ckpt"
    torch.save({}, stranger)
    io = CkptfsIO()
    io.load_checkpoint(tmp_path / "epoch=1-step=8.ckpt")
    io.remove_checkpoint(tmp_path / "epoch=0-step=4.ckpt")  # nothing was saved yet
    assert (tmp_path / "epoch=0-step=4.ckpt").exists()
    io.save_checkpoint({}, tmp_path / "new.ckpt")
    for name in ("stranger", "epoch=0-step=4", "epoch=1-step=8"):
        io.remove_checkpoint(tmp_path / f"{name}.ckpt")
    left = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert left == ["epoch=1-step=8.ckpt", "new.ckpt", "stranger.ckpt"]


# -- resuming, and who else reads ----------------------------------------------------------------


def test_stock_begins_anew_on_s3_and_last_checkpoint_does_not(bucket: Store) -> None:
    """ckpt_path="last" finds nothing where the directory is remote (Lightning #18261)."""
    run = bucket / "run"
    assert last_checkpoint(run) is None
    fit(CkptfsIO(), run, 2, save_last=True)
    fresh, _ = fit(None, bucket / "elsewhere", 0)
    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        fit(None, run, 0, start="last", save_last=True)
    start = last_checkpoint(run)
    assert start == f"{run}/last.ckpt"
    whole, _ = fit(None, bucket / "whole", 3)
    resumed, _ = fit(CkptfsIO("async"), run, 3, start=start, save_last=True)
    assert same(whole, resumed)
    assert not same(whole, fresh)


def test_last_checkpoint_asks_for_a_name_rather_than_begin_anew(tmp_path: Path) -> None:
    """The highest version of last.ckpt; an error where there are only others, or sharded ones too."""
    torch.save({}, tmp_path / "epoch=0.ckpt")
    with pytest.raises(NotFoundError, match=r"no last\.ckpt"):
        last_checkpoint(tmp_path)
    for name in ("last", "last-v2", "last-v10", "last-vx"):
        torch.save({}, tmp_path / f"{name}.ckpt")
    assert last_checkpoint(tmp_path) == str(tmp_path / "last-v10.ckpt")
    ckptfs.save({"n": 1}, tmp_path / "sharded.ckpt")
    with pytest.raises(StateError, match="the last one is ambiguous"):
        last_checkpoint(tmp_path)


def test_each_reads_what_the_other_wrote(store: Store) -> None:
    """load_from_checkpoint on the plain URI, a stock Trainer's resume of ours, and ours of stock's."""
    run, stock = store / "run", store / "stock"
    net, callback = fit(CkptfsIO(), run, 2)
    assert callback.best_model_path == f"{run}/epoch=1-step=8.ckpt"
    read = Net.load_from_checkpoint(f"{run}/epoch=1-step=8.ckpt")
    assert same(read, net)
    whole, _ = fit(None, stock, 3, save_top_k=-1)
    theirs, _ = fit(None, store / "a", 3, start=f"{run}/epoch=1-step=8.ckpt")
    ours, _ = fit(CkptfsIO(), store / "b", 3, start=f"{stock}/epoch=1-step=8.ckpt")
    assert same(whole, theirs)
    assert same(whole, ours)


@pytest.mark.parametrize("plugin", [None, CkptfsIO("async")], ids=["zero-code", "CkptfsIO"])
def test_the_protocol_needs_no_code(store: Store, plugin: Any) -> None:
    """ModelCheckpoint("ckptfs+...") saves, retains and resumes by URI, and plain readers read it."""
    plain = store.uri if "://" in store.uri else f"file://{store.uri}"
    run = f"ckptfs+{plain}"
    fit(plugin, run, 2, save_last=True)
    assert names(store.uri) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    resumed, _ = fit(plugin, run, 3, start=f"{run}/last.ckpt", save_last=True)
    whole, _ = fit(None, store / "whole", 3)
    assert same(whole, resumed)
    assert same(Net.load_from_checkpoint(f"{store.uri}/last.ckpt"), whole)


def test_names_are_not_given_twice_on_s3(bucket: Store) -> None:
    """fsspec's memory of a directory does not hide what CkptfsIO wrote: versions are counted."""
    fit(None, bucket.uri, 1, filename="stock")  # the directory is there, and listed at the start
    top: dict[str, Any] = {"save_top_k": 3, "monitor": "step", "mode": "max"}
    fit(CkptfsIO(), bucket.uri, 3, filename="best", **top)
    assert names(bucket.uri) == ["best-v1.ckpt", "best-v2.ckpt", "best.ckpt", "stock.ckpt"]


def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """With a stateful loader: the next batch is the one that the killed run would have taken."""
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))

    def loading() -> Any:
        return loader(data, batch_size=4, num_workers=0)

    every = {"every_n_train_steps": 2, "save_top_k": -1}
    whole, _ = fit(None, tmp_path / "whole", 2, loader=loading())
    fit(CkptfsIO("async"), tmp_path / "run", 2, loader=loading(), limit=4, **every)
    start = tmp_path / "run" / "epoch=0-step=4.ckpt"
    resumed, _ = fit(CkptfsIO(), tmp_path / "run", 2, loader=loading(), start=start, **every)
    assert same(whole, resumed)


# -- bad input -----------------------------------------------------------------------------------


def test_bad_places_are_told_and_nothing_is_lost(bucket: Store, tmp_path: Path) -> None:
    """No such bucket, no such file, a damaged file, a URI that a Path has been around."""
    io = CkptfsIO()
    with pytest.raises(NotFoundError, match="no-such-bucket"):
        io.save_checkpoint({}, "s3://no-such-bucket/run/a.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(bucket / "nothing.ckpt")
    with pytest.raises(UriError, match="s3:/bucket"):
        io.save_checkpoint({}, Path("s3://bucket/a.ckpt"))
    (tmp_path / "a.ckpt").write_bytes(b"PK\x03\x04 no more than that")
    with pytest.raises(ValueError, match=r"a\.ckpt"):
        io.load_checkpoint(tmp_path / "a.ckpt")


def test_a_failed_last_keeps_the_old_one(tmp_path: Path, faults: Faults) -> None:
    """last.ckpt is replaced whole or not at all."""
    faults(full_at("last.ckpt", 2))
    with pytest.raises(NoSpaceError):
        fit(CkptfsIO(), tmp_path, 2, save_last=True)
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 4


def test_a_save_by_hand_is_waited_for(tmp_path: Path) -> None:
    """``CkptfsIO("async").wait``: the file is whole when it returns, and a save that failed is raised."""
    io = CkptfsIO("async")
    io.save_checkpoint({"step": 1, "bytes": torch.zeros(1 << 20)}, tmp_path / "by-hand.ckpt")
    io.wait()
    assert torch.load(tmp_path / "by-hand.ckpt", weights_only=True)["step"] == 1
    (tmp_path / "file").write_text("no directory")
    io.save_checkpoint({"step": 2}, tmp_path / "file" / "by-hand.ckpt")
    with pytest.raises(ckptfs.StorageError):
        io.wait()
    io.teardown()


def test_one_process_has_its_strategy_by_name(
    bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """checkpoint_strategy("single_device"): saves in the background, continues from them, and takes options."""
    reference, _ = fit(None, tmp_path / "stock", 3)

    def ours() -> Any:
        return checkpoint_strategy("single_device", mode="async", device="cpu")

    fit(None, tmp_path, 2, strategy=ours(), save_last=True)
    start = last_checkpoint(tmp_path)
    net, _ = fit(None, tmp_path, 3, strategy=ours(), start=start, save_last=True)
    assert same(net, reference)
    options = dict(bucket.storage_options)
    for variable in bucket.env:
        monkeypatch.delenv(variable)
    for fabric in (False, True):
        strategy = checkpoint_strategy("single_device", storage_options=options, fabric=fabric)
        strategy.checkpoint_io.save_checkpoint({"step": 7}, bucket / "by-hand.ckpt")
        strategy.wait()
        found = strategy.checkpoint_io.load_checkpoint(bucket / "by-hand.ckpt")
        assert found == {"step": 7}


@pytest.mark.parametrize("fabric", [False, True])
@pytest.mark.parametrize("name", ["single_device", "ddp", "fsdp", "model_parallel"])
def test_the_mode_reaches_every_strategy(name: Any, fabric: bool) -> None:
    """Both ways save what is asked for; that an asynchronous save is waited for is shown by the stories."""
    modes: tuple[Any, ...] = ("sync", "async")
    more: Any = {"parallelize_fn": print} if fabric and name == "model_parallel" else {}
    for mode in modes:
        made = checkpoint_strategy(name, mode=mode, fabric=fabric, **more)
        if name in ("fsdp", "model_parallel"):
            assert made._named_runs._mode == mode
        else:
            assert made.checkpoint_io._files._is_async == (mode == "async")


def test_a_strategy_of_no_name_is_refused() -> None:
    """With those that there are."""
    unknown: Any = "deepspeed"
    with pytest.raises(
        StateError, match=r"no strategy 'deepspeed'.*single_device, ddp, fsdp, model"
    ):
        checkpoint_strategy(unknown)


class NamedByStep(ModelCheckpoint):
    """Its last checkpoint has another name each time."""

    CHECKPOINT_NAME_LAST = "last-{step}"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_link_to_the_last_checkpoint_replaces_the_one_before(tmp_path: Path, way: Any) -> None:
    """save_last="link": one link is left, and leads to the last file; files that it led to before stay."""
    plugin = CkptfsIO(way)
    fit(plugin, tmp_path, 3, checkpoint=NamedByStep, save_top_k=-1, save_last="link")
    links = [path for path in tmp_path.iterdir() if path.is_symlink()]
    assert [path.name for path in links] == ["last-step=12.ckpt"]
    assert links[0].resolve().name == "epoch=2-step=12.ckpt"
    assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 3


class Fails(L.Callback):
    """An exception in the second epoch of a fit."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_after_an_exception_in_fit_nothing_of_ours_runs(
    tmp_path: Path, faults: Faults, fails: bool
) -> None:
    """The save in flight has ended, well or badly, and so has the thread that wrote it."""
    before = own_threads()
    if fails:
        faults(full_at("epoch=0-step=4.ckpt"))
    with pytest.raises((ZeroDivisionError, NoSpaceError)) as caught:
        fit(CkptfsIO("async"), tmp_path, 3, callbacks=[Fails()], save_top_k=-1)
    assert isinstance(caught.value.__context__ if fails else caught.value, ZeroDivisionError)
    assert os.listdir(tmp_path) == ([] if fails else ["epoch=0-step=4.ckpt"])
    for thread in own_threads() - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name
