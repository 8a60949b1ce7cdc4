"""State: any nest of tensors, values and objects comes back as it was, into fresh objects."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import CheckpointManager
from ckptfs.commit.manifest import digest_of
from ckptfs.dcp.planning.leaves import Leaf, check_leaf, fingerprint_of, load_leaf, serialise_leaf
from ckptfs.errors import CkptfsError, CollectiveError, NotFoundError, StateError
from ckptfs.manager.restore_candidates import Fallback, PerRankPolicy
from ckptfs.manager.rng import RngState
from ckptfs.manager.state_dict import PerRank, saveable
from tests.manager.runs import Site

LOADERS = "torchdata.stateful_dataloader.stateful_dataloader"
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - what users' old code has


class Counter:
    """An object with one plain dict as its state; a fresh one has less of it than a used one."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What it has counted."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.state = state


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and structure; tensors bit for bit."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (Counter, PerRank)):
        return type(a) is type(b) and same(vars(a), vars(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def roundtrip(path: Path, state: Any, fresh: Any) -> Any:
    """Save ``state``, restore into ``fresh``."""
    site = Site(path)
    site.save(1, lambda _: state, claims=False)
    assert site.restore(lambda _: fresh) is not None
    return fresh


# -- nests -----------------------------------------------------------------------------------------

VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=".@"), min_size=1, max_size=4)
TENSORS = st.lists(st.integers(-100, 100), max_size=5).map(lambda v: torch.tensor(v).float())
PLAIN = st.recursive(
    VALUES | TEXTS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS, inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=2)
    ),
    max_leaves=8,
)


def counter(state: dict[str, Any]) -> Counter:
    """A counter that has counted."""
    made = Counter()
    made.state = state
    return made


NESTS = st.dictionaries(
    TEXTS,
    st.recursive(
        PLAIN
        | st.dictionaries(TEXTS, VALUES | TEXTS, max_size=2).map(counter)
        | PLAIN.map(PerRank),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(TEXTS, inner, max_size=3)
            | st.tuples(inner, inner).map(lambda two: Pair(*two))
        ),
        max_leaves=5,
    ),
    min_size=1,
    max_size=3,
)


def emptied(value: Any) -> Any:
    """The same structure with nothing in it, as a program has it that was just started."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Counter):
        return Counter()
    if isinstance(value, PerRank):
        return PerRank(emptied(value.value))
    if isinstance(value, dict):
        return {k: emptied(v) for k, v in value.items()}
    if isinstance(value, Pair):
        return Pair(*map(emptied, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(emptied, value))
    return None


@given(NESTS)
@settings(max_examples=40, deadline=None)
def test_any_nest_comes_back(nest: dict[str, Any]) -> None:
    """Dicts, lists, tuples, empty ones, int keys, tensors, plain values, objects and PerRank, at any
    depth: equal after a restore into the same structure with nothing in it.
    """
    with TemporaryDirectory() as path:
        assert same(roundtrip(Path(path), nest, emptied(nest)), nest)


def test_what_was_filled_comes_back_into_what_is_empty(tmp_path: Path) -> None:
    """A dict, a list and a value that a fresh program has not filled yet take what was saved."""
    history: dict[str, Any] = {}
    state = {"metrics": {"loss": 0.5, "t": torch.ones(2)}, "seen": [1, 2], "best": {"step": 4}}
    fresh: dict[str, Any] = {"metrics": history, "seen": [], "best": None}
    roundtrip(tmp_path, state, fresh)
    assert same(fresh, state)
    assert fresh["metrics"] is history


def test_a_state_that_is_one_object(tmp_path: Path) -> None:
    """A module by itself, without a dict around it."""
    model, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    roundtrip(tmp_path, model, fresh)
    assert torch.equal(model.weight, fresh.weight)


def test_tensors_are_filled_where_they_are(tmp_path: Path) -> None:
    """No reference to a tensor or parameter goes stale."""
    model = torch.nn.Linear(2, 2)
    fresh, buffer = torch.nn.Linear(2, 2), torch.zeros(3)
    held = fresh.weight
    roundtrip(tmp_path, {"m": model, "b": [torch.ones(3)]}, {"m": fresh, "b": [buffer]})
    assert fresh.weight is held
    assert torch.equal(held, model.weight)
    assert buffer.tolist() == [1, 1, 1]


# -- modules and optimizers ------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Shared weights, a buffer, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One pass."""
        out: torch.Tensor = self.norm(self.b(self.a(x)))
        return out


