"""Options of s3://: what is refused before any request, and what never shows a secret."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from ckptfs.errors import UriError
from ckptfs.storage.clients.s3 import unsupported_option
from ckptfs.storage.clients.s3_options import forget_resolved, parse_s3_options, resolve
from ckptfs.uri import Uri

PLACE = Uri.parse("s3://bucket/run")
KEYS = {"key": "AKIAKEY", "secret": "wJalrSecret"}


class Session:
    """Somebody's own session; printed alike in every process, for tests are named after it."""

    def __repr__(self) -> str:
        return "Session()"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"acl": "private"}, "'acl'"),
        ({"client_kwargs": {"config": 1}}, "'config'"),
        ({"client_kwargs": "text"}, "client_kwargs"),
        ({"config_kwargs": {"retrys": 1}}, "retrys"),
        ({"s3_additional_kwargs": {"ServerSideEncrypt": "AES256"}}, "'ServerSideEncrypt'"),
        ({"s3_additional_kwargs": {"IfNoneMatch": "*"}}, "'IfNoneMatch'"),
        ({"s3_additional_kwargs": {"Body": b"x"}}, "'Body'"),
        ({"s3_additional_kwargs": {"ChecksumCRC32": "x"}}, "'ChecksumCRC32'"),
        ({"s3_additional_kwargs": {"Metadata": "wJalrSecret"}}, "'Metadata'"),
        ({"anon": "perhaps"}, "anon"),
        ({"key": 3, "secret": "x"}, "key"),
        ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url"),
        ({"anon": True, "key": "AKIAKEY", "secret": "wJalrSecret"}, "anon"),
        ({"key": "AKIAKEY"}, "without secret"),
        ({"secret": "wJalrSecret"}, "without key"),
        ({**KEYS, "username": "AKIAKEY"}, "username"),
        ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, "endpoint"),
        ({**KEYS, "client_kwargs": {"aws_access_key_id": "other"}}, "aws_access_key_id"),
        ({"session": Session(), "profile": "p"}, "profile"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(options: dict[str, Any], named: str) -> None:
    """Unknown, contradictory and misspelt options are UriError that names them, not their values."""
    with pytest.raises(UriError) as caught:
        parse_s3_options(PLACE, options)
    assert named in str(caught.value)
    assert "wJalrSecret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://bad bucket!/run", "s3://arn:aws:s3:x:1:accesspoint/a/run"])
def test_names_that_no_bucket_has(uri: str) -> None:
    """A name that no store takes, and an ARN, are refused before a request."""
    with pytest.raises(UriError):
        parse_s3_options(Uri.parse(uri), {})


def test_texts_of_a_uri_mean_what_they_say() -> None:
    """A URI's query is text: anon=false is not yes."""
    assert parse_s3_options(PLACE, {"anon": "false"}).client["anon"] is False
    assert parse_s3_options(PLACE, {"anon": "true"}).client["anon"] is True
    parsed = parse_s3_options(PLACE, {"requester_pays": "1", **KEYS})
    assert parsed.parameters == {"RequestPayer": "requester"}


def test_credentials_of_the_uri_stand_below_the_options() -> None:
    """s3://key:secret@bucket is understood; storage_options win."""
    place = Uri.parse("s3://AKIAURI:urisecret@bucket/run")
    assert parse_s3_options(place, {}).client["key"] == "AKIAURI"
    assert parse_s3_options(place, dict(KEYS)).client["key"] == "AKIAKEY"


