"""Random histories over the real programs: what the exhaustive search is too small to reach.

Three generations, plain saves, replaces, deletes, overwrites, crashes, stalled writers that wake,
lost, late and repeated answers, on one or two domains, filesystem or object store; after every
step the oracle judges the whole state. The search's own machinery runs the processes, so a failure
prints the interleaving that Hypothesis shrank.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptfs.commit.log.entries import Fence, FenceMode, Generation
from ckptfs.storage.base import Shape
from tests.model.disk import Disk
from tests.model.programs import (
    FILESYSTEM,
    OBJECT,
    Delete,
    Holder,
    What,
    holder,
    reader,
    saver,
)
from tests.model.scenarios import committed_disk
from tests.model.walk import Walk

NAMES = st.sampled_from(["s1", "s2"])


class Histories(RuleBasedStateMachine):
    """Processes come, take steps, stall forever or for a while; nothing else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.walk: Walk
        self.saves = 0
        self.number = 1

    @initialize(shape=st.sampled_from([Shape.FILESYSTEM, Shape.OBJECT]), domains=st.integers(1, 2))
    def begin(self, shape: Shape, domains: int) -> None:
        """One or two empty domains that generation 1 holds."""
        self.shape = shape
        self.caps = FILESYSTEM if shape is Shape.FILESYSTEM else OBJECT
        self.domains = ("A", "B")[:domains]
        first = Fence(Generation(1, "x"))
        disks: dict[str, Disk] = {d: committed_disk(shape, [first]) for d in self.domains}
        self.holding = Generation(1, "x")
        windows = frozenset({"late-put", "stale-projection"} if shape is Shape.OBJECT else ())
        self.walk = Walk(disks, shape, windows)

    def _what(self, name: str, gen: Generation | None, *, replace: bool) -> What:
        self.saves += 1
        return What(
            f"save{self.saves:02d}", name, gen, self.domains, replace=replace, caps=self.caps
        )

    def _start(self, name: str, make: Any) -> None:
        self.walk.start(name, make)

    @precondition(lambda self: self.saves < 6)
    @rule(name=NAMES)
    def plain_save(self, name: str) -> None:
        """A save without a run begins."""
        what = self._what(name, None, replace=False)
        self.walk.whats[what.save_id] = what
        for domain in self.domains:
            self._start(f"{what.save_id}{domain}", partial(saver, what, domain))

    @precondition(lambda self: self.saves < 6 and self.walk.idle(self.holding))
    @rule(name=NAMES, replace=st.booleans())
    def held_save(self, name: str, replace: bool) -> None:
        """The holder saves, replacing or not; one act of the holder at a time."""
        what = self._what(name, self.holding, replace=replace)
        self.walk.whats[what.save_id] = what
        for domain in self.domains:
            self._start(f"{what.save_id}{domain}", partial(saver, what, domain))
            self.walk.busy(self.holding, f"{what.save_id}{domain}")

    @precondition(lambda self: self.walk.idle(self.holding))
    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        """The holder deletes the live save of a name."""
        self.number += 1
        spec = Holder(self.holding, self.domains, (Delete(name),), caps=self.caps, fenced=True)
        process = f"D{self.number}"
        self._start(process, partial(holder, spec))
        self.walk.busy(self.holding, process)

    @precondition(lambda self: self.holding.number < 4)
    @rule(mode=st.sampled_from(list(FenceMode)), fast=st.booleans())
    def newcomer(self, mode: FenceMode, fast: bool) -> None:
        """Somebody prepares the run; its holder from before may stall anywhere and wake later."""
        self.holding = Generation(self.holding.number + 1, "n")
        process = f"P{self.holding.number}"
        spec = Holder(self.holding, self.domains, mode=mode, caps=self.caps)
        self._start(process, partial(holder, spec))
        self.walk.busy(self.holding, process)
        if fast:
            self.walk.finish(process)

    @rule(name=NAMES)
    def read(self, name: str) -> None:
        """A reader looks for a name, in the first domain."""
        self.number += 1
        whats = self.walk.whats
        if whats:
            self._start(f"R{self.number}", partial(_reader, whats, name))

    @precondition(lambda self: self.walk.runnable())
    @rule(data=st.data(), steps=st.integers(1, 12))
    def steps(self, data: st.DataObject, steps: int) -> None:
        """Some process takes some steps, and each answer may be lost or late."""
        who = data.draw(st.sampled_from(self.walk.runnable()), label="who")
        for _ in range(steps):
            if not self.walk.step(who, lambda n: data.draw(st.integers(0, n - 1), label="answer")):
                break

    @precondition(lambda self: self.walk.runnable())
    @rule(data=st.data())
    def run_to_end(self, data: st.DataObject) -> None:
        """Some process runs as far as it can."""
        self.walk.finish(data.draw(st.sampled_from(self.walk.runnable()), label="who"))

    @precondition(lambda self: self.walk.runnable())
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Some process dies."""
        self.walk.crash(data.draw(st.sampled_from(self.walk.runnable()), label="who"))

    @precondition(lambda self: self.walk.late)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """A late request reaches the storage, perhaps a second time."""
        which = data.draw(st.integers(0, len(self.walk.late) - 1), label="which")
        self.walk.land(which, again=data.draw(st.booleans(), label="again"))

    @invariant()
    def every_promise_is_kept(self) -> None:
        """The oracle has nothing to say."""
        if hasattr(self, "walk"):
            assert not self.walk.broken, "\n".join((*self.walk.broken, *self.walk.trace))


def _reader(whats: dict[str, What], name: str) -> Generator[Any, Any, Any]:
    return reader(whats, name)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
