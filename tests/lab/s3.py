"""What every S3-shaped server of the lab has in common: options, variables, its bucket."""

from __future__ import annotations

from typing import Any

from tests.lab.server import BUCKET, Server

REGION = "us-east-1"


def s3_server(name: str, endpoint: str, key: str, secret: str, **fields: Any) -> Server:
    """A ``Server`` for s3fs's vocabulary: path style, because 127.0.0.1 has no subdomains."""
    ca_file = fields.get("ca_file")
    client: dict[str, Any] = {"region_name": REGION}
    environment = {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
    }
    if ca_file:
        client["verify"] = ca_file
        environment["AWS_CA_BUNDLE"] = ca_file
    options = {
        "key": key,
        "secret": secret,
        "endpoint_url": endpoint,
        "client_kwargs": client,
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    return Server(name, "s3", endpoint, BUCKET, options, environment, **fields)
