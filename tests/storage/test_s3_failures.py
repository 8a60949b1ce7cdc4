"""The table of failures: every answer and every silence has a type, and no text holds a secret."""

from __future__ import annotations

import errno
import pickle
import socket
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import AnswerLostError, CkptfsError, StorageError, TransientError
from ckptfs.storage.clients.http_errors import (
    CODES,
    ErrorResponse,
    Reason,
    RequestContext,
    clean,
    connection_reason,
    no_response_error,
    reason_error,
    response_error,
)
from ckptfs.storage.clients.s3 import S3
from ckptfs.uri import Uri

READ = RequestContext(S3, "get", Uri.parse("s3://bucket/run/k"), "https://s3")
CHANGE = RequestContext(S3, "put", Uri.parse("s3://bucket/run/k"), "https://s3", changes=True)
# Not all digits: those after a colon are a port.
SECRETS = st.text("abcdefghijklmnopqrstuvwxyz0123456789+/", min_size=12, max_size=40).map(
    lambda text: f"w{text}"
)


@given(
    status=st.integers(0, 599),
    code=st.sampled_from([*CODES, "", "SomethingNew"]),
    message=st.text(max_size=300),
    changes=st.booleans(),
)
def test_every_answer_has_a_type_and_one_line(
    status: int, code: str, message: str, changes: bool
) -> None:
    """Whatever a server says becomes a typed, picklable error of one line with the URI in it."""
    found = response_error(CHANGE if changes else READ, ErrorResponse(status, code, message))
    assert isinstance(found, CkptfsError)
    assert "\n" not in str(found)
    assert "s3://bucket/run/k" in str(found)
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    """No reason is without a sentence; none leaves a hole in it."""
    for asked in (READ, CHANGE):
        text = str(reason_error(asked, reason))
        assert "{" not in text.replace("{'region_name': ...}", "")
        assert "failed: " in text or "may have happened: " in text


def test_only_what_was_sent_is_in_doubt() -> None:
    """A change is in doubt after a failure of the server or of the connection, and only then."""
    doubtful = {
        reason for reason in Reason if isinstance(reason_error(CHANGE, reason), AnswerLostError)
    }
    assert doubtful == {Reason.SERVER, Reason.SILENT, Reason.BROKEN}
    assert all(isinstance(reason_error(READ, reason), TransientError) for reason in doubtful)


class ClientConnectorError(OSError):
    """As aiohttp's."""


class ClientOSError(OSError):
    """As aiohttp's: the connection broke after it stood."""


class EndpointConnectionError(Exception):
    """As botocore's: keeps its cause in ``kwargs``, for connections that fail and that break."""

    def __init__(self, error: Exception) -> None:
        super().__init__("Could not connect")
        self.kwargs = {"error": error}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EndpointConnectionError(ClientConnectorError(errno.ECONNREFUSED, "x")), Reason.REFUSED),
        (EndpointConnectionError(ClientOSError(errno.ECONNRESET, "x")), Reason.BROKEN),
        (EndpointConnectionError(socket.gaierror(-2, "x")), Reason.NO_HOST),
        (EndpointConnectionError(ssl.SSLCertVerificationError(1, "x")), Reason.CERTIFICATE),
        (TimeoutError(), Reason.SILENT),
        (ConnectionResetError(), Reason.BROKEN),
        (RuntimeError("what is this"), Reason.BROKEN),
    ],
    ids=["refused", "broke", "name", "certificate", "silent", "reset", "unknown"],
)
def test_silences(error: Exception, reason: Reason) -> None:
    """A connection that did not come about is distinguished from one that broke, through what libraries wrap."""
    assert connection_reason(error) is reason
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = error
    assert connection_reason(wrapped) is reason


def test_what_is_not_known_is_in_doubt() -> None:
    """An unforeseen exception leaves a change in doubt rather than undone."""
    assert type(no_response_error(CHANGE, RuntimeError("?"))) is AnswerLostError


@given(secret=SECRETS)
@pytest.mark.parametrize(
    "pattern",
    [
        "X-Amz-Signature={}",
        "x-amz-security-token: {}",
        "https://host/b?sig={}&x=1",
        "Authorization: Bearer {}",
        "https://user:{}@host/b",
        "AccountKey={}",
        "password: {}",
        '"access_token": "{}"',
        "SharedAccessSignature={}",
    ],
)
def test_secrets_do_not_pass(pattern: str, secret: str) -> None:
    """Whatever a server quotes of a request, what looks like a secret is masked."""
    text = pattern.format(secret)
    assert secret not in clean(f"it said {text} and more")
    assert secret not in str(
        response_error(READ, ErrorResponse(400, "Strange", f"it said {text} and more"))
    )


def test_long_words_are_cut() -> None:
    """An HTML page of a proxy does not fill the log."""
    found = response_error(READ, ErrorResponse(400, "", "<html>" + "x" * 5000))
    assert isinstance(found, StorageError)
    assert len(str(found)) < 500
