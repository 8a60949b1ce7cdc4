"""Saves that are on their way in this process, for tests of what looks on from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place as Sitting
from ckptfs.commit.session import RunSession, open_session
from ckptfs.control.control import SoloControl
from ckptfs.uri import Uri

__all__ = ["begun", "sitting"]


@contextlib.contextmanager
def sitting(uri: str, options: dict[str, Any]) -> Iterator[RunSession]:
    """A session of one process at a run."""
    with (
        SoloControl() as control,
        open_session(Uri.parse(uri), control, Sitting(options), write=True) as session,
    ):
        yield session


@contextlib.contextmanager
def begun(uri: str, name: str, options: dict[str, Any]) -> Iterator[SaveAttempt]:
    """A plain save that has begun and written one file."""
    with sitting(uri, options) as session:
        attempt = SaveAttempt(session, SaveSpec(name, None))
        attempt.begin()
        session.storage.replace(f"{attempt.prefix}__0_0.distcp", b"half")
        yield attempt
