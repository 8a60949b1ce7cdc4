"""What a bucket does to objects by itself, as far as the job's credentials may ask."""

from __future__ import annotations

from typing import TypeVar

from ckptfs.errors import CkptfsError
from ckptfs.storage.base import Storage
from ckptfs.tools.doctor.look.uploads import client_of
from ckptfs.tools.doctor.seen import Refusal, Rules

__all__ = ["how_to_look", "look_at_rules"]

T = TypeVar("T")

_COMMANDS = {
    "s3": "pip install 'ckptfs[s3]', or: aws s3api get-bucket-versioning, get-object-lock-configuration, "
    "get-bucket-lifecycle-configuration --bucket BUCKET",
    "gs": "gcloud storage buckets describe gs://BUCKET",
    "az": "az storage account blob-service-properties show, az storage account management-policy show",
}
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}


def look_at_rules(run: Storage) -> Rules | None:
    """The bucket's rules, and the run's prefix in it; None: its client cannot ask."""
    client = client_of(run)
    found = None if client is None else client.bucket_rules()
    if found is None:
        return None

    prefix = run.root.path.strip("/")
    return Rules(
        f"{prefix}/" if prefix else "",
        _told(found.versioning),
        _told(found.lock),
        _told(found.lifecycle),
    )


def _told(answer: T | CkptfsError) -> T | Refusal:
    return Refusal.of(answer) if isinstance(answer, CkptfsError) else answer


def how_to_look(protocol: str) -> str:
    """What a person can ask, where this process cannot."""
    return _COMMANDS.get(_ALIASES.get(protocol, protocol), "ask whoever runs this store")
