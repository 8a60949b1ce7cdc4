"""Transformers: the Trainer's checkpoints at a URI, and what the stock Trainer does with its own.

One group of two processes, on two simulated nodes with an output_dir each, trains for all claims but
the story's; what it saw is asserted one claim at a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, each_claim, error_of, story
from tests.multiprocess.harness import Rank, launch

pytestmark = pytest.mark.integrations

SCORES = [0.1, 0.9, 0.3, 0.2, 0.1, 0.0]  # the second step is the best
WHOLE = {"model.safetensors", "optimizer.pt", "trainer_state.json"}
WHOLE |= {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "training_args.bin", "config.json"}


def test_a_killed_run_resumes_to_the_same_state(store: Store, mode: Mode, cell: Cell) -> None:
    """A Trainer killed while rank 1 sends its files of the fourth checkpoint continues from the third, on
    a machine with an empty output_dir, to the state of an undisturbed run.
    """
    with cell("Transformers", store, mode):
        kill = Kill("[cr]*e", "*rng_state_1.pth", nth=4, rank=1)  # close, replace
        told = story("transformers", store, mode, kill=kill)
        assert told.resumed.resumed == "3"


# -- two processes that train ---------------------------------------------------------------------


def trains(rank: Rank) -> object:
    """What every rank saw, by claim."""
    rank.init_group()
    claims: dict[str, Callable[[Rank, Path], object]] = {
        "stock on_save": _stock_on_save,
        "two nodes": _two_nodes,
        "one node": _one_node,
        "resume": _resume,
        "forgotten resume": _forgotten_resume,
        "one more step": _one_more_step,
        "best": _best,
        "stock best": _stock_best,
        "failing rank": _failing_rank,
        "failing in the background": _failing_in_the_background,
        "final save": _final_save,
        "preempted": _preempted,
        "distributed": _distributed,
        "bad uri": _bad_uri,
    }
    return each_claim(rank, claims, Path(rank.args["top"]))


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))


def _arguments(folder: Path | str, **more: Any) -> Any:
    from transformers import TrainingArguments

    options = {"max_steps": 3, "save_steps": 1, "use_cpu": True, "report_to": "none"}
    return TrainingArguments(str(folder), **{"disable_tqdm": True, **options, **more})


def _trainer(args: Any, *callbacks: Any, **more: Any) -> Any:
    import torch
    from transformers import Trainer

    model = _model()
    data = [{"input_ids": (ids := torch.randint(32, (8,))), "labels": ids} for _ in range(64)]
    return Trainer(model, args, train_dataset=data, callbacks=list(callbacks), **more)


def _weights(trainer: Any) -> list[float]:
    tensor = next(trainer.model.parameters()).detach().flatten()[:4]
    return [float(value) for value in tensor]


def _apart(rank: Rank, place: Path) -> Path:
    """This node's own disk."""
    return place / f"node{rank.number}"


def _one_late(rank: Rank, late: int, args: Any, *callbacks: Any) -> tuple[Any, Any]:
    """A Trainer with a rank ``late`` that writes its last files when the other one is in on_save."""
    from transformers import Trainer, TrainerCallback

    key = f"{args.output_dir.split('/')[-2]}-in-on-save"

    class Says(TrainerCallback):
        listing: list[str]

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.listing = sorted(os.listdir(f"{args.output_dir}/checkpoint-{state.global_step}"))
            rank.store().set(f"{key}-{state.global_step}-{rank.number}", "")

    class Waits(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if rank.number == late:
                rank.store().wait([f"{key}-{self.state.global_step}-{1 - late}"])
            super()._save_rng_state(output_dir)

    trainer = _trainer(args, says := Says(), *callbacks)
    trainer.__class__ = Waits
    return trainer, says


def _stock_on_save(rank: Rank, place: Path) -> object:
    trainer, says = _one_late(rank, 0, _arguments(place / "shared", max_steps=1))
    trainer.train()
    return says.listing


def _two_nodes(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place), max_steps=1)
    saves = CkptfsCallback(place / "run", keep_latest=2)
    trainer, _ = _one_late(rank, 0, args, saves)
    trainer.train()
    left = sorted(os.listdir(args.output_dir))
    return {"committed": sorted(os.listdir(place / "run" / "checkpoint-1")), "left": left}


