"""Restore by real ranks: FSDP2 and DDP states into other numbers of ranks, and disks that are gone.

One launch of four ranks saves everything; launches of two and of four restore it. Each test reads its
own part of what they tell.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, launch

NODES = ["a", "a", "b", "b"]
# Saved as the first, restored into the second.
PAIRS = ["fsdp fsdp", "ddp ddp", "flat flat", "ddp fsdp", "fsdp ddp", "flat fsdp"]


# -- inside the ranks ------------------------------------------------------------------------------


def build(rank: Rank, kind: str, steps: int) -> dict[str, Any]:
    """A model, optimizer and scheduler after some steps: sharded by FSDP2 (fsdp) or by the older
    FullyShardedDataParallel (flat), or replicated (ddp).
    """
    import torch
    from torch import nn

    torch.manual_seed(11)
    net: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (net[0], net[2], net):
            fully_shard(layer)
    elif kind == "flat":
        from torch.distributed.fsdp import FullyShardedDataParallel

        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    else:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    state = {"net": net, "opt": optimizer, "sched": scheduler}
    for step in range(steps):
        train(state, step)
    return state


def count_steps(optimizer: Any) -> list[int]:
    """One item for each step that the optimizer takes from now on."""
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    return steps


def train(state: dict[str, Any], step: int) -> None:
    """One step on data that every rank has alike."""
    import torch

    data = torch.arange(30.0).reshape(5, 6).sin() + step
    state["net"](data).square().sum().backward()
    state["opt"].step()
    state["sched"].step()
    state["opt"].zero_grad()


def seen(state: dict[str, Any]) -> str:
    """A digest of all of it, whatever it is sharded over; collective."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    full = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(state["net"], state["opt"], options=full)
    found = hashlib.sha256()
    moments: Any = optimizer["state"]
    for name, value in sorted(model.items()):
        for kind, one in sorted({"": value, **moments[name]}.items()):
            found.update(f"{name} {kind}".encode() + torch.as_tensor(one).numpy().tobytes())
    groups: Any = optimizer["param_groups"]
    found.update(repr((groups[0]["lr"], state["sched"].state_dict())).encode())
    return found.hexdigest()


@contextmanager
def session_at(uri: str, *, write: bool) -> Iterator[Any]:
    """A session of this rank at a run."""
    from ckptfs.commit.session import Place, agree_uri, control_for, open_session

    with control_for(None, 20.0) as control:
        target = agree_uri(control, uri)
        with open_session(target, control, Place(), write=write) as session:
            yield session


def save_state(uri: str, step: int, state: Any) -> None:
    """One save of a claimed run."""
    from ckptfs.commit.ownership.claim import claim
    from ckptfs.commit.save.spec import SaveSpec
    from ckptfs.dcp.saving import save_at
    from ckptfs.manager.state_dict import saveable

    with session_at(uri, write=True) as session, claim(session) as run:
        found = saveable(state)
        spec = SaveSpec(f"step_{step}", step, run=run.generation, per_rank=found.per_rank)
        save_at(found.state_dict, session, session.storage.uri(spec.name), spec)


def restore_state(uri: str, state: Any, **request: Any) -> Any:
    """What a restore reports: step and skipped, or the error."""
    from ckptfs.errors import CkptfsError
    from ckptfs.manager.restore import restore
    from ckptfs.manager.restore_candidates import RestoreRequest
    from ckptfs.manager.run_setup import Template

    asked = RestoreRequest(step_of=Template("step_{N}").step_of, **request)
    with session_at(uri, write=False) as session:
        try:
            outcome = restore([session], state, asked)
        except CkptfsError as error:
            return [type(error).__name__, str(error)]
    if outcome is None:
        return None
    return [outcome.restored.step, list(outcome.restored.skipped)]


def own(rank: Rank) -> dict[str, Any]:
    """What this rank has for itself."""
    from ckptfs.manager.rng import RngState
    from ckptfs.manager.state_dict import PerRank

    return {"rng": RngState(), "data": PerRank({"at": 10 * rank.number, "of": rank.size})}


