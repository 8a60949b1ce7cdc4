"""Where the CPU seconds of one operation go, symbol by symbol, as ``perf`` samples them.

    python -m benchmarks.profiled save                          minutes; needs Linux's perf, and the right to use it
    python -m benchmarks.profiled s3-save --size 20MB --rounds 1 --out FILE        does it still run?

    save           a durable save on --dir                  load           a verified load of it, from the page cache
    s3-save        a save over loopback, bodies hashed      s3-load        a load of it
    s3-unsigned    a save whose bodies nobody hashes        stall          async_save, until it lets go of the caller

One process with all its threads. perf samples while the calls run and at no other time: what is made before, and
removed after, is not in it. A share of the samples times the CPU seconds per GB that the process's own clock
tells is what stands beside each symbol; perf's own cost is in both.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import ckptfs
from benchmarks import telling
from benchmarks.floors.rows import MOST_ON_S3, UNSIGNED
from ckptfs.bench.machine import describe, versions
from ckptfs.bench.workloads import make_blank, make_state, make_workload, parse_size
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

_PERF: Final = "perf"
_LOOK_S: Final = 1.0  # whether perf is still there
_HERTZ: Final = 1999
_LEAST: Final = 0.5  # percent of the samples: what has less is not told
_WIDTH: Final = 100  # of a symbol's name: C++ has some of a thousand characters
_LINE: Final = re.compile(r"\s*(\d+\.\d+)%\s+(\S+)\s+\[(.)\]\s+(.+?)(?:\s+-\s+-)?\s*$")

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: ``act`` is sampled, ``after`` is not. Both get the round's number."""

    act: Callable[[int], object]
    after: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Line:
    """One symbol. percent: of the samples."""

    percent: float
    place: str
    symbol: str


