"""One torchrun job on this machine: started, waited for, ended whole on any end; used by the scripts.

    output = torchrun(ranks, [script, *arguments], timeout_s=...)      standard output and errors together
    run_rank(measure)                                                  in the script: one rank of the job

Where one rank fails torchrun ends the others, so nobody waits in a barrier for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import telling
from ckptfs.bench.rank import TorchGroup, joined_group

__all__ = ["run_rank", "torchrun"]


def torchrun(ranks: int, arguments: Sequence[str], *, timeout_s: float) -> str:
    """What the job said. RuntimeError: it failed. TimeoutExpired: it took longer. No process is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    paths = [str(telling.HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the job with {ranks} ranks failed:\n{output[-8000:]}")
    return output


def run_rank(measure: Callable[[TorchGroup, Path, int], dict[str, Any]]) -> None:
    """Measure as one rank: arguments are the directory, the result's file and a number. Rank 0 writes the result."""
    home, result, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    group = joined_group()
    found = measure(group, home, number)
    if group.rank == 0:
        result.write_text(json.dumps(found))
    group.barrier()
    dist.destroy_process_group()
