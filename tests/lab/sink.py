"""The sink, as a server of the lab: ``python -m tests.lab.sink_server`` in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from collections.abc import Iterator
from typing import Literal

from tests.lab.moto import make_certificates
from tests.lab.process import HOST, REPOSITORY, Crew, status_of
from tests.lab.s3 import s3_server
from tests.lab.server import Server

# What was freed is used again and not given back to the kernel: a fresh page for each byte that comes
# would cost the server, on the same cores, more than the client that is measured.
_KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
ACCESS_KEY = "AKLAB"
SECRET_KEY = "SKLAB"  # noqa: S105 - the sink does not look at it


@contextlib.contextmanager
def sink(*, keep: Literal["small", "all"] = "small", tls: bool = False) -> Iterator[Server]:
    """S3-shaped and fast, for what a client costs. keep: what it remembers in addition to sizes.

    tls: it speaks https, and its authority is ``server.ca_file``.

    "small": objects up to 1 MiB that came in one request, so that a commit works; all else reads as
    zeros. "all": every byte, in its memory.
    """
    with Crew("sink_tls" if tls else "sink") as crew:
        port = crew.port()
        command = [sys.executable, "-m", "tests.lab.sink_server", "--port", str(port)]
        command += ["--keep", keep]
        endpoint, ca_file = f"http://{HOST}:{port}", None
        if tls:
            ca_file, certificate, key = make_certificates(crew.run_dir)
            command += ["--certificate", certificate, "--key", key]
            endpoint = f"https://{HOST}:{port}"
        crew.start("sink", command, env={"PYTHONPATH": str(REPOSITORY), **_KEPT_MEMORY})
        crew.wait_for(
            lambda: status_of(endpoint, "/-/stats", ca_file=ca_file) is not None,
            f"{endpoint} answers",
        )
        yield s3_server(
            "sink",
            endpoint,
            ACCESS_KEY,
            SECRET_KEY,
            run_dir=str(crew.run_dir),
            pids=crew.pids(),
            ca_file=ca_file,
        )


def sink_stats(server: Server) -> dict[str, int]:
    """Requests by kind ("put", "part", "list", ...) and "body_bytes" received since it started."""
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", "/-/stats")
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()
