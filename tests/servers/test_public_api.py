"""The public API on real servers: the tests of ``tests/test_api.py`` that take a run, on a bucket.

Options come from the environment, as they do for most users. radosgw in ``make test-campaigns``; the others,
through both client libraries, in ``make campaign-servers``.
"""

from __future__ import annotations

import inspect

import pytest

from tests import test_api
from tests.lab.server import Server
from tests.test_api import Place

for _name, _test in vars(test_api).items():
    if _name.startswith("test_") and "run" in inspect.signature(_test).parameters:
        globals()[_name] = _test


def _long(name: str, client: str) -> object:
    return pytest.param((name, client), marks=pytest.mark.campaign, id=f"{name}-{client}")


@pytest.fixture(
    params=[
        pytest.param(("radosgw", "auto"), id="radosgw"),
        _long("radosgw", "s3fs"),
        _long("moto", "s3fs"),
        _long("moto", "obstore"),
        _long("gcs", "gcsfs"),
        _long("gcs", "obstore"),
        _long("azurite", "adlfs"),
        _long("azurite", "obstore"),
    ]
)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A fresh prefix of a bucket."""
    name, client = request.param
    server: Server = request.getfixturevalue(name)
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return Place(f"{server.fresh('api')}/run", f"?client={client}")
