"""Any sequence of saves, deletes, replacements and restarts: what is live is whole, what is not goes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckptfs.storage.base import Shape
from tests.dcp.reuse_rig import Run, same, shared_in, walk

EXAMPLES = 12
KEYS = ("a", "b", "c", "d", "e")
NAMES = ("step_1", "step_2", "step_3", "step_4")
# Of each key a few values: equal bytes of another dtype or shape are among them.
values = st.sampled_from(
    [
        torch.zeros(300),
        torch.zeros(300, dtype=torch.int32),
        torch.zeros(30, 10),
        torch.arange(300.0),
        torch.arange(600.0),
        torch.full((5,), 7.0),
        "an object",
        "another",
    ]
)
states = st.dictionaries(st.sampled_from(KEYS), values, min_size=1)


class Reuse(RuleBasedStateMachine):
    """The run against a dictionary of what was saved last under each name."""

    shape = Shape.FILESYSTEM

    @initialize(first=st.dictionaries(st.sampled_from(KEYS), values, min_size=3))
    def begin(self, first: dict[str, Any]) -> None:
        """A run with one save."""
        self.run = Run(self.shape)
        self.now = dict(first)
        self.saved: dict[str, dict[str, Any]] = {}
        self.keep("step_1")

    @rule(name=st.sampled_from(NAMES))
    def keep(self, name: str) -> None:
        """Save the state as it is."""
        self.run.save(name, self.now)
        self.saved.pop(name, None)
        self.saved[name] = dict(self.now)

    @rule(name=st.sampled_from(NAMES), changes=states)
    def change(self, name: str, changes: dict[str, Any]) -> None:
        """Change, add or remove some items and save."""
        for key, value in changes.items():
            if key in self.now and value == "another":
                if len(self.now) > 1:
                    del self.now[key]
            else:
                self.now[key] = value
        self.keep(name)

    @precondition(lambda self: len(self.saved) > 1)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete any but the newest, which the next save builds on."""
        name = data.draw(st.sampled_from(list(self.saved)[:-1]))
        self.run.delete(name)
        del self.saved[name]

    @rule()
    def restart(self) -> None:
        """Another process continues, and remembers nothing."""
        self.run.restart()

    @invariant()
    def live_saves_are_whole(self) -> None:
        """Every live save loads bit for bit."""
        assert self.run.names() == list(self.saved)
        for name, state in self.saved.items():
            assert same(self.run.load(name, state), state), name

    @invariant()
    def nothing_else_lies_in_the_shared_place(self) -> None:
        """Shared files are those that some save with bytes lists, and every one of these is there."""
        storage, listed = self.run.plain, set()
        for key in walk(storage, ""):
            if key.endswith("/ckptfs.json") and key.count("/") == 2:
                listed |= shared_in(storage, key)
        assert self.run.shared_files() == listed

    def teardown(self) -> None:
        """End the last owner's threads."""
        if hasattr(self, "run"):
            self.run.bury()


class ReuseOnObjects(Reuse):
    """The same by keys."""

    shape = Shape.OBJECT


@pytest.mark.parametrize("machine", [Reuse, ReuseOnObjects])
def test_any_sequence_keeps_live_saves_whole_and_nothing_else(machine: type[Reuse]) -> None:
    """Changed, unchanged, removed and reshaped items; deletes, replacements and restarts: every live
    save loads bit for bit, and shared files go with the last save that lists them.
    """
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
