"""Random lives of a run: managers save, fail, die, are restarted, and a plain list says what must be.

Real managers on one or two ranks and one or two disks; faults and deaths strike at any storage
operation of a save, of its retention, or of the claim before it. After every step the run is read
through read-only storage: what the list holds is there, bit for bit and in order, and nothing else.

    machine_model.py   the list, and the policy in its user's words
    machine_site.py    disks that outlive processes, deaths, ranks
    machine_sight.py   what our readers, stock torch and a listing find
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckptfs.errors import CkptfsError, CommitConflictError, StateError
from ckptfs.retention.policy import Best
from ckptfs.testing.faults import When
from ckptfs.testing.world import End
from tests.manager.machine_model import Model, Policy, Saved
from tests.manager.machine_sight import (
    Disk,
    disks,
    empty_state,
    label_in,
    look,
    parts_here,
    state_of,
    stock_look,
)
from tests.manager.machine_site import Blow, Crew, How, Layout, Member, Site, registered

KINDS = st.sampled_from(["checkpoint"] * 4 + ["weights"])
LOSSES = st.sampled_from([None, 0.25, 0.5, 1.0, 2.0])
POLICIES = st.one_of(
    st.just(Policy()),
    st.builds(
        Policy,
        st.integers(1, 3),
        st.sampled_from([None, None, 3]),
        st.sampled_from([None, 1, 2]),
    ),
)
BLOWS = st.builds(
    Blow,
    st.integers(0, 1),
    st.integers(1, 90),
    st.sampled_from([How.ALONE, How.ALL, How.ALL, How.FULL, How.EIO]),
    st.sampled_from(list(When)),
)


@pytest.fixture(autouse=True, scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``simulated://`` is a backend."""
    with registered(tmp_path_factory.mktemp("backend")):
        yield