def drawn() -> list[float]:
    """The next numbers of every generator."""
    import numpy as np
    import torch

    return [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002


def saver(rank: Rank) -> Any:
    """Everything that the tests restore."""
    import torch

    rank.init_group()
    runs = rank.args["runs"]
    told: dict[str, Any] = {}
    for kind in ("fsdp", "ddp", "flat"):
        state = build(rank, kind, 3)
        told[kind] = seen(state)
        save_state(f"{runs}/{kind}", 3, state)
        train(state, 3)
        told[f"{kind} later"] = seen(state)
    mine = own(rank)
    torch.manual_seed(rank.number)
    random.seed(rank.number)
    save_state(f"{runs}/own", 1, mine)
    told["drawn"] = drawn()
    for step in (1, 2):
        save_state(rank.args["local"], step, build(rank, "fsdp", step))
        save_state(f"{runs}/rot", step, build(rank, "fsdp", step))
    return told


def restorer(rank: Rank) -> Any:
    """Everything again, on these ranks."""
    from ckptfs.manager.restore_candidates import Fallback, PerRankPolicy

    rank.init_group()
    runs = rank.args["runs"]
    told: dict[str, Any] = {}
    for pair in PAIRS:
        kind, into = pair.split()
        state = build(rank, into, 0)
        steps = count_steps(state["opt"])
        told[f"{pair} restored"] = restore_state(f"{runs}/{kind}", state)
        told[f"{pair} stepped"] = len(steps)
        told[pair] = seen(state)
        train(state, 3)
        told[f"{pair} later"] = seen(state)
    mine = own(rank)
    told["own"] = restore_state(f"{runs}/own", mine)
    if rank.size == len(NODES):
        told["data"], told["drawn"] = mine["data"].value, drawn()
    told["dropped"] = restore_state(f"{runs}/own", own(rank), per_rank=PerRankPolicy.DROP)

    def share(states: list[Any], number: int, size: int) -> Any:
        return {"at": [s["at"] for s in states[number::size]], "of": size}

    told["resharded"] = restore_state(
        f"{runs}/own", {"data": mine["data"]}, strict=False, reshard={"da*": share}
    )
    told["shares"] = mine["data"].value
    state = build(rank, "fsdp", 0)
    told["wiped"] = restore_state(rank.args["local"], state)
    told["rot"] = restore_state(f"{runs}/rot", state)
    told["older"] = restore_state(f"{runs}/rot", state, fallback=Fallback.OLDER)
    told["older is"] = seen(state) == seen(build(rank, "fsdp", 1))
    return told


# -- the tests -------------------------------------------------------------------------------------


def flip_payload(path: Path) -> None:
    """One bit of the largest tensor of a data file."""
    from ckptfs.commit.digests import decode_digests

    sidecar = path.with_suffix(".xxh3")
    items = decode_digests(sidecar.read_bytes(), str(sidecar)).items
    item = max(items, key=lambda one: one.payload_length)
    data = bytearray(path.read_bytes())
    data[item.offset + item.payload_offset] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks on two nodes saved; then node b's disk is wiped and a bit rots."""
    root = tmp_path_factory.mktemp("restore")
    args = {"runs": str(root / "runs"), "local": f"nodes+file://{root}/disks"}
    with launch(saver, 4, args=args, nodes=NODES) as ranks:
        told = ranks.values()
    lost = sorted(path.name for path in (root / "disks/b/step_2").rglob("*.distcp"))
    shutil.rmtree(root / "disks/b")
    rotten = max((root / "runs/rot/step_2").rglob("*.distcp"), key=lambda p: p.stat().st_size)
    flip_payload(rotten)
    return {"args": args, "told": told, "lost": lost, "rotten": rotten.name}


@pytest.fixture(scope="module", params=[2, 4])
def restored(request: pytest.FixtureRequest, saved: dict[str, Any]) -> list[dict[str, Any]]:
    """What two or four fresh ranks make of it."""
    nodes = NODES if request.param == 4 else ["a", "b"]
    with launch(restorer, request.param, args=saved["args"], nodes=nodes) as ranks:
        return ranks.values()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_training_state_comes_back_on_other_ranks(
    saved: dict[str, Any], restored: list[dict[str, Any]], pair: str
) -> None:
    """Model, AdamW and scheduler, sharded by FSDP2 or by FullyShardedDataParallel or replicated by DDP,
    saved by four ranks: fresh objects on two or four, wrapped the same way or another, have them bit
    for bit, and no optimizer was stepped for it where that can be done without.
    """
    kind, into = pair.split()
    for told in restored:
        assert told[f"{pair} restored"] == [3, []]
        assert told[f"{pair} stepped"] == (into == "flat")
        assert told[pair] == saved["told"][0][kind]
        if kind == into and len(restored) == 4:
            assert told[f"{pair} later"] == saved["told"][0][f"{kind} later"]


def test_row_15_every_real_rank_gets_its_own_state(
    saved: dict[str, Any], restored: list[dict[str, Any]]
) -> None:
    """Every rank's RNG and data position are in the one commit; on as many ranks they come back, on
    others the error says what would be unused, and drop or a hook decides.
    """
    for number, told in enumerate(restored):
        if len(restored) == 4:
            assert told["own"] == [1, []]
            assert told["data"] == {"at": 10 * number, "of": 4}
            assert told["drawn"] == saved["told"][number]["drawn"]
        else:
            assert told["own"][0] == "StateError"
            assert "data, rng of ranks 0 to 3 would be unused" in told["own"][1]
            assert told["shares"] == {"at": [10 * number, 10 * number + 20], "of": 2}
        assert told["dropped"] == [1, []]


def test_a_wiped_node_is_named_with_its_shards(
    saved: dict[str, Any], restored: list[dict[str, Any]]
) -> None:
    """Two nodes with disks of their own, one wiped between runs: every rank gets the same error, which
    names the domain's ranks, the shards, and the node that does not have them.
    """
    assert saved["lost"]
    for told in restored:
        kind, text = told["wiped"]
        assert kind == "IncompleteCheckpointError"
        for name in ("step_2", "ranks 2, 3", *saved["lost"], "on b/"):
            assert name in text


def test_bit_rot_is_an_error_or_by_choice_the_step_before(
    saved: dict[str, Any], restored: list[dict[str, Any]]
) -> None:
    """One rank meets a bit that differs while it reads: all get IntegrityError, or all go to the step
    before, bit for bit.
    """
    for told in restored:
        kind, text = told["rot"]
        assert kind == "IntegrityError"
        assert saved["rotten"] in text
        step, (skipped,) = told["older"]
        assert step == 1
        assert "step_2, 1 steps later" in skipped
        assert told["older is"]
