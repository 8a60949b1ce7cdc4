"""Progress bars for long work, in a terminal and nowhere else.

    with progress("saving run/step_100", total_bytes, rank=rank) as meter:
        ... meter.advance(size_bytes) from any thread

    saving run/step_100  ━━━━━━━━━━╸━━━━━━━━━━  1.2/2.5 GB  812.4 MB/s  0:00:02

A bar is drawn on standard error, on rank 0, if that is a terminal and CKPTFS_PROGRESS is not 0;
everywhere else a meter costs an attribute look-up. Work that is over within half a second draws
nothing. A bar disappears when its work is over: the code that did the work reports the result.

Of several meters at once the first has the line, the others count silently. A bar is one line of
one thread: it installs nothing in the process, neither a handler nor another ``sys.stderr``, and a
failure in here never reaches the work.
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
_LEAVE_S = 1.0  # a stopped terminal (Ctrl-S) blocks its writer; it must not block the work
_ERASE = "\r\x1b[2K"
_LEAST_COLUMNS = 20
_NUMBERS = 48  # columns for the bar and the numbers after the title

_LINE = threading.Lock()  # the terminal has one last line


class Meter:
    """Counts the work.

    Base class, which shows nothing. Any thread may call it, any number of times.
    """

    def advance(self, size_bytes: int) -> None:
        """Note that ``size_bytes`` more bytes are done."""

    def expect(self, total_bytes: int | None) -> None:
        """Set the total, if it was not known at the start."""


SILENT = Meter()

# What moves the cursor, changes a terminal, reverses text or is no character: C0, C1, line separators,
# bidirectional controls, invisible characters, surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return text for one line of a terminal or a log.

    What is no plain character is escaped as Python writes it. Names and texts in checkpoints are
    not trusted: unescaped, they can set a terminal's title, hide the text in front of them, or look
    like further lines. Line feeds are escaped as well.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def progress(title: str, total_bytes: int | None = None, *, rank: int = 0) -> Iterator[Meter]:
    """Yield a meter for the work inside. Raises nothing of its own.

    ``title`` says what is done, to which URI (bare, without credentials). ``total_bytes`` is the
    total of this rank; with None, which means unknown, no end is drawn. Ranks other than 0 draw
    nothing.
    """
    stream = _terminal() if rank == 0 else None
    # Taken here, not when the bar is drawn, so that of nested meters always the outer has the line.
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
    """Return standard error if a person can see it."""
    stream = sys.stderr
    if os.environ.get("CKPTFS_PROGRESS") == "0" or os.environ.get("TERM") == "dumb":
        return None
    try:
        return stream if stream is not None and stream.isatty() else None
    except Exception:  # noqa: BLE001 - closed, or a stand-in that is no file
        return None


class _Drawn(Meter):
    """A meter with a thread that draws it."""

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
        """Free the line again, unless the terminal blocks."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            if not self._over.wait(_QUIET_S):
                self._draw()
        except Exception:  # noqa: BLE001, S110 - no rich, a closed terminal: the work continues unseen
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
    """Return a function that makes the line, from the bytes done and in all.

    Only here rich is imported.
    """
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
        # One column less than there are: a full line would wrap, and only half of it would be erased.
        width = max(_LEAST_COLUMNS, console.width - 1)
        bar.update(
            task,
            description=_fit(title, width - _NUMBERS),
            # Bytes that are read twice, or written again after a fault, must not exceed the total.
            completed=min(done_bytes, total_bytes) if total_bytes else done_bytes,
            total=total_bytes or None,
        )
        with console.capture() as drawn:
            console.print(bar.get_renderable(), end="", width=width)
        return drawn.get().partition("\n")[0]  # the first line, if the terminal is too narrow

    return frame


def _fit(title: str, columns: int) -> str:
    """Return the title, or its two ends if it is too long.

    The last part of a URI identifies the checkpoint.
    """
    columns = max(_LEAST_COLUMNS // 2, columns)
    if len(title) <= columns:
        return title
    head = (columns - 1) // 2
    return f"{title[:head]}…{title[len(title) - (columns - 1 - head) :]}"
