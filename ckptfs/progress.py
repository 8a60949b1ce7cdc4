"""Progress bars for long work, in a terminal and nowhere else.

    with progress("saving run/step_100", total_bytes, rank=rank) as meter:
        ... meter.advance(size_bytes) from any thread

    saving run/step_100  ━━━━━━━━━━╸━━━━━━━━━━  1.2/2.5 GB  812.4 MB/s  0:00:02

Drawn on standard error, on rank 0, if that is a terminal and CKPTFS_PROGRESS is not 0; everywhere
else a meter costs an attribute look-up. Work that is over within half a second draws nothing. A bar
goes when its work is over: what became of it is said by whoever did it.

Of several meters at once the first has the line, the others count in silence. A bar is one line of
one thread: nothing is installed in the process, neither a handler nor another ``sys.stderr``, and
what fails in here never reaches the work.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["SILENT", "Meter", "printable", "progress"]

_QUIET_S = 0.5  # work that is over sooner draws nothing
_FRAME_S = 0.1
_LEAVE_S = 1.0  # a terminal that was stopped (Ctrl-S) blocks whoever writes to it: not the work
_ERASE = "\r\x1b[2K"
_LEAST_COLUMNS = 20
_NUMBERS = 48  # columns for the bar and the numbers beside the title

_LINE = threading.Lock()  # the terminal has one last line


class Meter:
    """What counts the work. Base class: nobody looks. Any thread, any number of times."""

    def advance(self, size_bytes: int) -> None:
        """So many bytes more are done."""

    def expect(self, total_bytes: int | None) -> None:
        """How many there will be, where that was not known at the start."""


SILENT = Meter()

# What moves the cursor, changes a terminal, turns text round or is no character: C0, C1, line separators,
# bidirectional controls, what nobody sees, surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Text for one line of a terminal or a log: what is no plain character is escaped as Python writes it.

    Names and texts in checkpoints are anybody's: raw, they set a terminal's title, hide what stands before
    them, or look like further lines. Line feeds are escaped as well.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def progress(title: str, total_bytes: int | None = None, *, rank: int = 0) -> Iterator[Meter]:
    """A meter for the work inside. Raises nothing of its own.

    title: what is done, to which URI (bare, without credentials). total_bytes: of this rank; None
    where nobody knows, then no end is drawn. rank: others than 0 draw nothing.
    """
    stream = _terminal() if rank == 0 else None
    # Taken here, not when the bar is drawn: of nested meters the outer has the line, always.
    if stream is None or not _LINE.acquire(blocking=False):
        yield SILENT
        return
    drawn = _Drawn(printable(title), total_bytes, stream)
    drawn.start()
    try:
        yield drawn
    finally:
        drawn.stop()


def _terminal() -> TextIO | None:
    """Standard error, where a person looks at it."""
    stream = sys.stderr
    if os.environ.get("CKPTFS_PROGRESS") == "0" or os.environ.get("TERM") == "dumb":
        return None
    try:
        return stream if stream is not None and stream.isatty() else None
    except Exception:  # noqa: BLE001 - closed, or a stand-in that is no file
        return None


class _Drawn(Meter):
    """A meter that a thread looks at."""

    def __init__(self, title: str, total_bytes: int | None, stream: TextIO) -> None:
        self._title = title
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._stream = stream
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptfs-progress", daemon=True)

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes

    def expect(self, total_bytes: int | None) -> None:
        self._total_bytes = total_bytes

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no threads left, or the interpreter is ending
            _LINE.release()

    def stop(self) -> None:
        """The line is free again, but for a terminal that takes nothing."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            if not self._over.wait(_QUIET_S):
                self._draw()
        except Exception:  # noqa: BLE001, S110 - no rich, a closed terminal: the work goes on unseen
            pass
        finally:
            _LINE.release()

    def _draw(self) -> None:
        frame = _frames(self._title, self._stream)
        try:
            while not self._over.is_set():
                self._write(_ERASE + frame(self._done_bytes, self._total_bytes))
                self._over.wait(_FRAME_S)
        finally:
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _frames(title: str, stream: TextIO) -> Callable[[int, int | None], str]:
    """Makes the line of bytes done, and bytes in all. Only here rich is imported."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(file=stream, highlight=False, emoji=False)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        auto_refresh=False,
        expand=True,
    )
    task = bar.add_task("", total=None)

    def frame(done_bytes: int, total_bytes: int | None) -> str:
        # One column less than there are: a full line would wrap, and only half of it be erased.
        width = max(_LEAST_COLUMNS, console.width - 1)
        bar.update(
            task,
            description=_fit(title, width - _NUMBERS),
            # What is read twice, or written again after a fault, must not end beyond the end.
            completed=min(done_bytes, total_bytes) if total_bytes else done_bytes,
            total=total_bytes or None,
        )
        with console.capture() as drawn:
            console.print(bar.get_renderable(), end="", width=width)
        return drawn.get().partition("\n")[0]  # of a terminal too narrow for all of it

    return frame


def _fit(title: str, columns: int) -> str:
    """The title, or its two ends: the last part of a URI tells one checkpoint from another."""
    columns = max(_LEAST_COLUMNS // 2, columns)
    if len(title) <= columns:
        return title
    head = (columns - 1) // 2
    return f"{title[:head]}…{title[len(title) - (columns - 1 - head) :]}"
