"""The client of Azure on one Azurite: opened as a storage opens them, and logins of other kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.clients.choose import open_client
from ckptfs.storage.options import parse_options
from ckptfs.uri import Uri
from tests.lab.azurite import ACCOUNT, ACCOUNT_KEY
from tests.lab.server import Server

CLIENTS = ("obstore",)


@contextlib.contextmanager
def opened(uri: str, options: dict[str, Any]) -> Iterator[ObjectClient]:
    """The client that these options ask for."""
    place = Uri.parse(uri)
    ours, rest = parse_options(place, options)
    client = open_client(place, ours, rest)
    try:
        yield client
    finally:
        client.close()


def connection(
    endpoint: str, *, key: str = ACCOUNT_KEY, sas: str | None = None, account: str = ACCOUNT
) -> str:
    """A connection string for an endpoint: by key, or by a shared access signature."""
    login = f"SharedAccessSignature={sas}" if sas else f"AccountName={account};AccountKey={key}"
    return f"DefaultEndpointsProtocol=http;BlobEndpoint={endpoint};{login}"


def sas(
    server: Server, permission: str, *, ends_in_s: float = 3600, starts_in_s: float = -60
) -> str:
    """A signature for the server's container; ``ends_in_s`` may be in the past."""
    from azure.storage.blob import generate_container_sas

    now = datetime.now(UTC)
    return str(
        generate_container_sas(
            ACCOUNT,
            server.bucket,
            account_key=ACCOUNT_KEY,
            permission=permission,
            start=now + timedelta(seconds=min(starts_in_s, ends_in_s - 60)),
            expiry=now + timedelta(seconds=ends_in_s),
        )
    )