class Perf:
    """``perf record`` of this process, which samples only when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "perf.data"
        control, answers = folder / "control", folder / "answers"
        for fifo in (control, answers):
            os.mkfifo(fifo)
        self._process = subprocess.Popen(  # whichever perf fits the kernel that runs
            [
                _PERF, "record", "--quiet", "--event", "cpu-clock", "--freq", str(_HERTZ), "--delay", "-1",
                "--control", f"fifo:{control},{answers}", "--pid", str(os.getpid()),
                "--output", str(self._data),
            ]
        )  # fmt: skip
        # Open at both ends here: a perf that does not start would never open its own.
        self._control = os.open(control, os.O_RDWR | os.O_CLOEXEC)
        self._answers = os.open(answers, os.O_RDWR | os.O_CLOEXEC)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample for the time of a with statement."""
        self._say("enable")
        try:
            yield
        finally:
            self._say("disable")

    def lines(self) -> list[Line]:
        """End it; every symbol, the most frequent first."""
        self._say("stop")
        self._process.wait(60)
        command = [_PERF, "report", "--stdio", "--input", str(self._data), "--no-children"]
        command += ["--sort", "dso,symbol", "--call-graph", "none"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = [match for line in told.splitlines() if (match := _LINE.match(line))]
        return [Line(float(one[1]), one[2], one[4][:_WIDTH]) for one in found]

    def _say(self, order: str) -> None:
        os.write(self._control, f"{order}\n".encode())
        said = b""
        while not said.endswith(b"ack\n\0"):
            if select.select([self._answers], [], [], _LOOK_S)[0]:
                said += os.read(self._answers, 64)
            elif (status := self._process.poll()) is not None:
                raise RuntimeError(f"perf did not {order}: it ended with {status}")


def unavailable() -> str | None:
    """Why nothing can be profiled here; None: it can."""
    if shutil.which(_PERF) is None:
        return "perf is not installed (Debian: linux-perf)"
    command = [_PERF, "record", "--quiet", "--event", "cpu-clock", "--output", os.devnull, "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"perf may not sample here: {tried.stderr.strip()[:300]}" if tried.returncode else None


def _on_disk(name: str, state: State, where: Path, stack: ExitStack) -> Case:
    target = f"{where}/run/step"
    if name == "save":
        return Case(
            lambda n: ckptfs.save(state, f"{where}/run-{n}/step"),
            lambda n: shutil.rmtree(where / f"run-{n}"),
        )
    if name == "load":
        ckptfs.save(state, target)
        for path in where.rglob("*.distcp"):
            path.read_bytes()  # a direct save leaves nothing in the page cache
        blank = {key: tensor.clone() for key, tensor in state.items()}
        return Case(lambda _: ckptfs.load(dict(blank), target), lambda _: None)
    run = stack.enter_context(ckptfs.prepare_run(where / "run"))
    pending: list[Any] = []

    def hold(number: int) -> None:
        options: dict[str, Any] = {"step": number + 2, "run": run, "if_exists": "replace"}
        pending.append(ckptfs.async_save(state, target, **options))

    return Case(hold, lambda _: pending.pop().result())


def _on_s3(name: str, state: State, blank: State, stack: ExitStack) -> Case:
    from tests import lab

    server = stack.enter_context(lab.sink(keep="all"))
    said = UNSIGNED if name == "s3-unsigned" else {}
    options = server.storage_options(**said, concurrency=8)
    if name == "s3-load":
        uri = server.uri("run/step")
        ckptfs.save(state, uri, storage_options=options)
        return Case(
            lambda _: ckptfs.load(dict(blank), uri, storage_options=options), lambda _: None
        )
    store = open_storage(Uri.parse(server.uri("")), options)
    stack.callback(store.close)
    return Case(
        lambda n: ckptfs.save(state, server.uri(f"run-{n}/step"), storage_options=options),
        lambda n: store.remove_tree(f"run-{n}"),  # or the server, on the same cores, would grow
    )


CASES: Final = ("save", "load", "s3-save", "s3-unsigned", "s3-load", "stall")


def profiled(name: str, size_bytes: int, rounds: int, within: Path) -> str:
    """A page about one of ``CASES``. within: on the disk that is written to."""
    on_s3 = name.startswith("s3")
    workload = make_workload("llm", size_bytes=min(size_bytes, MOST_ON_S3) if on_s3 else size_bytes)
    state = make_state(workload)
    with ExitStack() as stack:
        where = Path(stack.enter_context(_temporary(within)))
        case = (
            _on_s3(name, state, make_blank(workload), stack)
            if on_s3
            else _on_disk(name, state, where, stack)
        )
        case.act(-1)  # imports, buffers: not what a save costs
        case.after(-1)
        perf = Perf(Path(stack.enter_context(_temporary(None))))
        wall_s = cpu_s = 0.0
        for number in range(rounds):
            os.sync()
            with perf.sampling():
                began, cpu = time.perf_counter(), time.process_time()
                case.act(number)
                wall_s += time.perf_counter() - began
                cpu_s += time.process_time() - cpu
            case.after(number)
        lines = perf.lines()
    gigabytes = workload.size_bytes * rounds / 1e9
    return _page(name, lines, cpu_s / gigabytes, wall_s / rounds, gigabytes / rounds, within)


def _temporary(within: Path | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ckptfs-profile-", dir=within)


def _page(  # noqa: PLR0917 - what was measured, in the order of the page
    name: str, lines: list[Line], cpu_s_per_gb: float, wall_s: float, gb: float, within: Path
) -> str:
    machine = describe(within)
    told = [
        f"{name}: {cpu_s_per_gb:.3f} CPU seconds per GB; {wall_s:.3f} s for {gb:.2f} GB",
        datetime.now(UTC).isoformat(timespec="seconds"),
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('filesystem')}, load {os.getloadavg()[0]:.1f}",
        " ".join(f"{k} {v}" for k, v in versions("ckptfs", "torch", "xxhash", "obstore").items()),
        shlex.join(["python", "-m", "benchmarks.profiled", *sys.argv[1:]]),
        "",
        "CPU s/GB  samples  by place",
    ]
    places: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        places[line.place] += line.percent
    told += [
        _told(Line(share, place, ""), cpu_s_per_gb)
        for place, share in sorted(places.items(), key=lambda pair: -pair[1])
        if share >= _LEAST
    ]
    told += ["", "CPU s/GB  samples  by symbol"]
    told += [_told(line, cpu_s_per_gb) for line in lines if line.percent >= _LEAST]
    return "\n".join(told) + "\n"


def _told(line: Line, cpu_s_per_gb: float) -> str:
    share = line.percent * cpu_s_per_gb / 100
    return f"{share:8.3f}  {line.percent:6.1f}%  {line.place} {line.symbol}".rstrip()


def main() -> int:
    """Measure, write the page, print it."""
    options = _options()
    if (why := unavailable()) is not None:
        print(why, file=sys.stderr)
        return 1
    page = profiled(options.case, options.size, options.rounds, options.dir)
    name = f"profile-{options.case}-{datetime.now(UTC).date()}.txt"
    path = options.out or telling.HERE / "results" / name
    path.write_text(page)
    print(page)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="where the CPU seconds of one operation go")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--size", type=parse_size, default=2_000_000_000, help="of the state: 2GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="the page's file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
