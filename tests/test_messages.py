"""Every text that a person can see, collected from the syntax tree into tests/golden/messages.txt.

Errors and their hints, warnings, log lines, the help of the command line and of metrics, what commands print, the
findings of doctor and verify, and reasons that are stored in a log or in JSON and shown later. ``tests/texts.py`` finds
them by what they flow into. A hole of an f-string is {}. After a change of a message:

    python -m tests.test_messages    writes tests/golden/messages.txt
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.test_house import DIALECT_OF_PROSE
from tests.texts import shown, words

PACKAGE = Path(__file__).resolve().parents[1] / "ckptfs"
GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
MAX_WORDS = 25
# What is not there yet: these figures may only go down.
LIMITS = {"words of a dialect": 0, "long sentences": 0}


def sentences(text: str) -> list[str]:
    """Return its sentences, and the halves at a semicolon."""
    return re.split(r"(?<=[.;!?])\s+", text)


def dialect_in(text: str) -> list[str]:
    """Return the words of the list in it; code in backticks is not prose."""
    return DIALECT_OF_PROSE.findall(re.sub(r"`[^`]*`", "", text))


@functools.cache
def messages() -> dict[str, list[str]]:
    """The texts of each module, sorted."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return shown(
        {p.relative_to(PACKAGE.parent).as_posix(): ast.parse(p.read_text()) for p in paths}
    )


def page() -> str:
    """The golden file."""
    return "\n".join("\n".join([f"[{m}]", *texts, ""]) for m, texts in messages().items())


def offences(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    """What breaks each rule."""
    all_of = [(module, text) for module, of in texts.items() for text in of]
    return {
        "words of a dialect": [f"{m}: {w}: {t}" for m, t in all_of for w in dialect_in(t)],
        "long sentences": [
            f"{m}: {s}" for m, t in all_of for s in sentences(t) if len(words(s)) > MAX_WORDS
        ],
    }


@pytest.mark.parametrize("rule", LIMITS)
def test_messages_are_plain_and_short(rule: str) -> None:
    """No figure rises."""
    found = offences(messages())[rule]
    assert len(found) <= LIMITS[rule], "\n".join([f"{len(found)} {rule}:", *found])


def test_every_message_is_in_the_golden_file() -> None:
    """Who changes a message sees it between its neighbours: ``python -m tests.test_messages`` writes the file."""
    assert page() == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('raise StateError(f"no key {key!r} in {there}", hint="leave it out")', 2),
        ('raise ValueError("it is not JSON" if bad else "it ends too early")', 2),
        ('hint = "name another file"\nraise errors.StorageError("short text", hint=hint)', 1),
        ('logger.warning("%s is not removed: " + "%s is held", name, name)', 1),
        ('TABLE = {1: (NoSpaceError, "the disk is full", None)}', 1),
        ('Finding("names", _THEME, Verdict.OK, "all names are kept", "", "rename the run")', 2),
        ('click.option("--keep", help="Keep the newest.")', 1),
        (
            '@main.command()\ndef rm():\n    """Delete a checkpoint.\n\n    It asks first.\n    """',
            2,
        ),
        ('def why(self) -> str | None:\n    return "one domain is missing"', 1),
        ('def name(self) -> bytes | None:\n    return find("one domain is missing")', 0),
        ('class Found:\n    why: str\nFound("nobody asked for it")', 1),
        ('replace(line, note="nobody asked for it")', 1),
        ('class Found:\n    state: str\ndef f(x):\n    print(x.state)\nFound("left by a job")', 1),
        ('class Found:\n    state: str\nFound("left by a job")', 0),
        (
            'def bad(where, what):\n    raise StateError(f"{where}: {what}")\nbad(1, "it is too short")',
            1,
        ),
        ('fate, why = 1, "no checkpoint lists it"\nclick.echo(f"{fate}: {why}")', 1),
        ('lines = []\nlines.append("no checkpoint lists it")\nprint(lines)', 1),
        (
            'T = {"a": ("gauge", "bytes of the last save")}\nfor n, (k, h) in T.items(): print(f"{n} {h}")',
            1,
        ),
        ('meter.create_counter("a", description="bytes of the last save")', 1),
        ('def f():\n    return 1, "it is too short"\n_, text = f()\nlogger.info(text)', 1),
        (
            'match body:\n    case Delete(what=it): print(it)\nclass Delete:\n    what: str\nDelete("by its own owner")',
            1,
        ),
        ('def f(limit="one in three words"):\n    return 1', 0),
        ('raise AssertionError("this is not reached")', 0),
    ],
)
def test_texts_are_found(source: str, texts: int) -> None:
    """Wherever the library puts what a person reads."""
    assert len(shown({"m": ast.parse(source)}).get("m", [])) == texts


# One text of each kind: where it is, and what it flows into.
PLANTED = {
    "commit/decisions.py": "another domain began the delete",  # the reason of an entry in the log
    "commit/digests.py": "it is not a sidecar of block digests",  # a parameter of a function that makes an error
    "dcp/metadata/pickle_scan.py": "it stores a mark, which is not a value",  # the scanner's
    "dcp/metadata/metadata_reader.py": "it has a key that is too long",  # the parsers'
    "dcp/planning/columns.py": "an item has an unknown kind",
    "manager/prometheus.py": "Step of the last commit.",  # the help of a metric
    "manager/telemetry.py": "Bytes that all ranks committed.",  # a description
    "tools/collecting.py": "no checkpoint lists it",  # a field of JSON
    "tools/lines.py": "ckptfs did not write it; load it by its name",  # a note of `ckptfs ls`
    "tools/verifying.py": "its bytes differ from what was written",  # a finding
    "tools/debris.py": "it is aborted in the log",
    "cli/change.py": "nothing to remove now",  # printed
    "cli/copy.py": "existed already; ",
    "cli/export.py": "left out, because they are not tensors: ",
    "cli/verify.py": "structure only",
    "cli/doctor.py": "do not start a job here",
    "cli/bench.py": "seconds are medians over the rounds (fastest-slowest)",
}


def test_a_long_sentence_of_each_kind_is_found() -> None:
    """Planted in the sources of the package: no kind of text escapes the rules."""
    trees = {}
    for name, text in PLANTED.items():
        source = (PACKAGE / name).read_text()
        assert text in source, f"{name} has another text now: {text}"
        trees[name] = source.replace(text, "word " * (MAX_WORDS + 1))
    every = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}
    found = offences(shown({name: ast.parse(of) for name, of in (every | trees).items()}))
    assert {line.partition(":")[0] for line in found["long sentences"]} == set(PLANTED)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("the storage was closed meanwhile", 0),
        ("nobody said so", 0),
        (" ".join(["word"] * (MAX_WORDS + 1)), 1),
        ("The end. " + " ".join(["word"] * (MAX_WORDS + 1)), 1),
    ],
)
def test_each_offence_is_counted(text: str, rule: int) -> None:
    """And by its own rule alone."""
    found = list(offences({"m": [text, "`nobody` is code; " + "a word " * 10]}).values())
    assert [len(of) for of in found] == [int(rule == 0), int(rule == 1)]


if __name__ == "__main__":
    GOLDEN.write_text(page())
