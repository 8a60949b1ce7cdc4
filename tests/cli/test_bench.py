"""``ckptfs bench``: real, tiny benchmarks, and what is left of one that was interrupted: nothing."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ckptfs.bench.results import decode_result, read_result, try_place
from ckptfs.cli.bench import _written
from ckptfs.cli.main import main
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri
from tests.bench.made import made_result
from tests.cli.conftest import Cli
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, torchrun
from tests.multiprocess.store_keys import until

TINY = ("--params", "20K", "--rounds", "1")
LOADS = {"load_warm", "load_cold"}


def names_below(uri: str, options: dict[str, object]) -> list[str]:
    """What a person would list there."""
    storage = open_storage(uri, options)
    try:
        return [entry.name for entry in storage.list("")]
    finally:
        storage.close()


def test_a_directory_and_a_bucket(cli: Cli, radosgw: Server, tmp_path: Path) -> None:
    """Every phase of every engine at both; the file says on what, with no secret; both are as they were."""
    bucket, out = radosgw.fresh(), tmp_path / "out" / "result.json"
    options, target = radosgw.storage_options(), tmp_path / "fast"
    flags = [x for k, v in options.items() for x in ("-o", f"{k}={json.dumps(v)}")]
    told = (*TINY, "-e", "ckptfs,torch.save", "-e", "raw", *flags, "--out", out)
    ran = cli("bench", target, bucket, *told, "--json")
    assert ran.exit == 0, ran.err
    result = decode_result(out.read_text(), str(out))
    assert json.loads(out.read_text()) == ran.json["result"]
    found = {(one.target, one.engine, one.phase) for one in result.samples}
    engines = ("ckptfs", "torch.save", "raw")
    local = str(Uri.parse(target))
    assert found == {(local, e, p) for e in engines for p in {"save", *LOADS}} | {
        (bucket, e, p) for e in engines for p in ("save", "load_warm")
    }
    assert {one.engine for one in result.samples if one.round != 1} == set()
    assert [one.name for one in result.engines if one.is_limit] == ["raw"]
    assert {"cpu", "cores", "memory_gib", "filesystem", "load_average"} <= set(result.machine)
    assert result.versions["torch"].startswith("2.")
    assert (result.settings["ranks"], result.settings["durable"]) == (1, True)
    (workload,) = result.workloads
    assert workload.size_bytes == pytest.approx(200_000, rel=0.1)
    saved = [one for one in result.samples if one.target == bucket and one.phase == "save"]
    assert all((one.sent_bytes or 0) >= workload.size_bytes for one in saved)
    assert all("cache" in one.cached for one in result.targets)
    assert not target.exists()
    assert names_below(bucket, options) == []
    assert_no_secret(out.read_text() + ran.out + ran.err, result.command, options)


def assert_no_secret(told: str, command: str, options: Mapping[str, Any]) -> None:
    """A reader of the file can repeat the call, with credentials of their own."""
    for secret in (options["key"], options["secret"]):
        assert secret not in told
    assert "secret=***" in command
    assert options["endpoint_url"] in command


def test_two_ranks_share_the_state(cli: Cli, tmp_path: Path) -> None:
    """One file of each rank; a training loop too, alone and saving."""
    out, target = tmp_path / "result.json", tmp_path / "run"
    target.mkdir()
    told = ("-w", "llm", "-w", "loop", "--steps", "4", "--every", "2", "--ranks", "2", "--keep")
    ran = cli("bench", target, *TINY, *told, "-e", "ckptfs,torch.save", "--out", out)
    assert ran.exit == 0, ran.err
    result = decode_result(out.read_text(), str(out))
    llm = {(one.engine, one.phase) for one in result.samples if one.workload == "llm"}
    names = ("ckptfs", "torch.save")
    assert llm == {(e, p) for e in names for p in {"save", *LOADS}}
    loop = {(one.engine, one.phase) for one in result.samples if one.workload == "loop"}
    assert loop == {("ckptfs", p) for p in ("stall", "steps", "steps_saving")}
    (home,) = target.iterdir()
    assert {f.name for f in home.glob("llm-torch.save-*/*")} == {"rank_0.pt", "rank_1.pt"}
    assert "ckptfs" in ran.out
    assert "of limit" in ran.out


def test_without_rounds_it_is_short_and_names_the_longer_run(cli: Cli, tmp_path: Path) -> None:
    """What fits into 40 s; the call that it shows is one of its own, with all options and without secrets."""
    told = ("-w", "many", "--size", "60KB", "-e", "ckptfs,raw", "--no-durable")
    ran = cli("bench", tmp_path / "run", *told, "--out", tmp_path / "result.json")
    assert ran.exit == 0, ran.err
    result = read_result(tmp_path / "result.json")
    assert (result.settings["within_s"], result.settings["rounds"]) == (40.0, 5)
    assert "--rounds" not in result.command
    (line,) = [text.strip() for text in ran.out.splitlines() if "--rounds 11" in text]
    words = shlex.split(line)
    assert words[:3] == ["ckptfs", "bench", str(Uri.parse(tmp_path / "run"))]
    for option in ("--workload many", "--size 60000", "--engines ckptfs,raw", "--no-durable"):
        assert option in line
    assert "This was a short run: 5 of 5 rounds" in ran.out
    held = "ratios of many hold for tensors of 4.10 kB to "
    assert f"{held}" in ran.out
    assert "OMP_NUM_THREADS=" in ran.out
    longer = cli("bench", tmp_path / "run", *told, "--rounds", "1", "--out", tmp_path / "2.json")
    assert longer.exit == 0, longer.err
    assert "short run" not in longer.out
    assert "within_s" not in read_result(tmp_path / "2.json").settings


def bench_rank(rank: Rank) -> list[Any]:
    """What this process of the command says, and its exit code."""
    told = io.StringIO()
    with redirect_stdout(told), pytest.raises(SystemExit) as ended:
        main(["bench", *rank.args["words"]])
    return [ended.value.code or 0, told.getvalue()]


def test_under_torchrun(tmp_path: Path) -> None:
    """Each process runs the command; one of them reports, and cleans up."""
    out, target = tmp_path / "result.json", tmp_path / "run"
    words = [str(target), *TINY, "-e", "ckptfs", "--json", "--out", str(out)]
    ended = torchrun(bench_rank, 2, args={"words": words}, warm=True)
    assert [one.error for one in ended] == [None, None], ended[0].log
    (code, told), other = (one.value for one in ended)
    assert (code, other) == (0, [0, ""])
    assert json.loads(told)["result"] == json.loads(out.read_text())
    result = decode_result(out.read_text(), str(out))
    assert result.settings["ranks"] == 2
    assert {one.phase for one in result.samples} == {"save", *LOADS}
    assert not target.exists()


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own; it is gone afterwards."""
    command = [sys.executable, "-m", "ckptfs", "-v", "bench", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    late = threading.Timer(120, process.kill)
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.campaign),
        pytest.param(signal.SIGHUP, marks=pytest.mark.campaign),
    ],
)
def test_interrupted_it_leaves_nothing(sent: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a round, a scheduler's end or a closed terminal: no file, no directory, no process."""
    target, scratch = tmp_path / "deep" / "run", tmp_path / "tmp"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        with started(target, "--size", "20MB", "--rounds", "500", "-e", "ckptfs,dcp") as process:
            assert process.stderr is not None
            assert any("round 1 of 500" in line for line in process.stderr)
            (home,) = target.iterdir()
            assert home.name.startswith("ckptfs-bench-")
            ranks = _children(process.pid)
            assert ranks
            process.send_signal(sent)
            assert process.wait(60) == 130
    assert list(tmp_path.iterdir()) == [scratch]
    assert list(scratch.iterdir()) == []
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """A SIGKILL leaves it no time to end them: each ends by itself, also one that waits for another."""
    ranks: list[int] = []
    with started(tmp_path / "run", "--size", "1MB", "--rounds", "5000", "--ranks", "2") as process:
        try:
            assert process.stderr is not None
            assert any("round 1 of 5000" in line for line in process.stderr)
            ranks = _children(process.pid)
            first, second = ranks
            os.kill(first, signal.SIGSTOP)
            process.kill()
            until(lambda: not _lives(second), "the end of the rank that waits")
            os.kill(first, signal.SIGCONT)
            until(lambda: not _lives(first), "the end of the other")
        finally:
            for rank in filter(_lives, ranks):
                os.kill(rank, signal.SIGKILL)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.campaign
def test_a_rank_that_dies_is_an_error(tmp_path: Path) -> None:
    """Killed from outside: the others are ended, the error names it, nothing stays."""
    target = tmp_path / "run"
    with started(target, "--size", "5MB", "--rounds", "500", "--ranks", "2") as process:
        assert process.stderr is not None
        assert any("round 1 of 500" in line for line in process.stderr)
        victim = _children(process.pid)[1]
        os.kill(victim, signal.SIGKILL)
        said = process.stderr.read()
        assert process.wait(60) == 5
    assert "rank" in said
    assert not target.exists()


def test_what_does_not_fit_is_refused_before_a_byte(cli: Cli, tmp_path: Path) -> None:
    """A disk that is too small, a memory that is too small: said in bytes, nothing was made."""
    target = tmp_path / "run"
    full = cli("bench", target, "--size", "900TB", "--json")
    assert full.exit == 5
    assert full.json["error"]["type"] == "NoSpaceError"
    assert "are free" in full.json["error"]["message"]
    assert not target.exists()


def test_a_result_that_cannot_be_written(cli: Cli, tmp_path: Path) -> None:
    """Said before anything is measured; where the disk goes during the run, the result is kept elsewhere."""
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "result.json"
    ran = cli("bench", tmp_path / "run", *TINY, "-e", "raw", "--out", out)
    assert ran.exit not in (0, 130)
    assert "write failed" in ran.err
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    new = tmp_path / "deep" / "new" / "result.json"
    try_place(new)
    assert not (tmp_path / "deep").exists()
    result = made_result()
    assert _written(str(new), result) == (str(new), None)
    kept, error = _written(str(out), result)
    assert kept is not None
    assert error is not None
    assert read_result(kept) == read_result(new)
    Path(kept).unlink()


@pytest.mark.parametrize(
    "told",
    [
        ("--params", "7Q"),
        ("--size", "much"),
        ("--params", "1M", "--size", "1MB"),
        ("-w", "cats"),
        ("-e", "tar"),
        ("--steps", "5", "--every", "5"),
        ("-o", "key=secret"),
    ],
)
def test_wrong_calls(cli: Cli, tmp_path: Path, told: tuple[str, ...]) -> None:
    """Code 2, one sentence, and nothing was made."""
    ran = cli("bench", tmp_path / "run", *told)
    assert ran.exit == 2
    assert ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_first_word_may_be_a_uri_or_a_command(cli: Cli) -> None:
    """``bench --help`` describes both, and report and compare are there by name."""
    ran = cli("bench", "--help")
    assert ran.exit == 0
    for word in ("URI...", "--workload", "report", "compare"):
        assert word in ran.out
    assert cli("bench", "report", "--help").exit == 0
    assert "--rounds" in cli("bench", "run", "--help").out
