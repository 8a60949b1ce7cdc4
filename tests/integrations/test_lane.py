"""The lane has what it claims to try: a framework that is missing would only skip its tests."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.integrations.running import REPOSITORY

pytestmark = pytest.mark.integrations
FRAMEWORKS = (
    *("accelerate", "deepspeed", "lightning", "megatron-core", "ray", "safetensors"),
    *(
        "torch",
        "torch-checkpointing",
        "torchdata",
        "torchtitan",
        "transformers",
        "trinity-rft",
        "verl",
        "zarr",
    ),
)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_here_in_the_version_that_is_pinned(name: str) -> None:
    """What is installed is what requirements-integrations.txt says; a local build tag does not count."""
    lines = (REPOSITORY / "requirements-integrations.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert version(name).partition("+")[0] == pins[name]
