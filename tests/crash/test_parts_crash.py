"""A checkpoint of parts dies at every storage operation of everybody who takes part.

After each death: every part is there, bit by bit, or none is; a part on a disk that has
no answer from home is in doubt and kept; the next driver settles what it reaches, and its next
ticket what its groups reach; nothing of the dead is left behind.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.commit.delete.deletion_steps import REMOVED_BY_HAND
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.paths import LOG
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.errors import CkptfsError, FencedError
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Plan
from ckptfs.testing.world import SimulatedDeath, simulate
from tests.crash.cast import HOME, NAME_OF, PARTS, ROOT, Cast
from tests.crash.rig import HALVES, Mortal


def moments(plan: Mortal) -> Iterator[tuple[int, str]]:
    """Every operation of a play, and half of those that can be done by half."""
    for nth, (op, _) in enumerate(plan.names, 1):
        yield nth, "before"
        if op in HALVES:
            yield nth, "half"
        if op == "create":
            yield nth, "after"


def die(cast: Cast, plan: Plan, label: str = "two") -> bool:
    """Play until everybody dies; whether they reported a commit before."""
    cast.plan = plan
    told = False
    try:
        with cast.session(HOME) as session, claim(session) as run:
            decision = cast.act(run, label, publish=False)
            told = True
            cast.publish(decision)
    except SimulatedDeath:
        pass
    cast.plan = None
    return told


def judge(cast: Cast, *, told: bool) -> str:
    """Look, let the next driver come, look again; what became of step_2."""
    before = {part: cast.look("two", part) for part in PARTS}
    committed = before["driver"] == "whole"
    assert committed or not told, f"told of a commit, and home knows none: {before}"
    for part, seen in before.items():
        allowed = {"whole", "in doubt"} if committed else {"none", "in doubt"}
        at_home = cast.shared or PARTS[part] == HOME
        assert seen in (allowed - {"in doubt"} if at_home else allowed), before
        if not committed:
            assert not cast.stock("two", part)
    for part in PARTS:
        assert cast.look("one", part) == "whole"
    decision = cast.play("three")
    assert set(decision.parts) == set(PARTS)
    after = {part: cast.look("two", part) for part in PARTS}
    wanted = "whole" if committed else "none"
    assert after == dict.fromkeys(PARTS, wanted), f"{before} became {after}"
    for part in PARTS:
        assert cast.look("one", part) == cast.look("three", part) == "whole"
        assert cast.stock("three", part)
        assert cast.stock("two", part) == committed
    for node in {*PARTS.values()}:
        listed = ["step_1", *(["step_2"] if committed else []), "step_3"]
        assert cast.listed(node) == listed, node
    assert not cast.debris()
    if not committed:
        assert not any(os.path.exists(f"{cast.directory(n)}/step_2") for n in PARTS.values())
    return "new" if committed else "old"


def prepared(base: Path, *, shared: bool) -> Cast:
    """Everybody's disks with one checkpoint on them."""
    cast = Cast(f"{base}/before", shared)
    cast.play("one")
    return cast


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "nodes"])
@pytest.mark.parametrize(
    "stride", [pytest.param(19, id="sample"), pytest.param(1, id="all", marks=pytest.mark.campaign)]
)
def test_killed_at_every_operation_leaves_all_parts_or_none(
    memory_path: Path, shared: bool, stride: int
) -> None:
    """Driver and groups die at operation k and half-way through writes: all parts, or none."""
    before = prepared(memory_path, shared=shared)
    trial = Mortal(None, "before", alone=True)
    die(before.copy(f"{memory_path}/trial"), trial)
    ends: collections.Counter[str] = collections.Counter()
    for nth, when in list(moments(trial))[::stride]:
        cast = before.copy(f"{memory_path}/case")
        try:
            ends[judge(cast, told=die(cast, Mortal(nth, when, alone=True)))] += 1
        except AssertionError as error:
            raise AssertionError(
                f"{when} operation {nth} {trial.names[nth - 1]}: {error}"
            ) from error
        shutil.rmtree(cast.base)
    assert set(ends) == {"old", "new"}, ends


