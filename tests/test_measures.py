"""Who measures the process that the tests run in, and why that may be.

Tests share a process: with each other, with the threads that earlier ones left, with libraries. What
counts descriptors, threads, memory or seconds of all of it fails when somebody else does something.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CLOCKS = frozenset({"monotonic", "perf_counter", "process_time", "thread_time"})
NAMES = {
    "active_count": "threads",
    "enumerate": "threads",
    "getrusage": "processor",
    "process_time": "processor",
    "tracemalloc": "memory",
}
TEXTS = {
    "/proc/self/fd": "descriptors",
    "/proc/self/status": "memory",
    "/proc/self/statm": "memory",
    "/proc/self/clear_refs": "memory",
}
DEADLINE = "a deadline that the docs promise, with room for a busy machine"
CHILD = "it measures a process of its own, which does nothing else"
FAR = "Python's own allocations, against a bound that is megabytes away"
REPORT = "told to a person or to a table, and never compared"
SLOWER = "the call may take longer, never less: a busy machine changes nothing"
LABS = "the labs run one test at a time"

# (file, what it measures): why nothing else can disturb it. "elapsed" is a subtraction of clock readings.
ALLOWED: dict[tuple[str, str], str] = {
    ("bench/test_variants.py", "memory"): "asks only whether the system can tell",
    ("cli/test_look.py", "processor"): "of child processes alone, the least of five runs",
    ("cloud/__main__.py", "elapsed"): REPORT,
    ("commit/test_log.py", "memory"): FAR,
    ("commit/test_log_limits.py", "memory"): FAR,
    ("crash/one_rank.py", "elapsed"): DEADLINE,
    ("crash/test_takeover.py", "elapsed"): SLOWER,
    ("dcp/test_dcp_api.py", "elapsed"): DEADLINE,
    ("dcp/test_dcp_api.py", "threads"): "by the names of ckptfs's agents, in a rank of its own",
    ("dcp/test_exchange.py", "memory"): FAR,
    ("dcp/test_metadata_pickle.py", "memory"): FAR,
    ("dcp/test_pickle_scan.py", "memory"): FAR,
    ("dcp/test_object_leaves.py", "memory"): "sets a limit of its own process, and takes it back",
    ("dcp/test_reserving.py", "processor"): "page faults of its own thread",
    ("faults/test_proxy.py", "elapsed"): SLOWER,
    ("hostile/warm.py", "elapsed"): REPORT,
    ("hostile/warm.py", "memory"): "sets limits of its own child",
    ("integrations/running.py", "elapsed"): REPORT,
    ("integrations/test_safetensors.py", "memory"): CHILD,
    ("integrations/test_verl.py", "elapsed"): DEADLINE,
    ("lab/training.py", "elapsed"): REPORT,
    ("model/search.py", "elapsed"): "the budget of a search that a person gave",
    ("multiprocess/test_async.py", "memory"): "sets a limit of its own rank",
    ("multiprocess/test_harness.py", "elapsed"): "0.5 s were promised; it fails from 60 s on",
    ("multiprocess/test_needs_kill.py", "elapsed"): DEADLINE,
    ("multiprocess/test_needs_n2.py", "elapsed"): DEADLINE,
    ("multiprocess/test_stuck.py", "descriptors"): "asks for the name behind one descriptor",
    ("multiprocess/test_topology_control.py", "elapsed"): DEADLINE,
    ("nfs/counting.py", "threads"): "waits for timers of its own process",
    ("nfs/lives.py", "elapsed"): LABS,
    ("nfs/ranks.py", "elapsed"): LABS,
    ("nfs/rounds.py", "elapsed"): REPORT,
    ("nfs/test_faults.py", "elapsed"): DEADLINE,
    ("nodes/test_needs_nodes.py", "elapsed"): DEADLINE,
    ("nodes/test_rank_kills.py", "elapsed"): DEADLINE,
    ("repeat.py", "elapsed"): REPORT,
    ("scale/__main__.py", "elapsed"): REPORT,
    ("scale/__main__.py", "processor"): REPORT,
    ("scale/lockstep.py", "elapsed"): REPORT,
    ("scale/simulation.py", "threads"): "waits for timers of its own process",
    ("servers/memory_client.py", "elapsed"): REPORT,
    ("servers/memory_client.py", "memory"): CHILD,
    ("servers/test_faults_ranks.py", "elapsed"): DEADLINE,
    ("servers/test_needs_rows.py", "threads"): "waits for the threads of a writer, by their name",
    ("soak/job.py", "descriptors"): CHILD,
    ("soak/job.py", "memory"): CHILD,
    ("soak/job.py", "threads"): CHILD,
    ("storage/test_over.py", "descriptors"): "names a directory by its descriptor",
    ("storage/test_s3_scripted.py", "elapsed"): DEADLINE,
    ("storage/test_threads.py", "threads"): "by the name of the one pool that it made",
    ("storage/test_uploads.py", "memory"): FAR,
    ("test_progress.py", "threads"): "by the name of the one thread that it looks for",
    ("tools/test_doctor.py", "descriptors"): "asks whether one descriptor is a directory",
    ("tools/test_values.py", "memory"): FAR,
    ("topology/test_barriers.py", "elapsed"): DEADLINE,
}


def measured(source: str) -> Iterator[tuple[str, int]]:
    """(what is measured, line) for each measure of a process in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for text, kind in TEXTS.items():
                if node.value.startswith(text):
                    yield kind, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NAMES and node.value.id in {"threading", "resource", "time"}:
                yield NAMES[node.attr], node.lineno
            elif node.value.id == "tracemalloc" and node.attr == "start":
                yield "memory", node.lineno
        elif (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _reads_clock(node.left)
        ):
            yield "elapsed", node.lineno


