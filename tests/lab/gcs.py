"""Two servers of Google's JSON API: ours honours preconditions, the emulator of PyPI does not.

gcs           python -m tests.lab.gcs_server --port N       ifGenerationMatch on every change
gcs_emulator  gcp-storage-emulator                          plain reads and writes only
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tests.lab import raw
from tests.lab.process import HOST, REPOSITORY, Crew, need, status_of
from tests.lab.server import BUCKET, Server

PROJECT = "ckptfs-lab"
# gcsfs asks a second Google service what kind of bucket it has; no service answers that question here
# and it would wait a minute for every bucket.
NO_HNS = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    """The server with preconditions, with one bucket."""
    with Crew("gcs") as crew:
        port = crew.port()
        crew.start(
            "gcs_server",
            [sys.executable, "-m", "tests.lab.gcs_server", "--port", str(port)],
            env={"PYTHONPATH": str(REPOSITORY)},
        )
        yield _served(crew, port)


@contextlib.contextmanager
def gcs_emulator() -> Iterator[Server]:
    """gcp-storage-emulator in memory, with one bucket. It ignores every precondition."""
    [program] = need("gcp-storage-emulator")
    with Crew("gcs_emulator") as crew:
        port = crew.port()
        crew.start(
            "emulator",
            [program, "start", "--host", HOST, "--port", str(port), "--in-memory"],
        )
        yield _served(crew, port)


def _served(crew: Crew, port: int) -> Server:
    """Wait until it answers and make the bucket."""
    endpoint = f"http://{HOST}:{port}"
    crew.wait_for(lambda: status_of(endpoint) is not None, f"{endpoint} answers")
    server = Server(
        crew.name,
        "gs",
        endpoint,
        BUCKET,
        {"token": "anon", "project": PROJECT, "endpoint_url": endpoint},
        {"STORAGE_EMULATOR_HOST": endpoint, **NO_HNS},
        str(crew.run_dir),
        crew.pids(),
    )
    raw.make_gcs_bucket(server, PROJECT)
    return server
