"""Does what docs/first-run.md says, block by block, and prints how long each took: `make first-run`.

    python examples/first_run.py [DIR]          DIR: where; a new temporary directory by default
    python examples/first_run.py --paste [DIR]  also puts what came out into the page

One bash runs all ``sh`` blocks one after the other, as a person would in one terminal. A Python block
after ``<!-- file: NAME -->`` is written to NAME. A block that fails ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
PAGE = CLONE / "docs" / "first-run.md"
_PART = re.compile(
    r"^## (?P<title>[^\n]+)$"
    r"|^<!-- file: (?P<file>\S+) -->\n```python\n(?P<code>.*?)^```$"
    r"|^```sh\n(?P<commands>.*?)^```$"
    r"|^<!-- output(?P<times>: times)? -->\n```text\n.*?^```$",
    re.MULTILINE | re.DOTALL,
)
_DONE = "@first-run "


class Terminal:
    """One bash, asked block by block; its background jobs end with it."""

    def __init__(self, directory: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PIP_REQ"))}
        self.shell = subprocess.Popen(
            [shutil.which("bash") or "/bin/bash"],
            cwd=directory,
            env={**kept, "CLONE": str(CLONE), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the shell and what it left in the background, however far it came."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGTERM)
        self.shell.wait()

    def run(self, commands: str) -> Iterator[str]:
        """Lines of output as they come. SystemExit: a command failed."""
        assert self.shell.stdin
        assert self.shell.stdout
        self.shell.stdin.write(f"set -e\n{commands}set +e\necho '{_DONE}'\n")
        self.shell.stdin.flush()
        for line in self.shell.stdout:
            if line.startswith(_DONE):
                return
            yield line
        sys.exit(f"a command failed with {self.shell.wait()}:\n{commands}")


def main() -> None:
    """Parse, run, tell; paste if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--paste", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(asked.directory or made).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Terminal(directory)) as terminal:
            page = _done(PAGE.read_text(), terminal, directory)
    if asked.paste:
        PAGE.write_text(page)


def _done(page: str, terminal: Terminal, directory: Path) -> str:
    """The page with what came out; each block runs once, in order."""
    took: list[tuple[str, float]] = []
    came: list[str] = []

    def part(found: re.Match[str]) -> str:
        nonlocal came
        if found["title"]:
            took.append((found["title"], 0.0))
            came = []
        elif found["file"]:
            (directory / found["file"]).write_text(found["code"])
        elif found["commands"]:
            print(f"\n$ {found['commands'].rstrip()}")
            began = time.monotonic()
            for line in terminal.run(found["commands"]):
                print(line, end="", flush=True)
                came.append(line.rstrip() + "\n")
            took[-1] = (took[-1][0], took[-1][1] + time.monotonic() - began)
        else:
            shown = _times(took) if found["times"] else "".join(came)
            came = []
            head = found[0].partition("```text\n")[0]
            return f"{head}```text\n{shown.replace(str(directory), '~/trial')}```"
        return found[0]

    done = _PART.sub(part, page)
    print("\n" + _times(took), end="")
    return done


def _times(took: list[tuple[str, float]]) -> str:
    rows = [*((t, s) for t, s in took if s), ("in all", sum(s for _, s in took))]
    return "".join(f"{title:<24}{seconds:6.1f} s\n" for title, seconds in rows)


if __name__ == "__main__":
    main()
