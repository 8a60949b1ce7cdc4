"""What the GCS tests share: a server with rules that a test may bend, and the client on it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.clients.choose import open_client
from ckptfs.storage.options import ObjectOptions, Times
from ckptfs.uri import Uri
from tests.lab.gcs_server import GcsServer

CLIENTS = ("obstore",)


@dataclass(frozen=True)
class Place:
    """One client, and the server that it talks to."""

    gcs: GcsServer
    client: ObjectClient
    name: str

    def another(self, **options: Any) -> ObjectClient:
        """A further client of the same library, with options of its own."""
        return open_on(self.gcs, self.name, options)

    def wants(self, permission: str) -> int:
        """How many requests asked for that permission so far."""
        return sum(seen.permission == permission for seen in self.gcs.rules.seen)


QUIET = Times(connect_s=5.0, request_s=20.0)


def open_on(
    gcs: GcsServer, name: str, options: Mapping[str, Any], bucket: str = "", times: Times = QUIET
) -> ObjectClient:
    """A client by its library's name; ``options`` on top of the server's."""
    uri = Uri.parse(f"gs://{bucket or gcs.bucket}/run")
    return open_client(uri, ObjectOptions(client=name, times=times), gcs.options | dict(options))


@contextlib.contextmanager
def place_of(name: str) -> Iterator[Place]:
    """A server of its own, with a client on it."""
    with GcsServer() as gcs, contextlib.closing(open_on(gcs, name, {})) as client:
        gcs.rules.min_part_bytes = 4
        yield Place(gcs, client, name)


def fresh(label: str = "k") -> str:
    """An unused key."""
    return f"run/{label}-{secrets.token_hex(4)}"
