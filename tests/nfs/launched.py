"""A job of tests/nfs/needs.py under the real torchrun: its ranks are what torchrun starts.

    torchrun ... -m tests.nfs.launched managed '{"run": "/nfs/run", "until": 4}'

Each rank prints one line: SAID, its number, and what it says, as JSON. It fails where its save failed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from tests.nfs import needs

__all__ = ["said"]


def said(output: str) -> dict[int, dict[str, Any]]:
    """What the ranks said, from what torchrun printed."""
    lines = [line.partition("SAID ")[2] for line in output.splitlines() if "SAID " in line]
    return {
        int(rank): json.loads(text) for rank, _, text in (line.partition(" ") for line in lines)
    }


def main(name: str, args: str) -> None:
    """One rank."""
    value = getattr(needs, name)(json.loads(args))
    sys.stdout.write(f"SAID {dist.get_rank()} {json.dumps(value)}\n")
    sys.stdout.flush()
    if "error" in value:
        os._exit(1)  # the launcher ends the others: a farewell to a dead node would keep this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
