"""The bucket that ``make test-cloud`` was given, and the same seen behind ckptfs's back."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import fsspec

from ckptfs.storage.options import OURS
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["Bucket", "set_place", "the_place"]

_VARIABLE = "CKPTFS_TEST_CLOUD"


@dataclass(frozen=True)
class Bucket:
    """A new prefix of somebody's bucket. cases: how many deaths of a save are tried at most."""

    uri: str
    options: Mapping[str, Any]
    cases: int

    def fresh(self, label: str) -> str:
        """The URI of an unused prefix."""
        return f"{self.uri}/{label}-{uuid.uuid4().hex[:12]}"

    def host(self) -> str:
        """The endpoint's host, where the options name one."""
        kwargs = self.options.get("client_kwargs") or {}
        named = self.options.get("endpoint_url") or kwargs.get("endpoint_url") or ""
        return urlsplit(str(named)).hostname or "the library's own"

    def library(self) -> Any:
        """fsspec's filesystem of the store: what ckptfs did is looked at through another's eyes."""
        theirs = {name: value for name, value in self.options.items() if name not in OURS}
        cls: Any = self._class()
        named = cls._get_kwargs_from_urls(self.uri)
        return cls(**{**named, **theirs}, use_listings_cache=False, skip_instance_cache=True)

    def path(self, uri: str) -> str:
        """A URI as the library spells it."""
        return str(self._class()._strip_protocol(uri))

    def _class(self) -> Any:
        return fsspec.get_filesystem_class(Uri.parse(self.uri).protocol)

    def keys_below(self, uri: str) -> list[str]:
        """Every object below a URI, as keys."""
        files, path = self.library(), self.path(uri)
        found = files.find(path) if files.exists(path) else []
        return sorted(name.strip("/").removeprefix(path.strip("/")).lstrip("/") for name in found)

    def clean(self) -> list[str]:
        """Delete everything below the prefix. Returns: what is left, objects and parts of uploads."""
        root, _, name = self.uri.rpartition("/")
        with contextlib.closing(open_storage(root, self.options)) as store:
            store.remove_tree(name)
        with contextlib.closing(open_storage(self.uri, self.options)) as store:
            store.sweep_uploads(older_than_s=-3600.0)
            parts = [upload.key for upload in store.unfinished_uploads()]
        return self.keys_below(self.uri) + parts


def set_place(place: Bucket) -> None:
    """Tell the suite, and the processes that it starts."""
    os.environ[_VARIABLE] = json.dumps([place.uri, dict(place.options), place.cases])


def the_place() -> Bucket:
    """What ``set_place`` was given."""
    uri, options, cases = json.loads(os.environ[_VARIABLE])
    return Bucket(uri, options, cases)