def _one_node(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    mine = os.environ["CKPTFS_NODE"]
    os.environ["CKPTFS_NODE"] = "shared"
    try:
        args = _arguments(place / "shared", max_steps=2)
        trainer, _ = _one_late(rank, 1, args, CkptfsCallback(place / "run"))
        trainer.train()
    finally:
        os.environ["CKPTFS_NODE"] = mine
    return sorted(os.listdir(place / "run" / "checkpoint-2"))  # the first claims the run


def _resume(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    run = place / "run"
    saves = CkptfsCallback(run, keep_latest=2)
    first = _trainer(_arguments(_apart(rank, place), max_steps=4), _stop_at(2), saves)
    first.train()
    # Another machine, where a half-written checkpoint is left.
    args = _arguments(place / f"other{rank.number}", max_steps=4)
    half = Path(args.output_dir, "checkpoint-3")
    half.mkdir(parents=True)
    (half / "rng_state_7.pth").write_bytes(b"of another world")
    stock = _last_checkpoint(args.output_dir)
    with CkptfsCallback(run, keep_latest=2) as again:
        trainer = _trainer(args, again)
        path = again.resume(args)
        resumed = again.step
        trainer.train(resume_from_checkpoint=path)
    straight = _trainer(_arguments(place / f"straight{rank.number}", max_steps=4))
    straight.train()
    reader = _trainer(_arguments(place / f"reader{rank.number}", max_steps=4))
    reader.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    with ckptfs.checkpoint_dir(place / "straight0" / "checkpoint-3", "read") as of_stock:
        ours = _trainer(_arguments(place / f"ours{rank.number}", max_steps=4))
        ours.train(resume_from_checkpoint=of_stock)
    end = _weights(straight)
    return {
        "stock takes": os.path.basename(stock),
        "resumed": resumed,
        "same": _weights(trainer) == end,
        "stock reads ours": _weights(reader) == end,
        "ours reads stock": _weights(ours) == end,
        "steps": _steps(run),
        "committed": sorted(os.listdir(run / "checkpoint-3")),
        "left": sorted(os.listdir(args.output_dir)),
    }


def _last_checkpoint(folder: str) -> str:
    from transformers.trainer_utils import get_last_checkpoint

    return str(get_last_checkpoint(folder))


def _stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == step

    return Stops()


def _forgotten_resume(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place), max_steps=2)
    _trainer(args, CkptfsCallback(place / "run")).train()
    again = _trainer(args, CkptfsCallback(place / "run"))
    return error_of(again.train)


def _one_more_step(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place), max_steps=2)
    _trainer(args, CkptfsCallback(place / "run")).train()
    saves = CkptfsCallback(place / "run")
    again = _trainer(args, saves)
    again.train(resume_from_checkpoint=saves.resume(args))
    steps = _steps(place / "run")
    return {"trained to": again.state.global_step, "steps": steps}


BY_SCORE = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "score",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}


def _scored(args: Any, first: int, *callbacks: Any) -> Any:
    scores = iter(SCORES[first:])
    few = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]} for _ in range(4)]
    return _trainer(
        args, *callbacks, eval_dataset=few, compute_metrics=lambda _: {"score": next(scores)}
    )


def _best(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    run = place / "run"
    saves = CkptfsCallback(run, keep_latest=1)
    args = _arguments(_apart(rank, place), max_steps=5, **BY_SCORE)
    first = _scored(args, 0, _stop_at(4), saves)
    first.train()
    kept = _steps(run)
    left = sorted(n for n in os.listdir(args.output_dir) if n[0] != ".")
    shutil.rmtree(args.output_dir)  # the node is gone
    other = _arguments(place / f"other{rank.number}", max_steps=5, **BY_SCORE)
    again = CkptfsCallback(run, keep_latest=1)
    trainer = _scored(other, 4, again)
    trainer.train(resume_from_checkpoint=again.resume(other))
    return {
        "kept": sorted(kept),
        "left": left,
        "loaded the best": _weights(trainer) == _saved_weights(run / "checkpoint-2"),
    }


def _saved_weights(folder: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [float(v) for v in next(model.parameters()).detach().flatten()[:4]]


def _stock_best(rank: Rank, place: Path) -> object:
    import torch.distributed as dist

    args = _arguments(place / "first", max_steps=5, **BY_SCORE)
    _scored(args, 0, _stop_at(4)).train()
    dist.barrier()
    if rank.number == 0:
        shutil.copytree(place / "first" / "checkpoint-4", place / "copied")
        shutil.move(place / "first", place / "away")
    dist.barrier()
    trainer = _scored(_arguments(place / "second", max_steps=5, **BY_SCORE), 4)
    trainer.train(resume_from_checkpoint=str(place / "copied"))
    return _weights(trainer) == _saved_weights(place / "away" / "checkpoint-2")


def _with_fault(fault: str | None) -> None:
    os.environ.pop("CKPTFS_TEST_FAULT", None)
    if fault is not None:
        os.environ["CKPTFS_TEST_FAULT"] = fault


def _failing_rank(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place), max_steps=4)
    _with_fault("fail=ENOSPC:close:*rng_state_1.pth:2" if rank.number else None)
    with CkptfsCallback(f"faults+file://{place}/run") as saves:
        said = error_of(_trainer(args, saves).train)
    _with_fault(None)
    left = sorted(n for n in os.listdir(args.output_dir) if n[0] != ".")
    with CkptfsCallback(place / "run", takeover="force") as again:
        trainer = _trainer(args, again)
        path = again.resume(args)
        resumed = again.step
        trainer.train(resume_from_checkpoint=path)
    steps = _steps(place / "run")
    return {"said": said, "left": left, "resumed": resumed, "steps": steps}


def _failing_in_the_background(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place), max_steps=4)
    _with_fault("fail=ENOSPC:close:*rng_state_1.pth:2" if rank.number else None)
    with CkptfsCallback(f"faults+file://{place}/run", mode="async") as saves:
        trainer = _trainer(args, saves)
        said = error_of(trainer.train)
        at = trainer.state.global_step
    _with_fault(None)
    return {"said": said, "at": at, "steps": _steps(place / "run")}


