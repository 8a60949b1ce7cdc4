"""Whatever a user writes is read in one way, or refused with one clear error."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from ckptfs.errors import UriError
from ckptfs.uri import Uri, check_key, mask_credentials, options_of
from tests.strategies import components, keys, paths, secret_uris, uris


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/run", "file:///data/run"),
        ("/data//run/", "file:///data/run"),
        ("/data/./x/../run", "file:///data/run"),
        ("//data/run", "file:///data/run"),
        ("/", "file:///"),
        ("file:///data/run", "file:///data/run"),
        ("FILE:///data/run", "file:///data/run"),
        ("file://localhost/data/run", "file:///data/run"),
        ("local:///data/run", "file:///data/run"),
        ("file:///data/a%20b?c#d", "file:///data/a%20b?c#d"),
        ("ckptfs+file:///data/run", "file:///data/run"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket//run/./a/", "s3://bucket/run/a"),
        ("ckptfs+s3://bucket/run", "s3://bucket/run"),
        ("abfs://box@account.dfs/run", "abfs://box@account.dfs/run"),
        ("hdfs:///run", "hdfs:///run"),
        ("hdfs://host:8020/run", "hdfs://host:8020/run"),
        ("memory://name/run?shape=object", "memory://name/run?shape=object"),
        ("faults+nodes+file:///x/@node", "faults+nodes+file:///x/@node"),
        ("s3://arn:aws:s3:us:12:accesspoint/foo/k", "s3://arn:aws:s3:us:12:accesspoint/foo/k"),
    ],
)
def test_accepted_spellings(text: str, expected: str) -> None:
    """Each accepted spelling has one bare form, which reads back as the same value."""
    uri = Uri.parse(text)
    assert str(uri) == expected
    assert Uri.parse(expected) == uri


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("file:/x", "one slash"),
        ("s3:/bucket/x", "pathlib"),
        ("file:x", "file://"),
        ("s3:bucket", "s3://"),
        ("file://host/x", "three slashes"),
        ("file://", "three slashes"),
        ("s3://", "bucket"),
        ("s3:///x", "bucket"),
        ("hdfs://", "bucket, host"),
        ("a\0b", "control"),
        ("s3://b/a\nb", "control"),
        ("out/s3://b/x", "scheme"),
        ("simplecache::s3://b/x", "chained"),
        (" s3://b/x", "scheme"),
        ("s3://b/../x", "'..'"),
        ("~nobody-of-this-name/x", "home"),
        ("ckptfs+/x", "scheme"),
        ("ckptfs+x", "scheme"),
        ("s3://AKIA:a/b@bucket/x", "percent-encode"),
        ("\udc80", "UTF-8"),
        ("/data/s3://b", "scheme"),
    ],
)
def test_refused_spellings(text: str, told: str) -> None:
    """What cannot mean anything is one UriError that says what to write instead."""
    with pytest.raises(UriError) as caught:
        Uri.parse(text)
    assert told in str(caught.value)


def test_paths_of_all_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """~, relative, PathLike, bytes and UPath are the absolute path that they name."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    assert Uri.parse("~/run").local_path == "/home/somebody/run"
    assert Uri.parse("run/a").local_path == f"{here}/run/a"
    assert Uri.parse("../run").local_path == f"{os.path.dirname(here)}/run"
    assert Uri.parse(Path("run")).local_path == f"{here}/run"
    assert Uri.parse(os.fsencode("/x/y")).local_path == "/x/y"  # type: ignore[arg-type]
    assert Uri.parse(UPath("/x/y")).local_path == "/x/y"
    assert str(Uri.parse(UPath("memory://name/run"))) == "memory://name/run"
    assert options_of(UPath("memory://name/run", a=1)) == {"a": 1}
    assert options_of("s3://b") == {}
    with pytest.raises(UriError):
        Uri.parse(5)  # type: ignore[arg-type]


def test_a_path_object_of_a_uri_is_refused() -> None:
    """Pathlib made s3:/bucket of it: refused, so that no directory named s3: appears."""
    with pytest.raises(UriError, match="pass the URI as a str"):
        Uri.parse(Path("s3://bucket/run"))


def test_relative_to_a_base() -> None:
    """A base is a path or a URI; an absolute value ignores it."""
    assert Uri.parse("run", base="/x/y").local_path == "/x/y/run"
    assert Uri.parse("../run", base="/x/y").local_path == "/x/run"
    assert str(Uri.parse("run/a", base="s3://b/x")) == "s3://b/x/run/a"
    assert Uri.parse("/z", base="s3://b/x").local_path == "/z"
    with pytest.raises(UriError):
        Uri.parse("../../z", base="s3://b/x")


def test_a_vanished_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative paths mean nothing there, and say so; absolute ones still work."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UriError, match="working directory is gone"):
        Uri.parse("run")
    assert Uri.parse("/run").local_path == "/run"


@given(uris())
def test_round_trip(uri: Uri) -> None:
    """A credential-free URI is its text, its parent and name, and its pickle."""
    assert Uri.parse(str(uri)) == uri
    assert Uri.parse(f"ckptfs+{uri}") == uri
    assert uri.parent / uri.name == uri
    assert pickle.loads(pickle.dumps(uri)) == uri
    assert hash(pickle.loads(pickle.dumps(uri))) == hash(uri)
    assert uri.full == str(uri)
    assert repr(uri) == f"Uri({str(uri)!r})"
    assert not uri.path.endswith("/") or uri.path == "/"
    assert "//" not in uri.path


