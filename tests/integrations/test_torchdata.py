"""torchdata's StatefulDataLoader: each rank continues with its own next sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.multiprocess.harness import Rank, launch

pytest.importorskip("torchdata", reason="torchdata is not installed: make test-integrations")

from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.integrations


def test_a_killed_run_goes_on_with_the_next_sample(tmp_path: Path, cell: Cell) -> None:
    """Killed while it saves: no sample of any rank is left out or seen twice, the weights are equal."""
    store = Store("file", str(tmp_path / "run"))
    mode: Mode = "sync"
    with cell("torchdata", store, mode):
        told = story("torchdata", store, mode, kill=Kill("close", "*__1_0.distcp", nth=3, rank=1))
    assert told.resumed.resumed == "2"


def _losses(uri: Path, *, steps: int, own: bool) -> list[float]:
    """Train up to step ``steps`` with fresh objects, from where the run is; the loss of each step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1) if own else None
    loader = StatefulDataLoader(
        torch.arange(64.0).view(16, 4), batch_size=2, shuffle=True, generator=generator
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    drawn = ckptfs.PerRank([])
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": ckptfs.RngState()}
    state |= {"drawn": drawn}
    with ckptfs.CheckpointManager(uri) as manager:
        restored = manager.restore(state)
        done = 0 if restored is None else restored.step or 0
        for step, batch in enumerate(loader, 1 + done):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            drawn.value.append(loss.item())
            manager.save(step, state)
            if step == steps:
                break
    return list(drawn.value)


@pytest.mark.parametrize("own", [True, False])
def test_with_a_generator_of_its_own_a_resume_is_bit_equal(tmp_path: Path, own: bool) -> None:
    """In the middle of an epoch, with dropout: equal to the last bit; with torch's default generator for
    the loader it is not, which is what the pages warn of.
    """
    whole = _losses(tmp_path / "whole", steps=6, own=own)
    _losses(tmp_path / "resumed", steps=3, own=own)
    resumed = _losses(tmp_path / "resumed", steps=6, own=own)
    assert resumed[:3] == whole[:3]
    assert (resumed == whole) is own


def _state(position: int) -> dict[str, Any]:
    loader = StatefulDataLoader(list(range(20)), batch_size=1)
    batches = iter(loader)
    for _ in range(position):
        next(batches)
    return {"loader": loader, "cursor": ckptfs.PerRank({"at": position}), "step": 1}


def _save(rank: Rank) -> None:
    rank.init_group()
    with ckptfs.CheckpointManager(str(rank.args["uri"])) as manager:
        manager.save(1, _state(position=3 + rank.number))


def test_another_number_of_ranks_is_an_error_unless_told(tmp_path: Path) -> None:
    """What two ranks kept is not given to one by guess: StateError, dropped, or resharded as asked."""
    with launch(_save, 2, args={"uri": str(tmp_path / "run")}) as ranks:
        ranks.values()
    manager = ckptfs.CheckpointManager(tmp_path / "run")
    with pytest.raises(ckptfs.StateError, match="2 ranks"):
        manager.restore(_state(0))
    dropped = _state(0)
    assert manager.restore(dropped, per_rank="drop") is not None
    assert int(next(iter(dropped["loader"]))) == 0
    told = _state(0)
    manager.restore(
        told,
        reshard={
            "loader": lambda states, rank, size: states[1],
            "cursor": lambda states, rank, size: states[1],
        },
    )
    assert int(next(iter(told["loader"]))) == 4
