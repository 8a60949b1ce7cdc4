"""Running commands, and what they are run on.

    cli("ls", place.uri, *place.flags)    -> Ran(exit, out, err); ran.json, where --json was given
    place        a fresh run URI, on a local directory and on S3 (every test that asks runs twice)
    a_run(place) a small run: step_10, step_20 (pinned), weights_20, export_1 (a directory)
    golden("ls", text, place)             compares with tests/cli/golden/ls.txt; CKPTFS_GOLDEN=write
                                          rewrites it. Ids, times, ages, hosts and places are masked.

Commands run in this process, through the function that the console script calls.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.cli.main import main
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from tests.servers.conftest import no_accounts, radosgw

__all__ = ["no_accounts", "radosgw"]

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it said."""

    exit: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which is one JSON document."""
        return json.loads(self.out)


Cli = Callable[..., Ran]


@dataclass(frozen=True)
class Place:
    """An unused run. flags: what commands need to reach it."""

    kind: str
    uri: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """``-o`` for each storage option."""
        return [part for k, v in self.options.items() for part in ("-o", f"{k}={json.dumps(v)}")]

    @contextlib.contextmanager
    def storage(self) -> Iterator[Storage]:
        """To damage it behind ckptfs's back: read, replace, remove by key."""
        with contextlib.closing(open_storage(self.uri, self.options)) as storage:
            yield storage


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs one command as the console script does."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([str(argument) for argument in arguments])
            except SystemExit as ended:
                code = ended.code
            else:
                code = 0
        assert isinstance(code, int), code
        return Ran(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A fresh run on a local directory, and one on S3."""
    if request.param == "file":
        return Place("file", str(tmp_path / "run"))
    server = request.getfixturevalue("radosgw")
    return Place("s3", str(server.fresh()), dict(server.storage_options()))


@pytest.fixture
def local(tmp_path: Path) -> Place:
    """A fresh run on a local directory."""
    return Place("file", str(tmp_path / "run"))


def state_of(seed: int = 0) -> dict[str, Any]:
    """A small training state: two matrices, a vector, a number, nested."""
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "embed.weight": torch.randn(64, 16, generator=made),
            "head.weight": torch.randn(16, 64, generator=made).to(torch.bfloat16),
            "head.bias": torch.arange(64, dtype=torch.float32) + seed,
        },
        "optimizer": {"lr": 0.1, "exp_avg": torch.zeros(64, 16)},
        "step": seed,
    }


def a_run(place: Place) -> Place:
    """The run that most commands are shown on; see the module's docstring."""
    with ckptfs.CheckpointManager(
        place.uri, storage_options=place.options, keep_latest=None
    ) as manager:
        manager.save(10, state_of(10), {"loss": 2.5})
        manager.save(20, state_of(20), {"loss": 1.5})
        manager.save(20, {"model": state_of(20)["model"]}, kind="weights")
        manager.pin(20)
    with ckptfs.checkpoint_dir(f"{place.uri}/export_1", storage_options=place.options) as path:
        Path(path, "config.json").write_text('{"layers": 2}\n')
    return place


_MASKS = (
    (r"\d{8}T\d{6}-[0-9a-f]{12}", "<save-id>"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "<time>"),
    (r"\bpid \d+", "pid <pid>"),
    (r"\b127\.0\.0\.1:\d+", "127.0.0.1:<port>"),
    (r'"pid": \d+', '"pid": <pid>'),
    (r'"(age_s|elapsed_s|seconds|wall_s|mib_per_s)": [\d.e+-]+', r'"\1": <number>'),
    (r"\b\d+[smhd]\b", "<age>"),
    (r"\b[0-9a-f]{16,32}\b", "<id>"),
)


def masked(text: str, place: Place) -> str:
    """What every run and every store would print alike; runs of spaces and dashes are one."""
    text = text.replace(f"file://{place.uri}", "<run>").replace(place.uri, "<run>")
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)
    for pattern, instead in _MASKS:
        text = re.sub(pattern, instead, text)
    text = re.sub(r"(?m)[ \t]+$", "", text)
    return re.sub(r"(?<=\S)[ \t]{2,}", "  ", text)


Golden = Callable[[str, str, Place], None]


@pytest.fixture(scope="session")
def golden() -> Golden:
    """Compares a command's output with the file that a person has read."""

    def compare(name: str, text: str, place: Place) -> None:
        path, found = GOLDEN / f"{name}.txt", masked(text, place)
        if os.environ.get("CKPTFS_GOLDEN") == "write":
            path.parent.mkdir(exist_ok=True)
            path.write_text(found)
        assert found == path.read_text(), f"see {path}; CKPTFS_GOLDEN=write rewrites it"

    return compare