def test_options_show_no_secret_and_pickle() -> None:
    """Their repr has names only; a pickled copy is equal."""
    parsed = parse_s3_options(
        PLACE, {**KEYS, "s3_additional_kwargs": {"SSECustomerKey": b"s" * 32}}
    )
    assert "wJalr" not in repr(parsed)
    assert "sss" not in repr(parsed)
    assert pickle.loads(pickle.dumps(parsed)) == parsed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, None),
        (dict(KEYS), None),
        ({"anon": True}, None),
        ({"profile": "p"}, None),
        ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"}}, None),
        ({"s3_additional_kwargs": {"Tagging": "a=b", "StorageClass": "STANDARD_IA"}}, None),
        ({"s3_additional_kwargs": {"ChecksumAlgorithm": "SHA256"}}, None),
        ({"s3_additional_kwargs": {"ChecksumAlgorithm": "CRC32"}}, "ChecksumAlgorithm"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "ACL"),
        ({"s3_additional_kwargs": {"ExpectedBucketOwner": "1"}}, "ExpectedBucketOwner"),
        ({"s3_additional_kwargs": {"ObjectLockMode": "GOVERNANCE"}}, "ObjectLockMode"),
        ({"config_kwargs": {"client_cert": "c"}}, "client_cert"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "use_accelerate_endpoint"),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, None),
        ({"session": Session()}, "session"),
    ],
    ids=str,
)
def test_what_obstore_cannot_say(options: dict[str, Any], why: str | None) -> None:
    """Options that obstore has no word for are named, so that "auto" takes s3fs."""
    found = unsupported_option(options)
    assert (found is None) == (why is None)
    assert why is None or (found is not None and why in found)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (
            {"endpoint_url": "http://127.0.0.1:9000"},
            {"endpoint": "http://127.0.0.1:9000", "virtual_hosted_style_request": False},
        ),
        (
            {"client_kwargs": {"region_name": "eu-west-1"}},
            {
                "endpoint": "https://bucket.s3.eu-west-1.amazonaws.com",
                "virtual_hosted_style_request": True,
                "region": "eu-west-1",
            },
        ),
        (
            {
                "client_kwargs": {"region_name": "eu-west-1"},
                "config_kwargs": {"s3": {"addressing_style": "path"}},
            },
            {
                "endpoint": "https://s3.eu-west-1.amazonaws.com",
                "virtual_hosted_style_request": False,
            },
        ),
        (
            {
                "endpoint_url": "https://store.example",
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            },
            {"endpoint": "https://bucket.store.example", "virtual_hosted_style_request": True},
        ),
        ({}, {"region": "us-east-1"}),
    ],
    ids=str,
)
def test_obstore_goes_where_botocore_would(
    options: dict[str, Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoint, region and style of addressing are those that botocore makes of the same options."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    found = resolve(parse_s3_options(PLACE, options | KEYS), "bucket")
    assert {name: found.config[name] for name in config} == config
    assert found.client_options["allow_http"] == found.config["endpoint"].startswith("http:")


def test_what_was_told_of_a_place_is_kept_until_something_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same answer while variables, files and options are the same; then botocore is asked again."""
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-west-1\n")
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    options = parse_s3_options(PLACE, dict(KEYS))

    def region() -> str:
        found = resolve(parse_s3_options(PLACE, dict(KEYS)), "bucket")
        assert found is resolve(options, "bucket")
        return str(found.config["region"])

    first = resolve(options, "bucket")
    assert region() == "eu-west-1"
    assert first is resolve(options, "bucket")
    assert first is not resolve(options, "other")
    assert first is not resolve(parse_s3_options(PLACE, KEYS | {"use_ssl": False}), "bucket")
    config.write_text("[default]\nregion = eu-south-2\n")
    assert region() == "eu-south-2"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert region() == "us-west-2"
    before = resolve(options, "bucket")
    forget_resolved()
    assert before is not resolve(options, "bucket")


def test_what_cannot_be_compared_is_asked_each_time() -> None:
    """A class of somebody's function has no name that would tell it from another."""

    class Local:
        """It cannot be imported."""

    config = {"config_kwargs": {"http_session_cls": Local}}
    options = parse_s3_options(PLACE, KEYS | config)
    assert resolve(options, "bucket") is not resolve(options, "bucket")


def test_certificates_that_were_renewed_are_read_again(tmp_path: Path) -> None:
    """The file of one's own authority may change below a job that runs for weeks."""
    trusted = tmp_path / "ca.pem"
    trusted.write_text("of last year")
    verified = {"client_kwargs": {"verify": str(trusted)}}
    options = parse_s3_options(PLACE, KEYS | verified)
    assert resolve(options, "bucket").client_options["root_certificate"] == b"of last year"
    assert resolve(options, "bucket") is resolve(options, "bucket")
    trusted.write_text("of this year, and longer")
    assert resolve(options, "bucket").client_options["root_certificate"].startswith(b"of this")
