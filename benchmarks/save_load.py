"""ckptfs beside stock torch.distributed.checkpoint: save, load, and what a commit costs.

    python -m benchmarks.save_load                 the full comparison: minutes
    python -m benchmarks.save_load --mib 1 --pairs 1 --ranks 2 --commits 2      does it still run?

One torchrun job per number of ranks (worker.py); medians, spread and a table (report.py); one JSON
file with machine, versions, date, command and every single measurement in benchmarks/results/.
README.md says what is compared and how.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine, report

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
GOAL = 1.05  # median ratio of ckptfs to stock


def main() -> int:
    """Measure, write the result, print the table."""
    options = _options()
    directory = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=options.dir))
    try:
        result = measure(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    text = json.dumps(result, indent=1) + "\n"
    out = options.out or HERE / "results" / f"save_load-{result['date'][:10]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    report.show(result)
    print(f"every measurement: {os.path.relpath(out)}")
    return 0 if report.holds(result, GOAL) or not options.check else 1


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run every job; the whole result as it goes into the file."""
    started = datetime.now(UTC)
    load_before = os.getloadavg()
    jobs = []
    for ranks in sorted({*options.ranks, *options.commit_ranks}):
        size_bytes = options.mib * MIB if ranks in options.ranks else 0
        commits = options.commits if ranks in options.commit_ranks else 0
        print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
        asked = [
            "--bytes",
            str(size_bytes),
            "--pairs",
            str(options.pairs),
            "--commits",
            str(commits),
        ]
        jobs.append(_run(ranks, asked, directory / str(ranks), options.timeout_s))
    return {
        "what": "ckptfs beside torch.distributed.checkpoint (FileSystemWriter, FileSystemReader)",
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.save_load", *sys.argv[1:]]),
        "note": options.note,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "machine": machine.describe(directory),
        "goal_ratio": GOAL,
        "compare": [report.summary(job) for job in jobs if "compare" in job],
        "commits": [report.commit_summary(job) for job in jobs if "commits" in job],
    }


def _run(ranks: int, asked: list[str], directory: Path, timeout_s: float) -> dict[str, Any]:
    """One torchrun job; its result. On any end no process of it is left."""
    directory.mkdir()
    result = directory / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(HERE / "worker.py")]
    command += [str(directory), str(result), *asked]
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
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
    found: dict[str, Any] = json.loads(result.read_text())
    shutil.rmtree(directory)
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ckptfs beside stock torch.distributed.checkpoint")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], help="such as 1,2")
    parser.add_argument("--mib", type=int, default=128, help="MiB of state per rank")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--commit-ranks", type=_numbers, default=[1, 2, 4])
    parser.add_argument("--commits", type=int, default=20, help="saves of next to nothing")
    parser.add_argument(
        "--dir", help="where to write checkpoints (default: the temporary directory)"
    )
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--note", default="", help="what else ran, and what was special")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of each torchrun job")
    parser.add_argument("--check", action="store_true", help=f"fail above a median ratio of {GOAL}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
