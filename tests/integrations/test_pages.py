"""Every example has its page, is in the index, and is as short as was promised."""

from __future__ import annotations

import pytest

from tests.integrations.running import EXAMPLES

NAMES = sorted(path.name.removesuffix("_example.py") for path in EXAMPLES.glob("*_example.py"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_stands_on_its_page_and_in_the_index(name: str) -> None:
    """Under 40 lines; linked from its page and, with that page, from the index."""
    example = f"{name}_example.py"
    assert len((EXAMPLES / example).read_text().splitlines()) < 40
    assert f"({example})" in (EXAMPLES / f"{name}.md").read_text()
    index = (EXAMPLES / "README.md").read_text()
    assert f"({example})" in index
    assert f"({name}.md)" in index