class Single(torch.optim.Optimizer):
    """Momentum in single precision for parameters of half of it; state other than the parameters too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    mine = self.state[p]
                    mine.setdefault("m", torch.zeros_like(p, dtype=torch.float32))
                    mine["m"].mul_(0.9).add_(p.grad.float())
                    mine["count"] = mine.get("count", 0) + 1
                    p.sub_((group["lr"] * mine["m"]).to(p.dtype))


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "own": Single,
}


def trained(optimizer: str, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model and optimizer after some steps."""
    torch.manual_seed(steps)
    net = Net().to(dtype)
    made = OPTIMIZERS[optimizer](net.parameters())
    for _ in range(steps):
        net(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
        made.step()
        made.zero_grad()
    return {"net": net, "opt": made}


def state_of(state: dict[str, Any]) -> Any:
    """All that counts of a model and its optimizer."""
    return state["net"].state_dict(), state["opt"].state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("used", [0, 2])
def test_an_optimizer_comes_back_into_a_fresh_one(
    tmp_path: Path, optimizer: str, used: int
) -> None:
    """State that a fresh optimizer has not made yet, of a parameter that has none, and into one that
    was used already: bit for bit, with nothing stepped.
    """
    saved, fresh = trained(optimizer, 3), trained(optimizer, used)
    roundtrip(tmp_path, saved, fresh)
    assert same(state_of(fresh), state_of(saved))
    assert all(p.grad is None for p in fresh["net"].parameters())


def test_an_optimizer_that_never_stepped_stays_so(tmp_path: Path) -> None:
    """Saving makes no state, or the first step after a restore would count as the second."""
    saved, fresh = trained("AdamW", 0), trained("AdamW", 0)
    roundtrip(tmp_path, saved, fresh)
    assert saved["opt"].state_dict()["state"] == fresh["opt"].state_dict()["state"] == {}


def test_state_keeps_its_own_precision(tmp_path: Path) -> None:
    """Single precision moments of bfloat16 parameters lose no bits, as torch's load_state_dict does."""
    saved = trained("own", 3, torch.bfloat16)
    fresh = trained("own", 0, torch.bfloat16)
    roundtrip(tmp_path, saved, fresh)
    moments = [s["m"] for s in fresh["opt"].state.values()]
    assert {m.dtype for m in moments} == {torch.float32}
    assert same(state_of(fresh), state_of(saved))


def test_optimizer_state_is_named_by_parameters(tmp_path: Path) -> None:
    """Another order of the same parameters, and the wrappers of DDP and torch.compile, do not matter."""
    saved = trained("momentum", 2)
    net = Net()
    groups = [{"params": [p for n, p in net.named_parameters() if n != "unused"][::-1]}]
    optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    fresh = {"net": torch.compile(net), "opt": optimizer}
    roundtrip(tmp_path, saved, fresh)
    was = {n: saved["opt"].state[p] for n, p in saved["net"].named_parameters()}
    now = {n: optimizer.state[p] for n, p in net.named_parameters() if n != "unused"}
    assert same(now, {n: was[n] for n in now})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "net.a.weight" in saveable_keys(fresh)


def saveable_keys(state: Any) -> set[str]:
    """The flattened keys of a state."""
    from ckptfs.dcp.planning.save_planner import SavePlanner

    planner = SavePlanner()
    planner.set_up_planner(saveable(state).state_dict, None, is_coordinator=True)
    return set(planner.state_dict)


def test_two_optimizers_of_one_model_and_one_of_two(tmp_path: Path) -> None:
    """Names do not collide where an optimizer has parameters of two modules with equal names."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        both = torch.optim.Adam([*one.parameters(), *two.parameters()])
        part = torch.optim.Adam(one.parameters())
        for optimizer in (both, part):
            (one(torch.ones(1, 2)) * two(torch.ones(1, 2))).sum().backward()
            optimizer.step()
        return {"nets": (one, two), "opts": [both, part]}

    saved, fresh = build(1), build(2)
    roundtrip(tmp_path, saved, fresh)
    for a, b in zip(saved["opts"], fresh["opts"], strict=True):
        assert same(a.state_dict(), b.state_dict())


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    """Two parameter groups do not become one without a word."""
    net = torch.nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}]
    two = torch.optim.SGD(groups, lr=0.1)
    one = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        CollectiveError, match="2 parameter groups were saved, but the optimizer has 1"
    ):
        roundtrip(tmp_path, {"net": net, "opt": two}, {"net": net, "opt": one})


def test_groups_in_another_order_keep_their_own_options(tmp_path: Path) -> None:
    """Options of a group go to the group that has its parameters, as their state does."""

    def build(order: int) -> dict[str, Any]:
        net = torch.nn.Linear(2, 2)
        decay = {"params": [net.weight], "weight_decay": 0.1, "lr": 0.1}
        plain = {"params": [net.bias], "weight_decay": 0.0, "lr": 0.01}
        return {"net": net, "opt": torch.optim.AdamW([decay, plain][::order], lr=1.0)}

    saved, fresh = build(1), build(-1)
    roundtrip(tmp_path, saved, fresh)
    assert [(g["weight_decay"], g["lr"]) for g in fresh["opt"].param_groups] == [
        (0.0, 0.01),
        (0.1, 0.1),
    ]


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    """On the meta device a restore would vanish."""
    with torch.device("meta"):
        fresh = torch.nn.Linear(2, 2)
    with pytest.raises(CollectiveError, match=r"to_empty\(device="):
        roundtrip(tmp_path, {"m": torch.nn.Linear(2, 2)}, {"m": fresh})


# -- other objects ---------------------------------------------------------------------------------


def test_schedulers_scalers_and_the_like(tmp_path: Path) -> None:
    """LambdaLR (which drops its lambdas), a chain of schedulers, GradScaler: one leaf each."""

    def build(steps: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        chain = [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ]
        made = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
            torch.optim.lr_scheduler.SequentialLR(optimizer, chain, [2]),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        ]
        for _ in range(steps):
            optimizer.step()
            made[0].step()
            made[1].step()
            made[2].step(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (steps + 1))
        return {"sched": {"all": made}, "scaler": scaler}

    saved, fresh = build(4), build(0)
    roundtrip(tmp_path, saved, fresh)
    for a, b in zip(saved["sched"]["all"], fresh["sched"]["all"], strict=True):
        assert str(a.state_dict()) == str(b.state_dict())
    assert fresh["scaler"].state_dict() == saved["scaler"].state_dict()
    assert saveable_keys(saved) == {"sched.all.0", "sched.all.1", "sched.all.2", "scaler"}


def test_an_object_may_change_its_structure(tmp_path: Path) -> None:
    """A fresh object that has less, more or other fields than the saved one gets what was saved."""
    saved = counter({"workers": {0: {"at": 7}}, "order": [(1, 2), {3}], "none": {}})
    fresh = counter({"other": 1})
    roundtrip(tmp_path, {"c": saved}, {"c": fresh})
    assert fresh.state == saved.state


def test_an_object_with_weights_is_flattened(tmp_path: Path) -> None:
    """An EMA that is no module: its tensors are data of the checkpoint, and its structure may change."""
    ema = counter({"shadow": {"w": torch.arange(3.0), "v": [torch.ones(2), 4]}, "n": 5, "e": {}})
    fresh = counter({"shadow": {"w": torch.zeros(3)}, "n": 0})
    held = fresh.state["shadow"]["w"]
    roundtrip(tmp_path, {"ema": ema}, {"ema": fresh})
    assert same(fresh.state, ema.state)
    assert fresh.state["shadow"]["w"] is held
    assert "ema.shadow.w" in saveable_keys({"ema": ema})


def test_what_would_execute_code_is_refused_by_key_and_class(tmp_path: Path) -> None:
    """Before a file is made: the key, the owner of the state, and the class that does not load."""
    site = Site(tmp_path)
    bad = counter({"rng": random.Random(3)})
    with pytest.raises(CollectiveError) as caught:
        site.save(1, lambda _: {"train": {"sampler": bad}})
    for text in ("'train.sampler'", "tests.manager.test_state.Counter", "random.Random"):
        assert text in str(caught.value)
    assert not list(site.disk().glob("step_*"))


def test_an_object_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    """What load_state_dict raises comes back on every rank with key and class, and is no damage of the
    checkpoint, whatever it is.
    """

    class Picky(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotFoundError("a file of its own")

    site = Site(tmp_path, "aa")
    site.save(1, lambda _: {"c": counter({"a": 1})})
    error = site.refused(
        lambda rank: {"c": Picky() if rank else Counter()}, fallback=Fallback.OLDER
    )
    assert "'c'" in str(error)
    assert "Picky does not take the state" in str(error)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    """strict: an object that was not saved is an error that names its key. One with an empty state may
    have been saved with nothing in it.
    """
    site = Site(tmp_path)
    site.save(1, lambda _: {"a": 1})
    assert "'sched'" in str(site.refused(lambda _: {"a": 0, "sched": counter({"x": 2})}))
    outcome = site.restore(lambda _: {"a": 0, "sched": counter({})})
    assert outcome is not None
    assert site.states[0]["sched"].state == {}
    outcome = site.restore(lambda _: {"a": 0, "sched": counter({"x": 2})}, strict=False)
    assert outcome is not None
    assert outcome.loaded.missing_keys == ("sched",)
    assert site.states[0]["sched"].state == {"x": 2}


def test_an_object_that_was_not_saved_keeps_its_value(tmp_path: Path) -> None:
    """load(strict=False) of any value that torch's planner does not know: it stays what it was."""
    import ckptfs

    mine = {"a": 0, "deep": [{"path": tmp_path}, torch.zeros(1)], "both": (tmp_path, 1)}
    ckptfs.save({"a": 5}, tmp_path / "run/step_1")
    result = ckptfs.load(mine, tmp_path / "run/step_1", strict=False)
    assert result.missing_keys == ("deep.0.path", "deep.1", "both")
    assert same(mine, {"a": 5, "deep": [{"path": tmp_path}, torch.zeros(1)], "both": (tmp_path, 1)})


def test_stock_torch_reads_it(tmp_path: Path) -> None:
    """A leaf is the plain value to every reader."""
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(2, 2)
    site = Site(tmp_path)
    site.save(1, lambda _: {"m": model, "c": counter({"x": [1]}), "e": {}})
    fresh: dict[str, Any] = {"m": torch.nn.Linear(2, 2).state_dict(), "c": None, "e": None}
    dcp.load(fresh, checkpoint_id=str(site.disk() / "step_1"), no_dist=True)
    assert same(fresh["m"]["weight"], model.weight.detach())
    assert (fresh["c"], fresh["e"]) == ({"x": [1]}, {})


def test_a_leaf_is_its_plain_value() -> None:
    """Same bytes, same fingerprint, same verdict; any_rank: no comparison at all."""
    value = OrderedDict(a=[1, torch.ones(2)])
    assert serialise_leaf(Leaf(value)).getvalue() == serialise_leaf(value).getvalue()
    assert same(load_leaf(serialise_leaf(Leaf(value))), value)
    assert fingerprint_of(Leaf(value)) == fingerprint_of(value)
    assert fingerprint_of(Leaf([1], any_rank=True)) == fingerprint_of(Leaf([2], any_rank=True))
    assert check_leaf(Leaf(value)) is None
    assert "in the state of X" in str(check_leaf(Leaf(object(), "X")))


# -- per rank ----------------------------------------------------------------------------------------


def kept(rank: int) -> dict[str, Any]:
    """What each rank has for itself, by marker, by class and deep in a nest."""
    return {
        "shared": 7,
        "train": {"mine": PerRank({"seed": 100 + rank, "t": torch.full((2,), rank)})},
        "obj": PerRank(counter({"at": rank})),
        "rng": RngState(),
    }


def fresh(_: int) -> dict[str, Any]:
    """The same with nothing in it."""
    return {
        "shared": 0,
        "train": {"mine": PerRank({"seed": -1, "t": torch.zeros(2, dtype=torch.int64)})},
        "obj": PerRank(Counter()),
        "rng": RngState(),
    }


def test_every_rank_gets_its_own(tmp_path: Path) -> None:
    """PerRank values of any kind come back to their ranks."""
    site = Site(tmp_path, "aab")
    site.save(1, kept)
    site.restore(fresh)
    for rank, state in site.states.items():
        assert same({**state, "rng": 0}, {**kept(rank), "rng": 0})


def test_row_15_the_rng_of_every_rank_is_in_the_commit(tmp_path: Path) -> None:
    """HF's on_save fires without a barrier: rank 1 sees its own RNG file only. Here the bundle is part
    of the state, so every rank's is in the one commit and comes back to its rank.
    """
    site = Site(tmp_path, "aabb")
    site.save(1, kept)
    metadata = b"".join(p.read_bytes() for p in (site.disk() / "step_1").glob(".metadata"))
    assert all(f"rng@rank{rank}".encode() in metadata for rank in range(4))


def test_only_one_rank_has_it(tmp_path: Path) -> None:
    """The driver's state is written once, and restored on the ranks that ask for it."""
    site = Site(tmp_path, "ab")
    driver = {"queue": list(range(5)), "c": counter({"x": 1})}
    result = site.save(1, lambda rank: {"all": 1} | ({} if rank else driver))
    assert result.total.items == 3
    site.restore(lambda rank: {"all": 0} | ({} if rank else {"queue": None, "c": Counter()}))
    assert same(site.states[0], {"all": 1, **driver})
    assert site.states[1] == {"all": 1}


@pytest.mark.parametrize("nodes", ["a", "aabb"])
def test_other_ranks_are_told_what_would_be_unused(tmp_path: Path, nodes: str) -> None:
    """Two ranks kept state, one or four restore: an error that lists it, and nothing is loaded."""
    site = Site(tmp_path, "ab")
    site.save(1, kept)
    site.nodes = nodes
    error = site.refused(fresh)
    assert isinstance(error, StateError)
    for text in ("2 ranks", f"{len(nodes)} ranks restore", "obj, rng, train.mine", "ranks 0 to 1"):
        assert text in str(error)
    assert all(s["shared"] == 0 for s in site.states.values())


def test_a_hook_makes_the_new_ranks_state(tmp_path: Path) -> None:
    """reshard: it gets the states of all old ranks in order, and what it returns is this rank's: for a
    marked nest, for an object, deep in the state; what it does not match is dropped by choice.
    """

    def seeds(states: list[Any], rank: int, size: int) -> Any:
        return {"seed": [s["seed"] for s in states], "t": states[-1]["t"] + rank, "of": size}

    def positions(states: list[Any], rank: int, _: int) -> Any:
        return {"at": sum(s["at"] for s in states) + rank}

    site = Site(tmp_path, "abc")
    site.save(1, kept)
    site.nodes = "aa"
    hooks = {"train.*": seeds, "obj": positions}
    error = site.refused(fresh, reshard=hooks)
    assert "rng of ranks 0 to 2 would be unused" in str(error)
    outcome = site.restore(fresh, reshard=hooks, per_rank=PerRankPolicy.DROP)
    assert outcome is not None
    assert outcome.restored.dropped == ("rng",)
    for rank, state in site.states.items():
        mine = {"seed": [100, 101, 102], "t": torch.full((2,), 2 + rank), "of": 2}
        assert same(state["train"]["mine"].value, mine)
        assert state["obj"].value.state == {"at": 3 + rank}
        assert state["shared"] == 7
        assert state["rng"].skipped == ("all: kept per rank by another number of ranks",)


def test_drop_goes_on_without_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """per_rank="drop": what a rank kept stays as it is in fresh objects; log and result name it,
    asked for or not.
    """
    site = Site(tmp_path, "ab")
    site.save(1, kept)
    site.nodes = "a"
    outcome = site.restore(
        lambda rank: {k: v for k, v in fresh(rank).items() if k != "obj"},
        per_rank=PerRankPolicy.DROP,
    )
    assert outcome is not None
    assert outcome.restored.dropped == ("rng", "train.mine", "obj")
    assert "of 2 ranks was dropped: rng, train.mine, obj" in caplog.text
    assert site.states[0]["train"]["mine"].value["seed"] == -1
    assert site.states[0]["shared"] == 7


def test_keys_that_patterns_kept_per_rank_move_too(tmp_path: Path) -> None:
    """per_rank= patterns of the manager: the same error, the same hooks, for plain values and tensors."""

    def mine(rank: int) -> dict[str, Any]:
        return {"own": {"seed": rank, "t": torch.full((2,), rank)}, "all": 3}

    site = Site(tmp_path, "abc")
    site.save(1, mine, per_rank=("own.*",))
    site.nodes = "ab"
    assert "own.seed, own.t of ranks 0 to 2 would be unused" in str(site.refused(mine))
    site.restore(mine, reshard={"own.*": lambda states, rank, size: (states[rank + 1], size)[0]})
    for rank, state in site.states.items():
        assert same(state, mine(rank + 1))


def test_a_hook_that_fails_fails_everywhere(tmp_path: Path) -> None:
    """One rank's hook raises: every rank gets the error, and no rank trains on."""

    def bad(_: list[Any], rank: int, __: int) -> Any:
        if rank:
            raise RuntimeError("no way")
        return {"at": 0}

    site = Site(tmp_path, "abc")
    site.save(1, lambda rank: {"obj": PerRank(counter({"at": rank}))})
    site.nodes = "aa"
    error = site.refused(lambda _: {"obj": PerRank(Counter())}, reshard={"obj": bad})
    assert "no way" in str(error)


def test_loaders_of_torchdata_are_kept_per_rank_by_themselves() -> None:
    """By the name of their module: it need not be installed."""
    loader = type("StatefulDataLoader", (Counter,), {"__module__": LOADERS})
    mine = type("Mine", (loader,), {"__module__": "train"})
    assert saveable({"a": [loader()], "b": mine(), "c[0]": PerRank(1)}).per_rank == (
        *("a.0", "a.0.*", "b", "b.*"),
        *("c[[]0]", "c[[]0].*"),
    )


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Torch fills memory that it does not zero with NaN."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
@pytest.mark.parametrize(
    "paths",
    [
        {},
        {"thing.a": ("thing", "b")},
        {"thing.a": ("thing", "c")},
        {"thing.a": ("other", "a")},
        {"thing.a": ("thing", "a", 3)},
        {"thing.list.0": ("thing", "list", 2)},
    ],
    ids=str,
)
def test_memory_that_nothing_was_written_to_is_handed_to_nobody(
    tmp_path: Path, paths: dict[str, tuple[Any, ...]], *, strict: bool
) -> None:
    """Where a checkpoint says of a tensor that it is elsewhere, no object gets what the load's memory held
    before: it has what was saved, or nothing there, or the restore is refused.
    """
    saved = {"a": torch.arange(8.0), "b": torch.arange(8.0), "list": [torch.ones(2), torch.ones(2)]}
    thing = Counter()
    thing.state = saved
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"thing": thing})
    change_paths(tmp_path / "run", paths)
    thing = Counter()
    with CheckpointManager(tmp_path / "run") as manager, contextlib.suppress(CkptfsError):
        manager.restore({"thing": thing}, strict=strict)
    given = tensors_in(thing.state)
    assert len(given) == 4 or paths
    assert not any(tensor.isnan().any() for tensor in given)


def tensors_in(state: Any) -> list[torch.Tensor]:
    """All of nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return [state]
    children = (
        state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    )
    return [tensor for child in children for tensor in tensors_in(child)]


def change_paths(run: Path, paths: dict[str, tuple[Any, ...]]) -> None:
    """``.metadata`` says this of where its tensors are, and whatever vouches for it does so again."""
    step = run / "step_1"
    (data,) = (path for path in step.iterdir() if path.is_dir())
    metadata = pickle.loads((data / ".metadata").read_bytes())
    metadata.planner_data = {**metadata.planner_data, **paths}
    raw = pickle.dumps(metadata)
    manifest = json.loads((data / "ckptfs.json").read_bytes())
    for file in manifest["files"]:
        if file["path"].endswith("/.metadata"):
            file.update(size=len(raw), digest=digest_of(raw))
    text = json.dumps(manifest).encode()
    for place in (step, data):
        (place / ".metadata").write_bytes(raw)
        (place / "ckptfs.json").write_bytes(text)
    for entry in (run / ".ckptfs/log").iterdir():
        record = json.loads(entry.read_bytes())
        if record["kind"] == "seal":
            entry.write_text(json.dumps({**record, "digest": digest_of(text)}))
