"""What the client of Azure sends, and what it makes of answers that no emulator gives."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    IntegrityError,
    MissingDriverError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients import azure, azure_options
from ckptfs.storage.clients.azure import LIMITS
from ckptfs.storage.clients.base import IF_ABSENT, ObjectClient
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.object_store import open_object_store
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

KEY = base64.b64encode(b"k" * 64).decode()
SAS = "sv=2022-11-02&se=2999-01-01T00%3A00%3A00Z&sp=rw&sig=TopSecret%3D"


@dataclass
class Told:
    """One answer to give."""

    status: int = 201
    code: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Heard:
    """One request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Recorder:
    """An HTTP server that writes down what it is asked, and answers what it was given."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.told: list[Told] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                names = {name.lower(): value for name, value in self.headers.items()}
                heard = Heard(self.command, self.path, names, self.rfile.read(size))
                recorder.heard.append(heard)
                told = recorder.told.pop(0) if recorder.told else Told(headers={"ETag": '"0x1"'})
                self.send_response_only(told.status)
                body = told.body
                if told.code:
                    self.send_header("x-ms-error-code", told.code)
                    body = body or f"<Error><Code>{told.code}</Code></Error>".encode()
                headers = {"Date": formatdate(usegmt=True), **told.headers}
                if "Content-Length" not in headers:
                    headers["Content-Length"] = str(len(body))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = answer  # noqa: N815 - http.server calls these

            def log_message(self, *args: Any) -> None:
                """Not on standard error."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/mine"

    def client(
        self,
        login: str = f"AccountName=mine;AccountKey={KEY}",
        uri: str = "az://box/run",
        **options: Any,
    ) -> ObjectClient:
        """A client that talks to it."""
        text = f"BlobEndpoint={self.endpoint};{login}"
        return azure.open_client(
            Uri.parse(uri), {"connection_string": text, **options}, Times(5, 5)
        )


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A recorder that listens."""
    found = Recorder()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


# -- what is sent ----------------------------------------------------------------------


def _everything(client: ObjectClient) -> None:
    client.put("run/k", b"data", IF_ABSENT)
    upload = client.begin_upload("run/k", part_bytes=4)
    upload.put_part(0, b"data")
    upload.complete()
    upload.abort()


def test_every_put_and_commit_carries_what_was_asked_for(recorder: Recorder) -> None:
    """What obstore cannot send goes through adlfs, with every object, whole or in blocks."""
    options = {
        "connection_string": f"BlobEndpoint={recorder.endpoint};AccountName=mine;AccountKey={KEY}",
        "encryption_scope": "vault",
        "standard_blob_tier": "cold",
        "tags": {"team": "a b"},
        "metadata": {"owner": "me"},
        "content_settings": {"cache_control": "no-store"},
        "validate_content": True,
    }
    storage = open_object_store(Uri.parse("az://box/run"), options)
    assert isinstance(storage, FsspecStorage)
    assert "encryption_scope" in storage.data_path
    storage.replace("k", b"data")
    with storage.open_write("k") as writer:
        writer.write(b"data")
    put, block, commit = recorder.heard
    assert ["comp=" in heard.path for heard in recorder.heard] == [False, True, True]
    for heard in (put, commit):
        assert heard.headers["x-ms-access-tier"] == "Cold"
        assert heard.headers["x-ms-tags"] in ("team=a+b", "team=a%20b")
        assert heard.headers["x-ms-meta-owner"] == "me"
        assert heard.headers["x-ms-blob-cache-control"] == "no-store"
    for heard in recorder.heard:
        assert heard.headers["x-ms-encryption-scope"] == "vault"
    for heard in (put, block):
        assert heard.headers["content-md5"] == "jXd/OF09/siBXSD3SWAm3A=="


def test_the_customers_key_needs_obstore() -> None:
    """adlfs cannot read with it: refused before anything is written that could not be loaded."""
    key = base64.b64encode(bytes(32)).decode()
    options = {"account_name": "mine", "account_key": KEY, "cpk": key, "client": "adlfs"}
    with pytest.raises(UriError, match="cpk goes through obstore alone"):
        open_object_store(Uri.parse("az://box/run"), options)


def test_the_customers_key_goes_with_reading_too(recorder: Recorder) -> None:
    """cpk: on puts, blocks, commits, reads and heads."""
    key = base64.b64encode(bytes(range(32))).decode()
    client = recorder.client(cpk=key)
    seen = {"ETag": '"0x1"', "Last-Modified": formatdate(usegmt=True)}
    part = seen | {"Content-Range": "bytes 0-0/1"}
    _everything(client)
    recorder.told += [Told(200, body=b"1", headers=seen), Told(206, body=b"1", headers=part)]
    recorder.told += [Told(200, headers=seen)]
    client.get("run/k")
    client.get_range("run/k", 0, memoryview(bytearray(1)), None)
    client.head("run/k")
    assert len(recorder.heard) == 6
    for heard in recorder.heard:
        assert heard.headers["x-ms-encryption-key"] == key
        assert heard.headers["x-ms-encryption-algorithm"] == "AES256"


class Identity:
    """Gives no token, as azure.identity does."""

    def get_token(self, *scopes: str, **options: Any) -> None:
        """Fail as an identity that has no way to log in."""
        raise ClientAuthenticationError("Attempted credentials: AzureCli: please run 'az login'")


class AsyncIdentity(Identity):
    """The same, as adlfs wants them."""

    async def get_token(self, *scopes: str, **options: Any) -> None:  # type: ignore[override]
        """Fail as above."""
        super().get_token(*scopes)


@pytest.mark.parametrize("identity", [Identity(), AsyncIdentity()])
def test_an_identity_without_a_token(identity: Identity) -> None:
    """No token is a CredentialsError that says why, before anything is sent."""
    options = {"account_name": "nobody", "credential": identity}
    client = azure.open_client(Uri.parse("az://box/run"), options, Times(2, 2))
    with pytest.raises(CredentialsError, match="az login"):
        client.put("run/k", b"x", IF_ABSENT)


def test_obstore_alone_has_no_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without azure-identity a login by identity is a missing driver; a key needs none."""
    monkeypatch.setattr(azure_options, "find_spec", lambda name: None)
    with pytest.raises(MissingDriverError, match="azure-identity"):
        azure.open_client(Uri.parse("az://box/run"), {"account_name": "mine"}, Times())
    options = {"account_name": "mine", "account_key": KEY}
    azure.open_client(Uri.parse("az://box/run"), options, Times())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cpk": "x"}, None),
        ({"encryption_scope": "s"}, "encryption_scope"),
        ({"validate_content": True}, "validate_content"),
        ({"validate_content": False, "tags": {"a": "b"}}, None),
        ({}, None),
    ],
)
def test_what_obstore_cannot_do(options: dict[str, Any], why: str | None) -> None:
    """What it lacks is said by the option's name, so that auto takes the other client."""
    told = azure.unsupported_option(options)
    assert told is None if why is None else why in (told or "")


