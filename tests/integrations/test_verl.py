"""verl: one decision over worker groups and driver, its own files, and what stock verl loses."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.errors import StateError
from ckptfs.integrations._support.step_driver import PartSaver
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.integrations.worker_group import WorkerGroup

pytest.importorskip("verl", reason="verl is not installed: make test-integrations")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of engines that are not installed
    import fsspec
    import torch
    import torch.distributed as dist
    import verl.workers.engine.fsdp.transformer_impl as engine
    from omegaconf import OmegaConf
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from ckptfs.integrations.verl import (
        CkptfsDriver,
        CkptfsFSDPCheckpointManager,
        CkptfsTrainer,
        plug,
    )

pytestmark = pytest.mark.integrations


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TRACKER = "latest_checkpointed_iteration.txt"
# The driver, at the commit of step 2; and an actor, while it uploads its part of it.
COMMIT = Kill("create", "*.ckptfs/log/*", nth=3)
UPLOAD = Kill("*", "*global_step_2/actor/*rank_1.pt", rank=1)


def test_a_killed_run_goes_on_where_it_was(store: Store, mode: Mode, cell: Cell) -> None:
    """A driver killed at the commit, an actor in its upload: that step is lost and nothing else."""
    is_upload = store.kind in ("s3", "gcs") and mode == "async"
    with cell("verl", store, mode):
        told = story("verl", store, mode, kill=UPLOAD if is_upload else COMMIT, launcher="python")
    assert told.resumed.resumed == "1"


# -- groups of ranks ------------------------------------------------------------------------------


class Optimizer(torch.optim.AdamW):
    """One that cannot be saved while it is sick."""

    is_sick = False

    def state_dict(self) -> dict[str, Any]:
        """Fail in the midst of verl's save."""
        if self.is_sick:
            raise OSError(28, "no space left on device")
        return super().state_dict()


class Rank:
    """One rank of a worker group: a tiny sharded model, and a manager of verl's or of ours."""

    def __init__(self, kind: str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=32, num_attention_heads=2, architectures=["LlamaForCausalLM"], **SIZES
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        model: Any = fully_shard(LlamaForCausalLM(config), mesh=mesh)
        self.optimizer = Optimizer(model.parameters(), 0.01)
        self.model = model
        cls = CkptfsFSDPCheckpointManager if kind == "ours" else FSDPCheckpointManager
        words = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))  # noqa: S106 - no password
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        self.manager = cls(model, self.optimizer, processing_class=tokenizer, **options)
        self.train()

    def train(self) -> None:
        """One step."""
        tokens = torch.arange(8)[None]
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sick(self, rank: int) -> None:
        """From now on this rank alone fails in its saves; -1: none does."""
        self.optimizer.is_sick = self.manager.rank == rank

    def save_checkpoint(self, *given: Any, **told: Any) -> None:
        """As a worker of verl's: what it returns is lost."""
        self.manager.save_checkpoint(*given, **told)

    def load_checkpoint(self, *given: Any, **told: Any) -> None:
        """As a worker of verl's."""
        self.manager.load_checkpoint(*given, **told)

    def leave(self) -> None:
        """Close the manager."""
        self.manager.close()

    def state(self) -> list[bytes]:
        """This rank's shards of parameters and moments."""
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        tensors = [getattr(t, "_local_tensor", t) for t in [*self.model.parameters(), *moments]]
        return [t.detach().numpy().tobytes() for t in tensors]

    def embedding(self) -> torch.Tensor:
        """The whole of a sharded parameter."""
        whole: torch.Tensor = self.model.get_input_embeddings().weight.full_tensor().detach()
        return whole

    def tried(self, method: str, *given: Any, **told: Any) -> tuple[str, float]:
        """What a call raises, "" if nothing, and how long it took."""
        began = time.monotonic()
        try:
            getattr(self, method)(*given, **told)
        except Exception as error:  # noqa: BLE001 - any
            return f"{type(error).__name__}: {error}", time.monotonic() - began
        return "", time.monotonic() - began


@contextlib.contextmanager
def ranks(kind: str, size: int = 2, **options: Any) -> Iterator[WorkerGroup]:
    """A worker group of forked processes."""
    with contextlib.closing(WorkerGroup(_made(kind, options), size)) as group:
        yield group


