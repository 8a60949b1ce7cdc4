"""One server of each kind for the whole session, started by the first test that asks for it, in
whichever directory: a conftest that imports a fixture makes a further fixture, and no further server.

Where a server cannot run on this machine its tests are skipped with the reason, and fail in CI.
No test here sees the accounts of its user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests import lab
from tests.lab.gcs import NO_HNS
from tests.lab.server import Server

os.environ.update(NO_HNS)  # read once, when gcsfs is imported
# Nothing there, and no one to ask: a test that forgets its options reaches no account.
_NO_ACCOUNTS = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
_ACCOUNTS = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "FSSPEC_")


@pytest.fixture(scope="session", autouse=True)
def no_accounts() -> Iterator[None]:
    """Take the caller's cloud accounts out of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(_ACCOUNTS)]:
            patch.delenv(name)
        for name, value in _NO_ACCOUNTS.items():
            patch.setenv(name, value)
        yield


def session_of(starting: AbstractContextManager[Server]) -> Iterator[Server]:
    """The server while the session lasts."""
    try:
        server = starting.__enter__()
    except lab.UnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    try:
        yield server
    finally:
        starting.__exit__(None, None, None)


_running: dict[str, Server] = {}


def shared(name: str, start: Callable[[], AbstractContextManager[Server]]) -> Iterator[Server]:
    """The server of that name, of whichever fixture asked for it first: all of them end together."""
    if name in _running:
        yield _running[name]
        return
    with contextmanager(session_of)(start()) as server:
        _running[name] = server
        yield server
        del _running[name]


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Server]:
    """Ceph's S3."""
    yield from shared("radosgw", lab.radosgw)


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """moto's S3."""
    yield from shared("moto", lab.moto)


@pytest.fixture(scope="session")
def moto_tls() -> Iterator[Server]:
    """moto's S3 over https; ``ca_file`` signed its certificate."""
    yield from shared("moto_tls", lambda: lab.moto(tls=True))


@pytest.fixture(scope="session")
def azurite() -> Iterator[Server]:
    """Azure Blob."""
    yield from shared("azurite", lab.azurite)


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """Google's JSON API with preconditions."""
    yield from shared("gcs", lab.gcs)


@pytest.fixture(scope="session")
def gcs_emulator() -> Iterator[Server]:
    """Google's JSON API without preconditions."""
    yield from shared("gcs_emulator", lab.gcs_emulator)


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Server]:
    """An HDFS; tests that use it carry ``pytest.mark.hdfs``."""
    yield from shared("hdfs", lab.hdfs)


@pytest.fixture(scope="session")
def sink() -> Iterator[Server]:
    """S3-shaped, forgets large bodies."""
    yield from shared("sink", lab.sink)