def test_obstore_takes_certificates_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REQUESTS_CA_BUNDLE counts for both clients; a directory of certificates for one."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path))
    assert str(tmp_path) in (azure.unsupported_option({}) or "")
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(b"")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    assert azure.unsupported_option({}) is None


def test_a_token_goes_over_https_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over plain http a token would be everybody's: refused before anything is sent."""
    monkeypatch.setattr(azure_options, "_endpoint", lambda *given: "http://127.0.0.1:1")
    options = {"account_name": "mine", "credential": Identity()}
    with pytest.raises(UriError, match="not https"):
        azure.open_client(Uri.parse("az://box/run"), options, Times())


def test_limits() -> None:
    """The published limits of block blobs: 190.7 TiB in 50,000 blocks."""
    assert LIMITS.max_parts * LIMITS.max_part_bytes == LIMITS.max_object_bytes
    assert 190 << 40 < LIMITS.max_object_bytes < 191 << 40


# -- what is made of answers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    [
        (409, "BlobAlreadyExists", AlreadyExistsError, "untouched"),
        (412, "ConditionNotMet", AlreadyExistsError, "untouched"),
        (403, "UnauthorizedBlobOverwrite", AlreadyExistsError, "untouched"),
        (412, "LeaseIdMissing", AccessError, "lease"),
        (409, "SnapshotsPresent", AccessError, "snapshots"),
        (409, "BlobImmutableDueToPolicy", AccessError, "immutability policy"),
        (409, "InvalidBlobType", StorageError, "append blob or a page blob"),
        (409, "ResourceTypeMismatch", StorageError, "directory"),
        (409, "BlobArchived", StorageError, "archive"),
        (404, "ContainerNotFound", NotFoundError, "no container 'box'"),
        (409, "ContainerBeingDeleted", NotFoundError, "no container 'box'"),
        (403, "AuthenticationFailed", CredentialsError, "does not accept"),
        (403, "AuthorizationPermissionMismatch", AccessError, "c and w"),
        (403, "AuthorizationFailure", AccessError, "firewall"),
        (401, "NoAuthenticationInformation", CredentialsError, "anon=True"),
        (409, "PublicAccessNotPermitted", CredentialsError, "anonymous"),
        (400, "Md5Mismatch", TransientError, "damaged"),
        (400, "UnsupportedHeader", UnsupportedError, "does not know"),
        (503, "ServerBusy", TransientError, "slow down"),
        (429, "TooManyRequests", TransientError, "slow down"),
        (500, "InternalError", AnswerLostError, "may have happened"),
        (500, "OperationTimedOut", AnswerLostError, "may have happened"),
        (502, "", AnswerLostError, "may have happened"),
        (413, "RequestBodyTooLarge", StorageError, "413"),
    ],
)
def test_refusals_of_a_conditional_put(
    recorder: Recorder, status: int, code: str, kind: type[CkptfsError], told: str
) -> None:
    """Each code of the service is the type that its handler needs, in one sentence, tried once."""
    recorder.told = [Told(status, code)]
    with pytest.raises(CkptfsError) as caught:
        recorder.client().put("run/k", b"x", IF_ABSENT)
    assert type(caught.value) is kind
    assert told in str(caught.value)
    assert "az://box/run/k" in str(caught.value)
    assert len(recorder.heard) == 1
    assert caught.value.__context__ is None