def _made(kind: str, options: Mapping[str, Any]) -> Any:
    return lambda: Rank(kind, **options)


def _steps(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.glob("global_step_*/actor"))


def test_stock_deletes_before_it_commits_and_forgets(tmp_path: Path) -> None:
    """Stock: a save that fails has cost an old one, and a restart never deletes; ours: neither."""
    with ranks("stock", 1) as group:
        for step in (1, 2):
            group.save_checkpoint(f"{tmp_path}/stock/global_step_{step}/actor", None, step, 2)
        group.sick(0)
        with pytest.raises(OSError, match="no space"):
            group.save_checkpoint(f"{tmp_path}/stock/global_step_3/actor", None, 3, 2)
    found = [p for p in _steps(tmp_path / "stock") if not p.startswith("global_step_3")]
    assert found == ["global_step_2/actor"]  # 1 is gone, and 3 was never there
    with ranks("stock", 1) as group:
        group.save_checkpoint(f"{tmp_path}/stock/global_step_4/actor", None, 4, 1)
    assert "global_step_2/actor" in _steps(tmp_path / "stock")  # one was to stay

    uri = tmp_path / "ours"
    with ranks("ours", remote_dir=str(uri)) as group:
        for step in (1, 2):
            group.save_checkpoint(f"x/global_step_{step}/actor", None, step, 2)
        group.sick(1)
        told = group.tried("save_checkpoint", "x/global_step_3/actor", None, 3, 2)
        assert "OSError" in told[1][0]
        assert "CollectiveError" in told[0][0]
        assert _steps(uri) == ["global_step_1/actor", "global_step_2/actor"]
        group.sick(-1)
        group.save_checkpoint("x/global_step_3/actor", None, 3, 2)
        group.leave()
    assert _steps(uri) == ["global_step_2/actor", "global_step_3/actor"]
    with ranks("ours", remote_dir=str(uri)) as group:
        group.save_checkpoint("x/global_step_4/actor", None, 4, 1)
        group.leave()
    assert [p.name for p in uri.glob("global_step_*")] == ["global_step_4"]


def test_a_rank_that_fails_in_the_background_is_told_at_the_next_call(tmp_path: Path) -> None:
    """An upload that fails on one rank is raised on all at the next save, and nothing is visible."""
    with ranks("ours", remote_dir=str(tmp_path / "run"), mode="async") as group:
        group.save_checkpoint("x/global_step_1/actor", None, 1)
        group.save_checkpoint(None)
        (tmp_path / "run/.ckptfs/attempts").rmdir()
        (tmp_path / "run/.ckptfs/attempts").write_text("in the way")
        told = group.tried("save_checkpoint", "x/global_step_2/actor", None, 2)
        if not any(problem for problem, _ in told):
            told = group.tried("save_checkpoint", None)
        assert all(problem for problem, _ in told), told
    assert ckptfs.DirectoryManager(tmp_path / "run", name="global_step_{N}").steps == [1]


def test_readers_of_both_kinds(store: Store, tmp_path: Path) -> None:
    """Stock verl and its merger read what ours wrote, ours what stock wrote, through any URI."""
    here = tmp_path / "got"
    with ranks("ours", remote_dir=store.uri) as group:
        group.save_checkpoint("x/global_step_1/actor", None, 1)
        written, embedding = group.state(), group.embedding()[0]
    _plain(store).get(_bare(store, "global_step_1/actor"), str(here), recursive=True)
    with ranks("stock", seed=7) as group:
        group.load_checkpoint(str(here))
        assert group.state() == written
        group.train()
        group.save_checkpoint(f"{tmp_path}/global_step_7/actor", None, 7)
        stock = group.state()
    _plain(store).put(
        f"{tmp_path}/global_step_7/actor", _bare(store, "global_step_7/actor"), recursive=True
    )
    with ranks("ours", seed=8, remote_dir=store.uri) as group:
        group.load_checkpoint("elsewhere/global_step_7/actor")  # put there by another tool
        assert group.state() == stock
        group.load_checkpoint(f"{tmp_path}/global_step_7/actor", None)
        group.load_checkpoint("elsewhere/global_step_1/actor")
        assert group.state() == written
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(here),
        target_dir=f"{tmp_path}/hf",
        hf_model_config_path=f"{here}/huggingface",
    )
    FSDPModelMerger(config).merge_and_save()
    merged = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/hf")
    assert torch.equal(merged.get_input_embeddings().weight.float(), embedding.bfloat16().float())


