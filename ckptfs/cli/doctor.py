"""``ckptfs doctor``: test a storage from where the job runs, before its GPUs start."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import OMITTED, CommandResult, Exit, Omitted, command, outlive
from ckptfs.control.control import open_control
from ckptfs.errors import CkptfsError
from ckptfs.progress import printable
from ckptfs.text import counted, parse_size
from ckptfs.tools.doctor import Expect, Finding, Report, Settings, Theme, Verdict, examine_with

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["doctor"]

_SIGNS = {
    Verdict.OK: ("ok", "green"),
    Verdict.WARN: ("warn", "yellow"),
    Verdict.FAIL: ("FAIL", "bold red"),
    Verdict.UNKNOWN: ("?", "cyan"),
}


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value), least=0)  # 0: nothing is timed
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PropertyDocument:
    name: str
    theme: Theme
    verdict: Verdict
    seen: str
    meaning: str
    advice: str
    data: Mapping[str, Any] | Omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _DoctorDocument:
    uri: str
    id: str
    shape: Literal["filesystem", "object"]
    ranks: int
    nodes: Sequence[str]
    verdict: Verdict
    findings: Sequence[_PropertyDocument]
    passed: bool
    strict: bool


@command("doctor", answers=(_DoctorDocument,), collective=True)
@click.argument("uri")
@click.option(
    "--expect",
    type=click.Choice([e.value for e in Expect]),
    help="Fail unless all ranks share the storage, or each node has its own.",
)
@click.option(
    "--needs", type=_Size(), metavar="SIZE", help="Fail if less space is free, for example 500GB."
)
@click.option(
    "--size",
    type=_Size(),
    default="64MiB",
    show_default=True,
    help="Size of the file that each rank writes and reads to measure bandwidth; 0: none.",
)
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@storage_options()
def doctor(
    *,
    uri: str,
    expect: str | None,
    needs: int | None,
    size: int,
    strict: bool,
    storage_options: dict[str, Any],
) -> CommandResult:
    """Test a storage from where the job runs, alone or on every rank under torchrun.

    Writes below URI/.ckptfs-doctor-<id>/ only, and removes it. Exit codes: 0 nothing failed; 1 a job
    would fail here (with --strict: or something is weak); 3, 4, 5 the place cannot be reached.
    """
    settings = Settings(size, needs, None if expect is None else Expect(expect))
    with _terminated_as_interrupted(), open_control() as control:
        try:
            report = examine_with(control, uri, storage_options, settings)
        except CkptfsError:
            outlive(control)
            raise
        outlive(control)
    ended = Exit.OK if report.passed(strict=strict) else Exit.NO
    document = _document(report, passed=ended is Exit.OK, strict=strict)
    return CommandResult(document, lambda console: _show(console, report, strict=strict), ended)


def _document(report: Report, *, passed: bool, strict: bool) -> _DoctorDocument:
    return _DoctorDocument(
        uri=report.uri,
        id=report.id,
        shape=cast("Literal['filesystem', 'object']", report.shape),
        ranks=report.ranks,
        nodes=report.nodes,
        verdict=report.verdict,
        findings=[_property_document(one) for one in report.findings],
        passed=passed,
        strict=strict,
    )


def _property_document(one: Finding) -> _PropertyDocument:
    return _PropertyDocument(
        name=one.name,
        theme=one.theme,
        verdict=one.verdict,
        seen=one.seen,
        meaning=one.meaning,
        advice=one.advice,
        data=one.data or OMITTED,
    )


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM, by which launchers end ranks, like Ctrl-C, so that nothing stays behind."""

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)


def _show(console: Console, report: Report, *, strict: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from ckptfs.tools.doctor.report import by_theme

    console.print(f"{report.uri}  ({report.shape}, {_who(report)})")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for theme, findings in by_theme(report.findings):
        table.add_row("", "", "")
        table.add_row("", Text(theme.value, style="bold"), "")
        for finding in findings:
            sign, style = _SIGNS[finding.verdict]
            table.add_row(Text(sign, style=style), finding.name, Text(printable(finding.seen)))
    console.print(table)
    for finding in report.findings:
        if finding.meaning or finding.advice:
            sign, style = _SIGNS[finding.verdict]
            console.print()
            console.print(Text(f"{sign} {finding.name}: {finding.meaning or finding.seen}", style))
            if finding.advice:
                console.print(Text(f"  {finding.advice}"))
    console.print()
    failed = not report.passed(strict=strict)
    console.print(_verdict(report, failed=failed))


def _who(report: Report) -> str:
    ranks = counted(report.ranks, "rank")
    return f"{ranks} on {', '.join(report.nodes[:4])}{', ...' if len(report.nodes) > 4 else ''}"  # noqa: PLR2004 - as many as fit


def _verdict(report: Report, *, failed: bool) -> str:
    counts = [
        f"{sum(f.verdict is verdict for f in report.findings)} {verdict.value}"
        for verdict in Verdict
    ]
    advice = "do not start a job here" if failed else "a job can start here"
    return f"{advice}: {', '.join(counts)}"
