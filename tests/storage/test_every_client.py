"""A status means the same through every client of every object store: type, sentence and hint are of one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    NotFoundError,
    TransientError,
)
from ckptfs.storage.base import Storage
from ckptfs.storage.clients.base import IF_ABSENT
from ckptfs.storage.registry import open_storage
from tests.storage.s3_scripted import Answer, Scripted, error, options_for, usual

for _library in ("s3fs", "gcsfs", "adlfs", "obstore"):
    pytest.importorskip(_library)

# The emulator's, which Microsoft publishes.
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
TOKEN = "ya29.s3cr3t-t0k3n"  # noqa: S105 - made up, to be looked for in messages


def xml(status: int, code: str = "", message: str = "as the server says") -> Answer:
    """As S3 has it, and the XML API of GCS."""
    return Answer(status, error(code, message) if code else b"")


def azure(status: int, code: str = "", message: str = "as the server says") -> Answer:
    """As Azure has it."""
    headers = {"Content-Type": "application/xml"} | ({"x-ms-error-code": code} if code else {})
    return Answer(status, error(code, message) if code else b"", headers)


def google(status: int, reason: str = "", message: str = "") -> Answer:
    """As the JSON API of GCS has it."""
    told = {"code": status, "message": message, "errors": [{"reason": reason}]}
    return Answer(status, json.dumps({"error": told}).encode() if reason else b"")


@dataclass(frozen=True)
class Client:
    """One library for one store. answers: how its store spells an error."""

    protocol: str
    options: Callable[[Scripted], Mapping[str, Any]]
    answer: Callable[..., Answer]
    codes: int  # the column of ``ROWS``
    needs: str  # what the hint of a refused write names


def on_s3(server: Scripted) -> dict[str, Any]:
    """One try for each request."""
    config = {"s3": {"addressing_style": "path"}, "retries": {"max_attempts": 0}}
    return options_for(server, config_kwargs=config)


def on_gcs(server: Scripted) -> dict[str, Any]:
    """With a token of the user's own."""
    return {"token": TOKEN, "endpoint_url": server.endpoint, "project": "p"}


def on_azure(server: Scripted) -> dict[str, Any]:
    """With the emulator's key."""
    text = f"BlobEndpoint={server.endpoint}/acc;AccountName=acc;AccountKey={ACCOUNT_KEY}"
    return {"connection_string": text}


CLIENTS = {
    "s3 by obstore": Client("s3", lambda s: on_s3(s) | {"retry_s": 0}, xml, 0, "s3:PutObject"),
    "s3 by s3fs": Client("s3", lambda s: on_s3(s) | {"client": "s3fs"}, xml, 0, "s3:PutObject"),
    # Else s3fs begins a read with a HEAD; its answer has no code.
    "fsspec+s3": Client(
        "fsspec+s3", lambda s: on_s3(s) | {"max_concurrency": 1}, xml, 0, "s3:PutObject"
    ),
    "gcs by obstore": Client(
        "gs", lambda s: on_gcs(s) | {"retry_s": 0}, xml, 1, "storage.objects.create"
    ),
    "gcs by gcsfs": Client(
        "gs", lambda s: on_gcs(s) | {"client": "gcsfs"}, google, 2, "storage.objects.create"
    ),
    "azure by obstore": Client(
        "az", lambda s: on_azure(s) | {"retry_s": 0}, azure, 3, "c and w (create, write)"
    ),
    "azure by adlfs": Client(
        "az", lambda s: on_azure(s) | {"client": "adlfs"}, azure, 3, "c and w (create, write)"
    ),
    "fsspec+abfs": Client("fsspec+abfs", on_azure, azure, 3, "c and w (create, write)"),
}


class _NoWaiting:
    """gcsfs' own retries, without their pauses of half a minute."""

    def __getattr__(self, name: str) -> Any:
        import asyncio

        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    """One server for all."""
    with Scripted() as found:
        yield found


@pytest.fixture(scope="module", params=CLIENTS)
def opened(request: pytest.FixtureRequest, server: Scripted) -> Iterator[tuple[Client, Storage]]:
    """A storage by each client."""
    import gcsfs.retry  # type: ignore[import-untyped]
    from azure.storage.blob._shared.policies_async import ExponentialRetry

    client = CLIENTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gcsfs.retry, "asyncio", _NoWaiting())
        # As for the pauses of the Azure SDK, 15 s and three times as long from one to the next.
        patch.setattr(ExponentialRetry, "get_backoff_time", lambda policy, settings: 0.0)
        storage = open_storage(f"{client.protocol}://bucket/run", client.options(server))
        inner = getattr(storage, "_client", None)
        if inner is not None:
            inner.fs.retries = 1  # of s3fs
        yield client, storage
        server.answer = usual
        storage.close()


def read(storage: Storage) -> object:
    """One of the requests that change nothing."""
    return storage.read("k")