def _plain(store: Store) -> Any:
    return fsspec.filesystem(
        "file" if store.kind in ("file", "nfs") else store.kind, **store.storage_options
    )


def _bare(store: Store, name: str) -> str:
    return f"{store.uri.partition('://')[2] or store.uri}/{name}"


def test_bad_input_is_one_typed_error_on_all_ranks(tmp_path: Path) -> None:
    """Nothing there, nowhere to save, another number of ranks, a step that exists: an error, on all."""
    uri = tmp_path / "run"
    with ranks("ours", 1, remote_dir=str(uri)) as group:
        group.save_checkpoint("x/global_step_1/actor", None, 1)
        group.leave()
    with ranks("ours", remote_dir=str(uri)) as group:
        cases = {
            "NotFoundError": ("load_checkpoint", "x/global_step_9/actor"),
            "saved by 1 ranks, loaded by 2": ("load_checkpoint", "x/global_step_1/actor"),
            "CommitConflictError": ("save_checkpoint", "x/global_step_1/actor", None, 1),
            "let CkptfsTrainer": ("save_checkpoint", "x/global_step_2/critic", None, 2),
        }
        for what, call in cases.items():
            told = group.tried(*call)
            assert all(what in problem for problem, _ in told), (what, told)
    with ranks("ours") as group:
        told = group.tried("save_checkpoint", "x/global_step_1/actor", None, 1)
        assert all("set CKPTFS_URI" in problem for problem, _ in told)


def test_a_tracker_is_believed_by_verl_and_not_by_us(tmp_path: Path) -> None:
    """A torn tracker stops stock verl; ours asks the log, and leaves a tracker that stock can read."""
    local, uri = tmp_path / "local", tmp_path / "run"
    local.mkdir()
    with ranks("ours") as group, CkptfsDriver(uri, local) as driver:
        for step in (1, 2):
            with driver.saving(step, ["actor"]) as saving:
                group.save_checkpoint("actor", saving.part("actor"), step)
                Path(saving.path, "data.pt").write_text(f"loader at {step}")
        assert (uri / TRACKER).read_text() == "2"
        for folder in (local, uri):
            (folder / TRACKER).write_text("")  # what a truncating write leaves, killed half-way
        with pytest.raises(ValueError, match="invalid literal"):
            find_latest_ckpt_path(str(uri))
        resumed = driver.resume()
        assert resumed == f"{local}/global_step_2"
        assert Path(resumed, "data.pt").read_text() == "loader at 2"
        assert find_latest_ckpt_path(str(local)) == resumed
        assert (uri / "global_step_2/data.pt").exists()  # verl's own layout, in place


# -- verl's own trainer ------------------------------------------------------------------------------


class Trainer(CkptfsTrainer, RayPPOTrainer):
    """verl's trainer, as far as it saves and loads; its groups are forked processes."""

    def __init__(self, local: Path, uri: Path | str, mode: Mode, groups: Sequence[Any]) -> None:
        trainer = {
            "default_local_dir": str(local),
            "default_hdfs_dir": None,
            "resume_mode": "auto",
            "resume_from_path": None,
            "del_local_ckpt_after_load": False,
            "max_actor_ckpt_to_keep": 2,
            "max_critic_ckpt_to_keep": 2,
        }
        actor = {"actor": {"checkpoint": {"async_save": mode == "async"}}}
        self.config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": actor})
        self.ckptfs = {"remote_dir": str(uri)}  # type: ignore[misc]
        self.use_critic = True
        self.actor_rollout_wg, self.critic_wg = groups
        self.train_dataloader = StatefulDataLoader(list(range(20)), batch_size=1)
        self.data = iter(self.train_dataloader)
        self.global_steps = 0

    def steps(self, number: int) -> None:
        """Train so many."""
        for _ in range(number):
            next(self.data)
            self.global_steps += 1
            self.actor_rollout_wg.train()
            self.critic_wg.train()