def test_the_container_is_named_and_not_the_account(recorder: Recorder) -> None:
    """In abfss://container@account.dfs... the authority is the account."""
    client = recorder.client(uri="abfss://box@mine.dfs.core.windows.net/run")
    recorder.told = [Told(404, "ContainerNotFound")]
    with pytest.raises(NotFoundError, match=r"no container 'box' .* \[uri abfss://box@mine"):
        client.get("run/k")
    assert recorder.heard[0].path == "/mine/box/run/k"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "BlobNotFound", NotFoundError),
        (412, "ConditionNotMet", StaleError),
        (416, "InvalidRange", IntegrityError),
        (500, "InternalError", TransientError),
        (503, "ServerBusy", TransientError),
        (409, "BlobUsesCustomerSpecifiedEncryption", AccessError),
    ],
)
def test_refusals_of_a_read(
    recorder: Recorder, status: int, code: str, kind: type[CkptfsError]
) -> None:
    """Reading changes nothing, so nothing is ever in doubt."""
    recorder.told = [Told(status, code)]
    with pytest.raises(CkptfsError) as caught:
        recorder.client().get_range("run/k", 0, memoryview(bytearray(4)), '"0x1"')
    assert type(caught.value) is kind
    assert recorder.heard[0].headers["if-match"] == '"0x1"'


def test_an_ended_signature_is_told(recorder: Recorder) -> None:
    """Azure answers AuthenticationFailed; the SAS's own end shows why."""
    ended = "AccountName=mine;SharedAccessSignature=" + SAS.replace("2999", "2021")
    recorder.told = [Told(403, "AuthenticationFailed")]
    with pytest.raises(CredentialsError, match="expired") as caught:
        recorder.client(ended).put("run/k", b"x")
    assert "TopSecret" not in repr(caught.value) + str(caught.value)


def test_a_directory_is_no_blob(recorder: Recorder) -> None:
    """Hierarchical namespace: its directories are not found as keys."""
    client = recorder.client()
    recorder.told = [Told(200, headers={"x-ms-resource-type": "directory"})]
    with pytest.raises(NotFoundError):
        client.head("run/d")


def test_silence_ends(recorder: Recorder) -> None:
    """A server that never answers is given up after request_timeout_s, as a lost answer."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = f"BlobEndpoint=http://127.0.0.1:{silent.getsockname()[1]}/mine"
        client = azure.open_client(
            Uri.parse("az://box/run"), {"connection_string": text}, Times(2, 0.2)
        )
        with pytest.raises(AnswerLostError, match="silent"):
            client.put("run/k", b"x")
        with pytest.raises(TransientError, match="silent"):
            client.get("run/k")
