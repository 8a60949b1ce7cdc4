"""Ray Train: what workers saved is committed before Ray hears of it, whichever process dies when."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.errors import CkptfsError, CollectiveError, NotFoundError, StateError, UriError
from tests.faults.victim import HOOK
from tests.integrations.conftest import RAY, Cell
from tests.integrations.running import EXAMPLES, Kill, Mode, Store, reference

pytestmark = pytest.mark.integrations
pytest.importorskip("ray", reason="Ray is not installed: make test-integrations")

import pyarrow.fs  # noqa: E402 - comes with Ray
import ray.train  # noqa: E402
from ray.cloudpickle import register_pickle_by_value  # noqa: E402
from ray.train import Checkpoint, CheckpointConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402
from ray.train.v2._internal.exceptions import (  # noqa: E402
    CheckpointManagerInitializationError,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (  # noqa: E402
    CheckpointManager as RayManager,
)
from ray.train.v2._internal.execution.storage import StorageContext  # noqa: E402

from ckptfs.integrations.ray import (  # noqa: E402
    RayCheckpoints,
    RayDirectories,
    experiment_uri,
    let_go,
    storage,
)

SNAPSHOT = "checkpoint_manager_snapshot.json"


def fit(
    train: Any,
    place: dict[str, Any],
    *,
    config: dict[str, Any] | None = None,
    keep: CheckpointConfig | None = None,
    fault: str | None = None,
    failures: int = 0,
) -> Any:
    """``TorchTrainer(train).fit()`` with two workers; fault: the plan of each of them."""
    variables = {**HOOK, "CKPTFS_TEST_FAULT": fault} if fault else {}
    run = ray.train.RunConfig(
        name="run",
        checkpoint_config=keep or CheckpointConfig(num_to_keep=2),
        failure_config=ray.train.FailureConfig(max_failures=failures),
        worker_runtime_env={"env_vars": variables},
        **place,
    )
    workers = ray.train.ScalingConfig(num_workers=2)
    return TorchTrainer(
        train, train_loop_config=config, scaling_config=workers, run_config=run
    ).fit()


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The page's example; its training function travels to the workers."""
    spec = importlib.util.spec_from_file_location("ray_example", EXAMPLES / "ray_example.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    register_pickle_by_value(module)
    yield module
    del sys.modules[spec.name]


def committed(uri: str) -> list[str]:
    """Names of the run's checkpoints, oldest commit first."""
    return [one.uri.name for one in ckptfs.list_checkpoints(uri)]


def heard(place: dict[str, Any]) -> list[str]:
    """Names of the checkpoints that Ray would continue from, and would miss if they were gone."""
    files, path = place["storage_filesystem"], place["storage_path"]
    try:
        told = json.loads(files.open_input_stream(f"{path}/run/{SNAPSHOT}").read())
    except FileNotFoundError:
        return []  # its workers died before it got any
    return [one["checkpoint_dir_name"] for one in told["checkpoint_results"]]


# -- the story: killed in a save, restarted by Ray, given up, started again ----------------------


def test_workers_die_and_training_goes_on_from_the_last_commit(
    ray_cluster: None, example: ModuleType, store: Store, mode: Mode, cell: Cell
) -> None:
    """Rank 1 is killed in its third save, Ray restarts the workers, it is killed again in the third
    of theirs; Ray gives up. Another job continues from step 4 and ends with the state of an
    undisturbed one. Ray and the log agree at each end, and nothing else is there.
    """
    with cell("Ray", store, mode):
        final = reference("ray", launcher="python", env=tuple(sorted(RAY.items()))).final
        place = storage(store.uri, store.storage_options)
        kill = str(Kill("close", "*__1_0.distcp", nth=3, rank=1))
        with pytest.raises(ray.train.WorkerGroupError, match=r"actor died|health check failed"):
            fit(example.train, place, config={"mode": mode}, fault=kill, failures=1)
        assert committed(store / "run")[-1] == "step_4"
        assert set(heard(place)) <= set(committed(store / "run"))
        result = fit(example.train, place, config={"mode": mode})
        assert result.return_value == (4, final)
        assert committed(store / "run") == heard(place) == ["step_5", "step_6"]
        assert sorted(n for n in seen(place) if not n.startswith(".")) == [
            SNAPSHOT,
            "step_5",
            "step_6",
        ]
    same_by_stock(result.checkpoint, store / "run/step_6")


def seen(place: dict[str, Any]) -> list[str]:
    """What a person lists in the experiment's directory."""
    selector = pyarrow.fs.FileSelector(f"{place['storage_path']}/run")
    return [info.base_name for info in place["storage_filesystem"].get_file_info(selector)]


def same_by_stock(checkpoint: Any, uri: str) -> None:
    """Ray downloads it and stock torch reads it: the tensors that ckptfs reads."""
    name = "model.weight"
    ours, stock = {name: torch.zeros(1, 8)}, {name: torch.ones(1, 8)}
    ckptfs.load(ours, uri, strict=False)
    with checkpoint.as_directory() as path:
        dcp.load(stock, checkpoint_id=path, no_dist=True)
    assert torch.equal(ours[name], stock[name])
    assert stock[name].abs().sum() not in (0, 8)


# -- zero code ----------------------------------------------------------------------------------


def stock_train(config: dict[str, Any]) -> Any:
    """Ray's own way: a local directory from DCP, and Ray copies it. Then ckptfs, at the same place."""
    for step in range(1, 4):
        with tempfile.TemporaryDirectory() as mine:
            paths: list[Any] = [None, None]
            dist.all_gather_object(paths, mine)
            state = {"w": torch.full((8,), float(step)), "step": step}
            dcp.save(state, checkpoint_id=paths[0])
            Path(mine, f"extra_{dist.get_rank()}.json").write_text("{}")
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(mine))
    dist.barrier()  # Ray lets a worker continue when its own files are copied
    found: dict[str, Any] = {"w": torch.zeros(8), "step": 0}
    with RayCheckpoints() as checkpoints:
        restored = checkpoints.restore(found)
    assert restored is not None
    return found["step"], float(found["w"].sum()), Path(restored.uri).name


