"""The options of a manager as closed types, and the names of its checkpoints. Pure.

The managers take plain keywords, as people type them. They are checked once, here; all other code
sees closed types.

Step directories are named by one template, which is matched exactly, never by substring:

    Template("step_{N}").name(100)              -> "step_100"
    Template("step_{N}").step_of("step_100")    -> 100
    Template("step_{N}").step_of("step_100_mine") -> None: not a directory of this manager

Retention that looks for a substring deletes the user's backups too (torchtitan #4292).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptfs.commit.catalog.unlogged import Unlogged
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.paths import CONTROL
from ckptfs.commit.save.spec import checked_step
from ckptfs.dcp.saving import WriteOptions
from ckptfs.errors import ArgumentChoice, StateError
from ckptfs.manager.claimed_run import Pointer
from ckptfs.manager.listeners import Listener
from ckptfs.replication.tiers import Copy
from ckptfs.retention.policy import Keep

__all__ = ["IfSlow", "Names", "SaveMode", "Settings", "Template", "metrics_of"]

_PLACE = re.compile(r"\{N(?::0(?P<width>[1-9]\d?))?\}")


@dataclass(frozen=True, slots=True)
class Template:
    """How steps are named: text with one ``{N}``, or ``{N:08}`` for at least eight digits.

    Raises StateError if a name could not be read back: no placeholder, two of them, a slash, or a
    digit next to the placeholder.

    Attributes:
        text: ``step-{N}``, ``checkpoint-{N}``, ``global_step_{N}``, ...
    """

    text: str

    def __post_init__(self) -> None:
        places = list(_PLACE.finditer(self.text))
        if len(places) != 1:
            raise StateError(
                f"name template {self.text!r} needs one {{N}} for the step",
                hint='for example name="step_{N}" or name="checkpoint-{N:08}"',
            )
        before, after = self.text[: places[0].start()], self.text[places[0].end() :]
        fixed_text = before + after
        if set(fixed_text) & set("/\\\0{}") or self.text.startswith(".") or fixed_text == CONTROL:
            raise StateError(
                f"name template {self.text!r} is not the name of a directory",
                hint="use letters, digits, - and _ around {N}; the directory is made directly in "
                "the run",
            )
        if before[-1:].isdigit() or after[:1].isdigit():
            raise StateError(
                f"name template {self.text!r} has a digit next to the step",
                hint="step 1 and step 11 could get one name: put a letter, - or _ between them",
            )

    def name(self, step: int) -> str:
        """Return the name of a step. Raises StateError for a negative step."""
        step = checked_step(step)
        return _PLACE.sub(lambda place: f"{step:0{int(place['width'] or 1)}d}", self.text)

    def step_of(self, name: str) -> int | None:
        """Return the step that has this name, None if the template did not make the name."""
        place = next(_PLACE.finditer(self.text))
        before, after = self.text[: place.start()], self.text[place.end() :]
        found = re.fullmatch(re.escape(before) + r"([0-9]+)" + re.escape(after), name)
        if found is None:
            return None
        step = int(found[1])
        # "step_007" is not the name of step 7 here: another program made it.
        return step if self.name(step) == name else None


class SaveMode(ArgumentChoice, parameter="mode"):
    """Whether ``save`` returns when the checkpoint is committed, or when the state is staged."""

    SYNC = "sync"
    ASYNC = "async"


class IfSlow(ArgumentChoice, parameter="if_slow"):
    """What an asynchronous save does when as many saves as allowed are under way."""

    DELAY = "delay"  # wait for the oldest
    SKIP = "skip"  # save nothing this time, and report that


@dataclass(frozen=True, slots=True)
class Names:
    """The template of each kind of save.

    ``main`` is the kind of full checkpoints: only their steps count.
    """

    templates: Mapping[Kind, Template]
    main: Kind

    @classmethod
    def of_states(cls, checkpoint: Template, weights: Template) -> Names:
        """Names for full checkpoints, and for weights next to them.

        Raises StateError if both templates could make the same name.
        """
        if any(checkpoint.name(n) == weights.name(n) for n in (1, 10**9)):
            raise StateError(
                f"checkpoints and weights have the same name template {checkpoint.text!r}",
                hint="pass another template as weights_name=",
            )
        return cls({Kind.CHECKPOINT: checkpoint, Kind.WEIGHTS: weights}, Kind.CHECKPOINT)

    @classmethod
    def of_directories(cls, template: Template) -> Names:
        """Names for directories that a framework wrote."""
        return cls({Kind.DIRECTORY: template}, Kind.DIRECTORY)

    def of(self, kind: Kind) -> Template:
        """Return the template of a kind.

        Raises StateError for one that this manager does not save.
        """
        if kind not in self.templates:
            kinds = " and ".join(f"{known.value} saves" for known in self.templates)
            raise StateError(f"this manager saves {kinds}, not {kind.value}")
        return self.templates[kind]

    def is_ours(self, seal: Seal) -> bool:
        """Whether a manager with these names made the save. Other saves are never deleted."""
        template = self.templates.get(seal.artifact)
        return template is not None and template.step_of(seal.name) is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """How a manager saves and what it keeps. Raises StateError for a number that makes no sense."""

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
    unlogged: Unlogged = Unlogged.ERROR  # for restores without an argument of their own

    def unlogged_of(self, policy: str | None) -> Unlogged:
        """Return the policy of one restore: its own, or else the manager's."""
        return self.unlogged if policy is None else Unlogged(policy)

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise StateError(f"max_in_flight is {self.max_in_flight}; it is at least 1")
        if not (self.delete_grace_s >= 0 and math.isfinite(self.delete_grace_s)):
            raise StateError(f"delete_grace_s is {self.delete_grace_s}; it is a number of seconds")
        if self.host_memory_bytes is not None and self.host_memory_bytes < 0:
            raise StateError(f"host_memory_bytes is {self.host_memory_bytes}; it is not negative")


def metrics_of(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """Return metrics as a seal holds them, by name. Raises StateError for what is no number."""
    found = []
    for name, value in sorted((metrics or {}).items()):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise StateError(
                f"metric {name!r} is a {type(value).__name__}, not a number",
                hint="pass floats: loss.item() for a tensor",
            ) from None
        # JSON has no NaN; such a metric has no information, so it is left out.
        if math.isfinite(number):
            found.append((str(name), number))
    return tuple(found)
