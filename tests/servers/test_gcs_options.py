"""GCS options: each reaches every object by either library, and what is unknown is an error at once."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Mapping
from typing import Any

import gcsfs.core  # type: ignore[import-untyped]
import pytest

from ckptfs.errors import TransientError, UriError
from ckptfs.storage.clients import gcs
from ckptfs.storage.clients.base import IF_ABSENT, IfMatch, ObjectClient
from ckptfs.storage.clients.gcs_options import parse_gcs_options
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.object_store import open_object_store
from ckptfs.storage.options import Times
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri
from tests.lab.gcs_server import GcsServer
from tests.servers.gcs_lab import CLIENTS, open_on, place_of

URI = Uri.parse("gs://bucket/run")
KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
# What obstore can send, and what only gcsfs does.
COMMON: dict[str, Any] = {
    "content_type": "application/x-checkpoint",
    "metadata": {"team": "a b", "cost-center": "7"},
    "fixed_key_metadata": {
        "cache_control": "private",
        "content_disposition": "attachment",
        "content_language": "en",
    },
    "storage_class": "NEARLINE",
}
MORE: dict[str, Any] = {
    "kms_key_name": KEY,
    "predefined_acl": "publicRead",
    "fixed_key_metadata": {
        **COMMON["fixed_key_metadata"],
        "custom_time": "2026-01-02T03:04:05.000Z",
    },
}
WAYS = ("put", "create", "replace", "upload")
SHOWN = {
    "contentType": "application/x-checkpoint",
    "metadata": {"team": "a b", "cost-center": "7"},
    "cacheControl": "private",
    "contentDisposition": "attachment",
    "contentLanguage": "en",
    "storageClass": "NEARLINE",
}
SHOWN_MORE = {
    **SHOWN,
    "customTime": "2026-01-02T03:04:05.000Z",
    "kmsKeyName": KEY,
    "predefinedAcl": "publicread",
}


def written_by(client: ObjectClient, gcs_server: GcsServer) -> list[dict[str, object]]:
    """The settings of objects made in each way: put, create, replace by condition, upload."""
    client.delete([f"run/{name}" for name in WAYS])
    client.put("run/put", b"x")
    client.put("run/create", b"x", IF_ABSENT)
    client.put("run/replace", b"x")
    client.put("run/replace", b"xy", IfMatch(client.head("run/replace").etag or ""))
    upload = client.begin_upload("run/upload", part_bytes=4)
    upload.put_part(0, b"abcd")
    upload.put_part(1, b"e")
    upload.complete()
    live = gcs_server.store.bucket(gcs_server.bucket).live
    found = [dict(live[f"run/{name}"].settings) for name in WAYS]
    for settings in found:
        if acl := settings.get("predefinedAcl"):  # JSON's and XML's names of the same
            settings["predefinedAcl"] = str(acl).replace("-", "").lower()
    return found


@pytest.mark.parametrize("name", CLIENTS)
def test_settings_reach_every_object(name: str) -> None:
    """Small objects, conditional ones and uploads in parts have the same settings."""
    with place_of(name) as place:
        assert written_by(place.another(**COMMON), place.gcs) == [SHOWN] * 4
        # Google's front ends keep copies of what the public may read, unless asked not to.
        plain = {"contentType": "application/octet-stream", "cacheControl": "no-store"}
        assert written_by(place.another(), place.gcs) == [plain] * 4


def test_encryption_keys_and_acls_reach_every_object() -> None:
    """What obstore cannot send is sent through gcsfs: with objects made in one request, created,
    replaced by a condition, and written in blocks.
    """
    with GcsServer() as server:
        options = server.options | COMMON | MORE
        with contextlib.closing(open_storage(f"gs://{server.bucket}/run", options)) as storage:
            assert isinstance(storage, FsspecStorage)
            storage.create("create", b"x", staging="")
            storage.replace("put", b"x")
            storage.replace("replace", b"x")
            storage.replace("replace", b"xy", if_match=storage.stat("replace").etag)
            with storage.open_write("upload") as writer:
                writer.write(bytes(600_000))
            with storage.open_write("empty"):
                pass
        live = server.store.bucket(server.bucket).live
        for name in (*WAYS, "empty"):
            settings = dict(live[f"run/{name}"].settings)
            settings["predefinedAcl"] = str(settings["predefinedAcl"]).replace("-", "").lower()
            assert settings == SHOWN_MORE, name


def test_auto_takes_gcsfs_for_what_obstore_cannot(caplog: pytest.LogCaptureFixture) -> None:
    """client="auto" is obstore, and gcsfs for what obstore cannot express. The log says so, once."""
    with GcsServer(bucket="said-once") as server, caplog.at_level(logging.INFO):
        assert type(open_on(server, "auto", COMMON)) is gcs.GcsObstoreClient
        root = Uri.parse(f"gs://{server.bucket}/run")
        for name, value in MORE.items():
            options = server.options | {name: value}
            for _ in range(2):
                storage = open_object_store(root, options)
                assert isinstance(storage, FsspecStorage)
                path = storage.data_path
            assert "gcsfs, because obstore cannot be used" in path
            assert name in path or "custom_time" in path
            assert [r.message for r in caplog.records].count(
                f"gs://{server.bucket} goes through {path}"
            ) == 1
            with pytest.raises(UriError, match="obstore"):
                open_on(server, "obstore", {name: value})


CANNOT: list[dict[str, Any]] = [
    {"kms_key_name": KEY},
    {"predefined_acl": "private"},
    {"fixed_key_metadata": {"custom_time": "2026-01-02T03:04:05Z"}},
    {"session_kwargs": {"trust_env": False, "headers": {}}},
    {"requester_pays": True},
    {"token": "cache"},
    {"token": "anon"},
]
CAN: list[dict[str, Any]] = [
    {},
    COMMON,
    {"token": "ya29.x"},
    {"token": "google_default"},
    {"token": {"type": "service_account"}},
    {"token": "anon", "endpoint_url": "http://localhost:1"},
    {"requester_pays": True, "project": "p"},
    {"requester_pays": "p"},
    {"session_kwargs": {"trust_env": True}},
    {"nonsense": 1},
]


@pytest.mark.parametrize("options", CANNOT)
def test_what_obstore_cannot(options: dict[str, Any]) -> None:
    """It says why."""
    assert gcs.unsupported_option(options)


@pytest.mark.parametrize("options", CAN)
def test_what_obstore_can(options: dict[str, Any]) -> None:
    """Nothing else is refused; what is unknown is reported when the client is opened."""
    assert gcs.unsupported_option(options) is None


WRONG: list[dict[str, Any]] = [
    {"tokn": "s3cret"},
    {"token": ""},
    {"token": "browser"},
    {"access": "s3cret"},
    {"endpoint_url": "s3cret"},
    {"endpoint_url": "http://host/s3cret"},
    {"endpoint_url": "http://user:s3cret@host"},
    {"requester_pays": 3},
    {"session_kwargs": "s3cret"},
    {"timeout": "s3cret"},
    {"requests_timeout": 0},
    {"metadata": {"Upper": "s3cret"}},
    {"metadata": {"a": "s3cret\n"}},
    {"metadata": "s3cret"},
    {"fixed_key_metadata": {"content_encoding": "gzip"}},
    {"fixed_key_metadata": {"s3cret": "x"}},
    {"kms_key_name": "s3cret"},
    {"storage_class": "s3cret"},
    {"predefined_acl": "s3cret"},
    {"content_type": "a\r\nX-Evil: s3cret"},
]


@pytest.mark.parametrize("opened", [gcs.open_client, gcs.open_library])
@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_errors_at_once(opened: Any, options: dict[str, Any]) -> None:
    """UriError names the option and what it takes, never its value, before any request."""
    with pytest.raises(UriError) as caught:
        opened(URI, options, Times())
    [name] = options
    assert name in str(caught.value)
    if name != "fixed_key_metadata":
        assert "s3cret" not in str(caught.value)


def test_what_gcsfs_takes_for_its_caches_changes_nothing() -> None:
    """Options of gcsfs' own streams and caches are accepted: dictionaries are shared with pandas."""
    options = {
        "block_size": 1 << 20,
        "consistency": "md5",
        "cache_timeout": 5,
        "version_aware": True,
    }
    assert parse_gcs_options(URI, options) == parse_gcs_options(URI, {})


