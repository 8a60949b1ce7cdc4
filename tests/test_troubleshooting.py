"""docs/troubleshooting.md has every error, with the message that the code gives today."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from pathlib import Path

import pytest

import ckptfs
from ckptfs import errors
from ckptfs.cli.output import exit_of
from ckptfs.errors import CkptfsError, CollectiveError
from tests.troubles import TROUBLES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Made by a server that dies, or by a store that is frozen: shown where that is tested.
NOT_MADE = {"ControlPlaneLostError"}
BASE = "CkptfsError"

_MASKS = (
    (
        r"within 0.1 s: \w+, \d+ of \d+ bytes",
        "within 0.1 s: <how far it was>",
    ),  # 0.1 s on any machine
    (r"\d{8}T\d{6}-[0-9a-f]{12}", "<save-id>"),
    (r"\b[0-9a-f]{32}\b", "<id>"),
    (r"\bpid \d+", "pid <pid>"),
    (r"needs \d+:", "needs <n>:"),
    (r"(run/)?\.ckptfs/tmp\]|\.ckptfs\]", "<control>]"),
    (r"[,]? ?\[?rank 0, node [^\]]+\]+", ""),
)


def masked(text: str) -> str:
    """What differs between two times and two machines."""
    for pattern, instead in _MASKS:
        text = re.sub(pattern, instead, text)
    return text.strip()


def classes() -> dict[str, type[CkptfsError]]:
    """Every error of the tree, by its name."""
    found = {name: getattr(errors, name) for name in errors.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, CkptfsError)
    }


def entry(name: str) -> str:
    """The text below a heading of the page."""
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/troubleshooting.md has no heading '## {name}'"
    return found[1]


def shown(name: str) -> str:
    """The message of an entry."""
    found = re.search(r"```text\n(.*?)\n```", entry(name), re.DOTALL)
    assert found is not None, f"the entry {name} shows no message"
    return found[1]


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No account of the user of this test."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "CKPTFS_"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_every_error_has_its_entry_and_every_entry_its_error() -> None:
    """A new class comes with what to do about it; no removed class is listed."""
    assert set(TROUBLES) | NOT_MADE | {BASE} == set(classes())
    for name in {*TROUBLES, *NOT_MADE}:
        assert shown(name).startswith(f"{name}: ")
        assert len(entry(name).split("```")[2].split()) > 15, f"{name} does not say what to do"
    headings = re.findall(r"^## (\w+Error)$", PAGE, re.MULTILINE)
    assert set(headings) == {*TROUBLES, *NOT_MADE}
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("name", TROUBLES)
def test_the_message_is_the_one_that_the_code_gives(name: str) -> None:
    """The example of the entry, word for word, hint included, but for ids, hosts and times."""
    # A short path: the text of a collective error has 400 characters, and of long paths not all.
    with tempfile.TemporaryDirectory() as base:
        where = Path(base) / "run"
        where.mkdir()
        with pytest.raises(CkptfsError) as caught:
            TROUBLES[name](where)
    error = caught.value
    kind = classes()[name]
    text = f"{type(error).__name__}: {error}"
    if kind is not CollectiveError and isinstance(error, CollectiveError):
        assert error.all_are(kind)
        # As the page says: what comes after the rank.
        text = text[text.index(f"{name}: ") :]
    assert text.startswith(f"{name}: ")
    text = text.replace(str(where), "/data/run").replace("faults+file://", "file://")
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node-7", text)
    assert masked(text) == masked(shown(name))


@pytest.mark.parametrize("name", sorted(NOT_MADE))
def test_the_others_quote_the_code(name: str) -> None:
    """The words of an example that is not made here stand in the code."""
    code = re.sub(r'"\s*\n\s*f?"', "", (ROOT / "ckptfs/control/tcpstore_client.py").read_text())
    message, _, hint = shown(name).removeprefix(f"{name}: ").partition(" -- ")
    assert hint in code
    assert re.split(r" \d+ s$", message)[0] in code


def test_every_error_can_be_imported_from_the_top() -> None:
    """``except ckptfs.RunBusyError`` works for all of them."""
    for name, kind in classes().items():
        assert getattr(ckptfs, name) is kind


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    """Each error is in the row of its code, once."""
    rows = re.findall(
        r"^\| (\d) \| (.*?) \|$", entry("Exit codes of the command line"), re.MULTILINE
    )
    told = {name: int(code) for code, text in rows for name in re.findall(r"\w+Error", text)}
    made = {name: kind("m") for name, kind in classes().items()}
    assert told == {
        name: int(exit_of(error))
        for name, error in made.items()
        if name not in (BASE, "CollectiveError")
    }


def test_the_warnings_are_words_of_the_code() -> None:
    """What the table quotes is still said by some line of the library."""
    code = "".join(path.read_text() for path in (ROOT / "ckptfs").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    quoted = re.findall(r"^\| (`[^|]+`) \|", entry("Warnings"), re.MULTILINE)
    assert len(quoted) >= 10
    for cell in quoted:
        for words in re.findall(r"`([^`]+)`", cell):
            assert words in code, words
