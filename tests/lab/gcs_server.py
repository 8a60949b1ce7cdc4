"""A small Google Cloud Storage for tests: generation preconditions are honoured, nothing is stored.

This is a test double, written from Google's public description of the API (cloud.google.com/storage/
docs: json_api/v1, xml-api, request-preconditions, resumable-uploads, multipart-uploads, batch). None
of it is Google's code, and where the description leaves something open it is a guess.

    JSON API   objects insert (media, multipart, resumable with 308 and status queries), get (metadata,
               media, Range), list, delete, compose; buckets insert, get; batch
    XML API    objects PUT, GET, HEAD, DELETE, list-type=2; multipart uploads, all six requests
    both       generations that only grow; ifGenerationMatch (0: absent), ifGenerationNotMatch,
               ifMetagenerationMatch, generation=; crc32c and MD5 verified when given; versioning; holds;
               overwriting needs the permission to delete, as with Google
    not here   ACLs, lifecycle, retention, signatures, encryption (settings are kept and shown), copies
               and rewrites, rate limits of their own

    with GcsServer() as gcs:                       one process: a thread per connection
        gcs.options                                storage_options for gs://<gcs.bucket>/...
        gcs.rules.token = "t"                      only this bearer token is good from now on
        gcs.rules.forbidden.add("storage.objects.list")
        gcs.rules.fail(Why.UNAVAILABLE, 3, permission="storage.objects.create")
        gcs.rules.seen                             every request: permission, query, headers

    python -m tests.lab.gcs_server --port N        another process, until SIGTERM; --bucket NAME makes some

Memory holds everything: a lab's few hundred megabytes.
"""

from __future__ import annotations

import argparse
import json
import threading
from types import TracebackType
from typing import Any, Self

from tests.lab._gcs.api import FakeGcs
from tests.lab._gcs.rules import Rules, Seen
from tests.lab._gcs.store import Store, Why
from tests.lab._gcs.wire import HttpServer

__all__ = ["GcsServer", "Rules", "Seen", "Store", "Why", "main"]

BUCKET = "ckptfs-lab"


class GcsServer:
    """One server in this process, from ``with`` to its end.

    port: 0 takes a free one. bucket: made at the start.
    """

    def __init__(self, port: int = 0, bucket: str = BUCKET) -> None:
        self._api = FakeGcs()
        self._http = HttpServer(port, self._api)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self.bucket = bucket
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._api.store.make_bucket(bucket)

    @property
    def store(self) -> Store:
        """What it holds: for tests that look behind the clients' backs."""
        return self._api.store

    @property
    def rules(self) -> Rules:
        """How it treats its clients."""
        return self._api.rules

    @property
    def options(self) -> dict[str, Any]:
        """storage_options of an anonymous client."""
        return {"endpoint_url": self.endpoint, "token": "anon"}

    def reset(self) -> None:
        """As new: an empty bucket, no rules; for tests that share a server one after the other."""
        self._api.store, self._api.rules = Store(), Rules()
        self._api.store.make_bucket(self.bucket)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def service_account(token_uri: str, private_key: str) -> str:
    """A service account's key file, as JSON, with tokens from ``token_uri``."""
    return json.dumps(
        {
            "type": "service_account",
            "project_id": "lab",
            "private_key_id": "1",
            "private_key": private_key,
            "client_email": "ckptfs-test@lab.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": token_uri,
        }
    )


def main() -> None:
    """Serve until the process is asked to end."""
    parser = argparse.ArgumentParser(description="A GCS test double, in memory.")
    parser.add_argument("--port", type=int, default=47_810)
    parser.add_argument("--bucket", action="append", help="made at the start", default=[])
    arguments = parser.parse_args()
    api = FakeGcs()
    for name in arguments.bucket:
        api.store.make_bucket(name)
    HttpServer(arguments.port, api).serve_forever()


if __name__ == "__main__":
    main()
