"""How far a change is from the looks of another client, and whether a plain look was misled at all.

A client forgets for reasons of its own: a plain look that is not misled shows nothing, and such a test is
tried again (``until_shown``), for what ckptfs does must hold whenever it was, and must hold every time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import ParamSpec

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.clock import stopped

__all__ = ["GAP_S", "Gap", "gaps", "hides", "rounds", "shows", "until_shown"]

P = ParamSpec("P")

_TRIES = 6

GAP_S = 0.1  # beyond one tick of the server's clock


class NotShownError(Exception):
    """The plain call was not misled this time; nothing was to be cured."""


def shows(misled: bool, what: str = "nothing to be cured here") -> None:
    """Replaces ``assert`` where a plain call has to fail."""
    if not misled:
        raise NotShownError(what)


def until_shown(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test again where a plain call was not misled; in the end it is skipped, and says so."""

    @functools.wraps(test)
    def again(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(NotShownError):
                test(*args, **kwargs)
                return
        pytest.skip(
            f"{_TRIES - 1} times this client was not misled: what ckptfs does held, and cured nothing"
        )

    return again


class Gap(Enum):
    """How far the change is from the looks before and after it."""

    NONE = "within-one-tick"
    SOME = "after-a-gap"

    def between(self, lab: NfsLab) -> AbstractContextManager[None]:
        """Around the changes and the looks at them."""
        return stopped(lab) if self is Gap.NONE else contextlib.nullcontext()

    def wait(self) -> None:
        """Between the two."""
        if self is Gap.SOME:
            time.sleep(GAP_S)


gaps = pytest.mark.parametrize("gap", Gap, ids=lambda gap: gap.value)


def hides(lab: NfsLab, gap: Gap) -> bool:
    """Whether even a directory that is opened again may look as it was: v3 has nothing but its time."""
    return lab.version == "3" and gap is Gap.NONE


def rounds(lab: NfsLab, gap: Gap) -> int:
    """How often to try: where a change may hide, until it did once, for a busy machine's clock is hard to
    stop; a few times where it may not.
    """
    return 20 if hides(lab, gap) else 2
