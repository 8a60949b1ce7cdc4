"""``ckptfs bench URI...`` measures; ``bench report`` and ``bench compare`` read what it wrote.

    ckptfs bench URI...            short for ckptfs bench run URI...
    ckptfs bench report FILE...    makes plots and a page of results
    ckptfs bench compare A B       says whether one result is slower than another

``report`` and ``compare`` also read what the rows of benchmarks/ wrote; neither measures anything.

A first word that is not the name of a command is taken for a URI. A directory called ``report`` is
therefore written as ``./report``.

``command_text`` makes the command line that a result records: it can be run again, and has no secrets.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ckptfs.bench.analysis import (
    Beside,
    Compared,
    Difference,
    Spread,
    Verdict,
    compare_results,
    rows_of,
    slowdowns_of,
    spread_text,
    verdict_text,
)
from ckptfs.bench.messages import Asked
from ckptfs.bench.report import Report, write_report
from ckptfs.bench.results import (
    PHASES,
    Phase,
    Result,
    conditions_text,
    number_text,
    phase_text,
    read_result,
    try_place,
    write_result,
)
from ckptfs.cli.options import storage_options
from ckptfs.cli.output import (
    OMITTED,
    CommandResult,
    ErrorDocument,
    Exit,
    Omitted,
    error_document,
    exit_of,
    group_command,
    say,
    table,
)
from ckptfs.errors import CkptfsError
from ckptfs.storage.options import OURS
from ckptfs.text import parse_size, size_text
from ckptfs.uri import mask_credentials

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["bench", "command_text"]

_MASK = "***"
# Options with values that are shown: places and settings. All others may be secrets.
_SHOWN = frozenset((*OURS, "anon", "endpoint_url", "region", "region_name", "use_ssl", "verify"))


def command_text(request: Asked, options: Mapping[str, Any], out: str | None) -> str:
    """Return the command line, quoted for a shell. ``options``: the options that click parsed."""
    words = ["ckptfs", "bench", *(str(target.place) for target in request.targets)]
    for workload in request.workloads:
        words += ["--workload", workload.kind]
    for name in ("params", "size"):
        if options[name] is not None:
            words += [f"--{name}", str(options[name])]
    if request.engines:
        words += ["--engines", ",".join(request.engines)]
    words += ["--rounds", str(request.rounds)] if request.within_s is None else []
    if options["ranks"] is not None:
        words += ["--ranks", str(options["ranks"])]
    words += [] if request.durable else ["--no-durable"]
    if any(workload.kind == "loop" for workload in request.workloads):
        words += ["--steps", str(request.loop.steps), "--every", str(request.loop.every)]
    words += ["--keep"] if request.keep else []
    for key, value in _flat(options["storage_options"]):
        words += ["-o", f"{key}={_shown(key, value)}"]
    words += ["--out", out] if out else []
    return shlex.join(words)


def _flat(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _shown(key: str, value: Any) -> str:
    return mask_credentials(str(value)) if key.rpartition(".")[2] in _SHOWN else _MASK


logger = logging.getLogger("ckptfs.cli")

_DEFAULT = "run"
# The commands that read results, with what the help of the group says about each.
_READERS = {
    "report": "Write plots and one self-contained HTML page of results.",
    "compare": "Compare two results: faster, slower, or no verdict.",
}
_ROUNDS = 5  # fewer never give a verdict
# The time for measuring without --rounds and --keep: the whole command then takes less than a minute.
_WITHIN_S = 40.0
_LONGER_ROUNDS, _LONGER_BYTES = 11, 1_250_000_000
_WORKLOADS = ("llm", "many", "shapes", "4MB", "16MB", "64MB", "moe", "rl", "loop")


class _Bench(click.Group):
    """A group that takes a URI, or an option of ``run``, in place of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {_DEFAULT, *_READERS, *self.get_help_option_names(ctx)}
        if args and args[0] not in known:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [_DEFAULT, *_READERS]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] URI... | report ... | compare ...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.commands[_DEFAULT].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            measure = (_DEFAULT, "Measure; what bench does without a command.")
            formatter.write_dl([measure, *_READERS.items()])


@click.group("bench", cls=_Bench)
def bench() -> None:
    """Measure how fast checkpoints are saved to each URI and loaded, compared with other writers.

    Every engine saves and loads the same state in turn, each round another one first; the loaded state
    is compared with the saved one. Everything is written below one new name at each URI, and removed.
    The result goes to a JSON file; the table shows medians.
    """