@given(uris(), keys())
def test_keys_append(uri: Uri, key: str) -> None:
    """Uri / a / b is uri / "a/b", and its parents lead back."""
    if "?" in key and not uri.protocol.endswith("file"):
        with pytest.raises(UriError):
            uri / key
        return
    below = uri / key
    head, _, tail = key.rpartition("/")
    assert below == (uri / head) / tail
    assert below.name == tail
    for _ in key.split("/"):
        below = below.parent
    assert below == uri
    assert uri / "" == uri


@given(paths())
def test_paths_are_resolved_by_their_letters(path: str) -> None:
    """A plain path is what os.path.abspath makes of it, and no disk is asked."""
    if any("://" in part for part in (path,)):
        return
    expected = "/" + os.path.normpath(path).lstrip("/")
    assert Uri.parse(path).local_path == expected
    assert Uri.parse(f"file://{path}").local_path == expected


@given(secret_uris())
def test_secrets_are_never_shown(case: tuple[str, str]) -> None:
    """No text of a URI, of its children or of an error about it carries its secret; full does."""
    text, secret = case
    uri = Uri.parse(text)
    assert secret in uri.full
    for shown in (str(uri), repr(uri), f"{uri / 'a'}", str(uri.parent), mask_credentials(text)):
        assert secret not in shown
    for error in (UriError("x", uri=uri), UriError(f"{uri!r}")):
        assert secret not in str(error)
    assert pickle.loads(pickle.dumps(uri)).full == uri.full
    assert (uri / "a").full != uri.full
    assert Uri.parse(str(uri)).is_masked
    assert not uri.is_masked


@pytest.mark.parametrize("secret", ["pa/ss", "p@ss/w@rd", "p?a#s"])
def test_a_password_that_nobody_encoded_is_masked_whole(secret: str) -> None:
    """A slash or an @ in it does not end the mask: what is behind it is the password still."""
    shown = mask_credentials(f"cannot reach s3://key:{secret}@bucket/run, try again")
    assert shown.endswith("@bucket/run, try again")
    for piece in secret.replace("@", "/").split("/"):
        assert piece not in shown


SECRET = "S3cr3tV4lue/+x=="  # noqa: S105 - of no account


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:8020/{}@bucket/run",
        "see //user:{}@host/x",
        "AccountName=a;AccountKey={};EndpointSuffix=core",
        "SharedAccessSignature={}",
        "Authorization: Bearer {}",
        "'Authorization': b'AWS4-HMAC-SHA256 Credential={}/2026/us/s3, SignedHeaders=host, Signature={}'",
        "{{'X-Amz-Security-Token': b'{}', 'Host': 'x'}}",
        "x-amz-security-token:{}\nhost:x",
        "aws_secret_access_key={}",
        '"SecretAccessKey" : "{}"',
        "<SessionToken>{}</SessionToken>",
        '{{"access_token": "{}", "Token" : "{}"}}',
        '"GET /b/k?X-Amz-Credential={}&X-Amz-Signature={} HTTP/1.1"',
        "GET /c/b?sv=1&sig={}&x=1",
        "client_secret={}",
        "Set-Cookie: session={}; path=/",
    ],
)
def test_secrets_that_stand_in_no_uri_are_masked_by_their_names(text: str) -> None:
    """As HTTP headers, signed requests, connection strings and answers of login services have them."""
    shown = mask_credentials(text.format(SECRET, SECRET))
    assert SECRET not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    "text",
    [
        "pass storage_options key= and secret= or profile=",
        "webhdfs://host:8020/user@dir",
        "signature does not match; the token expired",
        "a // b: c@d",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    """Hints and places stay as they are."""
    assert mask_credentials(text) == text


def test_a_password_that_looks_like_a_port_is_refused() -> None:
    """No bucket has a port: the rest of the password would be taken for a key, and shown."""
    with pytest.raises(UriError, match="password") as caught:
        Uri.parse(f"s3://key:8020/{SECRET}@bucket/run")
    assert SECRET not in str(caught.value)


@given(secret_uris(), st.sampled_from(["\n", "/../x", "\0"]))
def test_refused_uris_keep_their_secrets(case: tuple[str, str], poison: str) -> None:
    """The error about a bad URI does not show its secret either."""
    text, secret = case
    with pytest.raises(UriError) as caught:
        Uri.parse(text.replace("/run", f"/run{poison}").replace("/a//b", f"/a{poison}"))
    assert secret not in str(caught.value)


@given(components(), components())
def test_keys_are_checked(first: str, second: str) -> None:
    """Plain components pass; what could leave the root does not."""
    check_key(first)
    check_key(f"{first}/{second}")
    for bad in (
        f"/{first}",
        f"{first}/",
        f"{first}//{second}",
        f"../{first}",
        f"{first}/../..",
        ".",
    ):
        with pytest.raises(UriError):
            check_key(bad)


def test_values_are_frozen() -> None:
    """A Uri cannot be changed, and only file URIs have a local path."""
    uri = Uri.parse("s3://bucket/run")
    with pytest.raises(AttributeError):
        uri.path = "/x"  # type: ignore[misc]
    assert not uri.is_local
    with pytest.raises(UriError):
        _ = uri.local_path
    assert uri.with_protocol("gs") == Uri.parse("gs://bucket/run")
    assert {uri, Uri.parse("s3://bucket/run/")} == {uri}