def test_zero_code(ray_cluster: None, store: Store) -> None:
    """storage_path="fsspec+ckptfs+..." and nothing else: checkpoints of both workers, marker, snapshot
    and the deletion of old ones go through ckptfs, a DCP checkpoint is committed, stock torch reads it,
    and RayCheckpoints continues from it.
    """
    result = fit(stock_train, {"storage_path": f"fsspec+{storage_uri(store.uri)}"})
    through = storage(store.uri, store.storage_options)
    names = sorted(name for name in seen(through) if name.startswith("checkpoint_2"))
    assert names == heard(through) == committed(store / "run")
    assert len(names) == 2
    assert {".validate_storage_marker", SNAPSHOT} <= set(seen(through))
    assert result.return_value == (3, 24.0, names[-1])
    with result.checkpoint.as_directory() as path:
        assert {".metadata", "extra_0.json", "extra_1.json"} <= set(os.listdir(path))
        state = {"w": torch.zeros(8), "step": 0}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        assert state["step"] == 3


def storage_uri(uri: str) -> str:
    """What a user writes behind ``fsspec+``."""
    return f"ckptfs+{ckptfs.uri.Uri.parse(uri)}"


# -- tiers ----------------------------------------------------------------------------------------


def drained(config: dict[str, Any]) -> Any:
    """What is there is restored; else two checkpoints are saved, and copied to the bucket."""
    name = f"w{dist.get_rank()}"
    state = {name: torch.zeros(300_000)}
    with RayCheckpoints(copies=[config["bucket"]]) as checkpoints:
        restored = checkpoints.restore(state)
        if restored is not None:
            return restored.step, str(restored.uri), state[name].unique().tolist()
        for step in (1, 2):
            state[name].fill_(step + dist.get_rank() / 3)
            checkpoints.report({"step": step}, state, step)
        checkpoints.manager.wait()
    return None


def test_ray_resumes_from_the_bucket(ray_cluster: None, lab_s3: Any, tmp_path: Path) -> None:
    """The experiment's disk is lost with all that Ray knew; the workers of a new one get every bit."""
    config = {"bucket": lab_s3.fresh("tiers")}
    place = storage(tmp_path / "disk")
    assert fit(drained, place, config=config).return_value is None
    assert committed(config["bucket"])[-1] == "step_2"
    shutil.rmtree(tmp_path / "disk")
    found = fit(drained, storage(tmp_path / "disk"), config=config).return_value
    assert found == (2, f"{config['bucket']}/step_2", [2.0])


# -- errors, other kinds, what stays ----------------------------------------------------------------