def test_what_gcsfs_alone_knows_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer gcsfs has options that are not in our table: they reach it, and no other client."""

    class Newer(gcsfs.core.GCSFileSystem):  # type: ignore[misc]
        def __init__(self, *, newer: object = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.newer = newer

    monkeypatch.setattr(gcsfs.core, "GCSFileSystem", Newer)
    options = {"newer": "s3cret", "endpoint_url": "http://localhost:1"}
    assert gcs.unsupported_option(options) == "only gcsfs has the option newer"
    assert gcs.open_library(URI, options, Times()).filesystem().newer == "s3cret"
    with pytest.raises(UriError, match="newest"):
        gcs.open_library(URI, {"newest": 1}, Times())


@pytest.mark.parametrize(
    ("environment", "endpoint", "token"),
    [
        ({}, "https://storage.googleapis.com", None),
        ({"STORAGE_EMULATOR_HOST": "localhost:9"}, "http://localhost:9", "anon"),
        ({"STORAGE_EMULATOR_HOST": "https://host"}, "https://host", None),
        ({"STORAGE_EMULATOR_HOST": "default"}, "https://storage.googleapis.com", None),
        ({"GOOGLE_CLOUD_UNIVERSE_DOMAIN": "example.org"}, "https://storage.example.org", None),
    ],
)
def test_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str],
    endpoint: str,
    token: str | None,
) -> None:
    """The endpoint comes from gcsfs' variables; over plain http nothing found here is ever sent."""
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_UNIVERSE_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = parse_gcs_options(URI, {})
    assert (found.endpoint, found.token) == (endpoint, token)
    assert parse_gcs_options(URI, {"endpoint_url": "http://other:1/"}).endpoint == "http://other:1"


def test_options_are_not_shown() -> None:
    """Neither repr nor the errors of a client hold a token; a pickle does, to keep working."""
    found = parse_gcs_options(URI, {"token": "s3cret"})
    assert "s3cret" not in repr(found)
    assert pickle.loads(pickle.dumps(found)).token == "s3cret"  # noqa: S105 - made up


@pytest.mark.parametrize("name", CLIENTS)
def test_a_whole_request_can_be_bounded(name: str) -> None:
    """timeout= and requests_timeout= of gcsfs bound a request as a whole."""
    with place_of(name) as place:
        place.client.put("run/k", b"x")
        assert place.another(timeout=30).get("run/k")[0] == b"x"
        hasty = place.another(requests_timeout=0.2)
        place.gcs.rules.gate.clear()
        try:
            with pytest.raises(TransientError, match="was silent for too long"):
                hasty.get("run/k")
        finally:
            place.gcs.rules.gate.set()
