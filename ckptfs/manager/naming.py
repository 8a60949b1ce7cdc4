"""Names of step directories: one template, matched exactly, never by substring.

    Template("step_{N}").name(100)              -> "step_100"
    Template("step_{N}").step_of("step_100")    -> 100
    Template("step_{N}").step_of("step_100_mine") -> None: somebody else's directory

Retention that looks for a substring deletes the user's backups too (torchtitan #4292).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptfs.commit.layout import CONTROL
from ckptfs.commit.spec import whole_step
from ckptfs.errors import StateError

__all__ = ["Template"]

_PLACE = re.compile(r"\{N(?::0(?P<width>[1-9]\d?))?\}")


@dataclass(frozen=True, slots=True)
class Template:
    """How a step is called: text with one ``{N}``, or ``{N:08}`` for at least eight digits.

    text: ``step-{N}``, ``checkpoint-{N}``, ``global_step_{N}``, ... StateError for anything that could
    not be read back: no place, two places, a slash, a digit beside the place.
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
        rest = before + after
        if set(rest) & set("/\\\0{}") or self.text.startswith(".") or rest == CONTROL:
            raise StateError(
                f"name template {self.text!r} is not the name of a directory",
                hint="use letters, digits, - and _ around {N}; it lies directly in the run",
            )
        if before[-1:].isdigit() or after[:1].isdigit():
            raise StateError(
                f"name template {self.text!r} has a digit beside the step",
                hint="step 1 and step 11 could get one name: put a letter, - or _ between them",
            )

    def name(self, step: int) -> str:
        """The name of a step. StateError for a negative one."""
        step = whole_step(step)
        return _PLACE.sub(lambda place: f"{step:0{int(place['width'] or 1)}d}", self.text)

    def step_of(self, name: str) -> int | None:
        """The step whose name this is, None where the template did not make it."""
        place = next(_PLACE.finditer(self.text))
        before, after = self.text[: place.start()], self.text[place.end() :]
        found = re.fullmatch(re.escape(before) + r"([0-9]+)" + re.escape(after), name)
        if found is None:
            return None
        step = int(found[1])
        # "step_007" is not what step 7 is called here: it is somebody else's.
        return step if self.name(step) == name else None
