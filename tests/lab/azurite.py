"""Azurite's blob service: Azure Blob in memory, honours If-None-Match."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.lab import raw
from tests.lab.process import HOST, Crew, need, status_of
from tests.lab.server import BUCKET, Server

ACCOUNT = "devstoreaccount1"
# The key that Microsoft publishes for every emulator: it protects nothing.
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextlib.contextmanager
def azurite() -> Iterator[Server]:
    """An Azure Blob endpoint with one container; ``endpoint`` ends with the account's name."""
    [node, program] = need("node", "azurite-blob")
    with Crew("azurite") as crew:
        port = crew.port()
        crew.start(
            "azurite",
            [
                *(node, program, "--blobHost", HOST, "--blobPort", str(port)),
                *("--inMemoryPersistence", "--silent", "--disableTelemetry"),
                # A client newer than Azurite asks for a version of the API that it does not know.
                "--skipApiVersionCheck",
            ],
        )
        base = f"http://{HOST}:{port}"
        crew.wait_for(lambda: status_of(base) is not None, f"{base} answers")
        endpoint = f"{base}/{ACCOUNT}"
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint={endpoint};"
        )
        server = Server(
            "azurite",
            "az",
            endpoint,
            BUCKET,
            {"connection_string": connection},
            {"AZURE_STORAGE_CONNECTION_STRING": connection},
            str(crew.run_dir),
            crew.pids(),
        )
        with raw.azure(server) as container:
            container.create_container()
        yield server