def _steps(run: Path) -> list[int]:
    return ckptfs.DirectoryManager(run, name="checkpoint-{N}").steps


def _final_save(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place), max_steps=5, save_steps=2)
    _trainer(args, _stop_at(3), CkptfsCallback(place / "run")).train()
    return _steps(place / "run")


def _preempted(rank: Rank, place: Path) -> object:
    from transformers import TrainerCallback

    from ckptfs.integrations.transformers import CkptfsCallback

    class Warned(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank.number == 1 and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    args = _arguments(_apart(rank, place), max_steps=300, save_strategy="no")
    saves = CkptfsCallback(place / "run", preempt_signals=["SIGUSR1"])
    trainer = _trainer(args, saves, Warned())
    trainer.train()
    return {"at": trainer.state.global_step, "steps": _steps(place / "run")}


def _distributed(rank: Rank, place: Path) -> object:
    """save_pretrained of a model that is sharded by transformers itself: every rank writes a file."""
    import torch.distributed as dist
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    def loaded(folder: str) -> Any:
        sharded = DistributedConfig(fsdp_size=2)
        return LlamaForCausalLM.from_pretrained(folder, distributed_config=sharded)

    whole = _model()
    if rank.number == 0:
        whole.save_pretrained(place / "whole")
    dist.barrier()
    with ckptfs.checkpoint_dir(place / "run" / "model") as path:
        loaded(str(place / "whole")).save_pretrained(path, distributed_checkpoint=True)
    with ckptfs.checkpoint_dir(place / "run" / "model", "read") as path:
        files = sorted(n for n in os.listdir(path) if n.startswith("shard-"))
        again = loaded(path)
    pairs = zip(whole.parameters(), again.parameters(), strict=True)
    return {"files": len(files), "same": all(bool((p.full_tensor() == w).all()) for w, p in pairs)}


def _bad_uri(rank: Rank, place: Path) -> object:
    from ckptfs.integrations.transformers import CkptfsCallback

    args = _arguments(_apart(rank, place))
    return {
        "nothing there": CkptfsCallback(place / "run").resume(args),
        "unknown": error_of(lambda: CkptfsCallback("nosuch://bucket/run").resume(args)),
        "memory": error_of(_trainer(args, CkptfsCallback("memory://run")).train),
        "total limit": error_of(
            lambda: _trainer(_arguments(place, save_total_limit=1), CkptfsCallback(place / "run"))
        ),
        "each node": error_of(
            lambda: _trainer(_arguments(place, save_on_each_node=True), CkptfsCallback(place))
        ),
        "output_dir": error_of(lambda: CkptfsCallback(place).resume(_arguments("s3://bucket/run"))),
        "the same": error_of(lambda: CkptfsCallback(place).resume(_arguments(place))),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks saw, in order of rank."""
    top = tmp_path_factory.mktemp("trainers")
    with launch(
        trains, 2, args={"top": str(top)}, nodes=["node0", "node1"], launcher_env=True
    ) as ranks:
        results = ranks.results()
    for result in results:
        assert result.error is None, result.log
    return [result.value for result in results]


Seen = list[dict[str, Any]]


def test_on_save_comes_before_all_ranks_have_written(seen: Seen) -> None:
    """Stock: the Trainer calls on_save on rank 1 while rank 0 has not written its files."""
    assert "rng_state_1.pth" in seen[1]["stock on_save"]
    assert "trainer_state.json" not in seen[1]["stock on_save"]


def test_a_node_publishes_when_all_its_ranks_have_written(seen: Seen) -> None:
    """Rank 0 is in on_save before rank 1 of its node has written: the checkpoint has rank 1's file."""
    assert [set(rank["one node"]) >= WHOLE for rank in seen] == [True, True]


def test_nodes_publish_what_they_see_when_all_have_written(seen: Seen) -> None:
    """Two nodes with an output_dir each make one whole checkpoint, although one calls on_save long before
    the other has written; their local directories go.
    """
    for rank in seen:
        assert set(rank["two nodes"]["committed"]) >= WHOLE
        assert rank["two nodes"]["left"] == [".ckptfs"]


def test_resume_takes_what_is_committed_on_a_machine_with_leftovers(seen: Seen) -> None:
    """Where stock takes a half-written checkpoint-3 of another world, resume takes the committed second
    one on all ranks, the leftover gets into no checkpoint, and training ends as if undisturbed.
    """
    for rank in seen:
        told = rank["resume"]
        assert told["stock takes"] == "checkpoint-3"
        assert (told["resumed"], told["same"]) == (2, True)
        assert set(told["committed"]) >= WHOLE
        assert "rng_state_7.pth" not in told["committed"]
        assert told["left"] == [".ckptfs", "checkpoint-3.before"]


def test_retention_is_that_of_the_run(seen: Seen) -> None:
    """keep_latest=2 leaves the last two commits, over two jobs on different machines."""
    assert [rank["resume"]["steps"] for rank in seen] == [[3, 4], [3, 4]]


def test_stock_trainers_read_ours_and_ours_reads_stock(seen: Seen) -> None:
    """A Trainer without the callback resumes from a committed directory, and one resumes from what a stock
    Trainer wrote, opened by checkpoint_dir: bit for bit to the end of an undisturbed training.
    """
    for rank in seen:
        assert rank["resume"]["stock reads ours"] is True
        assert rank["resume"]["ours reads stock"] is True


def test_training_that_was_not_resumed_does_not_begin(seen: Seen) -> None:
    """A training from step 0 into a run that has committed steps is an error on all ranks."""
    for rank in seen:
        assert rank["forgotten resume"].startswith("StateError: training begins at step 0")


def test_a_finished_training_that_is_resumed_saves_no_step_beyond_its_end(seen: Seen) -> None:
    """Stock: the Trainer makes one more step than max_steps when it resumes at the end of them. The run
    gets no checkpoint of that.
    """
    for rank in seen:
        assert rank["one more step"] == {"trained to": 3, "steps": [1, 2]}


def test_the_best_model_is_kept_and_found_on_another_machine(seen: Seen) -> None:
    """keep_best follows metric_for_best_model; load_best_model_at_end finds it where output_dir is empty,
    where stock ends with the last model and no error. Locally only the best is left.
    """
    for rank in seen:
        assert rank["stock best"] is False
        assert rank["best"] == {"kept": [2, 4], "left": ["checkpoint-2"], "loaded the best": True}


def test_a_rank_that_cannot_save_stops_all(seen: Seen) -> None:
    """No space for rank 1's second checkpoint: both ranks raise it in that on_save, the first checkpoint
    and the local files stay, and the next job continues from it.
    """
    for rank in seen:
        told = rank["failing rank"]
        assert told["said"].startswith(
            "CollectiveError: write failed on 1 of 2 ranks: rank 1 on node1"
        )
        assert "NoSpaceError" in told["said"]
        assert told["left"] == ["checkpoint-2"]
        assert (told["resumed"], told["steps"]) == (1, [1, 2, 3, 4])


def test_a_background_failure_is_raised_by_the_next_save(seen: Seen) -> None:
    """Asynchronous: what the second save failed of on rank 1 both ranks raise at the third."""
    for rank in seen:
        told = rank["failing in the background"]
        assert "NoSpaceError" in told["said"]
        assert (told["at"], told["steps"]) == (3, [1])


def test_the_last_step_is_saved_whatever_ends_the_training(seen: Seen) -> None:
    """A callback that stops training between two saves loses no step."""
    assert [rank["final save"] for rank in seen] == [[2, 3], [2, 3]]


def test_a_warned_job_saves_and_leaves(seen: Seen) -> None:
    """A signal to rank 1 alone: all ranks save the same step, once, and training ends."""
    at = seen[0]["preempted"]["at"]
    assert 2 <= at < 300
    assert [rank["preempted"] for rank in seen] == [{"at": at, "steps": [at]}] * 2


def test_a_distributed_save_pretrained_is_one_commit(seen: Seen) -> None:
    """save_pretrained(distributed_checkpoint=True) inside checkpoint_dir: a file of every rank, committed
    together, and from_pretrained shards it again, bit for bit.
    """
    assert [rank["distributed"] for rank in seen] == [{"files": 2, "same": True}] * 2


def test_what_cannot_work_is_refused_before_training(seen: Seen) -> None:
    """Nothing there is None; a wrong URI, the Trainer's own rotation, saves on each node, a URI as
    output_dir and an output_dir that is the run are typed errors on all ranks, which say what to do.
    """
    for rank in seen:
        told = rank["bad uri"]
        assert told["nothing there"] is None
        assert "UriError: no backend knows nosuch://" in told["unknown"]
        assert told["memory"].startswith("UriError: memory:// belongs to one process")
        assert "pass keep_latest" in told["total limit"]
        assert told["each node"].startswith("StateError: save_on_each_node")
        assert told["output_dir"].startswith("StateError: output_dir is 's3://bucket/run'")
        assert told["the same"].startswith("StateError: output_dir is the run itself")


# -- one process ----------------------------------------------------------------------------------


def test_stock_rotation_trusts_times_and_counts_what_is_half_written(tmp_path: Path) -> None:
    """Stock: save_total_limit=1 deletes the whole checkpoints and keeps a half-written one, because it was
    touched last; what rmtree cannot remove is no error and counts as removed.
    """
    from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

    for at, name in enumerate(["checkpoint-20", "checkpoint-30", "checkpoint-10"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "optimizer.pt").write_bytes(b"half" if at == 2 else b"whole")
        os.utime(tmp_path / name, (time.time() - 100 + at, time.time() - 100 + at))
    rotate_checkpoints(str(tmp_path), save_total_limit=1, use_mtime=True)
    assert os.listdir(tmp_path) == ["checkpoint-10"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (tmp_path / "checkpoint-5").symlink_to(kept)  # rmtree refuses links
    rotate_checkpoints(str(tmp_path), save_total_limit=1, use_mtime=False)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-5", "elsewhere"]


def test_stock_takes_a_uri_for_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: save_pretrained("memory://model") makes ./memory:/model, without an error."""
    monkeypatch.chdir(tmp_path)
    _model().save_pretrained("memory://model")
    assert (tmp_path / "memory:" / "model" / "model.safetensors").exists()


def test_pretrained_models_at_a_uri(store: Store, tmp_path: Path) -> None:
    """save_pretrained in checkpoint_dir, in several shards too, is one commit; from_pretrained reads it
    back bit for bit, also from a plain copy of it, and ours opens a directory that stock tools uploaded.
    """
    import fsspec
    from transformers import AutoModelForCausalLM

    def read(folder: str) -> bool:
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        return all((loaded[key] == value).all() for key, value in model.state_dict().items())

    model = _model()
    files = fsspec.url_to_fs(store.uri, **store.storage_options)[0]
    with ckptfs.checkpoint_dir(store / "sharded") as path:
        model.save_pretrained(path, max_shard_size="8KB")
    with ckptfs.checkpoint_dir(store / "sharded", "read") as path:
        assert len(list(Path(path).glob("model-*.safetensors"))) > 1
        assert read(path)
    files.get(store / "sharded", str(tmp_path / "copy"), recursive=True)
    assert read(str(tmp_path / "copy"))
    model.save_pretrained(tmp_path / "stock")
    files.put(str(tmp_path / "stock"), store / "uploads/stock", recursive=True)
    with ckptfs.checkpoint_dir(store / "uploads/stock", "read") as path:
        assert read(path)


def test_a_save_pretrained_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """An exception behind save_pretrained, inside the block, commits nothing and is raised."""

    def save() -> None:
        with ckptfs.checkpoint_dir(tmp_path / "run" / "model") as path:
            _model().save_pretrained(path)
            raise RuntimeError("the tokenizer")

    def read() -> None:
        with ckptfs.checkpoint_dir(tmp_path / "run" / "model", "read"):
            pass

    with pytest.raises(RuntimeError, match="tokenizer"):
        save()
    with pytest.raises(ckptfs.NotFoundError):
        read()
