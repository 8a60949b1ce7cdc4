"""ckptfs watch: what it prints of a run that others write, how it ends, and what it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.uri import Uri
from tests.cli.conftest import Cli, Place, a_run, state_of

TRAINER = """
import sys, torch, ckptfs
with ckptfs.CheckpointManager(sys.argv[1], keep_latest=1) as manager:
    for step in (10, 20):
        manager.save(step, {"w": torch.ones(8)})
    print("saved", flush=True)
    if sys.argv[2] == "hang":
        sys.stdin.read()
"""


def _python(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


@contextmanager
def _watching(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """``ckptfs watch`` in a process of its own, which has begun to look."""
    with _python("-m", "ckptfs", "watch", *arguments) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("ckptfs watch: ")
            yield process
        finally:
            process.kill()


def _documents(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_the_history_of_a_run_is_told_from_an_entry_on(cli: Cli, place: Place) -> None:
    """On a directory and on S3: a fence, each commit, and the release, which ends it where asked."""
    a_run(place)
    ran = cli("watch", place.uri, "--from", 0, "--until-end", "--json", *place.flags)
    assert ran.exit == 0
    told = _documents(ran.out)
    assert [(one["event"], one["name"]) for one in told] == [
        ("fence", None),
        ("commit", "step_10"),
        ("commit", "step_20"),
        ("commit", "weights_20"),
        ("release", None),
    ]
    commit = told[1]
    assert (commit["command"], commit["step"], commit["kind"]) == ("watch", 10, "checkpoint")
    assert commit["uri"] == str(Uri.parse(place.uri) / "step_10")
    assert all(one["at"] and one["host"] for one in told)
    ran = cli("watch", place.uri, "--from", 2, "--until-end", "--event", "commit", *place.flags)
    assert [line.split()[1:4] for line in ran.out.splitlines()] == [
        ["commit", "committed", "step_20"],
        ["commit", "committed", "weights_20"],
    ]


@pytest.mark.parametrize("uri", ["memory://watched/run", "ckptfs+none://"])
def test_a_run_in_memory_is_watched(cli: Cli, uri: str) -> None:
    """Any backend; an unknown protocol is a wrong call."""
    if uri.startswith("memory"):
        a_run(Place("memory", uri))
    ran = cli("watch", uri, "--from", 0, "--until-end", "--json", "--event", "commit")
    if uri.startswith("memory"):
        names = [one["name"] for one in _documents(ran.out)]
        assert (ran.exit, names) == (0, ["step_10", "step_20", "weights_20"])
    else:
        (document,) = _documents(ran.out)
        assert (ran.exit, document["error"]["type"]) == (2, "UriError")


def test_a_real_trainer_is_followed_from_before_its_run_exists(tmp_path: Path) -> None:
    """Each thing in order, a program at each, and the end with the run's."""
    run, seen = tmp_path / "run", tmp_path / "seen"
    program = (
        f'echo "$CKPTFS_EVENT ${{CKPTFS_URI:-}} ${{CKPTFS_STEP:-}}" >> {seen}; cat >> {seen}.json'
    )
    with _watching(run, "--json", "--until-end", "--exec", program) as watch:
        with _python("-c", TRAINER, run, "end") as trainer:
            assert trainer.wait(120) == 0, trainer.communicate()
        out, err = watch.communicate(timeout=120)
    assert watch.returncode == 0, err
    told = _documents(out)
    assert [(one["event"], one["step"]) for one in told] == [
        ("fence", None),
        ("commit", 10),
        ("commit", 20),
        ("delete", 10),
        ("release", None),
    ]
    assert {one["pid"] for one in told} == {trainer.pid}
    assert "keep_latest=1" in told[3]["what"]
    assert seen.read_text().splitlines()[1:3] == [
        f"commit file://{run}/step_10 10",
        f"commit file://{run}/step_20 20",
    ]
    assert _documents(Path(f"{seen}.json").read_text()) == told


def test_a_trainer_that_is_killed_is_a_failure(tmp_path: Path) -> None:
    """No entry says so: its process does, within a poll."""
    run = tmp_path / "run"
    with _python("-c", TRAINER, run, "hang") as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saved\n"
        with _watching(run, "--until-end") as watch:
            trainer.kill()
            trainer.wait(120)
            out, err = watch.communicate(timeout=120)
    assert (watch.returncode, "Traceback" in err) == (1, False)
    (line,) = out.splitlines()
    assert "failure" in line
    assert f"the owner died: host {os.uname().nodename} pid {trainer.pid}" in line


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    """Exit code 130, one line, no traceback; also while a program runs."""
    with _watching(tmp_path / "run") as watch:
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=120)
    assert (watch.returncode, out, err) == (130, "", "ckptfs watch: interrupted\n")


def test_a_program_that_fails_is_named_and_watching_goes_on(cli: Cli, local: Place) -> None:
    """The exit code says that one failed."""
    a_run(local)
    told = ("--from", 0, "--until-end", "--event", "commit", "--exec")
    ran = cli("watch", local.uri, *told, '[ "$CKPTFS_STEP" = 20 ] || exit 3')
    assert (ran.exit, len(ran.out.splitlines())) == (1, 3)
    assert ran.err.count("the program ended with 3 at committed step_10") == 1
    assert cli("watch", local.uri, *told, "true").exit == 0


def test_a_damaged_entry_ends_it(cli: Cli, local: Place) -> None:
    """No reader takes what comes after it: the error names the entry."""
    a_run(local)
    Path(local.uri, ".ckptfs", "log", "00000002").write_text("no entry")
    ran = cli("watch", local.uri, "--from", 0, "--until-end", "--json")
    *events, error = _documents(ran.out)
    assert ran.exit == 1
    assert error["error"]["type"] == "ManifestError"
    assert error["error"]["uri"].endswith("/.ckptfs/log/00000002")
    assert events == []


def test_a_name_that_is_anybodys_is_no_command(cli: Cli, local: Place) -> None:
    """What a log brings is nothing that the shell reads."""
    name = "step_1$(touch pwned)"
    with ckptfs.prepare_run(local.uri) as run:
        ckptfs.save(state_of(), f"{local.uri}/{name}", run=run)
    program = f'cd {Path(local.uri).parent}; echo "$CKPTFS_NAME" > name'
    ran = cli(
        "watch", local.uri, "--from", 0, "--until-end", "--event", "commit", "--exec", program
    )
    assert ran.exit == 0
    assert (Path(local.uri).parent / "name").read_text() == f"{name}\n"
    assert not list(Path(local.uri).parent.rglob("pwned"))
