"""What processes that are about to be forked read and import once, instead of in every fork."""

from __future__ import annotations

import importlib
import importlib.util

from ckptfs.uri import Uri

__all__ = ["share_aws_data", "warm"]

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
# What boto3, the eyes of the tests, imports late. Modules of ckptfs.storage.clients bring obstore's thread along.
S3 = ("boto3.s3.inject", "s3transfer.manager")


def warm(uri: str) -> None:
    """Import what a client of this store needs; no client is made, no thread started."""
    protocol = Uri.parse(uri).protocol
    late = S3 if protocol == "s3" else ()
    for name in ("obstore.store", LIBRARIES.get(protocol, ""), *late):
        if name and importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if protocol == "s3":
        share_aws_data()


def share_aws_data() -> None:
    """Read botocore's description of S3: each client made after a fork reads it again otherwise."""
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    shared = botocore.session.create_loader()
    botocore.session.create_loader = lambda search_path_string=None: shared
    for _ in range(2):  # the second finds what is read only then
        botocore.session.Session().create_client(
            "s3", region_name="us-east-1", config=Config(signature_version=UNSIGNED)
        )
