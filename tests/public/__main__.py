"""``make public``: writes docs/reference/public.md again, and says what it changed."""

from __future__ import annotations

from tests.public.page import SECTIONS, differences, read, write
from tests.public.shown import PAGE


def main() -> None:
    """Look at what is printed before it is committed: somebody's program may use it."""
    before = read() if PAGE.exists() else {}
    write()
    after = read()
    for section in SECTIONS:
        for line in differences(before.get(section.title, {}), after[section.title]):
            print(f"{section.title}: {line}")


if __name__ == "__main__":
    main()
