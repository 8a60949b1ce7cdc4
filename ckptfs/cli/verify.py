"""``ckptfs verify``: check that checkpoints are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import CommandResult, Exit, command, place_text
from ckptfs.progress import progress
from ckptfs.text import counted, size_text
from ckptfs.tools.findings import Finding, Verdict, Verified
from ckptfs.tools.verifying import JOBS
from ckptfs.tools.verifying import verify as verify_these
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["verify"]

_EXITS = {Verdict.CLEAN: Exit.OK, Verdict.DAMAGED: Exit.NO, Verdict.UNKNOWN: Exit.UNKNOWN}
_MOST = 5  # tensors that a line names; the others are only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedDocument:
    uri: Uri
    name: str
    origin: str
    save_id: str | None
    step: int | None
    files: int
    size_bytes: int
    compared_bytes: int
    resumed_bytes: int
    findings: Sequence[Finding]
    unchecked: Sequence[str]
    notes: Sequence[str]
    uncompared_bytes: int | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _VerifyDocument:
    verdict: Verdict
    deep: bool
    checkpoints: Sequence[_CheckedDocument]
    findings: Sequence[Finding]
    notes: Sequence[str]


@command("verify", answers=(_VerifyDocument,))
@click.argument("uris", nargs=-1, required=True, metavar="URI...")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=JOBS,
    show_default=True,
    help="Number of files, or pieces of large ones, to read at once.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="With --deep: record compared files here, and skip those that are recorded.",
)
@storage_options()
def verify(
    uris: tuple[str, ...],
    deep: bool,  # noqa: FBT001 - click passes flags by name
    jobs: int,
    resume: str | None,
    storage_options: dict[str, Any],
) -> CommandResult:
    """Check whether runs, checkpoints or parts of checkpoints are complete.

    Checks the run log, every manifest against its seal, every file and its size, every sidecar of
    digests, and what stock readers see. --deep also compares every byte. Exit codes: 0 clean; 1 damaged;
    7 something cannot be seen from here, or has no digests.
    """
    if resume is not None and not deep:
        raise click.UsageError("--resume needs --deep: without it nothing is compared")
    with progress(f"verifying {_title(uris)}") as meter:
        found = verify_these(
            uris, storage_options, deep=deep, jobs=jobs, resume=resume, meter=meter
        )
    return CommandResult(
        _document(found), lambda console: _show(found, console), _EXITS[found.verdict]
    )


def _title(uris: tuple[str, ...]) -> str:
    from ckptfs.uri import mask_credentials

    more = f" and {len(uris) - 1} more" if len(uris) > 1 else ""
    return mask_credentials(uris[0]) + more


# -- for programs --------------------------------------------------------------------


def _document(found: Verified) -> _VerifyDocument:
    checkpoints = [
        _CheckedDocument(
            **{field.name: getattr(one, field.name) for field in fields(one)}, verdict=one.verdict
        )
        for one in found.checkpoints
    ]
    return _VerifyDocument(
        verdict=found.verdict,
        deep=found.deep,
        checkpoints=checkpoints,
        findings=found.findings,
        notes=found.notes,
    )


# -- for people ----------------------------------------------------------------------


def _show(found: Verified, console: Console) -> None:
    for finding in found.findings:
        _show_finding(finding, console)
    for one in found.checkpoints:
        line = f"{one.verdict.value:8} {one.name}  {counted(one.files, 'file')}, {size_text(one.size_bytes)}"
        if found.deep:
            line += f", {size_text(one.compared_bytes)} compared"
            if one.uncompared_bytes:
                line += f", {size_text(one.uncompared_bytes)} not"
        if one.resumed_bytes:
            line += f" ({size_text(one.resumed_bytes)} by an earlier call)"
        console.print(line, soft_wrap=True)
        for text in one.unchecked:
            console.print(f"  not checked: {text}")
        for text in one.notes:
            console.print(f"  {text}")
        for finding in one.findings:
            _show_finding(finding, console)
    for text in found.notes:
        console.print(text)
    console.print(_verdict(found))


def _show_finding(finding: Finding, console: Console) -> None:
    console.print(f"  {finding.damage.value}: {place_text(finding.uri)}", soft_wrap=True)
    blocks = f" ({counted(finding.blocks, 'block')})" if finding.blocks else ""
    console.print(f"    {finding.what}{blocks}")
    if finding.tensors:
        more = len(finding.tensors) - _MOST
        more_text = f" and {more} more" if more > 0 else ""
        console.print(f"    concerns {', '.join(finding.tensors[:_MOST])}{more_text}")
    console.print(f"    -> {finding.todo}")


def _verdict(found: Verified) -> str:
    count = counted(len(found.checkpoints), "checkpoint")
    if found.verdict is Verdict.DAMAGED:
        return f"damaged: {counted(len(found.all_findings), 'finding')} in {count}"
    if found.verdict is Verdict.UNKNOWN:
        return f"unknown: {count}, and not everything could be checked"
    if found.deep:
        before = sum(one.resumed_bytes for one in found.checkpoints)
        earlier = f", {size_text(before)} of them by an earlier call" if before else ""
        missing_bytes = sum(one.uncompared_bytes or 0 for one in found.checkpoints)
        if missing_bytes:
            done = sum(one.compared_bytes for one in found.checkpoints)
            return f"clean: {count}, {size_text(done)} compared, {size_text(missing_bytes)} have no digest{earlier}"
        return f"clean: {count}, every byte compared{earlier}"
    more = any(one.origin != "stock" for one in found.checkpoints)
    return f"clean: {count}, structure only{'; --deep compares every byte' if more else ''}"
