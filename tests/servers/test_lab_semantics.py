"""What the servers of the lab get wrong: the reasons why ckptfs asks, and relies on so little.

A newer server that gets it right fails here; then the table in CONTRIBUTING.md is out of date.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.lab import Server, raw

PART = bytes(5 << 20)


def status(request: Callable[[], Any]) -> int:
    """The HTTP status of one request, failed or not."""
    try:
        answer = request()
    except ClientError as error:
        answer = error.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def key_with(client: Any, server: Server, body: bytes) -> tuple[dict[str, str], str]:
    """A fresh object, and its quoted ETag."""
    place = {"Bucket": server.bucket, "Key": server.fresh("semantics").rpartition("/")[2]}
    return place, client.put_object(**place, Body=body)["ETag"]


def test_radosgw_ignores_conditions_when_an_upload_completes(radosgw: Server) -> None:
    """CompleteMultipartUpload with If-None-Match overwrites: a commit is never an upload in parts."""
    with contextlib.closing(raw.s3(radosgw)) as client:
        place, _ = key_with(client, radosgw, b"first")
        upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
        tag = client.upload_part(**upload, PartNumber=1, Body=PART)["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        client.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
        assert client.head_object(**place)["ContentLength"] == len(PART)


@pytest.mark.parametrize(("name", "quoted"), [("radosgw", 412), ("moto", 200)])
def test_if_match_takes_a_quoted_etag_on_moto_only(
    name: str, quoted: int, request: pytest.FixtureRequest
) -> None:
    """If-Match with the right ETag: radosgw refuses it quoted, as the standard has it; moto does not."""
    server: Server = request.getfixturevalue(name)
    with contextlib.closing(raw.s3(server)) as client:
        place, tag = key_with(client, server, b"first")
        assert status(lambda: client.put_object(**place, Body=b"2", IfMatch=tag)) == quoted
        tag = client.head_object(**place)["ETag"].strip('"')
        assert status(lambda: client.put_object(**place, Body=b"3", IfMatch=tag)) == 200
        assert status(lambda: client.put_object(**place, Body=b"4", IfMatch=tag)) == 412
        assert client.get_object(**place)["Body"].read() == b"3"


@pytest.mark.parametrize(("name", "answer"), [("radosgw", 403), ("moto", 200)])
def test_a_wrong_secret_is_refused_by_radosgw_only(
    name: str, answer: int, request: pytest.FixtureRequest
) -> None:
    """radosgw checks signatures, moto does not: credentials are tested on radosgw."""
    server: Server = request.getfixturevalue(name)
    wrong = raw.s3(server, aws_secret_access_key="no" + server.options["secret"])
    with contextlib.closing(wrong) as client:
        assert status(lambda: client.list_objects_v2(Bucket=server.bucket, MaxKeys=1)) == answer
