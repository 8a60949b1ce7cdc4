"""``ckptfs verify``: whether checkpoints are whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import Answer, Exit, command
from ckptfs.cli.text import counted, place_text, size_text
from ckptfs.progress import progress
from ckptfs.tools.findings import Checked, Finding, Verdict, Verified
from ckptfs.tools.verifying import JOBS
from ckptfs.tools.verifying import verify as verify_these

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["verify"]

_EXITS = {Verdict.CLEAN: Exit.OK, Verdict.DAMAGED: Exit.NO, Verdict.UNKNOWN: Exit.UNKNOWN}
_MOST = 5  # tensors named in a line; the rest is counted


@command("verify")
@click.argument("uris", nargs=-1, required=True, metavar="URI...")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=JOBS,
    show_default=True,
    help="Files, or pieces of large ones, at once.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="With --deep: remember here what was compared; what is remembered is skipped.",
)
@storage_options()
def verify(
    uris: tuple[str, ...],
    deep: bool,  # noqa: FBT001 - click passes flags by name
    jobs: int,
    resume: str | None,
    storage_options: dict[str, Any],
) -> Answer:
    """Whether checkpoints are whole: runs, checkpoints, parts of checkpoints.

    Always: the run log, every manifest against its seal, every file and its size, every sidecar of
    digests, what stock readers see. With --deep every byte. Exit codes: 0 clean; 1 damaged; 7 not
    everything could be looked at from here, or had nothing to be compared with.
    """
    if resume is not None and not deep:
        raise click.UsageError("--resume goes with --deep: without it nothing is compared")
    with progress(f"verifying {_title(uris)}") as meter:
        found = verify_these(
            uris, storage_options, deep=deep, jobs=jobs, resume=resume, meter=meter
        )
    return Answer(_document(found), lambda console: _show(found, console), _EXITS[found.verdict])


def _title(uris: tuple[str, ...]) -> str:
    from ckptfs.uri import mask_credentials

    more = f" and {len(uris) - 1} more" if len(uris) > 1 else ""
    return mask_credentials(uris[0]) + more


# -- for programs --------------------------------------------------------------------


def _document(found: Verified) -> dict[str, Any]:
    return {
        "verdict": found.verdict.value,
        "deep": found.deep,
        "checkpoints": [_checkpoint(one) for one in found.checkpoints],
        "findings": [_finding(one) for one in found.findings],
        "notes": list(found.notes),
    }


def _checkpoint(one: Checked) -> dict[str, Any]:
    told = asdict(one)
    return {
        **told,
        "uri": str(one.uri),
        "verdict": one.verdict.value,
        "findings": [_finding(finding) for finding in one.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    told = asdict(finding)
    return {**told, "uri": str(finding.uri), "damage": finding.damage.value}


# -- for people ----------------------------------------------------------------------


def _show(found: Verified, console: Console) -> None:
    for finding in found.findings:
        _show_finding(finding, console)
    for one in found.checkpoints:
        told = f"{one.verdict.value:8} {one.name}  {counted(one.files, 'file')}, {size_text(one.size_bytes)}"
        if found.deep:
            told += f", {size_text(one.compared_bytes)} compared"
            if one.uncompared_bytes:
                told += f", {size_text(one.uncompared_bytes)} not"
        if one.resumed_bytes:
            told += f" ({size_text(one.resumed_bytes)} by an earlier call)"
        console.print(told, soft_wrap=True)
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
        rest = f" and {more} more" if more > 0 else ""
        console.print(f"    concerns {', '.join(finding.tensors[:_MOST])}{rest}")
    console.print(f"    -> {finding.todo}")


def _verdict(found: Verified) -> str:
    looked = counted(len(found.checkpoints), "checkpoint")
    if found.verdict is Verdict.DAMAGED:
        return f"damaged: {counted(len(found.all_findings), 'finding')} in {looked}"
    if found.verdict is Verdict.UNKNOWN:
        return f"unknown: {looked}, and not everything could be checked"
    if found.deep:
        before = sum(one.resumed_bytes for one in found.checkpoints)
        told = f", {size_text(before)} of them by an earlier call" if before else ""
        rest = sum(one.uncompared_bytes or 0 for one in found.checkpoints)
        if rest:
            done = sum(one.compared_bytes for one in found.checkpoints)
            return f"clean: {looked}, {size_text(done)} compared, {size_text(rest)} have no digest{told}"
        return f"clean: {looked}, every byte compared{told}"
    more = any(one.origin != "stock" for one in found.checkpoints)
    return f"clean: {looked}, form only{'; --deep compares every byte' if more else ''}"
