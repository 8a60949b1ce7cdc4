"""What each layer must not know, and that the checks which hold it would see a breach.

import-linter (pyproject.toml) holds the order of the layers. It sees modules; two rules are about
names inside torch, and are held here over the syntax trees: private names of torch live in
``ckptfs/_torch.py``, and nothing is built on torch's own file writer, since its threads lose errors.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckptfs"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

NO_TORCH = (
    "ckptfs",
    "ckptfs.uri",
    "ckptfs.events",
    "ckptfs.storage.registry",
    "ckptfs.commit.ownership.run",
    "ckptfs.dcp.metadata.metadata_reader",
)

_STOCK_FILES = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.fsspec_filesystem",
    "torch.distributed.checkpoint._fsspec_filesystem",
)
_STOCK_CLASSES = {"FileSystemWriter", "FileSystemReader", "FsspecWriter", "FsspecReader"}
# Stock .metadata locates its items by this record, which lives next to the writer.
_RECORD = "torch.distributed.checkpoint.filesystem._StorageInfo"


def _torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for every name inside torch that a module imports or reaches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            parts = [node.attr]
            inner = node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield node.lineno, ".".join([inner.id, *reversed(parts)])


def _private(tree: ast.AST) -> list[tuple[int, str]]:
    return [
        (line, name)
        for line, name in _torch_names(tree)
        if name.startswith("torch.")
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def _stock_writers(tree: ast.AST) -> list[tuple[int, str]]:
    return [
        (line, name)
        for line, name in _torch_names(tree)
        if name != _RECORD
        and (name.startswith(_STOCK_FILES) or name.rpartition(".")[2] in _STOCK_CLASSES)
    ]


def _breaches(rule: object, files: list[Path]) -> list[str]:
    assert callable(rule)
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in rule(ast.parse(path.read_text()))
    ]


def test_private_torch_names_live_in_one_file() -> None:
    """Only ckptfs/_torch.py depends on names that torch may rename in any release."""
    assert _breaches(_private, [path for path in SOURCES if path.name != "_torch.py"]) == []


def test_nothing_is_built_on_the_stock_file_writer() -> None:
    """No module imports FileSystemWriter, its relatives, or anything of theirs but one record.

    Megatron's loader wants DCP's files below a local path: there, and with one thread (torch does not lose
    its errors), the stock writer writes them. ``bench`` measures stock writers next to
    ours, and nothing else asks _torch for one.
    """
    megatron = next(path for path in SOURCES if path.name == "megatron.py")
    measured = [ROOT / "ckptfs" / "_torch.py", *(ROOT / "ckptfs" / "bench").glob("*.py")]
    ours = [path for path in SOURCES if path not in (megatron, *measured)]
    assert _breaches(_stock_writers, ours) == []
    asking = {path.parent.name for path in SOURCES if "_torch.fsspec_" in path.read_text()}
    assert asking == {"bench"}
    assert "FileSystemWriter(checkpoint_dir, thread_count=1)" in megatron.read_text()


@pytest.mark.parametrize("name", ["StorageWriter", "StorageReader"])
def test_writer_and_reader_stand_on_the_abstract_classes(name: str) -> None:
    """By whatever road it came, no stock file writer is among the bases."""
    import ckptfs

    homes = {base.__module__ for base in getattr(ckptfs, name).__mro__}
    assert "torch.distributed.checkpoint.storage" in homes
    assert not homes & set(_STOCK_FILES)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.checkpoint.filesystem import FileSystemWriter",
        "import torch.distributed.checkpoint.filesystem as fs",
        "from torch.distributed.checkpoint import FileSystemReader as R",
        "import torch.distributed.checkpoint as dcp\nclass W(dcp.FileSystemWriter): ...",
    ],
)
def test_a_stock_writer_would_be_seen(source: str) -> None:
    """Each way to reach the stock writer is recognised."""
    assert _stock_writers(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "from torch._utils import _element_size",
        "from torch.distributed import _state_dict_utils",
        "import torch._C",
        "import torch\ntorch.distributed.distributed_c10d._get_default_store()",
    ],
)
def test_a_private_name_would_be_seen(source: str) -> None:
    """Each way to reach a private name of torch is recognised."""
    assert _private(ast.parse(source))


@pytest.mark.parametrize("module", NO_TORCH)
def test_import_does_not_bring_torch(module: str) -> None:
    """A launcher may import it: torch is not among the modules afterwards."""
    asked = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False, cwd=ROOT).returncode == 0


PLANTED = {
    "storage takes torch": ("storage/local/storage.py", "import torch"),
    "storage takes torch by a detour": ("storage/local/storage.py", "import ckptfs._torch"),
    "storage knows topology": ("storage/base.py", "import ckptfs.control.world"),
    "commit takes torch": ("commit/operations.py", "import torch"),
    "commit asks _torch": ("commit/operations.py", "import ckptfs._torch"),
    "topology knows commit": ("topology/storage_domains.py", "import ckptfs.commit.operations"),
    "control knows topology": ("control/world.py", "import ckptfs.topology.storage_domains"),
    "topology takes torch": ("control/world.py", "def lazy() -> None:\n    import torch"),
    "errors know storage": ("errors.py", "import ckptfs.storage.base"),
    "the core knows its test kit": ("commit/operations.py", "import ckptfs.testing.faults"),
    "what is shipped knows the tests": (
        "testing/world.py",
        "def lazy() -> None:\n    import tests.faults.victim",
    ),
    "a load decodes the pickle": (
        "dcp/loading.py",
        "import ckptfs.dcp.metadata.metadata_pickle",
    ),
    "a save starts threads of a file": (
        "dcp/saving.py",
        "import ckptfs.dcp.write.parallel_windows",
    ),
    "a load makes its own requests": ("dcp/loading.py", "import ckptfs.dcp.read.requests"),
    "a save that waits stages a copy": ("dcp/saving.py", "import ckptfs.dcp.staging.staging"),
    "a save commits as torch's hooks do": (
        "dcp/saving.py",
        "import ckptfs.dcp.torch_hooks.commit_agent",
    ),
    "planning reads files": ("dcp/planning/state_dicts.py", "import ckptfs.dcp.read.data_file"),
    "a load compares with a base": ("dcp/loading.py", "import ckptfs.dcp.incremental.reuse"),
    "a save exports": ("dcp/saving.py", "import ckptfs.dcp.safetensors.exporter"),
    "a room without a place": ("attic.py", "import os"),
    "a layer above takes the heartbeat": (
        "manager/run_setup.py",
        "import ckptfs.control.heartbeat",
    ),
    "a save probes by itself": ("dcp/saving.py", "import ckptfs.topology.storage_domains"),
    "the log knows a save": ("commit/log/fold.py", "import ckptfs.commit.save.spec"),
    "a decision asks what is settled": ("commit/decisions.py", "import ckptfs.commit.log.saves"),
    "the manager seals": ("manager/run_setup.py", "import ckptfs.commit.save.sealing"),
    "a deletion recovers": (
        "commit/delete/erase.py",
        "def lazy() -> None:\n    import ckptfs.commit.ownership.recovery",
    ),
    "a ticket erases": ("commit/parts/tickets.py", "import ckptfs.commit.delete.erase"),
    "the catalog claims": (
        "commit/catalog/locate.py",
        "def lazy() -> None:\n    import ckptfs.commit.ownership.claim",
    ),
    "a save knows tickets": (
        "commit/save/attempt.py",
        "def lazy() -> None:\n    import ckptfs.commit.parts.tickets",
    ),
    "a claim downloads": (
        "commit/ownership/claim.py",
        "def lazy() -> None:\n    import ckptfs.commit.directory_checkpoints.read",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package with its contracts, to plant breaches in."""
    home = tmp_path_factory.mktemp("layers")
    shutil.copytree(PACKAGE, home / "ckptfs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", home)
    return home


def _lint(home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINT_IMPORTS), "--no-cache", "--no-logo"],
        cwd=home,
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_contracts_hold(copy: Path) -> None:
    """import-linter finds the layers in order, as make check does."""
    found = _lint(copy)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("breach", PLANTED)
def test_a_breach_would_be_seen(breach: str, copy: Path) -> None:
    """Each contract fails when the import that it forbids is planted in a copy."""
    place, line = PLANTED[breach]
    path = copy / "ckptfs" / place
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        found = _lint(copy)
        assert found.returncode == 1, found.stdout
        assert "BROKEN" in found.stdout or "attic" in found.stdout
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


def test_no_link_of_the_repository_leads_out_of_it() -> None:
    """One to a folder of somebody's machine, `.lab` say, would take that folder's place in a checkout."""
    told = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if told.returncode != 0:
        pytest.skip("no git checkout here")
    links = [line.split("\t")[1] for line in told.stdout.splitlines() if line.startswith("120000")]
    ends = {
        link: os.path.normpath(ROOT / Path(link).parent / os.readlink(ROOT / link))
        for link in links
    }
    assert {link: end for link, end in ends.items() if not Path(end).is_relative_to(ROOT)} == {}
