"""Two versions of ckptfs at work in one run: ``e9e8632``, the first that people have, and this tree.

    tree_of_old()              its sources, taken out of git
    with Host(tree) as host:   a warm process of one version
        host.do("save", run=..., name=..., label=..., options={})      the value; Refused for its error
        child = host.start("manage", ...); child.kill(); child.end()

PYTHONPATH puts a tree before the installed package, and each process checks which one it has. Behind it comes this
tree: its ``tests.faults.victim`` kills both versions.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["OLD", "ROOT", "Child", "End", "Host", "MissingError", "Refused", "tree_of_old"]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
OLD = "e9e8632"


class MissingError(Exception):
    """The old version cannot be had here."""


class Refused(Exception):  # noqa: N818 - what a step raised, and no error of the test
    """A step ended with an error of ckptfs: its classes, text and outcome."""

    def __init__(self, types: list[str], text: str, outcome: str) -> None:
        super().__init__(f"{types[:1]}: {text} ({outcome})")
        self.types = types
        self.text = text
        self.outcome = outcome


def tree_of_old(directory: Path) -> Path:
    """The package of the old version below ``directory``. MissingError: this clone has no such commit."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLD, "ckptfs"], capture_output=True, check=False
    )
    if packed.returncode:
        raise MissingError(
            f"this clone has no commit {OLD}: git fetch --unshallow ({packed.stderr.decode().strip()})"
        )
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed.stdout, check=True)
    return directory


@dataclass(frozen=True)
class End:
    """How a step ended. killed: by the fault that was planned, or by the test."""

    value: Any = None
    error: Refused | None = None
    killed: bool = False

    def get(self) -> Any:
        """The value; raises what it raised."""
        assert not self.killed
        if self.error is not None:
            raise self.error
        return self.value


class Child:
    """One step that is under way in a process of its own."""

    def __init__(self, host: Host, pid: int) -> None:
        self._host = host
        self.pid = pid

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Whether it is dead, and on the process table until ``end`` takes it off."""
        state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        return state.split()[0] == "Z"

    @functools.cached_property
    def end(self) -> End:
        """How it ended; waits, and takes it off the process table."""
        told = self._host.request({"wait": self.pid})
        if "error" in told:
            error = told["error"]
            if not error["types"]:
                raise AssertionError(f"{self._host.name}: {error['text']}")
            return End(error=Refused(error["types"], error["text"], error["outcome"]))
        if "value" in told:
            return End(told["value"])
        assert told.get("signal") == signal.SIGKILL, f"{told}\n{self._host.last_words()}"
        return End(killed=True)


class Host:
    """A warm process of one version."""

    def __init__(self, name: str, tree: Path) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTFS_", "AWS_"))}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "host.py"), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=tree,
            env={
                **kept,
                "PYTHONPATH": f"{tree}:{ROOT}",
                "OMP_NUM_THREADS": "1",
                "CKPTFS_PROGRESS": "0",
            },
        )
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def start(self, step: str, /, *, faults: str = "", trace: str = "", **told: Any) -> Child:
        """Begin a step."""
        asked = {"do": step, "with": told, "faults": faults, "trace": trace}
        return Child(self, int(self.request(asked)["pid"]))

    def run(self, step: str, /, *, faults: str = "", trace: str = "", **told: Any) -> End:
        """How a step ended."""
        return self.start(step, faults=faults, trace=trace, **told).end

    def do(self, step: str, /, **told: Any) -> Any:
        """Its value; raises Refused."""
        return self.run(step, **told).get()

    def warm(self, run: str, options: dict[str, Any]) -> None:
        """Import once what each step would import: found by some steps on a run of their own."""
        some: list[list[Any]] = [
            ["save", {"run": run, "name": "step_1", "label": "a", "options": options}],
            ["manage", {"run": run, "options": options, "saves": [[2, "b"]], "restore": True}],
            ["observe", {"run": run, "options": options}],
            ["debris", {"run": run, "options": options}],
        ]
        self.request({"import": self.do("modules", steps=some)})

    def request(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the process of {self.name} ended\n{self.last_words()}"
        found: dict[str, Any] = json.loads(line)
        return found
