"""From single measurements over object stores to medians, ranges, ratios and tables. Pure but ``show``.

    python -m benchmarks.object_report results/object_store-2026-11-20.json     tables for a README

A ratio belongs to one round: the peer's seconds of that round divided by ckptfs's of that round, so
that a slow minute of the machine counts for both. Its median over the rounds is what a goal is about.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import spread

MIB = 1 << 20
OPERATIONS = ("save", "load")
# The goals, on radosgw, with large tensors.
FASTER = 3.0  # than FsspecWriter, on save and on load
CPU_SHARE = 0.5  # of FsspecWriter's CPU seconds per GB, at most
SLOWER = 1.15  # than bare obstore, at most


def summary(job: Any, measured: dict[str, Any]) -> dict[str, Any]:
    """One server and state: the spread of every peer, and all measurements."""
    gigabytes = measured["bytes"] / 1e9
    return {
        "server": job.server,
        "state": job.state,
        "bytes": measured["bytes"],
        "tensors": measured["tensors"],
        "peers": {
            name: {
                operation: {
                    "s": spread([one["s"] for one in rounds[operation]]),
                    "mb_per_s": round(
                        1e3 * gigabytes / statistics.median(o["s"] for o in rounds[operation]), 1
                    ),
                    "cpu_s_per_gb": spread([o["cpu_s"] / gigabytes for o in rounds[operation]]),
                    "rounds": rounds[operation],
                }
                for operation in OPERATIONS
            }
            for name, rounds in measured["peers"].items()
        },
    }


def ratios(job: dict[str, Any], ours: str, other: str, operation: str, what: str) -> list[float]:
    """other / ours, round by round."""
    mine = job["peers"][ours][operation]["rounds"]
    theirs = job["peers"][other][operation]["rounds"]
    return [b[what] / a[what] for a, b in zip(mine, theirs, strict=True)]


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every ckptfs row beside every other on radosgw with large tensors: how many times its seconds.

    ``is_goal``: FsspecWriter as it comes, for either client; bare obstore for the client that is
    taken where it is installed, obstore. The others are told, and decide nothing.
    """
    found = []
    for job in result["jobs"]:
        if (job["server"], job["state"]) != ("radosgw", "large"):
            continue
        for ours in (name for name in job["peers"] if name.startswith("ckptfs")):
            for operation in OPERATIONS:
                for other in job["peers"]:
                    found += _beside(job, ours, other, operation)
    return found


def _beside(job: dict[str, Any], ours: str, other: str, operation: str) -> list[dict[str, Any]]:
    if other.startswith("FsspecWriter"):
        goals, is_goal = {"s": FASTER, "cpu_s": 1 / CPU_SHARE}, other == "FsspecWriter"
    elif other.startswith("obstore"):
        goals, is_goal = {"s": 1 / SLOWER}, ours == "ckptfs (obstore)"
    else:
        return []
    found = []
    for what, goal in goals.items():
        ratio = statistics.median(ratios(job, ours, other, operation, what))
        found.append(
            {
                "peer": ours,
                "on": operation,
                "beside": other,
                "what": what,
                "ratio": round(ratio, 3),
                "goal": round(goal, 3),
                "is_met": ratio >= goal,
                "is_goal": is_goal,
            }
        )
    return found


def holds(result: dict[str, Any]) -> bool:
    """Whether every goal is met."""
    return all(verdict["is_met"] for verdict in verdicts(result) if verdict["is_goal"])


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=150)
    about = result["machine"]
    out.print(
        f"{about['cpu']}, {about['cores']} cores, torch {about['versions']['torch']}; "
        f"load average {result['load_average']['before'][0]:.1f} before"
    )
    if result["note"]:
        out.print(result["note"])
    for job in result["jobs"]:
        title = f"{job['server']}, {job['tensors']} tensors, {job['bytes'] / MIB:.0f} MiB"
        out.print(_table(title, job))
    for verdict in verdicts(result):
        word = ("met" if verdict["is_met"] else "MISSED") if verdict["is_goal"] else "(told)"
        out.print(
            f"{word:6} {verdict['peer']} {verdict['on']}: "
            f"{verdict['beside']} takes {verdict['ratio']:.2f} x the "
            f"{'seconds' if verdict['what'] == 's' else 'CPU seconds'} (goal {verdict['goal']:.2f})"
        )


def _table(title: str, job: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    ours = [name for name in job["peers"] if name.startswith("ckptfs")]
    table.add_column("")
    for operation in OPERATIONS:
        table.add_column(f"{operation} s (min-max)", justify="right")
        table.add_column("MB/s", justify="right")
        table.add_column("CPU s/GB", justify="right")
        for name in ours:
            table.add_column(f"x {name.partition('(')[2].rstrip(')')}", justify="right")
    for name, peer in job["peers"].items():
        cells = []
        for operation in OPERATIONS:
            one = peer[operation]
            cells.append(_seconds(one["s"]))
            cells.append(f"{one['mb_per_s']:.0f}")
            cells.append(f"{one['cpu_s_per_gb']['median']:.2f}")
            for mine in ours:
                ratio = statistics.median(ratios(job, mine, name, operation, "s"))
                cells.append("" if name == mine else f"{ratio:.2f}")
        table.add_row(name, *cells)
    return table


def _seconds(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"


def markdown(result: dict[str, Any]) -> str:
    """The tables as a README has them: medians, ranges, and how many times ckptfs's seconds."""
    lines = []
    for job in result["jobs"]:
        ours = [name for name in job["peers"] if name.startswith("ckptfs")]
        heads = [f"x {name.removeprefix('ckptfs ').strip('()')}" for name in ours]
        columns = [
            cell for o in OPERATIONS for cell in (f"{o} s (range)", "MB/s", "CPU s/GB", *heads)
        ]
        size = f"{job['bytes'] / MIB:.0f} MiB in {job['tensors']} tensors"
        lines += [f"**{job['server']}, {size}**", "", f"| | {' | '.join(columns)} |"]
        lines.append("|---|" + "--:|" * len(columns))
        for name, peer in job["peers"].items():
            cells = []
            for operation in OPERATIONS:
                one = peer[operation]
                cells += [_seconds(one["s"]), f"{one['mb_per_s']:.0f}"]
                cells.append(f"{one['cpu_s_per_gb']['median']:.2f}")
                for mine in ours:
                    ratio = statistics.median(ratios(job, mine, name, operation, "s"))
                    cells.append("" if name == mine else f"{ratio:.2f}")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