class Lives(RuleBasedStateMachine):
    """One run and the jobs that come to it, one after the other."""

    site: Site
    crew: Crew | None = None

    @initialize(
        layout=st.sampled_from(list(Layout)),
        policy=POLICIES,
        mode=st.sampled_from(["sync", "async"]),
        size=st.integers(1, 2),
    )
    def birth(self, layout: Layout, policy: Policy, mode: str, size: int) -> None:
        """Empty disks, and the first job."""
        self.site = Site(layout)
        self.model = Model(policy)
        self.mode = mode
        self.labels = 0
        self.step = 0
        self.foreign: dict[str, str] = {}
        self.unsettled = False  # something failed since the last commit without a fault
        self.debris = 0  # attempts that no rank could remove since the last claim
        self.needed: set[int] = set()  # restored from or pinned before the first save
        self.fresh = True  # this job has not claimed the run yet
        self.restored = False  # this job knows where the run is
        self.earlier: list[Saved] = []  # what others had saved when it claimed the run
        self._start(size)

    # -- saving ---------------------------------------------------------------------------------

    @precondition(lambda self: self.crew is not None)
    @rule(ahead=st.integers(1, 3), kind=KINDS, loss=LOSSES, failure=st.integers(0, 7))
    def save(self, ahead: int, kind: str, loss: float | None, failure: int) -> None:
        """The next step is saved, and nothing goes wrong."""
        self.step += ahead
        self._save(self._next(kind, loss, failure=failure == 0), None)

    @precondition(lambda self: self.crew is not None and self.model.saves)
    @rule(data=st.data(), loss=LOSSES)
    def save_again(self, data: st.DataObject, loss: float | None) -> None:
        """Training went back, and comes to a step that was saved before."""
        old = data.draw(st.sampled_from(self.model.saves), label="old")
        if not self.restored and data.draw(st.booleans(), label="restores"):
            self._restore(None, self.model.latest())
        self.step = old.step
        self._save(self._next(old.kind, loss, failure=False), None)

    @precondition(lambda self: self.crew is not None)
    @rule(ahead=st.integers(0, 2), kind=KINDS, loss=LOSSES, blow=BLOWS)
    def struck_save(self, ahead: int, kind: str, loss: float | None, blow: Blow) -> None:
        """A disk fails or a process dies somewhere in the save, or in the retention after it."""
        self.step += ahead
        self._save(self._next(kind, loss, failure=False), blow)

    # -- jobs come and go -----------------------------------------------------------------------

    @rule(size=st.integers(1, 2), how=st.sampled_from(["closed", "killed"]))
    def restart(self, size: int, how: str) -> None:
        """The job ends, in peace or not, and another one begins."""
        self._end(how)
        self._start(size)

    @precondition(lambda self: self.crew is not None)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Continue from the newest, or from a step."""
        steps = [s.step for s in self.model.saves if s.kind == "checkpoint"]
        step = data.draw(st.sampled_from([None, *steps]), label="step")
        wanted = self.model.latest() if step is None else self.model.at(step)
        self._restore(step, wanted)

    # -- what people do -------------------------------------------------------------------------

    @precondition(lambda self: self.crew is not None and self.model.saves)
    @rule(data=st.data(), pin=st.booleans())
    def pin(self, data: st.DataObject, pin: bool) -> None:
        """Somebody wants to keep a checkpoint, or no longer."""
        steps = [s.step for s in self.model.saves if s.kind == "checkpoint"]
        if not steps:
            return
        self._pin(data.draw(st.sampled_from(steps), label="step"), pin=pin)

    @rule(step=st.integers(0, 6), where=st.sampled_from(["", "_mine", "_backup/deep"]))
    def put_foreign(self, step: int, where: str) -> None:
        """Somebody puts a file of their own into a step directory, or next to it."""
        key = f"step_{step}{where}/notes.txt"
        self.site.put(key, key)
        self.foreign[key] = key

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def the_run_is_what_the_list_says(self) -> None:
        """Nothing lost, nothing torn, nothing else, and no foreign files touched."""
        if not hasattr(self, "model"):
            return
        seen = look(self.site)
        self.model.believe([s.label for s in seen])
        assert [(s.name, s.failure) for s in seen] == [
            (s.name, s.failure) for s in self.model.saves
        ]
        pinned, wanted = {s.label for s in seen if s.pinned}, self.model.pinned
        assert wanted - self.model.pin_follows <= pinned <= wanted
        for key, text in self.foreign.items():
            assert self.site.texts(key) == {text}
        if self.crew is not None and not (self.unsettled and not self.site.layout.shared):
            self._managers_agree()

    def _managers_agree(self) -> None:
        latest = self.model.latest()
        steps = [s.step for s in self.model.saves if s.kind == "checkpoint"]
        for member in self._crew.members:
            found = member.manager.latest
            assert (found and found.uri.name) == (latest and latest.name)
            assert member.manager.steps == steps

    def teardown(self) -> None:
        """The last job leaves; one more commit, and only what is kept is on the disks."""
        try:
            if hasattr(self, "model") and self.model.saves:
                self._end("closed")
                self._start(1)
                self._restore(None, self.model.latest())
                self.step = 1 + max(s.step for s in self.model.saves)
                self._save(self._next("checkpoint", None, failure=False), None)
                self.the_run_is_what_the_list_says()
                self._end("closed")
                self._check_disks(settled=True)
        finally:
            if hasattr(self, "site"):
                if self.crew is not None:
                    self.crew.bury()
                self.site.wipe()

    # -- how it is done -------------------------------------------------------------------------

    @property
    def _crew(self) -> Crew:
        assert self.crew is not None
        return self.crew

    def _start(self, size: int) -> None:
        # A node with a disk of its own has to take part, or what is there is out of reach.
        size = len(self.site.layout.nodes) if not self.site.layout.shared else size
        policy = self.model.policy
        self.fresh, self.restored, self.model.come_to = True, False, -1
        self.hindered = False  # a delete that failed is tried again later and later, by this job
        self.crew = Crew(
            self.site,
            min(size, len(self.site.layout.nodes)),
            mode=self.mode,
            keep_latest=policy.latest,
            keep_every=policy.every,
            keep_best=None if policy.best is None else Best("loss", policy.best),
        )

    def _end(self, how: str) -> None:
        if self.crew is None:
            return
        if how == "closed":
            for end in self._crew.each(lambda m: m.manager.close()):
                end.get()
        self._crew.bury()
        self.crew = None

    def _next(self, kind: str, loss: float | None, *, failure: bool) -> Saved:
        self.labels += 1
        return Saved(self.labels, self.step, kind, loss, failure, self._crew.size)

    def _save(self, saved: Saved, blow: Blow | None) -> None:
        if self.fresh:
            self.earlier = list(self.model.saves)
        if not self.restored and self.model.begins_over(saved, self.earlier):
            self._refused(saved)
            return
        fate = self.site.fate
        fate.arm(blow)
        ends = self._crew.each(lambda member: _save_and_wait(member, saved))
        struck = fate.struck
        fate.arm(None)
        self.unsettled = self.unsettled or struck
        self.hindered = self.hindered or struck
        claimed, self.fresh = self.fresh, False
        if not self._crew.alive:
            self._crew.bury()
            self.crew = None
            self.debris += 1
        else:
            self._same_outcome(ends, struck=struck)
        if claimed:
            self.model.claimed(self.needed, surely_retained=not struck)
        labels = [s.label for s in look(self.site)]
        there = saved.label in labels
        if any(end.error is None for end in ends):
            assert there, "an acknowledged save is gone"
        if any(isinstance(e.error, CkptfsError) and e.error.outcome == "failed" for e in ends):
            assert not there, "a save that surely failed is there"
        if there:
            self.model.committed(saved, surely_retained=not self.hindered)
            self.model.believe(labels)
            if not struck:
                self.unsettled = False
                if claimed:
                    self.debris = 0
                stock_look(self.site, saved)
                self._check_disks(settled=False)
            elif self.crew is not None:
                self.debris += 1  # its record, say, until the next owner comes
        elif self.crew is not None:
            self.debris += 1

    def _refused(self, saved: Saved) -> None:
        """A job that restored nothing would begin over what is there: it gets an error, and nothing changes."""
        for end in self._crew.each(lambda member: _save_and_wait(member, saved)):
            assert isinstance(end.error, CommitConflictError), end.error
            assert "this job restored nothing" in str(end.error)
        if self.fresh:
            self.fresh, self.debris = False, 0

    def _same_outcome(self, ends: list[End[Any]], *, struck: bool) -> None:
        told = {(type(end.error).__name__, str(end.error)) for end in ends}
        assert len(told) == 1, f"ranks were told different things: {told}"
        error = ends[0].error
        if error is not None:
            assert isinstance(error, CkptfsError), repr(error)
            if not struck:
                raise error

    def _pin(self, step: int, *, pin: bool) -> None:
        saved = self.model.at(step)
        assert saved is not None
        if saved.label in self.model.pin_follows:
            return  # it has the pin of its predecessor, or will have
        if self.fresh:
            self.earlier = list(self.model.saves)
            self.needed.add(saved.label)
            self.model.claimed(self.needed, surely_retained=True)
        ends = self._crew.each(lambda m: m.manager.pin(step) if pin else m.manager.unpin(step))
        for end in ends:
            end.get()
        if self.fresh:
            self.fresh, self.debris = False, 0
        (self.model.pinned.add if pin else self.model.pinned.discard)(saved.label)

    def _restore(self, step: int | None, wanted: Saved | None) -> None:
        world = 1 if wanted is None else wanted.world
        ranks = [parts_here(self.site, m.control.world.node, world) for m in self._crew.members]
        states = [empty_state(mine) for mine in ranks]
        ends = self._crew.each(lambda m: m.manager.restore(states[m.rank], step))
        if wanted is None and self._something_else_lies_there():
            assert all(isinstance(end.error, StateError) for end in ends), ends
            return
        for end in ends:
            restored = end.get()
            if wanted is None:
                assert restored is None
                continue
            assert restored is not None
            assert (restored.step, restored.skipped) == (wanted.step, ())
            assert restored.uri.endswith(f"/{wanted.name}")
            assert label_in(states[end.rank], ranks[end.rank]) == wanted.label
        if wanted is not None:
            self.step = self.model.come_to = wanted.step
            self.needed = {wanted.label}
            self.restored = True

    def _something_else_lies_there(self) -> bool:
        """Whether beginning at step 0 would pass over something that looks like a checkpoint."""
        named = any(re.match(r"step_\d+/", key) for key in self.foreign)
        failed = any(s.failure and s.kind == "checkpoint" for s in self.model.saves)
        return failed or (named and not self._has_log())

    def _has_log(self) -> bool:
        """Whether somebody began to write here, at whatever operation it died."""
        keys = self.site.keys(".ckptfs/log")
        return any(key.endswith("/00000000") for key in keys)

    def _check_disks(self, *, settled: bool) -> None:
        for disk in disks(self.site):
            self._check_disk(disk, settled=settled)

    def _check_disk(self, disk: Disk, *, settled: bool) -> None:
        """What has a name has a reason; settled: nothing at all is on its way."""
        foreign = {key.split("/", 1)[0] for key in self.foreign}
        live = {s.name for s in self.model.saves}
        # A projection that failed is made up for by the next owner of the run.
        missing = live - set(disk.steps)
        assert self.hindered or not missing, f"not on this disk: {missing}"
        assert len(disk.attempts) <= self.debris, f"debris: {sorted(disk.attempts)}"
        if settled:
            left = set(disk.steps) - live - foreign
            assert not left, f"left: {left}"
            assert not disk.attempts
            assert not disk.trash, f"in the trash: {sorted(disk.trash)}"
        for name in foreign - live:
            theirs = {key.split("/", 1)[1] for key in self.foreign if key.startswith(f"{name}/")}
            assert not settled or disk.steps[name] == theirs, f"left beside {theirs} in {name}"


def _save_and_wait(member: Member, saved: Saved) -> object:
    result = member.manager.save(
        saved.step,
        state_of(saved.label, member.rank),
        None if saved.loss is None else {"loss": saved.loss},
        kind=saved.kind,  # type: ignore[arg-type]
        failure=saved.failure,
    )
    member.manager.wait(60.0)
    return result


_PROFILE = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)


def _live(number: int, steps: int) -> None:
    """One random life, the same for a number as far as threads allow it.

    Each life is a run of its own: what can be drawn depends on what became of a struck save, and
    Hypothesis takes it for a fault of the test when that differs between two lives with one beginning.
    """
    lives = seed(number)(type("Lives", (Lives,), {}))
    profile = settings(
        _PROFILE,
        max_examples=2,  # the first is always the shortest
        stateful_step_count=steps,
        phases=(Phase.generate,),
        database=None,
    )
    run_state_machine_as_test(lives, settings=profile)


@pytest.mark.parametrize("number", range(8))
def test_lives(number: int) -> None:
    """Saves, faults, deaths, restarts, restores, pins and foreign files in any order: exactly what the
    model says is there, bit for bit, and nothing else.
    """
    _live(number, 14)


def _next_save(life: Lives, step: int, **how: Any) -> None:
    life.step = step
    told = {"kind": "checkpoint", "loss": None, "failure": False, **how}
    life._save(life._next(told.pop("kind"), told.pop("loss"), **told), None)
    life.the_run_is_what_the_list_says()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_life_by_hand(mode: str) -> None:
    """What random lives reach seldom: back to an older step and on from there, past a rejected one;
    a pin that outlives jobs and its save, and its end; the best; failures among healthy saves; each on two disks.
    """
    life = Lives()
    try:
        life.birth(Layout.TWO_DOMAINS, Policy(2, None, 1), mode, 2)
        life.put_foreign(3, "")
        for step, loss in ((10, 2.0), (20, 0.5), (30, 1.0)):
            _next_save(life, step, loss=loss)
        life._restore(20, life.model.at(20))
        life._pin(30, pin=True)
        for step in (21, 22, 23):
            _next_save(life, step, kind="checkpoint", failure=False)
        life.restart(2, "killed")
        life._restore(None, life.model.latest())
        _next_save(life, 24, failure=True)
        _next_save(life, 24, kind="weights")
        for step in (25, 30, 23):
            _next_save(life, step)
        assert [s.step for s in life.model.saves if s.kind == "checkpoint"] == [20, 24, 25, 30, 23]
        life._pin(30, pin=False)
        for step in (26, 27):
            _next_save(life, step)
        assert [s.step for s in life.model.saves if s.kind == "checkpoint"] == [20, 24, 30, 26, 27]
    finally:
        life.teardown()


@pytest.mark.parametrize("layout", [Layout.TWO_DOMAINS, Layout.BUCKET])
def test_deaths_by_hand(layout: Layout) -> None:
    """Deaths and faults along one save after the other, each with a restart: whatever they left is
    gone after the next commit, and what was acknowledged is there.
    """
    life = Lives()
    try:
        life.birth(layout, Policy(1, None, None), "async", 2)
        for nth in range(8, 64, 9):
            for rank, how in ((0, How.ALL), (1, How.FULL)):
                life.step += 1
                life._save(life._next("checkpoint", None, failure=False), Blow(rank, nth, how))
                life.the_run_is_what_the_list_says()
                life.restart(2, "killed")
            _next_save(life, life.step + 1)
    finally:
        life.teardown()


@pytest.mark.campaign
def test_many_lives() -> None:
    """The same for thousands of steps, different ones each time."""
    faulthandler.cancel_dump_traceback_later()  # it takes long, and that is no hang
    first = int(os.environ.get("CKPTFS_MACHINE_SEED", str(random.randrange(1 << 30))))
    for number in range(first, first + int(os.environ.get("CKPTFS_MACHINE_LIVES", "500"))):
        sys.stderr.write(f"CKPTFS_MACHINE_SEED={number}\n")
        _live(number, 40)
