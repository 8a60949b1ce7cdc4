"""A program that says what it was promised, and when.

    with Witness([python, "writer.py"]) as writer:
        writer.tell("save 17")                its standard input
        writer.wait_for("saved 17")           its standard output, a line each: NANOSECONDS TEXT
        writer.said(cut.at_ns)                what it had said before a moment

The first word of a line is ``time.monotonic_ns()`` of the writer, taken when the call that made the
promise had returned: a line that is read later was said then all the same, and one that was written
after the power was cut does not count, however soon it came.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.process import KEEPER, LabError

_ANSWER_S = 240.0


class Witness:
    """One such program; a context manager. One thread."""

    def __init__(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> None:
        self._run_dir = Path(tempfile.mkdtemp(prefix="ckptfs-lab-witness-"))
        self._log = self._run_dir / "log"
        keeper: list[str | Path]
        keeper = [sys.executable, "-I", "-S", KEEPER, str(os.getpid()), "0", self._run_dir]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*keeper, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._half = b""
        self._lines: list[tuple[int, str]] = []
        self._told = 0  # how many lines there were when it got its last order

    def tell(self, line: str) -> None:
        """A line for its standard input."""
        assert self._process.stdin is not None
        self._listen(0)
        self._told = len(self._lines)
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def said(self, before_ns: int) -> list[str]:
        """All that it has said, in order, and before that moment. Does not wait."""
        self._listen(0)
        return [text for at_ns, text in self._lines if at_ns < before_ns]

    def wait_for(self, text: str, *, timeout_s: float = _ANSWER_S) -> None:
        """Return when it has said a line that begins so since its last order, if ever.

        LabError: it ended, or did not say it in time; with the end of what it complained of.
        """
        while not any(line.startswith(text) for _, line in self._lines[self._told :]):
            if not self._listen(timeout_s):
                raise LabError(f"no word of {text!r}:\n{self._log.read_text()[-4000:]}")

    def forget(self) -> None:
        """Forget what it has said so far."""
        self._listen(0)
        self._lines.clear()
        self._told = 0

    def end(self) -> None:
        """Kill it and all its processes; harmless twice."""
        self._process.terminate()  # the keeper, which has no patience with it
        self._process.communicate()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _listen(self, timeout_s: float) -> bool:
        """Take what the pipe holds; False at the end of it, or when nothing came in time."""
        assert self._process.stdout is not None
        pipe, any_came = self._process.stdout.fileno(), False
        while select.select([pipe], [], [], 0 if any_came else timeout_s)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                return any_came
            any_came = True
            *lines, self._half = (self._half + data).split(b"\n")
            for line in lines:
                at_ns, _, text = line.decode().partition(" ")
                self._lines.append((int(at_ns), text))
        return any_came
