"""One story for every framework: a run that ends by itself, one that is killed, one that resumes.

    story("lightning", store, "sync", kill=Kill("close", "*__1_0.distcp", nth=2, rank=1))

    reference   docs/integrations/lightning_example.py, on an empty local directory; once per example
    killed      the same program at ``store``; rank 1 dies when it closes the data file of its second save
    resumed     the same once more; it prints the same ``final`` as the reference

What an example prints: ``resumed STEP`` (or ``resumed none``) and at its end ``final HEX``.

    Kill(op, key, nth, rank, when)       op and key are shell patterns, as in ckptfs.testing.faults
      "close"  "*.distcp"                a data file is whole on this rank, nothing is committed
      "create" "*.ckptfs/log/*"          the moment of the commit; a run's first one is its claim
      "open_write" "*"                   the first file, where the framework wrote files itself
    A kill that met no operation fails the story, with the operations that there were.

A run that does not end is killed after ``TIMEOUT_S``; nothing started here outlives a story.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.faults.victim import HOOK
from tests.multiprocess.harness import Rank

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "docs" / "integrations"
TIMEOUT_S = float(os.environ.get("CKPTFS_STORY_TIMEOUT_S", "900"))
_MARK = "CKPTFS_STORY_RUN"
EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # where torch compiles extensions
_ABORTED = "terminate called without an active exception"
Kind = Literal["file", "nfs", "s3", "gcs"]
Mode = Literal["sync", "async"]
Launcher = Literal["torchrun", "python"]


@dataclass(frozen=True)
class Store:
    """A place for one run. ``env``: what a process needs in addition to the URI; this process has it too.

    storage_options: the same for a call that takes them.
    """

    kind: Kind
    uri: str
    env: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __truediv__(self, name: str) -> str:
        """The URI of something below it."""
        return f"{self.uri}/{name}"


@dataclass(frozen=True)
class Kill:
    """SIGKILL to ``rank`` (None: the first one) before, half-way through or after an operation."""

    op: str
    key: str = "*"
    nth: int = 1
    rank: int | None = None
    when: Literal["before", "half", "after"] = "before"

    def __str__(self) -> str:
        who = "" if self.rank is None else f"@{self.rank}"
        return f"kill-{self.when}:{self.op}:{self.key}:{self.nth}{who}"


@dataclass(frozen=True)
class Outcome:
    """What one run of an example left. resumed: a step, "none", or None where it did not say."""

    rc: int
    resumed: str | None
    final: str | None
    output: str
    seconds: float

    @property
    def ended(self) -> bool:
        """True when it came to its own end.

        One interpreter in twenty aborts behind its last line: torch 2.13 destroys a thread of gloo
        that still runs, after collectives on a device mesh, also where nothing is saved at all.
        """
        return self.rc == 0 or (self.final is not None and _ABORTED in self.output)


@dataclass(frozen=True)
class Story:
    """The three runs."""

    reference: Outcome
    killed: Outcome
    resumed: Outcome


def story(
    example: str,
    store: Store,
    mode: Mode,
    *,
    kill: Kill,
    ranks: int = 2,
    launcher: Launcher = "torchrun",
    env: Mapping[str, str] | None = None,
) -> Story:
    """Run the three and hold them against each other; see the module's docstring.

    example: the name of docs/integrations/NAME_example.py. env: for all three.
    """
    more = tuple(sorted((env or {}).items()))
    first = reference(example, ranks, launcher, more)
    hit = run_example(example, store, mode, ranks=ranks, launcher=launcher, env=env, kill=kill)
    assert hit.rc != 0, f"{example} ended well although {kill}:\n{hit.output}"
    assert hit.final is None, f"{example} came to its end before {kill}:\n{hit.output}"
    again = run_example(example, store, mode, ranks=ranks, launcher=launcher, env=env)
    assert again.ended, f"{example} did not resume after {kill}:\n{again.output}"
    assert again.resumed not in (None, "none"), f"{example} began anew:\n{again.output}"
    assert again.final == first.final, f"another state than without {kill}:\n{again.output}"
    return Story(first, hit, again)


@functools.cache
def reference(
    example: str,
    ranks: int = 2,
    launcher: Launcher = "torchrun",
    env: tuple[tuple[str, str], ...] = (),
) -> Outcome:
    """The undisturbed run, synchronous, on a local directory; made once per session."""
    with tempfile.TemporaryDirectory(prefix="reference-", ignore_cleanup_errors=True) as place:
        store = Store("file", f"{place}/run")
        outcome = run_example(example, store, "sync", ranks=ranks, launcher=launcher, env=dict(env))
    assert outcome.ended, f"{example} fails by itself:\n{outcome.output}"
    assert outcome.resumed == "none", f"not `resumed none` on an empty run:\n{outcome.output}"
    assert outcome.final, f"no line `final HEX`:\n{outcome.output}"
    return outcome


def run_example(
    example: str,
    store: Store,
    mode: Mode,
    *,
    ranks: int = 2,
    launcher: Launcher = "torchrun",
    env: Mapping[str, str] | None = None,
    kill: Kill | None = None,
) -> Outcome:
    """Run an example once, as its page says, or with a death planned."""
    script = str(EXAMPLES / f"{example}_example.py")
    with tempfile.TemporaryDirectory(prefix="story-", ignore_cleanup_errors=True) as scratch:
        words, extra = [script, store.uri, mode], {**store.env, **(env or {})}
        if kill is not None:
            words = ["-m", "tests.faults.victim", *words]
            trace = {"CKPTFS_TEST_TRACE": f"{scratch}/trace"}
            extra |= {"CKPTFS_TEST_FAULT": str(kill), **trace, **HOOK}
        outcome = run_words([*launcher_words(launcher, ranks), *words], extra, cwd=scratch)
        if kill is not None:
            which = "*" if kill.rank is None else kill.rank
            # Ray's workers open their plan before they have a rank.
            named = [*Path(scratch).glob(f"trace.{which}"), *Path(scratch).glob("trace.pid*")]
            asked = {p.name: p.read_text() for p in sorted(set(named))}
            assert any(_met(kill, text) for text in asked.values()), (
                f"{kill} met nothing:\n{asked}\n{outcome.output}"
            )
        return outcome


def _met(kill: Kill, trace: str) -> bool:
    """True when this process asked for the operation that was to kill it."""
    asked = [line.split(" ")[1:] for line in trace.splitlines()]
    hits = [
        op
        for op, *key in asked
        if fnmatch.fnmatchcase(op, kill.op) and fnmatch.fnmatchcase(" ".join(key), kill.key)
    ]
    return len(hits) >= kill.nth


def launcher_words(launcher: Launcher, ranks: int) -> list[str]:
    """What is before the program."""
    if launcher == "python":
        return [sys.executable]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)),
    ]


def run_words(words: Sequence[str], env: Mapping[str, str], *, cwd: str | None = None) -> Outcome:
    """Run a command to its end with the environment that every example gets."""
    started, mark = time.monotonic(), uuid.uuid4().hex
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words,
            env=environment({**env, _MARK: mark}),
            cwd=cwd,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # torchrun ends its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        finally:
            _end_all(mark)
            process.wait()
            _unlock_extensions()
        log.seek(0)
        output = log.read().decode(errors="replace")
    return Outcome(
        process.returncode,
        _said("resumed", output),
        _said("final", output),
        output,
        time.monotonic() - started,
    )


def _end_all(mark: str) -> None:
    """Kill what a run left: ranks and daemons have sessions of their own, and its mark."""
    while living := [
        *_marked(mark)
    ]:  # a SIGKILL takes its time, and a dying one may have started another
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _unlock_extensions() -> None:
    """Remove the locks of a process killed while it compiled an extension: the next one would hang."""
    if place := os.environ.get(EXTENSIONS):
        for lock in Path(place).rglob("lock"):
            lock.unlink(missing_ok=True)


def _marked(mark: str) -> Iterator[int]:
    """Processes of this run; one that is dying still counts, a zombie does not."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to read
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                yield int(process.name)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, quiet and offline, and ``extra`` on top."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    base = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
    }
    return {**os.environ, **base, **extra}


def _said(word: str, output: str) -> str | None:
    """The last line ``word VALUE``; a launcher may put its own mark before it."""
    found = re.findall(rf"(?:^|\s){word} (\S+)\s*$", output, re.MULTILINE)
    return found[-1] if found else None


def error_of(call: Callable[[], object]) -> str:
    """What a call raises, as a rank can tell it to the test."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what is asserted
        return f"{type(error).__name__}: {error}"
    return "no error"


def each_claim(
    rank: Rank, claims: Mapping[str, Callable[[Rank, Path], object]], top: Path
) -> dict[str, object]:
    """What a rank saw, by claim, each in a place of its own. One that raises is its own message: the
    others continue, and the test of that claim shows it.
    """
    found: dict[str, object] = {}
    for name, claim in claims.items():
        try:
            found[name] = claim(rank, top / name.replace(" ", "-"))
        except Exception as error:  # noqa: BLE001 - the test of this claim shows it
            found[name] = f"{type(error).__name__}: {error}"
    return found
