"""``ckptfs cp``: copy a checkpoint, or what the target run lacks, between any two places.

    ckptfs cp /nvme/run/step_100 s3://bucket/run/step_100
    ckptfs cp s3://bucket/run /mnt/run -o profile=train
    torchrun ... -m ckptfs cp file:///local/run/step_100 s3://bucket/run/step_100

``ckptfs.replication.copier`` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import CommandResult, command, outlive, say, table
from ckptfs.errors import CkptfsError, ControlPlaneLostError, DeadlineError
from ckptfs.text import size_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckptfs.replication.copier import Copied, CopyReport, Status

__all__ = ["cp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopiedDocument:
    name: str
    kind: str
    step: int | None
    uri: str
    save_id: str | None
    status: Status
    size_bytes: int | None
    copied_bytes: int
    resumed_bytes: int
    digests_verified: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _CpDocument:
    source: str
    target: str
    dry_run: bool
    copied_bytes: int
    skipped_bytes: int
    digests_verified: int
    seconds: float
    warnings: Sequence[str]
    checkpoints: Sequence[_CopiedDocument]


@command("cp", answers=(_CpDocument,), collective=True)
@click.argument("source")
@click.argument("target")
@click.option(
    "--step", type=click.IntRange(min=0), help="Copy only the checkpoint of this step of a run."
)
@click.option("--latest", is_flag=True, help="Copy only the latest checkpoint of a run.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another save of that name; a directory of files is never replaced.",
)
@click.option(
    "--follow-links", is_flag=True, help="Copy the targets of symbolic links in a checkpoint."
)
@click.option("--dry-run", is_flag=True, help="Show what would be copied; write nothing.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Number of files that each rank copies at once.",
)
@storage_options("-o", "--source-option", "SOURCE")
@storage_options("-O", "--target-option", "TARGET")
def cp(
    source: str,
    target: str,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
    **how: Any,
) -> CommandResult:
    """Copy a checkpoint, or all that a run has and TARGET lacks.

    Every byte is compared with its digest on the way; the copy is committed at its end, or not at all.
    After an interruption, also by kill -9, the same command continues where it stopped.

    TARGET is the URI of the copy; for a run, it is another run. A checkpoint keeps its name in a TARGET that
    is a run, or ends with a slash. Under torchrun every node copies what is on its disks.
    """
    from ckptfs.commit.session import Place
    from ckptfs.control.control import open_control
    from ckptfs.replication.copier import CopyOptions, copy_with

    source_place, target_place = Place(source_options), Place(target_options)
    with open_control() as control:
        try:
            report = copy_with(
                control,
                (source, source_place),
                (target, target_place),
                CopyOptions(**how, shows=True),
            )
        except (ControlPlaneLostError, DeadlineError):
            raise  # there is no other rank to wait for
        except CkptfsError:
            outlive(control)
            raise
    for warning in report.warnings if report.rank == 0 else ():
        say(f"ckptfs cp: {warning}")
    return CommandResult(_document(report), lambda console: _show(console, report))


def _document(report: CopyReport) -> _CpDocument:
    return _CpDocument(
        source=report.source,
        target=report.target,
        dry_run=report.is_dry_run,
        copied_bytes=report.copied_bytes,
        skipped_bytes=report.skipped_bytes,
        digests_verified=report.digests,
        seconds=round(report.seconds, 3),
        warnings=report.warnings,
        checkpoints=[_copied_document(one) for one in report.checkpoints],
    )


def _copied_document(one: Copied) -> _CopiedDocument:
    return _CopiedDocument(
        name=one.name,
        kind=one.kind,
        step=one.step,
        uri=one.uri,
        save_id=one.save_id,
        status=one.status,
        size_bytes=one.size_bytes,
        copied_bytes=one.copied_bytes,
        resumed_bytes=one.resumed_bytes,
        digests_verified=one.digests,
        seconds=round(one.seconds, 3),
    )


def _show(console: Console, report: CopyReport) -> None:
    rows = [
        (one.name, one.kind, size_text(one.size_bytes), one.status.value)
        for one in report.checkpoints
    ]
    table(console, ("NAME", "KIND", "SIZE>", "STATUS"), rows)
    if report.is_dry_run:
        due = [one for one in report.checkpoints if one.status.is_due]
        size = size_text(sum(one.size_bytes or 0 for one in due))
        console.print(f"{len(due)} to copy, {size}; nothing was written")
        return
    console.print(
        f"{size_text(report.copied_bytes)} copied, {size_text(report.skipped_bytes)} existed already; "
        f"{report.digests} digests compared; {report.seconds:.1f} s"
    )
