"""Checkpoints of parts with real processes: two worker groups with process groups of their own, and a
driver outside of both. Tickets, sealed parts and decisions travel between them as pickles.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, Ranks, launch

PLACES = {"driver": ["head"], "actor": ["a", "a"], "critic": ["b", "c"]}
STEPS = {"step_1": 1, "step_2": 2, "step_3": 3}


def _text(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _value(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


# -- inside the processes ------------------------------------------------------------------------


def _sharded(rank: Rank, step: int) -> dict[str, Any]:
    """A tensor over the group's ranks with elements that give step and place, and one on each rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (rank.size,))
    local = torch.arange(8.0) + 8 * rank.number + 100 * step
    return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "scale": torch.full((3,), step)}


def group(rank: Rank) -> None:
    """A worker group: saves, publishes and loads on command, until the test ends it."""
    import ckptfs

    rank.init_group()
    for number in itertools.count():
        told = rank.hold(f"do {number}")
        said: object
        try:
            match told["what"]:
                case "save":
                    state = _sharded(rank, told["step"])
                    said = _text(ckptfs.save(state, _value(told["ticket"])))
                case "publish":
                    said = _value(told["decision"]).publish()
                case "load":
                    state = _sharded(rank, 0)
                    ckptfs.load(state, told["uri"])
                    wanted = _sharded(rank, told["step"])
                    local = state["w"].to_local().tolist() == wanted["w"].to_local().tolist()
                    said = local and state["scale"].tolist() == wanted["scale"].tolist()
                case _:
                    return
        except ckptfs.CkptfsError as error:
            said = f"{type(error).__name__}: {error}"
        rank.tell(f"did {number}", said=said)


def driver(rank: Rank) -> str:
    """Outside of every group: begins, saves its own part, commits, and dies where it is asked to."""
    import ckptfs
    from ckptfs.commit.parts.tickets import begin_parts

    uri, name = str(rank.args["uri"]), str(rank.args["name"])
    with ckptfs.prepare_run(uri) as run:
        ticket = begin_parts(run, name, STEPS[name], list(PLACES))
        parts = {part: _text(ticket.part(part)) for part in ("actor", "critic")}
        rank.tell("ticket", **parts)
        given = [_value(text) for text in rank.hold("sealed")["parts"]]
        mine = ckptfs.save({"loader": {"epoch": 3}, "seen": 17}, ticket.part("driver"))
        try:
            ticket.commit([mine, given[0]])
        except ckptfs.IncompleteCheckpointError as error:
            rank.tell("incomplete", text=str(error))
        rank.hold("commit")
        decision = ticket.commit([mine, *given])
        rank.tell("decision", decision=_text(decision), uri=str(decision.uri))
        rank.hold("leave")
    return "left"


# -- in the test -----------------------------------------------------------------------------------


@dataclass
class Stage:
    """The groups of one test, which get their orders one after the other."""

    base: Path
    shared: bool
    groups: dict[str, Ranks]
    done: dict[str, int] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The run."""
        return f"{self.base}/run" if self.shared else f"nodes+file://{self.base}/@node/run"

    def tell(self, part: str, what: str, **data: Any) -> list[Any]:
        """Let a group do something; what each of its ranks says."""
        number = self.done.get(part, 0)
        self.done[part] = number + 1
        ranks = self.groups[part]
        ranks.release(f"do {number}", what=what, **data)
        size = len(PLACES[part])
        return [ranks.wait(f"did {number}", rank=n)["said"] for n in range(size)]

    def save(self, parts: dict[str, str], step: int) -> list[str]:
        """Both groups save their parts; one sealed part of each, equal on all of its ranks."""
        sealed = []
        for part, text in parts.items():
            said = self.tell(part, "save", ticket=text, step=step)
            found = [_value(one) for one in said]
            assert len({(p.of, p.ref) for p in found}) == 1
            sealed.append(said[-1])
        return sealed

    def loads(self, part: str, name: str, *, whose: str | None = None) -> set[Any]:
        """What the ranks of a group say when they load a part."""
        uri = f"{self.uri}/{name}/{whose or part}"
        return set(self.tell(part, "load", uri=uri, step=STEPS[name]))

    @contextlib.contextmanager
    def driver(self, name: str) -> Iterator[Ranks]:
        """A driver of one job, restarted or not."""
        args = {"uri": self.uri, "name": name}
        env = {"CKPTFS_JOB_ID": "job"}
        with launch(driver, 1, args=args, store="none", nodes=PLACES["driver"], env=env) as ranks:
            yield ranks

    def left(self) -> list[str]:
        """Attempts that are anywhere."""
        return [str(p) for p in self.base.rglob("attempts/*") if p.is_dir()]


@pytest.fixture(params=[True, False], ids=["shared", "nodes"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Two groups of two ranks, on one disk, or each node with its own."""
    with contextlib.ExitStack() as stack:
        groups = {
            part: stack.enter_context(launch(group, len(PLACES[part]), nodes=PLACES[part]))
            for part in ("actor", "critic")
        }
        made = Stage(tmp_path, request.param, groups)
        yield made
        for part, ranks in groups.items():
            ranks.release(f"do {made.done.get(part, 0)}", what="end")