@pytest.mark.parametrize("way", ["sync", "async"])
def test_actor_critic_and_driver_are_one_decision(way: Mode, tmp_path: Path) -> None:
    """verl's trainer, two groups: a critic that fails leaves the step before, of all of them, and an
    empty machine continues from there with the same weights and the next sample.
    """
    uri = tmp_path / "run"
    with ranks("ours", mode=way) as actor, ranks("ours", 1, mode=way, seed=3) as critic:
        trainer = Trainer(tmp_path / "a", uri, way, [actor, critic])
        trainer.steps(2)
        trainer._save_checkpoint()
        trainer._flush()
        trainer._driver().wait()
        states = [actor.state(), critic.state()]
        assert (uri / TRACKER).read_text() == "2"
        trainer.steps(2)
        critic.sick(0)
        with pytest.raises(OSError, match="no space"):
            trainer._save_checkpoint()
        assert trainer._driver().steps == [2]
        assert [p.name for p in uri.glob("global_step_*")] == ["global_step_2"]
        assert (uri / TRACKER).read_text() == "2"
        critic.sick(-1)
        actor.tried("save_checkpoint", None)  # its part of the step that was given up
        again = Trainer(tmp_path / "empty", uri, way, [actor, critic])
        again._load_checkpoint()
        assert again.global_steps == 2
        assert [actor.state(), critic.state()] == states
        assert int(next(iter(again.train_dataloader))) == 2
        trainer._driver().close()
        again.data = iter(again.train_dataloader)
        for _ in range(3):  # two of the three stay, each with all its parts
            again.steps(1)
            again._save_checkpoint()
        again._flush()
        again._driver().close()
    parts = sorted(
        str(p.relative_to(uri)) for p in uri.glob("global_step_*/*") if "." not in p.name
    )
    kept = [p for p in parts if not p.rpartition("/")[2][:1].isdigit()]
    assert kept == [f"global_step_{n}/{part}" for n in (4, 5) for part in ("actor", "critic")]


class Alone:
    """A group of one rank in this process, with one file."""

    loaded = ""

    def train(self) -> None:
        """Nothing to learn."""

    def save_checkpoint(self, path: str | None, part: Any = None, *_: Any, **__: Any) -> None:
        """Seal the part that it is given."""
        if path is not None:
            PartSaver(is_async=False).save(part, lambda at: _touch(f"{at}/weights.pt"))

    def load_checkpoint(self, _: str, where: str, **__: Any) -> None:
        """Note from where."""
        self.loaded = where


def _touch(path: str) -> None:
    Path(path).touch()


def test_resume_path_is_one_commit_of_this_run(tmp_path: Path) -> None:
    """A step that is named by its path comes with the data.pt of the same commit, into an empty
    directory; a path of another run is refused, not mixed with this one.
    """
    uri, local = "memory://verl-resume/run", tmp_path / "a"
    trainer = Trainer(local, uri, "sync", [Alone(), Alone()])
    for _ in range(2):
        trainer.steps(2)
        trainer._save_checkpoint()
    trainer._driver().close()
    for parent in (uri, str(tmp_path / "empty")):
        again = Trainer(tmp_path / "empty", uri, "sync", [Alone(), Alone()])
        again.config.trainer.resume_mode = "resume_path"
        for wrong in (str(tmp_path / "other/global_step_2"), f"{uri}/newest"):
            again.config.trainer.resume_from_path = wrong
            with pytest.raises(StateError, match="not a global_step_N of this run"):
                again._load_checkpoint()
        again.config.trainer.resume_from_path = f"{parent}/global_step_2"
        again._load_checkpoint()
        assert again.global_steps == 2
        assert int(next(iter(again.train_dataloader))) == 2
        assert again.actor_rollout_wg.loaded == f"{uri}/global_step_2/actor"
        again._driver().close()


def test_verl_is_plugged_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """After plug() the FSDP engine of verl makes our manager."""
    monkeypatch.setattr(engine, "FSDPCheckpointManager", FSDPCheckpointManager)
    plug()
    assert engine.FSDPCheckpointManager is CkptfsFSDPCheckpointManager
