"""ckptfs beside stock torch.distributed.checkpoint: save, load, and what a commit costs.

    python -m benchmarks.save_load                 the full comparison: minutes
    python -m benchmarks.save_load --mib 1 --rounds 1 --ranks 2 --commits 2      does it still run?

ckptfs.bench measures saves and loads, once for each number of ranks; saves of next to nothing come
from a torchrun job (fixed.py). One result file, which ``ckptfs bench report`` draws. README.md says what
is compared and how.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import goals, tables
from benchmarks.fixed import job
from ckptfs.bench.messages import Asked, WorkloadAsked
from ckptfs.bench.results import Result, Sample, Workload
from ckptfs.bench.run import measure, target_asked

MIB, KIB = 1 << 20, 1 << 10
OURS, STOCK, HELD = "ckptfs", "dcp", "ckptfs in a held run"
GOAL = goals.Asked(OURS, (STOCK,), 1.05, where=lambda workload, _: not workload.startswith("1 KiB"))


def main() -> int:
    """Measure, write the result, print the table."""
    options = _options()
    directory = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=options.dir))
    try:
        parts = [_moved(ranks, directory, options) for ranks in options.ranks]
        if options.commits:
            parts += [_committed(n, directory, options, parts[0]) for n in options.commit_ranks]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    result = tables.joined(
        parts,
        what="ckptfs beside torch.distributed.checkpoint (FileSystemWriter, FileSystemReader)",
        command=shlex.join(["python", "-m", "benchmarks.save_load", *sys.argv[1:]]),
        note=options.note,
    )
    # The place was made for this run and is gone: two results of one disk are of one target.
    result = tables.placed(result, "directory")
    found = goals.goals_of(result, [GOAL])
    tables.finish(result, options.out, "save_load", found)
    return 0 if goals.holds(found) or not options.check else 1


def _moved(ranks: int, directory: Path, options: argparse.Namespace) -> Result:
    """Saves and loads with one number of ranks, which names the workload."""
    asked = Asked(
        (target_asked(directory),),
        (WorkloadAsked("llm", size_bytes=options.mib * MIB * ranks),),
        engines=(OURS, STOCK),
        rounds=options.rounds,
        ranks=ranks,
    )
    result = measure(asked, progress=_say)
    assert result is not None, "torchrun has no part in this"
    return _named(result, f"{options.mib} MiB a rank, {ranks} ranks")


def _named(result: Result, name: str) -> Result:
    return replace(
        result,
        workloads=tuple(replace(one, name=name) for one in result.workloads),
        samples=tuple(replace(one, workload=name) for one in result.samples),
    )


def _committed(ranks: int, directory: Path, options: argparse.Namespace, like: Result) -> Result:
    """Saves of one KiB a rank; ``like``: what is the same for all parts of the result."""
    _say(f"{options.commits} commits of {ranks} ranks")
    home = directory / f"commits_{ranks}"
    home.mkdir()
    found = job(ranks, "commits", home, options.commits, timeout_s=options.timeout_s)
    name, uri = f"1 KiB a rank, {ranks} ranks", like.targets[0].uri
    steps = ", ".join(f"{k[:-2]} {1e3 * v:.1f} ms" for k, v in found["phases_in_run_s"].items())
    operations = ", ".join(f"{n} {name}" for name, n in found["operations"].items())
    return replace(
        like,
        workloads=(Workload(name, 1, ranks * KIB, "the fixed cost of a commit"),),
        engines=(*like.engines, replace(like.engines[0], name=HELD)),
        samples=tuple(
            Sample(engine, name, uri, "save", number, wall_s, cpu_s, ranks * KIB)
            for engine in (OURS, STOCK, HELD)
            for number, (wall_s, cpu_s) in enumerate(found[engine])
        ),
        notes=(f"{name}, in a held run: {steps}; storage operations: {operations}",),
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ckptfs beside stock torch.distributed.checkpoint")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], help="such as 1,2")
    parser.add_argument("--mib", type=int, default=128, help="MiB of state per rank")
    parser.add_argument("--rounds", "--pairs", type=int, default=7)
    parser.add_argument("--commit-ranks", type=_numbers, default=[1, 2, 4])
    parser.add_argument("--commits", type=int, default=20, help="saves of next to nothing")
    parser.add_argument("--dir", help="where to write (default: the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--note", default="", help="what else ran, and what was special")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of a job of commits")
    parser.add_argument("--check", action="store_true", help="fail where the goal is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
