"""GCS credentials: found, renewed ahead of time and when refused, reported when they cannot be."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ckptfs.errors import CredentialsError, TransientError
from ckptfs.storage.clients.gcs import is_raw
from ckptfs.storage.object_store import open_object_store
from ckptfs.uri import Uri
from tests.lab.gcs_server import GcsServer, Why, service_account
from tests.servers.gcs_lab import CLIENTS, Place, place_of


@pytest.fixture(scope="module")
def private_key() -> str:
    """The key of a service account that exists nowhere."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


@pytest.fixture(params=CLIENTS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A server that wants a token, and the client's library."""
    with place_of(request.param) as found:
        found.gcs.rules.token = "nobody has it yet"  # noqa: S105 - made up
        yield found


def key_file(gcs: GcsServer, private_key: str, folder: Path) -> Path:
    """A key file with tokens that the server issues."""
    path = folder / "key.json"
    path.write_text(service_account(f"{gcs.endpoint}/token", private_key))
    return path


@pytest.mark.parametrize("way", ["path", "content", "environment"])
def test_a_key_file_is_used(
    place: Place,
    private_key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """By its path, by its content, or found by google-auth; one token serves many requests."""
    path = key_file(place.gcs, private_key, tmp_path)
    token: Any = str(path)
    if way == "content":
        token = json.loads(path.read_text())
    elif way == "environment":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        token = "google_default"  # noqa: S105 - a name
    client = place.another(token=token)
    for number in range(5):
        client.put(f"run/{number}", b"x")
    assert pickle.loads(pickle.dumps(client)).get("run/0")[0] == b"x"
    assert place.wants("token") == 2  # one per client: the copy asks for its own


def test_a_token_is_renewed_before_it_ends(place: Place, private_key: str, tmp_path: Path) -> None:
    """A token with less than 3:45 left is replaced first: no request is ever refused."""
    place.gcs.rules.token_lifetime_s = 200
    client = place.another(token=str(key_file(place.gcs, private_key, tmp_path)))
    for number in range(4):
        client.put(f"run/{number}", b"x")
    assert place.wants("token") == 4
    assert place.wants("storage.objects.create") == 4


def test_a_token_that_google_would_not_replace_yet_is_used(
    place: Place, private_key: str, tmp_path: Path
) -> None:
    """Metadata servers hand out the same token until four minutes before its end: a client that asks earlier asks
    for every request, and gets nothing.
    """
    place.gcs.rules.token_lifetime_s = 240
    client = place.another(token=str(key_file(place.gcs, private_key, tmp_path)))
    for number in range(4):
        client.put(f"run/{number}", b"x")
    assert place.wants("token") == 1


def test_a_refused_token_is_renewed_once(place: Place, private_key: str, tmp_path: Path) -> None:
    """A revoked token is TransientError, and the next try has another; a fresh one that is refused
    too is CredentialsError: nothing goes round in circles.
    """
    client = place.another(token=str(key_file(place.gcs, private_key, tmp_path)))
    client.put("run/k", b"x")
    place.gcs.rules.token = "revoked"  # noqa: S105 - made up
    with pytest.raises(TransientError, match="renewed now"):
        client.put("run/k", b"y")
    client.put("run/k", b"y")
    place.gcs.rules.token = "revoked again"  # noqa: S105 - made up
    with contextlib.suppress(TransientError):
        client.get("run/k")
    place.gcs.rules.token = "revoked for good"  # noqa: S105 - made up
    with pytest.raises(CredentialsError):
        client.get("run/k")


def test_a_token_ends_in_the_middle_of_an_upload(private_key: str, tmp_path: Path) -> None:
    """Through the storage, with its retries, a token that is revoked between two parts goes unnoticed."""
    with GcsServer() as gcs:
        gcs.rules.token = "nobody has it yet"  # noqa: S105 - made up
        options = gcs.options | {
            "client": "obstore",
            "part_size_bytes": 5 << 20,
            "token": str(key_file(gcs, private_key, tmp_path)),
        }
        root = Uri.parse(f"gs://{gcs.bucket}/run")
        with contextlib.closing(open_object_store(root, options)) as storage:
            with storage.open_write("large") as writer:
                for number in range(3):
                    writer.write(bytes([number]) * (5 << 20))
                    gcs.rules.token = f"revoked {number}"
                writer.write(b"end")
            with storage.open_read("large") as reader:
                gcs.rules.token = "revoked at last"  # noqa: S105 - made up
                assert reader.size_bytes == (15 << 20) + 3
                end = bytearray(4)
                reader.read_into(reader.size_bytes - 4, memoryview(end))
        assert end == b"\x02end"


def test_credentials_that_cannot_be_renewed(place: Place, private_key: str, tmp_path: Path) -> None:
    """The token server's refusal is CredentialsError, without the key in it."""
    client = place.another(token=str(key_file(place.gcs, private_key, tmp_path)))
    place.gcs.rules.fail(Why.TOKEN, 100, permission="token")
    with pytest.raises(CredentialsError) as caught:
        client.put("run/k", b"x")
    assert "PRIVATE" not in str(caught.value)
    assert place.wants("storage.objects.create") == 0


def test_the_token_server_is_away(private_key: str, tmp_path: Path) -> None:
    """No answer where tokens are issued is TransientError that says so (gcsfs client)."""
    with GcsServer() as gone:
        path = key_file(gone, private_key, tmp_path)
    with (
        place_of("obstore") as place,
        pytest.raises(TransientError, match="issues Google's tokens"),
    ):
        place.another(token=str(path)).put("run/k", b"x")


def test_a_token_is_told_from_a_file(tmp_path: Path) -> None:
    """Names, files, and what looks like one are no tokens."""
    (tmp_path / "key").write_text("{}")
    names: list[Any] = ["anon", "cache", "cloud", "google_default"]
    for token in [*names, str(tmp_path / "key"), "~/k", "x.json", None, {}]:
        assert not is_raw(token)
    assert is_raw("ya29.token")