def listed(storage: Storage) -> object:
    """Another."""
    return storage.list("")


def replace(storage: Storage) -> object:
    """A change."""
    return storage.replace("k", b"x")


@dataclass(frozen=True)
class Row:
    """One thing that goes wrong: how each store answers, and what comes of it."""

    answers: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
    kind: type[CkptfsError]
    sentence: str
    of_change: type[CkptfsError] | None = None
    hint: str = ""


ROWS = {
    "401, and nothing else": Row(
        ((401,), (401,), (401,), (401,)), CredentialsError, "does not accept these credentials"
    ),
    "wrong credentials": Row(
        (
            (403, "InvalidAccessKeyId"),
            (401, "InvalidSecurity"),
            (401, "authError"),
            (403, "AuthenticationFailed"),
        ),
        CredentialsError,
        "does not accept these credentials",
    ),
    "403, and nothing else": Row(
        ((403,), (403,), (403,), (403,)), AccessError, "these credentials may not"
    ),
    "a permission is missing": Row(
        (
            (403, "AccessDenied"),
            (403, "AccessDenied"),
            (403, "forbidden"),
            (403, "AuthorizationPermissionMismatch"),
        ),
        AccessError,
        "these credentials may not",
    ),
    "429, and nothing else": Row(
        ((429,), (429,), (429,), (429,)), TransientError, "asks to slow down"
    ),
    "throttled": Row(
        (
            (503, "SlowDown"),
            (503, "SlowDown"),
            (429, "rateLimitExceeded"),
            (503, "ServerBusy"),
        ),
        TransientError,
        "asks to slow down",
    ),
    "the server fails": Row(
        (
            (500, "InternalError"),
            (500, "InternalError"),
            (500, "backendError"),
            (500, "InternalError"),
        ),
        TransientError,
        "failed with 500",
        of_change=AnswerLostError,
    ),
    "a gateway fails": Row(
        ((502,), (502,), (502,), (502,)),
        TransientError,
        "failed with 502",
        of_change=AnswerLostError,
    ),
    "no bucket": Row(
        (
            (404, "NoSuchBucket"),
            (404, "NoSuchBucket"),
            (404, "notFound"),
            (404, "ContainerNotFound"),
        ),
        NotFoundError,
        "'bucket'",
        hint="ckptfs never creates one",
    ),
}
NOT_ON_READ = ("the server fails", "a gateway fails")


@pytest.mark.parametrize("row", ROWS)
def test_an_answer_means_the_same(
    opened: tuple[Client, Storage], server: Scripted, row: str
) -> None:
    """One type and one sentence for each, with what the store calls a permission in the hint; one line, and
    nothing of the credentials or of the server's page in it.
    """
    client, storage = opened
    case = ROWS[row]
    answer = client.answer(*case.answers[client.codes])
    server.answer = lambda request: answer
    # gcsfs cannot tell a missing bucket from a missing object, but where it lists.
    doings = [listed] if row == "no bucket" else [read, listed, replace]
    for doing in doings:
        with pytest.raises(CkptfsError) as caught:
            doing(storage)
        text = str(caught.value)
        wanted = case.of_change if doing is replace and case.of_change else case.kind
        assert type(caught.value) is wanted, text
        assert case.sentence in text
        assert case.hint in text
        assert "\n" not in text
        assert "<Error>" not in text
        assert TOKEN not in text
        if wanted is AccessError and doing is replace:
            assert f"allow {client.needs}" in text


def test_a_missing_object(opened: tuple[Client, Storage], server: Scripted) -> None:
    """404 of an object is NotFoundError, and not of the bucket."""
    client, storage = opened
    code = {0: "NoSuchKey", 1: "NoSuchKey", 2: "notFound", 3: "BlobNotFound"}[client.codes]
    missing = client.answer(404, code)
    there = Answer(200, b"", {"Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT", "ETag": '"e"'})
    # What asks for the container itself finds it.
    server.answer = lambda request: missing if "/run" in request.path else there
    with pytest.raises(NotFoundError) as caught:
        storage.read("k")
    assert "get failed: no such object" in str(caught.value)
    assert not caught.value.of_bucket


def test_an_object_that_exists(opened: tuple[Client, Storage], server: Scripted) -> None:
    """412 of a create is AlreadyExistsError, whatever the library makes of it."""
    client, storage = opened
    inner: Any = getattr(storage, "client", None)
    code = {0: "PreconditionFailed", 1: "PreconditionFailed", 2: "conditionNotMet"}.get(
        client.codes, "BlobAlreadyExists"
    )
    answer = client.answer(409 if client.answer is azure else 412, code)
    server.answer = lambda request: answer
    with pytest.raises(AlreadyExistsError) as caught:
        (storage._create("k", b"x") if inner is None else inner.put("run/k", b"x", IF_ABSENT))  # type: ignore[attr-defined]
    assert "the condition did not hold" in str(caught.value)
