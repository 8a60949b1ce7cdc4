"""The search: every interleaving of real commit programs over a model of storage.

    state       (disk of each domain, local state of each process, facts, requests in flight, budget)
    transition  one process's next operation, with each of its answers; or a late request lands
    judgement   the oracle's, on every state and on every change of a log

A process that crashes or stalls is one that is not scheduled any more: every state is judged as
if all processes had stopped there, so crashes cost no states of their own. Operations that touch
nothing shared and read nothing that may change (an existing log entry, a directory that is never
removed, a pause) are taken at once, because no other process can tell when they happened.

Breadth first: the first counterexample of a kind is a shortest one.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptfs.commit.operations import (
    Create,
    MakeDir,
    Pause,
    Read,
    Refresh,
    Rename,
    Replace,
    Sync,
)
from ckptfs.commit.paths import ATTEMPTS, CONTROL, LOG, TMP, TRASH
from ckptfs.errors import AlreadyExistsError, AnswerLostError, CkptfsError, NotFoundError
from ckptfs.storage.base import Shape
from tests.model.disk import Disk, Failed, Outcome, Puts, apply
from tests.model.judge import Judge
from tests.model.machine import Machine, forget
from tests.model.programs import Enter, Hear, Leave, Tell, What

__all__ = ["Found", "Result", "Scenario", "brief", "explore"]

_LASTING = frozenset({CONTROL, LOG, TMP, ATTEMPTS, TRASH})
LOST = Failed(AnswerLostError, "?")
TWICE = "?? sent twice"


@dataclass
class Scenario:
    """Who does what over which disks.

    programs: name -> a function that starts it. files: what each domain's disk holds at first.
    lost: how many answers may be lost, come late (Create, Replace) or be
    those of a request that was sent twice (Rename). windows: names of the
    documented windows that may be seen (see judge.py). polite: generations of newcomers that may not
    take a run from an owner that did not release it. removed: saves that a person removes by hand.
    """

    name: str
    whats: Mapping[str, What]
    programs: Mapping[str, Callable[[], Generator[Any, Any, Any]]]
    files: Mapping[str, Disk]
    shape: Shape = Shape.FILESYSTEM
    lost: int = 0
    windows: frozenset[str] = frozenset()
    foreign: Mapping[str, bytes] = field(default_factory=dict)
    polite: frozenset[tuple[int, str]] = frozenset()
    removed: frozenset[str] = frozenset()


class State(NamedTuple):
    """One state of the world; everything in it is interned, so equality is cheap."""

    disks: tuple[int, ...]
    nodes: tuple[int, ...]
    facts: int
    late: int
    lost: int


@dataclass(frozen=True)
class Found:
    """A broken promise and a shortest way to it."""

    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return self.what + "".join(f"\n    {line}" for line in self.trace)


@dataclass
class Result:
    """What a search came to."""

    name: str
    states: int
    complete: bool
    seconds: float
    found: list[Found]
    locals: int
    ends: dict[str, dict[str, int]]


class _Interned:
    """Values by small numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class _World:
    """The transition function of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.domains = tuple(sorted(scenario.files))
        self.machines = [Machine(name, make) for name, make in scenario.programs.items()]
        self.facts = _Interned()
        self.lates = _Interned()
        self.disks: list[Disk] = []
        self._at: dict[int, int] = {}
        self._steps: dict[Any, list[tuple[Any, ...]]] = {}

    def disk_number(self, disk: Disk) -> int:
        number = self._at.get(id(disk))
        if number is None:
            number = self._at[id(disk)] = len(self.disks)
            self.disks.append(disk)
        return number

    def start(self) -> State:
        disks = tuple(self.disk_number(self.scenario.files[d]) for d in self.domains)
        facts: frozenset[Any] = frozenset()
        nodes = []
        for machine in self.machines:
            node, disks, facts = self._rush(machine, machine.start, disks, facts)
            nodes.append(node)
        return State(
            disks,
            tuple(nodes),
            self.facts.number(facts),
            self.lates.number(frozenset()),
            self.scenario.lost,
        )

    # -- one step ---------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[State, tuple[int, Any, str]]]:
        """Every next state, with who did what."""
        for who, node in enumerate(state.nodes):
            key = (who, node, state.disks, state.facts, state.late, state.lost)
            steps = self._steps.get(key)
            if steps is None:
                steps = self._steps[key] = list(self._process(who, node, state))
            for disks, after, facts, late, lost, label in steps:
                nodes = (*state.nodes[:who], after, *state.nodes[who + 1 :])
                yield State(disks, nodes, facts, late, lost), label
        flying = self.lates.values[state.late]
        for request in flying:
            at, op = request
            shape = self.scenario.shape
            outcome = apply(self.disks[state.disks[at]], op, shape)[0]
            disks = self._with(state.disks, at, outcome.disk)
            late = self.lates.number(flying - {request})
            yield state._replace(disks=disks, late=late), (-1, request, " LANDS")

    def _process(self, who: int, node: int, state: State) -> Iterator[tuple[Any, ...]]:
        machine = self.machines[who]
        waiting = machine.op(node)
        if waiting is None:
            return
        domain, op = waiting
        facts = self.facts.values[state.facts]
        if isinstance(op, Enter):
            turn = (("turn", op.turn), None)
            if turn in facts:
                return
            at, facts = 0, facts | {turn}
            answers = [Outcome("", self.disks[state.disks[0]], None)]
        elif isinstance(op, Hear):
            told = dict(facts)
            # Both may hold by the time it is asked; what ranks learn was set once.
            at, here = 0, self.disks[state.disks[0]]
            if any(f in told for f in op.unless):
                answers = [Outcome("", here, False)]  # noqa: FBT003
            elif op.facts and all(f in told for f in op.facts):
                answers = [Outcome("", here, True if op.unless else told[op.facts[-1]])]
            else:
                return
        else:
            at = self.domains.index(domain)
            answers = list(self._answers(self.disks[state.disks[at]], op, state.lost))
        for answer in answers:
            disks = self._with(state.disks, at, answer.disk)
            late, lost = state.late, state.lost
            if isinstance(answer.reply, Failed) and answer.reply.key in (LOST.key, TWICE):
                lost -= 1
            if answer.late:
                late = self.lates.number(self.lates.values[late] | {(at, op)})
            after = machine.step(node, answer.reply)
            after, disks, known = self._rush(machine, after, disks, facts)
            label = (who, waiting, answer.note)
            yield disks, after, self.facts.number(known), late, lost, label

    def _answers(self, disk: Disk, op: Any, lost: int) -> Iterator[Outcome]:
        memo = disk.memo.get(op)
        if memo is None:
            memo = disk.memo[op] = apply(disk, op, self.scenario.shape)
        yield from memo
        if lost and isinstance(op, (Create, Replace)) and not isinstance(memo[0].reply, Failed):
            yield Outcome(" [done, answer lost]", memo[0].disk, LOST)
            yield Outcome(" [answer lost, in flight]", disk, LOST, late=True)
        elif lost and isinstance(op, Rename) and not isinstance(memo[0].reply, Failed):
            # An NFS client sends it again: the second finds that the source is gone.
            yield Outcome(" [sent twice]", memo[0].disk, Failed(NotFoundError, TWICE))

    def _rush(
        self, machine: Machine, node: int, disks: tuple[int, ...], facts: frozenset[Any]
    ) -> tuple[int, tuple[int, ...], frozenset[Any]]:
        """Take the operations that no other process can see."""
        while (waiting := machine.op(node)) is not None:
            domain, op = waiting
            if isinstance(op, Tell):
                facts = facts | {(op.fact, op.value)}
                node = machine.step(node, None)
                continue
            if isinstance(op, Leave):
                facts = facts - {(("turn", op.turn), None)}
                node = machine.step(node, None)
                continue
            if isinstance(op, Hear | Enter):
                break
            reply = self._hidden(self.disks[disks[self.domains.index(domain)]], op)
            if reply is _SEEN:
                break
            node = machine.step(node, reply)
        return node, disks, facts

    def _hidden(self, disk: Disk, op: Any) -> Any:
        match op:
            case Refresh() | Sync() | Pause():
                return None
            case MakeDir(key) if self.scenario.shape is Shape.OBJECT or (
                key in _LASTING and key in disk.files
            ):
                return None
            case Read(key) if key.startswith(LOG) and key in disk.files:
                return disk.files[key]
            case Create(key) if key in disk.files:
                return Failed(AlreadyExistsError, key)
        return _SEEN

    def _with(self, disks: tuple[int, ...], at: int, disk: Disk) -> tuple[int, ...]:
        number = self.disk_number(disk)
        return disks if disks[at] == number else (*disks[:at], number, *disks[at + 1 :])

    # -- telling ----------------------------------------------------------------------------

    def show(self, label: tuple[int, Any, str]) -> str:
        who, (where, op), note = label
        name = "network" if who < 0 else self.machines[who].name
        domain = where if isinstance(where, str) else self.domains[where]
        prefix = f"{domain}:" if len(self.domains) > 1 else ""
        return f"{name}  {prefix}{brief(op)}{note}"


_SEEN = object()


def brief(op: Any) -> str:
    """An operation on one line, its bytes by what they mean."""
    if isinstance(op, Puts):
        return f"Puts({op.files[0][0].rpartition('/')[0]}/*)"
    parts = []
    for name in op.__dataclass_fields__:
        value = getattr(op, name)
        if name == "staging" or value is None:
            continue
        if isinstance(value, bytes):
            value = _entry(value)
        parts.append(str(value))
    return f"{type(op).__name__}({', '.join(parts)})"


def _entry(data: bytes) -> str:
    text = data.decode()
    if '"kind":' not in text:
        return "{...}" if text.startswith("{") else text.strip()[:40]
    e = json.loads(text)
    inside = e.get("generation") or e.get("save_id")
    return f"<{e['kind']} {inside}{' ' + e['outcome'] if 'outcome' in e else ''}>"


def explore(
    scenario: Scenario,
    *,
    max_states: int = 2_000_000,
    max_seconds: float = 600.0,
    stop_at_first: bool = False,
) -> Result:
    """Search a scenario; every kind of broken promise is reported once, by a shortest trace."""
    Disk.forget()
    forget()
    started = time.monotonic()
    scenario.files = {d: Disk.of(dict(disk.files)) for d, disk in scenario.files.items()}
    world = _World(scenario)
    judge = Judge(scenario, world.domains)
    first = world.start()
    came: dict[State, tuple[State, tuple[int, Any, str]] | None] = {first: None}
    queue = deque([first])
    found: dict[str, Found] = {}

    def trace(state: State) -> tuple[str, ...]:
        lines = []
        step = came[state]
        while step is not None:
            lines.append(world.show(step[1]))
            step = came[step[0]]
        return tuple(reversed(lines))

    def report(kinds: list[str], state: State) -> None:
        for kind in kinds:
            if kind not in found:
                found[kind] = Found(kind, trace(state))

    def judged(state: State, before: State | None) -> list[str]:
        disks = [world.disks[n] for n in state.disks]
        facts = world.facts.values[state.facts]
        bad = judge.state(disks, facts, quiet=not world.lates.values[state.late])
        if before is not None and before.disks != state.disks:
            bad = bad + judge.change([world.disks[n] for n in before.disks], disks)
        bad = bad + [
            f"{m.name} ended with {m.value(n)!r}"
            for m, n in zip(world.machines, state.nodes, strict=True)
            if m.op(n) is None
            and isinstance(m.value(n), Exception)
            and not isinstance(m.value(n), CkptfsError)
        ]
        if all(m.op(n) is None for m, n in zip(world.machines, state.nodes, strict=True)):
            bad = bad + judge.end(disks, facts)
        return bad

    report(judged(first, None), first)
    complete = True
    for count in itertools.count():
        if not queue or (stop_at_first and found):
            break
        if len(came) > max_states or (
            count % 1024 == 0 and time.monotonic() - started > max_seconds
        ):
            complete = False
            break
        state = queue.popleft()
        for after, label in world.successors(state):
            if after in came:
                continue
            came[after] = (state, label)
            queue.append(after)
            kinds = judged(after, state)
            if kinds:
                report(kinds, after)
    return Result(
        scenario.name,
        len(came),
        complete and not (stop_at_first and bool(found)),
        time.monotonic() - started,
        list(found.values()),
        sum(m.size for m in world.machines),
        {m.name: m.ends() for m in world.machines},
    )
