"""What the machine believes: lists and numbers. It knows the policy's words, none of its code.

    model.committed(saved)        appended; what had its name is gone; then the policy
    model.saves                   what is live, in commit order
    model.may_be_gone             what the policy released while something failed

The last are gone or there, as the next look finds them; all else has to be as it says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Saved:
    """One save. label: the number that all of its tensors show; never used twice."""

    label: int
    step: int
    kind: str = "checkpoint"
    loss: float | None = None
    failure: bool = False
    world: int = 1

    @property
    def name(self) -> str:
        """The directory."""
        return f"{'step' if self.kind == 'checkpoint' else 'weights'}_{self.step}"


@dataclass(frozen=True)
class Policy:
    """What the user asked to keep."""

    latest: int | None = None
    every: int | None = None
    best: int | None = None  # so many with the least loss


@dataclass
class Model:
    """The run, as its user would tell it."""

    policy: Policy
    saves: list[Saved] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    may_be_gone: set[int] = field(default_factory=set)
    pin_follows: set[int] = field(default_factory=set)  # pinned, though it may not be seen yet
    come_to: int = -1  # the step that this job restored, or saved last; -1: neither

    def latest(self, kind: str = "checkpoint") -> Saved | None:
        """What a job continues from: the last commit, not the largest step."""
        healthy = [s for s in self.saves if s.kind == kind and not s.failure]
        return healthy[-1] if healthy else None

    def at(self, step: int) -> Saved | None:
        """The checkpoint of a step."""
        return next((s for s in self.saves if (s.kind, s.step) == ("checkpoint", step)), None)

    def committed(self, saved: Saved, *, surely_retained: bool) -> None:
        """A save was committed; retention ran after it, or was hindered."""
        self.come_to = saved.step
        gone = [s for s in self.saves if s.name == saved.name]
        self.saves = [*(s for s in self.saves if s.name != saved.name), saved]
        if any(s.label in self.pinned for s in gone):
            # People pin a step: who replaces the save takes the pin over, in retention's turn.
            self.pinned.add(saved.label)
            self.pin_follows.add(saved.label)
        self.pinned -= {s.label for s in gone}
        if surely_retained:
            self.pin_follows.clear()
        going = self.going()
        self.may_be_gone |= going
        if surely_retained:
            self.saves = [s for s in self.saves if s.label not in going]

    def claimed(self, needed: Collection[int], *, surely_retained: bool) -> None:
        """A job took the run: what a dead one was about to release goes now, but for what it needs."""
        going = self.going() - set(needed)
        self.may_be_gone |= going
        if surely_retained:
            self.saves = [s for s in self.saves if s.label not in going]
            self.pin_follows.clear()

    def begins_over(self, saved: Saved, earlier: Sequence[Saved]) -> bool:
        """Whether a job that restored nothing would save that over what earlier jobs left."""
        healthy = [s.step for s in earlier if s.kind == saved.kind and not s.failure]
        return saved.name in {s.name for s in earlier} or bool(
            healthy and saved.step <= healthy[-1]
        )

    def going(self) -> set[int]:
        """Labels that the policy does not keep; what is further than the job is nothing for it to judge."""
        if self.policy.latest is None:
            return set()
        kept = {*self.pinned, *(s.label for s in self.saves if s.step > self.come_to)}
        for kind in ("checkpoint", "weights"):
            for failure in (False, True):
                group = [s for s in self.saves if (s.kind, s.failure) == (kind, failure)]
                kept |= self._kept(group)
        return {s.label for s in self.saves} - kept

    def _kept(self, group: Sequence[Saved]) -> set[int]:
        kept = {s.label for s in group[-(self.policy.latest or 1) :]}
        if self.policy.every is not None:
            kept |= {s.label for s in group if s.step % self.policy.every == 0}
        if self.policy.best is not None:
            measured = [s for s in group if s.loss is not None and not s.failure]
            order = {s.label: at for at, s in enumerate(group)}
            measured.sort(key=lambda s: (s.loss, order[s.label]))
            kept |= {s.label for s in measured[: self.policy.best]}
        return kept

    def believe(self, labels: Sequence[int]) -> None:
        """The run was looked at: it may differ from us only by what was in doubt."""
        known = [s.label for s in self.saves]
        assert list(labels) == [x for x in known if x in labels], f"{labels} is not {known}"
        missing = set(known) - set(labels)
        assert missing <= self.may_be_gone, (
            f"lost: {[s for s in self.saves if s.label in missing - self.may_be_gone]}"
        )
        self.saves = [s for s in self.saves if s.label in labels]
        self.may_be_gone &= self.going()
