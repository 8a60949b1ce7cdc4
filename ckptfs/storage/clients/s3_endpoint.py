"""What to call the server behind ``s3://`` before anything was asked of it.

    endpoint_url of the options  >  AWS_ENDPOINT_URL_S3  >  AWS_ENDPOINT_URL  >  the profile's
    services section  >  the profile's endpoint_url  >  "S3 in" the region  >  "S3"

Errors name it, and what was seen of one server is not believed of another: two profiles lead to two
servers whose buckets may have one name. Files and variables only, a few milliseconds; the profile, its
files and AWS_IGNORE_CONFIGURED_ENDPOINT_URLS are read by botocore, where it is installed.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from ckptfs.storage.clients.s3_options import S3Options, bare

__all__ = ["endpoint_name"]


def endpoint_name(options: S3Options) -> str:
    """scheme://host[:port] where that is configured, else "S3 in <region>" or "S3"."""
    configured, region = (_asked_botocore if find_spec("botocore") else _asked_environment)(options)
    endpoint = options.endpoint or configured
    if endpoint:
        return bare(endpoint)
    said = options.table("client_kwargs"), options.table("config_kwargs")
    region = next((str(t["region_name"]) for t in said if t.get("region_name")), region)
    return f"S3 in {region}" if region else "S3"


def _asked_environment(_: S3Options) -> tuple[str | None, str | None]:
    read = os.environ.get
    region = read("AWS_REGION") or read("AWS_DEFAULT_REGION")
    return read("AWS_ENDPOINT_URL_S3") or read("AWS_ENDPOINT_URL"), region


def _asked_botocore(options: S3Options) -> tuple[str | None, str | None]:
    import botocore.session
    from botocore.exceptions import BotoCoreError

    session = options.client.get("session")
    try:
        # Without handlers, which make requests and take five times as long as the rest of it.
        session = session or botocore.session.Session(
            include_builtin_handlers=False, profile=options.client.get("profile")
        )
        region = session.get_config_variable("region")
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None, region
        scoped = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(scoped.get("services"), {})
    except BotoCoreError:
        # No such profile, or a broken file: the first request says so, in its own words.
        return _asked_environment(options)
    endpoint = (
        _asked_environment(options)[0]
        or services.get("s3", {}).get("endpoint_url")
        or scoped.get("endpoint_url")
    )
    return endpoint, region
