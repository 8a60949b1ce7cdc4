"""What a manager was asked to be, checked once. Pure.

The manager takes plain keywords, as people type them; from here on there are closed types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptfs.commit.claim import Takeover
from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.unlogged import Unlogged
from ckptfs.dcp.saving import WriteOptions
from ckptfs.errors import ArgumentChoice, StateError
from ckptfs.manager.copies import Copy
from ckptfs.manager.listeners import Listener
from ckptfs.manager.naming import Template
from ckptfs.manager.pointer import Pointer
from ckptfs.manager.retention import Keep

__all__ = ["IfSlow", "Names", "SaveMode", "Settings", "metrics_of"]


class SaveMode(ArgumentChoice, parameter="mode"):
    """Whether ``save`` returns when the checkpoint is committed, or when the state is staged."""

    SYNC = "sync"
    ASYNC = "async"


class IfSlow(ArgumentChoice, parameter="if_slow"):
    """What an asynchronous save does while as many as allowed are on their way."""

    DELAY = "delay"  # wait for the oldest
    SKIP = "skip"  # save nothing this time, and say so


@dataclass(frozen=True, slots=True)
class Names:
    """How saves are called, by kind. main: the kind of full checkpoints, whose steps count."""

    templates: Mapping[Kind, Template]
    main: Kind

    @classmethod
    def of_states(cls, checkpoint: Template, weights: Template) -> Names:
        """Full checkpoints and weights beside them. StateError where the two could meet."""
        if any(checkpoint.name(n) == weights.name(n) for n in (1, 10**9)):
            raise StateError(
                f"checkpoints and weights are both called {checkpoint.text!r}",
                hint="give weights_name= another template",
            )
        return cls({Kind.CHECKPOINT: checkpoint, Kind.WEIGHTS: weights}, Kind.CHECKPOINT)

    @classmethod
    def of_directories(cls, template: Template) -> Names:
        """Directories that a framework wrote."""
        return cls({Kind.DIRECTORY: template}, Kind.DIRECTORY)

    def of(self, kind: Kind) -> Template:
        """The template of a kind. StateError for one that this manager does not save."""
        if kind not in self.templates:
            kinds = " and ".join(f"{known.value} saves" for known in self.templates)
            raise StateError(f"this manager makes {kinds}, not {kind.value}")
        return self.templates[kind]

    def is_ours(self, seal: Seal) -> bool:
        """Whether a manager with these names made the save: others are never deleted."""
        template = self.templates.get(seal.artifact)
        return template is not None and template.step_of(seal.name) is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """How a manager saves and what it keeps. StateError: a number that makes no sense."""

    names: Names
    keep: Keep
    mode: SaveMode = SaveMode.SYNC
    if_slow: IfSlow = IfSlow.DELAY
    max_in_flight: int = 1
    host_memory_bytes: int | None = None
    delete_grace_s: float = 0.0
    write: WriteOptions = field(default_factory=WriteOptions)
    per_rank: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] = ()
    on_commit: Callable[[str], None] | None = None
    copies: tuple[Copy, ...] = ()
    takeover: Takeover = Takeover.AUTO
    pointer: Pointer | None = None
    begin_again: bool = False
    unlogged: Unlogged = Unlogged.ERROR  # of restores that do not say it themselves

    def unlogged_of(self, policy: str | None) -> Unlogged:
        """That of a restore: its own, or else the manager's."""
        return self.unlogged if policy is None else Unlogged(policy)

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise StateError(f"max_in_flight is {self.max_in_flight}; one save at least")
        if not (self.delete_grace_s >= 0 and math.isfinite(self.delete_grace_s)):
            raise StateError(f"delete_grace_s is {self.delete_grace_s}; it is a number of seconds")
        if self.host_memory_bytes is not None and self.host_memory_bytes < 0:
            raise StateError(f"host_memory_bytes is {self.host_memory_bytes}; it is not negative")


def metrics_of(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """Metrics as a seal holds them, sorted by name. StateError for what is no number."""
    found = []
    for name, value in sorted((metrics or {}).items()):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise StateError(
                f"metric {name!r} is a {type(value).__name__}, not a number",
                hint="pass floats: loss.item() for a tensor",
            ) from None
        # JSON has no NaN; such a metric says nothing, so it is left out.
        if math.isfinite(number):
            found.append((str(name), number))
    return tuple(found)