def meets_trouble(config: dict[str, Any]) -> list[Any]:
    """Scores 9, 1, 5; the second save fails on rank 1 once. Then a directory of files; then a commit
    that Ray never got, as of a worker that died behind it.
    """
    told: list[Any] = []
    state = {f"w{n}": torch.zeros(8) for n in range(4)}  # so that both ranks write
    with pytest.raises(StateError, match="CheckpointConfig"):
        RayCheckpoints(keep_latest=2)
    with RayCheckpoints(every_steps=1) as checkpoints:
        assert checkpoints.restore(state) is None
        for step, score in ((1, 9.0), (2, 1.0), (2, 1.0), (3, 5.0)):
            try:
                checkpoints.report({"score": score, "note": "text"}, state, step)
            except CkptfsError as error:
                told.append((type(error).__name__, str(error)))
        steps = checkpoints.manager.steps
    both: list[Any] = [None, None]
    dist.all_gather_object(both, told)
    with RayDirectories(name="export_{N}", mode="async") as directories:
        with directories.restore() as nothing:
            assert nothing is None
        files = f"{config['scratch']}/export"
        os.makedirs(files, exist_ok=True)
        Path(files, f"part_{dist.get_rank()}").write_text(str(dist.get_rank()))
        directories.report({"score": 0.0}, files, 3)
        directories.manager.wait()
        with directories.restore() as opened:
            assert opened is not None
            parts = sorted(name for name in os.listdir(opened.path) if name.startswith("part"))
    uri, options = experiment_uri()
    with ckptfs.CheckpointManager(uri, storage_options=options) as manager:
        manager.save(7, state, {"score": 100.0})
    with RayCheckpoints() as checkpoints:
        restored = checkpoints.restore(state)
        assert restored is not None
        assert restored.step == 7
    return [both, steps, parts, uri]


def test_an_error_on_one_worker_is_the_same_on_all_and_ray_says_what_stays(
    ray_cluster: None, tmp_path: Path
) -> None:
    """A full disk under rank 1 is one typed error on both, and the step can be saved again. Of three
    the best and the newest stay, as CheckpointConfig has it. A directory is committed next to them.
    What was committed unheard is reported when it is restored, and Ray lets the others go.
    """
    keep = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")
    fault = "fail=ENOSPC:open_write:*__1_0.distcp:2@1"
    place = storage(tmp_path / "runs")
    config = {"scratch": str(tmp_path / "scratch")}
    result = fit(meets_trouble, place, config=config, keep=keep, fault=fault)
    both, steps, parts, uri = result.return_value
    assert both[0] == both[1]
    ((kind, text),) = both[0]
    assert kind in ("NoSpaceError", "CollectiveError")
    assert re.search("rank 1", text)
    assert steps[0] == 1
    assert steps[-1] == 3
    assert parts == ["part_0", "part_1"]
    assert ckptfs.uri.Uri.parse(uri) == ckptfs.uri.Uri.parse(tmp_path / "runs/run")
    assert Path(result.checkpoint.path).name == "step_7"
    assert result.metrics == {"score": 100.0}
    assert committed(str(tmp_path / "runs/run")) == ["step_7"]
    assert os.listdir(tmp_path / "scratch") == []


def test_a_run_that_is_held_is_left_to_its_workers(tmp_path: Path) -> None:
    """Ray's delete, by its controller, does nothing to a held run's checkpoint; of a run that no owner
    holds it deletes the entry and the bytes, and any other directory at once.
    """
    files = storage(tmp_path)["storage_filesystem"]
    os.makedirs(tmp_path / "run/other")
    with ckptfs.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.zeros(8)})
        files.delete_dir(f"{tmp_path}/run/step_1")
        files.delete_dir(f"{tmp_path}/run/other")
        assert manager.steps == [1]
        assert sorted(os.listdir(tmp_path / "run")) == [".ckptfs", "step_1"]
        ckptfs.load({"w": torch.zeros(8)}, tmp_path / "run/step_1")
    files.delete_dir(f"{tmp_path}/run/step_1")
    assert committed(str(tmp_path / "run")) == []
    assert os.listdir(tmp_path / "run") == [".ckptfs"]


@pytest.mark.parametrize(
    ("committed", "listed", "going"),
    [
        ([1, 2, 3], {1, 2, 3}, []),
        ([1, 2, 3], {2, 3}, [1]),
        ([1, 2, 3, 4], {2}, [1]),  # 3 and 4 are on their way to Ray
        ([1, 2, 3, 4], {1, 4}, [2, 3]),  # the best and the newest
        ([5, 6, 2, 3], {3}, [5, 6, 2]),  # commit order, not that of the steps
        ([1, 2], set(), []),  # Ray knows nothing yet
        ([1, 2], {7, None}, []),
    ],
)
def test_what_goes_is_what_ray_heard_of_and_keeps_no_more(
    committed: list[int], listed: set[int | None], going: list[int]
) -> None:
    """Nothing goes that Ray lists, or may list when it has got it."""
    assert let_go(committed, listed) == going


