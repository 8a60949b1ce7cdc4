"""What the server behind s3:// is called before anything was asked of it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptfs.storage.clients.s3_options import endpoint_name, parse_s3_options
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

pytest.importorskip("botocore")

CONFIG = """
[default]
region = eu-west-1
[profile one]
endpoint_url = http://user:word@127.0.0.1:1/path
[profile two]
endpoint_url = http://127.0.0.1:2
region = us-west-2
[profile three]
endpoint_url = http://127.0.0.1:2
services = lab
[services lab]
s3 =
    endpoint_url = http://127.0.0.1:3
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles, and no variable of the user of the tests."""
    (tmp_path / "config").write_text(CONFIG)
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "PROFILE", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.parametrize(
    ("options", "variables", "name"),
    [
        ({}, {}, "S3 in eu-west-1"),
        ({"client_kwargs": {"region_name": "ap-1"}}, {}, "S3 in ap-1"),
        ({"config_kwargs": {"region_name": "ap-1"}}, {}, "S3 in ap-1"),
        ({"profile": "one"}, {}, "http://127.0.0.1:1"),
        ({"profile": "two"}, {}, "http://127.0.0.1:2"),
        ({"profile": "three"}, {}, "http://127.0.0.1:3"),
        ({}, {"PROFILE": "two"}, "http://127.0.0.1:2"),
        ({"profile": "three"}, {"ENDPOINT_URL": "http://a"}, "http://a"),
        ({}, {"ENDPOINT_URL": "http://a", "ENDPOINT_URL_S3": "http://b"}, "http://b"),
        (
            {"profile": "two", "endpoint_url": "http://c:5/x"},
            {"ENDPOINT_URL": "h://a"},
            "http://c:5",
        ),
        ({"profile": "two"}, {"IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, "S3 in us-west-2"),
        ({"profile": "none"}, {}, "S3"),
    ],
)
def test_the_server_is_found_where_botocore_finds_it(
    options: Mapping[str, Any],
    variables: Mapping[str, str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options, then variables, then the profile's files: in the order in which they count."""
    for variable, value in variables.items():
        monkeypatch.setenv(f"AWS_{variable}", value)
    assert endpoint_name(parse_s3_options(Uri.parse("s3://bucket/run"), options)) == name


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_servers_of_two_profiles_are_two(client: str) -> None:
    """What was seen of the bucket of one server is not believed of the other's, which has its name;
    for another storage on the same server it holds, in a pickle too. Errors name the server.
    """
    pytest.importorskip(client)
    one, again, two = (
        open_storage("s3://bucket/run", {"profile": name, "client": client})
        for name in ("one", "one", "two")
    )
    if client == "s3fs":
        assert isinstance(one, FsspecStorage)
        assert isinstance(again, FsspecStorage)
        assert isinstance(two, FsspecStorage)
        assert one._bucket_id()[2:] == ("http://127.0.0.1:1", "bucket")
        assert two._bucket_id()[2:] == ("http://127.0.0.1:2", "bucket")
        assert (
            one._bucket_id() == again._bucket_id() == pickle.loads(pickle.dumps(one))._bucket_id()
        )
        return
    for storage, endpoint in ((one, "http://127.0.0.1:1"), (two, "http://127.0.0.1:2")):
        assert isinstance(storage, ObjectStorage)
        assert storage.client.endpoint == storage.retrier.endpoint == endpoint
    assert isinstance(one, ObjectStorage)
    assert isinstance(two, ObjectStorage)
    assert one._bucket_state is not two._bucket_state
    for same in (again, pickle.loads(pickle.dumps(one))):
        assert isinstance(same, ObjectStorage)
        assert same._bucket_state is one._bucket_state
