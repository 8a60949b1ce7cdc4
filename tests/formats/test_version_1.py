"""Format version 1 is frozen: what was written once is written the same and read the same."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ckptfs.commit.log.entries import Body, Foreign, decode_entry
from ckptfs.commit.manifest import decode_manifest
from ckptfs.errors import ManifestError
from tests.formats.values import Golden, golden

HERE = Path(__file__).parent / "v1"

each_value = pytest.mark.parametrize("item", golden(), ids=lambda item: item.file)


def test_every_kind_of_entry_has_a_golden_file() -> None:
    """A new kind of entry cannot be forgotten here; no golden file is an orphan."""
    kinds = {type(item.value.body) for item in golden() if item.file.startswith("entry-")}
    assert kinds == set(Body.__args__) - {Foreign}
    assert {path.name for path in HERE.iterdir()} == {item.file for item in golden()}


def test_the_page_lists_every_kind_with_its_fields() -> None:
    """docs/on-store-format.md is the whole format: no kind of entry and no field is left out."""
    page = (HERE.parents[2] / "docs" / "on-store-format.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", page, flags=re.MULTILINE)
    told = {kind: set(re.findall(r"`(\w+)`", listed)) for kind, listed in rows}
    written = {
        str(json.loads(item.encode(item.value))["kind"]): {f.name for f in fields(item.value.body)}
        for item in golden()
        if item.file.startswith("entry-")
    }
    assert told == written


@each_value
def test_bytes_are_those_of_version_1(item: Golden) -> None:
    """The encoder writes the golden bytes exactly: older readers see what they always saw."""
    assert item.encode(item.value) == (HERE / item.file).read_bytes()


@each_value
def test_golden_bytes_are_read(item: Golden) -> None:
    """The decoder makes the golden value of the golden bytes."""
    assert item.decode((HERE / item.file).read_bytes(), "golden") == item.value


@pytest.mark.parametrize(
    "item", [i for i in golden() if i.file.endswith(".json")], ids=lambda item: item.file
)
def test_fields_of_the_future_are_ignored(item: Golden) -> None:
    """A newer writer may add fields; this reader makes the same value of them."""
    record = json.loads((HERE / item.file).read_text()) | {"added_later": {"any": ["thing"]}}
    assert item.decode(json.dumps(record).encode(), "golden") == item.value


def test_a_kind_of_the_future_is_kept_as_foreign() -> None:
    """An unknown kind of entry does not stop a reader."""
    record = json.loads((HERE / "entry-pin.json").read_text()) | {"kind": "embargo"}
    assert decode_entry(json.dumps(record).encode(), "golden").body == Foreign("embargo")


def test_a_manifest_for_newer_readers_is_refused() -> None:
    """min_reader_version is obeyed, and the error says what to do."""
    record = json.loads((HERE / "ckptfs.json").read_text()) | {"min_reader_version": 3}
    with pytest.raises(ManifestError, match="needs a reader of format 3") as caught:
        decode_manifest(json.dumps(record).encode(), "s3://bucket/run/step_100")
    assert "upgrade" in str(caught.value)
    assert caught.value.uri == "s3://bucket/run/step_100"


@pytest.mark.parametrize(
    "path",
    ["../other", "a/../../other", "/etc/passwd", "s3://other/x", "a\\b", "a//b", "./a", "", "a\0b"],
)
@pytest.mark.parametrize("field", ["path", "digests", "save_id", "name"])
def test_a_manifest_cannot_leave_its_checkpoint(field: str, path: str) -> None:
    """A path that is not plainly below the step directory is refused before anything is opened."""
    record = json.loads((HERE / "ckptfs.json").read_text())
    if field in record:
        record[field] = path
    else:
        record["files"][0][field] = path
    with pytest.raises(ManifestError, match="damaged manifest"):
        decode_manifest(json.dumps(record).encode(), "s3://bucket/run/step_100")
