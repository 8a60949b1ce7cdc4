"""What ``--json`` prints: byte for byte what it printed when the golden file was made.

CKPTFS_GOLDEN=write rewrites the file. Ids, times, hosts, sizes and versions are masked; ``doctor`` and ``bench run``
report the machine, and have their fields in docs/reference/public.md alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptfs.cli.output import OMITTED, Omitted, to_json
from ckptfs.tools.findings import Verdict
from ckptfs.uri import Uri
from tests.cli.conftest import Cli, Golden, Place
from tests.public.documents import documents

_SIZES = (
    (r'"(\w*bytes|start|stop|length)": \d+', r'"\1": <size>'),
    (r"\bckptfs \d[\w.+]*", "ckptfs <version>"),
    (r"<save-id>~[0-9a-f]{8}", "<save-id>~<random>"),
    (r"\d{8}T\d{6}-[0-9a-f]{12}(~[0-9a-f]{8})?", "<save-id>"),
)
_OF_THE_MACHINE = ("doctor", "bench run", "bench compare")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """The directory, the command and the text of each document."""
    pytest.importorskip("matplotlib")
    directory = str(tmp_path_factory.mktemp("documents"))
    return [
        (directory, name, json.dumps(document, indent=2)) for name, document in documents(directory)
    ]


def test_every_document_is_printed_as_before(
    printed: list[tuple[str, str, str]], golden: Golden
) -> None:
    """The golden file was made before documents came from dataclasses: names, values and order are the same."""
    directory = printed[0][0]
    texts = [f"## {name}\n{text}\n" for _, name, text in printed if name not in _OF_THE_MACHINE]
    text = "".join(texts)
    for pattern, instead in _SIZES:
        text = re.sub(pattern, instead, text)
    golden("json_documents", text, Place("file", directory))


def test_an_answer_is_one_indented_document(cli: Cli, tmp_path: Path) -> None:
    """An error is a document of its own form."""
    Path(tmp_path, "runs").mkdir()
    ran = cli("ls", tmp_path / "runs" / "none", "--json")
    assert ran.exit == 3
    assert ran.out == json.dumps(ran.json, indent=2) + "\n"
    assert list(ran.json) == ["command", "error"]
    assert list(ran.json["error"]) == ["type", "message", "uri", "hint", "outcome"]


def test_a_uri_in_a_document_has_no_credentials_and_fields_may_be_left_out() -> None:
    """A URI is a dataclass with the credentials in it: it is never taken apart."""

    @dataclass(frozen=True)
    class Document:
        uri: Uri
        verdict: Verdict
        note: str | Omitted = OMITTED

    one = Document(Uri.parse("s3://user:secret@bucket/run"), Verdict.CLEAN)
    assert to_json({"all": (one,)}) == {"all": [{"uri": "s3://***@bucket/run", "verdict": "clean"}]}
