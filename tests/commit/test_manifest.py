"""The manifest: what comes back is what was written, and nothing in it leaves its directory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.commit.log.entries import Generation, Kind
from ckptfs.commit.manifest import (
    DomainRecord,
    FileRecord,
    Manifest,
    decode_manifest,
    digest_of,
    encode_manifest,
)
from ckptfs.errors import ManifestError
from tests.strategies import components

_names = components().filter(lambda n: "\\" not in n and "\0" not in n and "://" not in n)
_paths = st.lists(_names, min_size=1, max_size=3).map("/".join).filter(lambda p: "://" not in p)
_texts = st.text(st.characters(codec="utf-8"), max_size=8)
_files = st.builds(
    FileRecord,
    _paths,
    st.integers(0, 1 << 50),
    st.one_of(st.none(), _texts),
    st.one_of(st.none(), _paths),
    st.one_of(st.none(), _texts),
)
_domains = st.builds(
    DomainRecord,
    _texts,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.lists(_texts, max_size=2).map(tuple),
)
_manifests = st.builds(
    Manifest,
    _names,
    _names,
    st.one_of(st.none(), st.integers(0, 10**9)),
    st.lists(_files, max_size=4).map(tuple),
    st.lists(_domains, max_size=2).map(tuple),
    st.builds(Generation, st.integers(0, 9), _texts),
    st.sampled_from(list(Kind)),
    st.integers(1, 9),
    _texts,
    _texts,
    st.lists(_texts, max_size=2).map(tuple),
    st.lists(_texts, max_size=2).map(tuple),
)

SMALL = Manifest(
    "s1d", "step_1", 1, (FileRecord("s1d/__0_0.distcp", 10),), (DomainRecord("A", (0,)),)
)


def changed(**fields: Any) -> bytes:
    """A manifest with some JSON fields changed."""
    return json.dumps(json.loads(encode_manifest(SMALL)) | fields).encode()


@given(_manifests)
def test_manifests_round_trip(manifest: Manifest) -> None:
    """Decoding what was encoded gives an equal value, and equal bytes the second time."""
    data = encode_manifest(manifest)
    assert decode_manifest(data, "x") == manifest
    assert encode_manifest(decode_manifest(data, "x")) == data


def test_unknown_fields_are_ignored() -> None:
    """An older reader reads what a newer writer says it can read."""
    assert decode_manifest(changed(colour="blue", format_version=2), "x").save_id == "s1d"


def test_a_newer_format_is_refused_by_name() -> None:
    """A manifest that needs a newer reader says so and offers stock torch."""
    with pytest.raises(ManifestError, match=r"format 3.*upgrade"):
        decode_manifest(changed(min_reader_version=3), "x")


@pytest.mark.parametrize(
    "path",
    [
        "../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a/", ".", "..", "", "a/..",
        "s3://bucket/x", "a\\..\\b", "a\0b", "./a", "../.ckptfs/log/00000000",
    ],
)  # fmt: skip
def test_a_path_that_leaves_the_checkpoint_is_refused(path: str) -> None:
    """A bucket is not trusted: neither files nor sidecars nor names may point elsewhere."""
    files = [{"path": path, "size": 1}]
    with pytest.raises(ManifestError):
        decode_manifest(changed(files=files), "x")
    with pytest.raises(ManifestError):
        decode_manifest(changed(files=[{"path": "a", "size": 1, "digests": path}]), "x")
    with pytest.raises(ManifestError):
        decode_manifest(changed(save_id=path), "x")
    with pytest.raises(ManifestError):
        decode_manifest(changed(name=path), "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"{}",
        b"[]",
        b"null",
        b'"x"',
        b'{"min_reader_version": "one"}',
        b'{"min_reader_version": null}',
        b'{"min_reader_version": 1}',
        changed(files=None),
        changed(files=[{"size": 1}]),
        changed(files=[{"path": "a", "size": "big"}]),
        changed(files=[{"path": "a", "size": -1}]),
        changed(files=7),
        changed(domains=[{}]),
        changed(base=[1]),
        changed(artifact="telepathy"),
        changed(save_id=7),
        changed(name=None),
        encode_manifest(SMALL)[:-20],
    ],
)
def test_foreign_and_damaged_bytes_are_a_manifest_error_with_the_place(data: bytes) -> None:
    """Nothing but ManifestError comes out, with the URI and a hint or the damage in it."""
    with pytest.raises(ManifestError, match=r"s3://b/run/step_1/ckptfs\.json"):
        decode_manifest(data, "s3://b/run/step_1/ckptfs.json")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_manifest_or_a_manifest_error(data: bytes) -> None:
    """No bytes whatever raise anything else."""
    try:
        decode_manifest(data, "x")
    except ManifestError:
        return


def test_the_digest_is_of_the_bytes() -> None:
    """One flipped bit gives another digest; 128 bits, hexadecimal."""
    data = encode_manifest(SMALL)
    assert digest_of(data) != digest_of(bytes([data[0] ^ 1]) + data[1:])
    assert len(digest_of(data)) == 32


def test_the_size_is_that_of_all_files() -> None:
    """What a result reports is the sum of what the writers counted."""
    assert SMALL.size_bytes == 10
