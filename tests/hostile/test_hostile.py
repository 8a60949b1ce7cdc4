"""A hostile checkpoint and a foreign hand do no harm: every input, against every command it can meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.commands import COMMANDS
from tests.hostile.corpus import Trial, inputs, trials
from tests.hostile.inputs.untouched import EVERY
from tests.hostile.place import On
from tests.hostile.warm import Warm

TRIALS = list(trials())


def _params(*, in_ci: bool) -> list[object]:
    return [
        pytest.param(
            trial,
            id=trial.name,
            marks=[pytest.mark.xfail(reason=trial.finding, strict=True)] if trial.finding else [],
        )
        for trial in TRIALS
        if trial.in_ci or not in_ci
    ]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """The process that children are forked from."""
    process = Warm()
    yield process
    process.close()


@pytest.mark.parametrize("trial", _params(in_ci=True))
def test_a_hostile_input_does_no_harm(trial: Trial, warm: Warm) -> None:
    """An error of ckptfs or the right answer, in bounded time and memory; no code runs, and nothing
    outside the run is touched or carried away.
    """
    outcome = warm.run(trial.input.name, trial.command)
    assert not outcome.fault, f"{trial.input.tries}\n{outcome}"


@pytest.mark.campaign
@pytest.mark.parametrize("trial", _params(in_ci=False))
def test_campaign_every_command_meets_every_input(trial: Trial, warm: Warm) -> None:
    """The same of every pair."""
    outcome = warm.run(trial.input.name, trial.command)
    assert not outcome.fault, f"{trial.input.tries}\n{outcome}"


_NO_LOG = ("restore",)  # of checkpoints that no log knows it takes none
_DIFFERENT = {
    On.SAFETENSORS: "exit 1",
    On.TORCH: "exit 1",
}  # from the checkpoint that diff is given


@pytest.mark.parametrize(
    ("on", "command"), [(on, command) for on, commands in EVERY.items() for command in commands]
)
def test_an_untouched_tree_meets_no_error(on: On, command: str, warm: Warm) -> None:
    """What every command does with an unchanged tree: so an error elsewhere is an answer to the
    input, and no mistake of the frame.
    """
    outcome = warm.run(f"untouched-{on.value}", command)
    assert not outcome.fault
    if on is On.LOOSE and command in _NO_LOG:
        assert outcome.ended.startswith("StateError: this run has checkpoints that no log lists")
    elif command == "diff" and on in _DIFFERENT:
        assert outcome.ended == _DIFFERENT[on]
    elif on is On.STOCK and command == "verify":
        assert outcome.ended == "exit 7"  # it has no digests to compare with
    else:
        assert outcome.ended == "it returned"


def test_every_input_says_what_it_tries_and_every_command_meets_some() -> None:
    """The corpus is whole: no input without a sentence, no command that nothing meets."""
    assert all(one.tries.strip() for one in inputs().values())
    assert {trial.command for trial in TRIALS} == set(COMMANDS)
    assert len(inputs()) >= 200