# -- Ray's own bugs, and ours next to them -----------------------------------------------------------


@contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: EFBIG, as ENOSPC is on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def sizes_when_settled(directory: Path) -> dict[str, int]:
    """Bytes by file name, once no file is on its way any more: the copy that failed ends Arrow's call, and
    its other threads still write, rename and remove what they had begun.
    """
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            sizes = {file.name: file.stat().st_size for file in directory.iterdir()}
        except FileNotFoundError:
            continue
        if "config.pt" in sizes and not any(name.startswith(".partial-") for name in sizes):
            return sizes
    raise AssertionError(f"files are still on their way in {directory}")


def test_ray_leaves_half_a_copy_under_the_final_name(tmp_path: Path) -> None:
    """Stock: a copy that fails leaves a directory with every file's name, one of them cut short, and
    nothing that distinguishes it from a whole one. Through ckptfs that file is not there.
    """
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"lr": 0.1}, source / "config.pt")
    torch.save({"w": torch.zeros(1 << 20)}, source / "model.pt")
    checkpoint = Checkpoint.from_directory(source)
    left = {}
    for name, place in {
        "stock": {"storage_path": str(tmp_path / "stock")},
        "ours": storage(tmp_path / "ours"),
    }.items():
        context = StorageContext(experiment_dir_name="run", **place)
        with full_disk(1 << 20), pytest.raises(OSError, match="too large"):
            context.persist_current_checkpoint(checkpoint, "checkpoint_1")
        left[name] = sizes_when_settled(tmp_path / name / "run/checkpoint_1")
    assert set(left["stock"]) == {"config.pt", "model.pt"}
    assert 0 < left["stock"]["model.pt"] < (source / "model.pt").stat().st_size
    assert "model.pt" not in left["ours"]


def test_ray_writes_its_snapshot_in_place(tmp_path: Path) -> None:
    """Stock: killed while it writes the one file that names its checkpoints, Ray does not start again.
    Through ckptfs the old one stays until the new one is whole.
    """
    for name, place, stands in (
        ("stock", {"storage_path": str(tmp_path / "stock")}, False),
        ("ours", storage(tmp_path / "ours"), True),
    ):
        context = StorageContext(experiment_dir_name="run", **place)
        manager = RayManager(CheckpointConfig(), context)
        manager._write_state_to_storage()
        text = (tmp_path / name / "run" / SNAPSHOT).read_text()
        dying = context.storage_filesystem.open_output_stream(
            context.checkpoint_manager_snapshot_path
        )
        dying.write(text[:20].encode())
        if stands:
            assert (tmp_path / name / "run" / SNAPSHOT).read_text() == text
            RayManager(CheckpointConfig(), context)
        else:
            with pytest.raises(CheckpointManagerInitializationError, match="Unterminated string"):
                RayManager(CheckpointConfig(), context)


def test_places_that_are_none(lab_s3: Any) -> None:
    """A URI without a meaning fails where it is written, a missing bucket where the job starts."""
    with pytest.raises(UriError, match="neither a path nor a URI"):
        storage("a::b://c")
    place = storage(lab_s3.uri("x").replace("//", "//missing-", 1), lab_s3.storage_options())
    with pytest.raises((NotFoundError, CollectiveError, OSError), match=r"missing-"):
        StorageContext(experiment_dir_name="run", **place)


def test_what_rank_0_fails_to_read_no_worker_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage error of rank 0 is what it broadcasts: the others raise it and wait for nothing."""

    class Unreadable:
        @property
        def steps(self) -> list[int]:
            raise OSError(5, "the log cannot be read")

    told: list[Any] = []
    checkpoints: Any = object.__new__(RayCheckpoints)
    checkpoints.manager = Unreadable()
    module = "ckptfs.integrations.ray"
    monkeypatch.setattr(f"{module}._listed", lambda _: [])
    for rank, broadcast in ((0, told.append), (1, lambda _: told[-1])):
        context = SimpleNamespace(get_world_rank=lambda rank=rank: rank)
        monkeypatch.setattr(ray.train, "get_context", lambda context=context: context)
        monkeypatch.setattr(f"{module}.broadcast_from_rank_zero", broadcast)
        error = CollectiveError if rank else OSError
        for call in (checkpoints._has_steps, lambda: checkpoints._follow(0.0)):
            with pytest.raises(error, match="cannot be read"):
                call()
    assert len(told) == 2
