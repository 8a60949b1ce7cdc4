"""Where examples run, and what is written down about it.

    store    a Store at an unused place: a local directory and S3; where
             CKPTFS_MATRIX is set, all four
    mode     with ``store``: "sync" or "async". Local and synchronous, S3 and asynchronous; where
             CKPTFS_MATRIX is set, every pair. ``@pytest.mark.modes("sync")``: the framework has one
    cell     with cell("Lightning", store, mode): ...      a cell of the matrix: tried, and how it went

S3 is radosgw, GCS the server of tests/lab. NFS is the directory CKPTFS_NFS_DIR, if it is on one; no
other way to have it, since only a kernel can mount. A store that is not there skips its tests (and
fails them where CI=true, NFS excepted).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import get_args

import pytest

from tests import lab
from tests.integrations import matrix
from tests.integrations.running import EXTENSIONS, Kind, Mode, Store, environment
from tests.lab.gcs import NO_HNS
from tests.lab.server import Server
from tests.servers.conftest import no_accounts, shared

__all__ = ["no_accounts"]  # autouse: no test here sees the accounts of its user

os.environ.update(NO_HNS)  # read once, when gcsfs is imported
KINDS: tuple[Kind, ...] = get_args(Kind)
MODES: tuple[Mode, ...] = get_args(Mode)
# A report arrives at the controller's next look, and every actor less is a process less.
RAY = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_worker_niceness": "0",  # else everything else on the machine comes first
}
LIMIT_S = 1800.0  # of one test, on a machine that is busy too
LANE: tuple[tuple[Kind, Mode], ...] = (("file", "sync"), ("s3", "async"))

Cell = Callable[..., AbstractContextManager[None]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Places and modes for tests that ask for them."""
    whole = bool(os.environ.get("CKPTFS_MATRIX"))
    kinds = KINDS if whole else ("file", "s3")
    if "mode" not in metafunc.fixturenames:
        if "store" in metafunc.fixturenames:
            metafunc.parametrize("store", kinds, indirect=True)
        return
    marker = metafunc.definition.get_closest_marker("modes")
    modes: tuple[Mode, ...] = marker.args if marker else MODES
    pairs = [(kind, mode) for kind in kinds for mode in modes]
    if not whole and len(modes) > 1:
        pairs = [pair for pair in pairs if pair in LANE]
    metafunc.parametrize(("store", "mode"), pairs, indirect=["store"])


def pytest_itemcollected(item: pytest.Item) -> None:
    """What frameworks warn of is theirs; elsewhere in this suite a warning is an error. And they are slow:
    a story is three runs, each imports them in all ranks, and the first compiles.
    """
    item.add_marker(pytest.mark.filterwarnings("default"), append=False)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(LIMIT_S))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For the matrix, only what fills a cell of it: the rest does not depend on the store so much."""
    if os.environ.get("CKPTFS_MATRIX"):
        other = [item for item in items if "cell" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


@pytest.fixture
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A fresh run URI; this process has the store's variables too."""
    kind: Kind = request.param
    name = f"run-{uuid.uuid4().hex[:8]}"
    match kind:
        case "file":
            yield Store(kind, str(tmp_path / name))
        case "nfs":
            yield Store(kind, f"{_nfs_directory()}/{name}")
        case "s3" | "gcs":
            server: Server = request.getfixturevalue(f"lab_{kind}")
            for variable, value in server.environment.items():
                monkeypatch.setenv(variable, value)
            yield Store(kind, server.uri(name), server.environment, server.storage_options())


@pytest.fixture(scope="session", autouse=True)
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch compiles DeepSpeed's extension in a directory of this session. In the usual one, of the user, a
    run that was killed while it compiled has left a lock on which every later one hangs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXTENSIONS, str(tmp_path_factory.mktemp("extensions")))
        yield


@pytest.fixture(scope="session")
def lab_s3() -> Iterator[Server]:
    """Ceph's S3."""
    yield from shared("radosgw", lab.radosgw)


@pytest.fixture(scope="session")
def lab_gcs() -> Iterator[Server]:
    """Google's JSON API with preconditions."""
    yield from shared("gcs", lab.gcs)


@pytest.fixture(scope="session")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A local Ray with workers that import this repository, run elsewhere and reach S3 if it is there."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-integrations")
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(pytest.skip.Exception):
            for variable, value in request.getfixturevalue("lab_s3").environment.items():
                patch.setenv(variable, value)
        for variable, value in environment(RAY).items():
            patch.setenv(variable, value)
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            configure_logging=False,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """Records a cell of the matrix where CKPTFS_MATRIX names a file for it."""

    @contextlib.contextmanager
    def recording(
        framework: str, store: Store, mode: Mode, *, package: str | None = None
    ) -> Iterator[None]:
        passed = False
        try:
            yield
            passed = True
        finally:
            if target := os.environ.get("CKPTFS_MATRIX"):
                name = package or framework.lower()
                marker = request.node.get_closest_marker("modes")
                matrix.record(
                    Path(target),
                    framework,
                    store.kind,
                    mode,
                    package=name,
                    passed=passed,
                    modes=marker.args if marker else MODES,
                )

    return recording


def _nfs_directory() -> str:
    """CKPTFS_NFS_DIR if the kernel says that it is NFS."""
    place = os.environ.get("CKPTFS_NFS_DIR")
    if not place:
        pytest.skip("CKPTFS_NFS_DIR is not set: no NFS to run on")
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    under = [(len(at), kind) for at, kind in mounts if Path(place).is_relative_to(at)]
    assert max(under)[1].startswith("nfs"), f"{place} is on no NFS"
    return place
