"""docs/nfs.md: each test that it links to exists, and those of the campaign alone are marked as such."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/nfs.md"
_LINK = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)#(\w+)\)(†?)")


def campaign_tests(source: str) -> dict[str, bool]:
    """Each test of a module, and whether it has the marker ``campaign`` as a whole. Pure."""
    module = ast.parse(source)
    marks = [
        ast.unparse(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    everywhere = any("pytest.mark.campaign" in mark for mark in marks)
    return {
        node.name: everywhere
        or "pytest.mark.campaign" in [ast.unparse(each) for each in node.decorator_list]
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def wrong_links(text: str) -> list[str]:
    """What is wrong with the links of a page to tests; nothing where all is well."""
    wrong = []
    for path, name, dagger in _LINK.findall(text):
        file = PAGE.parents[1] / path
        tests = campaign_tests(file.read_text()) if file.exists() else {}
        if name not in tests:
            wrong.append(f"{path}#{name} is not there")
        elif tests[name] != bool(dagger):
            wrong.append(f"{path}#{name} is {'' if tests[name] else 'not '}of the campaign")
    return wrong


def test_every_link_is_a_test_and_says_whether_it_is_of_the_campaign() -> None:
    """The page shows which of its claims each run of the suite tries, and which the campaign alone."""
    text = PAGE.read_text()
    assert len(_LINK.findall(text)) == text.count("](../tests/") > 40
    assert wrong_links(text) == []


def test_a_wrong_link_is_found() -> None:
    """A test that is not there, a mark too few and a mark too many."""
    here = "](../tests/nfs/test_needs.py#test_n2_an_overwritten_run_survives_the_death_of_a_node)"
    there = "](../tests/nfs/test_page.py#test_a_wrong_link_is_found)"
    assert wrong_links(f"[a{here}† [b{there}") == []
    assert len(wrong_links(f"[a{here} [b{there}† [c](../tests/nfs/test_page.py#test_none)")) == 3
