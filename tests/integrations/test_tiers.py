"""Tiers: a framework trains on a local disk, each checkpoint is drained to a bucket, the disk is lost.

What it continues from is then the bucket's, bit for bit. One process and no server: the bucket is ckptfs's
own object store in memory, so nothing but the framework has to be there. Ray, with workers in other processes,
has its test in test_ray.py.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.session import Place
from ckptfs.integrations._support.step_driver import PartSaver, reading_part
from ckptfs.testing.memory_object_store import STORES

pytestmark = pytest.mark.integrations


@pytest.fixture
def bucket() -> Iterator[str]:
    """A run's URI in an object store of its own."""
    name = f"tiers-{uuid.uuid4().hex[:8]}"
    STORES.bucket(name)
    yield f"objects+memory://{name}/run"
    STORES.drop(name)


def _same(one: Any, other: Any) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_transformers_resumes_from_the_bucket(bucket: str, tmp_path: Path) -> None:
    """A Trainer on a new machine continues at the third step with the weights of the lost one."""
    from ckptfs.integrations.transformers import CkptfsCallback
    from tests.integrations.test_transformers import _arguments, _trainer

    disk, first = tmp_path / "disk", _arguments(tmp_path / "out")
    saves = CkptfsCallback(str(disk), keep_latest=1, copies=[bucket], scratch=tmp_path / "scratch")
    trainer = _trainer(first, saves)
    trainer.train(resume_from_checkpoint=saves.resume(first))
    shutil.rmtree(disk)
    shutil.rmtree(tmp_path / "out")
    second = _arguments(tmp_path / "out", max_steps=4)
    again = CkptfsCallback(str(disk), copies=[bucket], scratch=tmp_path / "scratch")
    path = again.resume(second)
    assert again.step == 3
    assert path is not None
    loaded = type(trainer.model).from_pretrained(path)
    assert _same(loaded, trainer.model)
    other = _trainer(second, again)
    other.train(resume_from_checkpoint=path)
    assert other.state.global_step == 4
    with ckptfs.DirectoryManager(bucket, name="checkpoint-{N}") as copy:
        assert copy.steps == [1, 2, 3, 4]


def test_accelerate_resumes_from_the_bucket(bucket: str, tmp_path: Path) -> None:
    """The model, its optimizer and the random numbers are those of the lost disk."""
    from accelerate import Accelerator

    from ckptfs.integrations.accelerate import CkptfsState

    disk, accelerator = tmp_path / "disk", Accelerator(cpu=True)
    net = torch.nn.Linear(64, 64)
    adam = torch.optim.AdamW(net.parameters())
    net, adam = accelerator.prepare(net, adam)

    def train(saves: CkptfsState, first: int) -> torch.Tensor:
        for step in range(first, first + 2):
            accelerator.backward(net(torch.randn(4, 64)).square().mean())
            adam.step()
            adam.zero_grad()
            saves.save(step)
        saves.manager.wait()
        return torch.cat([p.detach().flatten().clone() for p in net.parameters()])

    options: dict[str, Any] = {
        "copies": [bucket],
        "keep_latest": 1,
        "scratch": tmp_path / "scratch",
    }
    with CkptfsState(accelerator, disk, **options) as saves:
        assert saves.load() is None
        train(saves, 1)
        undisturbed = train(saves, 3)
    shutil.rmtree(disk)
    with CkptfsState(accelerator, disk, **options) as saves:
        assert saves.load(2) == 2
        assert torch.equal(train(saves, 3), undisturbed)


def test_deepspeed_resumes_from_the_bucket(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's checkpoint comes back to an empty root, by its tag and as the newest."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    from ckptfs.integrations.deepspeed import CkptfsEngine

    disk, root = tmp_path / "disk", tmp_path / "root"

    def engine() -> CkptfsEngine:
        return CkptfsEngine(root, str(disk), copies=[bucket], scratch=tmp_path / "scratch")

    folder = root / "global_step7"
    with engine() as store:
        store.manager.save(7, _files(tmp_path / "made"))
        store.wait()
    shutil.rmtree(disk)
    for tag in (None, "global_step7"):
        with engine() as store:
            assert store.fetch(tag) == "global_step7"
        state = torch.load(folder / "model.pt")
        assert torch.equal(state["w"], torch.arange(300_000.0))
        shutil.rmtree(root)


def test_verl_resumes_from_the_bucket(bucket: str, tmp_path: Path) -> None:
    """The driver's files come back to a local directory, and an actor finds its part in the bucket."""
    pytest.importorskip("verl")
    from ckptfs.integrations.verl import CkptfsDriver

    disk, saver = tmp_path / "disk", PartSaver(is_async=False)

    def driver() -> CkptfsDriver:
        return CkptfsDriver(str(disk), tmp_path / "local", copies=[bucket])

    with driver() as first, first.saving(3, ["actor"]) as saving:
        saver.save(saving.part("actor"), lambda path: _weights(Path(path)))
        Path(saving.path, "data.pt").write_text("loader at 3")
    shutil.rmtree(disk)
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
    with driver() as again:
        folder = again.resume()
        assert folder is not None
        assert Path(folder, "data.pt").read_text() == "loader at 3"
        source = again.fetched_from(3)
        assert source is not None
        assert source.full == f"{bucket}/global_step_3"
    with reading_part(source / "actor", Place()) as (path, _):
        assert path is not None
        assert torch.equal(torch.load(Path(path, "model.pt"))["w"], torch.arange(300_000.0))


def _files(top: Path) -> Path:
    top.mkdir()
    _weights(top)
    return top


def _weights(top: Path) -> None:
    torch.save({"w": torch.arange(300_000.0)}, top / "model.pt")