def _reads(parse: Callable[[str], int]) -> Callable[..., int | None]:
    def callback(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def _params(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    from ckptfs.bench.workloads import parse_params

    return _reads(parse_params)(_, __, value)


def _size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    return _reads(parse_size)(_, __, value)


def _words(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchDocument:
    file: str | None
    result: Result
    error: ErrorDocument | Omitted = OMITTED


@group_command(bench, _DEFAULT, answers=(_BenchDocument,), collective=True)
@click.argument("uris", nargs=-1, required=True, metavar="URI...")
@click.option(
    "-w",
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(_WORKLOADS),
    default=["llm"],
    help="State to save and load; repeatable. loop: a training loop that is saved while it runs.  [llm]",
)
@click.option("--params", callback=_params, metavar="7B", help="Number of parameters of the model.")
@click.option(
    "--size", callback=_size, metavar="2GB", help="Size of the state in bytes, instead of --params."
)
@click.option(
    "-e",
    "--engines",
    multiple=True,
    callback=_words,
    metavar="NAME,...",
    help="ckptfs, ckptfs:CLIENT, dcp, torch.save, safetensors, s3torchconnector, raw.  [all]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=None,
    help=f"Number of rounds after one warm-up.  [{_ROUNDS}, or what fits into {_WITHIN_S:.0f} s]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=None,
    help="Number of processes on this machine; torchrun sets its own.  [1]",
)
@click.option(
    "--durable/--no-durable",
    default=True,
    help="Call fsync where a writer has the choice.  [durable]",
)
@click.option(
    "--steps",
    type=click.IntRange(2),
    default=20,
    help="Number of steps of the training loop.  [20]",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=5,
    help="Steps of the training loop between two saves.  [5]",
)
@click.option("--keep", is_flag=True, help="Keep what the last round wrote.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="File for the result.  [./ckptfs-bench-TIME.json]",
)
@click.option("--note", help="A note to store in the result, such as what else was running.")
@storage_options(of="every URI that is no directory")
def run(uris: tuple[str, ...], out: str | None, note: str | None, **options: Any) -> CommandResult:
    """Measure how fast checkpoints are saved to each URI and loaded, compared with other writers."""
    from ckptfs.bench.run import measure

    request, began_s = _request_from(uris, options), time.monotonic()
    path = out or f"ckptfs-bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    result = measure(
        request,
        command=command_text(request, options, out),
        progress=_progress,
        first=lambda: try_place(path),
    )
    if result is None:  # rank 0 reports it
        click.get_current_context().exit(0)
    if note:
        result = replace(result, notes=(note, *result.notes))
    written, error = _written(path, result)

    def show(console: Console) -> None:
        _show(console, result)
        console.print()
        if request.within_s is not None:
            for line in _longer(request, result, options, time.monotonic() - began_s):
                console.print(line, soft_wrap=True)
        console.print(f"every measurement: {written or 'the file could not be written'}")

    if error is None:
        return CommandResult(_BenchDocument(file=written, result=result), show)
    say(f"ckptfs bench: {error} The result is in {written or 'no file'}.")
    document = _BenchDocument(file=written, result=result, error=error_document(error))
    return CommandResult(document, show, exit_of(error))


def _longer(
    request: Asked, result: Result, options: dict[str, Any], took_s: float
) -> tuple[str, str]:
    """Return a command that gives tighter figures than this run, with about the time that it takes.

    took_s: the seconds that this run took.
    """
    rounds = max((one.round for one in result.samples), default=1)
    size = max((one.size_bytes for one in result.workloads), default=0)
    factor = (_LONGER_ROUNDS + 1) / (rounds + 1)
    if options["size"] is None and options["params"] is None and 0 < size < _LONGER_BYTES:
        options = {**options, "size": f"{_LONGER_BYTES / 1e9:g}GB"}
        factor *= _LONGER_BYTES / size
    longer = replace(request, rounds=_LONGER_ROUNDS, within_s=None)
    return (
        (
            f"This was a short run: {rounds} of {request.rounds} rounds of {size_text(size)}, {took_s:.0f} s. "
            f"Tighter figures, in about {max(1, round(took_s * factor / 60))} min:"
        ),
        f"  {command_text(longer, options, None)}",
    )


def _written(path: str, result: Result) -> tuple[str | None, CkptfsError | None]:
    """Write the result. Return its path and, if it could not be written to ``path``, the error.

    After an error it is written to the temporary directory instead, so that the measurements are not
    lost. The path is None if that fails too.
    """
    try:
        write_result(path, result)
    except CkptfsError as error:
        elsewhere = os.path.join(tempfile.gettempdir(), f"ckptfs-bench-{secrets.token_hex(8)}.json")
        try:
            write_result(elsewhere, result)
        except CkptfsError:
            return None, error
        return elsewhere, error
    return path, None


def _request_from(uris: Sequence[str], given: dict[str, Any]) -> Any:
    from ckptfs.bench.messages import LoopShape, WorkloadAsked
    from ckptfs.bench.run import target_asked, under_torchrun
    from ckptfs.bench.workloads import NO_MODELS
    from ckptfs.uri import Uri

    if given["params"] is not None and given["size"] is not None:
        raise click.UsageError(
            "--params and --size both set the size of the state: pass one of them"
        )
    if given["ranks"] is not None and under_torchrun():
        raise click.UsageError("torchrun sets the number of ranks: leave --ranks out")
    if given["every"] >= given["steps"]:
        raise click.UsageError(
            "--every must be less than --steps: otherwise the loop saves nothing"
        )
    options = given["storage_options"]
    local = [Uri.parse(uri).is_local for uri in uris]
    if options and all(local):
        raise click.UsageError("a directory takes no storage options")
    params, size = given["params"], given["size"]
    return Asked(
        targets=tuple(
            target_asked(uri, None if here else options)
            for uri, here in zip(uris, local, strict=True)
        ),
        workloads=tuple(
            # "many" is not a model: with --params it keeps its default size
            WorkloadAsked(kind, None if kind in NO_MODELS else params, size)
            for kind in dict.fromkeys(given["workloads"])
        ),
        engines=given["engines"],
        rounds=given["rounds"] or _ROUNDS,
        # In a run that may end early, the last round is not known in advance, and --keep needs it.
        within_s=None if given["rounds"] or given["keep"] else _WITHIN_S,
        ranks=given["ranks"] or 1,
        durable=given["durable"],
        keep=given["keep"],
        loop=LoopShape(given["steps"], given["every"]),
    )


def _progress(text: str) -> None:
    """Show progress: on a terminal as a line, elsewhere in the log, which -v shows."""
    if sys.stderr.isatty():
        say(text)
    else:
        logger.info(text)


def _show(console: Console, result: Result) -> None:
    for workload in result.workloads:
        size = size_text(workload.size_bytes)
        console.print(f"{workload.name}: {size} in {workload.tensors} tensors; {workload.told}")
        if conditions := conditions_text(result, workload.name):
            console.print(f"ratios of {workload.name} hold for {conditions}")
    for target in result.targets:
        console.print(f"{target.uri} ({target.kind}): {target.cached}")
    console.print()
    columns = ("workload", "target", "phase", "engine", "seconds>", "GB/s>", "of limit>")
    rows = [
        (
            row.workload,
            row.target,
            phase_text(row.phase),
            row.engine,
            spread_text(row.seconds),
            "-" if row.gb_per_s is None else number_text(row.gb_per_s.median),
            "limit"
            if row.is_limit
            else "-"
            if row.to_limit is None
            else f"{100 / row.to_limit.ratio:.0f} %",
            "-" if row.cpu_s_per_gb is None else number_text(row.cpu_s_per_gb.median),
            size_text(None if row.peak_memory_bytes is None else row.peak_memory_bytes.median),
        )
        for row in rows_of(result)
    ]
    table(console, (*columns, "CPU s/GB>", "memory>"), rows)
    for one in slowdowns_of(result):
        if one.ratio is not None:
            console.print(
                f"{one.workload} at {one.target}: {one.engine} made the loop "
                f"{one.ratio.ratio:.2f} times as long"
            )
    for note in result.notes:
        console.print(f"note: {note}")
    console.print("seconds are medians over the rounds (fastest-slowest)")


# -- results read again ------------------------------------------------------------


@group_command(bench, "report", answers=(Report,))
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--out", default="bench-report", show_default=True, metavar="DIR", help="Directory to write to."
)
def report(files: tuple[str, ...], out: str) -> CommandResult:
    """Write plots (PNG, SVG) and one self-contained HTML page of results.

    The page needs no network, no script and no other file.
    """
    made = write_report(files, out)

    def show(console: Console) -> None:
        console.print(made.page)
        console.print(f"{len(made.plots)} plots next to it")

    return CommandResult(made, show)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredDocument:
    file: str
    date: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowDocument:
    workload: str
    target: str
    phase: Phase
    engine: str
    is_limit: bool
    before: Spread
    after: Spread
    ratio: float
    low: float
    high: float
    rounds: int
    verdict: Verdict
    rounds_needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompareDocument:
    before: _MeasuredDocument
    after: _MeasuredDocument
    differences: Sequence[Difference]
    rows: Sequence[_RowDocument]
    missing: Sequence[str]
    slower: int


@group_command(bench, "compare", answers=(_CompareDocument,))
@click.argument("before")
@click.argument("after")
@click.option("--only", multiple=True, metavar="GLOB", help="Engines, workloads or targets.")
@click.option("--phase", "phases", multiple=True, type=click.Choice(list(PHASES)))
def compare(
    before: str, after: str, only: tuple[str, ...], phases: tuple[str, ...]
) -> CommandResult:
    """Compare the result AFTER with the result BEFORE.

    Says first what makes the two not comparable. Exit code 1 if something is slower; a spread that is
    too wide for a verdict is said, and fails nothing.
    """
    old, new = read_result(before), read_result(after)
    found = compare_results(old, new, only=only, phases=phases)
    if not found.rows:
        raise click.UsageError(_no_rows_text(found))
    document = _CompareDocument(
        before=_MeasuredDocument(file=before, date=old.date, command=old.command),
        after=_MeasuredDocument(file=after, date=new.date, command=new.command),
        differences=found.differences,
        rows=[_row_document(row) for row in found.rows],
        missing=found.missing,
        slower=len(found.slower),
    )

    def show(console: Console) -> None:
        _show_comparison(console, {before: old, after: new}, found)

    return CommandResult(document, show, Exit.NO if found.slower else Exit.OK)


def _no_rows_text(found: Compared) -> str:
    """Return why there are no rows: the filters match nothing, or the first thing left out."""
    text = "the two results have nothing in common that was asked for"
    more = f"; and {len(found.missing) - 1} more" if len(found.missing) > 1 else ""
    return f"{text} ({found.missing[0]}{more})" if found.missing else text


def _row_document(row: Beside) -> _RowDocument:
    found = row.found
    return _RowDocument(
        workload=row.workload,
        target=row.target,
        phase=row.phase,
        engine=row.engine,
        is_limit=row.is_limit,
        before=row.before,
        after=row.after,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        rounds=found.rounds,
        verdict=found.verdict,
        rounds_needed=found.rounds_needed,
    )


def _show_comparison(console: Console, runs: dict[str, Result], found: Compared) -> None:
    for name, (path, result) in zip(("before", "after"), runs.items(), strict=False):
        console.print(f"{name:7} {path}, {result.date[:19].replace('T', ' ')}: {result.command}")
    console.print()
    for title, prevents in (("not comparable", True), ("differs", False)):
        for one in found.differences:
            if one.prevents is prevents:
                console.print(f"{title}: {one.what}: {one.before} -> {one.after}")
    if found.differences:
        console.print()
    columns = ("workload", "target", "phase", "engine", "before s>", "after s>", "after/before>")
    table(console, (*columns, "verdict"), [_comparison_cells(row) for row in found.rows])
    console.print()
    for line in found.missing:
        console.print(line)
    console.print(_counts_text(found.rows))


def _comparison_cells(row: Beside) -> Sequence[str]:
    found = row.found
    return (
        row.workload,
        row.target,
        phase_text(row.phase),
        row.engine + (" (limit)" * row.is_limit),
        spread_text(row.before),
        spread_text(row.after),
        f"{number_text(found.ratio)} ({number_text(found.low)}-{number_text(found.high)})",
        verdict_text(found),
    )


def _counts_text(rows: Sequence[Beside]) -> str:
    counted = Counter(row.found.verdict for row in rows if not row.is_limit)
    names = {verdict: verdict.value for verdict in Verdict}
    names[Verdict.SPREAD_TOO_WIDE] = "without a verdict"
    texts = [f"{counted[verdict]} {name}" for verdict, name in names.items() if counted[verdict]]
    return ", ".join(texts) or "limits only"
