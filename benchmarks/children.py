"""One turn of a row in a process of its own: started, waited for, its answer read.

    ask("planner, dcp", "-m", "benchmarks.coordinator", "dcp", 256, 1000)     what it printed, decoded from JSON

It imports this tree, or another one that is compared with it, whatever is installed. Ranks of a job are started by
``fixed``, with torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600.0  # of one turn


def ask(name: str, *arguments: object, tree: Path = TREE) -> Any:
    """Run Python with these arguments in ``tree``; what it printed, decoded from JSON.

    A relative path among the arguments is one in ``tree``. name: of the turn, for an error.

    Raises:
        RuntimeError: It failed; the end of what it said is in the message.
        subprocess.TimeoutExpired: It took longer than an hour, and was killed.
    """
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(tree),
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{name} failed:\n{ended.stderr[-8000:]}")
    return json.loads(ended.stdout)


def environment(tree: Path = TREE) -> dict[str, str]:
    """That of a process that finds ``tree`` before all else that is called ckptfs."""
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