def test_groups_and_a_driver_commit_one_checkpoint(stage: Stage) -> None:
    """Parts of one step live under one commit that waits for all of them and says which is missing;
    it is published where home does not reach; a resume on the wrong nodes says which part is where.
    """
    with stage.driver("step_1") as ranks:
        ticket = ranks.wait("ticket")
        sealed = stage.save(ticket, 1)
        ranks.release("sealed", parts=sealed)
        assert "part critic of step_1 is missing" in ranks.wait("incomplete")["text"]
        before = stage.loads("actor", "step_1")
        assert all(("NotFoundError" if stage.shared else "in doubt") in text for text in before)
        ranks.release("commit")
        decision = ranks.wait("decision")["decision"]
        if not stage.shared:
            assert all("in doubt" in text for text in stage.loads("critic", "step_1"))
            for part in ("actor", "critic"):
                assert stage.tell(part, "publish", decision=decision) == [None, None]
        assert stage.loads("actor", "step_1") == {True}
        assert stage.loads("critic", "step_1") == {True}
        ranks.release("leave")
        assert ranks.values() == ["left"]
    wrong = stage.loads("actor", "step_1", whose="critic")
    if stage.shared:
        assert wrong == {True}
    else:
        (text,) = wrong
        assert "part critic of step_1 is in domain" in text
        assert "on b/" in text
        assert "on c/" in text
    assert not stage.left()


def test_a_driver_that_dies_before_the_commit_leaves_nothing(stage: Stage) -> None:
    """Killed with all parts sealed: the next driver gives them up wherever it and its groups reach."""
    with stage.driver("step_2") as ranks:
        ranks.release("sealed", parts=stage.save(ranks.wait("ticket"), 2))
        ranks.wait("incomplete")
        ranks.kill(0)
        assert ranks.results()[0].died
    with stage.driver("step_3") as ranks:
        sealed = stage.save(ranks.wait("ticket"), 3)
        assert len(stage.left()) == (
            3 if stage.shared else 4
        )  # step_3's alone; critic's on b and c
        ranks.release("sealed", parts=sealed)
        ranks.release("commit")
        decision = ranks.wait("decision")["decision"]
        for part in ("actor", "critic"):
            stage.tell(part, "publish", decision=decision)
            (text,) = stage.loads(part, "step_2")
            assert "NotFoundError" in text
            assert stage.loads(part, "step_3") == {True}
        ranks.release("leave")
        assert ranks.values() == ["left"]
    assert not [*stage.base.rglob("step_2")]


def test_a_driver_that_dies_after_the_commit_has_committed(stage: Stage) -> None:
    """Killed before anybody published: the next ticket's saves publish where home does not reach."""
    with stage.driver("step_2") as ranks:
        ranks.release("sealed", parts=stage.save(ranks.wait("ticket"), 2))
        ranks.release("commit")
        ranks.wait("decision")
        ranks.kill(0)
        assert ranks.results()[0].died
    with stage.driver("step_3") as ranks:
        stage.save(ranks.wait("ticket"), 3)
        assert stage.loads("actor", "step_2") == {True}
        assert stage.loads("critic", "step_2") == {True}
        ranks.kill(0)
    node = PLACES["actor"][0]
    where = stage.base / ("run" if stage.shared else f"{node}/run") / "step_2/actor/.metadata"
    assert os.path.exists(where)
