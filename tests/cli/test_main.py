"""What every command has: --json, --help, an entry in the docs; and completion in the shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptfs.cli.exits import Exit, exit_of
from ckptfs.cli.main import COMMANDS, ckptfs
from ckptfs.errors import CkptfsError, CollectiveError, ControlPlaneLostError
from tests.cli.conftest import Cli

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
HEADINGS = {"unpin": "pin and unpin", "pin": "pin and unpin"}


def commands_of(name: str) -> list[click.Command]:
    """The command, or those below it."""
    context = click.Context(ckptfs)
    found = ckptfs.get_command(context, name)
    assert found is not None
    if isinstance(found, click.Group):
        below = [found.get_command(context, one) for one in found.list_commands(context)]
        return [one for one in below if one is not None]
    return [found]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_help_and_a_section(name: str, cli: Cli) -> None:
    """A command takes --json, tells in --help what it does, and has its section in the docs."""
    for made in commands_of(name):
        options = {option for param in made.params for option in param.opts}
        assert "--json" in options, made.name
        assert made.help, made.name
    ran = cli(name, "--help")
    assert ran.exit == 0
    assert "Usage: ckptfs" in ran.out
    sections = re.split(r"(?m)^## ", DOCS.read_text())
    section = next(s for s in sections if s.partition("\n")[0] == HEADINGS.get(name, name))
    assert f"ckptfs {name}" in section


def test_help_imports_no_command() -> None:
    """``ckptfs --help`` names every command and imports none of them, no torch and no rich."""
    script = (
        "import sys\n"
        "from ckptfs.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('ckptfs.cli.', 'torch', 'rich'))))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *_, modules = ran.stdout.splitlines()
    assert modules.split() == ["ckptfs.cli.main"]
    for name, (_, told) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(told[:20])}", ran.stdout, re.MULTILINE), name


def test_exit_codes_are_those_of_the_docs() -> None:
    """The table of the docs has every code, and no other."""
    section = DOCS.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", section)} == {
        int(e) for e in Exit
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_its_completion(shell: str) -> None:
    """What the docs tell to put into the start-up file is a script for that shell."""
    env = os.environ | {"_CKPTFS_COMPLETE": f"{shell}_source"}
    ran = subprocess.run(
        [Path(sys.executable).with_name("ckptfs")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if shell == "bash" and ran.returncode:
        pytest.skip(f"no bash that click completes for: {ran.stderr.strip()}")
    assert "_CKPTFS_COMPLETE" in ran.stdout
    assert f"_CKPTFS_COMPLETE={shell}_source ckptfs" in DOCS.read_text()


def test_commands_and_options_are_completed() -> None:
    """Half a command and half an option are completed to those that there are."""

    def completed(words: str, number: int) -> list[str]:
        env = os.environ | {
            "_CKPTFS_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(number),
        }
        ran = subprocess.run(
            [Path(sys.executable).with_name("ckptfs")],
            env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [line.partition(",")[2] for line in ran.stdout.splitlines()]

    assert completed("ckptfs l", 1) == ["ls", "log", "latest"]
    assert completed("ckptfs ls --so", 2) == ["--sort"]


@pytest.mark.parametrize("kind", [CollectiveError, ControlPlaneLostError])
def test_an_unknown_outcome_has_its_own_code(kind: type[CkptfsError]) -> None:
    """Whatever the error is called: a script that tries again after a failure must not do so here."""
    assert exit_of(kind("lost", outcome="unknown")) is Exit.UNKNOWN
    assert exit_of(kind("lost", outcome="failed")) is Exit.STORAGE
