"""docs/reference/json says what every ``--json`` prints: made of the types, and held against what is printed."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.cli.main import main
from tests.json_schemas import DIRECTORY, Schema, file_of, schemas, text_of, violations
from tests.public.documents import documents

PAGE = DIRECTORY.parent / "json.md"


@pytest.fixture(scope="module")
def published() -> dict[str, Schema]:
    """The schemas as they are published, by the command's name."""
    return {name: json.loads(file_of(name).read_text()) for name in schemas()}


def _printed(*arguments: object) -> list[Any]:
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main([*map(str, arguments), "--json"])
    return [json.loads(out.getvalue())]


def test_every_schema_is_made_of_the_types_of_today() -> None:
    """``python -m tests.json_schemas`` writes the files: who changes a type sees what a script would see."""
    made = {file_of(name): text_of(schema) for name, schema in schemas().items()}
    assert {path: path.read_text() for path in DIRECTORY.glob("*.json")} == made


def test_the_page_has_every_schema() -> None:
    """Where the others of the reference are."""
    text = PAGE.read_text()
    for name in schemas():
        assert f"[`ckptfs {name}`](json/{file_of(name).name})" in text


def test_what_every_command_prints_fits_its_schema(
    published: dict[str, Schema], tmp_path: Path
) -> None:
    """On a run with all kinds of saves, with debris and with damage."""
    pytest.importorskip("matplotlib")
    seen = set()
    for name, document in documents(str(tmp_path)):
        command = name.removesuffix(" OTHER")
        if command != "error":
            seen.add(command)
            assert violations(published[command], document) == [], document
    assert seen == set(published)


@pytest.mark.parametrize(
    "call",
    [
        ("ls", "none://a"),
        ("log", "none://a"),
        ("latest", "none://a"),
        ("watch", "none://a"),
        ("inspect", "none://a"),
        ("inspect", "none://a", "none://b"),
        ("verify", "none://a"),
        ("cp", "none://a", "none://b"),
        ("rm", "none://a", "--yes"),
        ("gc", "none://a"),
        ("gc", "none://a", "--recursive"),
        ("pin", "none://a"),
        ("unpin", "none://a"),
        ("export", "none://a", "none://b", "--format", "torch"),
        ("doctor", "none://a"),
        ("bench", "run", "none://a"),
        ("bench", "report", "none.json"),
        ("bench", "compare", "none.json", "none.json"),
    ],
    ids=" ".join,
)
def test_the_error_of_every_command_fits_its_schema(
    published: dict[str, Schema],
    call: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A URI that no storage has, and a file that is not there."""
    monkeypatch.chdir(tmp_path)
    name = next(name for name in published if " ".join(call).startswith(f"{name} "))
    (document,) = _printed(*call)
    assert list(document) == ["command", "error"]
    assert violations(published[name], document) == []


def test_a_document_in_which_one_of_several_failed_fits_its_schema(
    published: dict[str, Schema], tmp_path: Path
) -> None:
    """Of several URIs one is missing; and answers that are no."""
    run, none = tmp_path / "run", tmp_path / "none" / "step_1"
    with ckptfs.CheckpointManager(str(run)) as manager:
        manager.save(1, {"a": 1})
    calls = [
        ("ls", run, none),
        ("ls", run / "step_1", none),
        ("pin", run / "step_1", none),
        ("unpin", run / "step_1", none),
        ("latest", run, "--kind", "weights"),
        ("gc", tmp_path, "--recursive"),
        ("rm", run / "step_1", "--yes"),
    ]
    for call in calls:
        (document,) = _printed(*call)
        assert "error" not in document, document
        assert violations(published[str(call[0])], document) == [], document


def test_violations_sees_what_does_not_fit() -> None:
    """A field that is missing, unknown or of another type, and another command."""
    schema = schemas()["rm"]
    good = {"uri": "file:///a", "deleted": True, "elsewhere": ["d"]}

    def found(**changed: Any) -> list[str]:
        one = {key: value for key, value in {**good, **changed}.items() if value is not ...}
        return violations(schema, {"command": "rm", "checkpoints": [one]})

    assert found() == []
    for changed in (
        {"deleted": ...},
        {"deleted": False},
        {"elsewhere": "d"},
        {"elsewhere": [1]},
        {"uri": None},
        {"more": 1},
    ):
        assert found(**changed), changed
    assert violations(schema, {"command": "ls", "checkpoints": []})
