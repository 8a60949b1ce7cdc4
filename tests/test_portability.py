"""Only Linux is supported; nothing at import, and no local save or load, needs what Linux alone has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_import_save_and_load_do_without_what_only_linux_has() -> None:
    """Every module is imported, and a run saved, loaded and kept, where macOS' gaps were made."""
    command = [sys.executable, "-m", "tests.without_linux"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "used without Linux\n"), done.stderr