@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(19, id="sample"),
        pytest.param(1, id="all", marks=[pytest.mark.campaign, pytest.mark.timeout(0)]),
    ],
)
def test_killed_while_removed_parts_are_saved_again(memory_path: Path, stride: int) -> None:
    """step_1 was removed by hand. Its name is saved again and everybody dies at operation k: all of the new
    parts are there, or none, and then the next driver saves the name. Nothing else was ever deleted.
    """
    before = prepared(memory_path, shared=True)
    shutil.rmtree(f"{before.directory(HOME)}/step_1")
    trial = Mortal(None, "before", alone=True)
    die(before.copy(f"{memory_path}/trial"), trial, "uno")
    ends: collections.Counter[str] = collections.Counter()
    for nth, when in list(moments(trial))[::stride]:
        cast = before.copy(f"{memory_path}/case")
        try:
            told = die(cast, Mortal(nth, when, alone=True), "uno")
            ends[judge_again(cast, told=told)] += 1
        except (AssertionError, CkptfsError) as error:
            op = trial.names[nth - 1]
            raise AssertionError(f"{when} operation {nth} {op}: {error}") from error
        shutil.rmtree(cast.base)
    assert set(ends) == {"old", "new"}, ends


def judge_again(cast: Cast, *, told: bool) -> str:
    """Look, let the next driver come, look again; what became of the second step_1."""
    before = {part: cast.look("uno", part) for part in PARTS}
    committed = before["driver"] == "whole"
    assert committed or not told, f"told of a commit, and home knows none: {before}"
    for part, seen in before.items():
        assert (seen == "whole") == committed, before
        assert committed or not cast.stock("uno", part)
    cast.play("three" if committed else "uno")
    for part in PARTS:
        assert cast.look("uno", part) == "whole"
        assert cast.stock("uno", part)
    log = Path(cast.directory(HOME), LOG)
    entries = [json.loads(path.read_text()) for path in log.iterdir()]
    assert [e["reason"] for e in entries if e["kind"] == "delete"] == [REMOVED_BY_HAND]
    assert not cast.debris()
    return "new" if committed else "old"


def test_a_lost_home_keeps_every_promise(memory_path: Path) -> None:
    """Home dies with its disk after all parts are sealed: a new owner of a group's disk deletes
    nothing and says which home decides; where the decision was reported before, it is committed.
    """
    cast = prepared(memory_path, shared=False)
    cast.play("two", publish=False)
    shutil.rmtree(cast.directory(HOME))
    with cast.session("a") as session, claim(session) as run:
        assert run.in_doubt == (f"{NAME_OF['two']}/actor",)
    assert cast.look("two", "actor") == "in doubt"
    assert cast.look("one", "actor") == "whole"
    kept = [path for path in cast.debris() if "/a/" in path and path.endswith(".distcp")]
    assert len(kept) == 1


def test_after_a_lost_home_one_claim_over_all_disks_lets_the_next_tickets_in(
    memory_path: Path,
) -> None:
    """The new home's generations begin again and are refused as old, until all disks were claimed
    together; what was in doubt still is.
    """
    cast = prepared(memory_path, shared=False)
    cast.play("two", publish=False)
    shutil.rmtree(cast.directory(HOME))
    with pytest.raises(FencedError, match="older than what this disk knows"):
        cast.play("three")

    def together(control: Control) -> None:
        where = cast.directory((HOME, "a", "b")[control.rank])
        session = start_session(control, LocalStorage(ROOT, directory=where), Place(), write=True)
        claim(session).release()

    for end in simulate(3, together, nodes=(HOME, "a", "b"), job_id="job:cast"):
        end.get()
    cast.play("three")
    assert cast.look("three", "actor") == "whole"
    assert cast.look("two", "actor") == "in doubt"
