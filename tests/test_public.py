"""What is public is a list, docs/reference/public.md, and the code agrees with it line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.public import page, python, shown, told

HOW = (
    f"\n\nWhere that is meant: `{page.WRITE}` (python -m tests.public) writes"
    " docs/reference/public.md anew; a change that users see belongs into CHANGELOG.md."
)


@pytest.mark.parametrize("section", page.SECTIONS, ids=lambda s: s.title)
def test_what_is_public_is_what_the_page_says(section: page.Section) -> None:
    """Nothing vanished, nothing looks different, and nothing new is missing in the list."""
    found = page.differences(page.read().get(section.title, {}), page.made(section))
    assert not found, f"{section.title} in docs/reference/public.md:\n" + "\n".join(found) + HOW


def test_the_page_has_these_sections_and_no_other() -> None:
    """A section without a comparison would go stale."""
    assert list(page.read()) == [section.title for section in page.SECTIONS]


def test_every_module_of_the_list_can_be_imported() -> None:
    """Those that need a framework are there as files."""
    for name in page.made(next(s for s in page.SECTIONS if s.title == "Modules")):
        assert shown.module_file(name), name
        if not name.startswith("ckptfs.integrations."):
            python.module(name)


def test_every_name_of_a_metric_in_the_pages_is_one() -> None:
    """A dashboard that was made by the manual finds its series."""
    known = page.made(next(s for s in page.SECTIONS if s.title == "Metrics"))
    known |= page.made(next(s for s in page.SECTIONS if s.title == "OpenTelemetry"))
    assert told.metrics_named(shown.pages()) - {name.strip() for name in known} == set()


@pytest.mark.parametrize(
    ("text", "names", "modules"),
    [
        (
            "```python\nfrom ckptfs.replication.copier import copy_to\n```\n",
            {"ckptfs.replication.copier.copy_to"},
            {"ckptfs.replication.copier"},
        ),
        ("see `ckptfs.manager.waiting.Watcher`", {"ckptfs.manager.waiting.Watcher"}, set()),
        ("see `ckptfs.manager.waiting`.", set(), {"ckptfs.manager.waiting"}),
        ("a span `ckptfs.save`, `ckptfs.deletes`, the file ckptfs.json", set(), set()),
        ("a link to ../../ckptfs/testing/world.py", set(), set()),
        (
            "```{eval-rst}\n.. automodule:: ckptfs.testing.readonly\n   :members:\n```\n",
            {"ckptfs.testing.readonly.ReadOnlyStorage"},
            {"ckptfs.testing.readonly"},
        ),
    ],
)
def test_what_a_page_shows_is_seen(
    text: str, names: set[str], modules: set[str], tmp_path: Path
) -> None:
    """Imports in blocks, dotted names in sentences, modules that the manual documents whole."""
    path = tmp_path / "page.md"
    path.write_text(text)
    found = shown.shown([path])
    assert (found.names, found.modules - {"ckptfs"}) == (names, modules - {"ckptfs"})


def test_a_change_would_be_named() -> None:
    """Gone, different and new are distinguished, with both texts."""
    before = {"f": "f(a, b)", "g": "g()", "x y": "x y: 1"}
    now = {"f": "f(a)", "x y": "x y: 1", "h": "h: int"}
    assert page.differences(before, now) == [
        "vanished: g()",
        "changed: f(a, b)\n     now: f(a)",
        "new: h: int",
    ]