def _reads_clock(node: ast.expr) -> bool:
    """Whether this is the call of a clock."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in CLOCKS


@functools.cache
def found() -> dict[tuple[str, str], list[int]]:
    """Every measure of a process in tests/: (file, what) and the lines."""
    result: dict[tuple[str, str], list[int]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in {"test_measures.py", "measures.py"}:
            continue
        source = path.read_text(encoding="utf-8")
        if not any(word in source for word in (*CLOCKS, *NAMES, *TEXTS)):
            continue  # nothing to parse for
        for kind, line in measured(source):
            result.setdefault((name, kind), []).append(line)
    return result


def test_every_measure_of_the_process_is_a_known_one() -> None:
    """A test that measures the whole process is listed with the reason why nothing disturbs it."""
    unknown = {key: lines for key, lines in found().items() if key not in ALLOWED}
    assert not unknown, "use tests/measures.py, or list the file with its reason in ALLOWED"


def test_the_list_of_measures_holds_no_dead_entry() -> None:
    """Each allowed measure is still made: the list only says what is there."""
    assert sorted(ALLOWED.keys() - found().keys()) == []


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("len(os.listdir('/proc/self/fd'))", "descriptors"),
        ("os.readlink(f'/proc/self/fd/{fd}')", "descriptors"),
        ("threading.active_count()", "threads"),
        ("set(threading.enumerate())", "threads"),
        ("resource.getrusage(resource.RUSAGE_SELF)", "processor"),
        ("tracemalloc.start()", "memory"),
        ("open('/proc/self/status')", "memory"),
        ("assert time.monotonic() - began < 5", "elapsed"),
        ("took = perf_counter() - began", "elapsed"),
    ],
)
def test_a_measure_is_seen(source: str, kind: str) -> None:
    """Each way to measure a process that was ever used here is recognised."""
    assert [kind] == [what for what, _ in measured(source)]


def test_a_deadline_is_no_measure() -> None:
    """Waiting until something is there, for at most so long, compares nothing with the machine's speed."""
    source = (
        "end = time.monotonic() + 60\nwhile not there() and time.monotonic() < end:\n    pass\n"
    )
    assert not list(measured(source))
