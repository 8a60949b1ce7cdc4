"""One random path through the same processes and judgements that the search runs exhaustively."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from ckptfs.commit.log.entries import Generation
from ckptfs.commit.operations import Create, Pause, Refresh, Rename, Replace, Sync
from ckptfs.errors import AnswerLostError, NotFoundError
from ckptfs.storage.base import Shape
from tests.model.disk import Disk, Failed, Outcome, apply
from tests.model.judge import Judge
from tests.model.programs import Hear, Tell, What
from tests.model.search import Scenario, brief

__all__ = ["Walk"]

Steps = Generator[Any, Any, Any]
_QUIET = (Refresh, Sync, Pause, Tell)


class Walk:
    """Disks, running generators, facts, late requests; ``broken`` is what the oracle said."""

    def __init__(
        self, disks: Mapping[str, Disk], shape: Shape, windows: frozenset[str] = frozenset()
    ) -> None:
        self.shape = shape
        self.disks = dict(disks)
        self.whats: dict[str, What] = {}
        self.facts: dict[tuple[str, ...], Any] = {}
        self.late: list[tuple[str, Any]] = []
        self.trace: list[str] = []
        self.broken: list[str] = []
        self._running: dict[str, tuple[Steps, Any]] = {}
        self._acts: dict[Generation, set[str]] = {}
        self._died: set[str] = set()
        scenario = Scenario("walk", self.whats, {}, self.disks, shape, windows=windows)
        scenario.files = dict(disks)
        self._judge = Judge(scenario, tuple(sorted(disks)))

    # -- processes --------------------------------------------------------------------------

    def start(self, name: str, make: Callable[[], Steps]) -> None:
        """A process begins; nothing happens until it is stepped."""
        program = make()
        self._advance(name, program, lambda: next(program))

    def busy(self, gen: Generation, name: str) -> None:
        """The holder of ``gen`` does one thing at a time: this is one of them."""
        self._acts.setdefault(gen, set()).add(name)

    def idle(self, gen: Generation) -> bool:
        """Whether the holder of ``gen`` took the run and has ended what it began."""
        ready = gen.number == 1 or any(
            f[0] == "ready" and f[1:3] == (str(gen.number), gen.nonce) for f in self.facts
        )
        acts = self._acts.get(gen, set())
        return ready and not acts & (set(self._running) | self._died)

    def runnable(self) -> list[str]:
        """Processes that can take a step now."""
        return sorted(n for n in self._running if self._answers(n, faults=False))

    def crash(self, name: str) -> None:
        """A process dies where it is."""
        del self._running[name]
        self._died.add(name)
        self.trace.append(f"{name}  dies")

    def finish(self, name: str) -> None:
        """A process runs until it ends or must wait."""
        while self.step(name, lambda _: 0):
            pass

    def step(self, name: str, choose: Callable[[int], int]) -> bool:
        """One operation, with the answer that ``choose`` picks; False when it cannot continue."""
        if name not in self._running:
            return False
        answers = self._answers(name, faults=True)
        if not answers:
            return False
        program, (domain, op) = self._running[name]
        answer = answers[choose(len(answers)) if len(answers) > 1 else 0]
        self.trace.append(f"{name}  {domain}:{brief(op)}{answer.note}")
        before = dict(self.disks)
        if not isinstance(op, (Hear, Tell)):
            self.disks[domain] = answer.disk
        if answer.late:
            self.late.append((domain, op))
        if isinstance(op, Tell):
            self.facts.setdefault(op.fact, op.value)
        reply = answer.reply
        if isinstance(reply, Failed):
            self._advance(name, program, lambda: program.throw(reply.error()))
        else:
            value = list(reply) if type(reply) is tuple and not isinstance(op, Hear) else reply
            self._advance(name, program, lambda: program.send(value))
        self._look(before)
        return True

    def land(self, which: int, *, again: bool) -> None:
        """A late request arrives; ``again``: and stays on its way, to arrive a second time."""
        domain, op = self.late[which] if again else self.late.pop(which)
        before = dict(self.disks)
        self.disks[domain] = apply(self.disks[domain], op, self.shape)[0].disk
        self.trace.append(f"network  {domain}:{brief(op)} lands")
        self._look(before)

    # -- inside -----------------------------------------------------------------------------

    def _answers(self, name: str, *, faults: bool) -> list[Outcome]:
        domain, op = self._running[name][1]
        disk = self.disks[domain]
        if isinstance(op, _QUIET):
            return [Outcome("", disk, None)]
        if isinstance(op, Hear):
            if any(f in self.facts for f in op.unless):
                return [Outcome("", disk, False)]  # noqa: FBT003
            if op.facts and all(f in self.facts for f in op.facts):
                value = True if op.unless else self.facts[op.facts[-1]]
                return [Outcome("", disk, value)]
            return []
        out = apply(disk, op, self.shape)
        if not faults or isinstance(out[0].reply, Failed):
            return out
        lost = Failed(AnswerLostError, "?")
        if isinstance(op, (Create, Replace)):
            out = [
                *out,
                Outcome(" [done, answer lost]", out[0].disk, lost),
                Outcome(" [not done, answer lost]", disk, lost),
                Outcome(" [answer lost, in flight]", disk, lost, late=True),
            ]
        elif isinstance(op, Rename):
            # An NFS client sends it twice: the second finds that the source is gone.
            out = [*out, Outcome(" [sent twice]", out[0].disk, Failed(NotFoundError, op.source))]
        return out

    def _advance(self, name: str, program: Steps, go: Callable[[], Any]) -> None:
        self._running.pop(name, None)
        try:
            waiting = go()
        except StopIteration as stop:
            self.trace.append(f"{name}  ended: {stop.value}")
        except AnswerLostError as error:
            # Replace and the like are not repeated by one that only wanted to tidy up.
            self._died.add(name)
            self.trace.append(f"{name}  gave up: {error}")
        else:
            self._running[name] = (program, waiting)

    def _look(self, before: Mapping[str, Disk]) -> None:
        was = [before[d] for d in sorted(before)]
        now = [self.disks[d] for d in sorted(self.disks)]
        # "idle" was reported at the end of a claim or an act; the holder may have begun another since.
        facts = frozenset(
            (fact, value)
            for fact, value in self.facts.items()
            if fact[0] != "idle" or self.idle(Generation(int(fact[1]), fact[2]))
        )
        self.broken = self._judge.state(now, facts, quiet=not self.late)
        if was != now:
            self.broken = self.broken + self._judge.change(was, now)
