"""From single measurements to medians, spread and a table. Pure but for ``show``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20
OPERATIONS = ("save", "load_hot", "load_cold")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {
        "median": round(statistics.median(values), 5),
        "min": round(min(values), 5),
        "max": round(max(values), 5),
    }


def summary(job: dict[str, Any]) -> dict[str, Any]:
    """One number of ranks, compared: the spread of each side, of the ratios, and all pairs."""
    columns = ("stock_s", "ckptfs_s", "stock_cpu_s", "ckptfs_cpu_s", "ratio")
    return {
        "ranks": job["ranks"],
        "bytes_per_rank": job["bytes_per_rank"],
        **{
            operation: {
                **{column: spread([p[column] for p in pairs]) for column in columns},
                # What is left when each side had its quietest moment.
                "ratio_of_best": round(
                    min(p["ckptfs_s"] for p in pairs) / min(p["stock_s"] for p in pairs), 5
                ),
                "pairs": pairs,
            }
            for operation, pairs in job["compare"].items()
        },
    }


def commit_summary(job: dict[str, Any]) -> dict[str, Any]:
    """What saves of next to nothing cost with one number of ranks."""
    found = job["commits"]
    series = ("stock_s", "ckptfs_s", "ckptfs_in_run_s")
    return {
        "ranks": job["ranks"],
        "saves": len(found["stock_s"]),
        **{name: spread(found[name]) for name in series},
        "phases_in_run_s": found["phases_in_run_s"],
        "operations_in_run": found["operations"],
    }


def holds(result: dict[str, Any], goal: float) -> bool:
    """Whether every median ratio is at most ``goal``."""
    return all(job[op]["ratio"]["median"] <= goal for job in result["compare"] for op in OPERATIONS)


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=132)
    about = result["machine"]
    out.print(
        f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}, "
        f"fsync {about['fsync_ms']} ms, torch {about['versions']['torch']}; "
        f"load average {result['load_average']['before'][0]:.1f} before"
    )
    if result["note"]:
        out.print(result["note"])
    if about["reverse_lookup_s"] > 0.1:
        out.print(
            f"[bold]Looking up ::1 took {about['reverse_lookup_s']} s: put it into /etc/hosts[/]"
        )
    table = _table(
        "",
        "ranks",
        "MiB/rank",
        "pairs",
        "stock s",
        "ckptfs s",
        "ratio (min-max)",
        "of best",
        "stock CPU s",
        "ckptfs CPU s",
    )
    for job in result["compare"]:
        for operation in OPERATIONS:
            one = job[operation]
            table.add_row(
                operation.replace("_", " "),
                str(job["ranks"]),
                f"{job['bytes_per_rank'] / MIB:.0f}",
                str(len(one["pairs"])),
                _seconds(one["stock_s"]),
                _seconds(one["ckptfs_s"]),
                f"{one['ratio']['median']:.2f} ({one['ratio']['min']:.2f}-{one['ratio']['max']:.2f})",
                f"{one['ratio_of_best']:.2f}",
                f"{one['stock_cpu_s']['median']:.3f}",
                f"{one['ckptfs_cpu_s']['median']:.3f}",
            )
    out.print(table)
    table = _table(
        "saving 1 KiB",
        "ranks",
        "stock ms",
        "ckptfs ms",
        "in a held run ms",
        "of it plan",
        "write",
        "sync",
        "commit",
        "operations",
    )
    for job in result["commits"]:
        phases = job["phases_in_run_s"]
        table.add_row(
            "",
            str(job["ranks"]),
            *(
                f"{job[name]['median'] * 1e3:.1f}"
                for name in ("stock_s", "ckptfs_s", "ckptfs_in_run_s")
            ),
            *(
                f"{phases[phase] * 1e3:.1f}"
                for phase in ("plan_s", "write_s", "sync_s", "commit_s")
            ),
            str(sum(job["operations_in_run"].values())),
        )
    out.print(table)


def _seconds(values: dict[str, float]) -> str:
    return f"{values['median']:.3f} ({values['min']:.3f}-{values['max']:.3f})"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table
