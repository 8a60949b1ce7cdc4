"""Copies that are killed, and how many bytes went over the wire.

    place = a_big_run(path, ranks=4, size_bytes=64 << 20)       step_1: so many files of so many bytes
    wire = Wire(proxy)                                          counts bodies of all tries
    killed(command, proxy, after_bytes=...)                     SIGKILL when so much has passed

A copy runs as ``python -m ckptfs cp`` in a process of its own.
"""

from __future__ import annotations

import filecmp
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.dcp.saving import save_at
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.world import simulate
from ckptfs.uri import Uri
from tests.faults.proxy import Exchange, FaultProxy

__all__ = [
    "a_big_run",
    "answered_bytes",
    "command",
    "flags",
    "ran",
    "run_killed",
    "same_data",
    "sent_bytes",
]


def a_big_run(path: Path, ranks: int, size_bytes: int) -> Path:
    """A run with step_1, a data file of ``size_bytes`` by each of ``ranks``; the bytes are noise."""

    def body(control: Control) -> None:
        made = torch.Generator().manual_seed(control.rank)
        noise = torch.randint(-(2**62), 2**62, (size_bytes // 8,), generator=made)
        session = start_session(control, LocalStorage(Uri.parse(path)), Place(), write=True)
        state = {f"w{control.rank}": noise, "lr": 0.1}
        save_at(state, session, Uri.parse(path) / "step_1", SaveSpec("step_1", 1))

    for end in simulate(ranks, body):
        end.get()
    return path


def same_data(one: Path, other: Path) -> bool:
    """Whether two checkpoints on disk have the same data files, bit for bit."""
    files = {p.name: p for p in one.glob("*/*.distcp")}
    others = {p.name: p for p in other.glob("*/*.distcp")}
    return (
        bool(files)
        and files.keys() == others.keys()
        and all(filecmp.cmp(files[name], others[name], shallow=False) for name in files)
    )


def flags(option: str, options: Mapping[str, Any]) -> list[str]:
    """Storage options on a command line."""
    return [word for k, v in options.items() for word in (option, f"{k}={json.dumps(v)}")]


def command(*words: object) -> list[str]:
    """``ckptfs cp`` in a process of its own."""
    return [sys.executable, "-m", "ckptfs", "cp", *(str(word) for word in words)]


def ran(words: Sequence[str], **environment: str) -> tuple[int, str, str]:
    """Its exit code and what it said."""
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout, done.stderr


def run_killed(words: Sequence[str], proxy: FaultProxy, past: Any) -> bool:
    """Start it, and SIGKILL it when ``past(log)`` holds. False: it was over before."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        proxy.wait_for(lambda log: past(log) or process.poll() is not None, 120)
        if process.poll() is not None:
            return False
        process.send_signal(signal.SIGKILL)
        return process.wait(120) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


def sent_bytes(log: Sequence[Exchange]) -> int:
    """Bodies that went to the server."""
    return sum(exchange.sent_bytes for exchange in log)


def answered_bytes(log: Sequence[Exchange]) -> int:
    """Bodies that came back."""
    return sum(exchange.answer_bytes for exchange in log)
